"""One save in flight on a rank, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint.save.protocol import SaveStart
from trainer.checkpoint.save.stage import Staged


@dataclass(frozen=True)
class FinishedSave:
    """How a save ended: `seconds` from the call to the commit or the failure, `bytes` stored by all ranks together."""

    step: int
    committed: bool
    detail: str
    seconds: float
    bytes: int


@dataclass(frozen=True, eq=False)
class Flight:
    """One save in flight on this rank; without `staged` its result fails the attempt, for the reason in `problem`."""

    number: int
    step: int
    plan: SaveStart
    staged: Staged | None
    problem: str
    state: dict[str, Any]
    metadata: dict[str, Any]
    urgent: bool
    began: float
    written: dict[str, float] = field(default_factory=dict)
    """Seconds that the writer process spent on sums, tiers and store, once it has answered."""
