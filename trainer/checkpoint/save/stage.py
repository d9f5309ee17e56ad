"""Copies of tensors in memory shared with the writer process: the only part of a save that training waits for."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.format.chunk_plan import data_size, mesh_layout, plan_chunks
from trainer.checkpoint.format.records import Entry, MeshAxis, MeshLayout
from trainer.chunk import HeldChunk
from trainer.memory import available_memory
from trainer.parallel.shards import Axis, LocalShard, local_shard, require_dense
from trainer.storage.direct import seal

BATCH_BYTES = 4 << 20
"""Bytes a copying thread takes at a time; 256 KiB to 64 MiB ran equally fast, within 5 % of a 2-thread memcpy."""
_ROUND_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23
"""linux/mman.h, since Linux 5.14; Python's mmap does not name it."""

_libc = ctypes.CDLL(None, use_errno=True)


def _on_current_device() -> Callable[[], None]:
    """Return what a thread of this rank must run first: CUDA's current device is per thread, and 0 in a new one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


class StagingError(Exception):
    """This host has not enough memory for a copy of the tensors to save."""


_numbers = itertools.count()


class StagingBuffer:
    """Shared memory of a fixed size behind `fd`, touched when made, page-locked where there is a CUDA device.

    First touch costs ten times the copy itself, hence at construction. Raises StagingError when the host lacks memory.
    """

    def __init__(self, size: int, pool: ThreadPoolExecutor, threads: int) -> None:
        self.number = next(_numbers)
        self.size = max(-(-size // _ROUND_BYTES), 1) * _ROUND_BYTES
        free = available_memory()
        if free is not None and self.size > free:
            raise StagingError(f"no memory to stage the checkpoint: {self.size} bytes are needed, {free} are available")
        self.fd = os.memfd_create("lustrain-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        seal(self.fd)
        self._map = mmap.mmap(self.fd, self.size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._threads = threads
        self._pool = pool
        self._touch()
        self.pinned = self._pin()
        self._entries: tuple[Entry, ...] = ()

    def fill(self, entries: tuple[Entry, ...], shards: Mapping[str, LocalShard]) -> None:
        """Copy each entry's rows of its shard to the entry's place; on return the tensors may change again."""
        if entries is not self._entries:
            self._clear_gaps(entries)
            self._entries = entries
        spans: list[tuple[int, int, int]] = []
        devices: set[torch.device] = set()
        for entry in entries:
            source = _rows_of(shards[entry.name], entry)
            if not entry.size:
                continue
            if _plain_bytes(source):
                spans.append((self._bytes.data_ptr() + entry.start, source.data_ptr(), entry.size))
            else:
                self._view(entry, source.dtype).copy_(source, non_blocking=source.is_cuda)
                devices |= {source.device} if source.is_cuda else set()
        # Threads may share a list's iterator, not a generator.
        batches = iter(list(_batches(spans)))
        self._everywhere(lambda: _copy(batches))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def close(self) -> None:
        """Free the memory; the writer process may still hold its own descriptor."""
        if self.pinned:
            _cudart().cudaHostUnregister(self._bytes.data_ptr())
        del self._bytes
        self._map.close()
        os.close(self.fd)

    def _touch(self) -> None:
        address = self._bytes.data_ptr()
        share = -(-self.size // (self._threads * mmap.PAGESIZE)) * mmap.PAGESIZE
        spans = iter([(address + at, min(share, self.size - at)) for at in range(0, self.size, share)])

        def touch() -> None:
            for start, size in spans:
                populated = _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
                if populated != 0:
                    ctypes.memset(start, 0, size)

        self._everywhere(touch)

    def _pin(self) -> bool:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        return int(_cudart().cudaHostRegister(self._bytes.data_ptr(), self.size, 0)) == 0

    def _everywhere(self, work: Callable[[], None]) -> None:
        """Run `work` in this thread and in `threads - 1` of the pool; calls through ctypes do not hold the GIL."""
        others = [self._pool.submit(work) for _ in range(self._threads - 1)]
        work()
        for other in others:
            other.result()

    def _view(self, entry: Entry, dtype: torch.dtype) -> Tensor:
        return self._bytes[entry.start : entry.start + entry.size].view(dtype).view(entry.lengths)

    def _clear_gaps(self, entries: Sequence[Entry]) -> None:
        """Set the bytes between tensors to zero, so that no remains of an earlier layout get into the file."""
        ends = [entry.start + entry.size for entry in entries]
        starts = [entry.start for entry in entries[1:]] + [data_size(entries)]
        for end, start in zip(ends, starts, strict=True):
            self._bytes[end:start].zero_()


@dataclass(frozen=True)
class Staged:
    """One rank's part of a save, ready to be written: `size` bytes in `buffer`, laid out as `entries`."""

    buffer: StagingBuffer
    entries: tuple[Entry, ...]
    size: int
    layout: MeshLayout | None
    """Of a sharded run: where its ranks store what they hold, if all of them have the same mesh and tensors."""
    names: frozenset[str]
    """Of the tensors that this rank holds, whether or not it stores rows of them."""


