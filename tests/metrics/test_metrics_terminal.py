"""What people see: a bar on a terminal, few lines in a log."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from trainer.metrics import TensorBoardSink, TerminalSink
from trainer.metrics.relay import Relay
from trainer.metrics.terminal import event_line


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.0 - step / 100,
        "lr": 3e-4,
        "grad_norm": 1.0,
        "tokens": 1000 * step,
        "tokens_per_second": 12_345.6,
        "step_seconds": 0.5,
        "data_seconds": 0.01,
        "blocked_seconds": 0.25 if step == 2 else 0.0,
        "world_size": 2,
        "attempt": 1,
        **more,
    }


def test_without_a_terminal_lines_come_every_so_often() -> None:
    now = 0.0
    stream = io.StringIO()
    sink = TerminalSink(100, stream=stream, every_s=10.0, monotonic=lambda: now)
    for step in range(1, 101):
        now = step * 0.5
        sink.step(record(step))
    sink.close()
    lines = stream.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 21, 41, 61, 81, 100]
    assert "\x1b" not in stream.getvalue()


def test_line_has_step_loss_rate_speed_standstill_and_time_to_go() -> None:
    stream = io.StringIO()
    sink = TerminalSink(1000, stream=stream, every_s=0.0)
    sink.step(record(1))
    sink.step(record(2, eval_loss=4.5))
    assert stream.getvalue().splitlines() == [
        "step    1/1000  loss 4.9900  lr 3.00e-04  12.3k tok/s  blocked 0.00 s  ETA 8m 20s",
        "step    2/1000  loss 4.9800  eval 4.5000  lr 3.00e-04  12.3k tok/s  blocked 0.25 s  ETA 8m 19s",
    ]


def test_the_last_record_is_shown_when_the_run_stops_early() -> None:
    stream = io.StringIO()
    sink = TerminalSink(100, stream=stream, every_s=1e9)
    for step in range(1, 8):
        sink.step(record(step))
    sink.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/100", "7/100"]


def test_events_are_lines_of_their_own() -> None:
    stream = io.StringIO()
    sink = TerminalSink(100, stream=stream)
    sink.event("checkpoint_skipped", {"step": 7, "seconds": 0.123456, "detail": "a flipped\nbit"})
    assert stream.getvalue() == "checkpoint skipped: step 7, seconds 0.1235, a flipped bit\n"
    assert event_line("resumed", {}) == "resumed"


def test_save_that_fails_again_for_the_same_reason_is_shown_once() -> None:
    stream = io.StringIO()
    sink = TerminalSink(100, stream=stream)
    for step, number, why in [(6, 0, "full"), (6, 1, "full"), (6, 2, "refused"), (7, 3, "refused"), (7, 4, "refused")]:
        attempt = f"000001-{step}-{number}"
        detail = f"attempts/{attempt}/data: {why}, {90 - number} kB free"
        sink.event("checkpoint_failed", {"step": step, "attempt": attempt, "seconds": 0.1, "detail": detail})
    shown = [line.split(", ")[1] for line in stream.getvalue().splitlines()]
    assert shown == ["attempt 000001-6-0", "attempt 000001-6-2", "attempt 000001-7-3"]


def test_a_changed_config_shows_each_setting_before_and_after() -> None:
    changes = {"train.steps": [20, 30], "optimizer.lr": [0.0003, 0.00012], "train.stop_file": [None, "/x"]}
    assert event_line("config_changed", {"changes": changes}) == (
        "config changed: train.steps 20 → 30, optimizer.lr 0.0003 → 0.00012, train.stop_file unset → /x"
    )


def test_losses_that_are_not_finite_are_shown() -> None:
    stream = io.StringIO()
    TerminalSink(100, stream=stream).step(record(1, loss=float("nan"), lr=0.0))
    assert "loss nan" in stream.getvalue()


ON_A_TERMINAL = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_metrics_terminal import record
from trainer.metrics import TerminalSink

sink = TerminalSink(100)
for step in range(1, 101):
    sink.step(record(step))
    if step == 50:
        sink.event("notice", {"source": "spot", "detail": "spot [2 min]"})
        sys.stdin.readline()
sink.close()
"""


@pytest.mark.slow
def test_on_a_terminal_there_is_one_bar_with_the_events_above_it() -> None:
    leader, follower = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    environ.pop("NO_COLOR", None)
    child = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=follower,
        env=environ,
    )
    os.close(follower)
    assert child.stdin is not None
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:  # how Linux says that the other end of a terminal is closed
            break
        if not chunk:
            break
        shown += chunk
        if b"step 50/100" in shown and not child.stdin.closed:
            child.stdin.close()
    os.close(leader)
    assert child.wait(300) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "notice: spot [2 min]" in plain
    assert "step 100/100" in plain
    assert "loss 4.0000" in plain
    assert plain.count("\n") < 10


class Kept:
    """A Sink that keeps the kinds of its events, and whether it was closed."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.closed = False

    def step(self, record: Mapping[str, Any]) -> None:
        """Steps are of no interest here."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.kinds.append(kind)

    def close(self) -> None:
        self.closed = True


def test_relay_on_hold_keeps_events_for_the_next_sinks() -> None:
    first, second, relay = Kept(), Kept(), Relay("rank 0")
    relay.attach(first)
    relay.hold()
    relay.event("resumed", {})
    relay.attach(second)
    relay.event("stopped", {})
    relay.close()
    assert (first.kinds, second.kinds) == ([], ["resumed", "stopped"])
    assert (first.closed, second.closed) == (False, True)


def test_relay_that_is_closed_on_hold_closes_its_former_sinks(capsys: pytest.CaptureFixture[str]) -> None:
    first, relay = Kept(), Relay("rank 0")
    relay.attach(first)
    relay.hold()
    relay.event("warning", {"detail": "lost"})
    relay.close()
    assert first.closed
    assert capsys.readouterr().err == "rank 0: warning: lost\n"


@pytest.mark.slow
def test_tensorboard_gets_the_scalars(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = Relay("rank 0")
    sinks.attach(TensorBoardSink(str(tmp_path), first_step=1))
    for step in range(1, 6):
        sinks.step(record(step))
    sinks.event("saved", {"step": 5})
    sinks.close()
    resumed = TensorBoardSink(str(tmp_path), first_step=4)
    resumed.step(record(4, loss=9.0))
    resumed.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    shown = [(event.step, round(event.value, 4)) for event in events.Scalars("train/loss")]
    assert shown == [(1, 4.99), (2, 4.98), (3, 4.97), (4, 9.0)]
    assert "events/text_summary" in events.Tags()["tensors"]


def test_a_tensorboard_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        TensorBoardSink(str(tmp_path / "file" / "logs"), first_step=1)
    (line,) = caught.value.problems
    assert line.startswith("metrics.tensorboard = ")
