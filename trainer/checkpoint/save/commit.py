"""The commit, by rank 0 once every rank has stored its part: a check that all parts exist, then one conditional put."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from lustrain.problem import problem
from trainer.checkpoint.format.chunks import chunks_by_name
from trainer.checkpoint.format.layout import ManifestId, attempt_commit, data_key, index_key
from trainer.checkpoint.format.records import Manifest, MeshLayout, Part, decode_manifest, encode
from trainer.checkpoint.lineage.lease import Lease
from trainer.checkpoint.load.parts import Places, check_parts, read_indexes
from trainer.checkpoint.save.writer import Stored
from trainer.sealed import DamagedRecordError
from trainer.storage import CorruptObjectError, ObjectMissingError, ObjectStore, PreconditionError, StorageError


def manifest_of(
    attempt: str,
    stored: Mapping[int, Stored],
    *,
    parent: ManifestId | None,
    state: dict[str, Any],
    about: dict[str, Any],
    layout: MeshLayout | None = None,
) -> Manifest:
    """Build the manifest of an attempt from what each rank stored."""
    commit = attempt_commit(attempt)
    if commit is None:
        raise ValueError(f"{attempt!r} is not the name of an attempt")
    return Manifest(
        generation=commit.generation,
        step=commit.step,
        attempt=attempt,
        parent=parent,
        world_size=len(stored),
        created=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        parts=tuple(_part(attempt, rank, stored[rank]) for rank in sorted(stored)),
        state=state,
        about=about,
        layout=layout,
    )


def commit(store: ObjectStore, lease: Lease, manifest: Manifest, *, cover: Collection[str] = ()) -> Manifest:
    """Make a checkpoint out of stored parts; returns the manifest in the store, which may be one of an earlier try.

    Where `cover` names tensors, it also reads what each rank says it stored, and refuses chunks that do not make up each of
    them exactly once: for ranks that did not store by one layout.
    Raises LostRunError when a newer job owns the run, StorageError when a part is missing or wrong, or the store does not
    serve. After a StorageError the put may still succeed: the checkpoint is then whole.
    """
    check_parts(store, manifest.parts)
    if cover:
        stored = chunks_by_name(read_indexes(Places(store), manifest))
        if missing := sorted(set(cover) - stored.keys()):
            raise CorruptObjectError(f"tensor {missing[0]}: no rank stores any of it")
    lease.check()
    body = encode(manifest)
    try:
        store.put(manifest.id.key, body, if_absent=True)
    except PreconditionError:
        return _existing(store, lease, manifest)
    except StorageError:
        if _read(store, manifest) == body:
            return manifest
        raise
    return manifest


def exact_json(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that JSON reads back unchanged; ValueError for values that it would not, NaN included."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be JSON that reads back as it is: {error}") from error
    return copy


def printable_json(value: Any) -> Any:
    """Return a copy for people: values that JSON cannot hold (NaN, infinities, objects) become their text."""
    if isinstance(value, dict):
        return {str(key): printable_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable_json(item) for item in value]
    plain = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


def _part(attempt: str, rank: int, stored: Stored) -> Part:
    return Part(
        rank=rank,
        data_key=data_key(attempt, rank),
        data_size=stored.data_size,
        data_crc64nvme=stored.data_crc64nvme,
        index_key=index_key(attempt, rank),
        index_size=stored.index_size,
        index_crc64nvme=stored.index_crc64nvme,
    )


def _existing(store: ObjectStore, lease: Lease, new: Manifest) -> Manifest:
    """Return the manifest that exists already: this very one when only the answer to its put was lost."""
    body = _read(store, new)
    if body == encode(new):
        return new
    lease.check()
    try:
        existing = decode_manifest(body or b"")
    except DamagedRecordError as error:
        why = f"an object that is not a manifest has this key: {error}"
        raise StorageError(problem("manifest", new.id.key, why)) from error
    if existing.id != new.id:
        raise StorageError(problem("manifest", new.id.key, f"holds the manifest of {existing.id.key}"))
    # This job holds the lease, so only it can have committed under its generation: an earlier try at the same step.
    return existing


def _read(store: ObjectStore, manifest: Manifest) -> bytes | None:
    try:
        return store.read(manifest.id.key)[0]
    except ObjectMissingError:
        return None
