"""A group on plain EC2, of workers or logins: one launch template, one Auto Scaling group that has all its nodes or is short
of some.

Spot comes from the template's market options, so that one template serves every market; only a group of several types, or
with some nodes on demand, has a mixed-instances policy. Fields that the provider behind pulumi-aws does not know are left out
(placement group by id, bandwidth weighting, secondary interfaces, the group's own instance lifecycle policy).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from infra.catalog.instances import Instance
from infra.config import LOGIN, ClusterSpec, Group, GroupRole
from infra.plan.nodes.capacity import Market, Mix, empty_at, fill_at, market, mix
from infra.plan.nodes.nics import Nic, nics
from infra.plan.place import Place, tags
from lustrain.problem import UserError, problem

GONE_WITHIN = "1h"
"""A group is deleted when its last node is gone, each after its hook; AWS ends those of a large group in turns."""
SUSPENDED = ("AZRebalance",)
"""The group lives in one zone. ReplaceUnhealthy stays on: without it nothing follows a node that spot took
(https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-suspend-resume-processes.html)."""
METRICS = (
    "GroupDesiredCapacity",
    "GroupInServiceInstances",
    "GroupPendingInstances",
    "GroupTerminatingInstances",
    "GroupTotalInstances",
)
ROOT_DEVICE = "/dev/sda1"
"""Root of Ubuntu images, the deep-learning ones among them; a mapping of another name would add a volume instead."""
ROOT_IOPS = 6000
ROOT_MB_S = 500
"""gp3 allows up to 0.25 MiB/s for each of the IOPS (https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html)."""
HOP_LIMIT = 2
"""Two let a container on the node reach the metadata service; more let others reach it
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-options.html)."""
TAGGED = ("instance", "volume", "network-interface")
NEURON = re.compile(r"(trn|inf)\d")
"""Families with AWS's own accelerators; the snapshot lists no devices for some of them."""


@dataclass(frozen=True)
class DefaultImage:
    """An SSM parameter that names the newest image of a kind; `seen` is the day on which AWS was last known to have it."""

    parameter: str
    seen: date


IMAGES = {
    "nvidia": DefaultImage(
        "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id", date(2026, 10, 9)
    ),
    "neuron": DefaultImage("/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id", date(2026, 11, 25)),
    "ubuntu": DefaultImage(
        "/aws/service/canonical/ubuntu/server/22.04/stable/current/{arch}/hvm/ebs-gp2/ami-id", date(2026, 11, 25)
    ),
}
"""AWS's and Canonical's. AWS's bring the EFA driver, that for GPUs the Lustre client too
(https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html); first_boot.sh installs it elsewhere.
Neuron makes none of 22.04 any more. For others 22.04 and not newer: FSx over EFA wants kernel 6.8, which those have; Lustre
clients follow newer kernels with delay.
https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html,
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/dlami/index.html,
https://documentation.ubuntu.com/aws/aws-how-to/instances/find-ubuntu-images/."""
IMAGES_WITH_SLURM = {
    "nvidia": DefaultImage(
        "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id", date(2026, 10, 9)
    ),
    "neuron": IMAGES["neuron"],
    "ubuntu": DefaultImage(
        "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id", date(2026, 11, 26)
    ),
}
"""Of clusters with a scheduler: nodes join it as dynamic nodes, which Slurm knows since 22.05, and Ubuntu 22.04 packages 21.08,
24.04 has 23.11 (https://slurm.schedmd.com/dynamic_nodes.html, https://launchpad.net/ubuntu/+source/slurm-wlm). Their kernel is
too new for AWS's Lustre client: rule SLM-006. The monitor has them too."""
IMAGE_FACTS_LAST = timedelta(days=365)
"""How old `seen` may be before preflight speaks of it; our own line."""
CANONICAL = {"x86_64": "amd64", "arm64": "arm64"}
"""Canonical's names of the architectures."""
TAG_KEY = re.compile(r"[0-9A-Za-z_+=,.@:-]{1,255}")
"""Keys that the metadata service can serve; EC2 refuses an instance with another one
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/work-with-tags-in-IMDS.html)."""


