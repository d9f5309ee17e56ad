"""Lines that are not in the store yet: in memory up to a limit, in local files beyond it. No threads, no store."""

from __future__ import annotations

import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Part:
    """Lines sealed together, to become one object; their bytes are in `body` or, spooled, in the file at `path`."""

    prefix: str
    lines: int
    size: int
    body: bytes | None
    path: Path | None = None

    def read(self) -> bytes:
        body = self.body  # another thread may spool this part between two looks
        if body is not None:
            return body
        assert self.path is not None
        return self.path.read_bytes()


@dataclass
class _Stream:
    open: list[bytes] = field(default_factory=list)
    open_size: int = 0
    sealed: deque[Part] = field(default_factory=deque)


class Backlog:
    """Several streams of lines, each in order; a sealed part never changes, so that a retry stores the same bytes.

    `memory_bytes` is kept by moving the oldest sealed parts to a temporary folder; when that fails too, they stay in
    memory and `spool_error` says why. Not thread-safe: the owner locks.
    """

    def __init__(self, memory_bytes: int, part_bytes: int) -> None:
        self.spool_error: OSError | None = None
        self._memory_bytes = memory_bytes
        self._part_bytes = part_bytes
        self._streams: dict[str, _Stream] = {}
        self._held = 0
        self._folder: Path | None = None

    @property
    def lines(self) -> int:
        return sum(len(s.open) + sum(part.lines for part in s.sealed) for s in self._streams.values())

    def append(self, prefix: str, line: bytes) -> None:
        stream = self._streams.setdefault(prefix, _Stream())
        stream.open.append(line)
        stream.open_size += len(line)
        self._held += len(line)
        if stream.open_size >= self._part_bytes:
            self._seal(prefix, stream)
        if self._held > self._memory_bytes:
            self._spool_down_to(self._memory_bytes)

    def head(self, prefix: str) -> Part | None:
        """Return the oldest part of a stream, sealing what is open if there is none; it stays until `drop_head`."""
        stream = self._streams.get(prefix)
        if stream is None:
            return None
        if not stream.sealed and stream.open:
            self._seal(prefix, stream)
        return stream.sealed[0] if stream.sealed else None

    def drop_head(self, prefix: str) -> None:
        part = self._streams[prefix].sealed.popleft()
        if part.body is not None:
            self._held -= part.size
        if part.path is not None:
            part.path.unlink(missing_ok=True)

    def rescue(self) -> Path | None:
        """Move everything to local files and return their folder; None when nothing is left or it cannot be written."""
        for prefix, stream in self._streams.items():
            if stream.open:
                self._seal(prefix, stream)
        self._spool_down_to(0)
        return self._folder if self.lines and self.spool_error is None else None

    def remove_folder(self) -> None:
        """Remove the spool's folder when nothing lies in it."""
        if self._folder is not None and not any(self._folder.iterdir()):
            self._folder.rmdir()
            self._folder = None

    def _seal(self, prefix: str, stream: _Stream) -> None:
        body = b"".join(stream.open)
        stream.sealed.append(Part(prefix, len(stream.open), len(body), body))
        stream.open, stream.open_size = [], 0

    def _spool_down_to(self, limit: int) -> None:
        in_memory = (part for stream in self._streams.values() for part in stream.sealed if part.body is not None)
        for part in list(in_memory):
            if self._held <= limit:
                return
            try:
                self._spool(part)
            except OSError as error:
                self.spool_error = error
                return
        self.spool_error = None

    def _spool(self, part: Part) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="lustrain-log-"))
        name = part.prefix.strip("/").replace("/", "-")
        handle = tempfile.NamedTemporaryFile(dir=self._folder, prefix=f"{name}-", suffix=".jsonl", delete=False)  # noqa: SIM115
        with handle as file:
            file.write(part.read())
        part.path = Path(handle.name)
        part.body = None
        self._held -= part.size
