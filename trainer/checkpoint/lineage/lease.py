"""Who owns a run, and which of its checkpoints are alive.

`lease.json` holds a generation that every job which takes the run raises by one, and the lineage: for each generation
that began to train, the checkpoint it began from. A newer job always wins and nothing expires, so no clock is ever
compared.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from lustrain.problem import UserError, problem
from trainer.checkpoint.format.layout import LEASE, MANIFESTS, ManifestId
from trainer.checkpoint.format.records import DamagedRecordError, NewerFormatError, decode_manifest, seal, unseal
from trainer.checkpoint.load.parts import read_twice
from trainer.errors import LostRunError
from trainer.storage import ObjectMissingError, ObjectStore, PreconditionError

log = logging.getLogger(__name__)

VERSION = 1
_TRIES = 8
"""Attempts at a conditional put: each failure means that another job took the run, which jobs do once in their life."""
_NUMBERED = re.compile(r"(?:manifests|attempts|metrics|events)/(\d{6,})-")


@dataclass(frozen=True)
class Settlement:
    """A generation that began to train, and the checkpoint it began from (None: from nothing)."""

    generation: int
    parent: ManifestId | None


@dataclass(frozen=True)
class LeaseRecord:
    """What `lease.json` says; `nonce` tells apart two jobs that call themselves the same."""

    generation: int
    owner: str
    taken: str
    nonce: str
    lineage: tuple[Settlement, ...]

    def encode(self) -> bytes:
        return seal(
            {
                "version": VERSION,
                "generation": self.generation,
                "owner": self.owner,
                "taken": self.taken,
                "nonce": self.nonce,
                "lineage": [
                    {
                        "generation": settled.generation,
                        "parent": settled.parent
                        and {"generation": settled.parent.generation, "step": settled.parent.step},
                    }
                    for settled in self.lineage
                ],
            }
        )

    @classmethod
    def decode(cls, raw: bytes) -> LeaseRecord:
        """Raises DamagedRecordError, or NewerFormatError for a lease of a newer Lustrain."""
        body = unseal(raw)
        version = body.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise NewerFormatError(
                problem("lease.version", version, "written by a newer Lustrain", allowed=f"<= {VERSION}", fix="upgrade")
            )
        try:
            return cls(
                generation=int(body["generation"]),
                owner=str(body["owner"]),
                taken=str(body["taken"]),
                nonce=str(body["nonce"]),
                lineage=tuple(_settlement(item) for item in body["lineage"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRecordError(f"a field of the lease is missing or wrong: {error!r}") from error


def committed(store: ObjectStore) -> list[ManifestId]:
    """Every commit that the run holds, dead or alive, oldest first."""
    return sorted(found for info in store.list(MANIFESTS) if (found := ManifestId.of_key(info.key)))


def live_manifests(ids: Iterable[ManifestId], lineage: Sequence[Settlement], generation: int) -> list[ManifestId]:
    """The checkpoints that are part of the run's history as of `generation`, newest first.

    All of the newest settled generation, then those of its parent's generation up to the parent's step, and so on.
    Everything else is dead: what an older job committed after a newer one had begun to train never wins, even if the
    newer one died before its first commit.
    """
    settled = {item.generation: item.parent for item in lineage if item.generation <= generation}
    by_generation: dict[int, list[int]] = {}
    for manifest in ids:
        by_generation.setdefault(manifest.generation, []).append(manifest.step)
    live: list[ManifestId] = []
    at: int | None = max(settled, default=None)
    last_step: int | None = None
    while at is not None and at in settled:
        steps = sorted({step for step in by_generation.get(at, ()) if last_step is None or step <= last_step})
        live += [ManifestId(at, step) for step in reversed(steps)]
        parent = settled[at]
        # A parent is always older; a lease that says otherwise is not ours and must not send us in circles.
        at, last_step = (parent.generation, parent.step) if parent and parent.generation < at else (None, None)
    return live


def read_lease(store: ObjectStore) -> LeaseRecord | None:
    """The lease as it stands, None where no job has taken the run yet; UserError when it is damaged."""
    found = _read(store)
    return found[0] if found else None


class Lease:
    """One job's hold on a run. Not thread-safe for `settle`; `check` only reads and may be called from any thread."""

    def __init__(self, store: ObjectStore, record: LeaseRecord, etag: str) -> None:
        self._store = store
        self._record = record
        self._etag = etag

    @property
    def generation(self) -> int:
        return self._record.generation

    @property
    def lineage(self) -> tuple[Settlement, ...]:
        return self._record.lineage

    @classmethod
    def take(cls, store: ObjectStore, owner: str) -> Lease:
        """Own the run from now on; the job that owned it before cannot commit any more.

        `owner` is for people (host, job id). UserError when others keep taking it or when it is damaged.
        """
        for _ in range(_TRIES):
            found = _read(store)
            if found:
                old, old_etag = found
                generation, lineage = old.generation + 1, old.lineage
            else:
                old_etag = None
                generation, lineage = _from_objects(store)
            taken = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            record = LeaseRecord(generation, owner, taken, secrets.token_hex(8), lineage)
            etag = _put(store, record, old_etag)
            if etag is not None:
                return cls(store, record, etag)
        raise UserError(
            problem(
                f"{store.uri}/{LEASE}", owner, f"lost the race for this run {_TRIES} times", fix="start one job only"
            )
        )

    def settle(self, parent: ManifestId | None) -> None:
        """Write down what this generation begins from, before its first commit; LostRunError when a newer job came."""
        record = replace(self._record, lineage=(*self._record.lineage, Settlement(self._record.generation, parent)))
        for _ in range(_TRIES):
            etag = _put(self._store, record, self._etag)
            if etag is not None:
                self._record, self._etag = record, etag
                return
            self._etag = self._current_etag()
        raise self._lost(read_lease(self._store))

    def check(self) -> None:
        """Make sure this job still owns the run; raises LostRunError, or StorageError when the store cannot tell."""
        self._current_etag()

    def _current_etag(self) -> str:
        found = _read(self._store)
        if found is None or (found[0].generation, found[0].nonce) != (self.generation, self._record.nonce):
            raise self._lost(found[0] if found else None)
        return found[1]

    def _lost(self, now: LeaseRecord | None) -> LostRunError:
        mine = self.generation
        if now is None:
            why = f"its {LEASE} was removed while this job (generation {mine}) ran, so ownership cannot be proven"
            return LostRunError(
                problem("run.uri", self._store.uri, why, fix="find out who removed it, then start the job again")
            )
        why = (
            f"{now.owner} owns this run since {now.taken} (generation {now.generation}); "
            f"this job (generation {mine}) stops and commits nothing more"
        )
        fix = "nothing is lost, the newer job goes on; if it is the wrong one, stop it and start this job again"
        return LostRunError(problem("run.uri", self._store.uri, why, fix=fix))


