"""`fab node-facts`, `fab node-tune`, `fab node-verify`, `fab node-reboot`, `fab slurm-up`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lustrain.flags import flag
from lustrain.problem import DIFFERS, DONE, FAILED, UserError, problem
from lustrain.task import TaskResult
from node_setup.fleet.flags import Flags, Hosts, node_task

# Every command of `fab` reads this file: what runs a task is imported by the task.
if TYPE_CHECKING:
    from node_setup.fleet.pool import Outcome
    from node_setup.fleet.run import FleetRun


@node_task("node-facts")
def node_facts(flags: Flags, context: Any, hosts: Hosts) -> TaskResult:
    """Ask every node what it is: hardware, kernel, mounts, services, notices. Exit code: 1 a node failed, 3 not reached."""
    from node_setup import report
    from node_setup.fleet.run import prepare
    from node_setup.request import Tuning

    run = prepare(context, flags, Tuning(), hosts)
    outcomes = run.call_agents("facts")
    return _answer(run, "node-facts", outcomes, report.facts_lines(outcomes))


@dataclass(frozen=True)
class Tune(Flags):
    check: bool = flag(False, "change nothing; say what would change (also fab --dry)")
    only: tuple[str, ...] = flag((), "only this setting, or all that a glob matches: 'sysctl.*'; may be given again")
    skip: tuple[str, ...] = flag(
        (), "not this setting, or none that a glob matches, this once: 'gpu.*'; may be given again"
    )
    set: tuple[str, ...] = flag(
        (), "ID=VALUE, ID=on or ID=off for this once, like sysctl.vm.max_map_count=1048576; may be given again"
    )
    profile: str | None = flag(None, "efa-gpu, gaudi, cpu or login, instead of what the facts say")
    force: bool = flag(False, "also on nodes with a running job or a notice of their end")
    allow_reboot: bool = flag(False, "also settings that only a reboot puts in effect")


@node_task("node-tune")
def node_tune(flags: Tune, context: Any, hosts: Hosts) -> TaskResult:
    """Bring every node to its wanted state. Exit code: 0 in sync, 4 differs (--check), 1 a node failed, 3 not reached."""
    from node_setup import report
    from node_setup.fleet.run import prepare
    from node_setup.request import parse_tuning

    check = flags.check or bool(context.config.run.dry)
    more = {"force": flags.force, "allow_reboot": flags.allow_reboot}
    tuning = parse_tuning(flags.only, flags.skip, flags.set, flags.profile, **more)
    run = prepare(context, flags, tuning, hosts)
    outcomes = run.call_agents("plan" if check else "tune")
    return _answer(run, "node-tune", outcomes, report.tune_lines(outcomes, check=check), check=check)


@dataclass(frozen=True)
class Verify(Flags):
    tier: str = flag("fast", "facts, which only looks, or fast, which writes to Lustre as well (fast)")
    all_reduce: bool = flag(
        False, "also run nccl-tests over the ready and idle nodes of each group; takes them for minutes"
    )
    nccl_test: str | None = flag(None, "path of nccl-tests' all_reduce_perf on the nodes, where the search misses it")
    mpirun: str | None = flag(None, "path of Open MPI's mpirun on the nodes, where the search misses it")
    drain_reasons: bool = flag(False, "print one line `node reason` for each node to drain, and nothing else")


@node_task("node-verify")
def node_verify(flags: Verify, context: Any, hosts: Hosts) -> TaskResult:
    """Tell which nodes are fit to train, and which are unlike the others. Exit code: 4 not ready, 1 failed, 3 not reached."""
    from node_setup import report
    from node_setup.agent.verify import TIERS
    from node_setup.allreduce import launch
    from node_setup.allreduce.programs import Programs
    from node_setup.fleet.run import prepare
    from node_setup.fleet.transport import Deadline
    from node_setup.request import Tuning

    if flags.tier not in TIERS:
        raise UserError(problem("--tier", flags.tier, "unknown", allowed=", ".join(TIERS)))
    run = prepare(context, flags, Tuning(), hosts)
    deadline = Deadline(run.concurrency.total_s)
    outcomes = run.call_agents(f"verify --tier {flags.tier}")
    programs = Programs(flags.nccl_test, flags.mpirun)
    reduced = launch.all_reduce(run, outcomes, deadline, programs) if flags.all_reduce else []
    differences = report.differences(outcomes)
    lines = report.verify_lines(outcomes, differences) + launch.lines(reduced)
    if flags.drain_reasons:
        lines = report.drain_lines(outcomes)
    least = DONE if all(reduction.good for reduction in reduced) else DIFFERS
    more = {"odd": [asdict(difference) for difference in differences], "all_reduce": launch.as_json(reduced)}
    return _answer(run, "node-verify", outcomes, lines, least, **more)


@dataclass(frozen=True)
class Reboot(Flags):
    check: bool = flag(False, "say which nodes would be rebooted (also fab --dry)")
    force: bool = flag(False, "also nodes with a running job or a notice of their end")
    raw: bool = flag(False, "also nodes of HyperPod; without it HyperPod's own commands are printed")
    wait: str = flag("900", "seconds until a node must be back (900)")


@node_task("node-reboot")
def node_reboot(flags: Reboot, context: Any, hosts: Hosts) -> TaskResult:
    """Reboot nodes that run no job, and wait for them. Exit code: 1 refused, failed or not back in time, 3 not reached."""
    from node_setup import reboot, report
    from node_setup.fleet.run import prepare
    from node_setup.request import Tuning

    check = flags.check or bool(context.config.run.dry)
    run = prepare(context, flags, Tuning(force=flags.force), hosts)
    if reboot.belongs_to_hyperpod(run) and not flags.raw:
        left = reboot.plan_hyperpod_reboot(run)
        lines = [*report.reboot_lines(left.outcomes), "", *left.lines]
        least = DONE if check else FAILED
        return _answer(run, "node-reboot", left.outcomes, lines, least, check=check, commands=left.commands)
    if not (flags.node or flags.group):
        run = reboot.without_logins(run)
    outcomes = reboot.reboot(run, check=check, wait=flags.wait)
    return _answer(run, "node-reboot", outcomes, report.reboot_lines(outcomes), check=check)


@dataclass(frozen=True)
class SlurmUp(Flags):
    check: bool = flag(False, "change nothing; say what would change, and what is not in order (also fab --dry)")


@node_task("slurm-up")
def slurm_up(flags: SlurmUp, context: Any, hosts: Hosts) -> TaskResult:
    """Make a Slurm of the Cluster's machines, or bring it in line. Exit code: 4 differs (--check), 1 failed, 3 not reached."""
    from node_setup import report
    from node_setup.fleet.run import prepare
    from node_setup.request import Tuning
    from node_setup.slurm import lines, up

    parts = {"--node": flags.node, "--group": flags.group, "--limit": flags.limit, "--nodes": flags.nodes, "-H": hosts}
    named = [name for name, value in {**parts, "--local": flags.local}.items() if value]
    if named:
        raise UserError(f"{' and '.join(named)}: a Slurm is made of all machines of its Cluster; fix: leave it out")
    check = flags.check or bool(context.config.run.dry)
    run = prepare(context, flags, Tuning())
    if run.inventory.cluster is None:
        raise UserError(
            "--hosts-file: its lines name no controller; fix: give a Cluster as well, by --cluster or --stack"
        )
    try:
        result = up.bring_up(run, check=check)
    finally:
        run.close()
    least = (DIFFERS if check else FAILED) if result.problems else DONE
    code = report.exit_code(result.outcomes, least)
    extra = {"cluster": run.inventory.cluster.name, "notes": list(run.notes), "check": check}
    more = {
        "slurm_nodes": dict(result.states),
        "problems": [line for found in result.problems.values() for line in found],
    }
    data = report.as_json("slurm-up", result.outcomes, code, **extra, **more)
    return TaskResult([*run.notes, *lines.lines(result, check=check)], data, code)


def _answer(
    run: FleetRun, name: str, outcomes: Sequence[Outcome], lines: Sequence[str], least: int = DONE, **more: Any
) -> TaskResult:
    from node_setup import report

    run.close()
    code = report.exit_code(outcomes, least)
    cluster = run.inventory.cluster
    extra = {"cluster": cluster.name if cluster else None, "notes": list(run.notes), **more}
    return TaskResult([*run.notes, *lines], report.as_json(name, outcomes, code, **extra), code)


TASKS = (node_facts, node_tune, node_verify, node_reboot, slurm_up)
