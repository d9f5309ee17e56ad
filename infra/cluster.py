"""Cluster: what `pulumi up` leaves behind, and all that other rooms know of it.

`pulumi stack output cluster --json` prints one; a file with the same keys, written by hand, describes machines that are
there already. Nothing in it is secret. A reader refuses a version that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from infra.problems import InfraError, problem, problems_of

VERSION = 1


class Section(BaseModel):
    """Base of every table: unknown keys are errors, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Nodes(Section):
    """How to find the nodes: by their Auto Scaling groups, by their HyperPod cluster, or by address; exactly one of these."""

    auto_scaling_groups: tuple[str, ...] = ()
    hyperpod_cluster: str | None = None
    kubernetes_label: str | None = None
    """Beside `hyperpod_cluster` of backend `hyperpod-eks`: the label that selects the same nodes through Kubernetes."""
    addresses: tuple[str, ...] = ()
    """Host names or addresses of machines that are there already."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = ("auto_scaling_groups", "hyperpod_cluster", "addresses")
        found = [way for way in ways if getattr(self, way)]
        if len(found) != 1:
            said = f"has {' and '.join(found)}" if found else "names no nodes"
            raise ValueError(f"{said}; allowed: exactly one of {', '.join(ways)}")
        if self.kubernetes_label and not self.hyperpod_cluster:
            raise ValueError("has kubernetes_label without hyperpod_cluster, beside which alone it has a meaning")
        return self


class Reach(Section):
    """How to log in."""

    via: Literal["ssh", "ssm"]
    user: str = "ubuntu"
    key: str | None = None
    """SSH: path of the private key on the operator's machine; never the key itself."""
    jump: str | None = None
    """SSH: `user@host` to go through."""
    ssm_target: str | None = None
    """Format of the SSM target: `{instance_id}`, for HyperPod `sagemaker-cluster:<id>_{group}-{instance_id}`."""


class NodeGroup(Section):
    """`gpus`, `efa` and `nvme` count devices of one node."""

    type: str
    count: Annotated[int, Field(ge=0)]
    role: Literal["worker", "controller", "login"] = "worker"
    gpus: Annotated[int, Field(ge=0)] = 0
    accelerator: str | None = None
    efa: Annotated[int, Field(ge=0)] = 0
    nvme: Annotated[int, Field(ge=0)] = 0


class Stripe(Section):
    """One `lfs setstripe` for a folder of the file system."""

    path: str
    options: tuple[str, ...]
    why: str


class FileSystem(Section):
    """An FSx for Lustre file system and what clients need to mount and tune it."""

    id: str
    dns_name: str
    mount_name: str
    path: str
    efa: bool = False
    throughput_mb_s: float | None = None
    stripes: tuple[Stripe, ...] = ()
    parameters: Mapping[str, str] = {}
    """`lctl set_param` after the mount."""
    modules: Mapping[str, str] = {}
    """Options of kernel modules, before the mount."""


class HomeSystem(Section):
    """An OpenZFS file system for homes, mounted over NFS."""

    id: str
    dns_name: str
    path: str


class BucketNames(Section):
    data: str | None = None
    checkpoints: str | None = None
    lifecycle: str | None = None


class Paid(Section):
    """How the workers are paid for, and when that ends."""

    mode: Literal["on-demand", "spot", "reservation", "capacity-block", "training-plan", "mixed", "owned"]
    ends_at: AwareDatetime | None = None


class Cluster(Section):
    version: Literal[1] = 1
    name: str
    backend: Literal["hyperpod-slurm", "hyperpod-eks", "ec2", "machines"]
    """`machines` are nodes that are there already."""
    region: str | None = None
    zone_id: str | None = None
    nodes: Nodes
    reach: Reach
    groups: Mapping[str, NodeGroup]
    lustre: FileSystem | None = None
    home: HomeSystem | None = None
    buckets: BucketNames = BucketNames()
    runs_uri: str
    """`s3://bucket/prefix/` or a folder that every node sees."""
    capacity: Paid
    image_repository: str | None = None
    role_arn: str | None = None
    """The role that nodes have."""
    interruption_queue: str | None = None
    """URL of the queue that spot notices, rebalance recommendations and ends of capacity blocks arrive at."""
    log_group: str | None = None
    kubernetes_cluster: str | None = None
    """Name of the EKS cluster."""


def parse(value: object, source: str = "cluster") -> Cluster:
    """The Cluster in a decoded JSON object; InfraError with one line a problem, paths under `source`."""
    if not isinstance(value, Mapping):
        raise InfraError(f"{source} is no table; fix: give the output of `pulumi stack output cluster --json`")
    version = value.get("version", VERSION)
    if version != VERSION:
        fix = "use the Lustrain that made the cluster, or `pulumi up` with this one"
        raise InfraError(problem(f"{source}.version", version, "not known here", allowed=str(VERSION), fix=fix))
    try:
        return Cluster.model_validate(dict(value))
    except ValidationError as error:
        raise InfraError(problems_of(error, Cluster, source)) from None


def read(path: Path) -> Cluster:
    """The Cluster in a JSON file."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")), path.name)
    except OSError as error:
        raise InfraError(problem("cluster file", str(path), error.strerror or "cannot be read")) from None
    except ValueError as error:
        raise InfraError(problem("cluster file", str(path), f"is no JSON: {error}")) from None


def to_json(cluster: Cluster) -> dict[str, Any]:
    """The cluster as plain JSON data, unset keys left out."""
    return cluster.model_dump(mode="json", exclude_none=True)
