"""`fab node-facts`, `fab node-tune`, `fab node-verify`, `fab node-reboot`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from invoke.exceptions import Exit

from lustrain.problem import FAILED, UserError, problem
from node_setup import report
from node_setup.fleet.flags import Flags, node_task
from node_setup.fleet.pool import Outcome
from node_setup.fleet.run import Run, prepare
from node_setup.request import Wanted, wanted


@node_task("node-facts")
def node_facts(context: Any, flags: Flags) -> None:
    """Ask every node what it is: hardware, kernel, mounts, services, notices. Exit code: 1 a node failed, 3 not reached."""
    run, outcomes = _ask(context, flags, "facts", Wanted())
    _finish(run, "node-facts", outcomes, report.facts(outcomes))


@node_task(
    "node-tune",
    ("only", "skip", "set"),
    check="change nothing; say what would change (also fab --dry)",
    only="only this setting, or all that a glob matches: 'sysctl.*'; may be given again",
    skip="not this setting, or none that a glob matches, this once: 'gpu.*'; may be given again",
    set="ID=VALUE, ID=on or ID=off for this once, like sysctl.vm.max_map_count=1048576; may be given again",
    profile="efa-gpu, gaudi, cpu or login, instead of what the facts say",
    force="also on nodes with a running job or a notice of their end",
    allow_reboot="also settings that only a reboot puts in effect",
)
def node_tune(
    context: Any,
    flags: Flags,
    check: bool = False,
    only: Sequence[str] | None = None,
    skip: Sequence[str] | None = None,
    set: Sequence[str] | None = None,
    profile: str | None = None,
    force: bool = False,
    allow_reboot: bool = False,
) -> None:
    """Bring every node to its wanted state. Exit code: 0 in sync, 2 differs (--check), 1 a node failed, 3 not reached."""
    check = check or bool(context.config.run.dry)
    asked = wanted(only or (), skip or (), set or (), profile, force=force, allow_reboot=allow_reboot)
    run, outcomes = _ask(context, flags, "plan" if check else "tune", asked)
    _finish(run, "node-tune", outcomes, report.tuned(outcomes, check=check), check=check)


@node_task(
    "node-verify",
    tier="facts, which only looks, or fast, which writes to Lustre as well (fast)",
    all_reduce="also run nccl-tests over the ready and idle nodes of each group; takes them for minutes",
    nccl_test="path of nccl-tests' all_reduce_perf on the nodes, where it is not found by itself",
    mpirun="path of Open MPI's mpirun on the nodes, where it is not found by itself",
    drain_reasons="print one line `node reason` for each node to drain, and nothing else",
)
def node_verify(
    context: Any,
    flags: Flags,
    tier: str = "fast",
    all_reduce: bool = False,
    nccl_test: str | None = None,
    mpirun: str | None = None,
    drain_reasons: bool = False,
) -> None:
    """Tell which nodes are fit to train, and who is unlike the others. Exit code: 2 not ready, 1 failed, 3 not reached."""
    from node_setup import verify_report
    from node_setup.agent.verify import TIERS
    from node_setup.allreduce import launch
    from node_setup.allreduce.programs import Programs
    from node_setup.fleet.transport import Deadline

    if tier not in TIERS:
        raise UserError(problem("--tier", tier, "unknown", allowed=", ".join(TIERS)), FAILED)
    run = prepare(context, flags, Wanted())
    deadline = Deadline(run.pace.total_s)
    outcomes = run.ask(f"verify --tier {tier}")
    reduced = launch.all_reduce(run, outcomes, deadline, Programs(nccl_test, mpirun)) if all_reduce else []
    odd = verify_report.odd(outcomes)
    lines = verify_report.lines(outcomes, odd) + launch.lines(reduced)
    if drain_reasons:
        lines = verify_report.drain_lines(outcomes)
    least = report.SYNC if all(one.good for one in reduced) else report.DRIFT
    more = {"odd": verify_report.as_json(odd), "all_reduce": launch.as_json(reduced)}
    _finish(run, "node-verify", outcomes, lines, least, **more)


@node_task(
    "node-reboot",
    check="say which nodes would be rebooted (also fab --dry)",
    force="also nodes with a running job or a notice of their end",
    raw="also nodes of HyperPod, for which it else prints HyperPod's own commands",
    wait="seconds until a node must be back (900)",
)
def node_reboot(
    context: Any, flags: Flags, check: bool = False, force: bool = False, raw: bool = False, wait: str = "900"
) -> None:
    """Reboot nodes that run no job, and wait for them. Exit code: 1 refused, failed or not back in time, 3 not reached."""
    from node_setup import reboot

    check = check or bool(context.config.run.dry)
    run = prepare(context, flags, Wanted(force=force))
    if reboot.left_to_hyperpod(run) and not raw:
        left = reboot.for_hyperpod(run)
        lines = [*report.rebooted(left.outcomes), "", *left.lines]
        least = report.SYNC if check else report.FAILURE
        _finish(run, "node-reboot", left.outcomes, lines, least, check=check, commands=left.commands)
        return
    outcomes = reboot.reboot(run, check=check, wait=wait)
    _finish(run, "node-reboot", outcomes, report.rebooted(outcomes), check=check)


def _ask(context: Any, flags: Flags, command: str, asked: Wanted) -> tuple[Run, list[Outcome]]:
    run = prepare(context, flags, asked)
    return run, run.ask(command)


def _finish(
    run: Run, name: str, outcomes: Sequence[Outcome], lines: Sequence[str], least: int = report.SYNC, **more: Any
) -> None:
    run.close()
    code = report.exit_code(outcomes, least)
    if run.flags.json:
        cluster = run.inventory.cluster
        extra: Mapping[str, Any] = {"cluster": cluster.name if cluster else None, "notes": list(run.notes), **more}
        print(json.dumps(report.as_json(name, outcomes, code, **extra), indent=1))
    else:
        print("\n".join([*run.notes, *lines]))
    if code:
        raise Exit(code=code)


TASKS = (node_facts, node_tune, node_verify, node_reboot)
