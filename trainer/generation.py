"""One generation of a run as this process owns it: what it resumes from, what saves it, and how a roll back begins the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from awscrt.checksums import crc64nvme
from torch.distributed.distributed_c10d import PrefixStore

from lustrain.problem import UserError
from trainer import __version__
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.fence import Fence
from trainer.checkpoint.load.latest import Loaded
from trainer.checkpoint.save.interval import Interval
from trainer.checkpoint.save.saver import Checkpointer
from trainer.environment import launch_attempt
from trainer.loop import Progress, Training
from trainer.metrics import RunLog, Sink, TensorBoardSink, TerminalSink
from trainer.metrics.cloudwatch import CloudWatchSink
from trainer.metrics.prometheus import PrometheusSink
from trainer.metrics.relay import Relay, WarningsOnly, rank_name
from trainer.metrics.timeline import ROLLED_BACK
from trainer.parallel.agree import Json, run_on_all_ranks
from trainer.parallel.shards import Axis, LocalShard, local_shard
from trainer.parallel.votes import StoreVotes, VoteBox
from trainer.run.exporter import follow_generation
from trainer.run.saving import Saving, State
from trainer.run.start import RunLease, claim_again, load_claimed, store_failures_exit_1
from trainer.step import bad_loss, precision
from trainer.storage import ObjectStore

LOG_S = 10.0
"""How long a commit waits for the records of its steps; a log that cannot be stored must not cost a checkpoint."""


@dataclass
class OwnedRun:
    """The run as this process owns it, under one generation after the other: a roll back begins the next."""

    store: ObjectStore
    run_lease: RunLease
    relay: Relay
    log: RunLog | None = None
    """The generation's, on rank 0 only; so are the next two."""
    terminal: TerminalSink | None = None
    board: TensorBoardSink | None = None
    exporter: PrometheusSink | None = None
    """On every rank; over all generations, since a port is taken once."""
    cloudwatch: CloudWatchSink | None = None
    """On rank 0 only; over all generations."""
    generation_ends: ExitStack = field(default_factory=ExitStack)
    """Closes what belongs to the generation: its log, and what saves."""


def begin_generation(training: Training, owned: OwnedRun, votes: VoteBox) -> None:
    """Load the newest checkpoint of the run, if there is any, open the generation's log, and make what saves from then on."""
    config, run_lease = training.config, owned.run_lease
    training.generation = run_lease.generation
    if training.world.rank == 0:
        owned.log = RunLog(owned.store, run_lease.generation, config.metrics.flush_s, launch_attempt=launch_attempt())
        owned.generation_ends.callback(owned.log.close)
    training.saving = resume(training, owned, votes)


def roll_back(training: Training, owned: OwnedRun) -> None:
    """Go on from a checkpoint before the bad step, with later samples, and save that at once.

    This is a start without a new process: a generation of its own, so that the steps which it undoes stop counting.
    """
    bad, config, world = training.bad_step, training.config, training.world
    assert bad is not None
    training.saving.wait()
    owned.relay.hold()
    owned.generation_ends.close()
    left, offset = owned.run_lease.generation, training.progress.data_offset
    # The topics of a start are used once per store.
    votes = StoreVotes(PrefixStore(f"after-{left}", world.store), world.world_size)
    owned.run_lease = claim_again(owned.run_lease, world, votes, owned.store, bad, config.bad_loss.rollback_steps)
    begin_generation(training, owned, votes)
    to_step = training.progress.step
    training.progress.data_offset = bad.data_offset(
        offset, to_step=to_step, global_batch=config.train.global_batch, skip_batches=config.bad_loss.skip_batches
    )
    training.history = training.history.after_rollback(bad.history)
    training.bad_step = None
    owned.relay.attach(*sinks_of(training, owned))
    if world.rank == 0:
        fields = {"step": bad.step, "loss": bad.loss, "grad_norm": bad.grad_norm, "to_step": to_step}
        counts = {"data_offset": training.progress.data_offset, "in_run": bad.history.rollbacks}
        owned.relay.event(ROLLED_BACK, fields | counts | {"from_attempt": left, "detail": bad.reason})
    # Without this commit a restart would roll back again, with the same samples, and not count it.
    training.saving.save(to_step)
    training.saving.wait()


