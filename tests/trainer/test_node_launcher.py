"""One launcher a node: it starts ranks once all nodes are there, and none waits long for a node that is gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from tests.fork_server import PATIENT
from tests.ports import own_port
from tests.processes import alive, children_of, state, wait_until
from tests.trainer.test_node_local import descendants, end, endless
from trainer.checkpoint.lineage.lease import committed
from trainer.environment import max_silence_s
from trainer.errors import EXIT_DONE, EXIT_FAILURE, EXIT_LOST_RUN, EXIT_PEERS, EXIT_REQUEUE
from trainer.metrics.reader import read_events
from trainer.node import launcher
from trainer.node.heartbeat import Connection, Heartbeat, HeartbeatClient, HeartbeatServer
from trainer.node.launcher import devices, main
from trainer.storage import open_store
from trainer.storage.folder import Folder

BEAT_S, SILENT_S = 0.05, 300.0


class Clock:
    """The machine's, with leaps: what has not been heard since the last one is late."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead

    def leap(self, seconds: float) -> float:
        """Let time pass at once; the time that it is then."""
        self.ahead += seconds
        return self()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def beating(clock: Clock) -> Iterator[Callable[..., list[Heartbeat]]]:
    """Heartbeat of all nodes of a job in this process, by node; `jobs` names the job that each believes to be part of."""
    made: list[Heartbeat] = []

    def start(nodes: int, jobs: dict[int, str] | None = None) -> list[Heartbeat]:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        made.append(HeartbeatServer("1/", nodes, listener, **times(clock)))
        made.extend(
            HeartbeatClient((jobs or {}).get(node, "1/"), node, nodes, address, **times(clock))
            for node in range(1, nodes)
        )
        for beats in made:
            beats.start()
        return made

    yield start
    for beats in made:
        beats.close()


@pytest.fixture
def words(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, dict[str, Any]]]:
    """When what was read from any connection of this process."""
    came: list[tuple[float, dict[str, Any]]] = []
    read = Connection.read

    def noted(line: Connection) -> list[dict[str, Any]] | None:
        said = read(line)
        came.extend((clock(), one) for one in said or [])
        return said

    monkeypatch.setattr(Connection, "read", noted)
    return came


def times(clock: Clock) -> dict[str, Any]:
    return {"beat_s": BEAT_S, "silent_s": SILENT_S, "clock": clock}


@pytest.mark.slow
def test_all_nodes_hear_of_all_and_of_the_jobs_end(
    words: list[tuple[float, dict[str, Any]]], beating: Callable[..., list[Heartbeat]]
) -> None:
    nodes = beating(4)
    wait_until(lambda: all(beats.check().all_here for beats in nodes))
    for beats in nodes[1:]:
        beats.ended(EXIT_DONE)
    wait_until(lambda: {one["node"] for _, one in words if "node" in one and one["code"] == EXIT_DONE} == {1, 2, 3})
    assert [beats.check().code for beats in nodes] == [None] * 4, "node 0 still runs"
    nodes[0].ended(EXIT_REQUEUE)
    wait_until(lambda: all(beats.check().code == EXIT_REQUEUE for beats in nodes))
    assert {beats.check().silent for beats in nodes} == {""}


@pytest.mark.slow
def test_first_failure_is_heard_by_all_and_its_code_is_the_jobs(beating: Callable[..., list[Heartbeat]]) -> None:
    nodes = beating(3)
    wait_until(lambda: all(beats.check().all_here for beats in nodes))
    nodes[2].ended(EXIT_LOST_RUN)
    wait_until(lambda: all(beats.check().failed for beats in nodes))
    nodes[0].ended(EXIT_PEERS)
    nodes[1].ended(EXIT_PEERS)
    wait_until(lambda: all(beats.check().code == EXIT_LOST_RUN for beats in nodes))


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 2])
def test_a_node_that_falls_silent_is_named_to_all(
    words: list[tuple[float, dict[str, Any]]], beating: Callable[..., list[Heartbeat]], clock: Clock, gone: int
) -> None:
    nodes = beating(3)
    wait_until(lambda: all(beats.check().all_here for beats in nodes))
    nodes[gone].close()
    others = [beats for beats in nodes if beats.node != gone]

    def named() -> bool:
        now = clock.leap(0.6 * SILENT_S)
        # All who live are heard after the leap, so that none of them is late as well: node 1, and by it node 0.
        wait_until(lambda: gone == 0 or {1, None} <= {one.get("node") for at, one in words if at > now})
        return all(beats.check().silent == f"node {gone}" for beats in others)

    wait_until(named)


