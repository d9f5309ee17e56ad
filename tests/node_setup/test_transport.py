"""Connections to a real sshd on loopback: every way in which they fail is one line, in time, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fabric import Config

from lustrain.problem import UserError
from node_setup.fleet import transport
from node_setup.fleet.faults import HOST_KEY, LOGIN, LOST, STOPPED, TIMEOUT, UNREACHABLE, Fault
from node_setup.fleet.hosts import Node, Route
from node_setup.fleet.inventory import Source, inventory
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.proxy import Proxy
from node_setup.fleet.transport import Connections, Deadline, Limits
from tests.node_setup.local_sshd import PATIENT, Sshd, make_key
from tests.node_setup.meanwhile import Sleeper, once
from tests.ports import own_port
from tests.processes import alive, wait_until

pytestmark = pytest.mark.slow

QUICK = Limits(connect_s=2, login_s=2, channel_s=2, retries=0)
"""Limits for what never answers."""
RELAY = """
import os, socket, sys, threading
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def copy():
    while piece := os.read(0, 65536):
        peer.sendall(piece)
    peer.shutdown(socket.SHUT_WR)
threading.Thread(target=copy, daemon=True).start()
while piece := peer.recv(65536):
    os.write(1, piece)
"""
"""Stands for `aws ssm start-session`: its input and output are the connection. It leaves out the session's protocol."""


@pytest.fixture
def quick(connections: Connections) -> Iterator[Connections]:
    made = Connections(connections.known_hosts, QUICK)
    yield made
    made.stop()


def refused(connections: Connections, node: Node, seconds: float = 300) -> Fault:
    with pytest.raises(Fault) as caught:
        connections.close(connections.connect(node, Deadline(seconds)))
    return caught.value


def proxied(machine: Sshd, *command: str) -> Node:
    return replace(machine.node, route=replace(machine.node.route, proxy=command))


def zombies() -> list[str]:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in children if not alive(int(pid))]


def test_input_goes_there_and_output_status_and_errors_come_back(machine: Sshd, connections: Connections) -> None:
    session = connections.connect(machine.node, Deadline(300))
    big = bytes(range(256)) * 4096
    answer = session.execute("cat; echo trouble >&2; exit 3", big, 300)
    assert (answer.status, answer.out, answer.err) == (3, big, b"trouble\n")
    assert session.execute("echo again", b"", 300).out == b"again\n"


def test_much_on_both_outputs_is_no_deadlock(machine: Sshd, connections: Connections) -> None:
    session = connections.connect(machine.node, Deadline(300))
    answer = session.execute("head -c 4000000 /dev/zero >&2; head -c 4000000 /dev/zero", b"", 300)
    assert (len(answer.out), len(answer.err)) == (4_000_000, 4_000_000)


def test_command_that_ignores_its_input_returns_its_status(machine: Sshd, connections: Connections) -> None:
    session = connections.connect(machine.node, Deadline(300))
    assert session.execute("exit 96", bytes(6_000_000), 300).status == 96


def test_what_a_command_leaves_running_does_not_hold_it_up(
    machine: Sshd, connections: Connections, sleeper: Sleeper
) -> None:
    session = connections.connect(machine.node, Deadline(300))
    assert session.execute(f"({sleeper.command}) & echo done", b"", 300).out == b"done\n"


def test_a_hanging_command_ends_in_time_here_and_there(
    machine: Sshd, connections: Connections, sleeper: Sleeper
) -> None:
    session = connections.connect(machine.node, Deadline(300))
    assert session.execute("exec timeout 1 sleep 3600", b"", 300).status == 124
    with pytest.raises(Fault) as caught:
        session.execute(sleeper.command, b"", 1)
    assert caught.value.kind == TIMEOUT


def test_a_command_that_a_signal_ends_has_status_minus_one(machine: Sshd, connections: Connections) -> None:
    assert connections.connect(machine.node, Deadline(300)).execute("kill -9 $$", b"", 300).status == -1


def test_a_connection_that_breaks_is_lost_and_no_timeout(
    machine: Sshd, connections: Connections, sleeper: Sleeper
) -> None:
    session = connections.connect(machine.node, Deadline(300))
    once(sleeper.begun, machine.cut)
    with pytest.raises(Fault) as caught:
        session.execute(sleeper.command, b"", 300)
    assert caught.value.kind == LOST


