"""Saving, as training sees it: the loop is blocked for one memory copy, the rest happens beside the training.

A save passes through three hands: the caller's thread stages it; a writing thread has the child process store it and
posts this rank's result; a closing thread, on rank 0, gathers the results, commits, and posts the outcome to the others.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from lustrain.background import BackgroundThread
from lustrain.problem import UserError
from trainer.checkpoint.format.layout import ATTEMPTS, ManifestId, attempt_name, tier_root
from trainer.checkpoint.format.mesh_layout import layout_digest
from trainer.checkpoint.lineage.lease import Lease
from trainer.checkpoint.lineage.prune import prune
from trainer.checkpoint.save.child import WriterDiedError, WriterProcess
from trainer.checkpoint.save.commit import commit, exact_json, manifest_of, printable_json
from trainer.checkpoint.save.flight import FinishedSave, Flight
from trainer.checkpoint.save.protocol import RankResult, SaveOutcome, SaveProtocol, SaveStart
from trainer.checkpoint.save.stage import Staged, Staging, StagingError
from trainer.checkpoint.save.writer import Job, StoreResult
from trainer.config import CheckpointConfig
from trainer.errors import LostRunError
from trainer.metrics.timeline import PRUNED
from trainer.parallel.shards import Axis, rank_at
from trainer.parallel.votes import VoteBox, VoteError
from trainer.storage import ObjectStore

PLAN_S = 60.0
"""How long a rank waits for rank 0 to call save() too; they are at the same step boundary."""
COMMIT_S = 120.0
"""Allowed between the last result and the manifest: two requests per part and one put, with the store's own retries."""
CLOSE_S = 5.0
"""How long close() waits for its threads; one that hangs in the store is a daemon and ends with the process."""


