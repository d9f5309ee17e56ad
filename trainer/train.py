"""`python -m trainer train`: put one attempt together from its config, run the loop, leave with the right exit code."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from lustrain.process import signal_when_orphaned
from trainer import config as configuration
from trainer import parallel
from trainer.config import Config
from trainer.environment import launch_attempt, max_silence_s
from trainer.errors import EXIT_DONE, EXIT_REQUEUE, LostRunError
from trainer.generation import OwnedRun, begin_generation, roll_back, sinks_of
from trainer.interrupt import NoticeWatcher
from trainer.interrupt.notice import OnEvent
from trainer.loop import LoopEnd, Training, train, warm_up
from trainer.metrics import Sink
from trainer.metrics.relay import Relay, rank_name
from trainer.node.ranks import MAIN_STACK, STACKS
from trainer.parallel import World, all_reduce_stats, choose
from trainer.parallel.agree import run_on_all_ranks
from trainer.parallel.heartbeat import SILENT_S, Heartbeat
from trainer.parallel.peers import rank_0_last, report_lost_ranks
from trainer.parallel.transport import read_transport, require_efa
from trainer.parallel.votes import StoreVotes, VoteBox
from trainer.run.config_file import config_file
from trainer.run.exporter import start_cloudwatch, start_exporter
from trainer.run.footprint import report_lack_of_memory
from trainer.run.start import (
    check_fit_and_versions,
    claim_run,
    open_and_compare_data,
    proven_settings_exit_1,
    store_failures_exit_1,
)
from trainer.step import optim, precision, recompute
from trainer.storage import ArchivedError, ObjectStore, open_store
from trainer.tasks import Task, make_task, problems_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.toml", help="a file, or an object like s3://bucket/config.toml")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="override a setting"
    )


def run(args: argparse.Namespace) -> int:
    """Train until done, notice or loss of the run; the exit codes are those of `trainer.errors`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # A launcher asks for the stacks of ranks that hang; Python's own handlers may not run then.
    faulthandler.register(MAIN_STACK, file=2, all_threads=False)
    faulthandler.register(STACKS, file=2, all_threads=True)
    with config_file(args.config) as path:
        config = configuration.load(path, args.sets, also=problems_in)
    task = make_task(config.task, seed=config.run.seed)
    with report_lack_of_memory(), ExitStack() as cleanup, ExitStack() as synchronized_cleanup:
        training, owned = prepare(config, task, cleanup, synchronized_cleanup)
        # Before this there was nothing to save, and a rank left alone could still have claimed the run from the next job.
        signal_when_orphaned(config.interrupt.signal_grace_s)
        while (end := train(training)) is LoopEnd.ROLL_BACK:
            roll_back(training, owned)
        return finish(training, end)


def prepare(
    config: Config, task: Task, cleanup: ExitStack, synchronized_cleanup: ExitStack
) -> tuple[Training, OwnedRun]:
    """Join the ranks, claim the run, build the model and load the newest checkpoint; `cleanup` undoes it in order.

    `synchronized_cleanup` ends before it: from then on ranks leave one by one.
    """
    cleanup.enter_context(precision.deterministic(config.train.deterministic))
    cleanup.enter_context(precision.matmul_policy(config.precision))
    world = parallel.join(config.parallel)
    cleanup.callback(world.close)
    # After `rank_0_last`: of a finished run rank 0 stays for a scrape when the others have left.
    serving = cleanup.enter_context(ExitStack())
    cleanup.enter_context(report_lost_ranks(world))
    relay = Relay(rank_name(world.rank, launch_attempt()))
    cleanup.callback(relay.close)
    stores: list[ObjectStore] = []
    watch = NoticeWatcher(
        config.interrupt,
        rank=world.rank,
        local_rank=world.local_rank,
        on_event=relay.event,
        wall_clock=lambda: stores[0].now() if stores else None,
    )
    cleanup.enter_context(watch)
    silent_s = max_silence_s(SILENT_S)
    synchronized_cleanup.enter_context(Heartbeat(world, lambda: watch.notice() is not None, silent_s=silent_s))
    votes = StoreVotes(world.store, world.world_size)
    cleanup.enter_context(rank_0_last(world, votes))

    check_fit_and_versions(config, task, world, votes, relay.event)
    if world.device.type == "cuda" and world.world_size > 1:
        check_transport(config, world, votes, relay.event)
    if config.interrupt.queue:
        read_queue(world, votes, watch)
    open_and_compare_data(config, task, world, votes)
    cleanup.callback(task.close)

    @proven_settings_exit_1()
    def open_run() -> None:
        stores.append(open_store(config.run.uri, name="run.uri"))

    run_on_all_ranks(votes, world.rank, "start/store", open_run)
    store = stores[0]
    run_lease = claim_run(config, task, world, votes, store)
    cleanup.enter_context(store_failures_exit_1(but=(ArchivedError,)))
    config = config.with_schedule(run_lease.schedule_steps)
    training = build(config, task, world, watch, relay)
    exporter = start_exporter(
        config, world, relay.event, lambda: task.flops_per_token(training.model), training.clock.age_s
    )
    if exporter is not None:
        serving.callback(exporter.close)
    cloudwatch = start_cloudwatch(config, world, relay.event)
    if cloudwatch is not None:
        cleanup.callback(cloudwatch.close)
    owned = OwnedRun(store, run_lease, relay, exporter=exporter, cloudwatch=cloudwatch)
    cleanup.enter_context(owned.generation_ends)
    begin_generation(training, owned, votes)
    relay.attach(*sinks_of(training, owned))
    return training, owned


def check_transport(config: Config, world: World, votes: VoteBox, on_event: OnEvent) -> None:
    """Record what NCCL sends over between hosts; UserError where it leaves a host's EFA devices unused."""
    # NCCL opens them for its first communicator, which torch may make in the background or as late as for a collective.
    all_reduce_stats(world, [0.0])
    require = partial(require_efa, allow_sockets=config.parallel.allow_sockets)
    transport = run_on_all_ranks(votes, world.rank, "start/transport", lambda: read_transport().to_json(), require)
    if transport and world.rank == 0:
        on_event("transport", transport)


def read_queue(world: World, votes: VoteBox, watch: NoticeWatcher) -> None:
    """Have rank 0 read the interruption queue, once it knows the instances of the run."""

    def instance() -> dict[str, Any]:
        return {"id": watch.instance_id(), "host": socket.gethostname()} if world.local_rank == 0 else {}

    def by_id(answers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        return {answer["id"]: answer["host"] for answer in answers.values() if answer.get("id")}

    nodes = run_on_all_ranks(votes, world.rank, "start/instances", instance, by_id)
    if world.rank == 0:
        watch.read_queue(nodes)


def build(config: Config, task: Task, world: World, watch: NoticeWatcher, sink: Sink) -> Training:
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
    )
    warm_up(training)
    return training


def finish(training: Training, end: LoopEnd) -> int:
    """Say how the attempt ended, and turn it into the exit code; UserError on every rank when one found its data damaged."""
    if end is LoopEnd.LOST:
        raise training.saving.lost() or LostRunError("a newer job owns this run; see rank 0's message")
    training.saving.run_on_all_ranks("end/data", training.task.check)
    code = EXIT_REQUEUE if end is LoopEnd.NOTICE else EXIT_DONE
    if training.world.rank == 0:
        saved = training.saving.committed_step
        noticed = training.saving.noticed
        detail = f"{noticed.summary}; {noticed.advice}" if noticed else end.value
        fields = {"step": training.progress.step, "saved_step": saved, "exit_code": code, "detail": detail}
        training.sink.event("stopped", fields)
    return code
