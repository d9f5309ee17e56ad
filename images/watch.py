"""Who is told how a build or a push goes on, while it does."""

from __future__ import annotations

from typing import Protocol

from images.records import Step


class Watch(Protocol):
    """Called by one thread at a time."""

    def started(self, name: str) -> None:
        """A step began."""

    def ended(self, step: Step) -> None:
        """A step ended: done, cached or failed."""

    def log(self, name: str, text: str) -> None:
        """A step said something."""

    def moved(self, name: str, done: int, total: int) -> None:
        """Bytes of a layer went up or down; `total` 0 where it is not known."""


class Silent:
    """For callers that do not watch."""

    def started(self, name: str) -> None: ...

    def ended(self, step: Step) -> None: ...

    def log(self, name: str, text: str) -> None: ...

    def moved(self, name: str, done: int, total: int) -> None: ...


class Noting:
    """Passes on what it hears, and keeps the steps that ended."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.ended_steps: list[Step] = []

    def started(self, name: str) -> None:
        self._watch.started(name)

    def ended(self, step: Step) -> None:
        self.ended_steps.append(step)
        self._watch.ended(step)

    def log(self, name: str, text: str) -> None:
        self._watch.log(name, text)

    def moved(self, name: str, done: int, total: int) -> None:
        self._watch.moved(name, done, total)
