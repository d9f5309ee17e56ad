"""Slurm's controller on EC2: an instance that may be made anew, and what outlives it: address, state, and the munge key.

One plain instance and no Auto Scaling group: a group would give its successor another address, and slurm.conf names one. EC2
recovers it on other hardware by itself (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-configuration-recovery.html).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infra.config import ClusterSpec, Group
from infra.plan.nodes.auto_scaling import CANONICAL, Image, image
from infra.plan.place import tags
from lustrain.problem import UserError, problem

TYPE_KEY = "scheduler.controller.type"
STATE_DEVICE = "/dev/sdf"
"""Nitro instances show it as an NVMe drive whose serial number is the volume's id
(https://docs.aws.amazon.com/ebs/latest/userguide/identify-nvme-ebs-device.html)."""
RECOVERY_DAYS = 7
"""How long a deleted munge key can be brought back: Secrets Manager's least."""


@dataclass(frozen=True)
class ControllerPlan:
    """`tags` go on the instance, its root volume and its interface, as on nodes of a group."""

    name: str
    group: Group
    zone_id: str
    secret: str
    """What the name of the munge key's secret begins with; Pulumi adds digits, since a deleted name stays taken."""
    image: Image
    state_gib: int
    key_name: str | None
    tags: Mapping[str, str]


def controller(spec: ClusterSpec) -> ControllerPlan | None:
    """Return the plan of the controller, None without a scheduler; UserError for a type that is not known or runs no Linux."""
    group = spec.controller
    if group is None or spec.scheduler is None:
        return None
    kind = spec.node_of(group)
    if kind is None:
        raise UserError(problem(TYPE_KEY, group.ec2_type, "is not known", fix="describe it under instance_types"))
    if kind.architecture not in CANONICAL:
        raise UserError(
            problem(TYPE_KEY, group.ec2_type, f"is {kind.architecture}", allowed=", ".join(CANONICAL), fix="m7i.large")
        )
    return ControllerPlan(
        name=host(spec),
        group=group,
        zone_id=spec.zone_id,
        secret=secret_name(spec),
        image=image(spec, group, kind),
        state_gib=spec.scheduler.controller.state_gib,
        key_name=spec.access.ssh_key,
        tags={**tags(spec), "Name": host(spec), "lustrain:group": group.name},
    )


def host(spec: ClusterSpec) -> str:
    """Return the controller's host name, which slurm.conf names too."""
    return f"{spec.name}-controller"


def secret_name(spec: ClusterSpec) -> str:
    return f"{spec.name}-munge"
