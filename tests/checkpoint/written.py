"""A small, plain writer of checkpoints, so that the reader is tested against FORMAT.md and not only against our own saver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from awscrt.checksums import crc64nvme

from trainer.checkpoint.format.chunk_plan import data_size, mesh_layout, plan_chunks
from trainer.checkpoint.format.layout import LEASE, MANIFESTS, ManifestId, attempt_name, data_key, index_key
from trainer.checkpoint.format.records import (
    ALIGN,
    BLOCK_BYTES,
    Block,
    Entry,
    Manifest,
    MeshAxis,
    Part,
    RankIndex,
    encode,
)
from trainer.checkpoint.lineage.lease import LeaseRecord, LineageEntry
from trainer.checkpoint.load.assemble import Wanted
from trainer.checkpoint.load.parts import Places, read_manifest
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.chunk import HeldChunk, TensorMeta
from trainer.parallel.shards import chunk_of
from trainer.storage import ObjectStore

Boxed = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]
"""A box's own elements, the shape of the tensor it is cut from, and where it begins there."""


Cut = tuple[torch.Tensor, tuple[tuple[int, str], ...]]
"""A whole tensor, and the pairs of a dimension and an axis by which a mesh cuts it."""


def whole(tensor: torch.Tensor) -> Boxed:
    return tensor, tuple(tensor.shape), (0,) * tensor.dim()


def rows(tensor: torch.Tensor, start: int, stop: int) -> Boxed:
    return tensor[start:stop], tuple(tensor.shape), (start, *(0,) * (tensor.dim() - 1))


def split_state(tensors: Mapping[str, torch.Tensor], world: int) -> list[dict[str, Boxed]]:
    """Every tensor with rows cut over all ranks, the others whole on rank 0."""
    ranks: list[dict[str, Boxed]] = [{} for _ in range(world)]
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or tensor.shape[0] < world:
            ranks[0][name] = whole(tensor)
            continue
        cuts = [r * tensor.shape[0] // world for r in range(world + 1)]
        for r in range(world):
            ranks[r][name] = rows(tensor, cuts[r], cuts[r + 1])
    return ranks


def write_part(store: ObjectStore, attempt: str, rank: int, boxes: Mapping[str, Boxed], codec: str = "none") -> Part:
    logical = bytearray()
    entries = []
    for name, (tensor, shape, offsets) in boxes.items():
        logical.extend(bytes(-len(logical) % ALIGN))
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, shape, offsets, tuple(tensor.shape), len(logical), len(raw)))
        logical.extend(raw)
    return store_part(store, attempt, rank, tuple(entries), logical, codec)


def store_part(
    store: ObjectStore, attempt: str, rank: int, entries: tuple[Entry, ...], logical: bytearray, codec: str = "none"
) -> Part:
    """Store the bytes of one rank, in which these entries lie, and its index."""
    starts = range(0, len(logical), BLOCK_BYTES)
    bodies = [bytes(logical[start : start + BLOCK_BYTES]) for start in starts]
    blocks = tuple(Block(at, len(body), crc64nvme(body)) for at, body in zip(starts, bodies, strict=True))
    index = RankIndex(attempt, rank, len(logical), len(logical), codec, entries, blocks)
    store.put(data_key(attempt, rank), bytes(logical))
    raw_index = encode(index)
    store.put(index_key(attempt, rank), raw_index)
    return Part(
        rank,
        data_key(attempt, rank),
        len(logical),
        crc64nvme(bytes(logical)),
        index_key(attempt, rank),
        len(raw_index),
        crc64nvme(raw_index),
    )


def write_checkpoint(
    store: ObjectStore,
    step: int,
    ranks: Sequence[Mapping[str, Boxed]],
    *,
    generation: int = 1,
    parent: ManifestId | None = None,
    nonce: str = "0123abcd",
    codec: str = "none",
    about: Mapping[str, Any] | None = None,
) -> Manifest:
    attempt = attempt_name(generation, step, nonce)
    manifest = Manifest(
        generation=generation,
        step=step,
        attempt=attempt,
        parent=parent,
        world_size=len(ranks),
        created="2026-01-02T03:04:05Z",
        parts=tuple(write_part(store, attempt, rank, boxes, codec) for rank, boxes in enumerate(ranks)),
        state={"step": step},
        about=dict(about or {}),
    )
    store.put(manifest.id.key, encode(manifest), if_absent=True)
    return manifest


