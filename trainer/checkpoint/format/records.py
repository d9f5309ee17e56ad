"""The two JSON records of a checkpoint: a rank's index and the manifest that commits them. Torch-free.

Checksums are CRC-64/NVME (the one S3 stores as x-amz-checksum-crc64nvme), written as 16 hex digits. Both records are sealed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from lustrain.from_json import from_json
from lustrain.problem import UserError, problem
from trainer.checkpoint.format.layout import ManifestId
from trainer.sealed import DamagedRecordError, hexed, seal, unhexed, unseal

T = TypeVar("T")

FORMAT = 1
BLOCK_BYTES = 16 << 20
"""Unit of verification: small enough to report where, large enough that the sums are nothing beside the data."""
CODEC = "none"
"""Format 1 has room for codecs of blocks; there is none but this."""
ALIGN = 4096
"""Every tensor starts on a page, so that a reader may map or read it directly."""


class NewerFormatError(UserError):
    """The record was written by a newer Lustrain than this one."""


@dataclass(frozen=True)
class Entry:
    """One chunk of one named tensor: `lengths` elements from `offsets` on, of a tensor of global `shape`.

    Its bytes are [start, start + size) of the rank's logical file, row-major, little-endian.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Block:
    """One block of the data object, which holds the bytes from i x BLOCK_BYTES on, and its checksum."""

    start: int
    size: int
    crc64nvme: int


@dataclass(frozen=True)
class RankIndex:
    """What one rank stored in one attempt."""

    attempt: str
    rank: int
    size: int
    """Bytes of the data object."""
    stored_size: int
    """The same as `size`, for format 1 has room for a codec."""
    codec: str
    """Always `CODEC`."""
    entries: tuple[Entry, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Part:
    """A manifest's claim about one rank's two objects; checksums are of the whole stored objects."""

    rank: int
    data_key: str
    data_size: int
    data_crc64nvme: int
    index_key: str
    index_size: int
    index_crc64nvme: int


@dataclass(frozen=True)
class MeshAxis:
    """One dimension of the device mesh of the ranks that saved; the last one counts fastest with the rank."""

    name: str
    size: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: `dtype` is torch's name without `torch.`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that the mesh cuts alike: by `cuts`, pairs of a dimension and an axis, each of what the ones before it left.

    Of the ranks that hold the same chunk, counted by the axes that cut nothing, the first `stored_by` alone store rows of it.
    """

    cuts: tuple[tuple[int, str], ...]
    stored_by: int
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class MeshLayout:
    """Where the chunks of a sharded run lie, so that a reader finds its own without the indexes of all parts."""

    axes: tuple[MeshAxis, ...]
    groups: tuple[TensorGroup, ...]


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint: if this object exists and verifies, every byte it names was stored before it."""

    generation: int
    step: int
    attempt: str
    parent: ManifestId | None
    world_size: int
    created: str
    parts: tuple[Part, ...]
    state: dict[str, Any]
    """What is not a tensor: data cursor, tokens seen, best metric, early-stopping counters, scaler…"""
    about: dict[str, Any]
    """For people: versions of what saved it, and the newest evaluation's loss."""
    layout: MeshLayout | None = None
    """Of a sharded run; None where each part's index has to be read."""

    @property
    def id(self) -> ManifestId:
        return ManifestId(self.generation, self.step)

    @property
    def data_bytes(self) -> int:
        return sum(part.data_size for part in self.parts)


def encode(record: RankIndex | Manifest) -> bytes:
    """Return canonical JSON with its own checksum as one of its keys, which are sorted."""
    fields = {name: value for name, value in asdict(record).items() if (name, value) != ("layout", None)}
    return seal({"format": FORMAT, "kind": _KIND[type(record)], **_with_sums(fields, hexed)})


def decode_index(raw: bytes) -> RankIndex:
    return _decode(raw, RankIndex)


def decode_manifest(raw: bytes) -> Manifest:
    manifest = _decode(raw, Manifest)
    if manifest.layout is not None:
        axes = {axis.name: axis.size for axis in manifest.layout.axes}
        unknown = {name for group in manifest.layout.groups for _, name in group.cuts} - axes.keys()
        if unknown or any(size < 1 for size in axes.values()):
            why = f"its layout cuts by axes {sorted(unknown)} that its mesh lacks, or an axis has no ranks"
            raise DamagedRecordError(why)
    return manifest


_KIND = {RankIndex: "rank-index", Manifest: "manifest"}


def _decode(raw: bytes, kind: type[T]) -> T:
    body = unseal(raw)
    name = _KIND[kind]
    if body.get("kind") != name:
        raise DamagedRecordError(f"is of kind {body.get('kind')!r} instead of {name!r}")
    version = body.get("format")
    if not isinstance(version, int) or version > FORMAT:
        why = "written by a newer Lustrain"
        raise NewerFormatError(problem(f"{name} format", version, why, allowed=f"<= {FORMAT}", fix="upgrade lustrain"))
    try:
        return from_json(kind, _with_sums(body, unhexed))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedRecordError(f"a field of the {name} is missing or wrong: {error!r}") from error


def _with_sums(body: dict[str, Any], turn: Callable[[Any], Any]) -> dict[str, Any]:
    # Not in `state` and `about`, which may hold such keys of their own.
    return body | {name: turn(body[name]) for name in ("parts", "blocks") if name in body}