@pytest.mark.slow
def test_launcher_that_takes_a_nodes_place_ends_the_attempt(
    beating: Callable[..., list[Heartbeat]], clock: Clock
) -> None:
    """Kubernetes replaces a pod at once; the ranks of the others still wait for the rank that is gone."""
    nodes = beating(3)
    wait_until(lambda: all(beats.check().all_here for beats in nodes))
    hub = nodes[0]
    assert isinstance(hub, HeartbeatServer)
    nodes[1].close()
    successor = HeartbeatClient("1/", 1, 3, hub.address, **times(clock))
    successor.start()
    wait_until(lambda: nodes[2].check().silent == hub.check().silent == "node 1")
    successor.close()


@pytest.mark.slow
def test_a_node_may_come_anew_before_all_are_there(beating: Callable[..., list[Heartbeat]], clock: Clock) -> None:
    (hub, *_) = beating(3, {1: "another job", 2: "another job"})
    assert isinstance(hub, HeartbeatServer)
    first, *others = [HeartbeatClient("1/", node, 3, hub.address, **times(clock)) for node in (1, 1, 2)]
    first.start()
    wait_until(lambda: first.heard)
    first.close()
    clock.leap(2 * SILENT_S)
    wait_until(lambda: hub.missing_nodes() == "node 1, node 2")
    for beats in others:
        beats.start()
    wait_until(lambda: all(beats.check().all_here for beats in (hub, *others)))
    assert hub.check().silent == ""
    for beats in others:
        beats.close()


@pytest.mark.slow
def test_a_node_of_another_attempt_is_not_heard(
    words: list[tuple[float, dict[str, Any]]], beating: Callable[..., list[Heartbeat]]
) -> None:
    nodes = beating(3, {2: "2/"})
    wait_until(lambda: sum(one["job"] == "2/" for _, one in words) > 3 and nodes[0].missing_nodes() == "node 2")
    assert [beats.check().all_here for beats in nodes] == [False] * 3


@pytest.mark.parametrize("value", ["soon", "1", "-5", "nan", "inf"])
def test_silence_that_is_no_time_is_one_line_and_none_is_usual(value: str) -> None:
    assert max_silence_s(5.0, {}) == 5.0
    assert max_silence_s(5.0, {"LUSTRAIN_SILENT_S": "60"}) == 60.0
    with pytest.raises(
        UserError, match=rf"^LUSTRAIN_SILENT_S = '{value}': is not a time to wait; allowed: seconds from 2"
    ):
        max_silence_s(5.0, {"LUSTRAIN_SILENT_S": value})


@pytest.mark.slow
@pytest.mark.parametrize(
    "junk", [b"\x00" * 10_000, b"[]\n", b"nonsense\n", b'{"job": "1/", "node": 99}\n', b"[" * 4000 + b"\n"]
)
def test_what_is_no_beat_ends_its_connection_and_nothing_else(
    beating: Callable[..., list[Heartbeat]], junk: bytes
) -> None:
    nodes = beating(2)
    hub = nodes[0]
    assert isinstance(hub, HeartbeatServer)
    with socket.create_connection(hub.address, timeout=300) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(junk)
        while stranger.recv(4096):
            pass
    wait_until(lambda: all(beats.check().all_here for beats in nodes))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--nnodes", "0"], "--nnodes = 0: "),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank = 2: is not below --nnodes 2; allowed: 0 .. 1"),
        (["--nproc", "0"], "--nproc = 0: "),
        (["--master", "there"], "--master = 'there': is not an address with a port"),
        (["--master", "there:65535"], "--master = 'there:65535': "),
        (["--wait-s", "nan"], "--wait-s = nan: "),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        main(["--nnodes", "1", "--node-rank", "0", "--master", "localhost:29500", *flags, "--", "train", "x.toml"])
    assert caught.value.problems[0].startswith(line)


