"""Runs on machines without a scheduler: their units, what is known of a launch that is not seen, and who may start one."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launch.backends import ssh
from launch.backends.ssh_executor import SshExecutor, SshPlan
from launch.backends.ssh_nodes import REFUSED
from launch.backends.ssh_unit import (
    LOST,
    RUNNING,
    UNKNOWN,
    Inspection,
    Launcher,
    NodeState,
    Patience,
    check_variables,
    environment_text,
    launch_code,
    launch_of_unit,
    next_step,
    parse_inspection,
    parse_states,
    start_script,
    unit_name,
)
from launch.flags import TrainFlags
from launch.request import RunRequest
from launch.runs import register_run
from launch.supervisor.executor import Superseded
from lustrain.problem import UNREACHABLE, USAGE, UserError
from node_setup.fleet.faults import LOST as CONNECTION_LOST
from node_setup.fleet.faults import Fault
from node_setup.fleet.hosts import Node, Route
from tests.launch.test_request import EC2, cluster, config, resolve
from trainer.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PEERS, EXIT_REQUEUE
from trainer.launch import journal
from trainer.launch.ranks import FORWARDED
from trainer.storage import open_store

RUN = "s3://bucket/runs/first"
UNIT = unit_name(RUN, 3)
PATIENCE = Patience(unknown_s=35, lost_s=35, running_s=180)
DONE = NodeState("ended", EXIT_DONE)


def test_unit_is_known_by_run_and_launch() -> None:
    assert launch_of_unit(RUN, f"{UNIT}.service") == 3
    assert launch_of_unit("s3://bucket/other/first", UNIT) is None
    assert launch_of_unit(f"{RUN}-1", UNIT) is None


def test_variables_stand_on_no_command_line() -> None:
    values = {"PATH": '/a "b"\\c', "TOKEN": "$HOME`x`"}
    launcher = Launcher(UNIT, "ubuntu", "python3", RUN, f"{RUN}/c", ("a", "b"), "10.0.0.1:20003", 8, 120)
    script = start_script(launcher, 1)
    assert not [value for value in values.values() if value in script]
    lines = environment_text(values, 3).splitlines()
    assert lines[1] == 'TOKEN="\\$HOME\\`x\\`"'
    assert shlex.split(lines[0]) == ['PATH=/a "b"\\c']
    assert lines[-1] == 'LUSTRAIN_ATTEMPT="3"'
    assert shlex.split(script.splitlines()[-1])[-18:-5] == [
        *("python3", "-m", "trainer.launch.node", "--nnodes", "2", "--node-rank", "1"),
        *("--master", "10.0.0.1:20003", "--roster", "a,b", "--nproc", "8"),
    ]
    with pytest.raises(UserError):
        check_variables({"PATH": "a\nTOKEN=b"})


def shown(active: str, sub: str, code: int = 0, status: int = 0) -> str:
    return f"Id={UNIT}.service\nActiveState={active}\nSubState={sub}\nExecMainCode={code}\nExecMainStatus={status}\n"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (shown("active", "running"), RUNNING),
        (shown("activating", "start"), RUNNING),
        (shown("deactivating", "stop-sigterm"), RUNNING),
        (shown("active", "exited", 1), DONE),
        (shown("failed", "failed", 1, EXIT_REQUEUE), NodeState("ended", EXIT_REQUEUE)),
        (shown("failed", "failed", 2, 9), NodeState("ended", EXIT_FAILURE)),
        # systemd counts a death by SIGTERM as a clean exit.
        (shown("active", "exited", 2, 15), NodeState("ended", EXIT_FAILURE)),
        (shown("inactive", "dead"), LOST),
    ],
)
def test_state_of_a_unit(text: str, state: NodeState) -> None:
    assert parse_states(f"{text}\n\nId=other.service\nActiveState=active\nSubState=running")[UNIT] == state


@pytest.mark.parametrize(
    ("states", "waited_s", "step"),
    [
        ([RUNNING, RUNNING], 0, "wait"),
        ([RUNNING, UNKNOWN], 1e9, "wait"),
        ([UNKNOWN, UNKNOWN], 1e9, "wait"),
        ([DONE, RUNNING], 180, "wait"),
        ([DONE, RUNNING], 181, "stop"),
        ([LOST, RUNNING], 35, "wait"),
        ([LOST, RUNNING], 36, "stop"),
        ([DONE, UNKNOWN], 35, "wait"),
        ([DONE, UNKNOWN], 36, "over"),
        ([LOST, DONE], 0, "over"),
    ],
)
def test_lost_connection_is_no_end(states: list[NodeState], waited_s: float, step: str) -> None:
    assert next_step(states, waited_s, PATIENCE) == step


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([DONE, UNKNOWN], EXIT_DONE),
        ([NodeState("ended", EXIT_PEERS), LOST], EXIT_PEERS),
        ([LOST, LOST], EXIT_PEERS),
    ],
)
def test_code_is_that_of_the_launchers_that_ended(states: list[NodeState], code: int) -> None:
    assert launch_code(states) == code


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("address=10.0.0.1\n\n", ""),
        ("systemd=no\naddress=1\n\n", "it does not run systemd"),
        ("sudo=no\naddress=1\n\n", "user ubuntu may not start a unit"),
        ("address=1\npython=No module named trainer\n\n", "p cannot load the trainer: No module named trainer"),
    ],
)
def test_inspection_says_why_a_node_is_not_ready(said: str, why: str) -> None:
    found = parse_inspection(f"{said}{shown('active', 'running')}\n", "p", "ubuntu")
    assert found.why == why
    assert list(found.running()) == [UNIT]


def request_of(tmp_path: Path, **flags: Any) -> RunRequest:
    given = TrainFlags("config.toml", name="first", **{"nodes": "2", **flags})
    return resolve(given, config(tmp_path, global_batch=64), cluster(**EC2, runs_uri="s3://bucket/runs/"))


READY = Inspection("10.0.0.1", {})
SILENT = Inspection("", {}, "unreachable: it did not answer within 10 s", "check it")
OWN = Inspection("10.0.0.1", {UNIT: RUNNING})
FOREIGN = Inspection("10.0.0.1", {unit_name("s3://bucket/runs/other", 1): RUNNING})


@pytest.mark.parametrize(
    ("found", "resume", "refused", "code"),
    [
        ([READY, READY, SILENT], False, [], 0),
        ([READY, SILENT], False, ["b: unreachable: ", "--nodes = 2: 1 of 2 nodes are ready"], UNREACHABLE),
        ([READY, FOREIGN], False, ["b: it trains another run", "--nodes = 2: 1 of 2"], USAGE),
        ([OWN, OWN], False, [f"run.uri = '{RUN}': unit {UNIT} of it still runs on a; fix: take it over"], USAGE),
        ([OWN, OWN], True, [], 0),
    ],
)
def test_too_few_nodes_or_a_second_start_are_refused(
    tmp_path: Path, found: list[Inspection], resume: bool, refused: list[str], code: int
) -> None:
    inspections = dict(zip("abc", found, strict=False))
    if not refused:
        ssh.refuse_too_few(request_of(tmp_path), inspections, resume=resume)
        return
    with pytest.raises(UserError) as error:
        ssh.refuse_too_few(request_of(tmp_path), inspections, resume=resume)
    assert error.value.exit_code == code
    assert [line.startswith(start) for line, start in zip(error.value.problems, refused, strict=True)] == [True] * len(
        refused
    )


def test_cluster_without_a_scheduler_is_served_over_ssh(tmp_path: Path) -> None:
    request = request_of(tmp_path)
    assert (request.backend, request.options.group, request.policy.ranks_per_node) == ("ssh", "train", 8)
    plan = ssh.ssh_plan(request, {"PATH": "/bin", "HF_TOKEN": "secret", "LUSTRAIN_SILENT_S": "60"})
    assert plan.variables == {"PATH": "/bin", "LUSTRAIN_SILENT_S": "60"}
    assert plan.patience.unknown_s == 90


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"spare": "1"}, "--spare"),
        ({"python": "/a b/python"}, "--python"),
        ({"image": "x/y@sha256:0"}, "--image"),
        ({"nodes": "5"}, "--nodes"),
    ],
)
def test_what_ssh_does_not_have_is_one_line(tmp_path: Path, flags: dict[str, str], path: str) -> None:
    with pytest.raises(UserError) as error:
        request_of(tmp_path, **flags)
    assert [line.path for line in error.value.problems] == [path]


def test_nodes_are_recorded_whole(tmp_path: Path) -> None:
    node = Node("a", "10.0.0.1", "train", "i-1", "p5", Route("ubuntu", 22, "~/.ssh/key", None, ("aws", "ssm")))
    submitted = {"ssh": {"nodes": [ssh.as_record(node)]}}
    assert ssh.recorded_nodes(submitted, RUN) == [node]
    with pytest.raises(UserError):
        ssh.recorded_nodes({"ssh": {"nodes": [{"name": "a"}]}}, RUN)


def test_process_that_no_longer_owns_the_run_starts_nothing(tmp_path: Path) -> None:
    request = request_of(tmp_path)
    local = RunRequest(str(tmp_path / "first"), *list(vars(request).values())[1:])
    store = register_run(local, resume=False, files={})
    ours = ssh.OwnedJournal(store)
    assert ours.read() == ([], "")
    assert ours.begin(["a"], []) == 1
    body = (tmp_path / "first" / journal.REQUEST).read_text()
    store.put(journal.REQUEST, body.replace('"host": "', '"host": "another-').encode())
    for act in (ours.read, lambda: ours.begin(["a"], [])):
        with pytest.raises(Superseded):
            act()
    assert len(journal.read(open_store(local.run))) == 1


class ScriptedNodes:
    """Answers each look at a node with the next of its texts; None is a connection that is lost. The last one stays."""

    def __init__(self, **answers: list[str | None]) -> None:
        self.answers = answers
        self.scripts: list[tuple[str, str]] = []
        self.inspections: dict[str, Inspection] = {}
        self.refuses: set[str] = set()
        """Nodes that start nothing."""

    def run(self, node: Node, script: str, stdin: str = "", *, root: bool = False, seconds: float = 0) -> str:
        if "systemd-run" in script and node.name in self.refuses:
            raise Fault(REFUSED, "Failed to start transient service unit")
        if "systemctl show" not in script:
            self.scripts.append((node.name, script))
            return ""
        texts = self.answers[node.name]
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        if text is None:
            raise Fault(CONNECTION_LOST, "the connection broke")
        return text

    def inspect(self, nodes: list[Node], python: str, variables: Mapping[str, str]) -> dict[Node, Inspection]:
        return {node: self.inspections.get(node.name, READY) for node in nodes}

    def user(self, node: Node) -> str:
        return "me"

    def each(self, nodes: list[Node], work: Callable[[Node], str]) -> dict[Node, str | Fault]:
        answers: dict[Node, str | Fault] = {}
        for node in nodes:
            try:
                answers[node] = work(node)
            except Fault as fault:
                answers[node] = fault
        return answers


class ShellNodes:
    """Runs scripts in a shell of this machine."""

    def read(self, node: Node, script: str, *, root: bool = False) -> bytes:
        return subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout

    def run(self, node: Node, script: str) -> str:
        return self.read(node, script).decode()


def test_log_of_a_node_is_read_in_pieces_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "LOG_FOLDER", str(tmp_path))
    monkeypatch.setattr(ssh, "CHUNK", 5)
    first, second = (tmp_path / f"{unit_name(RUN, launch)}.log" for launch in (1, 2))
    first.write_bytes(b"one \xff\ntwo\n")
    second.write_text("three\nfou")
    (tmp_path / f"{unit_name('s3://bucket/other/first', 1)}.log").write_text("of another run\n")
    whole, part = ssh.NodeLog(A, RUN, None), ssh.NodeLog(A, RUN, 2)
    nodes: Any = ShellNodes()
    lines = [(line.launch, line.text) for line in whole.new_lines(nodes, last=False)]
    assert lines == [(1, "one \ufffd"), (1, "two"), (2, "three")]
    second.write_text("three\nfour")
    assert [line.text for line in whole.new_lines(nodes, last=True)] == ["four"]
    assert [line.text for line in part.new_lines(nodes, last=True)] == ["three", "four"]
    first.unlink()
    second.unlink()
    assert list(ssh.NodeLog(A, RUN, None).new_lines(nodes, last=True)) == []


A, B = Node("a", "10.0.0.1"), Node("b", "10.0.0.2")
UP, ENDED_75 = shown("active", "running"), shown("failed", "failed", 1, EXIT_PEERS)


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SshExecutor]]:
    """Makes executors whose clock moves by ten seconds a look."""
    before = {number: signal.getsignal(number) for number in FORWARDED}

    def make(nodes: ScriptedNodes, listed: list[Node], log: list[str], run: str = RUN) -> SshExecutor:
        now = [0.0]

        def sleep(self: SshExecutor, seconds: float) -> None:
            now[0] += 10
            assert now[0] < 10_000, "the launch does not end"

        monkeypatch.setattr(SshExecutor, "sleep", sleep)
        variables: Mapping[str, str] = {}
        plan = SshPlan(run, f"{run}/c", "python3", 1, 20_000, variables, PATIENCE, 120)
        return SshExecutor(plan, nodes, lambda: listed, lambda used: None, log.append, lambda: now[0])  # type: ignore[arg-type]

    yield make
    for number, handler in before.items():
        signal.signal(number, handler)


def test_launch_that_is_not_seen_for_an_hour_goes_on(following: Callable[..., SshExecutor]) -> None:
    done = shown("active", "exited", 1)
    nodes, log = ScriptedNodes(a=[*[None] * 360, UP, done], b=[*[None] * 360, UP, UP, done]), list[str]()
    assert following(nodes, [A, B], log).follow(3, [A, B]) == EXIT_DONE
    assert log == ["no node answers: launch 3 may go on there", "nodes answer again"]
    assert not [script for _, script in nodes.scripts if "systemctl kill" in script]


@pytest.mark.parametrize(
    ("b", "listed"), [([UP, None], [A, B]), ([UP, shown("inactive", "dead")], [A, B]), ([UP, None], [A])]
)
def test_launch_ends_with_its_peers_code_where_a_node_is_lost(
    following: Callable[..., SshExecutor], b: list[str | None], listed: list[Node]
) -> None:
    nodes = ScriptedNodes(a=[UP, UP, ENDED_75], b=b)
    assert following(nodes, listed, []).follow(3, [A, B]) == EXIT_PEERS


def test_instances_that_are_all_terminated_end_the_launch(following: Callable[..., SshExecutor]) -> None:
    assert following(ScriptedNodes(a=[UP, None], b=[UP, None]), [], []).follow(3, [A, B]) == EXIT_PEERS


def test_peer_that_waits_for_a_rebooted_node_is_stopped(following: Callable[..., SshExecutor]) -> None:
    nodes = ScriptedNodes(a=[*[UP] * 8, ENDED_75], b=[shown("inactive", "dead")])
    assert following(nodes, [A, B], []).follow(3, [A, B]) == EXIT_PEERS
    assert ("a", f"systemctl kill --kill-who=main --signal=TERM {UNIT}.service") in nodes.scripts


def test_signal_goes_to_launchers_once_or_says_that_none_answers(following: Callable[..., SshExecutor]) -> None:
    nodes = ScriptedNodes(a=[UP, UP, shown("failed", "failed", 1, EXIT_REQUEUE)])
    executor = following(nodes, [A], [])
    signal.raise_signal(signal.SIGTERM)
    assert executor.follow(3, [A]) == EXIT_REQUEUE
    assert len([script for _, script in nodes.scripts if "--signal=TERM" in script]) == 1
    silent = following(ScriptedNodes(a=[None]), [A], [])
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(UserError) as error:
        silent.follow(3, [A])
    assert error.value.exit_code == UNREACHABLE


def test_node_that_starts_nothing_is_blamed_and_its_peer_stopped(
    following: Callable[..., SshExecutor], tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "first"))
    number = journal.begin(store, ["a", "b"], "test")
    unit = unit_name(store.uri, number)
    nodes = ScriptedNodes(a=[text.replace(UNIT, unit) for text in (UP, ENDED_75)], b=[""])
    nodes.refuses = {"b"}
    executor = following(nodes, [A, B], [], store.uri)
    assert executor.healthy_nodes() == ["a", "b"]
    code = executor.run_launch(number, ["a", "b"])
    record = journal.finish(store, number, code)
    assert (record["code"], record["blamed"]) == (EXIT_PEERS, ["b"])
    assert "Failed to start transient service unit" in record["said"]
    assert ("a", f"systemctl kill --kill-who=main --signal=TERM {unit}.service") in nodes.scripts
    (start,) = [script for name, script in nodes.scripts if name == "a" and "systemd-run" in script]
    assert "--master 10.0.0.1:20001 --roster a,b" in start


def test_nodes_that_are_silent_or_busy_are_left_out(following: Callable[..., SshExecutor]) -> None:
    nodes, log = ScriptedNodes(), list[str]()
    c, d = Node("c", "10.0.0.3"), Node("d", "10.0.0.4")
    nodes.inspections = {"b": SILENT, "c": FOREIGN, "d": OWN}
    executor = following(nodes, [A, B, c, d], log)
    assert executor.healthy_nodes() == executor.healthy_nodes() == ["a"]
    assert [line.partition(" is left out: ")[0] for line in log] == ["b", "c", "d"]
    # What is left of an earlier launch of this run is ended, and nothing of another run's.
    assert {script for _, script in nodes.scripts} == {f"systemctl kill --kill-who=main --signal=TERM {UNIT}.service"}