def _put(store: ObjectStore, record: LeaseRecord, etag: str | None) -> str | None:
    """Replace the lease that had `etag` (None: create it); None when it is no longer that one."""
    body = record.encode()
    try:
        return store.put(LEASE, body, if_absent=etag is None, if_match=etag)
    except PreconditionError:
        # An answer that got lost makes the store's retry meet its own success.
        now, now_etag = store.read(LEASE)
        return now_etag if now == body else None


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


def _from_objects(store: ObjectStore) -> tuple[int, tuple[Settlement, ...]]:
    """A fresh generation and the lineage where there is no lease: a new run, or one whose lease was removed.

    Generations in the names of anything the run holds count, so that no name is ever used twice; a generation's parent
    stands in each of its manifests.
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
                # Another manifest of this generation may still say it.
                log.warning("%s/%s: passed over while %s is rebuilt: %s", store.uri, info.key, LEASE, error)
    lineage = tuple(Settlement(generation, parents[generation]) for generation in sorted(parents))
    return max(used) + 1, lineage


def _parent(store: ObjectStore, key: str) -> ManifestId | None:
    return decode_manifest(store.read(key)[0]).parent


def _settlement(item: dict[str, Any]) -> Settlement:
    parent = item["parent"]
    return Settlement(
        int(item["generation"]), None if parent is None else ManifestId(int(parent["generation"]), int(parent["step"]))
    )