def test_nodes_without_a_place_to_meet_start_no_job_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", "2")
    with pytest.raises(UserError) as caught:
        main(["--nproc", "1", "--", "train", "x.toml"])
    assert (caught.value.exit_code, caught.value.problems[0].path) == (2, "--master")


@pytest.mark.parametrize(
    ("flags", "rank"),
    [(["--roster", "n2,n3"], 1), (["--roster", "a,b"], 7), (["--roster", "n2,n3", "--node-rank", "5"], 5)],
)
def test_slurms_node_is_counted_by_its_name_in_the_roster(
    flags: list[str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's own number of a dynamic node follows the order of registration. None is below one node, so each is shown."""
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    monkeypatch.setenv("SLURM_NODEID", "7")
    with pytest.raises(UserError) as caught:
        main(["--nnodes", "1", "--master", "localhost:29500", *flags, "--", "train", "x.toml"])
    assert caught.value.problems[0].startswith(f"--node-rank = {rank}: ")


def test_a_pod_of_a_job_is_counted_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "7")
    with pytest.raises(UserError) as caught:
        main(["--nnodes", "1", "--master", "localhost:29500", "--", "train", "x.toml"])
    assert caught.value.problems[0].startswith("--node-rank = 7: ")


def test_a_port_that_is_taken_is_one_line_and_a_failure() -> None:
    with socket.create_server(("", 0)) as taken:
        master = f"localhost:{taken.getsockname()[1] - 1}"
        with pytest.raises(UserError, match=r"cannot listen on port \d+: Address already in use; fix: ") as caught:
            main(["--nnodes", "1", "--node-rank", "0", "--master", master, "--", "train", "x.toml"])
    assert caught.value.exit_code == EXIT_FAILURE


def test_a_node_has_a_rank_for_each_gpu(tmp_path: Path) -> None:
    assert devices({}, tmp_path) == 1
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert devices({}, tmp_path) == 2
    assert devices({"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == 1


def test_signals_before_ranks_and_while_they_start_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    class EndedRanks:
        def __init__(self, *_: object, **__: object) -> None:
            signal.raise_signal(signal.SIGTERM)

        def send(self, number: int) -> None:
            sent.append(number)

        def running(self) -> bool:
            return False

        def exit_code(self) -> int:
            return EXIT_REQUEUE

        def close_output(self) -> None:
            pass

        def error_line(self) -> str:
            return ""

    def wait_for_all(*_: object) -> str:
        signal.raise_signal(signal.SIGUSR1)
        return ""

    monkeypatch.setattr(launcher, "Ranks", EndedRanks)
    monkeypatch.setattr(launcher, "_wait_for_all", wait_for_all)
    code = main(["--nproc", "1", "--nnodes", "1", "--", "train", "x.toml"])
    assert (code, sent) == (EXIT_REQUEUE, [signal.SIGUSR1, signal.SIGTERM])


class Nodes:
    """Launchers of all nodes of a job, each a process, on this machine."""

    def __init__(self, folder: Path, count: int, *sets: str, environment: dict[str, str] | None = None) -> None:
        words = [word for one in sets for word in ("--set", one)]
        train = ["--", "train", str(endless(folder)), *words]
        self.port = own_port(2)
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **PATIENT, **(environment or {})}
        self.environment = {**os.environ, **own}
        same = ["--nnodes", str(count), "--master", f"127.0.0.1:{self.port}", "--nproc", "1"]
        self.commands = [
            [sys.executable, "-m", "trainer.node.launcher", "--node-rank", str(node), *same, *train]
            for node in range(count)
        ]
        self.run = folder / "run"
        self.jobs: dict[int, subprocess.Popen[str]] = {}

    def start(self, *nodes: int) -> None:
        for node in nodes:
            self.jobs[node] = subprocess.Popen(
                self.commands[node], env=self.environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            )

    def lose(self, node: int) -> None:
        """As a machine that is cut off: everything on it stands still, no connection ends, and it locks no file."""
        pids = [self.jobs[node].pid, *descendants(self.jobs[node].pid)]
        with Folder(self.run).locked():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: {state(pid) for pid in pids} == {"T"})

    def close(self) -> None:
        for job in self.jobs.values():
            end([*descendants(job.pid), job.pid])
            job.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_of_a_lost_nodes_peers_end_and_the_next_goes_on(tmp_path: Path, lost: int) -> None:
    store = open_store(f"{tmp_path}/run")
    sets = ("checkpoint.every_steps=20", "parallel.timeout_s=6000")
    nodes = Nodes(tmp_path, 2, *sets, environment={"LUSTRAIN_ATTEMPT": "1", "LUSTRAIN_SILENT_S": "40"})
    again = Nodes(tmp_path, 2, *sets, environment={"LUSTRAIN_ATTEMPT": "2"})
    try:
        with socket.create_server(("127.0.0.1", nodes.port + 1)) as in_place_of_node_0:
            nodes.start(1)
            in_place_of_node_0.accept()[0].close()
            assert not children_of(nodes.jobs[1].pid), "no rank before all nodes are there"
        nodes.start(0)
        wait_until(lambda: committed(store))
        survivor = nodes.jobs[1 - lost]
        ranks = children_of(survivor.pid)
        nodes.lose(lost)
        assert survivor.wait(timeout=300) == EXIT_PEERS
        wait_until(lambda: not any(map(alive, ranks)))
        assert survivor.stderr is not None
        assert survivor.stderr.read().count(f"node {lost} was silent for 40 s: its ranks are lost") == 1
        again.start(0, 1)
        wait_until(lambda: any(event["event"] == "resumed" for event in read_events(store)))
        again.jobs[0].send_signal(signal.SIGTERM)
        assert [job.wait(timeout=300) for job in again.jobs.values()] == [EXIT_REQUEUE] * 2
    finally:
        nodes.close()
        again.close()
    events = read_events(store)
    assert {event["attempt"]: event["launch_attempt"] for event in events} == {1: 1, 2: 2}


@pytest.mark.slow
def test_a_rank_that_is_killed_is_the_jobs_failure_on_every_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "checkpoint.every_steps=20")
    try:
        nodes.start(0, 1)
        wait_until(lambda: committed(open_store(f"{tmp_path}/run")))
        (rank,) = children_of(nodes.jobs[1].pid)
        os.kill(rank, signal.SIGKILL)
        assert [nodes.jobs[node].wait(timeout=300) for node in (0, 1)] == [EXIT_FAILURE] * 2
    finally:
        nodes.close()


