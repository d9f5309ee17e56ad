"""One save in flight on a rank, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint.save.ballot import Plan
from trainer.checkpoint.save.stage import Staged


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended: `seconds` from the call to the commit or the failure, `bytes` stored by all ranks together."""

    step: int
    committed: bool
    detail: str
    seconds: float
    bytes: int


@dataclass(frozen=True, eq=False)
class Flight:
    """One save in flight on this rank; without `staged` it votes against the attempt, for the reason in `problem`."""

    number: int
    step: int
    plan: Plan
    staged: Staged | None
    problem: str
    state: dict[str, Any]
    about: dict[str, Any]
    urgent: bool
    began: float
    written: dict[str, float] = field(default_factory=dict)
    """Seconds that the writer process spent on sums, tiers and store, once it has answered."""
