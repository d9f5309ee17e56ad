"""What shows a rank while it trains, Prometheus and CloudWatch, and the run's past that both begin from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lustrain.problem import UserError, problem
from trainer.config import Config, parse_time
from trainer.environment import launch_attempt
from trainer.interrupt.notice import OnEvent
from trainer.metrics.cloudwatch import AgentConnection, CloudWatchSink, address_error
from trainer.metrics.goodput import RunPast
from trainer.metrics.prometheus import PrometheusSink, peak_flops
from trainer.parallel import World
from trainer.run.past import read_past
from trainer.storage import ObjectStore


def start_exporter(
    config: Config,
    world: World,
    on_event: OnEvent,
    flops_per_token: Callable[[], float],
    step_age: Callable[[], float] | None = None,
) -> PrometheusSink | None:
    """Serve this rank's metrics at the configured port plus its local rank; None where they are off.

    None and the event `warning` where the port is refused: a run is worth more than its metrics.
    """
    metrics = config.metrics
    if not metrics.prometheus_port:
        return None
    sink = PrometheusSink(
        run=run_name(config),
        rank=world.rank,
        launch=launch_attempt(),
        step_age=step_age,
        deadline=None if config.interrupt.deadline is None else parse_time(config.interrupt.deadline),
        mfu_per_token=mfu_per_token(config, world, flops_per_token),
    )
    port = metrics.prometheus_port + world.local_rank
    try:
        sink.serve(metrics.prometheus_address, port)
    except (OSError, ValueError) as error:
        why = f"no metrics are served at {metrics.prometheus_address!r}: {address_error(error)}"
        line = problem("metrics.prometheus_port", port, why)
        on_event("warning", {"source": "metrics", "detail": line})
        return None
    return sink


def start_cloudwatch(config: Config, world: World, on_event: OnEvent) -> CloudWatchSink | None:
    """Hand the run's progress to the agent of the settings, from rank 0; None where there is none."""
    named = config.metrics.cloudwatch
    if not named.agent or world.rank:
        return None
    sink = CloudWatchSink(
        run=run_name(config),
        cluster=named.cluster,
        log_group=named.log_group,
        agent=AgentConnection(named.agent),
        on_event=on_event,
    )
    sink.start()
    return sink


def run_name(config: Config) -> str:
    """Return the last part of the run's address: what metrics call it."""
    return config.run.uri.rstrip("/").rpartition("/")[2]


def mfu_per_token(config: Config, world: World, flops_per_token: Callable[[], float]) -> float | None:
    """Return the share of all ranks' peak that one token per second takes; None where the device's peak is not known."""
    if world.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device), config.precision.mode)
    return None if peak is None else flops_per_token() / (peak * world.world_size)


class FollowsRun(Protocol):
    """What counts from a generation on, and needs to know what was before it."""

    def begin_generation(self, generation: int) -> None: ...

    def set_past(self, generation: int, past: RunPast) -> None: ...


def follow_generation(
    sinks: Sequence[FollowsRun], store: ObjectStore, generation: int, step: int, on_event: OnEvent
) -> None:
    """Have rank 0's metrics count from `step`, from which `generation` began; its past is read in a thread meanwhile."""
    for sink in sinks:
        sink.begin_generation(generation)

    def read() -> None:
        try:
            past = read_past(store, generation, step)
            for sink in sinks:
                sink.set_past(generation, past)
        except (UserError, OSError, ValueError, TypeError, LookupError) as error:
            # The last three: a record without a field, or with one that is no number or time.
            why = error if isinstance(error, UserError | OSError) else f"a record of the run is damaged ({error!r})"
            on_event("warning", {"source": "metrics", "detail": f"no goodput is served: {why}"})

    if sinks:
        threading.Thread(target=read, name="metrics-past", daemon=True).start()
