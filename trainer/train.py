"""`python -m trainer train`: put one attempt together from its config, run the loop, leave with the right exit code."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from awscrt.checksums import crc64nvme
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lustrain.problem import UserError
from lustrain.process import signal_when_orphaned
from trainer import __version__, parallel
from trainer import config as configuration
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.fence import Fence
from trainer.checkpoint.load.assemble import Region
from trainer.checkpoint.load.latest import Loaded
from trainer.checkpoint.save.interval import Interval
from trainer.checkpoint.save.saver import Checkpointer
from trainer.config import Config
from trainer.environment import launch_attempt, max_silence_s
from trainer.errors import EXIT_DONE, EXIT_REQUEUE, LostRunError
from trainer.interrupt import Watch
from trainer.launch.ranks import STACKS
from trainer.loop import Ending, Progress, Training, train, warm_up
from trainer.metrics import RunLog, Sink, TensorBoardSink, TerminalSink
from trainer.metrics.relay import Relay, WarningsOnly, rank_name
from trainer.metrics.timeline import ROLLED_BACK
from trainer.parallel import World, choose
from trainer.parallel.agree import Json, run_on_all_ranks
from trainer.parallel.heartbeat import SILENT_S, Heartbeat
from trainer.parallel.peers import rank_0_last, report_lost_ranks
from trainer.parallel.shards import LocalShard, local_shard
from trainer.parallel.votes import StoreVotes, VoteBox
from trainer.run.config_file import config_file
from trainer.run.footprint import report_lack_of_memory
from trainer.run.saving import Saving, State
from trainer.run.start import (
    RunLease,
    check_fit,
    claim_again,
    claim_run,
    load_claimed,
    open_data_alike,
    proven_settings_exit_1,
    store_failures_exit_1,
)
from trainer.step import bad_loss, optim, precision, recompute
from trainer.storage import ArchivedError, ObjectStore, open_store
from trainer.tasks import Task, make_task, problems_in

LOG_S = 10.0
"""How long a commit waits for the records of its steps; a log that cannot be stored must not cost a checkpoint."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.toml", help="a file, or an object like s3://bucket/config.toml")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="override a setting"
    )


def run(args: argparse.Namespace) -> int:
    """Train until done, notice or loss of the run; the exit codes are those of `trainer.errors`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # A launcher asks for the stacks of ranks that hang; Python's own handlers may not run then.
    faulthandler.register(STACKS, file=2, all_threads=True)
    with config_file(args.config) as path:
        config = configuration.load(path, args.sets, also=problems_in)
    task = make_task(config.task, seed=config.run.seed)
    with report_lack_of_memory(), ExitStack() as leaving, ExitStack() as together_still:
        training, claimed = prepare(config, task, leaving, together_still)
        # Before this there was nothing to save, and a rank left alone could still have claimed the run from the next job.
        signal_when_orphaned(config.interrupt.signal_grace_s)
        while (ending := train(training)) is Ending.ROLL_BACK:
            roll_back(training, claimed)
        return leave(training, ending)


@dataclass
class ClaimedRun:
    """The run as this process owns it, under one generation after the other: a roll back begins the next."""

    store: ObjectStore
    run_lease: RunLease
    relay: Relay
    log: RunLog | None = None
    """The generation's, on rank 0 only; so are the next two."""
    terminal: TerminalSink | None = None
    board: TensorBoardSink | None = None
    generation_ends: ExitStack = field(default_factory=ExitStack)
    """Closes what belongs to the generation: its log, and what saves."""


def prepare(config: Config, task: Task, leaving: ExitStack, together_still: ExitStack) -> tuple[Training, ClaimedRun]:
    """Join the ranks, claim the run, build the model and load the newest checkpoint; `leaving` undoes it in order.

    `together_still` ends before it: from then on ranks leave one by one.
    """
    leaving.enter_context(precision.deterministic(config.train.deterministic))
    leaving.enter_context(precision.matmul_policy(config.precision))
    world = parallel.join(config.parallel)
    leaving.callback(world.close)
    leaving.enter_context(report_lost_ranks(world))
    relay = Relay(rank_name(world.rank, launch_attempt()))
    leaving.callback(relay.close)
    stores: list[ObjectStore] = []
    watch = Watch(
        config.interrupt,
        rank=world.rank,
        local_rank=world.local_rank,
        on_event=relay.event,
        wall_clock=lambda: stores[0].now() if stores else None,
    )
    leaving.enter_context(watch)
    silent_s = max_silence_s(SILENT_S)
    together_still.enter_context(Heartbeat(world, lambda: watch.notice() is not None, silent_s=silent_s))
    votes = StoreVotes(world.store, world.world_size)
    leaving.enter_context(rank_0_last(world, votes))

    run_on_all_ranks(votes, world.rank, "start/fit", lambda: check_fit(config, world, relay.event))
    open_data_alike(config, task, world, votes)
    leaving.callback(task.close)

    @proven_settings_exit_1()
    def open_run() -> None:
        stores.append(open_store(config.run.uri, name="run.uri"))

    run_on_all_ranks(votes, world.rank, "start/store", open_run)
    store = stores[0]
    run_lease = claim_run(config, task, world, votes, store)
    leaving.enter_context(store_failures_exit_1(but=(ArchivedError,)))
    config = config.with_schedule(run_lease.schedule_steps)
    training = build(config, task, world, watch, relay, run_lease)
    claimed = ClaimedRun(store, run_lease, relay)
    leaving.enter_context(claimed.generation_ends)
    begin_generation(training, claimed, votes)
    relay.attach(*sinks_of(training, claimed))
    return training, claimed


