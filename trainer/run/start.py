"""The start of an attempt: every rank checks its part, rank 0 claims the run, and a mistake on any rank stops all."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lustrain.problem import UserError, problem
from trainer.checkpoint import stored_config
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.lease import Lease, committed, live_manifests
from trainer.checkpoint.load.latest import Loaded, NoneWholeError, Read, load_latest
from trainer.checkpoint.stored_config import StoredConfig
from trainer.config import Config, parse_time
from trainer.data.verified import Ranks
from trainer.environment import ATTEMPT, launch_attempt
from trainer.errors import EXIT_FAILURE
from trainer.interrupt.notice import OnEvent
from trainer.interrupt.stopfile import StopFile
from trainer.metrics.prometheus import package_problems
from trainer.parallel import World, choose
from trainer.parallel.agree import Json, run_on_all_ranks
from trainer.parallel.strategy import makes_empty_models
from trainer.parallel.votes import VoteBox
from trainer.run.footprint import check_memory, ranks_here
from trainer.run.versions import this_version, version_problems
from trainer.step import precision, schedule
from trainer.step.bad_loss import BadStep
from trainer.storage import ObjectMissingError, ObjectStore, PassingError, PreconditionError, RefusedError, StorageError
from trainer.tasks import Task


@dataclass(frozen=True)
class RunLease:
    """The run as this attempt takes it over: as rank 0 decided, the same on every rank."""

    generation: int
    candidates: list[ManifestId]
    """Checkpoints it may resume from, newest first."""
    schedule_steps: int
    """Length of the learning-rate schedule, fixed when the run began."""
    changes: dict[str, list[Any]]
    """Settings that differ from the attempt before: path to (before, after)."""
    lease: Lease | None = None
    """On rank 0 only."""


@contextmanager
def store_failures_exit_1(
    kind: type[StorageError] = StorageError, *, but: tuple[type[StorageError], ...] = ()
) -> Iterator[None]:
    """Count a store that fails as a failure, after which a launcher may start the job again, not as a wrong setting.

    Once a run is claimed that holds for all that may come; before, for less (`kind`, `but`): the settings may be wrong.
    """
    try:
        yield
    except StorageError as error:
        if isinstance(error, kind) and not isinstance(error, but):
            error.exit_code, error.everywhere = EXIT_FAILURE, True
        raise


@contextmanager
def proven_settings_exit_1() -> Iterator[None]:
    """Have a store that does not serve just now end with exit code 1, before the run is claimed.

    One that cannot be reached may be named wrong, unless something that has the run from that store
    starts it: a supervisor, or a Job of Kubernetes (https://kubernetes.io/docs/concepts/workloads/controllers/job/).
    """
    if launch_attempt() is None and "JOB_COMPLETION_INDEX" not in os.environ:
        with store_failures_exit_1(PassingError):
            yield
    else:
        with store_failures_exit_1(but=(RefusedError, ObjectMissingError)):
            yield


def check_fit_and_versions(config: Config, task: Task, world: World, votes: VoteBox, on_event: OnEvent) -> None:
    """UserError, on every rank, as `check_fit` on any, or where ranks run different versions of Lustrain."""

    def work() -> Json:
        check_fit(config, task, world, on_event)
        return this_version()

    def reduce(answers: dict[int, Json]) -> Json:
        if lines := version_problems(answers):
            raise UserError(lines)
        return answers[0]

    rank_0s = run_on_all_ranks(votes, world.rank, "start/fit", work, reduce)
    # A rank 0 of an earlier version compares nothing, and answers with nothing.
    if lines := version_problems({0: rank_0s, world.rank: this_version()}):
        votes.withdraw(world.rank, lines[0])
        raise UserError(lines)


def check_fit(config: Config, task: Task, world: World, on_event: OnEvent) -> None:
    """UserError with everything that this config and this world size cannot do together, or that forbids to start now."""
    train, tensor = config.train, config.parallel.tensor
    groups = max(world.world_size // tensor, 1)
    lines: list[str] = [*train.division_problems()]
    if not lines and train.micro_batches < groups:
        ranks = f"{world.world_size} ranks" if tensor == 1 else f"{groups} groups of parallel.tensor = {tensor} ranks"
        why = f"a step has {train.micro_batches} micro-batches, fewer than the {ranks}"
        most = train.global_batch // groups
        allowed = f"divisors of {train.global_batch} up to {most}" if most else ""
        fix = "lower it, or start fewer ranks"
        lines.append(problem("train.micro_batch", train.micro_batch, why, allowed=allowed, fix=fix))
    lines += choose.problems(config, world)
    if tensor > 1:
        lines += task.tensor_problems(tensor)
    lines += precision.problems(config.precision, world.device)
    lines += package_problems(config.metrics.prometheus_port)
    if train.compile and world.device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        why = "torch.compile needs a C++ compiler on the CPU"
        lines.append(problem("train.compile", "true", why, fix="apt-get install g++, or train.compile = false"))
    stop_uri = config.interrupt.stop_uri
    if stop_uri and world.rank == 0 and StopFile(stop_uri, on_event).poll():
        # Otherwise a launcher that starts exit code 85 again would do so forever, one step at a time.
        why = "it exists, so the run would stop at once"
        lines.append(problem("interrupt.stop_uri", stop_uri, why, fix="remove it, then start again"))
    deadline = config.interrupt.deadline
    if deadline and parse_time(deadline) - config.interrupt.deadline_margin_s < time.time():
        # As with the stop file: a launcher would start it again and again, and pay for a restore each time.
        why = f"the time to stop, {config.interrupt.deadline_margin_s:g} s before it, has passed"
        lines.append(problem("interrupt.deadline", deadline, why, fix="set the new capacity's end, or leave it out"))
    if lines:
        raise UserError(lines)


def open_and_compare_data(config: Config, task: Task, world: World, votes: VoteBox) -> None:
    """Open the Task's data on every rank; UserError when one cannot, has too little memory, or sees other data."""

    @proven_settings_exit_1()
    def work() -> Json:
        open_data(config, task, Ranks(world.rank, world.world_size, world.local_rank, ranks_here(world.world_size)))
        need = task.footprint(config.train.micro_batch)
        check_memory(config, need, world, built_whole=not makes_empty_models(type(task)))
        return task.fingerprint()

    run_on_all_ranks(votes, world.rank, "start/data", work, require_alike)


def require_alike(fingerprints: dict[int, Json]) -> Json:
    """UserError that names every rank whose data differ from rank 0's, and in what."""
    expected = stored_config.flatten(fingerprints[0])
    differing = {
        rank: stored_config.differences(expected, stored_config.flatten(fingerprint), {})
        for rank, fingerprint in sorted(fingerprints.items())
    }
    lines = [
        f"task on rank {rank}: differs from rank 0 in {', '.join(paths)}; fix: give every node the same data"
        for rank, paths in differing.items()
        if paths
    ]
    if lines:
        raise UserError(lines[:8])
    return {}


def open_data(config: Config, task: Task, ranks: Ranks) -> None:
    """Open the Task's data on this node; UserError when it is missing, foreign or too small."""
    cache_dir = Path(os.environ.get("LUSTRAIN_CACHE", Path.home() / ".cache" / "lustrain"))
    task.open(cache_dir)
    lines = []
    if not task.train_samples:
        lines.append(
            problem(
                "task", config.task.name, "the training set has no whole sample", fix="more data, or shorter samples"
            )
        )
    if config.eval.every and not task.eval_samples:
        why = "there is nothing to evaluate on"
        lines.append(problem("eval.every", config.eval.every, why, allowed="0", fix="tokenize with --val-fraction"))
    if lines:
        raise UserError(lines)
    task.verify(cache_dir, ranks)


def claim_run(config: Config, task: Task, world: World, votes: VoteBox, store: ObjectStore) -> RunLease:
    """Take the run over on rank 0, unless its config forbids it; nothing is written before everything is checked."""
    leases: list[Lease] = []

    @store_failures_exit_1(but=(RefusedError,))
    def take_lease() -> Json:
        return _take(config, task, store, leases) if world.rank == 0 else {}

    claimed = run_on_all_ranks(votes, world.rank, "start/claim", take_lease, lambda claims: claims[0])
    candidates = [ManifestId(generation, step) for generation, step in claimed["candidates"]]
    lease = leases[0] if leases else None
    return RunLease(claimed["generation"], candidates, claimed["schedule_steps"], claimed["changes"], lease)


class NothingToRollBackToError(UserError):
    """A bad step came before the run had a checkpoint."""

    exit_code = EXIT_FAILURE


def claim_again(
    run_lease: RunLease, world: World, votes: VoteBox, store: ObjectStore, bad: BadStep, steps: int
) -> RunLease:
    """Take the claimed run as its own successor, to go on from a checkpoint about `steps` steps before the bad one.

    NothingToRollBackToError where there is none, LostRunError when a newer job owns the run.
    """
    leases: list[Lease] = []

    @store_failures_exit_1()
    def take_lease() -> Json:
        if run_lease.lease is None:
            return {}
        live = live_manifests(committed(store), run_lease.lease.lineage, run_lease.generation)
        candidates = rollback_candidates(live, bad.step, steps)
        if not candidates:
            raise NothingToRollBackToError(
                f"step {bad.step}: loss = {bad.loss}, gradient norm = {bad.grad_norm}: {bad.reason}, and the run "
                "has no checkpoint to roll back to; fix: lower optimizer.lr, or save sooner (checkpoint.every_steps)"
            )
        lease = run_lease.lease.succeed()
        leases.append(lease)
        ids = [[manifest.generation, manifest.step] for manifest in candidates]
        return {"generation": lease.generation, "candidates": ids}

    taken = run_on_all_ranks(votes, world.rank, "rollback/claim", take_lease, lambda claims: claims[0])
    candidates = [ManifestId(generation, step) for generation, step in taken["candidates"]]
    return RunLease(taken["generation"], candidates, run_lease.schedule_steps, {}, leases[0] if leases else None)


def rollback_candidates(live: Sequence[ManifestId], bad_step: int, steps: int) -> list[ManifestId]:
    """Return which of the live checkpoints, newest first, a roll back may go on from, the best one first."""
    return [manifest for manifest in live if manifest.step <= bad_step - steps] or list(reversed(live))


def load_claimed(
    config: Config,
    world: World,
    votes: VoteBox,
    store: ObjectStore,
    run_lease: RunLease,
    read: Read,
    on_event: OnEvent,
) -> Loaded | None:
    """Load the newest checkpoint of the claimed run that is whole, as `load_latest`; None where it has none.

    Exit code 86 where none is because a newer job owns the run by now and has pruned what this one was to read.
    """
    try:
        return load_latest(
            store,
            votes,
            rank=world.rank,
            world_size=world.world_size,
            candidates=run_lease.candidates,
            tiers=config.checkpoint.tiers,
            read=read,
            on_event=on_event,
        )
    except NoneWholeError:

        @store_failures_exit_1()
        def still_ours() -> None:
            if run_lease.lease is not None:
                run_lease.lease.check()

        run_on_all_ranks(votes, world.rank, "start/owner", still_ours)
        raise


def owner() -> str:
    """Who this job is, for people who read the lease: host, scheduler's job id where there is one, process."""
    jobs = [
        f"{name}={os.environ[name]}" for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", ATTEMPT) if name in os.environ
    ]
    return " ".join([socket.gethostname(), *jobs, f"pid={os.getpid()}"])


def _take(config: Config, task: Task, store: ObjectStore, leases: list[Lease]) -> Json:
    stored = stored_config.check(store, config, task.fingerprint(), task.fingerprint_defaults())
    commits = committed(store)
    if commits and not config.run.resume:
        why = f"{store.uri} already holds {len(commits)} checkpoints"
        fix = "run.resume = true to go on from there, or choose another run.uri"
        raise UserError(problem("run.resume", "false", why, fix=fix))
    began_with = stored.settings.get("schedule.total_steps") if stored else None
    steps = config.schedule.total_steps or began_with or config.train.steps
    lines = schedule.problems(config.schedule, int(steps))
    if lines:
        raise UserError(lines)
    lease = Lease.acquire(store, owner())
    leases.append(lease)
    # Only now can the job before commit nothing more: what it committed since the first look counts.
    commits = committed(store)
    candidates = live_manifests(commits, lease.lineage, lease.generation)
    return {
        "generation": lease.generation,
        "candidates": [[manifest.generation, manifest.step] for manifest in candidates],
        "schedule_steps": steps,
        "changes": _record(store, stored, config.with_schedule(steps), task, lease),
    }


def _record(
    store: ObjectStore, stored: StoredConfig | None, config: Config, task: Task, lease: Lease
) -> dict[str, tuple[Any, Any]]:
    try:
        return stored_config.record(store, stored, config, task.fingerprint(), task.fingerprint_defaults())
    except PreconditionError:
        # Only a newer job stores another configuration now; if there is none, what came between is for a person.
        lease.check()
        raise