def resume(training: Training, owned: OwnedRun, votes: VoteBox) -> Saving:
    """Load the newest whole checkpoint, if there is any, record it as the parent, and make what saves from then on."""
    parent = load_and_restore(training, owned, votes)
    return make_saving(training, owned, votes, parent)


def load_and_restore(training: Training, owned: OwnedRun, votes: VoteBox) -> ManifestId | None:
    """Go on from the newest whole checkpoint, if there is any, and record it as the parent; returns that checkpoint."""
    config, world, run_lease = training.config, training.world, owned.run_lease
    dims = training.strategy.dims
    shards = {name: local_shard(name, tensor, dims.axes) for name, tensor in training.tensors.items()}
    loaded = load_claimed(
        config,
        world,
        votes,
        owned.store,
        run_lease,
        lambda checkpoint: checkpoint.fill_shards(shards),
        training.sink.event,
    )
    parent = loaded.manifest.id if loaded else None

    @store_failures_exit_1()
    def restore_and_check() -> Json:
        if loaded is not None:
            restore(training, loaded.manifest.state)
        if run_lease.lease is not None:
            run_lease.lease.record_parent(parent)
        return held_checksums(shards.values(), dims.axes)

    weights = run_on_all_ranks(votes, world.rank, "start/restore", restore_and_check, require_same_weights)["weights"]
    log_start(training, run_lease, loaded, weights)
    return parent


def make_saving(training: Training, owned: OwnedRun, votes: VoteBox, parent: ManifestId | None) -> Saving:
    """Make what saves this training from `parent` on; its writer process starts and allocates its memory."""
    config, world, lease = training.config, training.world, owned.run_lease.lease
    rules = config.checkpoint
    interval = Interval(rules.every_steps, rules.mtbf_hours * 3600, least_s=rules.least_seconds)
    interval.resumed(training.progress.step)
    checkpointer = Checkpointer(
        owned.store,
        votes,
        rank=world.rank,
        mesh=training.strategy.dims.axes,
        generation=training.generation,
        lease=lease,
        options=config.checkpoint,
        parent=parent,
        on_event=training.sink.event,
        before_commit=partial(flush_records, owned.log, training.progress.step) if owned.log else None,
    )
    checkpointer.prepare(training.tensors)
    fence = Fence(lease, config.checkpoint.lease_poll_s, training.sink.event) if lease else None
    state = State(
        tensors=training.tensors,
        manifest=lambda: {
            "progress": training.progress.to_state(),
            "cursor": training.progress.data_offset + training.progress.step * config.train.global_batch,
            "bad_loss": training.history.to_state(),
            "scaler": precision.scaler_state(training.scaler),
        },
        metadata=lambda: {
            "lustrain": __version__,
            "torch": torch.__version__,
            "eval_loss": training.progress.last_eval_loss,
        },
    )
    saving = Saving(
        checkpointer,
        votes,
        interval,
        state,
        rank=world.rank,
        fence=fence,
        committed_step=training.progress.step,
        longest_failing_s=rules.longest_failing_s,
    )
    owned.generation_ends.callback(saving.close)
    return saving


def flush_records(log: RunLog, resumed_at: int, step: int) -> None:
    """Wait until the records of all steps up to `step` are durable; those up to `resumed_at` are another generation's."""
    if step > resumed_at:
        log.flush_step(step, timeout=LOG_S)


