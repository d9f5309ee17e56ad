"""What is asked of a node: one round trip, two where it holds no agent, and what went wrong told from how it ended."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node_setup.answers import parse
from node_setup.fleet import agent_call
from node_setup.fleet.agent_call import AgentCall, pid1_age
from node_setup.fleet.faults import DISK, LOST, NO_ANSWER, PYTHON, RUNS_ON, STOPPED, SUDO, TIMEOUT, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.protocol import Agent, Request, Response, Traffic, send_request
from node_setup.fleet.session import Completed, LocalSession
from node_setup.fleet.transport import Connections, Deadline
from tests.conftest import require
from tests.node_setup.local_sshd import PATIENT, Sshd
from tests.node_setup.meanwhile import Sleeper, once
from tests.processes import alive, wait_until

SPEAKS = """
import hashlib, json, sys
if hashlib.sha256(open(sys.argv[0], "rb").read()).hexdigest() != sys.argv[3]:
    sys.exit(96)
request = json.loads(sys.stdin.read())
print(json.dumps({"version": 1, "agent": sys.argv[3], "rows": [], "command": sys.argv[1], "request": request}))
sys.exit(request.get("status", 0))
"""
"""Stands for the agent: it checks its own digest, says what it was asked, and ends as it was told to. It does nothing."""


def agent(text: str, folder: Path) -> Agent:
    content = text.encode()
    return Agent(content, hashlib.sha256(content).hexdigest(), str(folder / "lustrain" / "agent.pyz"))


class Said:
    """A session that gives the answers it was made with, and keeps what it was asked; there is no node."""

    def __init__(self, *answers: Completed, root: bool = True) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, bytes]] = []
        self.root, self.user, self.root_fix = root, "root" if root else "ubuntu", "become root"

    def execute(self, command: str, stdin: bytes, seconds: float) -> Completed:
        self.asked.append((command, stdin))
        return self.answers.pop(0)

    def close(self) -> None:
        """Nothing is open."""


def fault_of(answer: Completed, tmp_path: Path, *, root: bool = True) -> Fault:
    with pytest.raises(Fault) as caught:
        send_request(Said(answer, root=root), agent(SPEAKS, tmp_path), Request("plan"), Traffic())
    return caught.value


NO_PYTHON = "timeout: failed to run command 'python3': No such file or directory"
OLD_PYTHON = "lustrain-agent: needs Python 3.9 or later, this is 3.8.10; fix: install one"
MAY_NOT = "user ubuntu may not sudo"


@pytest.mark.parametrize(
    ("status", "err", "root", "kind", "why"),
    [
        (1, "sudo: a password is required", False, SUDO, "user ubuntu may not sudo without a password"),
        (1, "sudo: a terminal is required to read the password", False, SUDO, MAY_NOT),
        (1, "ubuntu is not in the sudoers file.", False, SUDO, MAY_NOT),
        (127, "env: 'sudo': No such file or directory", False, SUDO, MAY_NOT),
        (127, NO_PYTHON, True, PYTHON, "python3 is not installed"),
        (1, OLD_PYTHON, True, PYTHON, "3.8.10"),
        (97, "head: write error: No space left on device", True, DISK, "No space left on device"),
        (97, "mktemp: failed to create file: Read-only file system", True, DISK, "Read-only file system"),
        (137, "", True, NO_ANSWER, "the agent was killed after 0 s"),
        (-1, "", True, NO_ANSWER, "the agent was killed after 0 s"),
        (1, "Segmentation fault", True, NO_ANSWER, "status 1 and printed: Segmentation fault"),
        (1, "evil \x1b[2J", True, NO_ANSWER, "evil \\x1b[2J"),
    ],
)
def test_how_it_ended_is_told_in_one_line(
    status: int, err: str, root: bool, kind: str, why: str, tmp_path: Path
) -> None:
    fault = fault_of(Completed(status, b"", f"a warning\n{err}\n".encode()), tmp_path, root=root)
    assert (fault.kind, why in fault.why, bool(fault.fix), "\n" in str(fault)) == (kind, True, True, False), fault


@pytest.mark.parametrize("status", [0, 1, 2, 4])
def test_an_answer_is_believed_whatever_the_agent_says_of_it(status: int, tmp_path: Path) -> None:
    ours = agent(SPEAKS, tmp_path)
    said = {"version": 1, "agent": ours.sha, "rows": []}
    out = Completed(status, f"Welcome to the node\n{json.dumps(said)}\n".encode(), b"sudo: unable to resolve host n1\n")
    response = send_request(Said(out), ours, Request("plan"), Traffic())
    assert response == Response(status, parse(said), ("sudo: unable to resolve host n1",))


def test_sudo_is_used_unless_root_or_reading_locally(tmp_path: Path) -> None:
    for root, privileged, begin in (
        (True, True, "sh -c"),
        (False, True, "env LC_ALL=C sudo -n sh -c"),
        (False, False, "sh -c"),
    ):
        said = Said(Completed(1, b'{"version": 1}', b""), root=root)
        send_request(said, agent(SPEAKS, tmp_path), Request("plan", privileged=privileged), Traffic())
        assert said.asked[0][0].startswith(begin)


@pytest.fixture
def here() -> LocalSession:
    """A shell of this machine: the scripts are run for real, without SSH around them."""
    return LocalSession(threading.Event())


@pytest.mark.slow
def test_stop_ends_the_local_agent_and_its_children(tmp_path: Path) -> None:
    stopped, file = threading.Event(), tmp_path / "children"
    script = f"trap '' TERM; timeout 3600 sleep 3600 & echo $! $$ >{file}; sleep 3600; wait"
    once(lambda: file.exists() and file.read_text().endswith("\n"), stopped.set)
    with pytest.raises(Fault) as caught:
        LocalSession(stopped).execute(script, b"", 300)
    assert (caught.value.kind, caught.value.why) == (STOPPED, "stopped while it ran; its agent was ended")
    # SIGKILL was sent to all of them; the one that is not our child dies when the kernel comes to it.
    wait_until(lambda: not any(alive(int(pid)) for pid in file.read_text().split()))


@pytest.mark.slow
def test_an_agent_of_root_behind_sudo_is_said_to_run_on(here: LocalSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Fault) as caught:
        LocalSession(stopped).execute("sleep 2", b"", 300)
    assert (caught.value.kind, caught.value.why) == (STOPPED, RUNS_ON)


def test_whoever_may_not_sudo_here_is_told_to_call_fab_by_it(here: LocalSession, tmp_path: Path) -> None:
    assert here.root_fix == f"run all of it as root: sudo {Path(sys.argv[0]).absolute()} …"
    assert fault_of(Completed(1, b"", b"sudo: a password is required"), tmp_path, root=False).fix == "become root"


def asked(session: Any, ours: Agent, request: dict[str, Any], **more: Any) -> tuple[Response, Traffic]:
    traffic = Traffic()
    response = send_request(session, ours, Request("plan", request, **{"privileged": False, **more}), traffic)
    return response, traffic


@pytest.mark.slow
def test_first_call_takes_two_round_trips_and_later_ones_one(here: LocalSession, tmp_path: Path) -> None:
    ours, request = agent(SPEAKS, tmp_path), {"overrides": {"a.b": "x 'y' \"z\" $(w) \\ \n ü"}, "only": ["*"]}
    response, traffic = asked(here, ours, request)
    assert (response.answer.to_json()["command"], response.answer.to_json()["request"]) == ("plan", request)
    assert traffic.round_trips == 2
    assert traffic.sent > len(ours.content)
    response, traffic = asked(here, ours, {"profile": "cpu", "status": 2})
    assert (response.status, traffic.round_trips) == (2, 1)
    assert traffic.sent < 600
    path = Path(ours.path)
    assert [one.name for one in path.parent.iterdir()] == ["agent.pyz"]
    assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (0o644, ours.content)


@pytest.mark.slow
@pytest.mark.parametrize(
    "found", [b"", b"import sys; sys.exit(96)", b"PK\x05\x06" + bytes(18)], ids=["empty", "other", "cut"]
)
def test_another_agent_or_a_damaged_one_is_replaced(here: LocalSession, tmp_path: Path, found: bytes) -> None:
    ours = agent(SPEAKS, tmp_path)
    Path(ours.path).parent.mkdir()
    Path(ours.path).write_bytes(found)
    response, traffic = asked(here, ours, {})
    assert (response.status, traffic.round_trips) == (0, 2)
    assert Path(ours.path).read_bytes() == ours.content


def test_an_upload_that_is_cut_leaves_the_old_agent(here: LocalSession, tmp_path: Path) -> None:
    old, new = agent("import sys; sys.exit(96)", tmp_path), agent(SPEAKS, tmp_path)
    Path(old.path).parent.mkdir()
    Path(old.path).write_bytes(old.content)

    class Cut(LocalSession):
        def execute(self, command: str, stdin: bytes, seconds: float) -> Completed:
            return super().execute(command, stdin[: len(stdin) // 2], seconds)

    with pytest.raises(Fault) as caught:
        asked(Cut(threading.Event()), new, {})
    assert caught.value.kind == DISK
    assert [one.name for one in Path(old.path).parent.iterdir()] == ["agent.pyz"]
    assert Path(old.path).read_bytes() == old.content


def test_what_uploads_left_that_were_killed_goes_after_an_hour(here: LocalSession, tmp_path: Path) -> None:
    ours = agent(SPEAKS, tmp_path)
    folder = Path(ours.path).parent
    folder.mkdir()
    for name, age in ((".upload.old", 7200), (".upload.new", 60)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    asked(here, ours, {})
    assert sorted(one.name for one in folder.iterdir()) == [".upload.new", "agent.pyz"]


@pytest.mark.slow
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "needs root, to mount a small file system in a namespace of its own")
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64k", "t", str(tmp_path)]
    require(subprocess.run(probe, capture_output=True).returncode == 0, "needs mounts in a namespace")
    ours = agent(SPEAKS + "#" * 200_000, tmp_path)

    class Small(LocalSession):
        def execute(self, command: str, stdin: bytes, seconds: float) -> Completed:
            script = f"mount -t tmpfs -o size=64k t {tmp_path}; {command}; s=$?; ls -A {ours.path[:-10]} >&2; exit $s"
            done = subprocess.run(["unshare", "-m", "sh", "-c", script], input=stdin, capture_output=True)
            self.left = done.stderr
            return Completed(done.returncode, done.stdout, done.stderr)

    session = Small(threading.Event())
    with pytest.raises(Fault) as caught:
        asked(session, ours, {})
    assert (caught.value.kind, caught.value.fix) == (DISK, "free space below /var/lib")
    assert "No space left on device" in caught.value.why
    assert b".upload" not in session.left


def test_no_interpreter_is_told_by_its_name(here: LocalSession, tmp_path: Path) -> None:
    with pytest.raises(Fault) as caught:
        asked(here, agent(SPEAKS, tmp_path), {}, python="python3.0")
    assert (caught.value.kind, caught.value.why) == (PYTHON, "python3.0 is not installed")


@pytest.mark.slow
def test_an_agent_that_hangs_is_ended_on_the_node(here: LocalSession, tmp_path: Path, sleeper: Sleeper) -> None:
    ours = agent(sleeper.program, tmp_path)
    with pytest.raises(Fault) as caught:
        asked(here, ours, {}, seconds=1)
    assert caught.value.kind == TIMEOUT
    wait_until(lambda: not subprocess.run(["pgrep", "-f", ours.path], capture_output=True).stdout)


@pytest.fixture
def asker(machine: Sshd, tmp_path: Path) -> Iterator[Callable[[str], AgentCall]]:
    connections = Connections(KnownHosts(str(tmp_path / "known")), replace(PATIENT, retries=1, first_pause_s=0.1))
    yield lambda text: AgentCall(connections, agent(text, tmp_path), "plan", lambda node: {"group": node.group})
    connections.stop()


@pytest.mark.slow
def test_over_ssh_too_the_agent_goes_once(machine: Sshd, asker: Callable[[str], AgentCall]) -> None:
    work = asker(SPEAKS)
    for rounds in (2, 1):
        traffic = Traffic()
        outcome = work(replace(machine.node, group="train"), Deadline(300), traffic)
        assert outcome.answer is not None
        said = outcome.answer.to_json()
        assert (said["command"], said["request"]) == ("plan", {"group": "train"})
        assert (traffic.round_trips, outcome.traffic) == (rounds, traffic)


@pytest.mark.slow
def test_sudo_that_asks_a_password_is_no_hang(machine: Sshd, asker: Callable[[str], AgentCall]) -> None:
    program = machine.folder / "bin" / "sudo"
    program.write_text('#!/bin/sh\n[ "$1" = -n ] || sleep 3600\necho "sudo: a password is required" >&2\nexit 1\n')
    program.chmod(0o755)
    work = asker(SPEAKS)

    class Plain(type(work.connections)):  # type: ignore[misc]
        """Takes whom the session belongs to for no root."""

        def connect(self, node: Any, deadline: Deadline) -> Any:
            session = super().connect(node, deadline)
            session.__class__ = type("User", (session.__class__,), {"root": False})
            return session

    connections = Plain(work.connections.known_hosts, work.connections.limits)
    try:
        with pytest.raises(Fault) as caught:
            replace(work, connections=connections)(machine.node, Deadline(300), Traffic())
    finally:
        connections.stop()
        program.unlink()
    assert (caught.value.kind, getpass.getuser() in caught.value.fix) == (SUDO, True)


@pytest.mark.slow
@pytest.mark.parametrize("rebooted", [False, True])
def test_a_connection_that_breaks_is_told_from_a_reboot(
    machine: Sshd, asker: Callable[[str], AgentCall], monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper, rebooted: bool
) -> None:
    monkeypatch.setattr(agent_call, "RECONNECT_TIMEOUT_S", 300.0)
    monkeypatch.setattr(agent_call, "AGE_TIMEOUT_S", 300.0)
    if rebooted:
        monkeypatch.setattr(agent_call, "pid1_age", lambda session: 0.0)
    once(sleeper.begun, machine.cut)
    with pytest.raises(Fault) as caught:
        asker(sleeper.program)(machine.node, Deadline(300), Traffic())
    why = "the node rebooted during the call, 0 s ago" if rebooted else "the node runs on"
    assert (caught.value.kind, caught.value.why.endswith(why)) == (LOST, True)


@pytest.mark.slow
def test_a_node_that_stays_away_is_said_to(
    own_machine: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper
) -> None:
    refused: list[Fault] = []

    class Counting(Connections):
        def connect(self, node: Node, deadline: Deadline) -> Any:
            try:
                return super().connect(node, deadline)
            except Fault as fault:
                refused.append(fault)
                raise

    def leave() -> None:
        sessions = own_machine.sessions()
        own_machine.stop()
        for pid in sessions:
            os.kill(pid, 9)

    monkeypatch.setattr(agent_call, "Deadline", lambda seconds: Deadline(seconds, lambda: 10.0 * len(refused)))
    own_machine.start()
    connections = Counting(KnownHosts(str(tmp_path / "known")), PATIENT)
    once(sleeper.begun, leave)
    call = AgentCall(connections, agent(sleeper.program, tmp_path), "plan", lambda node: {})
    try:
        with pytest.raises(Fault) as caught:
            call(own_machine.node, Deadline(300), Traffic())
    finally:
        connections.stop()
    assert (caught.value.kind, "since then: connection refused" in caught.value.why) == (LOST, True)
    assert len(refused) == 2


def test_the_age_of_the_first_process_is_in_seconds(here: LocalSession) -> None:
    age = pid1_age(here)
    assert age is not None
    assert 0 < age <= float(Path("/proc/uptime").read_text().split()[0])
    assert pid1_age(Said(Completed(0, b"no such thing", b""))) is None


@pytest.mark.parametrize(
    ("command", "seconds", "words"),
    [
        ("tune", 300, "tune --wait 60 --sha"),
        ("tune", 48, "tune --wait 10 --sha"),
        ("tune", 12, "tune --wait 1 --sha"),
        ("plan", 300, "plan --sha"),
        ("verify --tier fast", 300, "verify --tier fast --sha"),
    ],
)
def test_a_tune_waits_for_another_runs_with_a_part_of_its_time(
    command: str, seconds: float, words: str, tmp_path: Path
) -> None:
    connections = Connections(KnownHosts(str(tmp_path / "known")))
    said = Said(Completed(1, b'{"version": 1}', b""))
    connections.connect = lambda node, deadline: said  # type: ignore[method-assign]
    AgentCall(connections, agent(SPEAKS, tmp_path), command, lambda one: {})(
        Node("n1", "n1"), Deadline(seconds), Traffic()
    )
    assert f"agent.pyz {words}" in said.asked[0][0]