def held_on(
    mesh: Mapping[str, int], rank: int, tensors: Mapping[TensorMeta, tuple[tuple[int, str], ...]]
) -> list[HeldChunk]:
    """What a rank of this mesh holds of tensors that these pairs of a dimension and an axis cut."""
    place = list(product(*map(range, mesh.values())))[rank]
    at = dict(zip(mesh, place, strict=True))
    held = []
    for meta, cuts in tensors.items():
        offsets, lengths = chunk_of(meta.shape, [(dim, mesh[axis], at[axis]) for dim, axis in cuts])
        others = tuple(axis for axis in mesh if axis not in {axis for _, axis in cuts})
        replica, replicas = 0, 1
        for axis in others:
            replica, replicas = replica * mesh[axis] + at[axis], replicas * mesh[axis]
        held.append(HeldChunk(meta, offsets, lengths, others, replica, replicas, cuts))
    return held


def cuts_of(state: Mapping[str, Cut]) -> dict[TensorMeta, tuple[tuple[int, str], ...]]:
    """The same without the elements."""
    return {
        TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.element_size()): cuts
        for name, (tensor, cuts) in state.items()
    }


def write_sharded(store: ObjectStore, step: int, mesh: Mapping[str, int], tensors: Mapping[str, Cut]) -> Manifest:
    """What the ranks of this mesh store of tensors that its axes cut, laid out as our saver does."""
    attempt = attempt_name(1, step, "0123abcd")
    parts = []
    for rank in range(prod(mesh.values())):
        entries = plan_chunks(held_on(mesh, rank, cuts_of(tensors)), sharded=True)
        logical = bytearray(data_size(entries))
        for entry in entries:
            at = tuple(slice(begin, begin + length) for begin, length in zip(entry.offsets, entry.lengths, strict=True))
            logical[entry.start : entry.start + entry.size] = raw_bytes(tensors[entry.name][0][at])
        parts.append(store_part(store, attempt, rank, entries, logical))
    layout = mesh_layout(held_on(mesh, 0, cuts_of(tensors)), [MeshAxis(*axis) for axis in mesh.items()])
    manifest = Manifest(1, step, attempt, None, len(parts), "2026-01-02T03:04:05Z", tuple(parts), {}, {}, layout)
    store.put(manifest.id.key, encode(manifest), if_absent=True)
    return manifest


def rewrite_manifest(store: ObjectStore, manifest: Manifest, **changes: Any) -> Manifest:
    """Replace a manifest by one that is valid in itself but says something else."""
    changed = replace(manifest, **changes)
    store.put(manifest.id.key, encode(changed))
    return changed


def write_steps(store: ObjectStore, steps: Iterable[int], generation: int = 1, metric: float | None = None) -> None:
    """A checkpoint of two ranks for each of these steps, of `sample_state(step)`."""
    for step in steps:
        nonce = f"{generation:04x}{step:04x}"
        about = {} if metric is None else {"eval_loss": metric}
        state = split_state(sample_state(step), 2)
        write_checkpoint(store, step, state, generation=generation, nonce=nonce, about=about)


def put_lease(store: ObjectStore, generation: int, *lineage: tuple[int, ManifestId | None]) -> None:
    entries = tuple(LineageEntry(g, parent) for g, parent in lineage)
    store.put(LEASE, LeaseRecord(generation, "host", "2026-01-02T03:04:05Z", "00" * 8, entries).encode())


def manifests_of(store: ObjectStore) -> list[ManifestId]:
    return [i for i in (ManifestId.of_key(info.key) for info in store.list(MANIFESTS)) if i]


def read_checkpoint(
    store: ObjectStore, manifest: Manifest, want: Wanted = lambda name: True
) -> dict[str, torch.Tensor]:
    """The wanted tensors of a checkpoint in fresh memory."""
    return StoredCheckpoint(Places(store), manifest).read(want)


def assert_holds(store: ObjectStore, manifest_id: ManifestId, expected: Mapping[str, torch.Tensor]) -> None:
    """The checkpoint verifies, and its tensors are these to the last bit."""
    manifest = read_manifest(store, manifest_id)
    assert_same(read_checkpoint(store, manifest), expected)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(found[name]) == raw_bytes(tensor), name


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(flat.view(torch.uint8).numpy().data)


def flip_bit(store: ObjectStore, key: str, position: int, bit: int = 0) -> None:
    body = bytearray(store.read(key)[0])
    body[position % len(body)] ^= 1 << bit
    store.put(key, bytes(body))


def sample_state(seed: int = 0, rows: int = 97) -> dict[str, torch.Tensor]:
    """A few tensors of the kinds that a training state has, a kilobyte to a megabyte."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/embed.weight": torch.randn(rows, 33, generator=generator),
        "model/norm.weight": torch.randn(33, generator=generator).to(torch.bfloat16),
        "optim/embed.weight/exp_avg": torch.randn(rows, 33, generator=generator),
        "optim/step": torch.tensor(float(seed)),
        "model/mask": torch.rand(5, 7, generator=generator) > 0.5,
        "model/empty": torch.empty(0, 4),
    }
