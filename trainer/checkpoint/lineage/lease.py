"""The lease: which job owns a run, and which of its checkpoints are live.

`lease.json` holds a generation that every job which takes the run raises by one, and the lineage: for each generation
that began to train, the checkpoint it began from. A newer job always wins and nothing expires, so no clock is ever
compared.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial

from lustrain.from_json import from_json
from lustrain.problem import UserError, problem
from trainer.checkpoint.format.layout import LEASE, MANIFESTS, ManifestId
from trainer.checkpoint.format.records import NewerFormatError, decode_manifest
from trainer.checkpoint.load.parts import read_twice
from trainer.errors import LostRunError
from trainer.sealed import DamagedRecordError, seal, unseal
from trainer.storage import ObjectMissingError, ObjectStore, PreconditionError

log = logging.getLogger(__name__)

VERSION = 1
_TRIES = 8
"""Attempts at a conditional put: each failure means that a different job took the run, which each job does once."""
_NUMBERED = re.compile(r"(?:manifests|attempts|metrics|events)/(\d{6,})-")


@dataclass(frozen=True)
class LineageEntry:
    """A generation that began to train, and the checkpoint it began from (None: from nothing)."""

    generation: int
    parent: ManifestId | None


@dataclass(frozen=True)
class LeaseRecord:
    """The content of `lease.json`; `nonce` distinguishes two jobs with the same `owner`."""

    generation: int
    owner: str
    taken: str
    nonce: str
    lineage: tuple[LineageEntry, ...]

    def encode(self) -> bytes:
        return seal({"version": VERSION, **asdict(self)})

    @classmethod
    def decode(cls, raw: bytes) -> LeaseRecord:
        """Read a lease's bytes; raises DamagedRecordError, or NewerFormatError for a lease of a newer Lustrain."""
        body = unseal(raw)
        version = body.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise NewerFormatError(
                problem("lease.version", version, "written by a newer Lustrain", allowed=f"<= {VERSION}", fix="upgrade")
            )
        try:
            return from_json(cls, body)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRecordError(f"a field of the lease is missing or wrong: {error!r}") from error


def committed(store: ObjectStore) -> list[ManifestId]:
    """List every commit that the run holds, live or dead, oldest first."""
    return sorted(commit for info in store.list(MANIFESTS) if (commit := ManifestId.of_key(info.key)))


def live_manifests(ids: Iterable[ManifestId], lineage: Sequence[LineageEntry], generation: int) -> list[ManifestId]:
    """Choose the checkpoints that are part of the run's history as of `generation`, newest first.

    All of the newest generation that has trained, then those of its parent's generation up to the parent's step, and so on.
    Everything else is dead: what an older job committed after a newer one had begun to train never wins, even if the
    newer one died before its first commit.
    """
    parents = {item.generation: item.parent for item in lineage if item.generation <= generation}
    by_generation: dict[int, list[int]] = {}
    for manifest in ids:
        by_generation.setdefault(manifest.generation, []).append(manifest.step)
    live: list[ManifestId] = []
    at: int | None = max(parents, default=None)
    last_step: int | None = None
    while at is not None and at in parents:
        steps = sorted({step for step in by_generation.get(at, ()) if last_step is None or step <= last_step})
        live += [ManifestId(at, step) for step in reversed(steps)]
        parent = parents[at]
        # A parent is always older; a foreign lease that says otherwise must not become an endless loop.
        at, last_step = (parent.generation, parent.step) if parent and parent.generation < at else (None, None)
    return live


def read_lease(store: ObjectStore) -> LeaseRecord | None:
    """Read the lease; None where no job has taken the run yet; UserError when it is damaged."""
    stored = _read(store)
    return stored[0] if stored else None


