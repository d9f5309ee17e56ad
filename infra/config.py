"""ClusterSpec: what a user writes under `lustrain:cluster` in Pulumi.<stack>.yaml, strict and frozen.

Types, spelling and the form of single values are judged here; what needs two values or a fact about AWS is a rule of
`infra.preflight`. Sizes carry their unit in the name: `_gib` is a power of two, `_tib` is what FSx calls TiB
(1,000 GiB), `_gb_s` and `_mb_s` are powers of ten a second. The backend decides which keys of a group have a meaning; a
rule says so where one has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from infra.catalog.kubernetes import NEWEST
from infra.cluster import Tuning, like
from infra.problems import InfraError, problems_of

KEY = "lustrain:cluster"
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, Unicode's two line ends, and halves of surrogate pairs."""

Backend = Literal["hyperpod-slurm", "hyperpod-eks", "ec2"]
CapacityMode = Literal["on-demand", "spot", "reservation", "capacity-block", "training-plan"]
GroupRole = Literal["worker", "controller", "login"]
DeepCheck = Literal["InstanceStress", "InstanceConnectivity"]
DraEvent = Literal["NEW", "CHANGED", "DELETED"]
NicPolicy = Literal["addresses", "bandwidth"]


def _id(prefix: str, what: str) -> AfterValidator:
    return like(rf"{prefix}-[0-9a-f]{{8,17}}", f"the id of {what}", f"{prefix}-0123456789abcdef0")


