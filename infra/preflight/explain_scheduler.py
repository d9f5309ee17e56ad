"""The effects of an update on Slurm's controller on EC2. What it boots with makes its instance anew; address, state and key
outlive that, and so do running jobs (https://slurm.schedmd.com/slurmctld.html)."""

from __future__ import annotations

from collections.abc import Iterator

from infra.config import ClusterSpec, Group, SchedulerAccounting
from infra.plan.nodes.user_data import user_data
from infra.plan.place import ANYWHERE
from infra.preflight.change import Change, Effect, protected
from infra.preflight.explain_machine import boot, machine, made_anew, volume

HERE = "scheduler"
STATE_PATH = "/var/spool/slurmctld"
"""Where the node agent mounts the volume."""
VOLUME = "the volume of Slurm's state"
ANEW = Change(
    f"{HERE}.controller",
    Effect.REPLACES_NODES,
    "Slurm's controller is made anew with its address and state: jobs run on, and none starts for some minutes",
    "its root disk, and who is logged in there",
    "do it while no job is about to start; until then: pulumi up --exclude '**-controller-instance'",
)


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
    if (was := old.controller) and (will_be := new.controller):
        yield from machine(old, new, was, will_be, ANEW)
        fix = f"then grow the file system too, on the controller: sudo xfs_growfs {STATE_PATH}"
        path, growth = f"{HERE}.controller.state_gib", " under the running controller"
        yield from volume(path, before.controller.state_gib, after.controller.state_gib, growth, fix)
        if _boot(old, was) != _boot(new, was):
            yield made_anew(ANEW, "its first boot is another")
    if before.settings != after.settings:
        fix = "let jobs end, then replace the machines"
        message = "running machines keep the old slurm.conf"
        yield Change(f"{HERE}.settings", Effect.NEW_NODES, message, "", fix)
    if before.idle_minutes != after.idle_minutes:
        message = f"{before.idle_minutes} minutes become {after.idle_minutes} with the controller that is made anew"
        yield Change(f"{HERE}.idle_minutes", Effect.IN_PLACE, message)
    yield from _accounting(before.accounting, after.accounting)
    for key in ("account", "qos"):
        if getattr(before, key) != getattr(after, key):
            yield Change(f"{HERE}.{key}", Effect.IN_PLACE, "is another default of `fab train`")


def _accounting(before: SchedulerAccounting | None, after: SchedulerAccounting | None) -> Iterator[Change]:
    path, anew = f"{HERE}.accounting", "with the controller that is made anew"
    if before == after:
        return
    if before is None:
        fix = "let jobs end, then replace the machines"
        message = f"slurmdbd keeps records of jobs {anew}; running machines sample no jobs"
        yield Change(path, Effect.NEW_NODES, message, "", fix)
    elif after is None:
        message = f"records end {anew}; those so far stay where they are, and nothing shows them"
        yield Change(path, Effect.NEW_NODES, message)
    elif _place(before) != _place(after):
        fix = "carry them over first: mysqldump there, mysql here"
        message = f"another database {anew}: records so far do not move with it"
        yield Change(f"{path}.database", Effect.IN_PLACE, message, "what sacct shows of ended jobs", fix)
    elif after.keep_months < before.keep_months:
        message = f"{before.keep_months} months become {after.keep_months} {anew}: older records are dropped"
        yield Change(
            f"{path}.keep_months",
            Effect.IN_PLACE,
            message,
            "records of older jobs",
            "keep them elsewhere first: sacct --allusers --parsable2 into a file",
        )
    else:
        yield Change(path, Effect.IN_PLACE, f"is another {anew}")


def _place(accounting: SchedulerAccounting) -> tuple[str, int, str | None] | None:
    database = accounting.database
    return (database.endpoint, database.port, database.name) if database else None


def min_count(path: str, after: Group) -> Change:
    """Return what another `min_count` does on EC2, where 0 alone has a meaning."""
    if after.min_count == 0:
        return Change(
            path, Effect.IN_PLACE, "machines come with jobs, and those that have none end after scheduler.idle_minutes"
        )
    return Change(path, Effect.IN_PLACE, f"{after.count} machines come and stay, with jobs or without")


def _boot(spec: ClusterSpec, machine: Group) -> tuple[str | None, str] | None:
    """Return what makes the instance anew beside type and image, as far as the spec says it and the bundle's name does not."""
    lustre, home = ("there" if part else "" for part in (spec.storage.lustre, spec.storage.home))

    def facts() -> tuple[str | None, str]:
        script = user_data(spec, ANYWHERE, machine, lustre_dns=lustre, lustre_mount_name=lustre, home_dns=home)
        return spec.access.ssh_key, script

    return boot(facts)
