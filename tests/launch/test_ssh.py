"""Runs on machines without a scheduler: their units, what is known of a launch that is not seen, and who may start one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.backends import (
    local,
    ssh,
    ssh_executor,
    ssh_handover,
    ssh_nodes,
    ssh_supervisor,
    ssh_unit,
)
from launch.backends.ssh_executor import SshExecutor
from launch.backends.ssh_nodes import REFUSED, ended_nodes
from launch.backends.ssh_unit import (
    LOST,
    RUNNING,
    STARTING,
    UNKNOWN,
    Inspection,
    Launcher,
    NodeState,
    Patience,
    Runner,
    SshPlan,
    check_variables,
    environment_text,
    launch_code,
    launch_of_unit,
    next_step,
    parse_inspection,
    parse_states,
    remove_script,
    start_script,
    unit_name,
)
from launch.container import Container, Engine
from launch.flags import TrainFlags
from launch.request import RunRequest
from launch.runs import register_run
from launch.supervisor.executor import Superseded, TemporarilyUnavailable
from launch.supervisor.policy import ExtraNodes, Stop
from lustrain.problem import UNREACHABLE, USAGE, UserError
from node_setup.fleet.faults import LOST as CONNECTION_LOST
from node_setup.fleet.faults import STOPPED, TIMEOUT, Fault
from node_setup.fleet.hosts import THIS_MACHINE, Node, Route
from tests.fork_server import PATIENCE_S
from tests.launch.test_logs import looks
from tests.launch.test_request import EC2, cluster, config, resolve
from trainer.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PEERS, EXIT_REQUEUE
from trainer.metrics.runlog import RunLog
from trainer.run import journal
from trainer.storage import ObjectStore, StorageError, open_store

RUN = "s3://bucket/runs/first"
UNIT = unit_name(RUN, 3)
PATIENCE = Patience(unknown_s=35, lost_s=35, running_s=180)
DONE = NodeState("ended", EXIT_DONE)


def test_unit_is_known_by_run_and_launch() -> None:
    assert launch_of_unit(RUN, f"{UNIT}.service") == 3
    assert launch_of_unit("s3://bucket/other/first", UNIT) is None
    assert launch_of_unit(f"{RUN}-1", UNIT) is None


def launcher_of(
    nodes: tuple[str, ...], variables: Mapping[str, str], launch: int, container: Container | None = None
) -> Launcher:
    plan = SshPlan(RUN, f"{RUN}/c", "python3", 8, 20_000, variables, PATIENCE, 120, container)
    return plan.launcher(launch, nodes, "10.0.0.1:20003")


def test_variables_stand_on_no_command_line() -> None:
    values = {"PATH": '/a "b"\\c', "TOKEN": "$HOME`x`"}
    launcher = launcher_of(("a", "b"), values, 3)
    script = start_script(launcher, 1, Runner("ubuntu"))
    assert not [value for value in values.values() if value in script]
    lines = environment_text(values, 3).splitlines()
    assert lines[1] == 'TOKEN="\\$HOME\\`x\\`"'
    assert shlex.split(lines[0]) == ['PATH=/a "b"\\c']
    assert lines[-1] == 'LUSTRAIN_ATTEMPT="3"'
    assert shlex.split(script.splitlines()[-2])[-20:-5] == [
        *("python3", "-m", "trainer.node.launcher", "--nnodes", "2", "--node-rank", "1"),
        *("--master", "10.0.0.1:20003", "--roster", "a,b", "--nproc", "8", "--output-limit", "209715200"),
    ]
    with pytest.raises(UserError):
        check_variables({"PATH": "a\nTOKEN=b"})


def test_node_keeps_the_newest_logs_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_unit, "LOG_FOLDER", str(tmp_path))
    monkeypatch.setattr(ssh_unit, "KEPT_LOGS", 3)
    names = [f"{unit_name(run, launch)}.log" for launch in (9, 10) for run in (RUN, f"{RUN}-b")]
    for age, name in enumerate([*names, "journal.log"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    subprocess.run(["sh", "-c", ssh_unit.prune_script()], check=True)
    # There is room for the one that starts now, and what is not ours stays.
    assert {file.name for file in tmp_path.iterdir()} == {*names[:2], "journal.log"}


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


def test_unit_of_a_container_is_roots_and_leaves_none() -> None:
    launcher = launcher_of(("a",), {"AWS_REGION": "x"}, 3, Container("example.org/a/b@sha256:0", ("/fsx",)))
    runner = Runner("ubuntu", Engine("docker", "/usr/bin/docker", "1000:1000", ("1000", "44")))
    words = launcher.command(0, runner)
    unit, program = words[: words.index("--")], words[words.index("--") + 1 :]
    assert f"--property=ExecStopPost=-/usr/bin/docker rm --force {UNIT}" in unit
    assert not [word for word in unit if word.startswith("--uid")]
    assert program[:3] == ["/usr/bin/docker", "run", "--rm"]
    assert {f"--name={UNIT}", "--user=1000:1000", "--env=AWS_REGION", "--env=LUSTRAIN_ATTEMPT"} <= set(program)
    assert program[program.index("example.org/a/b@sha256:0") :][1:4] == ["python3", "-m", "trainer.node.launcher"]
    assert not [word for word in program if ssh_unit.FORBIDDEN_CHARACTER.search(word)]
    removal = f" lustrain /usr/bin/docker {UNIT[: -len('000003')]} true\n"
    assert removal in start_script(launcher, 0, runner).partition("systemd-run")[0]


@pytest.mark.parametrize(
    ("states", "waited_s", "step"),
    [
        ([RUNNING, RUNNING], 0, "wait"),
        ([RUNNING, UNKNOWN], 1e9, "wait"),
        ([UNKNOWN, UNKNOWN], 1e9, "wait"),
        ([DONE, RUNNING], 180, "wait"),
        ([DONE, STARTING], 180, "wait"),
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
LATER = Inspection("10.0.0.1", {unit_name(RUN, 4): RUNNING})
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


@pytest.mark.parametrize(("mode", "lines"), [("spot", 2), ("owned", 1)])
def test_end_of_a_run_says_that_rented_nodes_stay_on(tmp_path: Path, mode: str, lines: int) -> None:
    where = cluster(**EC2, capacity={"mode": mode})
    given = TrainFlags("config.toml", name="first", nodes="2")
    request = resolve(given, config(tmp_path, global_batch=64), where)
    submission = ssh.submission_of(request, Stop(EXIT_PEERS, "1 of 2 nodes are there"))
    assert (len(submission.lines), submission.data["nodes_stay_rented"]) == (lines, lines == 2)
    assert submission.code == EXIT_PEERS


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


@pytest.fixture
def registered(tmp_path: Path) -> ObjectStore:
    """The store of a run that this process has requested."""
    request = request_of(tmp_path)
    local = RunRequest(str(tmp_path / "first"), *list(vars(request).values())[1:])
    return register_run(local, resume=False, files={}).store


def request_again(store: ObjectStore, key: str) -> None:
    """Put a request that differs from ours."""
    body = json.loads(store.read(journal.REQUEST)[0])
    changed = body[key] + 1 if key == "asked" else f"another-{body[key]}"
    store.put(journal.REQUEST, json.dumps(body | {key: changed}).encode())


# Two containers may share a host's name and a process's number.
@pytest.mark.parametrize("key", ["host", "pid", "asked"])
def test_process_that_no_longer_owns_the_run_starts_nothing(registered: ObjectStore, key: str) -> None:
    ours = local.OwnedJournal(registered, lambda nodes: None)
    assert ours.read() == ([], "")
    assert ours.begin(["a"], []) == 1
    request_again(registered, key)
    for act in (ours.read, lambda: ours.begin(["a"], [])):
        with pytest.raises(Superseded):
            act()
    assert len(journal.read(registered)) == 1


def test_request_while_a_launch_begins_keeps_it_from_starting(registered: ObjectStore) -> None:
    ours = local.OwnedJournal(registered, lambda nodes: request_again(registered, "host"))
    with pytest.raises(Superseded):
        ours.begin(["a"], [])


def test_launch_whose_nodes_cannot_be_recorded_does_not_begin(registered: ObjectStore) -> None:
    def fail(nodes: Sequence[str]) -> None:
        raise StorageError("the store is full")

    with pytest.raises(TemporarilyUnavailable):
        local.OwnedJournal(registered, fail).begin(["a"], [])
    assert journal.read(registered) == []


A, B, C = Node("a", "10.0.0.1"), Node("b", "10.0.0.2"), Node("c", "10.0.0.3")
I1, I2 = Node("a", "10.0.0.1", instance_id="i-1"), Node("a", "10.0.0.1", instance_id="i-2")
OTHER_ROUTE, RENAMED = replace(I1, route=Route("bob", key="~/.ssh/bob"), group="b"), replace(I1, name="i-1")
MACHINES = {"backend": "machines", "slurm": None, "nodes": {"addresses": ["a", "b"]}}


@pytest.mark.parametrize(
    ("recorded", "listed", "found"),
    [
        ([I1], [OTHER_ROUTE], OTHER_ROUTE),
        ([I1], [RENAMED], RENAMED),
        # Its name and address are its successor's by now.
        ([I1], [I2], I1),
        ([I1], [], I1),
        ([], [I1], I1),
        ([B], [A], A),
        ([B], [], None),
    ],
)
def test_launch_is_looked_for_by_the_route_of_today(recorded: list[Node], listed: list[Node], found: Node) -> None:
    on = cluster(**EC2)
    submitted = {"ssh": {"nodes": [ssh.as_record(node) for node in recorded], **ssh.place_of(on)}}
    if found is None:
        with pytest.raises(UserError) as error:
            ssh.nodes_of_launch(["a"], submitted, RUN, on, listed)
        assert [problem.path for problem in error.value.problems] == ["--resume"]  # type: ignore[attr-defined]
    else:
        assert ssh.nodes_of_launch(["a"], submitted, RUN, on, listed) == [found]


@pytest.mark.parametrize("other", [EC2 | {"nodes": {"auto_scaling_groups": ["b"]}}, EC2 | {"region": "eu-west-1"}])
def test_cluster_elsewhere_does_not_tell_that_an_instance_ended(other: dict[str, Any]) -> None:
    submitted = {"ssh": {"nodes": [ssh.as_record(I1)], **ssh.place_of(cluster(**EC2))}}
    with pytest.raises(UserError):
        ssh.nodes_of_launch(["a"], submitted, RUN, cluster(**other), [])


def test_only_what_ec2_calls_ended_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_nodes, "ended_instances", lambda cluster, ids: {"i-1"} & set(ids))
    assert ended_nodes(cluster(**EC2), [I1, I2, A]) == {I1}
    assert ended_nodes(cluster(**MACHINES), [I1, A]) == set()


class ScriptedNodes:
    """Answers each look at a node with the next of its texts; None is a connection that is lost. The last one stays."""

    def __init__(self, **answers: list[str | None]) -> None:
        self.answers = answers
        self.scripts: list[tuple[str, str]] = []
        self.inspections: dict[str, Inspection] = {}
        self.refuses: set[str] = set()
        """Nodes that start nothing."""
        self.silent_starts: set[str] = set()
        """Nodes whose answer to a start is lost."""

    def close(self) -> None:
        pass

    def run(self, node: Node, script: str, stdin: str = "", *, root: bool = False, seconds: float = 0) -> str:
        if "systemd-run" in script and node.name in self.silent_starts:
            raise Fault(TIMEOUT, "it did not answer in time")
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

    def inspect(self, nodes: list[Node], plan: SshPlan, **limits: float) -> dict[Node, Inspection]:
        return {node: self.inspections.get(node.name, READY) for node in nodes}

    def each(self, nodes: list[Node], work: Callable[[Node], str]) -> dict[Node, str | Fault]:
        answers: dict[Node, str | Fault] = {}
        for node in nodes:
            try:
                answers[node] = work(node)
            except Fault as fault:
                answers[node] = fault
        return answers


class ShellNodes:
    """Runs scripts in shells of this machine, those of several nodes side by side: each waits for the others' first one."""

    def __init__(self, together: int = 1) -> None:
        self._first = threading.Barrier(together)
        self.silent: set[str] = set()

    def each(self, nodes: Iterable[Node], work: Callable[[Node], Any]) -> dict[Node, Any]:
        def safely(node: Node) -> Any:
            try:
                return work(node)
            except Fault as fault:
                return fault

        listed = list(nodes)
        with ThreadPoolExecutor(len(listed)) as pool:
            return dict(zip(listed, pool.map(safely, listed), strict=True))

    def read(self, node: Node, script: str, *, root: bool = False) -> bytes:
        return subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout

    def run(self, node: Node, script: str) -> str:
        self._first.wait(60)
        if node.name in self.silent:
            raise Fault(CONNECTION_LOST, "the connection broke")
        return self.read(node, script).decode()