def begin_generation(training: Training, claimed: ClaimedRun, votes: VoteBox) -> None:
    """Load the newest checkpoint of the run, if there is any, open the generation's log, and make what saves from then on."""
    config, run_lease = training.config, claimed.run_lease
    training.generation = run_lease.generation
    if training.world.rank == 0:
        claimed.log = RunLog(
            claimed.store, run_lease.generation, config.metrics.flush_s, launch_attempt=launch_attempt()
        )
        claimed.generation_ends.callback(claimed.log.close)
    training.saving = resume(training, claimed.store, votes, run_lease, claimed.log, claimed.generation_ends)


def roll_back(training: Training, claimed: ClaimedRun) -> None:
    """Go on from a checkpoint before the bad step, with later samples, and save that at once.

    This is a start without a new process: a generation of its own, so that the steps which it undoes stop counting.
    """
    bad, config, world = training.bad_step, training.config, training.world
    assert bad is not None
    training.saving.wait()
    claimed.relay.hold()
    claimed.generation_ends.close()
    left, offset = claimed.run_lease.generation, training.progress.data_offset
    # The topics of a start are used once per store.
    votes = StoreVotes(PrefixStore(f"after-{left}", world.store), world.world_size)
    claimed.run_lease = claim_again(
        claimed.run_lease, world, votes, claimed.store, bad.step, config.bad_loss.rollback_steps
    )
    begin_generation(training, claimed, votes)
    to_step = training.progress.step
    training.progress.data_offset = bad.data_offset(
        offset, to_step=to_step, global_batch=config.train.global_batch, skip_batches=config.bad_loss.skip_batches
    )
    training.history = training.history.after_rollback(bad.history)
    training.bad_step = None
    claimed.relay.attach(*sinks_of(training, claimed))
    if world.rank == 0:
        fields = {"step": bad.step, "loss": bad.loss, "grad_norm": bad.grad_norm, "to_step": to_step}
        counts = {"data_offset": training.progress.data_offset, "in_run": bad.history.rollbacks}
        claimed.relay.event(ROLLED_BACK, fields | counts | {"from_attempt": left, "detail": bad.reason})
    # Without this commit a restart would roll back again, with the same samples, and not count it.
    training.saving.save(to_step)
    training.saving.wait()


def build(config: Config, task: Task, world: World, watch: Watch, sink: Sink, run_lease: RunLease) -> Training:
    """Model, optimizer and scaler on this rank's device, as the seed makes them, ready for a first step."""
    strategy = choose.choose_strategy(config, world)
    model = strategy.build(task)
    model.train()
    blocks = task.blocks(model)
    recompute.recompute_blocks(blocks, config.train.activation_checkpointing)
    if config.train.compile:
        recompute.compile_blocks(blocks, config.train.compile_mode)
    wrapped = strategy.wrap(model, task)
    optimizer = optim.make_optimizer(model, config.optimizer)
    training = Training(
        config=config,
        task=task,
        world=world,
        strategy=strategy,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        tensors=optim.model_tensors(model) | optim.optimizer_tensors(model, optimizer),
        scaler=precision.make_scaler(config.precision, world.device),
        watch=watch,
        sink=sink,
        generation=run_lease.generation,
    )
    warm_up(training)
    return training


def resume(
    training: Training, store: ObjectStore, votes: VoteBox, run_lease: RunLease, log: RunLog | None, leaving: ExitStack
) -> Saving:
    """Load the newest whole checkpoint, if there is any, settle the lineage, and make what saves from then on."""
    config, world = training.config, training.world
    dims = training.strategy.dims
    shards = {name: local_shard(name, tensor, dims.axes) for name, tensor in training.tensors.items()}

    def want(name: str) -> Region | bool:
        shard = shards.get(name)
        return shard is not None and Region(shard.offsets, shard.lengths, shard.shape)

    loaded = load_claimed(config, world, votes, store, run_lease, want, training.sink.event)
    parent = loaded.manifest.id if loaded else None

    @store_failures_exit_1()
    def settle() -> Json:
        if loaded is not None:
            restore(training, {name: shard.tensor for name, shard in shards.items()}, loaded)
        if run_lease.lease is not None:
            run_lease.lease.settle(parent)
        return {"shard": dims.shard_rank, "weights": weights_checksum(shards.values())}

    weights = run_on_all_ranks(votes, world.rank, "start/settle", settle, require_same_weights)["weights"]
    announce(training, run_lease, loaded, weights)

    return make_saving(training, store, votes, run_lease, parent, log, leaving)


