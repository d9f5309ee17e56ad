"""Removal of checkpoints that need not be kept, in an order in which the newest one still loads after a kill anywhere.

Only committed checkpoints of the live lineage count towards what is kept, and only those whose objects exist in the store.
A manifest is removed before its parts, so that no manifest ever names an absent object; before every removal the lease is
read again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from trainer.checkpoint.format.layout import ATTEMPTS, MANIFESTS, ManifestId, attempt_commit
from trainer.checkpoint.format.records import Manifest
from trainer.checkpoint.lineage.lease import LeaseRecord, live_manifests, read_lease
from trainer.checkpoint.load.parts import check_parts, read_manifest
from trainer.config import CheckpointConfig
from trainer.storage import CorruptObjectError, ObjectInfo, ObjectStore, PreconditionError

LEAST_KEPT = 2
"""One to load and one in case it is damaged; no option goes below."""
ORPHAN_AGE_S = 24 * 3600.0
"""Longer than any save takes, so that what is being written is never taken for a leftover."""
_STAT_THREADS = 8
_ATTEMPT_OF = re.compile(rf"{ATTEMPTS}([^/]+)/")


@dataclass(frozen=True)
class Committed:
    """One live checkpoint, as pruning sees it; a smaller `metric` is better, None where it was not evaluated."""

    id: ManifestId
    metric: float | None
    whole: bool
    """All objects exist with the promised sizes; False also where this was not checked."""


@dataclass
class PruneReport:
    """What was removed (or would be, in a dry run), and in `stopped` why pruning ended early."""

    kept: list[ManifestId] = field(default_factory=list)
    removed: list[ManifestId] = field(default_factory=list)
    removed_dead: list[ManifestId] = field(default_factory=list)
    """Commits outside the live lineage, older than a day."""
    removed_orphans: list[str] = field(default_factory=list)
    """Attempts that no manifest names, older than a day, of an older generation."""
    bytes: int = 0
    stopped: str = ""

    @property
    def removed_keys(self) -> list[str]:
        """The keys of all removed manifests, for the run's events."""
        return [manifest_id.key for manifest_id in (*self.removed, *self.removed_dead)]


def plan_prune(live: Sequence[Committed], options: CheckpointConfig) -> list[ManifestId]:
    """Choose the live checkpoints to remove, oldest first: none until max(keep_last, 2) newer ones are whole.

    Kept are those and everything newer, the first one in each `keep_every_steps` steps, and with `keep_best` the best one.
    """
    newest_first = sorted(live, key=lambda c: c.id, reverse=True)
    whole = [c.id for c in newest_first if c.whole]
    needed = max(options.keep_last, LEAST_KEPT)
    if len(whole) < needed:
        return []
    kept = set(milestones((c.id for c in live), options.keep_every_steps))
    measured = [c for c in live if c.metric is not None and math.isfinite(c.metric)]
    if options.keep_best and measured:
        kept.add(min(measured, key=lambda c: (c.metric, c.id)).id)
    return [c.id for c in reversed(newest_first) if c.id < whole[needed - 1] and c.id not in kept]


def milestones(ids: Iterable[ManifestId], every_steps: int) -> list[ManifestId]:
    """Choose the first checkpoint at or after each multiple of `every_steps`, on which saves need not fall; none for 0."""
    first: dict[int, ManifestId] = {}
    for manifest_id in sorted(ids, key=lambda i: (i.step, i.generation)) if every_steps else ():
        bucket = manifest_id.step // every_steps
        if bucket:
            first.setdefault(bucket, manifest_id)
    return list(first.values())


def plan_orphans(
    attempts: Iterable[ObjectInfo], claimed: set[str], saves: Iterable[ManifestId], generation: int, now: float
) -> dict[str, list[ObjectInfo]]:
    """Choose attempts to remove, with their objects: old by the store's clock, of an older generation, in no manifest.

    `claimed` are the attempts that manifests name, `saves` the commits whose manifest could not be read: all their attempts
    stay. Foreign folders stay.
    """
    by_attempt: dict[str, list[ObjectInfo]] = {}
    for info in attempts:
        match = _ATTEMPT_OF.match(info.key)
        if match:
            by_attempt.setdefault(match[1], []).append(info)
    unread = set(saves)
    orphans = {}
    for name, objects in by_attempt.items():
        commit = attempt_commit(name)
        named = name in claimed or commit in unread
        old = max(info.modified for info in objects) < now - ORPHAN_AGE_S
        if commit is not None and commit.generation < generation and old and not named:
            orphans[name] = objects
    return orphans


def prune(
    store: ObjectStore,
    options: CheckpointConfig,
    *,
    generation: int | None = None,
    orphans: bool = True,
    dry_run: bool = False,
) -> PruneReport:
    """Remove what `options` do not keep; safe beside a running job, and safe to kill anywhere.

    `generation` is the caller's own when a job calls: it removes nothing once a newer job owns the run. Raises StorageError
    when the store cannot serve; what was removed until then stays removed, and the newest checkpoints were not among it.
    """
    return _Pruning(store, options, generation, dry_run).run(orphans)


