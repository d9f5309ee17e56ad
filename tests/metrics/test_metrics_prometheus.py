"""What Prometheus scrapes of a run: values from its records, and none that was never measured."""

from __future__ import annotations

import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lustrain.problem import UserError
from tests.trainer.tiny_runs import events, records, train, write_config
from trainer import config as configuration
from trainer.environment import ATTEMPT
from trainer.metrics.goodput import seconds_of, useful_seconds
from trainer.metrics.prometheus import PrometheusSink, peak_flops
from trainer.metrics.reader import merge_steps
from trainer.parallel import World
from trainer.run.exporter import start_exporter
from trainer.run.past import Past, past, read_past
from trainer.storage import open_store

PATIENCE_S = 300.0
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def record(step: int, **more: Any) -> dict[str, Any]:
    fields = {"step": step, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "tokens": 100 * step, "tokens_per_second": 50.0}
    seconds = {"step_seconds": 2.0, "data_seconds": 0.5, "blocked_seconds": 0.0}
    return fields | seconds | {"world_size": 2, "attempt": 3} | more


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by name and part; each series has the run's labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert {"run", "launch", "rank"} <= sample.labels.keys() <= {"run", "launch", "rank", "part", "le"}
            if "le" not in sample.labels:
                found[sample.name.removeprefix("lustrain_"), sample.labels.get("part", "")] = sample.value
    return found


def of(sink: PrometheusSink) -> dict[tuple[str, str], float]:
    return samples(generate_latest(sink.registry).decode())


def test_rank_0_serves_what_the_records_say() -> None:
    now = [1000.0]
    sink = PrometheusSink(run="r", rank=0, launch=4, mfu_per_token=0.01, clock=lambda: now[0], monotonic=lambda: now[0])
    sink.begin_generation(3)
    assert ("loss", "") not in of(sink)
    sink.set_past(3, Past(began=900.0, useful_s=40.0, interruptions=2))
    sink.event("resumed", {"step": 20})
    sink.step(record(21))
    sink.step(record(22, blocked_seconds=0.25, skipped=True, eval_seconds=6.0))
    sink.event("checkpoint_failed", {"step": 21})
    for host in ("a", "b"):
        sink.event("notice", {"host": host})
    found = of(sink)
    assert {name: found[name, ""] for name in ("step", "loss", "run_tokens", "world_size", "generation", "launch")} == {
        "step": 22,
        "loss": 2.5,
        "run_tokens": 2200,
        "world_size": 2,
        "generation": 3,
        "launch": 4,
    }
    assert (found["tokens_total", ""], found["mfu_ratio", ""]) == (200, 0.5)
    assert (found["step_seconds_sum", "data"], found["step_seconds_sum", "compute"]) == (1.0, 3.0)
    assert (found["step_seconds_count", "blocked"], found["step_seconds_sum", "blocked"]) == (1, 0.25)
    assert found["rank_step_seconds_sum", "compute"] == 3.0
    assert (found["saves_failed_total", ""], found["steps_skipped_total", ""]) == (1, 1)
    assert (found["notices_total", ""], found["interruptions", ""], found["checkpoint_step", ""]) == (1, 3, 20)
    assert found["goodput_ratio", ""] == pytest.approx((40 + 2 + 2 + 6) / 100)
    now[0] = 1030.0
    assert (of(sink)["checkpoint_age_seconds", ""], of(sink)["step_age_seconds", ""]) == (30.0, 30.0)
    sink.event("checkpoint_committed", {"step": 22, "seconds": 5.0})
    assert (of(sink)["checkpoint_age_seconds", ""], of(sink)["checkpoint_step", ""]) == (5.0, 22)
    assert of(sink)["checkpoint_interval_seconds", ""] == 25.0
    sink.step(record(23))
    assert of(sink)["step_age_seconds", ""] == 0.0


def test_rolled_back_steps_leave_the_goodput() -> None:
    sink = PrometheusSink(run="r", rank=0, launch=None, clock=lambda: 100.0)
    sink.begin_generation(1)
    sink.set_past(1, Past(began=0.0, useful_s=0.0, interruptions=0))
    sink.step(record(1))
    sink.begin_generation(2)
    sink.set_past(1, Past(began=0.0, useful_s=90.0, interruptions=0))
    assert (
        of(sink)["goodput_ratio", ""] != of(sink)["goodput_ratio", ""]
    )  # NaN: the past of generation 2 is not read yet
    sink.set_past(2, Past(began=0.0, useful_s=10.0, interruptions=0))
    assert of(sink)["goodput_ratio", ""] == pytest.approx(0.1)


