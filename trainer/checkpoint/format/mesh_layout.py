"""Which parts of a sharded run's checkpoint hold which region of a tensor, by the manifest's `layout`: pure, torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice, product
from math import prod
from typing import Any

from awscrt.checksums import crc64nvme

from trainer.checkpoint.format.records import MeshLayout, RankIndex, StoredTensor, TensorGroup


def ranks_storing(
    layout: MeshLayout, group: TensorGroup, tensor: StoredTensor, offsets: Sequence[int], lengths: Sequence[int]
) -> Iterator[int]:
    """Yield the ranks whose parts may hold elements of the region `lengths` from `offsets` on; none for an empty region."""
    if 0 in lengths:
        return
    sizes = {axis.name: axis.size for axis in layout.axes}
    crossing = []
    for dim, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
        names = [axis for at, axis in group.cuts if at == dim]
        places = _crossing(tensor.shape[dim], [sizes[name] for name in names], begin, begin + length)
        crossing.append([dict(zip(names, place, strict=True)) for place in places])
    cutting = {axis for _, axis in group.cuts}
    others = [name for name in sizes if name not in cutting]
    replicas = list(islice(product(*(range(sizes[name]) for name in others)), group.stored_by))
    for parts in product(*crossing):
        at = {name: place for part in parts for name, place in part.items()}
        for replica in replicas:
            yield _rank(sizes, at | dict(zip(others, replica, strict=True)))


def layout_problem(layout: MeshLayout, indexes: Iterable[RankIndex]) -> str:
    """Return why a reader that goes by this layout would not find what these indexes say, or the empty string."""
    known = {tensor.name: (group, tensor) for group in layout.groups for tensor in group.tensors}
    stored: set[str] = set()
    for index in indexes:
        for entry in index.entries:
            group, tensor = known.get(entry.name, (None, None))
            if group is None or tensor is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                return f"tensor {entry.name}: the manifest's layout knows none of this dtype and shape"
            stored.add(entry.name)
            ranks = list(ranks_storing(layout, group, tensor, entry.offsets, entry.lengths))
            # More than one rank for each replica means that the entry goes beyond its own rank's chunk.
            if entry.size and (index.rank not in ranks or len(ranks) > group.stored_by):
                return f"tensor {entry.name}: rank {index.rank} stores a chunk that the manifest's layout has elsewhere"
    missing = sorted(known.keys() - stored)
    return f"tensor {missing[0]}: the manifest's layout names it, and no part holds it" if missing else ""


def layout_digest(layout: MeshLayout) -> str:
    """Return a checksum that ranks share when they have the same mesh, and tensors that are cut alike."""
    tensors = sorted(
        (asdict(tensor) | {"cuts": group.cuts} for group in layout.groups for tensor in group.tensors), key=_name
    )
    body = json.dumps([[asdict(axis) for axis in layout.axes], tensors])
    return f"{crc64nvme(body.encode()):016x}"


def ranks_of(layout: MeshLayout) -> int:
    """Return the number of ranks of the mesh."""
    return prod(axis.size for axis in layout.axes)


def _crossing(length: int, sizes: Sequence[int], begin: int, end: int) -> list[tuple[int, ...]]:
    """Return the places along the axes that cut a dimension at which the elements [begin, end) lie.

    Each cut leaves ceil(length / size) elements of what is left, the last places fewer or none.
    """
    if not sizes:
        return [()]
    step = -(-length // sizes[0])
    found = []
    for place in range(begin // step, -(-end // step)):
        at = place * step
        inner = min(step, length - at)
        for places in _crossing(inner, sizes[1:], max(begin - at, 0), min(end - at, inner)):
            found.append((place, *places))
    return found


def _name(tensor: dict[str, Any]) -> str:
    return str(tensor["name"])


def _rank(sizes: dict[str, int], place: dict[str, int]) -> int:
    rank = 0
    for name, size in sizes.items():
        rank = rank * size + place[name]
    return rank