@dataclass(frozen=True)
class Image:
    """`id` as the user gave it, or the SSM parameter to look up when the template is first made.

    The answer is kept: a template that resolves the parameter at each launch would put next month's driver beside this
    month's in one group, and one that looked it up at each deployment would differ whenever AWS publishes. A new image is
    taken by naming its id. `family` names the kind, so that a group that changes kind looks up anew.
    `root_device` is None where only the image knows.
    """

    family: str
    id: str | None = None
    parameter: str | None = None
    root_device: str | None = ROOT_DEVICE


@dataclass(frozen=True)
class Interface:
    """A network interface as a launch template says it: a plain one has no `type`. Only the primary may say anything of
    public addresses, and it says no: EC2 gives none to an instance with several interfaces, and our nodes need none."""

    card: int
    device: int
    type: str | None
    public_address: str | None


@dataclass(frozen=True)
class Cpu:
    """Both are needed in one request, https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_LaunchTemplateCpuOptionsRequest.html."""

    cores: int
    threads_per_core: int


@dataclass(frozen=True)
class NodeGroupPlan:
    """One group. `tags` go on the group, its instances, their volumes and interfaces; `min_size` is below `count` only
    where the machines may not be there yet, or come with jobs (`by_jobs`). `fill_at` is when a capacity block's group is
    filled, None where it is from the beginning; `empty_at` is when it goes to zero, RFC 3339; from then on preflight (CAP-011)
    stops a deployment, which would ask for nodes in a block that is over and for a schedule in the past.

    No group rebalances its capacity: at a mere recommendation it would end a healthy node, and with it the step of all the
    others (https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-capacity-rebalancing.html). The
    recommendation still reaches the queue; the group replaces a node once spot has taken it.
    """

    name: str
    group: str
    description: str
    instance_type: str
    count: int
    min_size: int
    image: Image
    interfaces: tuple[Interface, ...]
    cpu: Cpu | None
    root_volume_gib: int
    volume_kms_key: str | None
    market: Market
    key_name: str | None
    tags: Mapping[str, str]
    fill_at: str | None
    empty_at: str | None
    mix: Mix | None = None
    by_jobs: bool = False
    """Slurm's controller sets how many machines the group wants, and ends them one by one. Auto Scaling ends none because it
    wants fewer: it does not know which have jobs."""
    role: GroupRole = "worker"
    """Nodes of workers have time to save before they end; logins have nothing to save."""

    @property
    def desired(self) -> int | None:
        """How many nodes the group wants as it is deployed; None leaves that as it is, none in a new group."""
        if self.by_jobs:
            return None
        return 0 if self.fill_at else self.count


def node_groups(spec: ClusterSpec, place: Place, now: datetime) -> tuple[NodeGroupPlan, ...]:
    """One plan for each group that Auto Scaling keeps; UserError for a type that the snapshot does not know or that runs no
    Linux."""
    problems: list[str] = []
    node_groups: list[NodeGroupPlan] = []
    for index, group in enumerate(spec.groups):
        if group not in spec.node_groups:
            continue
        path, kind = f"groups.{index}.instance_type", spec.node_of(group)
        if kind is None:
            problems.append(problem(path, group.instance_type, "is not known", fix="describe it under instance_types"))
        elif kind.architecture not in CANONICAL:
            problems.append(problem(path, group.instance_type, f"is {kind.architecture}", allowed=", ".join(CANONICAL)))
        else:
            node_groups.append(_node_group(spec, place, group, kind, now))
    if problems:
        raise UserError(problems)
    return tuple(node_groups)


def untaggable(tags: Mapping[str, str]) -> tuple[str, ...]:
    """Keys that an instance with tags in its metadata cannot carry."""
    return tuple(key for key in tags if not TAG_KEY.fullmatch(key) or key in (".", "..", "_index"))


