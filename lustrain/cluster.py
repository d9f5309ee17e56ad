"""Cluster: what `pulumi up` leaves behind, and all that other rooms know of it.

`pulumi stack output cluster --json` prints one; a file with the same keys, written by hand, describes machines that are
there already. Nothing in it is secret. A reader refuses a version that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from lustrain.problem import UserError, problem
from lustrain.schema import Section, like, problems_of

VERSION = 1

Backend = Literal["hyperpod-slurm", "hyperpod-eks", "ec2", "machines"]
"""`machines` are nodes that are there already."""
Profile = Literal["efa-gpu", "gaudi", "cpu", "login"]
"""Sets of settings that a node can have."""


def _ssm_target(form: str) -> str:
    """Check that a format gives each node its own target, and holds nothing but text and the allowed names."""
    allowed = "allowed: text with {instance_id} and, for HyperPod, {group}"
    try:
        parts = [(name, form_of or "", conversion) for _, name, form_of, conversion in Formatter().parse(form)]
    except ValueError as error:
        raise ValueError(f"is not a format: {error}; {allowed}") from None
    fields = {field for field in parts if field[0] is not None}
    if odd := sorted(f"{{{field[0]}}}" for field in fields - {("instance_id", "", None), ("group", "", None)}):
        raise ValueError(f"holds {', '.join(odd)}, which is not known here; {allowed}")
    if ("instance_id", "", None) not in fields:
        raise ValueError(f"is the same for every node; {allowed}")
    return form


AbsolutePath = Annotated[str, like(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+", "a plain absolute path", "/fsx")]
"""Of a file system: it becomes the name and the text of systemd units, and words of commands."""
MountWord = Annotated[
    str, like(r"[A-Za-z0-9._:-]*", "a name that can be mounted", "fs-0123.fsx.us-east-1.amazonaws.com")
]
"""Empty in a plan, where the file system is not made yet."""
Name = Annotated[str, like(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a plain name", "train")]
User = Annotated[str, like(r"[A-Za-z_][A-Za-z0-9._-]*", "a user's name", "ubuntu")]
Jump = Annotated[str, like(r"([A-Za-z_][\w.-]*@)?[A-Za-z0-9\[][\w.:\]-]*", "a host to go through", "ubuntu@bastion")]
_HOST = r"\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*|[A-Za-z0-9_][\w.-]*"
Machine = Annotated[
    str,
    like(rf"([A-Za-z0-9_][\w.-]*@)?({_HOST})(:\d{{1,5}})?", "an address of a machine", "10.0.0.5 or ubuntu@node1:2222"),
]
"""A host name, or an address of IPv4 or IPv6: it becomes the node's name, and a word of commands and lists."""
Bucket = Annotated[str, like(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "a bucket's name", "team-checkpoints")]
InstanceId = Annotated[str, like(r"i-[0-9a-f]{8,17}", "the id of an EC2 instance", "i-0123456789abcdef0")]
SlurmName = Annotated[str, like(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "a name of Slurm", "research")]
"""Of an account or a QoS."""
KubernetesName = Annotated[str, like(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "a name of Kubernetes", "research")]
"""A DNS label: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/#dns-label-names"""
Place = Annotated[str, like(r"[^\s-]\S*", "an address or a folder", "s3://team-checkpoints/runs/")]
Repository = Annotated[
    str, like(r"[\w.:\[\]-]+(/[a-z0-9]+([._-]+[a-z0-9]+)*)+", "a repository", "registry.example.com/team/trainer")
]


class Nodes(Section):
    """How to find the nodes: by their Auto Scaling groups, by their HyperPod cluster, or by address; exactly one of these."""

    auto_scaling_groups: tuple[str, ...] = ()
    instances: tuple[InstanceId, ...] = ()
    """Beside `auto_scaling_groups`: EC2 instances that are in none, as Slurm's controller."""
    hyperpod_cluster: str | None = None
    kubernetes_label: str | None = None
    """Beside `hyperpod_cluster` of backend `hyperpod-eks`: the label that selects the same nodes through Kubernetes."""
    addresses: tuple[Machine, ...] = ()
    """Host names or addresses of machines that are there already."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = ("auto_scaling_groups", "hyperpod_cluster", "addresses")
        named = [way for way in ways if getattr(self, way)]
        if len(named) != 1:
            problem = f"has {' and '.join(named)}" if named else "names no nodes"
            raise ValueError(f"{problem}; allowed: exactly one of {', '.join(ways)}")
        if self.instances and not self.auto_scaling_groups:
            raise ValueError("has instances without auto_scaling_groups, beside which alone they have a meaning")
        if self.kubernetes_label and not self.hyperpod_cluster:
            raise ValueError("has kubernetes_label without hyperpod_cluster, beside which alone it has a meaning")
        return self


class Access(Section):
    """This is how to log in."""

    via: Literal["ssh", "ssm"]
    user: User = "ubuntu"
    key: str | None = None
    """SSH: path of the private key on the operator's machine; never the key itself."""
    jump: Jump | None = None
    """SSH: `user@host` to go through."""
    ssm_target: Annotated[str, AfterValidator(_ssm_target)] | None = None
    """Format of the SSM target: `{instance_id}`, for HyperPod `sagemaker-cluster:<id>_{group}-{instance_id}`."""


