"""A machine that stands by itself beside the nodes: Slurm's controller on EC2, or the monitor.

One plain instance and no Auto Scaling group. EC2 recovers it on other hardware by itself
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-configuration-recovery.html).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infra.config import CONTROLLER, MONITOR, ClusterSpec, Group
from infra.plan.nodes.auto_scaling import CANONICAL, Image, image
from lustrain.problem import UserError, problem

PATHS = {CONTROLLER: "scheduler.controller", MONITOR: "observability.monitor"}
"""Where each machine stands in the config, by its name."""
DATA_DEVICE = "/dev/sdf"
"""Nitro instances show it as an NVMe drive whose serial number is the volume's id
(https://docs.aws.amazon.com/ebs/latest/userguide/identify-nvme-ebs-device.html)."""


@dataclass(frozen=True)
class MachinePlan:
    """`tags` go on the instance, its volumes and its interface, as on nodes of a group."""

    name: str
    group: Group
    zone_id: str
    image: Image
    root_gib: int
    data_gib: int
    """Of the volume that outlives the instance."""
    key_name: str | None
    tags: Mapping[str, str]


def machine_image(spec: ClusterSpec, group: Group) -> Image:
    """Return the image of a machine; UserError where its type is not known or runs no Linux."""
    kind, key = spec.node_of(group), f"{PATHS[group.name]}.type"
    if kind is None:
        raise UserError(problem(key, group.ec2_type, "is not known", fix="describe it under instance_types"))
    if kind.architecture not in CANONICAL:
        allowed = ", ".join(CANONICAL)
        raise UserError(problem(key, group.ec2_type, f"is {kind.architecture}", allowed=allowed, fix="m7i.large"))
    return image(spec, group, kind)