class Staging:
    """One rank's staging buffers: one that is kept, and a second only while an urgent save finds the first one busy."""

    def __init__(self, mesh: Sequence[Axis], threads: int) -> None:
        """`mesh` is the job's, with this rank's place in it."""
        self._mesh, self._threads = mesh, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="staging", initializer=_on_current_device())
        self._free: list[StagingBuffer] = []
        self._busy: list[StagingBuffer] = []
        self._changed = threading.Condition()
        self._held: list[HeldChunk] = []
        self._entries: tuple[Entry, ...] = ()
        self._layout: MeshLayout | None = None
        self._preparing: Future[StagingBuffer] | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to allocate and touch the first buffer in the background, so that the first save need not.

        UserError, as in `stage`, for a tensor that cannot be saved, by its name.
        """
        size = data_size(self._lay_out(self._shards(tensors)))
        if self._preparing is None and not self._free and not self._busy:
            self._preparing = self._pool.submit(StagingBuffer, size, self._pool, self._threads)

    def stage(self, tensors: Mapping[str, Tensor], *, urgent: bool, wait_s: float) -> Staged:
        """Copy what this rank stores; on return the tensors may change again.

        Where the buffer is busy, an urgent save takes a second one if the host has the memory, and otherwise waits up
        to `wait_s` seconds for the first. Raises StagingError where no buffer can be had.
        """
        shards = self._shards(tensors)
        entries = self._lay_out(shards)
        size = data_size(entries)
        buffer = self._take(size, urgent, wait_s)
        staged = Staged(buffer, entries, size, self._layout, frozenset(tensors))
        try:
            buffer.fill(entries, {shard.name: shard for shard in shards})
        except BaseException:
            self.release(staged)
            raise
        return staged

    def release(self, staged: Staged) -> None:
        """Take back the buffer of bytes that the writer is done with."""
        with self._changed:
            self._busy.remove(staged.buffer)
            if self._free or self._busy:
                staged.buffer.close()
            else:
                self._free.append(staged.buffer)
            self._changed.notify_all()

    @property
    def usable_buffers(self) -> set[int]:
        """Numbers of the buffers that a later save may use."""
        with self._changed:
            return {buffer.number for buffer in (*self._free, *self._busy)}

    def close(self) -> None:
        """Free all memory; no copy may be under way."""
        self._adopt_prepared()
        self._pool.shutdown()
        for buffer in (*self._free, *self._busy):
            buffer.close()
        self._free, self._busy = [], []

    def _take(self, size: int, urgent: bool, wait_s: float) -> StagingBuffer:
        self._adopt_prepared()
        with self._changed:
            if not self._free and self._busy and not urgent:
                raise StagingError("the staging buffer still holds the previous save")
            if not self._free and self._busy and (available_memory() or 0) < 2 * size:
                self._changed.wait_for(lambda: self._free, wait_s)
                if not self._free:
                    raise StagingError(f"no memory for a second buffer, and the first was not free in {wait_s:.0f} s")
            buffer = self._free.pop() if self._free else None
            if buffer is not None and buffer.size < size:
                buffer.close()
                buffer = None
            if buffer is None:
                buffer = StagingBuffer(size, self._pool, self._threads)
            self._busy.append(buffer)
            return buffer

    def _adopt_prepared(self) -> None:
        preparing, self._preparing = self._preparing, None
        if preparing is None:
            return
        try:
            self._free.append(preparing.result())
        except StagingError:
            return  # the save that needs the buffer tries again, and reports it

    def _shards(self, tensors: Mapping[str, Tensor]) -> list[LocalShard]:
        # Anew for each save: torch may give a sharded parameter other memory, and what was kept of it would be stale
        # (https://github.com/pytorch/torchtitan/issues/1136).
        shards = [local_shard(name, tensor, self._mesh) for name, tensor in tensors.items()]
        for shard in shards:
            require_dense(shard.name, shard.tensor)
        return shards

    def _lay_out(self, shards: Sequence[LocalShard]) -> tuple[Entry, ...]:
        held = [shard.chunk for shard in shards]
        if held != self._held:
            # The same on all ranks, unlike what a rank holds: of a tensor of one row the first rank of a shard holds all.
            sharded = any(chunk.cuts for chunk in held)
            axes = [MeshAxis(axis.name, axis.size) for axis in self._mesh]
            self._layout = mesh_layout(held, axes) if sharded else None
            self._entries, self._held = plan_chunks(held, sharded=sharded), held
        return self._entries


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _rows_of(shard: LocalShard, entry: Entry) -> Tensor:
    rows = shard.tensor.detach()
    for dim, (at, begin, length) in enumerate(zip(entry.offsets, shard.chunk.offsets, entry.lengths, strict=True)):
        if length != rows.shape[dim]:
            rows = rows.narrow(dim, at - begin, length)
    return rows


def _plain_bytes(source: Tensor) -> bool:
    return source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg()


def _batches(spans: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut and group (target, source, size) runs of memory so that every batch is about BATCH_BYTES."""
    batch: list[tuple[int, int, int]] = []
    filled = 0
    for target, source, size in spans:
        at = 0
        while at < size:
            taken = min(size - at, BATCH_BYTES - filled)
            batch.append((target + at, source + at, taken))
            at += taken
            filled += taken
            if filled == BATCH_BYTES:
                yield batch
                batch, filled = [], 0
    if batch:
        yield batch


def _copy(batches: Iterator[list[tuple[int, int, int]]]) -> None:
    for batch in batches:
        for target, source, size in batch:
            ctypes.memmove(target, source, size)
