"""`python -m trainer train`: put one attempt together from its config, run the loop, leave with the right exit code."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from awscrt.checksums import crc64nvme

from lustrain.problem import UserError
from lustrain.process import signal_when_orphaned
from trainer import __version__, parallel
from trainer import config as configuration
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.fence import Fence
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
from trainer.parallel import World
from trainer.parallel.agree import Json, run_on_all_ranks
from trainer.parallel.heartbeat import SILENT_S, Heartbeat
from trainer.parallel.peers import rank_0_last, report_lost_ranks
from trainer.parallel.votes import StoreVotes, VoteBox
from trainer.run.config_file import config_file
from trainer.run.footprint import report_lack_of_memory
from trainer.run.saving import Saving, State
from trainer.run.start import (
    RunLease,
    check_fit,
    claim_run,
    load_claimed,
    open_data_alike,
    proven_settings_exit_1,
    store_failures_exit_1,
)
from trainer.step import optim, precision, recompute
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
        training = prepare(config, task, leaving, together_still)
        # Before this there was nothing to save, and a rank left alone could still have claimed the run from the next job.
        signal_when_orphaned(config.interrupt.signal_grace_s)
        return leave(training, train(training))


def prepare(config: Config, task: Task, leaving: ExitStack, together_still: ExitStack) -> Training:
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
    log = None
    if world.rank == 0:
        log = RunLog(store, run_lease.generation, config.metrics.flush_s, launch_attempt=launch_attempt())
        leaving.callback(log.close)
    training.saving = resume(training, store, votes, run_lease, log, leaving)
    relay.attach(*sinks_of(training, log))
    return training


def build(config: Config, task: Task, world: World, watch: Watch, sink: Sink, run_lease: RunLease) -> Training:
    """Model, optimizer and scaler on this rank's device, as the seed makes them, ready for a first step."""
    model = task.build_model().to(world.device)
    model.train()
    blocks = task.blocks(model)
    recompute.recompute_blocks(blocks, config.train.activation_checkpointing)
    if config.train.compile:
        recompute.compile_blocks(blocks, config.train.compile_mode)
    optimizer = optim.make_optimizer(model, config.optimizer)
    training = Training(
        config=config,
        task=task,
        world=world,
        model=model,
        wrapped=parallel.wrap_ddp(model, config.parallel, world),
        optimizer=optimizer,
        scaler=precision.make_scaler(config.precision, world.device),
        watch=watch,
        sink=sink,
        generation=run_lease.generation,
    )
    precision.seed_streams(config.run.seed, 0, world.rank)
    warm_up(training)
    return training


def resume(
    training: Training, store: ObjectStore, votes: VoteBox, run_lease: RunLease, log: RunLog | None, leaving: ExitStack
) -> Saving:
    """Load the newest whole checkpoint, if there is any, settle the lineage, and make what saves from then on."""
    config, world = training.config, training.world
    tensors = optim.model_tensors(training.model) | optim.optimizer_tensors(training.model, training.optimizer)
    mine = f"own/{world.rank}/"

    def want(name: str) -> bool:
        return name in tensors or name.startswith(mine)

    loaded = load_claimed(config, world, votes, store, run_lease, want, training.sink.event)
    parent = loaded.manifest.id if loaded else None

    @store_failures_exit_1()
    def settle() -> Json:
        if loaded is not None:
            restore(training, tensors, loaded)
        if run_lease.lease is not None:
            run_lease.lease.settle(parent)
        return {"weights": weights_checksum(training.model)}

    weights = run_on_all_ranks(votes, world.rank, "start/settle", settle, require_same_weights)["weights"]
    announce(training, run_lease, loaded, weights)

    return make_saving(training, tensors, store, votes, run_lease, parent, log, leaving)


def make_saving(
    training: Training,
    tensors: dict[str, torch.Tensor],
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
        before_commit=partial(log.flush_step, timeout=LOG_S) if log else None,
    )
    checkpointer.prepare(tensors, precision.rng_tensors(world.rank))
    fence = Fence(run_lease.lease, config.checkpoint.lease_poll_s, training.sink.event) if run_lease.lease else None
    state = State(
        shared=tensors,
        own=lambda: precision.rng_tensors(world.rank),
        manifest=lambda: {
            "progress": training.progress.to_state(),
            "cursor": training.progress.step * config.train.global_batch,
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


def require_same_weights(answers: dict[int, Json]) -> Json:
    """Rank 0's answer, which every rank must give."""
    other = [rank for rank, answer in sorted(answers.items()) if answer != answers[0]]
    if other:
        raise UserError(
            f"rank {other[0]} and {len(other) - 1} more begin with other weights than rank 0: a defect; fix: report it"
        )
    return answers[0]


def restore(training: Training, tensors: dict[str, torch.Tensor], loaded: Loaded) -> None:
    """Put a verified checkpoint into the training, bit for bit; the same world also gets its random streams back."""
    optim.load_in_place(tensors, loaded.tensors)
    state = loaded.manifest.state
    training.progress = Progress.from_state(state["progress"])
    precision.load_scaler(training.scaler, state["scaler"])
    if loaded.manifest.world_size == training.world.world_size:
        precision.restore_rng(loaded.tensors, training.world.rank)
    else:
        precision.seed_streams(training.config.run.seed, training.progress.step, training.world.rank)


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


def weights_checksum(model: torch.nn.Module) -> str:
    """CRC-64/NVME over all model tensors' bytes in name order, 16 hex digits."""
    total = 0
    for _, tensor in sorted(optim.model_tensors(model).items()):
        total = crc64nvme(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, total)
    return f"{total:016x}"


def sinks_of(training: Training, log: RunLog | None) -> list[Sink]:
    """Show and store every record on rank 0, which has the run's log; the others only print what goes wrong on them."""
    config = training.config
    if log is None:
        return [WarningsOnly(rank_name(training.world.rank, launch_attempt()))]
    sinks: list[Sink] = [TerminalSink(config.train.steps), log]
    if config.metrics.tensorboard:
        sinks.append(TensorBoardSink(config.metrics.tensorboard, first_step=training.progress.step + 1))
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