def require_same_weights(answers: dict[int, Json]) -> Json:
    """Return the checksum of all weights; UserError unless all ranks that hold the same begin with the same.

    Each rank answers with its `held_checksums`. On a mesh that cuts tensors the checksum of all is made from these, and
    comparable for the same mesh only.
    """
    held: dict[str, str] = {}
    other = []
    for rank, answer in sorted(answers.items()):
        if any(held.setdefault(place, checksum) != checksum for place, checksum in answer.items()):
            other.append(rank)
    if other:
        raise UserError(
            f"rank {other[0]} and {len(other) - 1} more begin with other weights than ranks that hold the same: "
            "the Task's model does not depend on its seed alone, or a defect; fix: mend the Task, or report it"
        )
    if len(held) == 1:
        return {"weights": next(iter(held.values()))}
    return {"weights": f"{crc64nvme(''.join(held[place] for place in sorted(held)).encode()):016x}"}


def restore(training: Training, state: Mapping[str, Any]) -> None:
    """Put what a checkpoint holds beside tensors into the training."""
    training.progress = Progress.from_state(state["progress"])
    training.history = bad_loss.History.from_state(state.get("bad_loss", {}))
    precision.load_scaler(training.scaler, state["scaler"])


def log_start(training: Training, run_lease: RunLease, loaded: Loaded | None, weights: str) -> None:
    """Log how this attempt begins, with a checksum of the weights it begins from."""
    if training.world.rank:
        return
    fields: dict[str, Any] = {
        "step": training.progress.step,
        "world_size": training.world.world_size,
        "device": str(training.world.device),
        "weights_crc64nvme": weights,
        "lustrain": __version__,
        "torch": torch.__version__,
    }
    if loaded is None:
        training.sink.event("started", fields)
    else:
        saved = loaded.manifest
        fields |= {
            "from_attempt": saved.generation,
            "saved_world_size": saved.world_size,
            "skipped": len(loaded.skipped),
        }
        training.sink.event("resumed", fields)
    if run_lease.changes:
        training.sink.event("config_changed", {"changes": run_lease.changes})


def held_checksums(shards: Iterable[LocalShard], axes: Sequence[Axis]) -> dict[str, str]:
    """Return the checksum of the model tensors that are cut along the same axes, by this rank's place along these.

    All ranks at that place hold the same bytes. Each tensor is read once: that takes seconds where they are large.
    """
    at: dict[str, list[LocalShard]] = {}
    for shard in shards:
        if shard.name.startswith("model/"):
            cut = [axis for axis in axes if axis.name not in shard.chunk.replica_axes]
            at.setdefault(" ".join(f"{axis.name} {axis.coordinate}" for axis in cut), []).append(shard)
    return {place: checksum_of(some) for place, some in at.items()}


def checksum_of(shards: Iterable[LocalShard]) -> str:
    """CRC-64/NVME over this rank's bytes of these tensors in name order, 16 hex digits."""
    total = 0
    for shard in sorted(shards, key=lambda shard: shard.name):
        raw = shard.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        total = crc64nvme(raw.numpy().data, total)
    return f"{total:016x}"


def sinks_of(training: Training, owned: OwnedRun) -> list[Sink]:
    """Show and store every record on rank 0, which has the run's log; the others only print what goes wrong on them.

    Each rank that has an exporter serves metrics; rank 0 also hands progress to a CloudWatch agent, where there is one.
    """
    config = training.config
    shown = [sink for sink in (owned.exporter, owned.cloudwatch) if sink is not None]
    if owned.log is None:
        return [WarningsOnly(rank_name(training.world.rank, launch_attempt())), *shown]
    follow_generation(shown, owned.store, training.generation, training.progress.step, owned.relay.event)
    owned.terminal = owned.terminal or TerminalSink(config.train.steps)
    sinks: list[Sink] = [owned.terminal, owned.log]
    if config.metrics.tensorboard:
        if owned.board is not None:
            owned.board.close()
        owned.board = TensorBoardSink(config.metrics.tensorboard, first_step=training.progress.step + 1)
        sinks.append(owned.board)
    return [*sinks, *shown]
