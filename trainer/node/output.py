"""What ranks print, each line marked with its launch and rank, so that the log of a whole job can be read rank by rank."""

from __future__ import annotations

import errno
import os
import re
import select
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
TAIL = 1 << 16
"""Bytes of the last output that are kept where a limit is reached: how the ranks ended stands there."""
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
    and what was printed goes on as it is. What cannot be written costs one line and no rank.
    """

    def __init__(self, launch: int | None, log: Path | None = None, *, limit: int | None = None) -> None:
        """`limit`: bytes of marked lines that go on; of what comes after them only the last `TAIL` do, at the end."""
        self._launch = launch
        self._limit = limit
        self._marked_bytes = 0
        self._tail = b""
        self._loss, self._loss_is_said = "", False
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
        if self._limit is not None and self._marked_bytes > self._limit:
            # The first of the lines is rarely whole.
            last = self._tail.partition(b"\n")[2]
            left_out = self._marked_bytes - self._limit - len(last)
            self._write(1, f"about {left_out:,} bytes of the ranks' output are left out here\n".encode() + last)
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
            self._write_within_limit(stream.target, marked)
            return
        self._write(stream.target, b"".join(line + b"\n" for line in lines))
        if self._log is not None:
            write_all(self._log, marked, self._give_up_log)

    def _write_within_limit(self, target: int, marked: bytes) -> None:
        was_within = self._limit is None or self._marked_bytes <= self._limit
        self._marked_bytes += len(marked)
        if self._limit is None or self._marked_bytes <= self._limit:
            self._write(target, marked)
            return
        if was_within:
            why = f"the ranks have printed {self._limit:,} bytes, the limit of a launch"
            self._write(target, f"{why}: of what follows, the last lines come at its end\n".encode())
        self._tail = (self._tail + marked)[-TAIL:]

    def _write(self, target: int, data: bytes) -> None:
        """Write to this process' own output. The reader, like `head`, may have left: ranks go on without it."""
        if self._loss and not self._loss_is_said:
            self._say_loss()
        write_all(target, data, self._lose)

    def _lose(self, error: OSError) -> None:
        if error.errno != errno.EPIPE and not self._loss:
            self._loss = error.strerror or str(error)
            self._say_loss()

    def _say_loss(self) -> None:
        """Say once that output is lost; on a full disk that fails, too, until there is room again."""
        failures: list[OSError] = []
        write_all(2, f"some of what the ranks printed is lost: {self._loss}\n".encode(), failures.append)
        self._loss_is_said = not failures

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


def write_all(descriptor: int, data: bytes, on_error: Callable[[OSError], None]) -> None:
    """Write all of it, or as much as there is room for."""
    try:
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                # A process that shares this output has made it non-blocking, and its reader is slow.
                ready = select.poll()
                ready.register(descriptor, select.POLLOUT)
                ready.poll()
    except OSError as error:
        on_error(error)