class _Pruning:
    """One pass over a run; reads everything first, then removes one object after another."""

    def __init__(self, store: ObjectStore, options: CheckpointConfig, generation: int | None, dry_run: bool) -> None:
        self._store = store
        self._options = options
        self._generation = generation
        self._dry_run = dry_run
        self._report = PruneReport()
        self._manifests: dict[ManifestId, Manifest] = {}
        self._infos: dict[ManifestId, ObjectInfo] = {}

    def run(self, orphans: bool) -> PruneReport:
        lease = read_lease(self._store)
        if lease is None or self._generation not in (None, lease.generation):
            self._report.stopped = "no job has taken this run" if lease is None else "a newer job owns this run"
            return self._report
        # Attempts are listed before manifests: what is committed in between is then known as claimed.
        attempts = list(self._store.list(ATTEMPTS)) if orphans else []
        self._read_manifests()
        live = live_manifests(self._infos, lease.lineage, lease.generation)
        doomed = plan_prune(self._committed(live), self._options)
        self._report.kept = [i for i in live if i not in set(doomed)]
        for manifest_id in doomed:
            if not self._remove(manifest_id, lease):
                return self._report
            self._report.removed.append(manifest_id)
        if len(self._report.kept) >= LEAST_KEPT:
            self._remove_leftovers(set(live), attempts, lease)
        return self._report

    def _read_manifests(self) -> None:
        for info in self._store.list(MANIFESTS):
            manifest_id = ManifestId.of_key(info.key)
            if manifest_id is not None:
                self._infos[manifest_id] = info

        def read(manifest_id: ManifestId) -> Manifest | None:
            try:
                return read_manifest(self._store, manifest_id)
            except CorruptObjectError:
                return None

        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            for manifest_id, manifest in zip(self._infos, pool.map(read, self._infos), strict=True):
                if manifest is not None:
                    self._manifests[manifest_id] = manifest

    def _committed(self, live: Sequence[ManifestId]) -> list[Committed]:
        """Describe the live ones; the objects are looked for of as many of the newest as must be whole."""
        needed = max(self._options.keep_last, LEAST_KEPT)
        live_ones: list[Committed] = []
        for manifest_id in live:
            manifest = self._manifests.get(manifest_id)
            whole = needed > 0 and manifest is not None and _is_whole(self._store, manifest)
            needed -= whole
            live_ones.append(Committed(manifest_id, metric_of(manifest) if manifest else None, whole))
        return live_ones

    def _remove_leftovers(self, live: set[ManifestId], attempts: list[ObjectInfo], lease: LeaseRecord) -> None:
        now = self._store.now()
        dead = [i for i in sorted(self._infos) if i not in live and i.generation < lease.generation]
        for manifest_id in dead:
            if self._infos[manifest_id].modified >= now - ORPHAN_AGE_S:
                continue
            if not self._remove(manifest_id, lease):
                return
            self._report.removed_dead.append(manifest_id)
        claimed = {manifest.attempt for manifest in self._manifests.values()}
        unread = self._infos.keys() - self._manifests.keys()
        for name, objects in plan_orphans(attempts, claimed, unread, lease.generation, now).items():
            if not self._lease_unchanged(lease):
                return
            self._remove_objects(objects)
            self._report.removed_orphans.append(name)

    def _remove(self, manifest_id: ManifestId, lease: LeaseRecord) -> bool:
        """Remove one checkpoint, manifest first; False when a newer job has come and nothing more may be removed."""
        manifest = self._manifests.get(manifest_id)
        if not self._lease_unchanged(lease):
            return False
        if not self._dry_run:
            try:
                self._store.delete(manifest_id.key, if_match=self._infos[manifest_id].etag)
            except PreconditionError:
                # A second pruning was quicker, and removes the parts too.
                return True
        if manifest is not None:
            shared = {m.attempt for i, m in self._manifests.items() if i != manifest_id}
            if manifest.attempt not in shared:
                self._remove_objects(list(self._store.list(f"{ATTEMPTS}{manifest.attempt}/")))
        return True

    def _remove_objects(self, objects: Sequence[ObjectInfo]) -> None:
        if not self._dry_run:
            with ThreadPoolExecutor(_STAT_THREADS) as pool:
                list(pool.map(lambda info: self._store.delete(info.key), objects))
        self._report.bytes += sum(info.size for info in objects)

    def _lease_unchanged(self, lease: LeaseRecord) -> bool:
        if self._dry_run or read_lease(self._store) == lease:
            return True
        self._report.stopped = "a job took this run or began to train while it was pruned"
        return False


def metric_of(manifest: Manifest) -> float | None:
    """Return the newest evaluation's loss when this was saved (`about.eval_loss`), or None."""
    value = manifest.about.get("eval_loss")
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_whole(store: ObjectStore, manifest: Manifest) -> bool:
    try:
        check_parts(store, manifest.parts)
    except CorruptObjectError:
        return False
    return True
