"""Shards that are not on this machine: whole ones come into the cache in the background, windows by byte range."""

from __future__ import annotations

import atexit
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lustrain.background import BackgroundThread
from lustrain.problem import UserError, problem
from trainer.data.cache import ShardCache
from trainer.data.index import Index, Shard
from trainer.data.verified import rotated
from trainer.storage import ObjectStore

STREAM_THREADS = 32
"""Byte ranges in flight at once: S3 answers a small GET in tens of milliseconds, so only their number gives throughput."""

Tokens = npt.NDArray[Any]
"""Ids in their stored type."""


def map_shard(path: Path, dtype: np.dtype[Any]) -> Tokens:
    """Return the ids in the file, as an array over a read-only memory map."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


class RangeReader:
    """Reads stretches of ids from remote shards, many at a time."""

    def __init__(self, store: ObjectStore, shards: Sequence[Shard]) -> None:
        self._store = store
        self._shards = shards
        self._seen: set[int] = set()
        self._pool = ThreadPoolExecutor(STREAM_THREADS, thread_name_prefix="shard-range")

    def read(self, wanted: Sequence[tuple[int, int, Tokens]]) -> None:
        """Fill each target with ids of (shard number, first id, target); raises the first failure."""
        for _ in self._pool.map(self._read_one, wanted):
            pass

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _read_one(self, want: tuple[int, int, Tokens]) -> None:
        number, offset, target = want
        shard = self._shards[number]
        if number not in self._seen:
            self._require_same(shard)
            self._seen.add(number)
        self._store.read_into(shard.tokens_key, target.view(np.uint8).data, offset * target.dtype.itemsize)

    def _require_same(self, shard: Shard) -> None:
        """Require the whole object to be the one that was uploaded: a range of it has no checksum in the index."""
        stored = self._store.stat(shard.tokens_key).crc64nvme
        if stored is not None and stored != shard.crc64nvme:
            name = f"{self._store.uri.rstrip('/')}/{shard.tokens_key}"
            why = f"the store holds checksum {stored:016x}, the index says {shard.crc64nvme:016x}"
            raise UserError(problem("shard", name, why, fix="restore the shard, or tokenize the input again"))


class Filler:
    """A background thread that brings shards into the cache and puts their maps into `arrays`."""

    def __init__(
        self, store: ObjectStore, index: Index, shards: Sequence[Shard], arrays: list[Tokens | None], cache: ShardCache
    ) -> None:
        self._store = store
        self._dtype = index.numpy_dtype
        self._shards = shards
        self._arrays = arrays
        self._cache = cache
        self._stop = threading.Event()
        self._thread = BackgroundThread(self._run, "shard-cache")
        self._thread.start()
        atexit.register(self.close)

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        self._thread.check()

    def close(self) -> None:
        """Stop after the shard under way."""
        self._stop.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        for number in rotated(range(len(self._shards))):
            if self._stop.is_set():
                return
            path = self._cache.fetch(self._store, self._shards[number], self._dtype.itemsize)
            self._arrays[number] = map_shard(path, self._dtype)
