"""Where a run's time went: every second is counted once."""

from __future__ import annotations

import json
from base64 import b64decode
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.report import GONE_S, account, lost_launchers, make, share_of_useful_steps, with_ends
from lustrain.problem import UserError
from trainer.metrics.reader import read_generations
from trainer.metrics.records import encode
from trainer.run import journal
from trainer.storage import ObjectStore, open_store


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
        "ends and rollbacks": pytest.approx(6.5),
        "between launches, after a lost node": 7.5,
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


def test_attempt_that_trained_on_beside_next_ends_at_its_start() -> None:
    attempts = [attempt(0.0, 500.0, None, None, None), attempt(30.0, 50.0, 0, None, None)]
    found = {part.name: part.seconds for part in account(attempts, {})}
    assert found["starts"] == sum(found.values()) == 50.0
    beside = [attempt(0.0, 200.0, None, 1, 1.0), attempt(100.0, 300.0, 0, 2, 1.0)]
    steps = {number: [record(step, number) for step in range(1, 201)] for number in (1, 2)}
    assert sum(part.seconds for part in account(beside, steps)) == pytest.approx(300.0)


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def write_launch(store: ObjectStore, rolls_back: bool = False, **more: Any) -> None:
    """A launch from 1000 s on: 200 s of start, then 17 steps of 100 s; the last ones again after a roll back to step 10."""
    body = {"version": 1, "attempt": 1, "nodes": ["a"], "by": "me", "started": 1000.0}
    store.put(journal.attempt_key(1), json.dumps(body | more).encode())
    steps = [[*range(1, 18)], [*range(11, 18)]][: 1 + rolls_back]
    now = 1200.0
    for generation, numbers in enumerate(steps, 1):
        event = {
            "event": "started",
            "step": numbers[0] - 1,
            "attempt": generation,
            "launch_attempt": 1,
            "time": at(now),
        }
        store.put(f"events/{generation:06d}-00000.jsonl", encode(event))
        records = []
        for step in numbers:
            now += 100
            records.append({**record(step, generation, 100.0), "time": at(now)})
        store.put(f"metrics/{generation:06d}-00000.jsonl", b"".join(map(encode, records)))


def with_losses(run: Path) -> None:
    for path in (run / "metrics").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"step":', b'"loss":2.0,"tokens_per_second":1.0,"step":'))


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run"))


def launches_at(store: ObjectStore, now: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    generations = read_generations(store)
    launches = with_ends(store, journal.read(store), generations, now)
    return launches, {part.name: part.seconds for part in account(launches, generations) if part.seconds}


def test_running_launch_has_its_steps_counted(store: ObjectStore) -> None:
    write_launch(store)
    launches, parts = launches_at(store, 2930.0)
    assert parts == pytest.approx({"starts": 200.0, "progress": 1700.0, "ends and rollbacks": 30.0})
    assert lost_launchers(launches) == []


def test_lost_launchers_time_ends_with_its_last_record(store: ObjectStore) -> None:
    write_launch(store)
    launches, parts = launches_at(store, 2900.0 + GONE_S + 1)
    assert parts == pytest.approx({"starts": 200.0, "progress": 1700.0})
    assert len(lost_launchers(launches)) == 1
    assert not lost_launchers(launches_at(store, 2900.0 + GONE_S - 1)[0])


def test_launch_closed_by_a_later_one_ends_with_its_record(store: ObjectStore) -> None:
    write_launch(store, ended=2900.0 + 86_400, code=None, generation=1, start_s=300.0)
    second = {"version": 1, "attempt": 2, "nodes": ["a"], "by": "me", "started": 2900.0 + 86_400}
    store.put(journal.attempt_key(2), json.dumps(second | {"ended": 2950.0 + 86_400, "code": 1}).encode())
    launches, parts = launches_at(store, 1e6)
    assert parts == pytest.approx(
        {"starts": 250.0, "progress": 1700.0, "between launches, after a lost launcher": 86_400.0}
    )
    assert lost_launchers(launches) == []


def test_page_counts_an_unended_launchs_steps(store: ObjectStore, tmp_path: Path) -> None:
    write_launch(store)
    with_losses(tmp_path / "run")
    lines, data = make(store, tmp_path / "report.md")
    assert data["seconds"]["progress"] == pytest.approx(1700.0)
    assert data["goodput"] == pytest.approx(1700 / 1900)
    assert any("its launcher is gone" in line for line in lines)


@pytest.mark.parametrize("ended", [{}, {"ended": 3600.0, "code": 0, "generation": 2, "start_s": 300.0}])
def test_all_generations_of_a_launch_are_counted(store: ObjectStore, ended: dict[str, Any]) -> None:
    write_launch(store, rolls_back=True, **ended)
    launches, parts = launches_at(store, 3600.0)
    assert parts == pytest.approx({"starts": 200.0, "progress": 1700.0, "repeated steps": 700.0})
    assert share_of_useful_steps(launches, read_generations(store), 1000.0) == pytest.approx(1700 / 2600)


class Seen(HTMLParser):
    """The words of a page, its pictures, and what makes a browser run or load something else."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.pictures: list[bytes] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            kind, _, data = (value or "").partition(",")
            if (tag, name, kind) == ("img", "src", "data:image/png;base64"):
                self.pictures.append(b64decode(data, validate=True))
            elif name in ("src", "href", "style") or name.startswith("on"):
                self.loads.append(f"{tag} {name}")

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def test_html_page_is_one_file_and_runs_nothing(tmp_path: Path) -> None:
    """The run's name, which also stands in its address, is markup, and no formula."""
    name, page = r"""<script>alert('1')<b>&amp;"x$\y$""", tmp_path / "report.html"
    store = open_store(str(tmp_path / name))
    write_launch(store, ended=2900.0, code=0, generation=1, start_s=300.0)
    with_losses(tmp_path / name)
    lines, data = make(store, page)
    seen = Seen(page.read_text())
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]
    assert (data["page"], seen.loads, seen.tags & {"script", "b"}) == (str(page), [], set())
    assert {name, "progress", "1,700.0", "89.5%"} <= set(seen.words)
    assert [picture[:8] for picture in seen.pictures] == [b"\x89PNG\r\n\x1a\n"]
    assert make(store, tmp_path / "report.md")[0] == [*lines, "", ANY]


def test_page_of_another_kind_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        make(store, tmp_path / "report.pdf")
    assert [line.path for line in error.value.problems] == ["--output"]
