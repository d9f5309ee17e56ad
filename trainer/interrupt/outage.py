"""Warnings about a source that does not answer, without repeating them at every poll."""

from __future__ import annotations

from trainer.interrupt.notice import OnEvent

MOST_WARNINGS = 3
"""Per source and process: enough to see that it comes and goes, few enough to leave the log readable."""


class Outage:
    """Turns a row of failures into one `warning` event when it begins, at most MOST_WARNINGS times."""

    def __init__(self, source: str, on_event: OnEvent) -> None:
        self._source = source
        self._on_event = on_event
        self._failing = False
        self._warnings = 0

    def failed(self, detail: str) -> None:
        if self._failing:
            return
        self._failing = True
        if self._warnings < MOST_WARNINGS:
            self._warnings += 1
            self._on_event("warning", {"source": self._source, "detail": detail})

    def worked(self) -> None:
        self._failing = False
