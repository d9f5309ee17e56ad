"""What Prometheus scrapes of a run: values from its records, and none that was never measured."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lustrain.accelerators import PEAKS
from lustrain.problem import UserError
from tests.trainer.tiny_runs import events, records, train, write_config
from trainer import config as configuration
from trainer.environment import ATTEMPT
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.generation import OwnedRun, sinks_of
from trainer.loop import Progress
from trainer.metrics import RunLog
from trainer.metrics.goodput import seconds_of, useful_seconds
from trainer.metrics.prometheus import PrometheusSink, peak_flops
from trainer.metrics.reader import merge_steps
from trainer.metrics.records import EVENTS, STEPS, PartName, encode
from trainer.metrics.relay import Relay
from trainer.metrics.scrapes import EXPECTED_WITHIN_S, LAST_SCRAPE_S, Scrapes
from trainer.node.launcher import LINGER_S
from trainer.parallel import World
from trainer.run import journal
from trainer.run.exporter import follow_generation, mfu_per_token, start_exporter
from trainer.run.past import Past, past, read_past
from trainer.run.start import RunLease
from trainer.storage import ObjectStore, open_store

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
    sink = PrometheusSink(
        run="r",
        rank=0,
        launch=4,
        mfu_per_token=0.01,
        step_age=lambda: 7.0,
        deadline=5000.0,
        clock=lambda: now[0],
        monotonic=lambda: now[0],
    )
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
    assert found["deadline_timestamp_seconds", ""] == 5000.0
    assert (found["saves_failed_total", ""], found["steps_skipped_total", ""]) == (1, 1)
    assert (found["notices_total", ""], found["interruptions", ""], found["checkpoint_step", ""]) == (1, 3, 20)
    assert found["goodput_ratio", ""] == pytest.approx((40 + 2 + 2 + 6) / 100)
    now[0] = 1030.0
    assert (of(sink)["checkpoint_age_seconds", ""], of(sink)["step_age_seconds", ""]) == (30.0, 7.0)
    sink.event("checkpoint_committed", {"step": 22, "seconds": 5.0})
    assert (of(sink)["checkpoint_age_seconds", ""], of(sink)["checkpoint_step", ""]) == (5.0, 22)
    assert of(sink)["checkpoint_interval_seconds", ""] == 25.0
    sink.event("stopped", {"step": 22, "exit_code": EXIT_REQUEUE})
    assert ("done_step", "") not in of(sink)
    sink.event("stopped", {"step": 23, "exit_code": EXIT_DONE})
    assert of(sink)["done_step", ""] == 23


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
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "fp16", None),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362.05e12),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
    ],
)
def test_peak_is_that_of_the_device_and_format(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak


def test_docs_name_each_gpu_with_a_peak() -> None:
    (text,) = re.findall(r"\*\*MFU\*\*.*?EC2", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r"\b[ABHLTV]\d+[GS]?\b", text)) == {name.removeprefix("NVIDIA ") for name in PEAKS}


def test_launchers_of_other_nodes_wait_longer_than_a_last_scrape() -> None:
    assert LAST_SCRAPE_S < LINGER_S


def test_finished_run_waits_for_a_scraper_that_came_lately() -> None:
    now = [0.0]
    scrapes = Scrapes(lambda: now[0])
    assert not scrapes.wait_for_next(PATIENCE_S)
    scrapes.collect()
    scrapes.expect_next()
    assert not scrapes.wait_for_next(0.0)
    scrapes.collect()
    assert scrapes.wait_for_next(PATIENCE_S)
    scrapes.expect_next()
    now[0] = EXPECTED_WITHIN_S + 1
    assert not scrapes.wait_for_next(PATIENCE_S)


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


@pytest.mark.parametrize(("ended", "interruptions"), [(85, 3), (0, 2), (None, 3)])
def test_launch_without_a_step_is_an_interruption(ended: int | None, interruptions: int) -> None:
    """Of three starts, the first began to train, the second was killed before its first record."""
    seen = [{"event": "started", "attempt": 1}, {"event": "started", "attempt": 3}]
    seen += [] if ended is None else [{"event": "stopped", "exit_code": ended, "attempt": 3}]
    assert past([(1, [record(1)])], seen, None, generation=4, step=0).interruptions == interruptions


def put_part(store: ObjectStore, log: str, generation: int, *entries: Mapping[str, Any]) -> None:
    store.put(PartName(generation, 0).key(log), b"".join(encode(entry) for entry in entries), if_absent=True)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A run in its third generation; the parts of the first two were stored in the wrong order."""
    store = open_store(str(tmp_path / "stored"))
    put_part(store, STEPS, 2, record(2), record(3))
    put_part(store, STEPS, 1, record(1), record(2, step_seconds=7.0), record(3), record(4))
    put_part(store, STEPS, 3, record(4, step_seconds=11.0))
    put_part(store, EVENTS, 1, {"event": "started", "attempt": 1, "time": "1970-01-01T00:00:50.000Z"})
    return store


