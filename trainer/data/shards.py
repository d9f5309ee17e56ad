"""Reading a token set: windows of consecutive ids, gathered into batches by vectorised copies out of memory maps.

A split is one stream of ids, whatever its cut into shards. Window i of length T is ids [i*T, i*T + T + 1): inputs and
targets of T positions, so every id but the first is predicted exactly once and at most T ids at the very end are left
out. A window that crosses from one shard into the next is put together from both.

A local set is mapped where it lies, and `verified.py` checks its checksums. Of a remote one, the shards
that fit the cache are downloaded in the background, and every window that is not on disk (yet) is read from S3 by byte
range, many at a time; `prefetch` starts that for the next batch while the current one is trained on. Whole shards are
verified by checksum. Byte ranges cannot be; they rely on the transport and on one look at the size and the checksum
that S3 keeps for the shard.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lustrain.problem import UserError, problem
from trainer.data.cache import ShardCache, resident_shards
from trainer.data.index import TOKENIZER, Index, read_index
from trainer.data.remote import Filler, RangeReader, Tokens, map_shard
from trainer.data.tokenizer import Tokenizer, TokenizerSpec, build
from trainer.data.verified import ALONE, WAIT_S, Ranks, Verifier
from trainer.storage import ObjectStore, open_store
from trainer.storage.archive import INTELLIGENT_TIERING, refuse_archived
from trainer.storage.local import LocalStore

PREFETCHED_BATCHES = 4
"""Batches that may wait to be gathered; a further one takes the place of the oldest."""
SHOWN_PROBLEMS = 8


class TokenSet:
    """One split of a token set, ready to be gathered from; made by `open`. All methods may be called from any thread."""

    def __init__(self, store: ObjectStore, index: Index, split: str, arrays: list[Tokens | None]) -> None:
        self._store = store
        self.index = index
        self._split = index.splits[split]
        self._arrays = arrays
        self._views: dict[tuple[int, int], Tokens] = {}
        self._starts = np.cumsum([0, *(shard.tokens for shard in self._split.shards)], dtype=np.int64)
        self._ranges = RangeReader(store, self._split.shards)
        self._ahead_pool = ThreadPoolExecutor(1, thread_name_prefix="gather-ahead")
        self._ahead: dict[tuple[bytes, int], Future[Tokens]] = {}
        self._ahead_lock = threading.Lock()
        self._filler: Filler | None = None
        self._verifier: Verifier | None = None

    @classmethod
    def open(
        cls,
        uri: str,
        split: str,
        *,
        cache_dir: Path,
        cache_bytes: int,
        name: str = "token set",
    ) -> TokenSet:
        """Open `split` of the set at `uri` (a folder or `s3://…`); every shard's size is checked at once.

        `name` is what the user calls `uri`, e.g. `task.data`.
        `cache_dir` and `cache_bytes` matter for remote sets only. UserError for a missing set, split, or shard, and
        for one that is cut short or of a newer format.
        """
        store = open_store(uri, create=False, name=name)
        index = read_index(store)
        if split not in index.splits:
            why, allowed = "the token set has no such split", ", ".join(sorted(index.splits))
            raise UserError(problem("split", split, why, allowed=allowed, fix="tokenize with --val-fraction > 0"))
        shards = index.splits[split].shards
        _require_readable(store, index, split, name)
        if isinstance(store, LocalStore):
            arrays: list[Tokens | None] = [
                map_shard(store.root / shard.tokens_key, index.numpy_dtype) for shard in shards
            ]
            return cls(store, index, split, arrays)
        opened = cls(store, index, split, [None] * len(shards))
        resident = resident_shards(index, cache_bytes)[split]
        if resident:
            cache = ShardCache(cache_dir, cache_bytes, index.checksum)
            opened._filler = Filler(store, index, shards[:resident], opened._arrays, cache)
        return opened

    @property
    def tokens(self) -> int:
        """Ids in this split."""
        return self._split.tokens

    @property
    def is_mapped(self) -> bool:
        """Every shard of the split lies on this machine; from here on nothing is read from the store."""
        return all(array is not None for array in self._arrays)

    def windows(self, seq_len: int) -> int:
        """How many windows of `seq_len` the split holds; 0 when it is shorter than one."""
        return max(0, (self.tokens - 1) // seq_len)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the set, stored beside it; UserError when a different one lies there."""
        if self.index.tokenizer_kind == "bytes":
            tokenizer: Tokenizer = build(TokenizerSpec("bytes"))
        else:
            raw, _ = self._store.read(TOKENIZER)
            try:
                tokenizer = build(TokenizerSpec("huggingface", raw.decode("utf-8"), self.index.eos_id))
            except Exception as error:  # the engine has no exception of its own
                name = f"{self._store.uri.rstrip('/')}/{TOKENIZER}"
                why = f"cannot be read: {str(error)[:100]}"
                raise UserError(
                    problem("tokenizer", name, why, fix="restore the file that `tokenize` wrote")
                ) from error
        if tokenizer.hash != self.index.tokenizer_hash:
            why = f"is not the tokenizer of this set: its hash is {tokenizer.hash[:16]}…, not {self.index.tokenizer_hash[:16]}…"
            name = f"{self._store.uri.rstrip('/')}/{TOKENIZER}"
            raise UserError(problem("tokenizer", name, why, fix="restore the file that `tokenize` wrote"))
        return tokenizer

    def gather(self, ids: npt.NDArray[np.integer[Any]], seq_len: int) -> Tokens:
        """Windows `ids` as an array [len(ids), seq_len + 1] of the stored type; ValueError for an id outside [0, windows)."""
        with self._ahead_lock:
            ready = self._ahead.pop(_batch_key(ids, seq_len), None) if self._ahead else None
        batch = ready.result() if ready is not None else self._gather(ids, seq_len)
        if batch.size and int(batch.max()) >= self.index.vocab_size:
            self._refuse_ids(ids, batch)
        return batch

    def prefetch(self, ids: npt.NDArray[np.integer[Any]], seq_len: int) -> None:
        """Start to read a batch that `gather` will need soon; do nothing when all shards are mapped already."""
        if self.is_mapped:
            return
        with self._ahead_lock:
            while len(self._ahead) >= PREFETCHED_BATCHES:
                self._ahead.pop(next(iter(self._ahead))).cancel()
            self._ahead[_batch_key(ids, seq_len)] = self._ahead_pool.submit(self._gather, ids.copy(), seq_len)

    def verify(self, cache_dir: Path, wait_s: float | None = WAIT_S, ranks: Ranks = ALONE) -> bool:
        """Check a local set's checksums; False when that takes longer than `wait_s` seconds.

        It then goes on in the background, and `check` raises what it finds. Shards of a remote set are checked as
        they arrive. `cache_dir` remembers for the whole node what was found whole. UserError names the damaged shards.
        """
        if not isinstance(self._store, LocalStore):
            return True
        self._verifier = self._verifier or Verifier(self._store.root, self._split.shards, cache_dir, ranks)
        return self._verifier.wait(wait_s)

    def check(self) -> None:
        """UserError for shards that the background has found damaged since `verify`."""
        if self._verifier is not None:
            self._verifier.raise_failure()

    def close(self) -> None:
        """End background reading; arrays that were gathered stay valid."""
        if self._verifier is not None:
            self._verifier.close()
        if self._filler is not None:
            self._filler.close()
        self._ahead_pool.shutdown(cancel_futures=True)
        self._ranges.close()

    def _gather(self, ids: npt.NDArray[np.integer[Any]], seq_len: int) -> Tokens:
        if self._filler is not None:
            self._filler.check()
        windows = self.windows(seq_len)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= windows):
            raise ValueError(f"window ids must be in [0, {windows}), not {int(ids.min())}..{int(ids.max())}")
        starts = ids.astype(np.int64) * seq_len
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        offsets = starts - self._starts[shards]
        whole = starts + seq_len + 1 <= self._starts[shards + 1]
        first = int(shards[0]) if ids.size else 0
        if ids.size and whole.all() and (shards == first).all() and self._arrays[first] is not None:
            batch: Tokens = self._view(first, seq_len + 1)[offsets]
            return batch
        batch = np.empty((ids.size, seq_len + 1), self.index.numpy_dtype)
        # A set of plain integers is several times cheaper than np.unique for a batch.
        shards[~whole] = -1
        left = []
        for shard in set(shards.tolist()):
            rows = np.flatnonzero(shards == shard)
            if shard < 0 or self._arrays[shard] is None:
                left += rows.tolist()
            else:
                batch[rows] = self._view(shard, seq_len + 1)[offsets[rows]]
        self._copy_pieces(batch, left, starts)
        return batch

    def _refuse_ids(self, ids: npt.NDArray[np.integer[Any]], batch: Tokens) -> None:
        row = int(np.flatnonzero(batch.max(axis=1) >= self.index.vocab_size)[0])
        number, known = int(batch[row].max()), self.index.vocab_size
        why = f"holds token id {number}, but its vocabulary has {known} ids (window {int(ids[row])})"
        raise UserError(problem("token set", self._store.uri, why, fix="tokenize the input again"))

    def _copy_pieces(self, batch: Tokens, rows: Sequence[int], starts: npt.NDArray[np.int64]) -> None:
        """Fill rows that cross shards, or whose shards are not on disk, shard by shard."""
        reads: list[tuple[int, int, Tokens]] = []
        for row in rows:
            position, done = int(starts[row]), 0
            while done < batch.shape[1]:
                shard = int(np.searchsorted(self._starts, position, side="right")) - 1
                offset = position - int(self._starts[shard])
                count = min(batch.shape[1] - done, self._split.shards[shard].tokens - offset)
                array, target = self._arrays[shard], batch[row, done : done + count]
                if array is None:
                    reads.append((shard, offset, target))
                else:
                    target[:] = array[offset : offset + count]
                position, done = position + count, done + count
        if reads:
            self._ranges.read(reads)

    def _view(self, shard: int, length: int) -> Tokens:
        """All windows of `length` ids of a mapped shard as a view [tokens - length + 1, length]."""
        view = self._views.get((shard, length))
        if view is None:
            array = self._arrays[shard]
            assert array is not None
            view = np.lib.stride_tricks.sliding_window_view(array, length)
            self._views[shard, length] = view
        return view


