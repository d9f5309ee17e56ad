"""A checkpoint of 1,024 ranks: what rank 0 spends on it beside its own share, and what a rank reads to go on from it.

No rank runs: a fake process group shards a real model for the first of them, and the others' chunks follow from its cuts.
What a rank reads comes from a store that makes up indexes, and zeros for data, when they are read.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from awscrt.checksums import combine_crc64nvme, crc64nvme
from torch.distributed import HashStore

from tests.bench.harness import Row, run_bench
from tests.checkpoint.written import held_on, read_checkpoint
from tests.sharded import LlamaSource, first_of
from trainer.checkpoint.format.chunk_plan import data_size, mesh_layout, plan_chunks
from trainer.checkpoint.format.layout import attempt_name, data_key, index_key
from trainer.checkpoint.format.mesh_layout import layout_digest, ranks_storing
from trainer.checkpoint.format.records import (
    BLOCK_BYTES,
    Block,
    Manifest,
    MeshAxis,
    Part,
    RankIndex,
    decode_index,
    decode_manifest,
    encode,
)
from trainer.checkpoint.load.assemble import Region
from trainer.checkpoint.save.commit import manifest_of
from trainer.checkpoint.save.writer import Stored
from trainer.chunk import HeldChunk
from trainer.config import ParallelConfig, PrecisionConfig
from trainer.parallel.fsdp import Sharded
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.shards import local_shard
from trainer.parallel.world import World
from trainer.storage import ObjectInfo
from trainer.storage.local import LocalStore
from trainer.tasks.models import llama

EIGHT_B = replace(llama.PRESETS["8b"], vocab_size=128_256)
SEVENTY_B = replace(EIGHT_B, width=8192, layers=80, heads=64, hidden=28_672)
"""https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json"""
SHAPES = {"8B": EIGHT_B, "70B": SEVENTY_B}
MESHES = {"FSDP 1024": (1, 1024, 1), "HSDP 8 x 128": (8, 128, 1), "FSDP 128 x TP 8": (1, 128, 8)}
"""Replicas, shards, tensor ranks."""
RANKS = 1024
SEEN = (0, 1, 513, 1023)
"""The ranks whose reading is counted; the first store what is small for others."""
ATTEMPT = attempt_name(1, 1, "00000000")
ALLOWED_S, ALLOWED_BYTES, ALLOWED_SHARE = 1.0, 100e6, 1.2


def first_ranks_chunks(shape: llama.LlamaShape, dims: ParallelDims) -> list[HeldChunk]:
    """What rank 0 holds of weights and AdamW's state."""
    held = []
    with first_of(RANKS):
        world = World(0, RANKS, 0, torch.device("cpu"), HashStore())
        strategy, source = Sharded(ParallelConfig(), PrecisionConfig(), world, dims), LlamaSource(shape)
        weights = dict(strategy.wrap(strategy.build(source), source).named_parameters())
        for name, weight in weights.items():
            chunk = local_shard(f"model/{name}", weight.detach(), dims.axes).chunk
            held.append(chunk)
            for state in ("exp_avg", "exp_avg_sq"):
                held.append(replace(chunk, tensor=replace(chunk.tensor, name=f"optim/{name}/{state}")))
            held.append(local_shard(f"optim/{name}/step", torch.tensor(0.0), dims.axes).chunk)
    return held


def chunks_of(first: Sequence[HeldChunk], dims: ParallelDims) -> list[HeldChunk]:
    """What another rank of the same mesh holds."""
    mesh = {axis.name: axis.size for axis in dims.axes}
    return held_on(mesh, dims.rank, {chunk.tensor: chunk.cuts for chunk in first})


def rank_0(held: Sequence[HeldChunk], axes: Sequence[MeshAxis]) -> Manifest:
    """Plan, compare the ranks, and write and read the record that commits: all that the number of ranks makes longer."""
    plan_chunks(held, sharded=True)
    layout = mesh_layout(held, axes)
    digests = dict.fromkeys(range(RANKS), layout_digest(layout))
    assert set(digests.values()) == {layout_digest(layout)}
    stored = {rank: Stored(1, 2**63 + rank, 3, 2**63 - rank) for rank in range(RANKS)}
    manifest = manifest_of(ATTEMPT, stored, parent=None, state={}, about={}, layout=layout)
    return decode_manifest(encode(manifest))


@cache
def zeros(size: int) -> int:
    return crc64nvme(bytes(size))