def group_name(spec: ClusterSpec, group: Group) -> str:
    """Return what the name of the Auto Scaling group begins with; `-gang-` and digits follow."""
    return f"{spec.name}-{group.name}"


def _node_group(spec: ClusterSpec, place: Place, group: Group, kind: Instance, now: datetime) -> NodeGroupPlan:
    name = group_name(spec, group)
    return NodeGroupPlan(
        name=name,
        group=group.name,
        description=f"Lustrain cluster {spec.name}, group {group.name}, {place.region}",
        instance_type=kind.name,
        count=group.count,
        # A block begins at its own time: until then no launch succeeds, and the group must not be in breach.
        min_size=0 if group.capacity.mode == "capacity-block" or spec.goes_to_zero(group) else group.count,
        image=image(spec, group, kind),
        interfaces=interfaces(nics(kind, spec.network.nic_policy)),
        cpu=cpu(group, kind),
        root_volume_gib=group.root_volume_gib,
        volume_kms_key=group.volume_kms_key,
        market=market(group, kind),
        key_name=spec.access.ssh_key,
        tags={**tags(spec), "Name": name, "lustrain:group": group.name},
        fill_at=fill_at(group.capacity, now),
        empty_at=empty_at(group.capacity),
        mix=mix(group),
        by_jobs=spec.goes_to_zero(group),
        role=group.role,
    )


def interfaces(layout: tuple[Nic, ...]) -> tuple[Interface, ...]:
    """Return a layout in the words of a launch template, the primary first."""
    return tuple(
        Interface(
            card=nic.card,
            device=nic.device,
            type=None if nic.kind == "interface" else nic.kind,
            public_address=None if number else "false",
        )
        for number, nic in enumerate(layout)
    )


def image(spec: ClusterSpec, group: Group, kind: Instance) -> Image:
    """Return the image of a group: the user's, or the newest one for the type's accelerator and architecture."""
    family = _family(kind)
    default = default_images(spec, group)[family]
    newer = "" if default is IMAGES[family] else "-24-04"
    name = f"{family}{newer}-{kind.architecture.replace('_', '-')}"
    if group.image_id:
        return Image(name, id=group.image_id, root_device=None)
    arch = CANONICAL[kind.architecture] if family == "ubuntu" else kind.architecture
    return Image(name, parameter=default.parameter.format(arch=arch))


def default_images(spec: ClusterSpec, group: Group) -> Mapping[str, DefaultImage]:
    """Return the images of a group; the monitor mounts no Lustre, whatever the nodes need."""
    return IMAGES_WITH_SLURM if spec.controller or group == spec.monitor else IMAGES


def cpu(group: Group, kind: Instance) -> Cpu | None:
    """CPU options where they change something and the type takes them: bare metal has its firmware's threads. People who
    compile on a login want all threads, unless the group says otherwise."""
    if group.role == LOGIN and "threads_per_core" not in group.model_fields_set:
        return None
    if ".metal" in kind.name or group.threads_per_core >= kind.threads_per_core:
        return None
    return Cpu(kind.vcpus // kind.threads_per_core, group.threads_per_core)


def fewest_processors(spec: ClusterSpec, group: Group) -> int:
    """Return the processors that Linux sees on the smallest machine of a group; 0 where no type is known."""
    kinds = [kind for name in group.ec2_types if (kind := spec.node_of(group.of_type(name)))]
    options = [(kind, cpu(group, kind)) for kind in kinds]
    return min((one.cores * one.threads_per_core if one else kind.vcpus for kind, one in options), default=0)


def _family(kind: Instance) -> str:
    if NEURON.match(kind.name):
        return "neuron"
    nvidia = any(accelerator.name.startswith("NVIDIA") for accelerator in kind.accelerators)
    return "nvidia" if nvidia else "ubuntu"
