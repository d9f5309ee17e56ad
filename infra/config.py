"""ClusterSpec: what a user writes under `lustrain:cluster` in Pulumi.<stack>.yaml, strict and frozen.

Types, spelling and the form of single values are judged here; what needs two values or a fact about AWS is a rule of
`infra.preflight`. Sizes carry their unit in the name: `_gib` is a power of two, `_tib` is what FSx calls TiB
(1,000 GiB), `_gb_s` and `_mb_s` are powers of ten a second. The backend decides which keys of a group have a meaning; a
rule says so where one has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator

from infra.catalog.instances import Instance, instance
from infra.catalog.kubernetes import NEWEST
from infra.groups import Capacity as Capacity
from infra.groups import CapacityMode as CapacityMode
from infra.groups import Group as Group
from infra.groups import GroupRole as GroupRole
from infra.instance_types import InstanceType
from infra.section import Name, Positive, Time, TypeName, ZoneId, id_of
from lustrain.cluster import Accounting, Bucket, SlurmName, Tuning, slurm_settings
from lustrain.problem import UserError
from lustrain.schema import Section, like, problems_of

KEY = "lustrain:cluster"
CONTROLLER = "controller"
"""Group of Slurm's controller on EC2."""
LOGIN = "login"
"""Role of the machines from which people submit jobs to it."""
CONTROLLER_ROOT_GIB = 100
"""The root disk: the image, logs, and what people put into their homes where none are shared."""
MONITOR = "monitor"
"""Name of the machine that scrapes a cluster's nodes."""
MONITOR_ROOT_GIB = 20
"""The image and packages; what is kept lies on the data volume."""