def test_past_is_read_up_to_the_generation(store: ObjectStore) -> None:
    assert read_past(store, generation=3, step=3) == Past(50.0, 6.0, 2)
    journal.begin(store, ["a"], "launcher")
    assert read_past(store, generation=3, step=3).began == journal.read(store)[0]["started"]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda store: put_part(store, EVENTS, 2, {"event": "resumed", "time": "never"}), id="time"),
        pytest.param(lambda store: put_part(store, EVENTS, 2, {"event": "resumed", "time": 5}), id="no time"),
        pytest.param(lambda store: put_part(store, STEPS, 0, {"step": 1}), id="no seconds"),
        pytest.param(lambda store: store.put("launch/000001.json", b"{}"), id="launch"),
    ],
)
def test_damaged_past_is_a_warning(store: ObjectStore, damage: Callable[[ObjectStore], object]) -> None:
    damage(store)
    sink = PrometheusSink(run="r", rank=0, launch=None)
    told: list[tuple[str, str]] = []
    follow_generation([sink], store, 3, 3, lambda kind, fields: told.append((kind, fields["detail"])))
    for thread in threading.enumerate():
        if thread.name == "metrics-past":
            thread.join()
    assert [(kind, detail.startswith("no goodput is served: ")) for kind, detail in told] == [("warning", True)]
    assert ("goodput_ratio", "") not in of(sink)


def scraped(
    port: Callable[[], int], until: Callable[[dict[tuple[str, str], float]], bool]
) -> dict[tuple[str, str], float]:
    """Scrape until a condition holds; `port` raises LookupError until there is one."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port()}/metrics", timeout=300) as reply:
                found = samples(reply.read().decode())
        except (OSError, LookupError):
            found = {}
        if until(found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"the condition did not come true: {found}")


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Which port the system chose in place of each that was asked for, so that none is taken."""
    chosen: dict[int, int] = {}
    serve = PrometheusSink.serve

    def serve_anywhere(sink: PrometheusSink, address: str, port: int) -> int:
        chosen[port] = serve(sink, address, 0)
        return chosen[port]

    monkeypatch.setattr(PrometheusSink, "serve", serve_anywhere)
    return chosen


@pytest.mark.slow
def test_run_is_scraped_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ports: dict[int, int]) -> None:
    monkeypatch.setenv(ATTEMPT, "2")
    config, hold = write_config(tmp_path, 120, 4), tmp_path / "hold"
    sets = ["metrics.prometheus_port=9400", "metrics.prometheus_address=127.0.0.1", f"task.hold={hold}"]
    sets += ["interrupt.deadline=2100-01-01T00:00:00Z"]
    seen: list[dict[tuple[str, str], float]] = []

    def is_complete(now: dict[tuple[str, str], float]) -> bool:
        return now.get(("step", "")) == 99 and {("goodput_ratio", ""), ("checkpoint_step", "")} <= now.keys()

    def scrape() -> None:
        try:
            seen.append(scraped(lambda: ports[9400], is_complete))
        finally:
            hold.touch()
        seen.append(scraped(lambda: ports[9400], lambda now: ("done_step", "") in now))

    thread = threading.Thread(target=scrape)
    thread.start()
    assert train(config, *sets) == 0
    thread.join()
    found, last = seen
    assert last["done_step", ""] == 120
    at_99 = records(tmp_path / "run")[98]
    assert (found["loss", ""], found["run_tokens", ""], found["launch", ""]) == (at_99["loss"], at_99["tokens"], 2)
    assert 0 < found["goodput_ratio", ""] < 1
    assert found["deadline_timestamp_seconds", ""] == datetime(2100, 1, 1, tzinfo=UTC).timestamp()
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


