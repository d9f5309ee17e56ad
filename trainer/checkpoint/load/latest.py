"""The load of the newest checkpoint that verifies on every rank, with the reason for each one that was passed over.

Nothing is loaded in part: a rank reads and verifies all bytes it wants into fresh host memory, then the ranks compare their
results. Damage on any rank moves all of them to the next older checkpoint. A store that does not answer is not damage: it
ends the load with its error, so that a network fault never silently costs a run its newest work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from awscrt.checksums import crc64nvme

from lustrain.problem import UserError, problem
from trainer.checkpoint.format.layout import ATTEMPTS, ManifestId, tier_root
from trainer.checkpoint.format.records import Manifest, encode
from trainer.checkpoint.load.assemble import Wanted, read_tensors
from trainer.checkpoint.load.parts import OnEvent, Places, open_parts, read_manifest
from trainer.config import TierConfig
from trainer.parallel.votes import VoteBox
from trainer.storage import ArchivedError, CorruptObjectError, ObjectStore, StorageError
from trainer.storage.archive import refuse_archived
from trainer.storage.local import LocalStore

READ_THREADS = min(8, max(4, os.cpu_count() or 4))
"""From the page cache two threads are as fast; a cold disk gave 1.9 GB/s with two and 2.4 with four (two cores)."""
VOTE_TIMEOUT_S = 3600.0
"""The slowest rank may have to read its whole share at a crowded file system's speed."""


class NoneWholeError(UserError):
    """The run has checkpoints, and none of them verifies."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that verified on every rank; `skipped` has one line per newer candidate that did not."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Verdict:
    """One rank's result for one candidate."""

    ok: bool
    stop: bool = False
    """The load must end with an error: nothing older may be tried."""
    store_failed: bool = False
    """That error is the store's: every rank raises a StorageError, whichever of them met it."""
    reason: str = ""
    digest: str = ""
    """Checksum of the manifest this rank saw, so that all ranks provably load the same commit."""


def load_latest(
    store: ObjectStore,
    votes: VoteBox,
    *,
    rank: int,
    world_size: int,
    candidates: Sequence[ManifestId],
    tiers: Sequence[TierConfig] = (),
    want: Wanted,
    on_event: OnEvent,
    timeout_s: float = VOTE_TIMEOUT_S,
) -> Loaded | None:
    """Load the newest of rank 0's `candidates` that every rank verified; None without candidates.

    Candidates are given newest first; other ranks' are ignored. Called once per VoteBox, by every rank. NoneWholeError when
    no candidate is whole, UserError when one is of a newer format; StorageError when the store cannot be read; VoteTimeout
    when a rank does not vote within `timeout_s`.
    """
    places = Places(store, open_tiers(tiers, store.uri, on_event))
    votes.post("load/candidates", rank, {"ids": [[c.generation, c.step] for c in candidates]})
    agreed = [ManifestId(*pair) for pair in votes.gather("load/candidates", timeout_s)[0]["ids"]]
    skipped: list[str] = []
    topic = "load/candidates"
    for number, candidate in enumerate(agreed):
        verdict, loaded, failure = _try_candidate(places, candidate, want, on_event)
        last_topic, topic = topic, f"load/{number}/{candidate.key}"
        votes.post(topic, rank, vars(verdict))
        verdicts = {r: _Verdict(**vote) for r, vote in votes.gather(topic, timeout_s).items()}
        if rank == 0:
            # Every rank has posted here, so every rank has read the topic before.
            votes.drop(last_topic)
        if failure is not None:
            raise failure
        reason = agreement_problem(verdicts)
        if loaded is not None and not reason:
            return Loaded(loaded.manifest, loaded.tensors, skipped)
        skipped.append(f"{candidate.key}: {reason}")
        on_event("checkpoint_skipped", {"generation": candidate.generation, "step": candidate.step, "why": reason})
        del loaded
    if skipped:
        raise NoneWholeError([_none_is_whole(store.uri, len(skipped)), *skipped])
    return None


def read_checkpoint(
    places: Places,
    manifest: Manifest,
    *,
    want: Wanted,
    on_event: OnEvent,
    threads: int = READ_THREADS,
) -> dict[str, torch.Tensor]:
    """Read the wanted tensors of one checkpoint, every byte behind them verified; CorruptObjectError names the damage.

    ArchivedError says how many of its objects a lifecycle rule has moved to an archive.
    """
    try:
        return read_tensors(open_parts(places, manifest, on_event, threads), want, threads)
    except ArchivedError:
        refuse_archived("run", places.run.uri, places.run.list(f"{ATTEMPTS}{manifest.attempt}/"))
        raise


def open_tiers(tiers: Sequence[TierConfig], run_uri: str, on_event: OnEvent) -> tuple[ObjectStore, ...]:
    """Open the tiers that hold a part of this run; a tier that is absent (a new node) or unreadable is passed over."""
    opened: list[ObjectStore] = []
    for tier in tiers:
        root = tier_root(tier.path, run_uri)
        try:
            opened.append(LocalStore(root, create=False))
        except UserError as error:
            on_event("tier_passed_over", {"tier": root, "why": str(error)})
    return tuple(opened)


def agreement_problem(verdicts: Mapping[int, Any]) -> str:
    """Return why not all ranks verified a candidate, or the empty string; UserError when a rank demands to stop."""
    stops = {rank: verdict for rank, verdict in sorted(verdicts.items()) if verdict.stop}
    if stops:
        kind = StorageError if any(verdict.store_failed for verdict in stops.values()) else UserError
        raise kind([f"rank {rank}: {verdict.reason}" for rank, verdict in stops.items()][:8])
    failed = [(rank, v.reason) for rank, v in sorted(verdicts.items()) if not v.ok]
    if failed:
        more = f" ({len(failed) - 1} other ranks skipped it too)" if len(failed) > 1 else ""
        return f"found by rank {failed[0][0]}: {failed[0][1]}{more}"
    if len({v.digest for v in verdicts.values()}) > 1:
        return "the ranks saw different manifests under this key"
    return ""


def _try_candidate(
    places: Places, candidate: ManifestId, want: Wanted, on_event: OnEvent
) -> tuple[_Verdict, Loaded | None, UserError | None]:
    try:
        manifest = read_manifest(places.run, candidate)
        tensors = read_checkpoint(places, manifest, want=want, on_event=on_event)
    except CorruptObjectError as error:
        return _Verdict(ok=False, reason=str(error)), None, None
    except UserError as error:
        store_failed = isinstance(error, StorageError)
        return _Verdict(ok=False, stop=True, store_failed=store_failed, reason=str(error)), None, error
    digest = f"{crc64nvme(encode(manifest)):016x}"
    return _Verdict(ok=True, digest=digest), Loaded(manifest, tensors), None


def _none_is_whole(uri: str, count: int) -> str:
    return problem(
        "run.uri",
        uri,
        f"holds {count} checkpoint{'s' if count > 1 else ''}, but none verifies",
        fix="restore the objects from a backup or the bucket's versions, or start a new run under a different uri",
    )