class Checkpointer:
    """Saves one rank's share of a training; every rank calls save() at the same steps.

    Rank 0 decides at each call whether it is a save, and under which name; the others follow, so it does not matter
    that ranks learn at different moments that the save before has ended. `on_event` is called from several threads,
    with checkpoint_started, checkpoint_committed, checkpoint_failed, save_skipped, tier_failed, writer_restarted,
    checkpoints_pruned and prune_failed.
    """

    def __init__(
        self,
        store: ObjectStore,
        votes: VoteBox,
        *,
        rank: int,
        mesh: Sequence[Axis],
        generation: int,
        lease: Lease | None,
        options: CheckpointConfig,
        parent: ManifestId | None,
        on_event: Callable[[str, dict[str, Any]], None],
        before_commit: Callable[[int], object] | None = None,
    ) -> None:
        """`lease` is rank 0's, `parent` the checkpoint that this generation began from.

        `mesh` is the job's device mesh with this rank's place in it.
        `before_commit` is called on rank 0 with the step whose manifest comes next, in a thread that may wait.
        """
        if rank == 0 and lease is None:
            raise ValueError("rank 0 commits and so needs the lease")
        self._store, self._lease = store, lease
        self._rank, self._generation = rank, generation
        self._options, self._parent, self._on_event = options, parent, on_event
        self._before_commit = before_commit
        in_order = sorted(options.tiers, key=lambda tier: tier.kind != "memory")
        self._tiers = tuple(tier_root(tier.path, store.uri) for tier in in_order)
        self._staging = Staging(mesh, options.copy_threads)
        self._writer = WriterProcess()
        self._restarts_reported = 0
        self._calls = 0
        self._changed = threading.Condition()
        self._in_flight: list[Flight] = []
        self._outcomes: list[FinishedSave] = []
        self._last_commit = parent
        self._last_seconds = 0.0
        self._last_closed = -1
        self._lost: LostRunError | None = None
        self._stop = threading.Event()
        self._protocol = SaveProtocol(votes, rank, generation, self._stop)
        self._is_whole_job = votes.world_size == prod(axis.size for axis in mesh) and rank == rank_at(mesh)
        self._written: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._staged: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._commits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for a commit to prune after, False for the end."""
        parts = {"writing": self._write_all, "closing": self._close_all, "pruning": self._prune_all}
        self._threads = [
            BackgroundThread(part, f"checkpoint-{name}", on_defect=self._wake) for name, part in parts.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """A save is in flight: a save() that is not urgent would be skipped."""
        with self._changed:
            return bool(self._in_flight)

    @property
    def estimate_s(self) -> float:
        """Seconds that the last committed save took from the call to the commit; 0 before the first."""
        return self._last_seconds

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the save in flight should commit, going by the last one; None when no save is in flight."""
        with self._changed:
            if not self._in_flight:
                return None
            return max(0.0, self._last_seconds - (time.monotonic() - self._in_flight[-1].began))

    @property
    def longest_s(self) -> float:
        """Seconds after which every save in flight has ended one way or another."""
        return 2 * self._outcome_s

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to allocate the staging memory for such tensors, so that the first save does not have to."""
        self._staging.prepare(tensors)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        metadata: dict[str, Any],
        *,
        urgent: bool = False,
    ) -> float:
        """Begin a save and return the seconds this call took; the tensors may change as soon as it returns.

        A plain tensor is equal on all ranks, which share out its rows; of a DTensor each rank stores what it holds, and those
        that hold the same share that out. `state` and `metadata` are JSON; rank 0's go into the manifest. While a save is in
        flight, one that is not urgent is skipped and reported by poll(); an urgent one takes a second staging buffer if
        the host has the memory (or waits for the first), skips the tiers and is written after the one in flight.
        Raises LostRunError when a newer job owns the run. What else goes wrong ends this save, not the training.
        """
        began = time.monotonic()
        self._raise_if_over()
        number, self._calls = self._calls, self._calls + 1
        state, metadata = exact_json("state", state), printable_json(metadata)
        plan = self._announce(number, step, urgent) if self._rank == 0 else None
        staged, problem = None, ""
        if plan is None or plan.attempt:
            try:
                staged = self._staging.stage(tensors, urgent=urgent, wait_s=self._options.vote_timeout_s)
            except StagingError as error:
                problem = str(error)
        plan = plan or self._receive_plan(number)
        if plan.attempt:
            self._begin(Flight(number, step, plan, staged, problem, state, metadata, urgent, began))
        else:
            if staged is not None:
                self._staging.release(staged)
            self._on_event("save_skipped", {"step": step, "detail": plan.why_not})
            with self._changed:
                self._outcomes.append(FinishedSave(step, False, plan.why_not, time.monotonic() - began, 0))
        return time.monotonic() - began

    def poll(self) -> list[FinishedSave]:
        """Return saves that ended since the last call, without waiting; LostRunError when a newer job owns the run."""
        self._raise_if_over()
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def wait(self, timeout: float | None) -> list[FinishedSave]:
        """Like poll(), once no save is in flight or `timeout` seconds have passed."""
        with self._changed:
            self._changed.wait_for(self._is_settled, timeout)
        return self.poll()

    def close(self) -> None:
        """Give up what is in flight (wait() first to have it committed) and end threads and child, in bounded time."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._staged.put(None)
        self._commits.put(False)
        end = time.monotonic() + CLOSE_S
        while (alive := [thread for thread in self._threads if thread.is_alive()]) and time.monotonic() < end:
            # In every round: the writing thread may just have started a new child.
            self._writer.kill()
            alive[0].join(0.1)
        self._writer.close()
        if not alive:
            self._staging.close()

    def _announce(self, number: int, step: int, urgent: bool) -> SaveStart:
        with self._changed:
            in_flight = self._in_flight[-1].step if self._in_flight else None
            keep = (self._last_commit,) if self._last_commit else ()
        if in_flight is not None and not urgent:
            plan = SaveStart("", f"the save of step {in_flight} is still in flight")
        else:
            plan = SaveStart(attempt_name(self._generation, step, secrets.token_hex(4)), keep=keep)
        try:
            self._protocol.post_start(number, plan)
        except VoteError as error:
            return SaveStart("", str(error))
        return plan

    def _receive_plan(self, number: int) -> SaveStart:
        try:
            return self._protocol.read_start(number, PLAN_S)
        except VoteError as error:
            return SaveStart("", str(error))

    def _begin(self, flight: Flight) -> None:
        size = flight.staged.size if flight.staged else 0
        about = {"step": flight.step, "attempt": flight.plan.attempt, "bytes": size, "urgent": flight.urgent}
        self._on_event("checkpoint_started", about)
        with self._changed:
            self._in_flight.append(flight)
        self._staged.put(flight)

    def _write_all(self) -> None:
        self._start_writer()
        while (flight := self._staged.get()) is not None:
            result = self._write(flight)
            if flight.staged is not None:
                self._staging.release(flight.staged)
            try:
                self._protocol.post_result(flight.number, flight.plan.attempt, result)
            except VoteError as error:
                self._end(flight, SaveOutcome(False, str(error)))
                continue
            self._written.put(flight)
        self._written.put(None)

    def _write(self, flight: Flight) -> RankResult:
        """Have the child store this rank's part; returns this rank's result."""
        reply = StoreResult(flight.number, error=flight.problem)
        if self._stop.is_set():
            reply = StoreResult(flight.number, error="the checkpointer was closed")
        elif flight.staged is not None:
            try:
                reply = self._writer.write(
                    self._job(flight, flight.staged),
                    flight.staged.buffer,
                    flight.staged.entries,
                    living=self._staging.usable_buffers,
                    timeout_s=2 * self._options.vote_timeout_s,
                )
            except (WriterDiedError, OSError) as error:
                reply = StoreResult(flight.number, error=str(error))
                self._start_writer()
            flight.written.update(reply.seconds)
            self._report_restarts(reply.error)
        for tier, why in reply.tiers.items():
            self._on_event("tier_failed", {"step": flight.step, "tier": tier, "detail": why})
        return RankResult(reply.stored, reply.error, self._last_closed, self._layout_of(flight))

    def _layout_of(self, flight: Flight) -> str:
        layout = flight.staged.layout if flight.staged and self._is_whole_job else None
        return layout_digest(layout) if layout else ""

    def _job(self, flight: Flight, staged: Staged) -> Job:
        return Job(
            save=flight.number,
            buffer=staged.buffer.number,
            size=staged.size,
            attempt=flight.plan.attempt,
            rank=self._rank,
            store=self._store.uri,
            tiers=() if flight.urgent else self._tiers,
            keep=flight.plan.keep,
            urgent=flight.urgent,
        )

    def _start_writer(self) -> None:
        """Have the child ready before the next save, which tries again where the system is out of processes now."""
        if not self._stop.is_set():
            with suppress(OSError):
                self._writer.start()

    def _report_restarts(self, why: str) -> None:
        if self._writer.restarts > self._restarts_reported:
            self._restarts_reported = self._writer.restarts
            detail = why or "the writer process had ended between two saves"
            self._on_event("writer_restarted", {"detail": detail, "restarts": self._restarts_reported})

    def _close_all(self) -> None:
        while (flight := self._written.get()) is not None:
            self._end(flight, self._decide(flight) if self._rank == 0 else self._receive_outcome(flight))

    def _decide(self, flight: Flight) -> SaveOutcome:
        """Gather the results on rank 0, commit, and post the outcome."""
        try:
            outcome = self._commit(
                flight, self._protocol.gather_results(flight.plan.attempt, self._options.vote_timeout_s)
            )
        except LostRunError as error:
            outcome = SaveOutcome(False, str(error), lost=tuple(error.problems))
        except (UserError, VoteError) as error:
            outcome = SaveOutcome(False, str(error))
        try:
            self._protocol.post_outcome(flight.number, flight.plan.attempt, outcome)
        except VoteError as error:
            return replace(outcome, detail=f"{outcome.detail}; the other ranks do not know it: {error}")
        return outcome

    def _commit(self, flight: Flight, results: Mapping[int, RankResult]) -> SaveOutcome:
        stored = {rank: result.stored for rank, result in results.items() if result.stored}
        failed = [f"rank {rank}: {result.error}" for rank, result in sorted(results.items()) if not result.stored]
        if failed:
            self._drop_parts(flight.plan.attempt)
            more = f"; and {len(failed) - 3} more ranks" if len(failed) > 3 else ""
            return SaveOutcome(False, "; ".join(failed[:3]) + more)
        assert self._lease is not None
        attempt = flight.plan.attempt
        # Ranks of one mesh that cut the same tensors alike hold each element, so that no index has to be read for that.
        staged = flight.staged
        assert staged is not None
        digests = {result.layout for result in results.values()}
        alike = digests == {self._layout_of(flight)} != {""}
        unsure = not alike and (staged.layout is not None or digests != {""})
        new = manifest_of(
            attempt,
            stored,
            parent=self._parent,
            state=flight.state,
            about=flight.metadata,
            layout=staged.layout if alike else None,
        )
        if self._before_commit is not None:
            self._before_commit(flight.step)
        manifest = commit(self._store, self._lease, new, cover=staged.names if unsure else ())
        earlier = manifest.attempt != attempt
        detail = f"already committed by an earlier try, {manifest.attempt}" if earlier else "committed"
        return SaveOutcome(True, detail, manifest.data_bytes)

    def _drop_parts(self, attempt: str) -> None:
        """Remove what other ranks stored of an attempt that failed on a rank: a full disk needs the room."""
        with suppress(UserError):  # what stays behind is pruned as an orphan, a day later
            for info in list(self._store.list(f"{ATTEMPTS}{attempt}/")):
                self._store.delete(info.key)

    def _receive_outcome(self, flight: Flight) -> SaveOutcome:
        """Read, on the other ranks, rank 0's outcome."""
        try:
            return self._protocol.read_outcome(flight.plan.attempt, self._outcome_s)
        except VoteError as error:
            return SaveOutcome(False, str(error))

    @property
    def _outcome_s(self) -> float:
        """Longest time from a save's beginning to its outcome: writing, rank 0's waiting for results, its commit."""
        return 3 * self._options.vote_timeout_s + COMMIT_S

    def _end(self, flight: Flight, outcome: SaveOutcome) -> None:
        seconds = time.monotonic() - flight.began
        fields = {"step": flight.step, "attempt": flight.plan.attempt, "seconds": seconds, "detail": outcome.detail}
        if outcome.committed:
            self._on_event("checkpoint_committed", {**fields, "bytes": outcome.bytes, "written": flight.written})
        else:
            self._on_event("checkpoint_failed", fields)
        if outcome.committed and self._rank == 0:
            self._commits.put(True)
        with self._changed:
            if outcome.committed:
                self._last_commit, self._last_seconds = ManifestId(self._generation, flight.step), seconds
            if outcome.lost:
                self._lost = LostRunError(outcome.lost)
            self._last_closed = max(self._last_closed, flight.number)
            self._in_flight.remove(flight)
            self._outcomes.append(FinishedSave(flight.step, outcome.committed, outcome.detail, seconds, outcome.bytes))
            self._changed.notify_all()

    def _prune_all(self) -> None:
        orphans = going_on = True
        while going_on and self._commits.get():
            while not self._commits.empty():
                # One pruning serves all commits that came meanwhile, also the last one before the end.
                going_on = self._commits.get() and going_on
            self._prune(orphans=orphans)
            orphans = False
        if orphans and self._rank == 0 and self._parent is not None:
            # A job before this one may have died between a commit and its pruning, and this job may be the last one.
            self._prune(orphans=False)

    def _prune(self, *, orphans: bool) -> None:
        try:
            report = prune(self._store, self._options, generation=self._generation, orphans=orphans)
        except UserError as error:
            self._on_event("prune_failed", {"detail": str(error)})
            return
        if report.removed_keys or report.bytes:
            self._on_event(PRUNED, {"removed": report.removed_keys, "bytes": report.bytes})

    def _is_settled(self) -> bool:
        return not self._in_flight or self._lost is not None or any(thread.defect for thread in self._threads)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _raise_if_over(self) -> None:
        for thread in self._threads:
            thread.check()
        if self._lost is not None:
            raise LostRunError(self._lost.problems)
        if self._stop.is_set():
            raise ValueError("this checkpointer is closed")