class Zeros(LocalStore):
    """Parts of ranks: indexes by their plans, data of zeros; counts what is read."""

    def __init__(self, folder: str, chunks: Callable[[int], list[HeldChunk]]) -> None:
        super().__init__(folder)
        self._chunks = chunks
        self.indexes: dict[str, bytes] = {}
        self.read_bytes = 0

    def part(self, rank: int) -> Part:
        entries = plan_chunks(self._chunks(rank), sharded=True)
        size, whole = data_size(entries), 0
        blocks = [Block(at, min(BLOCK_BYTES, size - at), 0) for at in range(0, size, BLOCK_BYTES)]
        blocks = [replace(block, crc64nvme=zeros(block.size)) for block in blocks]
        for block in blocks:
            whole = combine_crc64nvme(whole, block.crc64nvme, block.size)
        raw = encode(RankIndex(ATTEMPT, rank, size, size, "none", entries, tuple(blocks)))
        key = index_key(ATTEMPT, rank)
        self.indexes[key] = raw
        return Part(rank, data_key(ATTEMPT, rank), size, whole, key, len(raw), crc64nvme(raw))

    def read(self, key: str) -> tuple[bytes, str]:
        self.read_bytes += len(self.indexes[key])
        return self.indexes[key], ""

    def stat(self, key: str) -> ObjectInfo:
        part = self.parts[key]
        return ObjectInfo(key, part.data_size, "", 0.0, part.data_crc64nvme)

    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        self.read_bytes += len(buffer)

    parts: Mapping[str, Part] = {}


def share_read(first: Sequence[HeldChunk], manifest: Manifest, dims: ParallelDims) -> tuple[float, int]:
    """Bytes that a rank reads for each byte that it holds, and the bytes that it holds."""
    held = chunks_of(first, dims)
    regions = {chunk.tensor.name: Region(chunk.offsets, chunk.lengths, chunk.tensor) for chunk in held}
    layout = manifest.layout
    assert layout is not None
    needed = set()
    for group in layout.groups:
        for tensor in group.tensors:
            region = regions[tensor.name]
            needed.update(ranks_storing(layout, group, tensor, region.offsets, region.lengths))
    with tempfile.TemporaryDirectory() as folder:
        store = Zeros(folder, lambda rank: chunks_of(first, replace(dims, rank=rank)))
        parts = {rank: store.part(rank) for rank in needed}
        store.parts = {part.data_key: part for part in parts.values()}
        whole = replace(manifest, parts=tuple(parts.get(part.rank, part) for part in manifest.parts))
        read_checkpoint(store, whole, regions.__getitem__)
    size = sum(chunk.size for chunk in held)
    return (store.read_bytes + len(encode(whole))) / size, size


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    rows: list[Row] = []
    for model, shape in SHAPES.items():
        for mesh, (replicate, shard, tensor) in MESHES.items():
            dims = ParallelDims(replicate, shard, 0, tensor)
            first = first_ranks_chunks(shape, dims)
            rows += measure_mesh(f"{model}, {mesh}", first, dims, repetitions)
            print(f"{model}, {mesh}: done", file=sys.stderr, flush=True)
    return [row.as_dict() for row in rows]


def measure_mesh(label: str, first: list[HeldChunk], dims: ParallelDims, repetitions: int) -> list[Row]:
    axes = [MeshAxis(axis.name, axis.size) for axis in dims.axes]
    seconds = []
    for _ in range(repetitions):
        began = time.process_time()
        manifest = rank_0(first, axes)
        seconds.append(time.process_time() - began)
    tracemalloc.start()
    rank_0(first, axes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = len(encode(manifest))
    index = encode(RankIndex(ATTEMPT, 0, 0, 0, "none", plan_chunks(first, sharded=True), ()))
    began = time.process_time()
    decode_index(index)
    all_s = RANKS * (time.process_time() - began)
    note = (
        f"manifest {size / 1e3:.0f} kB; to decode all indexes ({RANKS * len(index) / 1e6:.0f} MB) takes {all_s:.1f} s"
    )
    reads = {rank: share_read(first, manifest, replace(dims, rank=rank)) for rank in SEEN}
    worst = max(reads, key=lambda rank: reads[rank][0])
    share = f"rank {worst}, the most of ranks {', '.join(map(str, SEEN))}; a share is {reads[worst][1] / 1e6:.0f} MB"
    ours = min(seconds)
    return [
        at_most(f"plan and commit record on rank 0, CPU time, {label}", ours, ALLOWED_S, "s", note),
        at_most(f"memory of that, {label}", peak / 1e6, ALLOWED_BYTES / 1e6, "MB", ""),
        at_most(f"bytes read of bytes held, {label}", reads[worst][0], ALLOWED_SHARE, "", share),
    ]


def at_most(figure: str, ours: float, allowed: float, unit: str, note: str) -> Row:
    return Row(figure, ours, allowed, ours / allowed, 1.0, None, unit, baseline_name="allowed", at_most=True, note=note)


def main() -> int:
    return run_bench(measure)


if __name__ == "__main__":
    sys.exit(main())
