"""`fab logs`: what ranks print is marked once, by their launcher, and found again by rank and launch on every backend."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from launch import logs, runs, status
from launch.backends import LogLine, kubernetes, local
from launch.backends.local import SupervisorLog
from launch.backends.log_file import read_log_file
from launch.logs import Entry, entries
from lustrain.problem import UserError
from tests.fab import Fab
from tests.launch.test_launch_command import plant
from tests.processes import wait_until
from trainer.node.output import TAIL, RankOutput, mark, parse, write_all
from trainer.run import journal
from trainer.run.journal import REQUEST
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


def test_line_of_a_supervisor_is_of_no_launch_on_its_node() -> None:
    lines = [LogLine("[launch 2 rank 0] x", "a", 2), LogLine("node 1 of 2: lost", "a", 2), LogLine("lustrain: x", "a")]
    assert [entry.launch for entry in entries(lines)] == [2, 2, None]


@pytest.mark.parametrize(("launch", "rank"), [(None, 3), (12, 0)])
def test_mark_is_read_as_it_is_written(launch: int | None, rank: int) -> None:
    assert parse(f"{mark(launch, rank)}[rank 9] text") == (launch, rank, "[rank 9] text")


def test_shown_line_steers_no_terminal() -> None:
    assert Entry("n", 1, 0, "\x1b[2Jx").shown() == "n: [launch 1 rank 0] \\x1b[2Jx"


RANKS = """
import os, sys
from pathlib import Path
from trainer.node.output import RankOutput
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


def test_output_over_its_limit_keeps_begin_and_end(capfd: pytest.CaptureFixture[str]) -> None:
    output, shown = RankOutput(1, limit=100), ""
    out, _ = output.pipes(0)
    held = os.dup(out)
    output.start()

    def has_begun() -> bool:
        nonlocal shown
        shown += capfd.readouterr().out
        return bool(shown)

    os.write(held, b"begin\n")
    wait_until(has_begun)
    os.write(held, b"".join(b"%d\n" % number for number in range(8000)))
    os.close(held)
    output.close()
    shown += capfd.readouterr().out
    begin, full, left_out, *tail = shown.splitlines()
    assert begin == "[launch 1 rank 0] begin"
    assert [parse(line)[1] for line in (full, left_out)] == [None, None]
    numbers = [int(parse(line)[2]) for line in tail]
    assert numbers == list(range(numbers[0], 8000))
    assert TAIL * 0.9 < len("\n".join(tail)) <= TAIL


def test_slow_reader_of_a_non_blocking_output_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    size = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    failures: list[OSError] = []

    def write() -> None:
        write_all(writer, b"x" * size * 3, failures.append)
        os.close(writer)

    writing = threading.Thread(target=write)
    writing.start()
    with open(reader, "rb") as file:
        assert len(file.read()) == size * 3
    writing.join()
    assert not failures


def test_log_of_the_supervisor_that_is_full_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = SupervisorLog(Path("/dev/full"))
    for line in ("one", "two"):
        log.add(line)
    shown = capsys.readouterr().err.splitlines()
    assert [shown[0], shown[2]] == ["lustrain: one", "lustrain: two"]
    assert "No space left on device" in shown[1]


def test_output_that_is_lost_is_said_once() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", RANKS], stdout=full, stderr=subprocess.PIPE, text=True, check=True)
    assert sum("No space left on device" in line for line in done.stderr.splitlines()) == 1


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


def test_run_on_a_terminal_has_no_log_and_says_why() -> None:
    with pytest.raises(UserError) as error:
        list(local.BACKEND.read_log("/runs/first", None, None, looks()))
    assert "terminal" in error.value.problems[0].why
    assert "fab status /runs/first" in error.value.problems[0].fix