def test_other_ranks_serve_their_own_steps_alone() -> None:
    sink = PrometheusSink(run="r", rank=7, launch=None)
    sink.step(record(1))
    assert {name for name, _ in of(sink)} == {"rank_step_seconds_sum", "rank_step_seconds_count"}


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("Tesla T4", "fp16", None),
    ],
)
def test_peak_is_known_for_measured_kinds_only(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak


def test_past_counts_repeated_steps_and_ends_once() -> None:
    def steps(generation: int, first: int, last: int) -> list[dict[str, Any]]:
        return [record(step, attempt=generation) for step in range(first, last + 1)]

    seen = [{"event": "started", "time": "1970-01-01T00:00:50Z", "attempt": 1}]
    seen += [{"event": "stopped", "exit_code": 85, "attempt": 2}]
    done = [(1, steps(1, 1, 10)), (2, steps(2, 6, 12))]
    assert past(done, seen, None, generation=3, step=12) == Past(50.0, 24.0, 2)
    assert past(done, seen, 30.0, generation=3, step=8) == Past(30.0, 16.0, 2)
    assert past([], [], None, generation=1, step=0) == Past(None, 0.0, 0)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), max_size=5))
def test_kept_seconds_are_those_of_the_merged_history(spans: list[tuple[int, int]]) -> None:
    """Each generation has a first step and a number of steps, each of which takes other seconds."""
    done = {
        number: [record(first + at, step_seconds=10.0**number + at) for at in range(count)]
        for number, (first, count) in enumerate(spans, 1)
    }
    assert useful_seconds(done.values()) == pytest.approx(sum(seconds_of(one) for one in merge_steps(done)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scraped(port: int, until: Callable[[dict[tuple[str, str], float]], bool]) -> dict[tuple[str, str], float]:
    """Scrape until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
                found = samples(reply.read().decode())
        except OSError:
            found = {}
        if until(found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"the condition did not come true: {found}")


@pytest.mark.slow
def test_run_is_scraped_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, "2")
    config, port, hold = write_config(tmp_path, 120, 4), free_port(), tmp_path / "hold"
    sets = [f"metrics.prometheus_port={port}", "metrics.prometheus_address=127.0.0.1", f"task.hold={hold}"]
    seen: list[dict[tuple[str, str], float]] = []

    def is_complete(now: dict[tuple[str, str], float]) -> bool:
        return now.get(("step", "")) == 99 and {("goodput_ratio", ""), ("checkpoint_step", "")} <= now.keys()

    def scrape() -> None:
        try:
            seen.append(scraped(port, is_complete))
        finally:
            hold.touch()

    thread = threading.Thread(target=scrape)
    thread.start()
    assert train(config, *sets) == 0
    thread.join()
    (found,) = seen
    at_99 = records(tmp_path / "run")[98]
    assert (found["loss", ""], found["run_tokens", ""], found["launch", ""]) == (at_99["loss"], at_99["tokens"], 2)
    assert 0 < found["goodput_ratio", ""] < 1
    assert found["checkpoint_step", ""] in {event["step"] for event in events(tmp_path / "run", "checkpoint_committed")}
    after = read_past(open_store(str(tmp_path / "run")), generation=2, step=100)
    assert after.useful_s == pytest.approx(sum(one["step_seconds"] for one in records(tmp_path / "run")[:100]))
    assert after.interruptions == 0
    documented = DOCS.read_text(encoding="utf-8")
    names = {name.removesuffix("_sum").removesuffix("_count") for name, _ in found}
    assert [name for name in names if f"`lustrain_{name}`" not in documented] == []


@pytest.mark.slow
def test_taken_port_is_one_warning_and_the_run_ends_well(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sets = [f"metrics.prometheus_port={port}", "metrics.prometheus_address=127.0.0.1"]
        assert train(write_config(tmp_path, 5, 4), *sets) == 0
    (warning,) = [event for event in events(tmp_path / "run", "warning") if event.get("source") == "metrics"]
    assert f"metrics.prometheus_port = {port}" in warning["detail"]


def test_each_local_rank_has_a_port_of_its_own(tmp_path: Path) -> None:
    port = free_port()
    sets = [f"metrics.prometheus_port={port - 1}", "metrics.prometheus_address=127.0.0.1"]
    config = configuration.load(write_config(tmp_path, 5, 4), sets)
    world = World(rank=9, world_size=16, local_rank=1, device=torch.device("cpu"), store=HashStore())
    sink = start_exporter(config, world, lambda kind, fields: pytest.fail(str(fields)), lambda: 1.0)
    assert sink is not None
    try:
        assert ("rank_step_seconds_count", "data") in scraped(port, bool)
    finally:
        sink.close()


def test_missing_package_refuses_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    config = write_config(tmp_path, 5, 4)
    assert train(config, "metrics.prometheus_port=9400") == 2
    assert not (tmp_path / "run").exists()


def test_port_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        configuration.load(write_config(tmp_path, 5, 4), ["metrics.prometheus_port=65001"])
    assert [line.path for line in caught.value.problems] == ["metrics.prometheus_port"]