SLOW_TO_KILL = """
import sys
from trainer.node import launcher, ranks
ranks.STACKS_S = 15.0
sys.exit(launcher.main())
"""
"""A launcher that gives ranks more time to print their stacks: a busy machine may not let them run for a while."""


@pytest.mark.slow
def test_ranks_that_hang_show_their_stacks_and_end_as_a_failure(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "checkpoint.every_steps=20", "parallel.timeout_s=6000")
    for command in nodes.commands:
        command[1:3] = ["-c", SLOW_TO_KILL]
        command[command.index("--nproc") : command.index("--nproc")] = ["--hung-s", "30"]
    try:
        nodes.start(0, 1)
        wait_until(lambda: committed(open_store(f"{tmp_path}/run")))
        (rank,) = children_of(nodes.jobs[1].pid)
        os.kill(rank, signal.SIGSTOP)
        said = [nodes.jobs[node].communicate(timeout=300)[1] for node in (0, 1)]
        assert [nodes.jobs[node].returncode for node in (0, 1)] == [EXIT_FAILURE] * 2
        assert not alive(rank)
    finally:
        nodes.close()
    assert re.search(r"no step has ended for \d+ s: the ranks hang, and are killed; fix: ", said[0])
    assert "all_reduce_stats" in said[0] or "backward" in said[0], "what the rank that can speak waits in"


@pytest.mark.slow
def test_a_node_that_does_not_come_is_75_and_no_rank_was_started(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    nodes.commands[0][nodes.commands[0].index("--nproc") : nodes.commands[0].index("--nproc")] = ["--wait-s", "1"]
    try:
        nodes.start(0)
        said = nodes.jobs[0].communicate(timeout=300)[1]
        assert (nodes.jobs[0].returncode, said) == (
            EXIT_PEERS,
            "node 0 of 2: not all nodes came within 1 s; no rank was started; missing: node 1\n",
        )
    finally:
        nodes.close()
    assert not (tmp_path / "run").exists()
