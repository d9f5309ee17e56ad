"""Where a run's time went: every second is counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.report import account, make, share_of_useful_steps
from trainer.metrics.records import encode
from trainer.storage import open_store


def record(step: int, attempt: int, seconds: float = 1.0, blocked: float = 0.0) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "step_seconds": seconds, "blocked_seconds": blocked}


def attempt(
    started: float, ended: float, code: int | None, generation: int | None, start_s: float | None
) -> dict[str, Any]:
    return {"started": started, "ended": ended, "code": code, "generation": generation, "start_s": start_s}


def test_each_second_has_its_cause() -> None:
    """Ten seconds of start, six steps of which two were done over, a save, a lost node, and a second attempt."""
    first = [record(step, 1, blocked=0.5 if step == 4 else 0.0) for step in range(1, 7)]
    second = [record(step, 2) for step in range(5, 9)]
    attempts = [attempt(0.0, 22.5, 75, 1, 11.0), attempt(30.0, 44.5, 0, 2, 11.0)]
    found = {part.name: part.seconds for part in account(attempts, {1: first, 2: second})}
    assert found == {
        "progress": 8.0,
        "repeated steps": 2.0,
        "saves": 0.5,
        "starts": 20.0,
        "ends of attempts": pytest.approx(6.5),
        "between attempts, after a lost node": 7.5,
    }


def test_goodput_counts_a_repeated_step_once() -> None:
    first, second = [record(step, 1, blocked=3.0) for step in range(1, 7)], [record(step, 2) for step in range(5, 9)]
    second[-1]["eval_seconds"] = 2.0
    attempts = [attempt(100.0, 122.0, 75, 1, 11.0), attempt(130.0, 140.0, 0, 2, 5.0)]
    assert share_of_useful_steps(attempts, {1: first, 2: second}, 100.0) == pytest.approx((8 + 2) / 40)
    assert share_of_useful_steps(attempts, {}, 100.0) is None


def test_run_by_hand_has_a_page_without_a_table(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    steps = [{**record(step, 1), "time": f"1970-01-01T00:00:0{step}Z", "loss": 2.0} for step in (1, 2)]
    store.put("metrics/000001-00000.jsonl", b"".join(encode({**more, "tokens_per_second": 1.0}) for more in steps))
    store.put("events/000001-00000.jsonl", encode({"event": "started", "time": "1969-12-31T23:59:52Z"}))
    lines, data = make(store, tmp_path / "report.md")
    assert (data["goodput"], set(data["seconds"].values())) == (pytest.approx(0.2), {0.0})
    assert not [line for line in lines if line.startswith("|")]


def test_an_attempt_that_made_no_step_was_all_start() -> None:
    found = {part.name: part.seconds for part in account([attempt(0.0, 9.0, 1, None, None)], {})}
    assert (found["starts"], sum(found.values())) == (9.0, 9.0)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.integers(0, 5), st.floats(0, 50), st.sampled_from([0, 1, 75, 85, None])),
        min_size=1,
    )
)
def test_the_parts_add_up_to_all_of_it(story: list[tuple[float, int, float, int | None]]) -> None:
    attempts, generations, now = [], {}, 0.0
    for number, (start, steps, gap, code) in enumerate(story, 1):
        generations[number] = [record(step, number) for step in range(1, steps + 1)]
        ended = now + start + steps + 1.0
        attempts.append(attempt(now, ended, code, number, start + 1.0 if steps else None))
        now = ended + gap
    parts = account(attempts, generations)
    assert sum(part.seconds for part in parts) == pytest.approx(attempts[-1]["ended"], abs=1e-6)
    assert all(part.seconds >= -1e-9 for part in parts)


def test_an_attempt_that_trained_on_beside_the_next_one_ends_with_its_beginning() -> None:
    attempts = [attempt(0.0, 500.0, None, None, None), attempt(30.0, 50.0, 0, None, None)]
    found = {part.name: part.seconds for part in account(attempts, {})}
    assert found["starts"] == sum(found.values()) == 50.0
    beside = [attempt(0.0, 200.0, None, 1, 1.0), attempt(100.0, 300.0, 0, 2, 1.0)]
    steps = {number: [record(step, number) for step in range(1, 201)] for number in (1, 2)}
    assert sum(part.seconds for part in account(beside, steps)) == pytest.approx(300.0)
