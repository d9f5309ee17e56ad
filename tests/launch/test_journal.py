"""The journal of a run's starts: one record an attempt, made by one launcher, and what the launchers of its nodes say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from launch import status
from launch.backends.local import RunJournal
from lustrain.problem import UserError
from tests.checkpoint.stores import Asking
from tests.checkpoint.written import write_steps
from trainer.errors import LostRunError
from trainer.metrics import RunLog
from trainer.run import journal
from trainer.storage import ObjectStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path))


def ends(store: ObjectStore, number: int, *reports: dict[str, Any]) -> None:
    for node, report in enumerate(reports):
        if report:
            given = {"silent": "", "said": ""} | report
            journal.put_node_exit(store.uri, number, node, given["code"], given["own"], given["silent"], given["said"])


def test_attempt_whose_launcher_is_gone_ends_with_the_next(store: ObjectStore) -> None:
    assert journal.begin(store, ["n1", "n2"], "me") == 1
    (open_one,) = journal.read(store)
    assert "ended" not in open_one
    journal.load_and_close_stale(store)
    assert journal.begin(store, ["n1"], "another") == 2
    first, second = journal.read(store)
    assert (first["code"], first["by"], first["nodes"]) == (None, "me", ["n1", "n2"])
    assert first["ended"] >= first["started"]
    assert (second["attempt"], "ended" in second) == (2, False)


def test_idle_nodes_are_recorded_and_shown_while_they_are(store: ObjectStore) -> None:
    journal.begin(store, ["n1", "n2"], "me", ["n3"])
    line = status.lines(status.read(store, None))[-1]
    assert line.startswith("launch 1 on ")
    assert line.endswith("; idle, and paid for: n3")
    journal.finish(store, 1, 75)
    journal.begin(store, ["n1", "n2"], "me")
    assert not any("idle, and" in line for line in status.lines(status.read(store, None)))
    assert ["idle" in record for record in journal.read(store)] == [True, False]


def test_growth_is_recorded_unless_the_run_was_stopped(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm's batch script records it, which has no more than the standard library; an older one says nothing of growth."""

    def finish(number: int, **more: int) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"attempt": number, "code": 85, **more})))
        journal.main(["finish", store.uri])

    for number, more in enumerate(({"grows_to": 3}, {"grows_to": 0}, {}), 1):
        journal.begin(store, ["n1"], "me")
        finish(number, **more)
    store.put(journal.STOP, b"")
    journal.begin(store, ["n1"], "me")
    finish(4, grows_to=3)
    assert [record.get("grows_to") for record in journal.read(store)] == [3, None, None, None]


def test_growth_reaches_the_record_from_a_launcher_here(store: ObjectStore) -> None:
    recorded = RunJournal(store)
    recorded.finish(recorded.begin(["n1"], []), 85, 3)
    assert [record["grows_to"] for record in journal.read(store)] == [3]


SILENT = {"code": 75, "own": 75, "silent": "node 1"}


@pytest.mark.parametrize(
    ("reports", "scheduler", "code", "said"),
    [
        # The word of the nodes goes before the scheduler's code.
        ((SILENT, {}, SILENT), 137, 75, ""),
        # The node whose rank failed is blamed, and not one that was silent later.
        ((SILENT | {"code": 1}, {"code": 1, "own": 1, "said": "CUDA error"}), 1, 1, "CUDA error"),
    ],
)
def test_reports_of_nodes_say_who_is_to_blame(
    store: ObjectStore, reports: tuple[dict[str, Any], ...], scheduler: int, code: int, said: str
) -> None:
    journal.begin(store, ["n1", "n2", "n3"][: len(reports)], "me")
    ends(store, 1, *reports)
    record = journal.finish(store, 1, scheduler)
    assert (record["code"], record["blamed"], record["said"]) == (code, ["n2"], said)


LEFT = {"code": 85, "own": 85, "silent": "node 1"}
ALONE = {"code": 75, "own": 75, "silent": "node 0"}


@pytest.mark.parametrize(
    ("reports", "over"),
    [
        ((), False),
        ((SILENT, {}), True),
        (({}, ALONE), True),
        ((SILENT, {}, {}), False),
        ((SILENT, {}, SILENT), True),
        # All launchers have reported: the launch ends by itself.
        ((SILENT, ALONE), False),
        ((LEFT, LEFT), False),
        # Its launcher may still wait for ranks that save.
        ((LEFT, {}), False),
        # One that hears nobody else is cut off itself.
        (({}, ALONE, {}), False),
    ],
)
def test_launch_is_over_once_only_lost_nodes_are_left(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reports: Any, over: bool
) -> None:
    journal.begin(store, ["n1", "n2", "n3"][: len(reports) or 1], "me")
    ends(store, 1, *reports)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"attempt": 1}'))
    assert journal.main(["over", store.uri]) == 0
    assert json.loads(capsys.readouterr().out) == {"over": over}


