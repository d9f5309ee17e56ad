"""The interface of a destination of records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Takes records at the loop's pace; `event` may be called from any thread, the others from the loop only."""

    def step(self, record: Mapping[str, Any]) -> None:
        """One step's record; its fields are `trainer.metrics.records.StepRecord`."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something that happened: `saved`, `notice`, `warning`…"""

    def close(self) -> None:
        """Hand over what is left; nothing may be sent afterwards."""
