"""What must hold after a kill, read from what the run left in its store."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fork_server import ForkServer, Job
from tests.processes import wait_until
from tests.torture.small_run import attempts_stored, began_at, committed, committed_lines, history, newest_step, weights
from trainer.checkpoint.format.layout import attempt_commit
from trainer.checkpoint.lineage.audit import audit
from trainer.checkpoint.lineage.history import read_history
from trainer.checkpoint.lineage.lease import read_lease
from trainer.checkpoint.lineage.prune import prune
from trainer.checkpoint.load.parts import read_manifest
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.config import CheckpointConfig
from trainer.storage import ObjectStore
from trainer.storage.keys import PRIVATE
from trainer.storage.local import LocalStore

TWO_DAYS_S = 48 * 3600.0


@dataclass(frozen=True)
class Death:
    """An attempt that is over."""

    store: ObjectStore
    job: Job
    before: Standing
    killed_writers: int


@dataclass(frozen=True)
class Standing:
    """How far a run has come: its newest committed step, and the generation that owns it."""

    step: int = 0
    generation: int = 0


def after(death: Death) -> Standing:
    """Check everything that must hold now that an attempt is over; returns how the run stands."""
    store, said = death.store, death.job.ranks[0].said()
    began = began_at(said)
    assert began in (None, death.before.step), (
        f"began at step {began}, but step {death.before.step} was committed before:\n{said}"
    )
    ids = committed(store)
    newest = newest_step(store)
    called_committed = max(committed_lines(said), default=0)
    assert newest >= max(death.before.step, called_committed), (
        f"lost: {called_committed} was committed, {newest} is there"
    )
    if ids:
        report = verify_checkpoint(store, ids[-1])
        assert report.ok, f"a committed checkpoint does not verify: {report}"
    lease = read_lease(store)
    if lease is None:
        return death.before
    if lease.generation > death.before.generation:
        _only_saves_in_flight_are_lost(death, newest, lease.generation)
    return Standing(newest, lease.generation)


def _only_saves_in_flight_are_lost(death: Death, newest: int, generation: int) -> None:
    """The one that was in flight at the end, and one for each writer that was killed."""
    mine = [attempt_commit(name) for name in attempts_stored(death.store)]
    lost = sorted({one.step for one in mine if one and one.generation == generation and one.step > newest})
    allowed = 1 + death.killed_writers
    assert len(lost) <= allowed, f"saves {lost} were lost after step {newest}:\n{death.job.said()}"


def nobody_left_behind(server: ForkServer) -> None:
    """No process outlives its rank: a writer is ended by the kernel with it, or ends by itself when it comes up without one."""
    wait_until(lambda: not server.left_behind())


def equal_to_reference(store: ObjectStore, reference: ObjectStore, steps: int) -> None:
    """Every step's loss, gradient norm and learning rate, and all final weights and moments, to the last bit."""
    expected, found = history(reference), history(store)
    assert len(expected) == steps
    different = [step for step, pair in enumerate(zip(expected, found, strict=False), start=1) if pair[0] != pair[1]]
    assert not different, f"steps {different[:10]} differ from the uninterrupted run"
    assert len(found) == steps, f"{len(found)} records of {steps} steps"
    theirs, mine = (weights(one, committed(one)[-1]) for one in (reference, store))
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if mine[name] != theirs[name]] == []


def nothing_piles_up(store: ObjectStore, kills: int, kills_since_start: int) -> None:
    """What kills left in a run is bounded by their number, and pruning removes it once it is old; nothing looks lost."""
    assert audit(store, read_history(store), lambda: CheckpointConfig(keep_last=2)) == []
    ids = committed(store)
    named = {read_manifest(store, one).attempt for one in ids}
    orphans = attempts_stored(store) - named
    assert len(ids) <= 2 + 1, f"{len(ids)} checkpoints are kept, 2 were asked for"
    assert len(orphans) <= kills, f"{len(orphans)} unfinished saves after {kills} kills"
    if not isinstance(store, LocalStore):
        return
    unfinished = list((store.root / PRIVATE).glob(".tmp-*"))
    assert len(unfinished) <= kills_since_start, f"unfinished files: {unfinished}"
    _age(store.root)
    lease = read_lease(store)
    assert lease is not None
    prune(store, CheckpointConfig(keep_last=2), generation=lease.generation)
    # The newest generation may own saves that are still under way, so only older ones' leftovers go.
    rest = [attempt_commit(name) for name in attempts_stored(store) - named]
    assert all(commit is None or commit.generation == lease.generation for commit in rest), rest


def _age(root: Path) -> None:
    then = time.time() - TWO_DAYS_S
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))
