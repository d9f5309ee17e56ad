"""The end of mounts of buckets that the cluster no longer has; those that it has are mounted by the boot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.model import RUNTIME, Facts, Remark, Remove, Request, Run, Setting, Step

CLIENT = "mountpoint-s3"
"""The source of such a mount in /proc/mounts."""
BOOTED_BY_A_STACK = ("ec2", "hyperpod-slurm")


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    return [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts, request)]


def left_over(facts: Facts, request: Request) -> Mapping[str, str]:
    """Return the mount points that the cluster does not name, by the names of their units. None where a person wrote the
    Cluster, who need not have named what the boot of a stack mounted."""
    wanted = request.document.get("s3_mounts") or ()
    if request.document.get("backend") not in BOOTED_BY_A_STACK:
        return {}
    return {unit: point for unit, point in (facts.get("s3_units") or {}).items() if point not in wanted}


def _plan_one(setting: Setting, facts: Facts, request: Request) -> list[Step | Remark]:
    units = left_over(facts, request)
    if not units:
        return [Remark(setting.id, Status.OK, "no bucket is mounted that the cluster does not have")]
    if facts.get("mounts") is None:
        return [Remark(setting.id, Status.UNKNOWN, "the mounts of this node could not be read")]
    return [_end(setting, unit, point, facts) for unit, point in units.items()]


def _end(setting: Setting, unit: str, point: str, facts: Facts) -> Step | Remark:
    """Unmount, then remove the unit. A mount in use is left alone, and its unit with it: umount refuses, and what follows it
    is not done.

    The unit is never stopped. The client ends by itself once nothing has the mount, while a container may still have one that
    this node no longer shows; and systemd starts no client again whose unit is gone.
    """
    sources = [mount["source"] for mount in facts["mounts"] if mount["target"] == point]
    if sources and sources[-1] != CLIENT:
        why = f"{sources[-1]} is mounted at {point}, where {unit} had a bucket: left alone; fix: replace the node"
        return Remark(setting.id, Status.CONFLICT, why, sources[-1])
    unmount = (Run(("umount", point)),) if sources else ()
    disable, reload = Run(("systemctl", "disable", unit)), Run(("systemctl", "daemon-reload"))
    actions = (*unmount, disable, Remove(f"{owned.UNITS}/{unit}"), reload)
    return Step(setting.id, RUNTIME, unit, f"mounts a bucket at {point}", "removed", actions)