def _batch_key(ids: npt.NDArray[np.integer[Any]], seq_len: int) -> tuple[bytes, int]:
    return ids.astype(np.int64).tobytes(), seq_len


def _require_readable(store: ObjectStore, index: Index, split: str, name: str) -> None:
    infos = {info.key: info for info in store.list(f"{split}-")}
    problems = []
    for shard in index.splits[split].shards:
        for key, size in (
            (shard.tokens_key, shard.tokens * index.numpy_dtype.itemsize),
            (shard.ends_key, shard.documents * 8),
        ):
            if key not in infos:
                problems.append(_wrong(store.uri, key, "is missing"))
            elif infos[key].size != size:
                problems.append(_wrong(store.uri, key, f"has {infos[key].size:,} bytes, the index says {size:,}"))
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"… and {len(problems) - SHOWN_PROBLEMS} more files are missing or cut short"]
    if problems:
        raise UserError(problems)
    shards = [infos[shard.tokens_key] for shard in index.splits[split].shards]
    tiered = next((number for number, info in enumerate(shards) if info.storage_class == INTELLIGENT_TIERING), None)
    if tiered is not None:
        # A set that nothing has read for months is archived as a whole, so one request tells.
        shards[tiered] = store.stat(shards[tiered].key)
    refuse_archived(name, store.uri, shards)


def _wrong(uri: str, key: str, why: str) -> str:
    name = f"{uri.rstrip('/')}/{key}"
    return problem("shard", name, why, fix="restore the file, or tokenize the input again")
