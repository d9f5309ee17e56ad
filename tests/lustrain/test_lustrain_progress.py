"""What a person sees while long work runs."""

from __future__ import annotations

import io
import threading

import pytest

from lustrain.progress import BYTES, Progress, amount_text, duration_text, status_text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (0, "items", "0 items"),
        (7, "steps", "7 steps"),
        (999, "steps", "999 steps"),
        (1_000, "steps", "1k steps"),
        (999_600, BYTES, "1 MB"),
        (1_234_567, BYTES, "1.23 MB"),
        (5e17, BYTES, "500 PB"),
        (0.25, "steps", "0.25 steps"),
    ],
)
def test_amounts_are_short_and_have_their_unit(amount: float, unit: str, text: str) -> None:
    assert amount_text(amount, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.6, "1m 00s"), (655, "10m 55s"), (3599.7, "1h 00m"), (14_328, "3h 58m"), (2_847_600, "32d 23h")],
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_rate_and_time_left_count_only_what_this_process_did() -> None:
    assert status_text(60, 100, "items", 10.0, initial=40) == "60 of 100 items (60 %), 2 items/s, 20s left"


def test_unknown_total_and_an_empty_total_do_not_break_the_line() -> None:
    assert status_text(5, None, "items", 2.0) == "5 items, 2.5 items/s"
    assert status_text(0, 0, "items", 0.0) == "0 of 0 items (100 %)"


def test_without_a_terminal_lines_are_sparse_and_last_is_whole() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("copy", 100, BYTES, stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.now += 0.11
            progress.advance(1, note="3 files")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3, lines
    assert lines[0].startswith("copy: 46 B of 100 B (46 %)")
    assert "left" in lines[0]
    assert lines[-1].startswith("copy: 100 B of 100 B (100 %), 9.09 B/s, 3 files, in 11s")


def test_work_that_fails_says_where_it_stopped() -> None:
    stream = io.StringIO()
    progress = Progress("copy", 10, stream=stream)

    def fail() -> None:
        with progress:
            progress.advance(4)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert "4 of 10 items (40 %)" in stream.getvalue()
    assert "stopped after" in stream.getvalue()


def test_on_a_terminal_there_is_a_bar_and_one_final_line() -> None:
    stream = io.StringIO()
    with Progress("train", 10, "steps", stream=stream, terminal=True) as progress:
        progress.advance(10)
    assert "━" in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].endswith("in 0s")


def test_no_advance_is_lost_when_threads_report_together() -> None:
    with Progress("work", 4000, stream=io.StringIO()) as progress:
        threads = [
            threading.Thread(target=lambda: [progress.advance() for _ in range(1000)] and None) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert progress.done == 4000


def test_brief_work_shows_nothing() -> None:
    stream = io.StringIO()
    with Progress("node tune", 1, "nodes", waiting=["a"], brief=True, stream=stream) as progress:
        progress.tick()
        progress.advance(name="a")
    assert stream.getvalue() == ""


def test_the_last_few_are_named_less_often_while_nothing_comes() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("node tune", 2, "nodes", waiting=["a", "[b]"], stream=stream, clock=clock) as progress:
        progress.advance(name="a", note="1 not well")
        for _ in range(59):
            clock.now += 1
            progress.tick()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "node tune: 1 of 2 nodes (50 %), 0.2 nodes/s, 5s left, 1 not well, waiting for [b]"
    assert len(lines) == 4, lines


def test_names_are_no_markup_on_a_terminal() -> None:
    stream = io.StringIO()
    with Progress("node tune", 2, "nodes", waiting=["[b]"], stream=stream, terminal=True, interval_s=0) as progress:
        progress.tick()
    assert "waiting for [b]" in stream.getvalue()


def test_progress_leaves_standard_output_to_results(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("x", 1, terminal=False) as progress:
        progress.advance()
        progress.say("aside")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "x: aside" in printed.err
