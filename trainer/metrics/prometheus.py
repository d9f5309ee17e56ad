"""Metrics of a run for Prometheus: made from the records and events that every sink gets, served by a thread of their own.

Rank 0 serves what the run is and does; every rank serves the seconds of its own steps. docs/metrics.md has a row for each name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lustrain.accelerators import peak_of_device
from lustrain.problem import problem
from trainer.errors import EXIT_DONE
from trainer.metrics.goodput import LiveGoodput, RunPast
from trainer.metrics.scrapes import Scrapes

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Counter, Gauge

LABELS = ("run", "launch", "rank")
"""Of every series. Without a launcher `launch` is empty, which is the same as no label
(https://prometheus.io/docs/concepts/data_model/#metric-names-and-labels)."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""From a toy model's step to one of a large model with many micro-batches."""


def package_problems(port: int) -> list[str]:
    """Return a line where metrics are switched on and the package that serves them is missing or broken."""
    if not port:
        return []
    try:
        import prometheus_client  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything while it is imported
        why = f"the prometheus-client package cannot be imported ({type(error).__name__}: {error})"
        fix = "pip install --force-reinstall prometheus-client, or metrics.prometheus_port = 0"
        return [problem("metrics.prometheus_port", port, why, fix=fix)]
    return []


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the operations per second that a GPU can reach in bf16 or fp16; None where we have no figure, or it lacks the
    format."""
    peak = peak_of_device(device_name)
    if peak is None:
        return None
    return {"bf16": peak.bf16, "fp16": peak.fp16}.get(precision) or None


class PrometheusSink:
    """A Sink whose metrics `serve` puts on a port; a scrape never makes `step` wait for more than one copied number.

    `launch` is the launcher's number for this start; `mfu_per_token` the share of all devices' peak that one token per second
    takes, None where no peak is known; `step_age` gives the seconds of the step in progress, which are not served without it;
    `deadline` is when the run's capacity ends, in Unix seconds, None where that is not known; `clock` gives Unix seconds and
    `monotonic` those for ages.
    """

    def __init__(
        self,
        *,
        run: str,
        rank: int,
        launch: int | None,
        mfu_per_token: float | None = None,
        step_age: Callable[[], float] | None = None,
        deadline: float | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        from prometheus_client import CollectorRegistry, Summary, disable_created_metrics

        # A second series for each counter, with the time when it was made, is of no use here.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry: CollectorRegistry = CollectorRegistry()
        self._scrapes = Scrapes(monotonic)
        self.registry.register(self._scrapes)
        labels = (run, "" if launch is None else str(launch), str(rank))
        # No buckets: a thousand ranks would be thirty thousand series.
        text = "Seconds of this rank's steps, by part"
        parts = Summary("lustrain_rank_step_seconds", text, (*LABELS, "part"), registry=self.registry)
        self._data, self._compute = (parts.labels(*labels, part) for part in ("data", "compute"))
        self._run: RunMetrics | None = None
        if rank == 0:
            self._run = RunMetrics(self.registry, labels, launch, mfu_per_token, step_age, deadline, clock, monotonic)
        self._server: WSGIServer | None = None

    def serve(self, address: str, port: int) -> int:
        """Answer scrapes from now on, in threads of their own, and return the port, which the system chooses for 0.

        OSError where the address or the port cannot be had.
        """
        from prometheus_client import start_http_server

        self._server, _ = start_http_server(port, address, self.registry)
        return self._server.server_port

    def begin_generation(self, generation: int) -> None:
        """Count useful seconds from 0: the generation begins from a checkpoint, and `set_past` says what was before it."""
        if self._run is not None:
            self._run.begin_generation(generation)

    def set_past(self, generation: int, past: RunPast) -> None:
        """Take in what the run did before `generation`, from any thread; goodput is served from then on."""
        if self._run is not None:
            self._run.set_past(generation, past)

    def step(self, record: Mapping[str, Any]) -> None:
        self._data.observe(record["data_seconds"])
        self._compute.observe(record["step_seconds"] - record["data_seconds"])
        if self._run is not None:
            self._run.step(record)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.event(kind, fields)
            if kind == "stopped":
                self._scrapes.expect_next()

    def close(self) -> None:
        """End serving; rank 0 of a run that is done first waits for a scrape, without which its end looks like a loss."""
        if self._server is not None:
            if self._run is not None and self._run.is_done:
                self._scrapes.wait_for_next()
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class RunMetrics:
    """What rank 0 serves: where the run stands, how fast it is, and what was lost."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: tuple[str, ...],
        launch: int | None,
        mfu_per_token: float | None,
        step_age: Callable[[], float] | None,
        deadline: float | None,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        from prometheus_client import Histogram

        self._registry, self._labels = registry, labels
        self._mfu_per_token, self._monotonic = mfu_per_token, monotonic
        self._live = LiveGoodput(clock)
        self._saved_at = monotonic()
        self._noticed = False
        self.is_done = False
        """Whether the run has reached its end, and not only this launch."""
        of_record = {
            "step": ("step", "Newest step of the run"),
            "loss": ("loss", "Mean loss of the newest step"),
            "lr": ("learning_rate", "Learning rate of the newest step"),
            "grad_norm": ("gradient_norm", "Global gradient norm of the newest step, before clipping"),
            "tokens": ("run_tokens", "Tokens trained on since the run began; repeated steps count once"),
            "tokens_per_second": ("tokens_per_second", "Tokens per second of the newest step, over all ranks"),
            "world_size": ("world_size", "Ranks"),
            "attempt": ("generation", "Generation of the run's lease"),
        }
        self._parents = {field: self._gauge(name, text) for field, (name, text) in of_record.items()}
        self._of_record: dict[str, Gauge] = {}
        """Filled by the first step: until then a scrape shall not find a loss of 0."""
        self._tokens = self._counter(
            "tokens", "Tokens that this process and its peers trained on, also in repeated steps"
        )
        self._skipped = self._counter("steps_skipped", "Steps whose update was not applied")
        self._saves_failed = self._counter("saves_failed", "Saves that were not committed")
        self._notices = self._counter("notices", "Notices that stop this launch; those of several nodes count once")
        self._interruptions = self._gauge("interruptions", "Notices and losses since the run began")
        self._checkpoint_step = self._gauge("checkpoint_step", "Step of the newest committed checkpoint")
        age = self._gauge("checkpoint_age_seconds", "Seconds of training that a loss would cost now")
        age.labels(*labels).set_function(lambda: self._monotonic() - self._saved_at)
        self._interval = self._gauge(
            "checkpoint_interval_seconds", "Seconds between the newest two states that were committed"
        )
        if step_age is not None:
            age = self._gauge("step_age_seconds", "Seconds of the step in progress, 0 between steps")
            age.labels(*labels).set_function(step_age)
        if deadline is not None:
            self._gauge("deadline_timestamp_seconds", "End of the run's capacity").labels(*labels).set(deadline)
        self._done_step = self._gauge("done_step", "Step at which the run was done")
        if launch is not None:
            self._gauge("launch", "Number of this launch").labels(*labels).set(launch)
        self._mfu = self._gauge("mfu_ratio", "Model FLOPS utilization of the newest step, from 0 to 1")
        self._goodput = self._gauge("goodput_ratio", "Share of the time since the run began in steps that count")
        parts = Histogram(
            "lustrain_step_seconds",
            "Seconds of a step, by part",
            (*LABELS, "part"),
            registry=registry,
            buckets=BUCKETS_S,
        )
        self._data, self._compute, self._blocked = (
            parts.labels(*labels, part) for part in ("data", "compute", "blocked")
        )

    def begin_generation(self, generation: int) -> None:
        self._live.begin_generation(generation)

    def set_past(self, generation: int, past: RunPast) -> None:
        if not self._live.set_past(generation, past):
            return
        # Only from now on there is a value to serve.
        self._interruptions.labels(*self._labels).set_function(self._interruptions_now)
        self._goodput.labels(*self._labels).set_function(self._goodput_now)

    def step(self, record: Mapping[str, Any]) -> None:
        self._live.step(record)
        if not self._of_record:
            self._of_record = {field: parent.labels(*self._labels) for field, parent in self._parents.items()}
        for field, gauge in self._of_record.items():
            gauge.set(record[field])
        self._tokens.inc(round(record["tokens_per_second"] * record["step_seconds"]))
        self._data.observe(record["data_seconds"])
        self._compute.observe(record["step_seconds"] - record["data_seconds"])
        if record["blocked_seconds"]:
            self._blocked.observe(record["blocked_seconds"])
        if record.get("skipped"):
            self._skipped.inc()
        if self._mfu_per_token is not None:
            self._mfu.labels(*self._labels).set(record["tokens_per_second"] * self._mfu_per_token)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "checkpoint_committed":
            self._checkpoint_step.labels(*self._labels).set(fields["step"])
            before, self._saved_at = self._saved_at, self._monotonic() - fields["seconds"]
            self._interval.labels(*self._labels).set(self._saved_at - before)
        elif kind == "resumed":
            self._checkpoint_step.labels(*self._labels).set(fields["step"])
            self._saved_at = self._monotonic()
        elif kind == "checkpoint_failed":
            self._saves_failed.inc()
        elif kind == "notice" and not self._noticed:
            # Every node that gets one has a notice of its own; together they interrupt the run once.
            self._noticed = True
            self._notices.inc()
        elif kind == "stopped" and fields["exit_code"] == EXIT_DONE:
            self._done_step.labels(*self._labels).set(fields["step"])
            self.is_done = True

    def _interruptions_now(self) -> float:
        before = self._live.interruptions
        return float("nan") if before is None else before + self._noticed

    def _goodput_now(self) -> float:
        """Return NaN while the past of a new generation is being read."""
        share = self._live.value()
        return float("nan") if share is None else share

    def _gauge(self, name: str, text: str) -> Gauge:
        from prometheus_client import Gauge

        return Gauge(f"lustrain_{name}", text, LABELS, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        from prometheus_client import Counter

        return Counter(f"lustrain_{name}", text, LABELS, registry=self._registry).labels(*self._labels)