class Lease:
    """One job's hold on a run. Not thread-safe for `record_parent`; `check` only reads and may be called from any thread."""

    def __init__(self, store: ObjectStore, record: LeaseRecord, etag: str) -> None:
        self._store = store
        self._record = record
        self._etag = etag

    @property
    def generation(self) -> int:
        return self._record.generation

    @property
    def lineage(self) -> tuple[LineageEntry, ...]:
        return self._record.lineage

    @classmethod
    def acquire(cls, store: ObjectStore, owner: str) -> Lease:
        """Own the run from now on; the job that owned it before cannot commit any more.

        `owner` is for people (host, job id). UserError when other jobs keep taking it or when it is damaged.
        """
        for _ in range(_TRIES):
            stored = _read(store)
            if stored:
                old, old_etag = stored
                generation, lineage = old.generation + 1, old.lineage
            else:
                old_etag = None
                generation, lineage = _from_objects(store)
            record = LeaseRecord(generation, owner, _utc_now(), secrets.token_hex(8), lineage)
            etag = _put(store, record, old_etag)
            if etag is not None:
                return cls(store, record, etag)
        raise UserError(
            problem(
                f"{store.uri}/{LEASE}",
                owner,
                f"other jobs took this run at the same moment, {_TRIES} times in a row",
                fix="start one job only",
            )
        )

    def record_parent(self, parent: ManifestId | None) -> None:
        """Record what this generation begins from, before its first commit; LostRunError when a newer job came."""
        record = replace(self._record, lineage=(*self._record.lineage, LineageEntry(self._record.generation, parent)))
        self._record, self._etag = record, self._replace_by(record)

    def succeed(self) -> Lease:
        """Take the run again under a new generation, to begin from another checkpoint; LostRunError when a newer job came.

        This lease is over then, as if another job had taken the run.
        """
        nonce = secrets.token_hex(8)
        record = replace(self._record, generation=self.generation + 1, taken=_utc_now(), nonce=nonce)
        return Lease(self._store, record, self._replace_by(record))

    def check(self) -> None:
        """Check that this job still owns the run; raises LostRunError, or StorageError when the store does not answer."""
        self._current_etag()

    def _replace_by(self, record: LeaseRecord) -> str:
        """Store `record` if this job still owns the run, and return its etag."""
        for _ in range(_TRIES):
            etag = _put(self._store, record, self._etag)
            if etag is not None:
                return etag
            self._etag = self._current_etag()
        raise self._lost(read_lease(self._store))

    def _current_etag(self) -> str:
        stored = _read(self._store)
        if stored is None or (stored[0].generation, stored[0].nonce) != (self.generation, self._record.nonce):
            raise self._lost(stored[0] if stored else None)
        return stored[1]

    def _lost(self, now: LeaseRecord | None) -> LostRunError:
        generation = self.generation
        if now is None:
            why = f"its {LEASE} was removed while this job (generation {generation}) ran, so ownership cannot be proven"
            return LostRunError(
                problem("run.uri", self._store.uri, why, fix="find out who removed it, then start the job again")
            )
        why = (
            f"{now.owner} owns this run since {now.taken} (generation {now.generation}); "
            f"this job (generation {generation}) stops and commits nothing more"
        )
        fix = "let the newer job go on from the last checkpoint; if it is not the one to keep, stop it and start this job again"
        return LostRunError(problem("run.uri", self._store.uri, why, fix=fix))


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _put(store: ObjectStore, record: LeaseRecord, etag: str | None) -> str | None:
    """Replace the lease that had `etag` (None: create it) and return the new etag; None when it was replaced before."""
    try:
        return store.swap(LEASE, record.encode(), etag)
    except PreconditionError:
        return None


def _read(store: ObjectStore) -> tuple[LeaseRecord, str] | None:
    def decoded() -> tuple[LeaseRecord, str]:
        raw, etag = store.read(LEASE)
        return LeaseRecord.decode(raw), etag

    try:
        return read_twice(decoded)
    except ObjectMissingError:
        return None
    except DamagedRecordError as error:
        fix = f"put an earlier version of {LEASE} back, or remove it: the next job rebuilds it from the manifests"
        raise UserError(problem("run.uri", store.uri, f"its {LEASE} is damaged: {error}", fix=fix)) from error


def _from_objects(store: ObjectStore) -> tuple[int, tuple[LineageEntry, ...]]:
    """Derive a fresh generation and the lineage where the lease is absent: a new run, or one whose lease was removed.

    Generations in the names of all objects of the run count, so that no name is ever used twice; each manifest holds the
    parent of its generation.
    """
    used = [0]
    parents: dict[int, ManifestId | None] = {}
    for info in store.list():
        match = _NUMBERED.match(info.key)
        used += [int(match[1])] if match else []
        manifest = ManifestId.of_key(info.key)
        if manifest and manifest.generation not in parents:
            try:
                parents[manifest.generation] = read_twice(partial(_parent, store, info.key))
            except DamagedRecordError as error:
                # The next manifest of this generation may hold it.
                log.warning("%s/%s: passed over while %s is rebuilt: %s", store.uri, info.key, LEASE, error)
    lineage = tuple(LineageEntry(generation, parents[generation]) for generation in sorted(parents))
    return max(used) + 1, lineage


def _parent(store: ObjectStore, key: str) -> ManifestId | None:
    return decode_manifest(store.read(key)[0]).parent