class Capacity(Section):
    """This is how nodes are paid for, and when that ends."""

    mode: Literal["on-demand", "spot", "reservation", "capacity-block", "training-plan", "mixed", "owned"]
    ends_at: AwareDatetime | None = None


class Taint(Section):
    """A taint of Kubernetes: pods that do not tolerate it stay away from the node."""

    key: str
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


class NodeGroup(Section):
    """`gpus`, `efa` and `nvme` count devices of one node."""

    type: str
    count: Annotated[int, Field(ge=0)]
    role: Literal["worker", "controller", "login"] = "worker"
    gpus: Annotated[int, Field(ge=0)] = 0
    accelerator: str | None = None
    efa: Annotated[int, Field(ge=0)] = 0
    nvme: Annotated[int, Field(ge=0)] = 0
    lustre_efa: Annotated[int, Field(ge=0)] = 0
    """EFA interfaces of a node that LNet gets; 0 is Lustre over TCP."""
    other_types: tuple[str, ...] | None = None
    """Further types that a node may have, each with the same devices but for the number of its local drives."""
    by_hand: bool | None = None
    """The counts were described by hand, and hold where the node agent's own table knows the type otherwise or not at all."""
    partition: Name | None = None
    """Slurm partition of the group's nodes."""
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    """Of the group's nodes in Kubernetes."""
    capacity: Capacity | None = None
    """None: as the whole cluster."""


class Stripe(Section):
    """One `lfs setstripe` for a folder of the file system."""

    path: AbsolutePath
    options: tuple[str, ...]
    why: str


