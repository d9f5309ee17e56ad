"""Destinations of records: one small interface, and a sink that passes records to several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Sink(Protocol):
    """Takes records at the loop's pace; `event` may be called from any thread, the others from the loop only."""

    def step(self, record: Mapping[str, Any]) -> None:
        """One step's record; its fields are `trainer.metrics.records.StepRecord`."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something that happened: `saved`, `notice`, `warning`…"""

    def close(self) -> None:
        """Hand over what is left; nothing may be sent afterwards."""


class Sinks:
    """A Sink that passes everything to each of `sinks`, in their order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def step(self, record: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.step(record)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.event(kind, fields)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