def test_log_of_a_node_is_read_in_pieces_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "LOG_FOLDER", str(tmp_path))
    monkeypatch.setattr(ssh, "CHUNK", 5)
    first, second = (tmp_path / f"{unit_name(RUN, launch)}.log" for launch in (1, 2))
    first.write_bytes(b"one \xff\ntwo\n")
    second.write_text("three\nfou")
    (tmp_path / f"{unit_name('s3://bucket/other/first', 1)}.log").write_text("of another run\n")
    nodes: Any = ShellNodes()

    def read(launch: int | None, more: Callable[[], bool]) -> Iterator[tuple[int | None, str]]:
        return ((line.launch, line.text) for line in ssh.read_node_logs(nodes, [A], RUN, launch, more))

    followed = read(None, looks(lambda: None, lambda: second.write_text("three\nfour")))
    assert list(followed) == [(1, "one \ufffd"), (1, "two"), (2, "three"), (2, "four")]
    assert list(read(2, looks())) == [(2, "three"), (2, "four")]
    first.unlink()
    second.unlink()
    assert list(read(None, looks())) == []


def test_logs_are_read_side_by_side_and_a_silent_node_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ssh, "LOG_FOLDER", str(tmp_path))
    (tmp_path / f"{unit_name(RUN, 1)}.log").write_text("one\n")
    nodes: Any = ShellNodes(together=2)
    nodes.silent = {"b"}
    lines = ssh.read_node_logs(nodes, [A, B], RUN, None, looks(lambda: None, nodes.silent.clear))
    assert [line.source for line in lines] == ["a", "b"]
    assert capsys.readouterr().err.count("b: its log cannot be read") == 1