class FileSystem(Section):
    """An FSx for Lustre file system and what clients need to mount and tune it."""

    id: str
    dns_name: MountWord
    mount_name: MountWord
    path: AbsolutePath
    efa: bool = False
    throughput_mb_s: float | None = None
    stripes: tuple[Stripe, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_settings(cls, value: Any) -> Any:
        """Drop the settings of clients that outputs of older clusters hold; the node agent has its own."""
        if not isinstance(value, Mapping):
            return value
        return {key: item for key, item in value.items() if key not in ("parameters", "modules")}


class HomeSystem(Section):
    """A file system for homes, OpenZFS or EFS, mounted over NFS."""

    id: str
    dns_name: MountWord
    path: AbsolutePath
    options: tuple[str, ...] = ()
    """Of the mount, as mount(8) has them; empty where others than Lustrain mount it."""


class S3Mount(Section):
    """A bucket, or a prefix in it, that nodes see as a folder: files are read there and written once, never renamed."""

    path: AbsolutePath
    bucket: Bucket
    prefix: Annotated[str, like(r"([A-Za-z0-9._=-]+/)*", "a prefix that ends in a slash", "corpus/v1/")] = ""


class BucketNames(Section):
    data: Bucket | None = None
    checkpoints: Bucket | None = None
    lifecycle: Bucket | None = None


PLANNED_SLURM_KEYS = frozenset(
    {
        "authtype", "clustername", "downnodes", "frontendname", "grestypes", "include", "nodename", "nodeset", "partitionname",
        "slurmctldhost", "slurmctldlogfile", "slurmdlogfile", "slurmdspooldir", "slurmduser", "slurmuser", "statesavelocation",
        "switchname",
    }
)  # fmt: skip
"""Keys of slurm.conf that follow from the Cluster and its nodes, or that the node agent's steps depend on."""


def slurm_settings(settings: Mapping[str, str]) -> Mapping[str, str]:
    """Check keys and values of slurm.conf; https://slurm.schedmd.com/slurm.conf.html"""
    for key, value in settings.items():
        if not re.fullmatch(r"[A-Za-z]+", key) or key.lower() in PLANNED_SLURM_KEYS:
            raise ValueError(f"has {key}, which is not for setting here; allowed: other keys of slurm.conf")
        if not re.fullmatch(r"[!-~]+( [!-~]+)*", value) or "#" in value:
            raise ValueError(f"has a value of {key} that is not one line of plain text; allowed: text without #")
    return settings


class Accounting(Section):
    """slurmdbd and its database on the machine of Slurm's controller."""

    keep_months: Annotated[int, Field(ge=1, le=120)] = 12
    """Older records of jobs are dropped."""


def other_slurmdbd(settings: Mapping[str, str]) -> str | None:
    """Return the key of slurm.conf by which the settings choose what keeps records; None where none does."""
    return next((key for key in settings if key.lower() in ("accountingstoragetype", "accountingstoragehost")), None)


class Slurm(Section):
    """The Slurm that jobs are given to."""

    controller_group: Name | None = None
    """The group whose nodes have `sbatch`."""
    account: SlurmName | None = None
    qos: SlurmName | None = None
    controller: Annotated[str, like(r"[A-Za-z0-9_][\w.:-]*", "a machine's name or address", "10.0.0.5")] | None = None
    """The machine on which slurmctld runs: with `machines`, where `fab slurm-up` puts it, by its name or address in `nodes`;
    with `ec2`, its private address. None: this Slurm is not ours."""
    controller_runs_jobs: bool = False
    """The controller's machine is also a node for jobs, as where there are only two."""
    settings: Annotated[Mapping[str, str], AfterValidator(slurm_settings)] = {}
    """Further keys of slurm.conf, or other values than Lustrain plans."""
    accounting: Accounting | None = None
    """With `machines`: `fab slurm-up` makes it on the controller, for `sacct`, accounts and limits; `{}` turns it on. Off by
    default: it is one more database to keep, and what a run did and cost is in the run itself."""


class Kubernetes(Section):
    """The Kubernetes that jobs are given to, and what they find there."""

    context: (
        Annotated[str, like(r"[^\s-]\S*", "a context", "arn:aws:eks:us-east-1:123456789012:cluster/llm")] | None
    ) = None
    """In the user's kubeconfig; `kubectl config get-contexts` lists them."""
    namespace: KubernetesName = "default"
    service_account: KubernetesName | None = None
    claims: Mapping[AbsolutePath, KubernetesName] = {}
    """Persistent volume claims by the path at which pods get them."""


def _as_text(value: object) -> object:
    """YAML takes `on` for true and digits for a number; settings are compared with what a node says, which is text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value


class Tuning(Section):
    """What node tuning does otherwise than by itself; `node_setup/settings/` holds the settings."""

    profiles: Mapping[str, Profile] = {}
    """By group; nodes of the others go by their hardware and role."""
    settings: Mapping[str, Annotated[str, BeforeValidator(_as_text)]] = {}
    """By a setting's id: another value, or `on` or `off`."""


class Cluster(Section):
    version: Literal[1] = 1
    name: Name
    backend: Backend
    region: str | None = None
    zone_id: str | None = None
    nodes: Nodes
    reach: Access
    groups: Mapping[str, NodeGroup]
    tuning: Tuning = Tuning()
    lustre: FileSystem | None = None
    home: HomeSystem | None = None
    s3_mounts: tuple[S3Mount, ...] = ()
    """With `machines` nothing mounts them: they are named so that no run is put there."""
    buckets: BucketNames = BucketNames()
    runs_uri: Place
    """`s3://bucket/prefix/` or a folder that every node sees."""
    capacity: Capacity
    """Of the workers."""
    slurm: Slurm | None = None
    kubernetes: Kubernetes | None = None
    image_repository: Repository | None = None
    role_arn: str | None = None
    """The role that nodes have."""
    interruption_queue: str | None = None
    """URL of the queue that spot notices, rebalance recommendations and ends of capacity blocks arrive at."""
    log_group: str | None = None
    """What nodes carry into CloudWatch Logs of runs; their CloudWatch agents also take the progress of runs for it."""
    prometheus_port: Annotated[int, Field(ge=1, le=65_000)] | None = None
    """Where the cluster's monitor scrapes the first rank of a node; the ports of its other ranks follow. None: nothing does."""
    kubernetes_cluster: str | None = None
    """Name of the EKS cluster."""

    @model_validator(mode="after")
    def _launchers(self) -> Self:
        if self.slurm and self.backend == "hyperpod-eks":
            raise ValueError(f"has slurm with backend {self.backend}; allowed: hyperpod-slurm, ec2, machines")
        if self.kubernetes and self.backend not in ("hyperpod-eks", "machines"):
            raise ValueError(f"has kubernetes with backend {self.backend}; allowed: hyperpod-eks, machines")
        if self.slurm and self.slurm.controller and self.backend == "hyperpod-slurm":
            raise ValueError(
                f"has slurm.controller with backend {self.backend}, which has a Slurm already; allowed: ec2, machines"
            )
        if self.slurm and self.slurm.accounting and self.backend != "machines":
            raise ValueError(f"has slurm.accounting with backend {self.backend}; allowed: machines")
        if self.slurm and self.slurm.accounting and (key := other_slurmdbd(self.slurm.settings)):
            raise ValueError(f"has slurm.accounting, and {key} in slurm.settings; allowed: one of them")
        controller = self.slurm.controller_group if self.slurm else None
        if controller is not None and controller not in self.groups:
            raise ValueError(
                f"has no group {controller}, which slurm.controller_group names; allowed: {', '.join(self.groups)}"
            )
        return self


def parse(value: object, source: str = "cluster") -> Cluster:
    """Return the Cluster in a decoded JSON object; UserError with one line a problem, paths under `source`."""
    if not isinstance(value, Mapping):
        raise UserError(
            f"{source} is not a table of keys; fix: give the output of `pulumi stack output cluster --json`"
        )
    version = value.get("version", VERSION)
    if version != VERSION:
        fix = "use the Lustrain that made the cluster, or `pulumi up` with this one"
        raise UserError(problem(f"{source}.version", version, "not known here", allowed=str(VERSION), fix=fix))
    try:
        return Cluster.model_validate(dict(value))
    except ValidationError as error:
        raise UserError(problems_of(error, Cluster, source)) from None


def read(path: Path) -> Cluster:
    """Return the Cluster in a JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(problem("cluster file", str(path), error.strerror or "cannot be read")) from None
    except UnicodeDecodeError:
        raise UserError(problem("cluster file", str(path), "is not UTF-8 text")) from None
    return decoded(text, str(path))


def decoded(text: str, path: str) -> Cluster:
    """Return the Cluster in the JSON text of the file `path`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(problem("cluster file", path, f"is not JSON: {error}")) from None
    except RecursionError:
        raise UserError(problem("cluster file", path, "is not a Cluster: it has too many levels")) from None
    return parse(data, Path(path).name)


def to_json(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as plain JSON data, unset keys left out."""
    return cluster.model_dump(mode="json", exclude_none=True)


def node_document(cluster: Cluster) -> dict[str, Any]:
    """Return what the node agent has to know of its cluster, as plain JSON data; `node_setup/agent/model.py` reads it."""
    paths = tuple(mount.path for mount in cluster.s3_mounts)
    return described(cluster.name, cluster.backend, cluster.groups, cluster.lustre, cluster.tuning, paths, cluster.home)


def described(
    name: str,
    backend: Backend,
    groups: Mapping[str, NodeGroup],
    lustre: FileSystem | None,
    tuning: Tuning,
    s3_mounts: Sequence[str] = (),
    home: HomeSystem | None = None,
) -> dict[str, Any]:
    """Build the node document from its parts.

    Except for `machines` nothing in it exists only after the deployment: the lifecycle bundle, which is written before,
    holds the same. How many nodes a group has is not in it, so that another count does not make another bundle; nor are the
    file systems on EKS, where pods mount them and a node has them nowhere.
    """
    if backend == "hyperpod-eks":
        lustre = home = None
    known = {"type", "other_types", "role", "gpus", "efa", "nvme", "lustre_efa", "by_hand"}
    shown = {"path", "efa", "throughput_mb_s", "stripes"}
    mounted_by_agent = lustre if backend == "machines" else None
    return {
        "version": VERSION,
        "cluster": name,
        "backend": backend,
        "groups": {
            key: group.model_dump(mode="json", include=known, exclude_none=True) for key, group in groups.items()
        },
        "lustre": lustre.model_dump(mode="json", include=shown) if lustre else None,
        "mount": mounted_by_agent and mounted_by_agent.model_dump(include={"dns_name", "mount_name"}),
        "tuning": tuning.model_dump(mode="json"),
        **({"s3_mounts": list(s3_mounts)} if s3_mounts else {}),
        **({"home": home.model_dump(mode="json", include={"path", "options"})} if home else {}),
    }