def make_saving(
    training: Training,
    store: ObjectStore,
    votes: VoteBox,
    run_lease: RunLease,
    parent: ManifestId | None,
    log: RunLog | None,
    leaving: ExitStack,
) -> Saving:
    """Make what saves this training from `parent` on; its writer process starts and allocates its memory."""
    config, world = training.config, training.world
    rules = config.checkpoint
    interval = Interval(rules.every_steps, rules.mtbf_hours * 3600, least_s=rules.least_seconds)
    interval.resumed(training.progress.step)
    checkpointer = Checkpointer(
        store,
        votes,
        rank=world.rank,
        world_size=world.world_size,
        generation=run_lease.generation,
        lease=run_lease.lease,
        options=config.checkpoint,
        parent=parent,
        on_event=training.sink.event,
        before_commit=partial(flush_records, log, training.progress.step) if log else None,
        mesh=training.strategy.dims.axes,
    )
    checkpointer.prepare(training.tensors)
    fence = Fence(run_lease.lease, config.checkpoint.lease_poll_s, training.sink.event) if run_lease.lease else None
    state = State(
        tensors=training.tensors,
        manifest=lambda: {
            "progress": training.progress.to_state(),
            "cursor": training.progress.data_offset + training.progress.step * config.train.global_batch,
            "bad_loss": training.history.to_state(),
            "scaler": precision.scaler_state(training.scaler),
        },
        about=lambda: {
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
    leaving.callback(saving.close)
    return saving


def flush_records(log: RunLog, resumed_at: int, step: int) -> None:
    """Wait until the records of all steps up to `step` are durable; those up to `resumed_at` are another generation's."""
    if step > resumed_at:
        log.flush_step(step, timeout=LOG_S)


def require_same_weights(answers: dict[int, Json]) -> Json:
    """Return the checksum of all weights; UserError unless all ranks that hold the same shard begin with the same ones."""
    shards: dict[int, str] = {}
    for _, answer in sorted(answers.items()):
        shards.setdefault(answer["shard"], answer["weights"])
    other = [rank for rank, answer in sorted(answers.items()) if answer["weights"] != shards[answer["shard"]]]
    if other:
        raise UserError(
            f"rank {other[0]} and {len(other) - 1} more begin with other weights than the ranks with the same shard: "
            "a defect; fix: report it"
        )
    if len(shards) == 1:
        return {"weights": shards[0]}
    return {"weights": f"{crc64nvme(''.join(shards[number] for number in sorted(shards)).encode()):016x}"}


def restore(training: Training, tensors: dict[str, torch.Tensor], loaded: Loaded) -> None:
    """Put a verified checkpoint into the training, bit for bit."""
    optim.load_in_place(tensors, loaded.tensors)
    state = loaded.manifest.state
    training.progress = Progress.from_state(state["progress"])
    training.history = bad_loss.History.from_state(state.get("bad_loss", {}))
    precision.load_scaler(training.scaler, state["scaler"])


def announce(training: Training, run_lease: RunLease, loaded: Loaded | None, weights: str) -> None:
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


def weights_checksum(shards: Iterable[LocalShard]) -> str:
    """CRC-64/NVME over this rank's bytes of all model tensors in name order, 16 hex digits."""
    total = 0
    for shard in sorted(shards, key=lambda shard: shard.name):
        if shard.name.startswith("model/"):
            raw = shard.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            total = crc64nvme(raw.numpy().data, total)
    return f"{total:016x}"


def sinks_of(training: Training, claimed: ClaimedRun) -> list[Sink]:
    """Show and store every record on rank 0, which has the run's log; the others only print what goes wrong on them."""
    config = training.config
    if claimed.log is None:
        return [WarningsOnly(rank_name(training.world.rank, launch_attempt()))]
    claimed.terminal = claimed.terminal or TerminalSink(config.train.steps)
    sinks: list[Sink] = [claimed.terminal, claimed.log]
    if config.metrics.tensorboard:
        if claimed.board is not None:
            claimed.board.close()
        claimed.board = TensorBoardSink(config.metrics.tensorboard, first_step=training.progress.step + 1)
        sinks.append(claimed.board)
    return sinks


def leave(training: Training, ending: Ending) -> int:
    """Say how the attempt ended, and turn it into the exit code; UserError on every rank when one found its data damaged."""
    if ending is Ending.LOST:
        raise training.saving.lost() or LostRunError("a newer job owns this run; see rank 0's message")
    training.saving.run_on_all_ranks("end/data", training.task.check)
    code = EXIT_REQUEUE if ending is Ending.NOTICE else EXIT_DONE
    if training.world.rank == 0:
        saved = training.saving.committed_step
        noticed = training.saving.noticed
        detail = f"{noticed.summary}; {noticed.advice}" if noticed else ending.value
        fields = {"step": training.progress.step, "saved_step": saved, "exit_code": code, "detail": detail}
        training.sink.event("stopped", fields)
    return code
