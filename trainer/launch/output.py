"""What ranks print, each line marked with its launch and rank, so that the log of a whole job can be read rank by rank."""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LONGEST_LINE = 1 << 16
"""Bytes after which a line without an end is passed on in pieces."""
CLOSE_TIMEOUT_S = 5.0
"""How long a process that outlives its rank, as one that writes a checkpoint, may hold the output open."""
_CHUNK = 1 << 16
_MARKED = re.compile(r"\[(?:launch (?P<launch>\d+) )?rank (?P<rank>\d+)\] ?(?P<text>.*)", re.DOTALL)


def mark(launch: int | None, rank: int) -> str:
    """Return what stands before each line of a rank; `launch` is None where no launcher counts them."""
    return f"[rank {rank}] " if launch is None else f"[launch {launch} rank {rank}] "


def parse(line: str) -> tuple[int | None, int | None, str]:
    """Return launch, rank and text of a line; a launcher's own line has neither."""
    match = _MARKED.fullmatch(line)
    if match is None:
        return None, None, line
    return int(match["launch"]) if match["launch"] else None, int(match["rank"]), match["text"]


@dataclass
class _Stream:
    """One output of one rank, and the received part of its next line."""

    mark: bytes
    target: int
    held: bytes = b""


class RankOutput:
    """Passes on what ranks print, line by line, in a thread of its own.

    Without `log` the marked lines go to this process' own standard output and error. With it they are appended to that file,
    and what was printed goes on as it is. A log that cannot be written costs one line and no rank.
    """

    def __init__(self, launch: int | None, log: Path | None = None) -> None:
        self._launch = launch
        self._log = self._open(log) if log is not None else None
        self._keeps_log = log is not None
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="rank-output", daemon=True)
        self._given: list[int] = []
        self._closing_at: float | None = None

    def pipes(self, rank: int) -> tuple[int, int]:
        """Return descriptors for a rank's standard output and error."""
        pair = []
        for target in (1, 2):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._selector.register(reader, selectors.EVENT_READ, _Stream(mark(self._launch, rank).encode(), target))
            pair.append(writer)
        self._given += pair
        return pair[0], pair[1]

    def start(self) -> None:
        """Begin to pass on, once every rank has its descriptors."""
        for writer in self._given:
            os.close(writer)
        self._thread.start()

    def close(self) -> None:
        """Pass on what is left. The ranks have ended by then."""
        self._closing_at = time.monotonic() + CLOSE_TIMEOUT_S
        self._thread.join(CLOSE_TIMEOUT_S + 1)

    def _run(self) -> None:
        while self._selector.get_map() and not self._is_late():
            for key, _ in self._selector.select(0.2):
                self._read(key)
        for key in list(self._selector.get_map().values()):
            self._end(key)
        if self._log is not None:
            os.close(self._log)

    def _is_late(self) -> bool:
        return self._closing_at is not None and time.monotonic() > self._closing_at

    def _read(self, key: selectors.SelectorKey) -> None:
        stream: _Stream = key.data
        with suppress(BlockingIOError):
            data = os.read(key.fd, _CHUNK)
            if not data:
                self._end(key)
                return
            *lines, stream.held = (stream.held + data).split(b"\n")
            if len(stream.held) > LONGEST_LINE:
                lines, stream.held = [*lines, stream.held], b""
            self._pass_on(stream, lines)

    def _end(self, key: selectors.SelectorKey) -> None:
        stream: _Stream = key.data
        self._selector.unregister(key.fd)
        os.close(key.fd)
        if stream.held:
            self._pass_on(stream, [stream.held])

    def _pass_on(self, stream: _Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        marked = b"".join(stream.mark + line + b"\n" for line in lines)
        if not self._keeps_log:
            _write(stream.target, marked, lambda error: None)
            return
        _write(stream.target, b"".join(line + b"\n" for line in lines), lambda error: None)
        if self._log is not None:
            _write(self._log, marked, self._give_up_log)

    def _give_up_log(self, error: OSError) -> None:
        self._log = None
        print(f"the log of the ranks ends here: {error.strerror}", file=sys.stderr)

    def _open(self, path: Path) -> int | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            print(f"no log of the ranks is kept: {path}: {error.strerror}", file=sys.stderr)
            return None


def _write(descriptor: int, data: bytes, on_error: Callable[[OSError], None]) -> None:
    """Write all of it. The reader of our own output, like `head`, may have left: ranks go on without it."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        on_error(error)