def test_each_rank_serves_its_steps_at_a_port_of_its_own(
    tmp_path: Path, store: ObjectStore, ports: dict[int, int]
) -> None:
    sets = ["metrics.prometheus_port=9400", "metrics.prometheus_address=127.0.0.1"]
    config = configuration.load(write_config(tmp_path, 5, 4), sets)
    with ExitStack() as ends:
        for rank, seconds in ((1, 3.0), (0, 2.0)):
            world = World(rank=rank, world_size=2, local_rank=rank, device=torch.device("cpu"), store=HashStore())
            relay = Relay("rank")
            sink = start_exporter(config, world, lambda kind, fields: pytest.fail(str(fields)), lambda: 1.0)
            log = None if rank else RunLog(store, 3, 30.0)
            owned = OwnedRun(store, RunLease(3, [], 5, {}), relay, log=log, exporter=sink)
            training: Any = SimpleNamespace(config=config, world=world, generation=3, progress=Progress(step=3))
            relay.attach(*sinks_of(training, owned))
            ends.callback(relay.close)
            relay.step(record(4, step_seconds=seconds))
        first = scraped(lambda: ports[9400], lambda now: ("goodput_ratio", "") in now)
        second = scraped(lambda: ports[9401], bool)
        # As after a roll back, rank 0 goes on in this process.
        training.generation = 4
        relay.attach(*sinks_of(training, owned))
        scraped(lambda: ports[9400], lambda now: now["interruptions", ""] == 3)
    assert [one["rank_step_seconds_sum", "compute"] for one in (first, second)] == [1.5, 2.5]
    assert (("step", "") in first, ("step", "") in second) == (True, False)
    # Generation 3's past is that of two others, which were lost.
    assert first["interruptions", ""] == 2


@pytest.mark.parametrize("address", ["127.0.0.1%node..internal", "127.0.0.1%\0", "127.0.0.1%no-such-link"])
def test_bad_address_is_a_warning(tmp_path: Path, address: str) -> None:
    """Refused by the codec of names, by Python, and by the resolver; a loopback address before % may be looked up."""
    config = configuration.load(write_config(tmp_path, 5, 4), ["metrics.prometheus_port=9400"])
    config = config.model_copy(update={"metrics": config.metrics.model_copy(update={"prometheus_address": address})})
    world = World(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), store=HashStore())
    told: list[tuple[str, Any]] = []
    assert start_exporter(config, world, lambda *event: told.append(event), lambda: 1.0) is None
    assert [(kind, fields["source"]) for kind, fields in told] == [("warning", "metrics")]


def test_mfu_is_of_the_peak_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration.load(write_config(tmp_path, 5, 4), ["precision.mode=bf16"])
    gpu = World(rank=0, world_size=8, local_rank=0, device=torch.device("cuda", 0), store=HashStore())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert mfu_per_token(config, gpu, lambda: 4e9) == pytest.approx(4e9 / (8 * 989.5e12))
    assert mfu_per_token(config, replace(gpu, device=torch.device("cpu")), lambda: pytest.fail("is not needed")) is None


@pytest.mark.parametrize("broken", [None, "raise RuntimeError('two\\nlines')", "import no_such_module"])
def test_package_that_does_not_import_refuses_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    if broken is not None:
        monkeypatch.delitem(sys.modules, "prometheus_client")
        (tmp_path / "prometheus_client.py").write_text(broken)
        monkeypatch.syspath_prepend(tmp_path)
    config = write_config(tmp_path, 5, 4)
    assert train(config, "metrics.prometheus_port=28400") == 2
    assert not (tmp_path / "run").exists()


def test_port_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        configuration.load(write_config(tmp_path, 5, 4), ["metrics.prometheus_port=65001"])
    assert [line.path for line in caught.value.problems] == ["metrics.prometheus_port"]
