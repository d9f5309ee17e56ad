"""Shards made of chunks: pure arithmetic on token counts, and the records that let a killed job go on.

The ids of all chunks, in order, are one stream per split, and shard k is ids [k*S, (k+1)*S) of it. So a shard can be
made as soon as all chunks up to its end are known, by any process, and its bytes do not depend on which process made the chunks
and when.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from lustrain.from_json import from_json
from trainer.data.index import Shard

T = TypeVar("T")

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Output:
    """What a chunk gave to one split: ids and documents in its two files, and their checksums."""

    tokens: int
    documents: int
    crc64nvme: int
    doc_crc64nvme: int


@dataclass(frozen=True)
class ChunkRecord:
    """A finished chunk. `outputs` has the splits that got anything; `replaced` and `skipped` are those of documents.Tally."""

    number: int
    outputs: Mapping[str, Output]
    replaced: int
    skipped: int


@dataclass(frozen=True)
class Piece:
    """Ids [start, stop) of one chunk's output for a split."""

    chunk: int
    start: int
    stop: int


class SplitPlan:
    """Which shards of one split can be made, and from what, as far as the token counts of its chunks are known."""

    def __init__(self, shard_tokens: int, chunks: int, done: Mapping[int, Shard] | None = None) -> None:
        self.done = dict(done or {})
        self._shard_tokens = shard_tokens
        self._counts: list[int | None] = [None] * chunks
        self._before = [0]
        self._next = 0

    @property
    def complete(self) -> bool:
        """All chunks are known and all shards are made."""
        return self._all_known and len(self.done) == -(-self._before[-1] // self._shard_tokens)

    def record(self, chunk: int, tokens: int) -> None:
        """Note that the chunk gives `tokens` ids to this split."""
        self._counts[chunk] = tokens
        while not self._all_known and (count := self._counts[len(self._before) - 1]) is not None:
            self._before.append(self._before[-1] + count)

    def start_ready(self) -> list[int]:
        """Numbers of the shards that can be made now and were not returned before."""
        known = self._before[-1]
        ready = -(-known // self._shard_tokens) if self._all_known else known // self._shard_tokens
        numbers = [number for number in range(self._next, ready) if number not in self.done]
        self._next = ready
        return numbers

    def pieces_of(self, number: int) -> tuple[Piece, ...]:
        """Return what a shard that can be made consists of."""
        before = self._before
        start, stop = number * self._shard_tokens, min((number + 1) * self._shard_tokens, before[-1])
        pieces = []
        chunk = bisect_right(before, start) - 1
        while start < stop:
            end = min(stop, before[chunk + 1])
            if end > start:
                pieces.append(Piece(chunk, start - before[chunk], end - before[chunk]))
            start, chunk = end, chunk + 1
        return tuple(pieces)

    def is_spent(self, chunk: int) -> bool:
        """Every id of the chunk lies in a shard that is made, so that its files are needed no more."""
        if chunk + 1 >= len(self._before):
            return False
        first = self._before[chunk] // self._shard_tokens
        last = (self._before[chunk + 1] - 1) // self._shard_tokens
        return all(number in self.done for number in range(first, last + 1))

    @property
    def _all_known(self) -> bool:
        return len(self._before) == len(self._counts) + 1


class WorkFolder:
    """Names of what an unfinished job keeps, and its records; a record is written after what it describes, in one rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tokens(self, chunk: int, split: str) -> Path:
        return self.path / f"chunk-{chunk:06d}.{split}.tok"

    def ends(self, chunk: int, split: str) -> Path:
        return self.path / f"chunk-{chunk:06d}.{split}.doc"

    def write_chunk(self, record: ChunkRecord) -> None:
        self.write(f"chunk-{record.number:06d}.json", json.dumps(asdict(record)).encode())

    def read_chunk(self, number: int) -> ChunkRecord | None:
        """Return the record of a finished chunk, None when none can be read."""
        return self._read(ChunkRecord, f"chunk-{number:06d}.json")

    def drop_chunk(self, number: int, split: str) -> None:
        self.tokens(number, split).unlink(missing_ok=True)
        self.ends(number, split).unlink(missing_ok=True)

    def write_shard(self, shard: Shard) -> None:
        self.write(f"{shard.name}.json", json.dumps(asdict(shard)).encode())

    def read_shards(self, split: str) -> dict[int, Shard]:
        """Shards that were stored before, by number."""
        shards = {}
        for path in self.path.glob(f"{split}-*.json"):
            number = path.stem.removeprefix(f"{split}-")
            if number.isdecimal() and (shard := self._read(Shard, path.name)) and shard.name == path.stem:
                shards[int(number)] = shard
        return shards

    def write(self, name: str, body: bytes | memoryview) -> None:
        """Store a file, whole or not at all; OSError that names it. A power cut may lose it, which is found by its checksum."""
        unfinished = self.path / f".{name}.{os.getpid()}"
        try:
            unfinished.write_bytes(body)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error
        unfinished.replace(self.path / name)

    def _read(self, kind: type[T], name: str) -> T | None:
        try:
            return from_json(kind, json.loads((self.path / name).read_bytes()))
        except (FileNotFoundError, KeyError, TypeError, ValueError, RecursionError):
            return None