Backend = Literal["hyperpod-slurm", "hyperpod-eks", "ec2"]
DraEvent = Literal["NEW", "CHANGED", "DELETED"]
NicPolicy = Literal["addresses", "bandwidth"]
HomeType = Literal["openzfs", "efs"]
Days = Annotated[int, Field(ge=1, le=3650)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
AbsolutePath = Annotated[str, like(r"(/(\.\.?|[A-Za-z0-9_][A-Za-z0-9._-]*))+", "a plain absolute path", "/fsx")]
"""As the Cluster's, but for `..`: that has rules of preflight, which say why."""
SubnetId = Annotated[str, id_of("subnet", "a subnet")]
RoleArn = Annotated[
    str,
    like(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", "the ARN of a role", "arn:aws:iam::123456789012:role/admin"),
]


def _at_least_one(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise ValueError("is empty; allowed: one or more")
    return value


class ExistingNetwork(Section):
    """A network that is there already; nothing in it is changed."""

    vpc_id: Annotated[str, id_of("vpc", "a VPC")]
    compute_subnet_id: SubnetId
    """Private, in the cluster's zone."""
    control_subnet_ids: tuple[SubnetId, ...] = ()
    """`hyperpod-eks`: two or more, in different zones."""
    zone_subnet_ids: Mapping[ZoneId, SubnetId] = {}
    """Private subnets for groups that name another zone than the cluster's, by zone id."""
    compute_cidr: str | None = None
    """Lets preflight count addresses without asking AWS."""


ProxyUrl = Annotated[
    str,
    like(r"https?://([^\s@/]*@)?[A-Za-z0-9.-]+(:\d{1,5})?/?", "a proxy's address", "http://proxy.example.com:3128"),
]


class Proxy(Section):
    """An HTTP proxy for what nodes reach beyond the VPC. Without user and password: every job on a node could read them."""

    http: ProxyUrl
    https: ProxyUrl | None = None
    """For HTTPS; default: the same."""
    no_proxy: tuple[
        Annotated[str, like(r"[A-Za-z0-9.*:/_-]+", "a host, a suffix or a range", ".example.com")], ...
    ] = ()
    """Further hosts, suffixes and ranges to reach directly; metadata, the VPC and S3 of the region always are."""


class Network(Section):
    cidr: str = "10.0.0.0/16"
    compute_prefix: Annotated[int, Field(ge=16, le=28)] = 18
    """Length of the compute subnet's prefix, in each zone: /18 has 16,379 usable addresses."""
    second_zone_id: ZoneId | None = None
    """`hyperpod-eks`: the control plane needs subnets in two zones."""
    existing: ExistingNetwork | None = None
    nat: bool = True
    closed: bool = False
    """No way to the internet: no NAT, interface endpoints for what nodes need."""
    flow_logs: bool = False
    proxy: Proxy | None = None
    s3_buckets: tuple[str, ...] = ()
    """Further buckets that the nodes' role may read. With `closed` the S3 gateway endpoint refuses all others;
    in an open network nodes also reach buckets that are public or come as presigned URLs."""
    nic_policy: NicPolicy = "addresses"
    security_group_ids: tuple[Annotated[str, id_of("sg", "a security group")], ...] = ()
    """Further groups of an existing network on all interfaces of the nodes, beside the cluster's own. Their rules are yours."""
    allow_from: tuple[
        Annotated[str, like(r"pl-[0-9a-f]{8,17}|[\d.]+/\d{1,2}", "a prefix list or an IPv4 range", "10.20.0.0/16")], ...
    ] = ()
    """Prefix lists (`pl-…`) and IPv4 ranges from which SSH reaches the nodes; empty: from nowhere outside the cluster."""


class Association(Section):
    """A data repository association: a folder of the file system and an S3 prefix that mirror each other."""

    path: AbsolutePath
    bucket: str
    """`data` or `checkpoints` for the cluster's own, otherwise a bucket's name in the same region."""
    prefix: str = ""
    import_events: tuple[DraEvent, ...] = ("NEW", "CHANGED", "DELETED")
    export_events: tuple[DraEvent, ...] = ()
    kms_key: str | None = None
    """ARN of the KMS key that a bucket of yours or of others is encrypted with; preflight prints what its policy needs. Those
    that the cluster makes have `buckets.kms_key`."""
    chunk_mib: Annotated[int, Field(ge=1, le=512_000)] = 256
    """Stripe count of imported files is size / chunk, not what `lfs setstripe` says."""


class ExistingLustre(Section):
    id: Annotated[str, id_of("fs", "a file system")]
    dns_name: str
    mount_name: Annotated[str, like(r"[A-Za-z0-9_-]{1,8}", "a mount name", "fsx or abcd1234")]
    security_group_id: Annotated[str, id_of("sg", "a security group")]
    efa: bool = False


class Lustre(Section):
    """An FSx for Lustre file system: at least `throughput_gb_s` and `capacity_tib`, from which the planner makes the smallest
    legal one, or exactly `capacity_gib` at `per_tib_mb_s`."""

    throughput_gb_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    capacity_tib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    capacity_gib: Positive | None = None
    per_tib_mb_s: Positive | None = None
    type: Literal["ssd", "intelligent-tiering"] = "ssd"
    read_cache_gib: Positive | None = None
    """Intelligent-Tiering only; default: the smallest."""
    efa: bool | None = None
    """Default: on where a group's type has EFA and the size reaches the smallest EFA-enabled system."""
    metadata_iops: Positive | None = None
    """Default: AUTOMATIC on SSD."""
    compression: Literal["LZ4", "NONE"] = "LZ4"
    mount_path: AbsolutePath = "/fsx"
    backup_days: Annotated[int, Field(ge=0, le=90)] = 0
    kms_key: str | None = None
    associations: tuple[Association, ...] = ()
    existing: ExistingLustre | None = None


class ExistingHome(Section):
    """A file system of the user's, of the type that `home.type` says; it is mounted and never changed."""

    id: Annotated[str, id_of("fs", "a file system")]
    dns_name: Annotated[
        str, like(r"[A-Za-z0-9.-]+", "a host's name", "fs-0123456789abcdef0.efs.us-east-1.amazonaws.com")
    ]
    security_group_id: Annotated[str, id_of("sg", "a security group")]


class Home(Section):
    """A file system for home folders: FSx for OpenZFS, or EFS."""

    type: HomeType = "openzfs"
    capacity_gib: Annotated[int, Field(ge=64, le=524_288)] = 256
    """OpenZFS only; EFS grows and shrinks by itself."""
    throughput_mb_s: Positive = 160
    """OpenZFS only."""
    backup: bool = True
    """EFS only: AWS Backup keeps a copy of each day for 35 days. OpenZFS always keeps those of 7 days."""
    infrequent_access_days: Literal[1, 7, 14, 30, 60, 90, 180, 270, 365] | None = 30
    """EFS only: a file that has not been read for so long moves to cheaper storage until its next read; null: never."""
    mount_path: AbsolutePath = "/home"
    """What the image has there is copied before it is hidden."""
    kms_key: str | None = None
    """ARN of the KMS key that homes are encrypted with; default: the service's own key of the account. It cannot be changed
    later."""
    existing: ExistingHome | None = None


class S3Mount(Section):
    """A bucket, or a prefix in it, that every node sees as a folder, by Mountpoint for Amazon S3."""

    bucket: Bucket
    """`data` or `checkpoints` for the cluster's own, otherwise a bucket's name."""
    prefix: Annotated[
        str,
        Field(max_length=900),
        like(r"([A-Za-z0-9._=-]+/)*[A-Za-z0-9._=-]*", "a prefix of letters, digits and ._=-", "corpus/v1/"),
    ] = ""
    path: AbsolutePath
    read_only: bool = True
    """`false`: every user of a node may make and delete files."""
    region: Annotated[str, like(r"[a-z]{2}(-[a-z]+)+-\d", "a region", "us-west-2")] | None = None
    """Of a bucket that is not in the cluster's."""
    kms_key: str | None = None
    """ARN of the KMS key that a bucket of yours or of others is encrypted with. Those that the cluster makes have
    `buckets.kms_key`."""


class Storage(Section):
    lustre: Lustre | None = None
    home: Home | None = None
    s3_mounts: tuple[S3Mount, ...] = ()


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
    """Older images are deleted, also those that a run still needs when a node is replaced: keep more than you push in your
    longest run."""
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
    unread_notices: bool = False
    """Mail when nothing has read a notice of the interruption queue for 10 minutes. Runs read it while they train. Off by
    default: EC2's notices there are those of the whole account, and nodes may be idle."""
    lustre_free_fraction: Fraction = 0.15
    nat_gb_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0
    home_gb_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0
    """EFS only, which bills what is read and written."""
    stalled_minutes: Annotated[int, Field(ge=5, le=1440)] = 30
    """A run that has made no step for so long stands still; more than the longest evaluation, compilation and save."""


class Machine(Section):
    """A machine beside the nodes, on demand."""

    type: TypeName = "m7i.large"
    image_id: Annotated[str, id_of("ami", "an image")] | None = None
    """Default: Ubuntu 24.04 for the type's architecture."""

    def group(self, name: str, role: GroupRole, root_gib: int) -> Group:
        """Return it as a group of one; nodes have larger root disks."""
        facts: Any = {"instance_type": self.type, "image_id": self.image_id, "threads_per_core": 2, "efa": False}
        return Group(name=name, role=role, count=1, **facts).model_copy(update={"root_volume_gib": root_gib})


class Monitor(Machine):
    """The machine that scrapes the cluster's nodes: without an open port, with a data volume that outlives it."""

    disk_gib: Annotated[int, Field(ge=10, le=16384)] = 50
    """Volume of Prometheus' and Grafana's data: gp3's limit. It can grow, never shrink."""
    retention_days: Days = 30
    """How long Prometheus keeps what it scraped, unless the volume fills before. With `amp` the workspace keeps it instead,
    150 days unless you set another
    (https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-workspace-configuration.html)."""


class Observability(Section):
    logs: bool = True
    """Carry logs of nodes and runs, and the progress of runs, to CloudWatch Logs. An existing EKS cluster does that only with
    the add-on amazon-cloudwatch-observability among `eks.existing.addons`."""
    log_days: Days = 30
    dashboard: bool = True
    prometheus: Literal["none", "self", "amp"] = "none"
    """`self`: Prometheus with alert rules on the monitor. `amp`: the monitor scrapes, a workspace of Amazon Managed Service for
    Prometheus keeps and judges. With `hyperpod-eks` there is no monitor: AWS's add-on scrapes into the workspace."""
    grafana: Literal["none", "self", "managed"] = "none"
    """`self`: on the monitor. `managed`: a workspace of Amazon Managed Grafana, with `prometheus: amp`; people sign in by IAM
    Identity Center."""
    monitor: Monitor = Monitor()

    @field_validator("prometheus", mode="before")
    @classmethod
    def _no_switch(cls, value: Any) -> Any:
        """Refuse the switch that it was once, with what to write instead."""
        if isinstance(value, bool):
            fix = "amp, which true once meant" if value else "none"
            raise ValueError(f"is no switch; allowed: none, self, amp; fix: {fix}")
        return value


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
    permissions_boundary: (
        Annotated[
            str,
            like(
                r"arn:aws[a-z-]*:iam::(\d{12}|aws):policy/[\w+=,.@/-]+",
                "the ARN of a managed policy",
                "arn:aws:iam::123456789012:policy/boundary",
            ),
        ]
        | None
    ) = None
    """On every role that the stack makes: none can do more than this policy allows, which must be what they need. The
    deployer's policy then lets no role be made without it."""
    role_path: Annotated[
        str, Field(max_length=400), like(r"/([\w+=,.@-]+/)*", "an IAM path that begins and ends in a slash", "/team/")
    ] = "/"
    """Roles and instance profiles lie under this path and `lustrain/<name>/`."""
    node_role: RoleArn | None = None
    """An existing role for the nodes: the stack makes none for them and changes nothing in this one. `fab node-policy` prints
    what it must trust, hold and allow."""
    instance_profile: (
        Annotated[
            str,
            like(
                r"arn:aws[a-z-]*:iam::\d{12}:instance-profile/[\w+=,.@/-]+",
                "the ARN of an instance profile",
                "arn:aws:iam::123456789012:instance-profile/nodes",
            ),
        ]
        | None
    ) = None
    """EC2: the instance profile that holds `node_role`."""
    admin_roles: tuple[RoleArn, ...] = ()
    """`hyperpod-eks`: roles that become cluster administrators."""


class Boot(Section):
    on_configured: (
        Annotated[str, like(r"[A-Za-z0-9_./-]+", "the path of a script, from the folder infra/", "scripts/ours.sh")]
        | None
    ) = None
    """A script of yours that each node runs once, as root, when all else is set up. It goes into the lifecycle bundle, so that
    everyone who may read that bucket reads it: no secrets. It has 10 minutes; where it fails, the boot of the node fails."""


SchemaName = Annotated[str, like(r"[A-Za-z0-9$_]{1,64}", "a schema's name", "slurm_acct_db")]


class AccountingDatabase(Section):
    """A MySQL database of yours for Slurm's accounting: in RDS or the like, reached from the cluster's security group. HyperPod
    neither makes it nor backs it up
    (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-external-accounting-db-slurm.html)."""

    endpoint: Annotated[
        str,
        Field(max_length=255),
        like(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", "a host's name", "slurm.abc123.us-east-1.rds.amazonaws.com"),
    ]
    secret_arn: Annotated[
        str,
        like(
            r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:.+",
            "the ARN of a secret",
            "arn:aws:secretsmanager:us-east-1:123456789012:secret:slurm-AbCdEf",
        ),
    ]
    """Holds `username` and `password` of a user who may make the schema."""
    port: Annotated[int, Field(ge=1, le=65535)] = 3306
    name: SchemaName | None = None
    """Default: HyperPod's, with the cluster's id in it; clusters that share a history name one."""


class SchedulerDatabase(AccountingDatabase):
    """A MySQL or MariaDB of yours for the records of the stack's own Slurm, in place of one on the controller. slurmdbd on the
    controller reaches it from the cluster's security group, and its role reads the secret."""

    security_group_id: Annotated[str, id_of("sg", "a security group")]
    """Of the database: it has to let the cluster in; the stack does not change it."""
    name: SchemaName | None = None
    """Default: one of the cluster's name. Two clusters cannot share one."""


class SchedulerAccounting(Accounting):
    """slurmdbd on the controller. Without `database` its MariaDB is there too, and lies on the volume of Slurm's state."""

    database: SchedulerDatabase | None = None


class Slurm(Section):
    config_strategy: Literal["Managed", "Merge", "Overwrite"] = "Managed"
    accounting: AccountingDatabase | None = None
    """Default: a MariaDB on the controller, whose records end with that machine. Once set it can never be removed."""


AddonName = Literal[
    "vpc-cni",
    "kube-proxy",
    "eks-pod-identity-agent",
    "coredns",
    "aws-fsx-csi-driver",
    "cert-manager",
    "amazon-cloudwatch-observability",
]


class ExistingEks(Section):
    """An EKS cluster that is there already, in the VPC of `network.existing`. What it has stays as it is: the stack adds access
    entries for `access.admin_roles`, the add-ons that are named here or have a key of their own in `eks`, and HyperPod's
    nodes, which get the security group that EKS made for the cluster beside their own."""

    name: Annotated[
        str, like(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", "the name of an EKS cluster, 100 characters at most", "platform")
    ]
    addons: tuple[AddonName, ...] = ()
    """Add-ons of EKS that the cluster lacks and that the stack puts into it. `fab preflight --online` says which are
    missing. They overwrite no settings, and their software stays when the stack ends."""


class Controller(Machine):
    """The machine of slurmctld, with an address and a volume that outlive it."""

    state_gib: Annotated[int, Field(ge=1, le=16384)] = 20
    """Volume of Slurm's state (queue, running jobs): gp3's limits. It can grow, never shrink."""


class Scheduler(Section):
    """EC2: a Slurm of the stack's own, which nodes of the groups join as they boot."""

    type: Literal["slurm"]
    controller: Controller = Controller()
    settings: Annotated[Mapping[str, str], AfterValidator(slurm_settings)] = {}
    """Further keys of slurm.conf, or other values than Lustrain plans."""
    idle_minutes: Annotated[int, Field(ge=5, le=1440)] = 10
    """How long a machine of a group with `min_count: 0` stays without a job. A job that is requeued waits some two minutes,
    which its nodes should outlast."""
    account: SlurmName | None = None
    """Of jobs that name none, as `qos`."""
    qos: SlurmName | None = None
    accounting: SchedulerAccounting | None = None
    """Records of jobs beyond the queue, for `sacct`, accounts and limits; `{}` turns it on. Off by default: it is one more
    database to keep, and what a run did and cost is in the run itself."""


class Eks(Section):
    existing: ExistingEks | None = None
    version: Annotated[str, like(r"1\.\d{2}", "a Kubernetes version", NEWEST)] = NEWEST
    """Default: the newest that both EKS and HyperPod are known to take (`infra.catalog.kubernetes`) when the cluster is made; a
    running one keeps the version it has until you name one."""
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
    cluster_role: RoleArn | None = None
    """An existing role for the control plane; like the four below, the stack then makes none and changes nothing in this one.
    `fab node-policy --role …` prints what each must trust, hold and allow."""
    storage_role: RoleArn | None = None
    """An existing role for the pods of the FSx CSI driver."""
    operator_role: RoleArn | None = None
    """An existing role for the pods of the training operator."""
    logs_role: RoleArn | None = None
    """An existing role for the pods that carry logs to CloudWatch."""
    metrics_role: RoleArn | None = None
    """An existing role for the pods of the observability add-on, which comes with `observability.prometheus: amp`."""
    karpenter_role: RoleArn | None = None
    """An existing role with which HyperPod's Karpenter adds and removes nodes."""

    @property
    def version_named(self) -> bool:
        """Whether the user wrote the version."""
        return "version" in self.model_fields_set


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
    boot: Boot = Boot()
    slurm: Slurm = Slurm()
    """HyperPod's Slurm."""
    scheduler: Scheduler | None = None
    eks: Eks = Eks()
    instance_types: Mapping[TypeName, InstanceType] = {}
    """Types that `infra/catalog/instances.jsonl` does not know, by EC2's name; one that it knows too is taken from here."""
    tuning: Tuning = Tuning()
    budget: Budget | None = None
    job_ends_at: Time | None = None
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
    def node_groups(self) -> tuple[Group, ...]:
        """The groups that Auto Scaling keeps on EC2: workers, and beside a scheduler logins."""
        return tuple(group for group in self.groups if group.role == "worker" or self.is_login(group))

    def is_login(self, group: Group) -> bool:
        """Return whether people submit jobs from the group's machines to the stack's own Slurm."""
        return group.role == LOGIN and self.controller is not None

    @property
    def controller(self) -> Group | None:
        """Slurm's controller on EC2, as a group of one machine; it is no Auto Scaling group and not among `groups`."""
        if self.scheduler is None or self.hyperpod:
            return None
        return self.scheduler.controller.group(CONTROLLER, "controller", CONTROLLER_ROOT_GIB)

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """The groups, and the controller as one more."""
        return (*self.groups, *filter(None, [self.controller]))

    @property
    def monitor(self) -> Group | None:
        """The machine that scrapes the nodes, as a group of one; it is no node of the cluster and not among `all_groups`."""
        if self.observability.prometheus == "none" or self.backend == "hyperpod-eks":
            return None
        return self.observability.monitor.group(MONITOR, "login", MONITOR_ROOT_GIB)

    def goes_to_zero(self, group: Group) -> bool:
        """Return whether the stack's Slurm makes and ends the group's machines, as jobs need them."""
        return self.controller is not None and group.role == "worker" and group.min_count == 0 < group.count

    def zone_of(self, group: Group) -> str:
        return group.zone_id or self.zone_id

    def type_of(self, group: Group) -> Instance | None:
        """Return the facts of a group's instance type, as `instance_types` describes it or the catalogue knows it; None where
        neither does."""
        described = self.instance_types.get(group.ec2_type)
        return described.instance(group.ec2_type) if described else instance(group.ec2_type)

    def node_of(self, group: Group) -> Instance | None:
        """Return the facts of a group's nodes: of its type, less the EFA that the group leaves off, or that no rank uses on a
        login. HyperPod attaches what it likes."""
        kind = self.type_of(group)
        plain = self.backend == "ec2" and (group.efa is False or group.role == LOGIN)
        return replace(kind, efa=0) if kind and plain else kind

    @property
    def other_zones(self) -> tuple[str, ...]:
        """Zones of groups that are not in the cluster's, in the order of the groups."""
        zones = dict.fromkeys(self.zone_of(group) for group in self.groups)
        return tuple(zone for zone in zones if zone != self.zone_id)

    @property
    def eks_name(self) -> str:
        """Return the name of the EKS cluster that HyperPod's nodes join."""
        return self.eks.existing.name if self.eks.existing else self.name

    @property
    def hyperpod(self) -> bool:
        return self.backend != "ec2"

    @property
    def ends_at(self) -> datetime | None:
        """When the first reservation, block or plan of a group ends; set the trainer's `interrupt.deadline` to it."""
        return min((group.capacity.ends_at for group in self.groups if group.capacity.ends_at), default=None)


def parse(value: object) -> ClusterSpec:
    """Return the spec in `value` (what `pulumi config` holds); UserError lists every problem, each with its path."""
    if not isinstance(value, Mapping):
        raise UserError(f"{KEY} is missing, or not a table of keys; fix: copy one of infra/Pulumi.*.yaml and edit it")
    try:
        return ClusterSpec.model_validate(dict(value))
    except ValidationError as error:
        raise UserError(problems_of(error, ClusterSpec, KEY)) from None