def test_stopping_ends_what_waits(machine: Sshd, connections: Connections, sleeper: Sleeper) -> None:
    session = connections.connect(machine.node, Deadline(300))
    once(sleeper.begun, connections.stop)
    with pytest.raises(Fault) as caught:
        session.execute(sleeper.command, b"", 300)
    assert caught.value.kind == STOPPED
    assert refused(connections, machine.node).kind == STOPPED


def test_a_new_host_key_is_recorded_and_a_changed_one_refused(own_machine: Sshd, tmp_path: Path) -> None:
    own_machine.start()
    file = tmp_path / "new" / "known"
    connections = Connections(KnownHosts(str(file)), PATIENT)
    connections.close(connections.connect(own_machine.node, Deadline(300)))
    assert file.read_text().startswith(f"[127.0.0.1]:{own_machine.port} ssh-ed25519 ")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    strict = Connections(KnownHosts(str(file), strict=True), PATIENT)
    strict.close(strict.connect(own_machine.node, Deadline(300)))
    own_machine.new_host_key()
    fault = refused(Connections(KnownHosts(str(file)), PATIENT), own_machine.node)
    assert (fault.kind, "has changed" in fault.why) == (HOST_KEY, True)
    assert f"ssh-keygen -R '[127.0.0.1]:{own_machine.port}' -f {file}" in fault.fix
    assert len(file.read_text().splitlines()) == 1


def test_strict_host_keys_refuse_an_unknown_machine(machine: Sshd, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        KnownHosts(str(tmp_path / "none"), strict=True)
    (tmp_path / "empty").touch()
    fault = refused(Connections(KnownHosts(str(tmp_path / "empty"), strict=True), PATIENT), machine.node)
    assert (fault.kind, "SHA256:" in fault.why) == (HOST_KEY, True)
    assert (tmp_path / "empty").read_text() == ""


def test_replaced_instance_at_an_old_address_is_a_new_machine(own_machine: Sshd, tmp_path: Path) -> None:
    own_machine.start()
    connections = Connections(KnownHosts(str(tmp_path / "known")), PATIENT)
    first, second = (replace(own_machine.node, instance_id=name) for name in ("i-1", "i-2"))
    connections.close(connections.connect(first, Deadline(300)))
    own_machine.new_host_key()
    connections.close(connections.connect(second, Deadline(300)))
    assert refused(connections, first).kind == HOST_KEY
    assert [line.split()[0] for line in (tmp_path / "known").read_text().splitlines()] == ["i-1", "i-2"]


def test_a_wrong_key_is_told_as_such(machine: Sshd, connections: Connections, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    for key, said in ((other, "none of our keys"), (tmp_path / "missing", "No such file"), (tmp_path, "s a directory")):
        fault = refused(connections, replace(machine.node, route=replace(machine.node.route, key=str(key))))
        assert (fault.kind, said in fault.why) == (LOGIN, True), fault


def test_a_locked_key_asks_for_nothing(machine: Sshd, connections: Connections, tmp_path: Path) -> None:
    key = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(key)], check=True)
    fault = refused(connections, replace(machine.node, route=replace(machine.node.route, key=str(key))))
    assert (fault.kind, "passphrase" in fault.why) == (LOGIN, True)


