"""How far a build is: sparse plain lines off a terminal, the running steps on one, and silence is told and bounded."""

from __future__ import annotations

import io
import os
import pty
import select
import threading
from collections.abc import Iterator

import pytest

from images.build.output import read_lines
from images.build.progress import Live
from images.model import Step
from lustrain.problem import UserError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_off_a_terminal_only_slow_and_failed_steps_have_a_line() -> None:
    stream, clock = io.StringIO(), Clock()
    with Live("build cpu", stream=stream, clock=clock) as live:
        for name, seconds, error in (
            ("[a 1/3] FROM b", 0.1, None),
            ("[a 2/3] RUN c", 2.5, None),
            ("[a 3/3] RUN d", 0.2, "no"),
        ):
            live.started(name)
            live.ended(Step(name, seconds, False, error))
    assert stream.getvalue().splitlines() == [
        "build cpu: 2.5 s: [a 2/3] RUN c",
        "build cpu: failed after 0.2 s: [a 3/3] RUN d",
    ]


def test_in_between_a_line_comes_now_and_then_with_the_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    live = Live("build cpu", stream=stream, clock=clock, interval_s=10)
    live.started("[torch 1/1] RUN install")
    live.ended(Step("[a 1/1] COPY x", 0.0, True))
    live.moved("sha256:1", 0, 200_000_000)
    for second in range(1, 61):
        clock.now = float(second)
        live.moved("sha256:1", 1_000_000 * second, 200_000_000)
        live.log("[torch 1/1] RUN install", f"got\r\n\x1b[2Jwheel {second}\n")
    lines = stream.getvalue().splitlines()
    # After 10, 20 and 40 s: less and less often while no step ends.
    assert [line.partition(" for ")[2].partition(",")[0] for line in lines] == ["10 s", "30 s"]
    assert lines[0] == (
        "build cpu: 1 step done (1 cached), [torch 1/1] RUN install for 10 s, \\x1b[2Jwheel 9, 10 MB of 200 MB, 1 MB/s"
    )


@pytest.mark.parametrize(
    ("seconds", "expected"), [(5.0, ""), (12.0, "x: 1 step done, in 12s\n")], ids=["short", "long"]
)
def test_short_build_is_silent_a_long_one_ends_with_its_steps(seconds: float, expected: str) -> None:
    stream, clock = io.StringIO(), Clock()
    with Live("x", stream=stream, clock=clock) as live:
        for cached in (False, True):
            live.ended(Step("[a 1/1] RUN b", 1.0, cached))
        clock.now = seconds
    assert stream.getvalue() == expected


def test_on_a_terminal_running_step_and_its_last_line_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    read, write = pty.openpty()
    with os.fdopen(write, "w") as terminal, Live("build cpu", stream=terminal) as live:
        live.started("[torch 1/1] RUN install")
        live.log("[torch 1/1] RUN install", "wheel 7\n")
        live.ended(Step("[a 1/1] RUN [bold]x", 3.0, False))
        wanted = ("[torch 1/1] RUN install", "wheel 7", "build cpu: 3.0 s: [a 1/1] RUN [bold]x")
        shown = ""
        while not all(text in shown for text in wanted):
            assert select.select([read], [], [], 300)[0], shown
            shown += os.read(read, 100_000).decode(errors="replace")
    os.close(read)


@pytest.mark.slow
def test_lines_are_passed_on_and_silence_is_reported_rarely() -> None:
    never = threading.Event()
    told: list[float] = []

    def source() -> Iterator[str]:
        yield from ("1", "2")
        never.wait()

    got: list[str] = []

    def listen() -> None:
        for line in read_lines(source(), told.append, first_pause_s=0.05, limit_s=0.5):
            got.append(line)
            # A line may be late as well.
            told.clear()

    with pytest.raises(UserError, match="printed nothing"):
        listen()
    never.set()
    assert got == ["1", "2"]
    assert told == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert list(read_lines([], told.append)) == []
