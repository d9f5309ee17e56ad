"""The load of the newest checkpoint that verifies on every rank, with the reason for each one that was passed over.

Nothing is loaded in part: a rank reads and verifies all bytes it wants, then the ranks compare their results. Damage on any
rank moves all of them to the next older checkpoint, which overwrites all that was read of this one; where none is whole, the
load raises. A store that does not answer is not damage: it ends the load with its error, so that a network fault never silently
costs a run its newest work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from awscrt.checksums import crc64nvme

from lustrain.from_json import from_json
from lustrain.problem import UserError, problem
from trainer.checkpoint.format.layout import ManifestId, tier_root
from trainer.checkpoint.format.records import Manifest, encode
from trainer.checkpoint.load.parts import OnEvent, Places, read_manifest
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.config import TierConfig
from trainer.parallel.agree import Json, run_on_all_ranks
from trainer.parallel.votes import VoteBox
from trainer.storage import CorruptObjectError, ObjectStore, StorageError
from trainer.storage.local import LocalStore

VOTE_TIMEOUT_S = 3600.0
"""The slowest rank may have to read its whole share at a crowded file system's speed."""


Read = Callable[[StoredCheckpoint], dict[str, torch.Tensor]]
"""Reads what a rank needs of a checkpoint, verified."""


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
    """One rank's result for one candidate, or what rank 0 makes of all of them."""

    reason: str = ""
    """Why the candidate is not whole; empty where it is."""
    stop: tuple[str, ...] = ()
    """Lines of the error with which the load ends: nothing older may be tried."""
    store_failed: bool = False
    """That error is the store's: every rank raises a StorageError, whichever of them met it."""
    digest: str = ""
    """Checksum of the manifest this rank saw, so that all ranks provably load the same commit."""


@dataclass(frozen=True)
class _Tried:
    verdict: _Verdict
    loaded: Loaded | None = None
    failure: UserError | None = None


def load_latest(
    store: ObjectStore,
    votes: VoteBox,
    *,
    rank: int,
    world_size: int,
    candidates: Sequence[ManifestId],
    tiers: Sequence[TierConfig] = (),
    read: Read,
    on_event: OnEvent,
    timeout_s: float = VOTE_TIMEOUT_S,
) -> Loaded | None:
    """Load the newest of rank 0's `candidates` that every rank verified; None without candidates.

    `read` gets each checkpoint to try, the next one after damage; what it fills is of no use after an error.
    Candidates are given newest first; other ranks' are ignored. Called once per VoteBox, by every rank. NoneWholeError when
    no candidate is whole, UserError when one is of a newer format; StorageError when the store cannot be read; VoteTimeout
    when a rank does not vote within `timeout_s`. Whatever else a rank raises ends the load on every rank, with its name.
    """
    opened: list[Places] = []

    def begin() -> Json:
        opened.append(Places(store, open_tiers(tiers, store.uri, on_event)))
        return {"ids": [[c.generation, c.step] for c in candidates]}

    agreed = run_on_all_ranks(votes, rank, "load/candidates", begin, lambda answers: answers[0], timeout_s=timeout_s)
    skipped: list[str] = []
    for number, candidate in enumerate(ManifestId(*pair) for pair in agreed["ids"]):
        topic = f"load/{number}/{candidate.key}"
        attempt = partial(_try_candidate, opened[0], candidate, read, on_event)
        loaded, reason = _agree_on(votes, rank, topic, attempt, timeout_s)
        if loaded is not None:
            return Loaded(loaded.manifest, loaded.tensors, skipped)
        skipped.append(f"{candidate.key}: {reason}")
        on_event("checkpoint_skipped", {"generation": candidate.generation, "step": candidate.step, "why": reason})
    if skipped:
        raise NoneWholeError([_none_is_whole(store.uri, len(skipped)), *skipped])
    return None


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


def _agreement(verdicts: Mapping[int, Json]) -> Json:
    """Return the verdict of all ranks on a candidate: an end of the load comes first, then damage, then a difference."""
    ranks = [(rank, from_json(_Verdict, verdict)) for rank, verdict in sorted(verdicts.items())]
    stops = [f"rank {rank}: {line}" for rank, verdict in ranks for line in verdict.stop]
    if stops:
        return asdict(_Verdict(stop=tuple(stops[:8]), store_failed=any(verdict.store_failed for _, verdict in ranks)))
    failed = [f"found by rank {rank}: {verdict.reason}" for rank, verdict in ranks if verdict.reason]
    if failed:
        more = f" ({len(failed) - 1} other ranks skipped it too)" if len(failed) > 1 else ""
        return asdict(_Verdict(reason=failed[0] + more))
    differ = len({verdict.digest for _, verdict in ranks}) > 1
    return asdict(_Verdict(reason="the ranks saw different manifests under this key" if differ else ""))


def _agree_on(
    votes: VoteBox, rank: int, topic: str, read: Callable[[], _Tried], timeout_s: float
) -> tuple[Loaded | None, str]:
    """Return what this rank read if every rank could read the same, else None and why not."""
    tried: list[_Tried] = []

    def work() -> Json:
        tried.append(read())
        return asdict(tried[0].verdict)

    outcome = run_on_all_ranks(votes, rank, topic, work, _agreement, timeout_s=timeout_s)
    if tried[0].failure is not None:
        raise tried[0].failure
    if outcome["stop"]:
        raise (StorageError if outcome["store_failed"] else UserError)(outcome["stop"])
    return (None, outcome["reason"]) if outcome["reason"] else (tried[0].loaded, "")


def _try_candidate(places: Places, candidate: ManifestId, read: Read, on_event: OnEvent) -> _Tried:
    try:
        manifest = read_manifest(places.run, candidate)
        tensors = read(StoredCheckpoint(places, manifest, on_event=on_event))
    except CorruptObjectError as error:
        return _Tried(_Verdict(reason=str(error) or type(error).__name__))
    except UserError as error:
        lines = tuple(error.problems) or (type(error).__name__,)
        return _Tried(_Verdict(stop=lines, store_failed=isinstance(error, StorageError)), failure=error)
    digest = f"{crc64nvme(encode(manifest)):016x}"
    return _Tried(_Verdict(digest=digest), Loaded(manifest, tensors))


def _none_is_whole(uri: str, count: int) -> str:
    return problem(
        "run.uri",
        uri,
        f"holds {count} checkpoint{'s' if count > 1 else ''}, but none verifies",
        fix="restore the objects from a backup or the bucket's versions, or start a new run under a different uri",
    )
