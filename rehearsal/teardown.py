"""What the rehearsal takes down in its end: all of it, whatever signals come meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Teardown:
    """Contexts that end one after the other. The first Ctrl-C ends the journey; one that comes while something is taken down
    says what is left, and ends nothing: what is then cut off would stay."""

    def __init__(self) -> None:
        self._contexts = ExitStack()
        self._there: list[str] = []
        self._ending = 0
        self._signalled = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Teardown:
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._ending += 1
        try:
            return self._contexts.__exit__(kind, error, trace)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def enter(self, what: str, context: AbstractContextManager[T]) -> T:
        """Enter a context that ends with this one; `what` names it for people."""
        return self._contexts.enter_context(self._named(what, context))

    @contextmanager
    def part(self, what: str, context: AbstractContextManager[T]) -> Iterator[T]:
        """Enter a context that ends before others; a Ctrl-C that comes while it ends is heeded after that."""
        with self._named(what, context) as value:
            yield value
        if self._signalled:
            raise KeyboardInterrupt

    @contextmanager
    def _named(self, what: str, context: AbstractContextManager[T]) -> Iterator[T]:
        with ExitStack() as ended, context as value:
            self._there.append(what)
            ended.callback(self._there.remove, what)
            try:
                yield value
            finally:
                self._ending += 1
        # After an error everything ends.
        self._ending -= 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self._signalled = self._signalled, True
        if not (again or self._ending):
            raise KeyboardInterrupt
        left = ", ".join(reversed(self._there)) or "nothing"
        # Buffered output may be in use just now.
        os.write(
            2, f"   taking down, which goes on; left are: {left}; `kill -9 {os.getpid()}` would leave them\n".encode()
        )