UP, ENDED_75 = shown("active", "running"), shown("failed", "failed", 1, EXIT_PEERS)


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SshExecutor]:
    """Makes executors whose clock moves by ten seconds a look."""

    def make(
        nodes: ScriptedNodes,
        listed: list[Node],
        log: list[str],
        run: str = RUN,
        container: Container | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> SshExecutor:
        now = [0.0]

        def sleep(self: SshExecutor, seconds: float) -> None:
            now[0] += 10
            assert now[0] < 10_000, "the launch does not end"

        monkeypatch.setattr(SshExecutor, "sleep", sleep)
        variables: Mapping[str, str] = {}
        plan = SshPlan(run, f"{run}/c", "python3", 1, 20_000, variables, PATIENCE, 120, container)
        return SshExecutor(
            plan,
            nodes,  # type: ignore[arg-type]
            lambda: listed,
            lambda silent: set(silent) - set(listed),
            log.append,
            lambda: now[0],
            stopped=stopped,
        )

    return make


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


def test_signal_goes_to_launchers_or_says_that_none_answers(following: Callable[..., SshExecutor]) -> None:
    # A container that was about to start has not got it, so it is sent again after a while.
    for times, sent in {2: 1, 4: 2}.items():
        nodes = ScriptedNodes(a=[*[UP] * times, shown("failed", "failed", 1, EXIT_REQUEUE)])
        executor = following(nodes, [A], [])
        signal.raise_signal(signal.SIGTERM)
        assert executor.follow(3, [A]) == EXIT_REQUEUE
        assert len([script for _, script in nodes.scripts if "--signal=TERM" in script]) == sent
    silent = following(ScriptedNodes(a=[None]), [A], [])
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(UserError) as error:
        silent.follow(3, [A])
    assert error.value.exit_code == UNREACHABLE


def test_launch_makes_way_for_a_larger_one_once(following: Callable[..., SshExecutor]) -> None:
    nodes = ScriptedNodes(a=[*[UP] * 3, shown("failed", "failed", 1, EXIT_REQUEUE)])
    c, d, e = (Node(name, f"10.0.0.{number}") for number, name in enumerate("cde", 3))
    nodes.inspections = {"b": SILENT, "c": FOREIGN, "d": OWN}
    executor = following(nodes, [A, B, c, d, e], [])
    looks: list[ExtraNodes] = []

    def should_end() -> bool:
        looks.append(executor.extra_nodes(["a"]))
        return True

    assert executor.follow(3, [A], should_end=should_end) == EXIT_REQUEUE
    assert looks == [ExtraNodes(("e",))]
    term = f"systemctl kill --kill-who=main --signal=TERM {UNIT}.service"
    assert [one for one in nodes.scripts if "kill" in one[1]] == [("a", term)], "what runs elsewhere is left alone"


class FetchingNodes(ScriptedNodes):
    """Nodes that fetch the image when a signal comes."""

    stopped = False

    def inspect(self, nodes: list[Node], plan: SshPlan, **limits: float) -> dict[Node, Inspection]:
        signal.raise_signal(signal.SIGTERM)
        return dict.fromkeys(nodes, SILENT)

    def stop(self) -> None:
        self.stopped = True


def test_stop_ends_the_wait_for_an_image(
    following: Callable[..., SshExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes fetch until they are no longer waited for; `fab stop` is asked for twice, and once in vain."""
    monkeypatch.setattr(ssh_executor, "POLL_S", 0.01)
    waited_for, answers = threading.Event(), iter([StorageError("it does not answer"), False, True])

    class Nodes(ScriptedNodes):
        def inspect(self, nodes: list[Node], plan: SshPlan, **limits: float) -> dict[Node, Inspection]:
            assert waited_for.wait(PATIENCE_S)
            return dict.fromkeys(nodes, SILENT)

        def stop(self) -> None:
            waited_for.set()

    def stopped() -> bool:
        answer = next(answers)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    log = list[str]()
    executor = following(Nodes(), [A], log, container=Container("example.org/a@sha256:0"), stopped=stopped)
    assert (executor.healthy_nodes(), executor.stop_reason(), log) == ([], "fab stop ended it", [])


def test_signal_ends_the_wait_for_an_image(following: Callable[..., SshExecutor]) -> None:
    nodes, log = FetchingNodes(), list[str]()
    assert (following(nodes, [A], log).healthy_nodes(), nodes.stopped, log) == ([], True, [])


def test_node_without_the_image_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, now, asked = ssh_nodes.Nodes(), [0.0], list[float]()

    def run(node: Node, script: str, stdin: str = "", *, root: bool = False, seconds: float = 0) -> str:
        if root:
            asked.append(now[0])
            raise Fault(REFUSED, "pull access denied")
        return "user=me 1:1 1\n\n"

    monkeypatch.setattr(nodes, "run", run)
    monkeypatch.setattr(ssh_nodes.time, "monotonic", lambda: now[0])
    plan = SshPlan(RUN, f"{RUN}/c", "python3", 1, 20_000, {}, PATIENCE, 120, Container("example.org/a@sha256:0"))
    for moment in range(100):
        now[0] = float(moment)
        (found,) = nodes.inspect([A], plan).values()
        assert found.why.endswith("starts there: pull access denied")
    assert asked == [0.0, 61.0]


def test_ctrl_c_ends_calls_on_all_nodes() -> None:
    nodes, begun, ended = ssh_nodes.Nodes(), threading.Event(), list[str]()

    def work(node: Node) -> None:
        if node == A:
            begun.wait()
            raise KeyboardInterrupt
        begun.set()
        try:
            nodes.run(node, "sleep 60")
        except Fault as fault:
            ended.append(fault.kind)

    with pytest.raises(KeyboardInterrupt):
        nodes.each([A, THIS_MACHINE], work)
    assert ended == [STOPPED]


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
    code = executor.run_launch(number, ["a", "b"], lambda: False)
    record = journal.finish(store, number, code)
    assert (record["code"], record["blamed"]) == (EXIT_PEERS, ["b"])
    assert "Failed to start transient service unit" in record["said"]
    assert ("a", f"systemctl kill --kill-who=main --signal=TERM {unit}.service") in nodes.scripts
    (start,) = [script for name, script in nodes.scripts if name == "a" and "systemd-run" in script]
    assert "--master 10.0.0.1:20002 --roster a,b" in start


def test_nodes_that_are_silent_or_busy_are_left_out(following: Callable[..., SshExecutor]) -> None:
    nodes, log = ScriptedNodes(), list[str]()
    c, d = Node("c", "10.0.0.3"), Node("d", "10.0.0.4")
    nodes.inspections = {"b": SILENT, "c": FOREIGN, "d": OWN, "e": LATER}
    executor = following(nodes, [A, B, c, d, Node("e", "10.0.0.5")], log)
    executor.newest_launch = 3
    assert executor.healthy_nodes() == executor.healthy_nodes() == ["a"]
    assert [line.partition(" is left out: ")[0] for line in log] == ["b", "c", "d", "e"]
    # What is left of an earlier launch of this run is ended, and nothing of another run's, or of another supervisor's.
    assert {script for _, script in nodes.scripts} == {f"systemctl kill --kill-who=main --signal=TERM {UNIT}.service"}


def test_launch_whose_start_got_no_answer_is_waited_for(following: Callable[..., SshExecutor]) -> None:
    gone = shown("inactive", "dead")
    nodes = ScriptedNodes(
        a=[UP, *[UP] * 8, shown("active", "exited", 1)], b=[*[gone] * 8, UP, shown("active", "exited", 1)]
    )
    nodes.silent_starts = {"b"}
    executor = following(nodes, [A, B], [])
    executor.healthy_nodes()
    assert executor.run_launch(3, ["a", "b"], lambda: False) == EXIT_DONE
    assert not [script for _, script in nodes.scripts if "systemctl kill" in script]
    # Ctrl-C while it starts is passed on once it is there, and once.
    late = ScriptedNodes(a=[*[gone] * 8, UP, UP, shown("failed", "failed", 1, EXIT_REQUEUE)])
    signalled = following(late, [A], [])
    signal.raise_signal(signal.SIGINT)
    assert signalled.follow(3, [A], age_s=0) == EXIT_REQUEUE
    assert len([script for _, script in late.scripts if "--signal=TERM" in script]) == 1
    # At some time no start is under way any more.
    never = ScriptedNodes(a=[gone])
    never.silent_starts = {"a"}
    executor = following(never, [A], [])
    executor.healthy_nodes()
    assert executor.run_launch(3, ["a"], lambda: False) == EXIT_PEERS


def test_launcher_that_does_not_end_on_sigterm_is_killed_whole(following: Callable[..., SshExecutor]) -> None:
    nodes = ScriptedNodes(a=[*[UP] * 40, shown("failed", "failed", 2, 9)], b=[ENDED_75])
    assert following(nodes, [A, B], []).follow(3, [A, B]) == EXIT_FAILURE
    kills = [script for name, script in nodes.scripts if name == "a" and "systemctl kill" in script]
    assert kills[0] == f"systemctl kill --kill-who=main --signal=TERM {UNIT}.service"
    assert set(kills[1:]) == {f"systemctl kill --kill-who=all --signal=KILL {UNIT}.service"}


@pytest.mark.parametrize("age_s", [0, 1e6])
def test_launch_another_process_will_start_is_waited_for(following: Callable[..., SshExecutor], age_s: float) -> None:
    gone, done = shown("inactive", "dead"), shown("active", "exited", 1)
    nodes = ScriptedNodes(a=[*[gone] * 8, UP, done])
    assert following(nodes, [A], []).follow(3, [A], age_s=age_s) == (EXIT_PEERS if age_s else EXIT_DONE)


def test_taken_over_launch_is_followed_to_its_end_or_refused(
    following: Callable[..., SshExecutor], tmp_path: Path
) -> None:
    on, store = cluster(**MACHINES), open_store(str(tmp_path / "first"))
    unit = unit_name(store.uri, journal.begin(store, ["a", "b"], "test"))
    ended = shown("active", "exited", 1).replace(UNIT, unit)
    nodes = ScriptedNodes(a=[UP.replace(UNIT, unit), ended], b=[ended])
    executor = following(nodes, [A, B], [], store.uri)
    for known in ([], [A]):
        # Nothing is recorded, as where the store failed.
        with pytest.raises(UserError):
            ssh.take_over(executor, store, store.uri, on, lambda listed=known: listed)  # type: ignore[misc]
    assert "ended" not in journal.read(store)[0]
    end = ssh.take_over(executor, store, store.uri, on, lambda: [A, B])
    assert end is not None
    assert (end.code, journal.read(store)[0]["code"]) == (EXIT_DONE, EXIT_DONE)
    assert ssh.take_over(executor, store, store.uri, on, list) is None


@pytest.mark.parametrize(("met", "code"), [(False, EXIT_DONE), (True, EXIT_PEERS)])
def test_node_of_a_taken_over_launch_may_still_start_until_ranks_have_met(
    following: Callable[..., SshExecutor], tmp_path: Path, met: bool, code: int
) -> None:
    on, store = cluster(**MACHINES), open_store(str(tmp_path / "first"))
    number = journal.begin(store, ["a"], "test")
    log = RunLog(store, 1, flush_s=60.0, launch_attempt=number)
    log.event("started" if met else "notice", {"step": 0})
    log.close()
    gone, done = shown("inactive", "dead"), shown("active", "exited", 1).replace(UNIT, unit_name(store.uri, number))
    executor = following(ScriptedNodes(a=[*[gone] * 8, done]), [A], [], store.uri)
    ssh.take_over(executor, store, store.uri, on, lambda: [A])
    assert journal.read(store)[0]["code"] == code


def test_stop_now_names_the_nodes_that_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers(ScriptedNodes):
        def run(self, node: Node, script: str, stdin: str = "", *, root: bool = False, seconds: float = 0) -> str:
            if node.name not in self.answers:
                raise Fault(CONNECTION_LOST, "the connection broke")
            return f"{UNIT}\n"

    job = {"nodes": [ssh.as_record(node) for node in (A, B, C)], "current": ["a", "b"]}
    monkeypatch.setattr(ssh, "Nodes", lambda: Answers(a=[], b=[]))
    assert ssh.BACKEND.cancel(RUN, job) == [f"unit {UNIT} on a", f"unit {UNIT} on b"]
    monkeypatch.setattr(ssh, "Nodes", lambda: Answers(a=[]))
    with pytest.raises(UserError) as error:
        ssh.BACKEND.cancel(RUN, job)
    assert error.value.exit_code == UNREACHABLE
    assert [line.partition(":")[0] for line in error.value.problems] == ["b"]


def handed_over(tmp_path: Path) -> RunRequest:
    return request_of(tmp_path, detach=True)


def test_handed_over_request_is_the_same_on_the_node(tmp_path: Path) -> None:
    request = handed_over(tmp_path)
    body = ssh_handover.decode(ssh_handover.encode(request, {"PATH": "/bin"}, A, 12.5))
    made = ssh_handover.request_of(body, ssh.SshOptions)
    assert made == replace(request, options=replace(request.options, detach=False))
    assert (body["variables"], body["requested"], body["node"]) == ({"PATH": "/bin"}, 12.5, "a")


def test_other_version_takes_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ssh_handover.encode(handed_over(tmp_path), {}, A, None)
    monkeypatch.setattr(ssh_handover, "__version__", "9.9")
    with pytest.raises(UserError) as error:
        ssh_handover.decode(text)
    assert [line.path for line in error.value.problems] == ["--detach"]


@pytest.mark.parametrize(
    ("reach", "there", "key", "route"),
    [
        ({"via": "ssh", "user": "u", "key": "/k", "jump": "u@gate"}, True, "/k", Route("u", 22, "/k", "u@gate")),
        ({"via": "ssh", "user": "u", "key": "/k"}, False, None, Route("u", 22, "/k")),
        ({"via": "ssm", "user": "u"}, False, None, None),
    ],
)
def test_node_reaches_others_directly_and_keeps_the_callers_way(
    reach: dict[str, str], there: bool, key: str | None, route: Route | None
) -> None:
    outside = cluster(**{**EC2, "reach": reach})
    inside = ssh_handover.seen_from_node(outside, lambda path: there)
    assert (inside.reach.via, inside.reach.key, inside.reach.jump, inside.reach.user) == ("ssh", key, None, "u")
    recorded = ssh_handover.seen_from_outside(replace(I1, route=Route("u", 22, key)), outside)
    assert (recorded.address, recorded.route) == ("10.0.0.1", route) if route else recorded.address == "i-1"
    assert bool(recorded.route.proxy) == (route is None)


def test_supervisor_adopts_the_request_that_started_it_alone(registered: ObjectStore) -> None:
    asked = json.loads(registered.read(journal.REQUEST)[0])["asked"]
    request_again(registered, "host")
    ssh_supervisor.adopt(registered, RUN, asked)
    assert local.OwnedJournal(registered, lambda nodes: None).read() == ([], "")
    request_again(registered, "asked")
    with pytest.raises(UserError):
        ssh_supervisor.adopt(registered, RUN, asked)


class AnsweringNodes:
    """A node whose unit is in one state, and which answers other scripts by `answer`."""

    def __init__(self, state: str, answer: Callable[[], str]) -> None:
        self.state, self.answer = state, answer

    def run(self, node: Node, script: str, stdin: str = "", *, root: bool = False, seconds: float = 0) -> str:
        unit = ssh_unit.supervisor_unit(RUN)
        return self.state.replace(UNIT, unit) if script.startswith("systemctl show") else self.answer()


def missing_module() -> str:
    raise Fault(REFUSED, "No module named launch")


NOT_THERE = shown("inactive", "dead")


@pytest.mark.parametrize(
    ("state", "answer", "path", "code"),
    [
        (UP, lambda: "", "--resume", USAGE),
        (NOT_THERE, missing_module, "--detach", UNREACHABLE),
        (NOT_THERE, lambda: "", "--detach", USAGE),
        (NOT_THERE, lambda: "a banner\n" + json.dumps({"error": ["no way"], "exit_code": 7}), "", 7),
    ],
)
def test_node_that_cannot_supervise_is_refused(
    tmp_path: Path, state: str, answer: Callable[[], str], path: str, code: int
) -> None:
    request, nodes = handed_over(tmp_path), AnsweringNodes(state, answer)
    with pytest.raises(UserError) as error:
        ssh_handover.check_from_node(nodes, A, request, ssh.ssh_plan(request, {}), resume=True)  # type: ignore[arg-type]
    assert ([line.path for line in error.value.problems], error.value.exit_code) == ([path], code)


def answer_of(fault: Exception | None, read: Callable[[str], Any], key: str) -> Any:
    if fault is not None:
        raise fault
    return read(key)


def test_hand_over_ends_once_the_unit_has_the_run(
    tmp_path: Path, registered: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = handed_over(tmp_path)
    plan = ssh.ssh_plan(request, {})
    asked = json.loads(registered.read(journal.REQUEST)[0])["asked"]

    def adopt(seconds: float) -> None:
        ssh_supervisor.adopt(registered, RUN, asked)

    # The unit is another process than the one that calls.
    request_again(registered, "host")
    ended: Any = AnsweringNodes(NOT_THERE, lambda: "lustrain: the store is full")
    with pytest.raises(UserError) as error:
        ssh_handover.hand_over(ended, A, request, plan, registered, sleep=adopt)
    assert (error.value.exit_code, "the store is full" in str(error.value)) == (1, True)
    silent: Any = AnsweringNodes(UP, lambda: "")
    moments = iter([0.0, 1e3])
    with pytest.raises(UserError) as error:
        ssh_handover.hand_over(silent, A, request, plan, registered, clock=lambda: next(moments))
    assert error.value.exit_code == UNREACHABLE
    # A store that does not answer for a moment ends nothing.
    real, answers = registered.read, iter([None, StorageError("busy")])
    monkeypatch.setattr(registered, "read", lambda key: answer_of(next(answers, None), real, key))
    done = ssh_handover.hand_over(silent, A, request, plan, registered, sleep=adopt)
    assert (done.code, done.data["supervisor"]["node"]) == (0, "a")


class NodeFolders:
    """A node's folders, in which its scripts run; systemd is two programs that write down how they were called."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        for constant in ("ENVIRONMENT_FOLDER", "LOG_FOLDER", "TRANSIENT"):
            monkeypatch.setattr(ssh_unit, constant, str(root / constant))
        (root / "TRANSIENT").mkdir()
        (root / "bin").mkdir()
        for program in ("systemctl", "systemd-run"):
            (root / "bin" / program).write_text(f'#!/bin/sh\necho "{program} $*" >>{root}/calls\n')
            (root / "bin" / program).chmod(0o755)

    def unit(self, launch: int) -> None:
        (self.root / "TRANSIENT" / f"{unit_name(RUN, launch)}.service").touch()

    def run(self, script: str, stdin: str = "") -> int:
        path = {"PATH": f"{self.root}/bin:{os.environ['PATH']}"}
        return subprocess.run(["sh", "-c", script], input=stdin.encode(), env=path, check=False).returncode

    def start(self, launch: int, variables: str) -> int:
        return self.run(start_script(launcher_of(("a",), {}, launch), 0, Runner("ubuntu")), variables)

    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines() if (self.root / "calls").exists() else []


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeFolders:
    return NodeFolders(tmp_path, monkeypatch)


def test_start_keeps_variables_for_root_ends_earlier_launches(folders: NodeFolders) -> None:
    folders.unit(2)
    text = environment_text({"TOKEN": "x"}, 3)
    assert folders.start(3, text) == 0
    stop, _, start = folders.calls()
    assert stop == f"systemctl stop {unit_name(RUN, 2)}.service"
    assert {"--uid=ubuntu", "--property=KillMode=mixed"} <= set(start.split())
    file = folders.root / "ENVIRONMENT_FOLDER" / f"{UNIT}.env"
    assert (file.read_text(), file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (text, 0o600, 0o700)
    folders.unit(3)
    assert folders.run(remove_script(unit_name(RUN, 3))) == 0
    assert not file.exists()


@pytest.mark.parametrize("state", ["inactive", "active"])
def test_supervisor_starts_once_and_leaves_no_variables(folders: NodeFolders, state: str) -> None:
    unit = ssh_unit.supervisor_unit(RUN)
    (folders.root / "bin/systemctl").write_text(f"#!/bin/sh\n[ $1 = is-active ] && echo {state}\n")
    script = ssh_unit.supervisor_script(unit, ["python3", "-m", "x", "train"], "ubuntu", 60)
    assert (folders.run(script, environment_text({"TOKEN": "x"}, 0)) == 0) == (state == "inactive")
    calls = [call for call in folders.calls() if call.startswith("systemd-run")]
    assert len(calls) == (state == "inactive")
    assert all(f"--unit={unit} --uid=ubuntu" in call and call.endswith("-- python3 -m x train") for call in calls)
    assert list((folders.root / "ENVIRONMENT_FOLDER").iterdir()) == []


@pytest.mark.parametrize(("there", "text"), [(3, None), (10, None), (2, 'PATH="/bin"\n'), (2, "")])
def test_start_that_comes_late_or_broken_changes_no_unit(folders: NodeFolders, there: int, text: str | None) -> None:
    folders.unit(there)
    assert folders.start(3, environment_text({}, 3) if text is None else text) != 0
    assert folders.calls() == []
    assert list((folders.root / "ENVIRONMENT_FOLDER").iterdir()) == []
