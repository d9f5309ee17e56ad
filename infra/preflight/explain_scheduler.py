"""The effects of an update on Slurm's controller on EC2. What it boots with makes its instance anew; address, state and key
outlive that, and so do running jobs (https://slurm.schedmd.com/slurmctld.html)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infra.config import ClusterSpec, Group
from infra.plan.nodes.user_data import user_data
from infra.plan.place import Place
from infra.preflight.change import Change, Effect, protected, shown
from lustrain.problem import UserError

HERE = "scheduler"
ANYWHERE = Place("us-east-1", "000000000000")
"""Both specs are compared there; an update never moves a stack to another region."""
STATE_PATH = "/var/spool/slurmctld"
"""Where the node agent mounts the volume."""
VOLUME = "the volume of Slurm's state"
ANEW = "Slurm's controller is made anew with its address and state: jobs run on, and none starts for some minutes"
LOST = "its root disk, and who is logged in there"
INSTEAD = "do it while no job is about to start; until then: pulumi up --exclude '**-controller-instance'"


def scheduler(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    before, after = (spec.scheduler if spec.controller else None for spec in (old, new))
    if before is None and after is None:
        return
    if before is None:
        fix = "let the job save, then end the old machines"
        yield Change(HERE, Effect.NEW_NODES, "a Slurm is made, and new nodes join it; running ones do not", "", fix)
        return
    if after is None:
        yield protected(HERE, VOLUME)
        return
    was, will_be = before.controller, after.controller
    if was.type != will_be.type and not will_be.image_id and _architecture(old) != _architecture(new):
        fix = "keep the architecture, or name scheduler.controller.image_id too"
        message = f"{was.type} becomes {will_be.type} of another architecture, and the image stays as it is"
        yield Change(f"{HERE}.controller.type", Effect.IMPOSSIBLE, message, "", fix)
    elif was.type != will_be.type:
        message = f"{was.type} becomes {will_be.type}. {ANEW}"
        yield Change(f"{HERE}.controller.type", Effect.REPLACES_NODES, message, LOST, INSTEAD)
    if will_be.image_id is None and was.image_id:
        message = f"without it {was.image_id} stays: a default is looked up only when there is no controller yet"
        yield Change(f"{HERE}.controller.image_id", Effect.IMPOSSIBLE, message, "", "name the image that you want")
    elif was.image_id != will_be.image_id:
        message = f"{shown(was.image_id)} becomes {shown(will_be.image_id)}. {ANEW}"
        yield Change(f"{HERE}.controller.image_id", Effect.REPLACES_NODES, message, LOST, INSTEAD)
    if was.state_gib != will_be.state_gib:
        yield _size(was.state_gib, will_be.state_gib)
    machine = old.controller
    if machine and _boot(old, machine) != _boot(new, machine):
        yield Change(f"{HERE}.controller", Effect.REPLACES_NODES, f"its first boot is another. {ANEW}", LOST, INSTEAD)
    if before.settings != after.settings:
        fix = "let jobs end, then replace the machines"
        message = "running machines keep the old slurm.conf"
        yield Change(f"{HERE}.settings", Effect.NEW_NODES, message, "", fix)
    for key in ("account", "qos"):
        if getattr(before, key) != getattr(after, key):
            yield Change(f"{HERE}.{key}", Effect.IN_PLACE, "is another default of `fab train`")


def moved_controller(old: ClusterSpec, moved: Sequence[str]) -> Iterator[Change]:
    """Yield what another zone does to the volume: EBS has it in one."""
    if old.controller and "zone_id" in moved:
        yield protected("zone_id", VOLUME)


def _architecture(spec: ClusterSpec) -> str | None:
    kind = spec.node_of(spec.controller) if spec.controller else None
    return kind.architecture if kind else None


def _boot(spec: ClusterSpec, machine: Group) -> tuple[str | None, str] | None:
    """Return what makes the instance anew beside type and image, as far as the spec says it and the bundle's name does not.

    None where no machine can boot with the spec, as preflight says.
    """
    lustre, home = ("there" if part else "" for part in (spec.storage.lustre, spec.storage.home))
    try:
        script = user_data(spec, ANYWHERE, machine, lustre_dns=lustre, lustre_mount_name=lustre, home_dns=home)
    except (UserError, ValueError):
        return None
    return spec.access.ssh_key, script


def _size(before: int, after: int) -> Change:
    path, message = f"{HERE}.controller.state_gib", f"{before} GiB become {after}"
    if after < before:
        return Change(path, Effect.IMPOSSIBLE, f"{message}: EBS shrinks no volume", "", f"keep {before}")
    fix = f"then grow the file system too, on the controller: sudo xfs_growfs {STATE_PATH}"
    return Change(path, Effect.IN_PLACE, f"{message}: the volume grows under the running controller", "", fix)
