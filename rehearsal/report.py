"""The rehearsal's outcome as tables: on the screen and in report.md."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from rehearsal.proof import Promise
from rehearsal.stages import Stage

STAGE_COLUMNS = ("stage", "real", "emulated", "seconds", "outcome")
NO_TERMINAL_WIDTH = 150
PROMISE_COLUMNS = ("", "promise", "figure")


def stage_rows(stages: Sequence[Stage]) -> list[tuple[str, ...]]:
    return [(stage.name, stage.real, stage.emulated, f"{stage.seconds:.0f}", stage.outcome) for stage in stages]


def promise_rows(promises: Sequence[Promise]) -> list[tuple[str, ...]]:
    return [("kept" if promise.kept else "BROKEN", promise.text, promise.figure) for promise in promises]


def show(stages: Sequence[Stage], promises: Sequence[Promise]) -> None:
    """Print both tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NO_TERMINAL_WIDTH)
    for columns, rows in ((STAGE_COLUMNS, stage_rows(stages)), (PROMISE_COLUMNS, promise_rows(promises))):
        table = Table(*columns)
        for row in rows:
            table.add_row(*row, style="bold red" if row[0] == "BROKEN" else None)
        console.print(table)


def markdown(stages: Sequence[Stage], promises: Sequence[Promise], *, seed: int, picture: str) -> str:
    """Return the report; `picture` is the file name of the plot beside it."""
    kept = sum(promise.kept for promise in promises)
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return "\n".join(
        [
            "# Rehearsal",
            "",
            f"{when} · seed {seed} (repeat with `--seed {seed}`) · **{kept} of {len(promises)} promises kept**",
            "",
            *_table(PROMISE_COLUMNS, promise_rows(promises)),
            "",
            *_table(STAGE_COLUMNS, stage_rows(stages)),
            "",
            f"![loss, throughput and interruptions]({picture})",
            "",
        ]
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