def _at_least_one(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise ValueError("is empty; allowed: one or more")
    return value


Name = Annotated[
    str,
    Field(max_length=40),
    like(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", "a name", "llm-p5 (small letters, digits, single dashes inside)"),
]
"""Fits HyperPod's `[a-zA-Z0-9](-*[a-zA-Z0-9])*`, at most 63, and a bucket's rules with what we add before and after it."""
ZoneId = Annotated[
    str,
    like(
        r"[a-z]{3,4}\d-([a-z0-9]+-)?az\d+",
        "a zone id (us-east-1a is a zone name, another one in each account)",
        "use1-az4",
    ),
]
"""The zone's id, the same in every account."""
Positive = Annotated[int, Field(gt=0)]
Days = Annotated[int, Field(ge=1, le=3650)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
AbsolutePath = Annotated[str, like(r"(/(\.\.?|[A-Za-z0-9_][A-Za-z0-9._-]*))+", "a plain absolute path", "/fsx")]
"""As the Cluster's, but for `..`: that has rules of preflight, which say why."""
PlanArn = Annotated[
    str,
    like(
        r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:training-plan/.+",
        "the ARN of a training plan",
        "arn:aws:sagemaker:us-west-2:123456789012:training-plan/mine",
    ),
]
SubnetId = Annotated[str, _id("subnet", "a subnet")]


class Section(BaseModel):
    """Base of every table: unknown keys are errors, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _printable(cls, value: Any, info: Any) -> Any:
        """No name, path or text of AWS has control characters, and a lone surrogate can be neither printed nor sent."""
        table = "Mapping" in str(cls.model_fields[info.field_name].annotation) and isinstance(value, Mapping)
        items = [*value, *value.values()] if table else value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, str) and (found := UNPRINTABLE.search(item)):
                raise ValueError(f"holds {found[0]!r}, which is not printable; fix: remove it")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_numbers_from_truth(cls, value: Any, info: Any) -> Any:
        """YAML's `count: yes` is a mistake; pydantic would take it as 1."""
        field = cls.model_fields[info.field_name]
        if isinstance(value, bool) and "bool" not in str(field.annotation):
            raise ValueError("true/false is not a value here")
        return value


class Capacity(Section):
    """Where a group's machines come from."""

    mode: CapacityMode = "on-demand"
    reservation: Annotated[str, _id("cr", "a capacity reservation")] | None = None
    """Id of an EC2 capacity reservation or capacity block. A block is bought by hand: paid at once and never refunded, and
    the AWS provider forgets that it paid (https://github.com/hashicorp/terraform-provider-aws/issues/46829)."""
    create: bool = False
    """`reservation` only: make a targeted one for `count` instances. It is billed from then on, protected and retained."""
    training_plan: PlanArn | None = None
    zone_id: ZoneId | None = None
    """Where the reservation, block or plan lies, if you know: compared with `zone_id` before anything is made."""
    size: Positive | None = None
    """How many instances it holds, if you know."""
    placement_group: str | None = None
    """`reservation` only: name of the cluster placement group that the reservation was made in."""
    ends_at: AwareDatetime | None = None
    """When the reservation, block or plan ends (ISO 8601 with zone); set the trainer's `interrupt.deadline` to it, nothing
    hands it over. With `create` the reservation is made to end then."""


class Taint(Section):
    key: str
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


class Group(Section):
    """Machines of one kind; with `ec2` and `hyperpod-eks` all are workers."""

    name: Name
    instance_type: Annotated[str, like(r"(ml\.)?[a-z0-9-]+\.[a-z0-9-]+", "an instance type", "p5.48xlarge")]
    """EC2's name (`p5.48xlarge`); HyperPod's `ml.` is added where it belongs."""
    count: Annotated[int, Field(ge=0, le=6758)]
    """HyperPod's upper limit, from its API model."""
    min_count: Annotated[int, Field(ge=0)] | None = None
    """HyperPod: go on with this many when not all come. EC2: none; an Auto Scaling group keeps, and bills, what it got while
    it tries for the rest, and an alarm tells when some are missing for long."""
    role: GroupRole = "worker"
    capacity: Capacity = Capacity()
    image_id: Annotated[str, _id("ami", "an image")] | None = None
    """EC2: the AMI; default: AWS's deep-learning base AMI for the type's architecture, as its SSM parameter resolves."""
    root_volume_gib: Annotated[int, Field(ge=100, le=16384)] = 500
    """EC2: the root disk. HyperPod fixes that one's size; there it is the EBS volume beside it, mounted at /opt/sagemaker."""
    threads_per_core: Literal[1, 2] = 1
    partition: Name | None = None
    """Slurm partition; default: the group's name."""
    deep_health_checks: tuple[DeepCheck, ...] = ("InstanceStress", "InstanceConnectivity")
    """HyperPod, groups with accelerators: run before a node joins."""
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()

    @property
    def ec2_type(self) -> str:
        return self.instance_type.removeprefix("ml.")

    @property
    def hyperpod_type(self) -> str:
        return f"ml.{self.ec2_type}"


class ExistingNetwork(Section):
    """A network that is there already; nothing in it is changed."""

    vpc_id: Annotated[str, _id("vpc", "a VPC")]
    compute_subnet_id: SubnetId
    """Private, in the cluster's zone."""
    control_subnet_ids: tuple[SubnetId, ...] = ()
    """`hyperpod-eks`: two or more, in different zones."""
    compute_cidr: str | None = None
    """Lets preflight count addresses without asking AWS."""


class Network(Section):
    cidr: str = "10.0.0.0/16"
    compute_prefix: Annotated[int, Field(ge=16, le=28)] = 18
    """Length of the compute subnet's prefix: /18 has 16,379 usable addresses."""
    second_zone_id: ZoneId | None = None
    """`hyperpod-eks`: the control plane needs subnets in two zones."""
    existing: ExistingNetwork | None = None
    nat: bool = True
    closed: bool = False
    """No way to the internet: no NAT, interface endpoints for what nodes need."""
    flow_logs: bool = False
    s3_buckets: tuple[str, ...] = ()
    """Further buckets that nodes read, through the S3 gateway endpoint: it refuses those that nobody named."""
    nic_policy: NicPolicy = "addresses"


class Association(Section):
    """A data repository association: a folder of the file system and an S3 prefix that mirror each other."""

    path: AbsolutePath
    bucket: str
    """`data` or `checkpoints` for the cluster's own, otherwise a bucket's name in the same region."""
    prefix: str = ""
    import_events: tuple[DraEvent, ...] = ("NEW", "CHANGED", "DELETED")
    export_events: tuple[DraEvent, ...] = ()
    chunk_mib: Annotated[int, Field(ge=1, le=512_000)] = 256
    """Stripe count of imported files is size / chunk, not what `lfs setstripe` says."""


class ExistingLustre(Section):
    id: Annotated[str, _id("fs", "a file system")]
    dns_name: str
    mount_name: Annotated[str, like(r"[A-Za-z0-9_-]{1,8}", "a mount name", "fsx or abcd1234")]
    security_group_id: Annotated[str, _id("sg", "a security group")]
    efa: bool = False


class Lustre(Section):
    """An FSx for Lustre file system: a wish (`throughput_gb_s`, `capacity_tib`) that the planner turns into the smallest
    legal one, or exactly `capacity_gib` at `per_tib_mb_s`."""

    throughput_gb_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    capacity_tib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    capacity_gib: Positive | None = None
    per_tib_mb_s: Positive | None = None
    type: Literal["ssd", "intelligent-tiering"] = "ssd"
    read_cache_gib: Positive | None = None
    """Intelligent-Tiering only; default: the smallest."""
    efa: bool | None = None
    """Default: on where a group's type has EFA and the wish reaches the smallest EFA-enabled system."""
    metadata_iops: Positive | None = None
    """Default: AUTOMATIC on SSD."""
    compression: Literal["LZ4", "NONE"] = "LZ4"
    mount_path: AbsolutePath = "/fsx"
    backup_days: Annotated[int, Field(ge=0, le=90)] = 0
    kms_key: str | None = None
    associations: tuple[Association, ...] = ()
    existing: ExistingLustre | None = None


class Home(Section):
    """An FSx for OpenZFS file system for home folders."""

    capacity_gib: Annotated[int, Field(ge=64, le=524_288)] = 256
    throughput_mb_s: Positive = 160
    mount_path: AbsolutePath = "/home"
    """On EC2 what the image has there is copied before it is hidden."""


class Storage(Section):
    lustre: Lustre | None = None
    home: Home | None = None


class Buckets(Section):
    """The cluster makes `data`, `checkpoints` and `lifecycle`, or uses a bucket that is named here."""

    data: str | None = None
    checkpoints: str | None = None
    lifecycle: str | None = None
    kms_key: str | None = None
    runs_prefix: Annotated[str, like(r"([A-Za-z0-9._-]+/)+", "a prefix that ends in a slash", "runs/")] = "runs/"
    ephemeral_days: Days = 7
    """Objects under `ephemeral/` expire."""
    milestone_days: Annotated[int, Field(ge=30)] = 30
    """Objects under `milestone/` move to Glacier Instant Retrieval."""
    noncurrent_days: Days = 3


class Repository(Section):
    keep_last: Positive = 200
    existing: (
        Annotated[
            str,
            Field(max_length=255),
            like(
                r"[A-Za-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+(:[\w.-]+)?(@sha256:[0-9a-f]{64})?",
                "a repository's address, without https://",
                "123456789012.dkr.ecr.us-east-1.amazonaws.com/train",
            ),
        ]
        | None
    ) = None
    """URL of a repository to use instead."""


class Budget(Section):
    monthly_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    emails: Annotated[tuple[str, ...], Field(min_length=1, max_length=10)]


class Alarms(Section):
    emails: tuple[str, ...] = ()
    lustre_free_fraction: Fraction = 0.15
    nat_gb_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0


class Observability(Section):
    log_days: Days = 30
    dashboard: bool = True
    prometheus: bool = False


class Access(Section):
    """Who reaches the nodes; SSM by default, nothing is open to the world."""

    user: str = "ubuntu"
    ssh_key: (
        Annotated[
            str, like(r"[!-~]([ -~]{0,253}[!-~])?", "the name of a key pair, 255 characters of ASCII at most", "mine")
        ]
        | None
    ) = None
    """EC2: name of a key pair, for SSH through SSM or a VPN."""
    admin_roles: tuple[
        Annotated[
            str,
            like(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", "the ARN of a role", "arn:aws:iam::123456789012:role/admin"),
        ],
        ...,
    ] = ()
    """`hyperpod-eks`: roles that become cluster administrators."""


class Slurm(Section):
    config_strategy: Literal["Managed", "Merge", "Overwrite"] = "Managed"


class Eks(Section):
    version: Annotated[str, like(r"1\.\d{2}", "a Kubernetes version", NEWEST)] = NEWEST
    """Default: the newest that both EKS and HyperPod are known to take (`infra.catalog.kubernetes`)."""
    upgrade_policy: Literal["STANDARD", "EXTENDED"] = "STANDARD"
    """At the end of standard support EKS upgrades the control plane by itself (`STANDARD`), or lets it stay for a year at six
    times the price (`EXTENDED`)."""
    tiered_memory_percent: Annotated[int, Field(ge=20, le=100)] | None = None
    """Tiered checkpoint storage: share of a node's memory."""
    public_access_cidrs: tuple[str, ...] = ()
    """IPv4 ranges on the internet from which helm and kubectl reach the Kubernetes API; empty: only from inside the VPC."""
    karpenter: bool | None = None
    """HyperPod's own Karpenter: adds and removes nodes as pods need them. `false` turns it off where it was on."""
    task_governance: bool = False
    """EKS add-on: queues, quotas and priorities for teams; it brings Kueue."""
    training_operator: bool = False
    """EKS add-on: restarts the failed processes of a job; it brings cert-manager, which it needs."""


class Suppression(Section):
    code: Annotated[str, like(r"[A-Z0-9]{2,4}-\d{3}", "a finding's code", "NET-003")]
    reason: Annotated[str, Field(min_length=10)]


class ClusterSpec(Section):
    """One cluster."""

    name: Name
    backend: Backend
    zone_id: ZoneId
    groups: Annotated[tuple[Group, ...], AfterValidator(_at_least_one)]
    network: Network = Network()
    storage: Storage = Storage()
    buckets: Buckets = Buckets()
    repository: Repository = Repository()
    observability: Observability = Observability()
    alarms: Alarms = Alarms()
    access: Access = Access()
    slurm: Slurm = Slurm()
    eks: Eks = Eks()
    tuning: Tuning = Tuning()
    budget: Budget | None = None
    job_ends_at: AwareDatetime | None = None
    """When the training should be done, if you know: compared with the end of a capacity block."""
    runs_uri: str | None = None
    """Where runs go; default: `runs_prefix` in the checkpoints bucket."""
    tags: Mapping[str, str] = {}
    suppress: tuple[Suppression, ...] = ()
    """Findings of preflight to silence, each with its reason."""

    @property
    def workers(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.role == "worker")

    @property
    def hyperpod(self) -> bool:
        return self.backend != "ec2"

    @property
    def ends_at(self) -> datetime | None:
        """When the first reservation, block or plan of a group ends; set the trainer's `interrupt.deadline` to it."""
        return min((group.capacity.ends_at for group in self.groups if group.capacity.ends_at), default=None)


def parse(value: object) -> ClusterSpec:
    """The spec in `value` (what `pulumi config` holds); InfraError lists every problem, each with its path."""
    if not isinstance(value, Mapping):
        raise InfraError(f"{KEY} is missing or no table; fix: copy one of infra/Pulumi.*.yaml and edit it")
    try:
        return ClusterSpec.model_validate(dict(value))
    except ValidationError as error:
        raise InfraError(problems_of(error, ClusterSpec, KEY)) from None
