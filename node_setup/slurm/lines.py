"""The report of `fab slurm-up` for people. Pure."""

from __future__ import annotations

from lustrain.status import Status
from lustrain.tables import table
from node_setup.answers import Row
from node_setup.fleet.pool import ANSWERED, Outcome
from node_setup.report import shared_blocks
from node_setup.slurm.machines import SlurmMachine
from node_setup.slurm.up import SlurmResult

_HEADS = ("machine", "duty", "group", "steps", "ok", "changed", "failed", "state")
_SHOWN = (Status.CHANGE, Status.CHANGED, Status.FAILED)


def lines(result: SlurmResult, *, check: bool) -> list[str]:
    """Return a table with a line for each machine, then what was changed and what is not in order, then a summary."""
    heads = tuple("to change" if head == "changed" and check else head for head in _HEADS)
    pairs = list(zip(result.machines, result.outcomes, strict=True))
    rows = [_cells(machine, outcome, result) for machine, outcome in pairs]
    blocks = shared_blocks([(machine.node.name, _details(outcome)) for machine, outcome in pairs])
    problems = [f"  {line}" for items in result.problems.values() for line in items]
    return [
        *table(heads, rows),
        *blocks,
        *(["", "not in order:", *problems] if problems else []),
        "",
        _summary(result, check),
    ]


def _cells(machine: SlurmMachine, outcome: Outcome, result: SlurmResult) -> tuple[str, ...]:
    made = (outcome.answer and outcome.answer.rows) or ()
    counts = [
        len(made),
        sum(row.status == Status.OK for row in made),
        sum(row.status in (Status.CHANGE, Status.CHANGED) for row in made),
        sum(row.status == Status.FAILED for row in made),
    ]
    state = str(result.states.get(machine.host, {}).get("state") or "-").lower() if machine.computes else ""
    return (machine.node.name, ", ".join(machine.duties), machine.group, *map(str, counts), state)


def _details(outcome: Outcome) -> list[str]:
    answer = outcome.answer
    trouble = [] if outcome.kind == ANSWERED else [_line(outcome.kind, outcome.why, outcome.fix)]
    trouble += [f"refused: {answer.refused}"] if answer and answer.refused else []
    trouble += [f"error: {error.why}" for error in (answer.errors if answer else ())]
    return trouble + [_row(row) for row in (answer and answer.rows) or () if row.status in _SHOWN]


def _line(kind: str, why: str, fix: str) -> str:
    return f"{kind}: {why}" + (f"; fix: {fix}" if fix else "")


def _row(row: Row) -> str:
    why = f": {row.why}" if row.why else ""
    return f"{row.status:<8} {row.setting} {row.target}: {row.current} → {row.wanted}{why}"


def _summary(result: SlurmResult, check: bool) -> str:
    computes = [machine.host for machine in result.machines if machine.computes]
    head = next(machine for machine in result.machines if machine.controls)
    bad = sum(not outcome.good for outcome in result.outcomes)
    if bad:
        return f"{bad} of {len(result.outcomes)} machines failed; fix: mend them and run fab slurm-up again"
    if not result.states:
        why = "its controller does not answer" if result.problems else "there is none yet"
        return f"Slurm of {head.host}: {why}; next: fab slurm-up"
    ready = sum(machine.node.name not in result.problems for machine in result.machines if machine.computes)
    more = "" if check or result.problems else f"; next: on {head.host}, fab train CONFIG --cluster FILE"
    return f"Slurm of {head.host}: {ready} of {len(computes)} nodes ready for jobs{more}"
