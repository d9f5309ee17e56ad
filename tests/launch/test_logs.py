"""`fab logs`: what ranks print is marked once, by their launcher, and found again by rank and launch on every backend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import logs
from launch.backends import LogLine, kubernetes
from launch.backends.log_file import read_log_file
from launch.logs import Entry, entries
from lustrain.problem import UserError
from tests.launch.test_launch_command import fab, plant
from trainer.launch import journal
from trainer.launch.journal import REQUEST
from trainer.launch.output import mark, parse
from trainer.storage import open_store

PRINTED = [
    "lustrain: begins",
    "[launch 1 rank 0] step 1",
    "[launch 1 rank 1] warning",
    "lustrain: node3 was lost",
    "[launch 2 rank 0] step 2",
]


def looks(*then: Callable[[], object]) -> Callable[[], bool]:
    """`more` of a backend: before each look but the last one of these happens."""
    steps = list(then)

    def more() -> bool:
        if not steps:
            return False
        steps.pop(0)()
        return True

    return more


@pytest.mark.parametrize(
    ("rank", "launch", "texts"),
    [
        (None, None, ["lustrain: begins", "step 1", "warning", "lustrain: node3 was lost", "step 2"]),
        (1, None, ["warning"]),
        (0, 2, ["step 2"]),
        (None, 1, ["step 1", "warning", "lustrain: node3 was lost"]),
    ],
)
def test_lines_are_chosen_by_rank_and_launch(rank: int | None, launch: int | None, texts: list[str]) -> None:
    assert [entry.text for entry in entries(map(LogLine, PRINTED), rank, launch)] == texts


def test_launch_of_one_node_says_nothing_of_another() -> None:
    lines = [LogLine("[launch 2 rank 0] x", "a"), LogLine("node 1 of 2: lost", "b")]
    assert [entry.launch for entry in entries(lines)] == [2, None]


@pytest.mark.parametrize(("launch", "rank"), [(None, 3), (12, 0)])
def test_mark_is_read_as_it_is_written(launch: int | None, rank: int) -> None:
    assert parse(f"{mark(launch, rank)}[rank 9] text") == (launch, rank, "[rank 9] text")


def test_shown_line_steers_no_terminal() -> None:
    assert Entry("n", 1, 0, "\x1b[2Jx").shown() == "n: [launch 1 rank 0] \\x1b[2Jx"


RANKS = """
import os, sys
from pathlib import Path
from trainer.launch.output import RankOutput
output = RankOutput(2, Path(sys.argv[1]) if sys.argv[1:] else None)
pipes = [output.pipes(rank) for rank in (0, 1)]
for (out, err), text in zip(pipes, ("one\\ntwo", "")):
    os.write(out, text.encode())
    os.write(err, b"wrong\\n")
output.start()
output.close()
"""


def printed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RANKS, *words], capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_each_line_of_a_rank_is_marked_and_none_is_lost(tmp_path: Path) -> None:
    done = printed()
    assert done.stdout == "[launch 2 rank 0] one\n[launch 2 rank 0] two\n"
    assert sorted(done.stderr.splitlines()) == ["[launch 2 rank 0] wrong", "[launch 2 rank 1] wrong"]
    done = printed(f"{tmp_path}/launch/log")
    assert (done.stdout, done.stderr) == ("one\ntwo\n", "wrong\nwrong\n")
    log = (tmp_path / "launch/log").read_text().splitlines()
    assert "[launch 2 rank 0] two" in log
    assert len(log) == 4
    done = printed("/proc/nowhere/log")
    assert done.stdout == "one\ntwo\n"
    assert done.stderr.startswith("no log of the ranks is kept: ")


def test_followed_file_yields_each_line_once_and_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def append(text: str) -> Callable[[], object]:
        def act() -> None:
            with open(log, "a") as file:
                file.write(text)

        return act

    # At the first look there is no file yet.
    more = looks(lambda: None, append("a\nhal"), append("f\n"), append("end"))
    assert [line.text for line in read_log_file("run", {"log": str(log)}, more)] == ["a", "half", "end"]


@pytest.mark.parametrize("job", [None, {"log": "/nowhere/log"}])
def test_log_that_is_not_here_is_one_line(job: dict[str, Any] | None) -> None:
    with pytest.raises(UserError) as error:
        list(read_log_file("run", job, looks()))
    assert error.value.problems[0].path == ("log" if job else "RUN")


KUBECTL = """
case "$*" in
*"get job"*) echo '{"metadata": {}, "status": {}}' ;;
*"get pods"*) cat "%(folder)s/pods" ;;
*"logs first-0-a"*) sed "s/^/2026-11-26T10:00:0/" "%(folder)s/a" ;;
*) echo 'Error from server (NotFound): pods "gone" not found' >&2; exit 1 ;;
esac
"""


def test_pods_logs_are_followed_and_no_line_comes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    plant(tmp_path, "kubectl", KUBECTL % {"folder": tmp_path})
    pods = [
        {"metadata": {"name": name, "creationTimestamp": time}, "status": {"phase": phase}}
        for name, time, phase in [("later", "2", "Pending"), ("gone", "1", "Failed"), ("first-0-a", "0", "Running")]
    ]
    (tmp_path / "pods").write_text(json.dumps({"items": pods}))
    (tmp_path / "a").write_text("0.5Z [rank 0] one\n")
    more = looks(lambda: None, lambda: (tmp_path / "a").write_text("0.5Z [rank 0] one\n0.51Z [rank 0] two\n"))
    found = kubernetes.BACKEND.read_log("run", {"job": "first", "namespace": "ml"}, None, more)
    assert list(found) == [LogLine("[rank 0] one", "first-0-a"), LogLine("[rank 0] two", "first-0-a")]


def recorded(folder: Path, *codes: int | None) -> Any:
    """A run whose launches ended so; None for one that has not ended."""
    store = open_store(str(folder))
    store.put(REQUEST, json.dumps({"version": 1, "on": "local", "run": str(folder), "after": 0}).encode())
    for code in codes:
        number = journal.begin(store, ["n"], "test")
        if code is not None:
            journal.finish(store, number, code)
    return store


@pytest.mark.parametrize(
    ("codes", "launch", "ended"),
    [
        ([], None, False),
        ([75, None], None, False),
        ([75], None, False),
        ([75, None], 1, True),
        ([75, 0], None, True),
        ([2], None, True),
        ([1, 1, 1], None, True),
    ],
)
def test_following_ends_with_the_run_or_the_launch(
    tmp_path: Path, codes: list[int | None], launch: int | None, ended: bool
) -> None:
    assert logs.has_ended(recorded(tmp_path, *codes), launch) is ended


@pytest.mark.slow
def test_command_prints_one_ranks_lines(tmp_path: Path) -> None:
    recorded(tmp_path / "first", 0)
    (tmp_path / "first/launch/log").write_text("\n".join(PRINTED))
    submitted = {"version": 1, "host": "x", "local": {"log": f"{tmp_path}/first/launch/log"}}
    (tmp_path / "first/launch/submitted.json").write_text(json.dumps(submitted))
    assert fab(tmp_path, "logs", "first", "-f", "--rank", "1").stdout == "[launch 1 rank 1] warning\n"
    nothing = fab(tmp_path, "logs", "first", "--rank", "7")
    assert (nothing.returncode, nothing.stderr[:12]) == (2, "--rank = '7'")
    answer = json.loads(fab(tmp_path, "logs", "first", "--launch", "2", "--json").stdout)
    assert answer["lines"] == [{"source": "", "launch": 2, "rank": 0, "text": "step 2"}]