def test_nobody_listening_is_unreachable_and_tried_again(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node("gone", "127.0.0.1", route=Route("root", own_port()))
    fault = refused(connections, node)
    assert (fault.kind, fault.passing, "connection" in fault.why) == (UNREACHABLE, True, True)
    paused: list[int] = []

    def pause(tried: int, *limits: float) -> float:
        paused.append(tried)
        return 0.01

    monkeypatch.setattr(transport, "pause_s", pause)
    assert refused(Connections(connections.known_hosts, replace(PATIENT, retries=2)), node).kind == UNREACHABLE
    assert paused == [1, 2, 3]


def test_a_machine_that_comes_up_in_between_is_reached(
    own_machine: Sshd, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def pause(tried: int, *limits: float) -> float:
        tries.append(tried)
        if tried == 3:
            own_machine.start()
        return 0.01

    monkeypatch.setattr(transport, "pause_s", pause)
    again = Connections(connections.known_hosts, replace(PATIENT, retries=5))
    again.close(again.connect(own_machine.node, Deadline(300)))
    assert tries == [1, 2, 3]


def test_silent_machine_costs_the_time_limit(quick: Connections) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        node = Node("mute", "127.0.0.1", route=Route("root", silent.getsockname()[1]))
        fault = refused(quick, node)
        assert (fault.kind, "did not answer" in fault.why) == (UNREACHABLE, True), fault


def test_a_program_is_the_connection_and_is_gone_afterwards(
    machine: Sshd, connections: Connections, tmp_path: Path
) -> None:
    node = proxied(machine, sys.executable, "-c", RELAY, str(machine.port))
    session = connections.connect(replace(node, address="i-0123", instance_id="i-0123"), Deadline(300))
    answer = session.execute("cat", bytes(3_000_000), 300)
    assert len(answer.out) == 3_000_000
    pid = session.proxy._process.pid  # type: ignore[attr-defined]
    assert alive(pid)
    connections.close(session)
    assert not alive(pid)
    assert zombies() == []


def test_a_program_that_hangs_is_ended_with_all_it_started(
    machine: Sshd, quick: Connections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "pids"
    script = f"trap '' TERM; (trap '' TERM; echo $$ >>{mark}; sleep 3600) & echo $! >>{mark}; wait"

    class Begun(Proxy):
        def __init__(self, command: Sequence[str]) -> None:
            super().__init__(command)
            wait_until(lambda: mark.exists() and len(mark.read_text().splitlines()) == 2)

    monkeypatch.setattr(transport, "Proxy", Begun)
    assert refused(quick, proxied(machine, "sh", "-c", script)).kind == UNREACHABLE
    # SIGKILL was sent to all of them; the one that is not our child dies when the kernel comes to it.
    wait_until(lambda: not any(alive(int(pid)) for pid in mark.read_text().split()))
    assert zombies() == []


def test_what_the_program_complains_of_is_the_reason(machine: Sshd, connections: Connections) -> None:
    said = "An error occurred (TargetNotConnected) when calling StartSession: i-1 is not connected."
    fault = refused(connections, proxied(machine, "sh", "-c", f"echo '{said}' >&2; exit 254"))
    assert (fault.kind, fault.why) == (UNREACHABLE, f"sh: {said}")
    missing = refused(connections, proxied(machine, "no-such-program"))
    assert (missing.passing, missing.why) == (False, "no-such-program is not on PATH")


def test_nodes_behind_a_jump_host_share_its_connection(machine: Sshd, tmp_path: Path, connections: Connections) -> None:
    jump = f"{machine.node.route.user}@127.0.0.1:{machine.port}"
    behind = replace(machine.node, route=replace(machine.node.route, jump=jump))
    before = len(machine.sessions())
    sessions = [connections.connect(replace(behind, name=f"n{i}"), Deadline(300)) for i in range(3)]
    assert [one.execute("echo there", b"", 300).out for one in sessions] == [b"there\n"] * 3
    assert len(machine.sessions()) - before == 4
    gone = refused(connections, replace(behind, route=replace(behind.route, jump=f"127.0.0.1:{own_port()}")))
    assert (gone.kind, gone.why.startswith("jump host 127.0.0.1:")) == (UNREACHABLE, True)
    nobody = replace(behind, route=replace(behind.route, port=own_port()))
    assert refused(connections, nobody).kind == UNREACHABLE


def test_no_thread_and_no_socket_stays_after_a_failed_connection(machine: Sshd, quick: Connections) -> None:
    def sockets() -> int:
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        return count

    before = sockets()
    for _ in range(5):
        refused(quick, replace(machine.node, route=replace(machine.node.route, user="nobody-of-that-name")))
        refused(quick, proxied(machine, "sleep", "3600"), seconds=1)
    wait_until(lambda: sockets() == before)


AWS = """#!/bin/sh
echo "$@" >>"$0.log"
exec {python} -c '{relay}' {port}
"""
"""Stands for the AWS CLI with the session-manager plugin: a session is a connection to one sshd. It asks no AWS."""


def test_a_node_behind_ssm_is_reached_by_its_target(
    machine: Sshd, connections: Connections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "aws"
    program.write_text(AWS.format(python=sys.executable, relay=RELAY.replace("'", '"'), port=machine.port))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    described = {
        "name": "c", "backend": "hyperpod-slurm", "region": "us-west-2", "nodes": {"hyperpod_cluster": "pod"},
        "reach": {"via": "ssm", "user": machine.node.route.user, "key": str(machine.key),
                  "ssm_target": "sagemaker-cluster:abc_{group}-{instance_id}"},
        "groups": {"train": {"type": "p5.48xlarge", "count": 1}}, "runs_uri": "s3://b/", "capacity": {"mode": "spot"},
    }  # fmt: skip
    (tmp_path / "cluster.json").write_text(json.dumps(described))
    found = inventory(Source(cluster=str(tmp_path / "cluster.json")), lambda service: OneNode())
    session = connections.connect(found.nodes[0], Deadline(300))
    assert session.execute("echo there", b"", 300).out == b"there\n"
    connections.close(session)
    assert (tmp_path / "aws.log").read_text() == (
        "ssm start-session --target sagemaker-cluster:abc_train-i-7 --document-name AWS-StartSSHSession "
        "--parameters portNumber=22 --region us-west-2\n"
    )
    assert (tmp_path / "known").read_text().startswith("i-7 ssh-ed25519 ")
    assert zombies() == []


@pytest.mark.parametrize("filler", [0, 3000])
@pytest.mark.parametrize(
    ("endpoint", "is_ours"),
    [
        ("http://127.0.0.1:4566", True),
        ("http://localhost:4566", True),
        ("https://vpce-1.ssm.us-west-2.vpce.amazonaws.com", False),
    ],
)
def test_printed_page_is_hidden_and_embedded_aws_has_no_nodes(
    machine: Sshd,
    connections: Connections,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    is_ours: bool,
    filler: int,
) -> None:
    program = tmp_path / "aws"
    page = f"<!doctype html>\n<html lang=en>{' ' * filler}\n<p>The server encountered an internal error</p>\n</html>"
    program.write_text(f"#!/bin/sh\necho '{page}' >&2\nexit 254\n")
    program.chmod(0o755)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    fault = refused(connections, proxied(machine, str(program), "ssm", "start-session"))
    assert (fault.kind, fault.why) == (UNREACHABLE, f"{program}: an HTML page came in place of an answer")
    assert ("python -m rehearsal.lab" in fault.fix) is is_ours


class OneNode:
    """Stands for SageMaker, with one running node."""

    def get_paginator(self, name: str) -> OneNode:
        return self

    def paginate(self, **request: str) -> list[dict[str, object]]:
        node = {"InstanceGroupName": "train", "InstanceId": "i-7", "InstanceType": "ml.p5.48xlarge"}
        return [{"ClusterNodeSummaries": [node | {"InstanceStatus": {"Status": "Running"}}]}]


def test_the_users_ssh_configuration_holds_but_for_host_keys(machine: Sshd, tmp_path: Path) -> None:
    own = {"HostName": "127.0.0.1", "Port": machine.port, "User": machine.node.route.user, "IdentityFile": machine.key}
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)
    gate = f"{machine.node.route.user}@127.0.0.1:{machine.port}"
    ways_in = {
        "plain": {},
        "relayed": {"ProxyCommand": f"{sys.executable} {relay} %p"},
        "behind": {"ProxyJump": gate},
        "far": {"ProxyJump": f"{gate},{gate}"},
    }
    text = ""
    for name, more in ways_in.items():
        text += f"Host {name}\n" + "".join(f"  {key} {value}\n" for key, value in {**own, **more}.items())
    text += f"Host 127.0.0.1\n  IdentityFile {machine.key}\n"
    (tmp_path / "config").write_text(text)
    known = tmp_path / "known"
    made = Connections(KnownHosts(str(known)), PATIENT, Config(runtime_ssh_path=str(tmp_path / "config")))
    for name in ways_in:
        session = made.connect(Node(name, name), Deadline(300))
        assert session.execute("echo there", b"", 300).out == b"there\n", name
        made.close(session)
    made.stop()
    assert sorted({line.split()[0] for line in known.read_text().splitlines()}) == [
        f"[127.0.0.1]:{machine.port}", "behind", "far", "plain", "relayed",
    ]  # fmt: skip
    wrong = known.read_text().replace("plain ssh", "x ssh") + f"plain ssh-ed25519 {other_key(tmp_path)}\n"
    known.write_text(wrong)
    changed = Connections(KnownHosts(str(known)), PATIENT, Config(runtime_ssh_path=str(tmp_path / "config")))
    assert refused(changed, Node("plain", "plain")).kind == HOST_KEY


def other_key(folder: Path) -> str:
    return make_key(folder / "another").with_suffix(".pub").read_text().split()[1]