KUBECTL = """
case "$*" in
*"get job"*) echo '{"metadata": {}, "status": {}}' ;;
*"get pods"*) cat "%(folder)s/pods" ;;
*"logs first-0-a"*) echo "$*" >> "%(folder)s/calls"; sed "s/^/2026-11-26T10:00:0/" "%(folder)s/a" ;;
*"logs first-"*)
    # Ends only once the other pod is read, too.
    touch "%(folder)s/$3"
    until [ -e "%(folder)s/first-1" ] && [ -e "%(folder)s/first-2" ]; do sleep 0.01; done
    echo "2026-11-26T10:00:00Z of $3" ;;
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


def test_line_of_a_pod_ends_at_its_newline_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    plant(tmp_path, "kubectl", KUBECTL % {"folder": tmp_path})
    pods = [{"metadata": {"name": "first-0-a", "creationTimestamp": "0"}, "status": {"phase": "Running"}}]
    (tmp_path / "pods").write_text(json.dumps({"items": pods}))
    text = "0+09:00 step 1\reval 2\u2028end \udcff\n x of kubectl\n".encode(errors="surrogateescape")
    (tmp_path / "a").write_bytes(text)
    found = kubernetes.BACKEND.read_log("run", {"job": "first", "namespace": "ml"}, None, looks(lambda: None))
    assert [line.text for line in found] == ["step 1\reval 2\u2028end \ufffd"]
    assert "--since-time=2026-11-26T10:00:00+09:00" in (tmp_path / "calls").read_text().splitlines()[-1]


def test_pods_are_read_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    plant(tmp_path, "kubectl", KUBECTL % {"folder": tmp_path})
    names = ["first-1", "first-2"]
    pods = [{"metadata": {"name": name, "creationTimestamp": "0"}, "status": {"phase": "Failed"}} for name in names]
    (tmp_path / "pods").write_text(json.dumps({"items": pods}))
    found = kubernetes.BACKEND.read_log("run", {"job": "first", "namespace": "ml"}, None, looks())
    assert [line.source for line in found] == names


def recorded(folder: Path, *codes: int | None, **more: Any) -> Any:
    """A run whose launches ended so; None for one that has not ended. `more` is in its request."""
    store = open_store(str(folder))
    store.put(REQUEST, json.dumps({"version": 1, "on": "local", "run": str(folder), "after": 0, **more}).encode())
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
    store = recorded(tmp_path, *codes)
    assert logs.has_ended(store, runs.read_record(store, REQUEST) or {}, launch) is ended


@pytest.mark.parametrize(
    ("codes", "rank", "launch", "path"),
    [
        ([0, 0], 1, 2, ""),
        ([0, 0], 2, None, "--rank"),
        ([0, 0], None, 3, "--launch"),
        # Before its first launch a run has the ranks that were requested.
        ([], 5, None, ""),
        ([], 6, 1, "--rank"),
    ],
)
def test_only_a_rank_or_launch_of_the_run_may_be_silent(
    tmp_path: Path, codes: list[int | None], rank: int | None, launch: int | None, path: str
) -> None:
    store = recorded(tmp_path, *codes, ranks=2, nodes={"most": 3})
    with pytest.raises(UserError) if path else nullcontext() as refused:
        logs.check_part(store, runs.read_record(store, REQUEST), rank, launch)
    assert not path or [line.path for line in refused.value.problems] == [path]


GONE = {"host": platform.node(), "pid": 1}
"""Process 1 is no `fab train`."""


@pytest.mark.parametrize(
    ("codes", "request_record", "silent_s", "is_abandoned"),
    [
        ([85, 75, 1], GONE, 0, True),
        ([], GONE, 0, True),
        ([75, None], GONE, status.SILENT_S - 100, False),
        ([75, None], GONE, status.SILENT_S + 1, True),
        ([75], {**GONE, "host": "another"}, 3700, False),
        ([75], {**GONE, "host": "another", "give_up_s": 7200}, 7100, False),
        ([75], {**GONE, "host": "another", "give_up_s": 7200}, 7300, True),
        ([75, None], {**GONE, "host": "another"}, 22000, True),
        ([75], {**GONE, "host": "another", "on": "slurm"}, 22000, False),
        ([75], {**GONE, "on": "slurm"}, 0, False),
        ([75], {}, 0, False),
    ],
)
def test_following_ends_where_the_supervisor_is_gone(
    tmp_path: Path,
    codes: list[int | None],
    request_record: dict[str, Any],
    silent_s: float,
    is_abandoned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, now = recorded(tmp_path, *codes, **request_record), time.time()
    monkeypatch.setattr(time, "time", lambda: now + silent_s)
    (tmp_path / "log").write_text("one\n")
    runs.save_job(store, "local", {"log": str(tmp_path / "log")})
    request = runs.read_record(store, REQUEST) or {}
    assert bool(logs.abandoned(store, request)) is is_abandoned
    if is_abandoned:
        found = logs.read(store, request, rank=None, launch=None, follow=True, sleep=lambda seconds: None)
        assert [entry.text for entry in found] == ["one"]


@pytest.mark.slow
def test_command_prints_one_ranks_lines(tmp_path: Path, fab: Fab) -> None:
    recorded(tmp_path / "first", 0, 0, ranks=2)
    (tmp_path / "first/launch/log").write_text("\n".join(PRINTED))
    submitted = {"version": 1, "host": "x", "local": {"log": f"{tmp_path}/first/launch/log"}}
    (tmp_path / "first/launch/submitted.json").write_text(json.dumps(submitted))
    words = ("logs", "first", "-f", "--rank", "1", "--launch", "1")
    assert fab(*words, folder=tmp_path).out == "[launch 1 rank 1] warning\n"
    none = fab("logs", "first", "--rank", "7", folder=tmp_path)
    assert (none.code, none.err.partition(":")[0]) == (2, "--rank = 7")
    silent = fab("logs", "first", "--rank", "1", "--launch", "2", folder=tmp_path)
    assert (silent.code, silent.out, len(silent.err.splitlines())) == (0, "", 1)
    answer = json.loads(fab("logs", "first", "--launch", "2", "--json", folder=tmp_path).out)
    assert answer["lines"] == [{"source": "", "launch": 2, "rank": 0, "text": "step 2"}]