def test_nodes_that_never_came_are_to_blame(store: ObjectStore) -> None:
    journal.begin(store, ["n1", "n2", "n3", "n4"], "me")
    ends(store, 1, {"code": 75, "own": 75, "silent": "node 2, node 3"}, {"code": 75, "own": 75})
    assert journal.finish(store, 1, 75)["blamed"] == ["n3", "n4"]


def test_launch_that_rolled_back_counts_from_its_own_start(store: ObjectStore) -> None:
    assert journal.begin(store, ["n1"], "me") == 1
    for generation, kind, first, last in ((1, "started", 0, 90), (2, "resumed", 60, 80)):
        log = RunLog(store, generation, 60.0, launch_attempt=1)
        log.event(kind, {"step": first})
        for step in range(first + 1, last + 1):
            log.step({"step": step, "step_seconds": 0.5})
        log.close()
    write_steps(store, (60, 90), generation=1)
    write_steps(store, (60, 70), generation=2)
    record = journal.finish(store, 1, 1)
    assert (record["generation"], record["from_step"], record["gained"], record["last_step"]) == (2, 0, 70, 80)


def test_without_a_word_of_the_nodes_the_code_stands(store: ObjectStore) -> None:
    journal.begin(store, ["n1"], "me")
    record = journal.finish(store, 1, 0)
    assert (record["code"], record["blamed"], record["noticed"]) == (0, [], [])


def test_what_a_successor_has_recorded_stays(store: ObjectStore) -> None:
    """It takes this launcher for dead between this one's look and its put."""
    journal.begin(store, ["n1"], "me")

    def succeed(request: str, key: str) -> None:
        if request == "replace":
            journal.load_and_close_stale(store)
            journal.begin(store, ["n2"], "successor")

    assert journal.finish(Asking(store.uri, succeed), 1, 0)["code"] is None
    assert journal.finish(store, 1, 0)["code"] is None, "nor later"
    assert [record["by"] for record in journal.read(store)] == ["me", "successor"]


def test_of_two_that_begin_at_the_same_moment_one_is_refused(store: ObjectStore) -> None:
    def overtake(request: str, key: str) -> None:
        if request == "put":
            journal.begin(store, ["n2"], "the other")

    with pytest.raises(LostRunError, match="attempt = 1: another launcher has begun it at the same moment"):
        journal.begin(Asking(store.uri, overtake), ["n1"], "me")
    assert [record["by"] for record in journal.read(store)] == ["the other"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"version": 99}', b"\xff"])
def test_a_record_that_is_none_is_one_line(store: ObjectStore, body: bytes) -> None:
    store.put(journal.attempt_key(1), body)
    with pytest.raises(UserError, match="is not a record of a launcher that this version knows"):
        journal.read(store)


def test_it_is_asked_for_by_commands_too(
    store: ObjectStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(do: str, given: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        assert journal.main([do, store.uri]) == 0
        return dict(json.loads(capsys.readouterr().out))

    assert call("begin", '{"nodes": ["n1"], "by": "a job", "idle": ["n2"]}') == {"attempt": 1}
    assert journal.read(store)[0]["idle"] == ["n2"]
    assert call("finish", '{"attempt": 1, "code": 85}')["code"] == 85
    assert call("take", "")["stop"] is False
    store.put(journal.STOP, b"")
    found = call("take", "")
    assert (found["stop"], [record["code"] for record in found["attempts"]]) == (True, [85])


def test_what_was_decided_before_a_resume_does_not_bind_it(store: ObjectStore) -> None:
    journal.begin(store, ["n1"], "me")
    journal.finish(store, 1, 2)
    store.put(journal.REQUEST, json.dumps({"version": 1, "after": 1}).encode())
    assert journal.load_and_close_stale(store) == []
    assert journal.begin(store, ["n1"], "me") == 2


def test_what_fails_on_most_nodes_is_no_nodes_fault(store: ObjectStore) -> None:
    journal.begin(store, ["n1", "n2", "n3"], "me")
    ends(store, 1, {"code": 1, "own": 1}, {"code": 1, "own": 1, "said": "loss is NaN"}, {"code": 1, "own": 75})
    record = journal.finish(store, 1, 1)
    assert (record["blamed"], record["said"]) == ([], "loss is NaN")
