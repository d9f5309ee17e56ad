"""The agent's part of `fab slurm-up`: steps that look before they act, and a request whose secret no message shows."""

from __future__ import annotations

import base64
import json
import os
import pwd
import stat
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from lustrain.status import Status
from node_setup.agent import verify
from node_setup.agent.facts import scheduler
from node_setup.agent.host import TIMED_OUT, Done
from node_setup.agent.model import Request
from node_setup.agent.slurm import apply, health, paths, state
from node_setup.agent.slurm.wanted import Awaited, File, Wanted, parse
from node_setup.agent.verify import clock, home, lustre, settings, slurm, storage
from node_setup.agent.verify.expected import expected_hardware
from node_setup.agent.verify.result import Result, to_json
from tests.node_setup.agents import BareHost, silent

CONF = File("slurm.conf", "ClusterName=lab\n")
NODES = Path(__file__).with_name("recorded") / "scontrol_nodes.txt"


class Systemd(BareHost):
    """A machine of whose programs there are systemctl and scontrol.

    `refuses` are units that end right after their start, and `mute` are those of which systemctl tells nothing; slurmctld
    answers from its so-manieth `ping` on.
    """

    def __init__(self, root: Path, refuses: Sequence[str] = (), mute: Sequence[str] = (), pings: int = 1) -> None:
        super().__init__(root)
        self.refuses, self.mute, self.pings = refuses, mute, pings
        self.active: dict[str, bool] = {}
        self.enabled: set[str] = set()
        self.restarts: list[str] = []

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        unit = command[-1]
        if command == ("scontrol", "ping"):
            self.pings -= 1
            return Done(int(self.pings > 0), "", "")
        if command[:2] == ("systemctl", "show") and unit in self.mute:
            return Done(TIMED_OUT, "", "systemctl did not end within 10 s")
        if command[:2] == ("systemctl", "show"):
            active, enabled = self.active.get(unit, False), unit in self.enabled
            shown = ("active" if active else "inactive", "enabled" if enabled else "disabled")
            return Done(0, "LoadState=loaded\nActiveState={}\nUnitFileState={}\n".format(*shown), "")
        if command[:2] == ("systemctl", "enable"):
            self.enabled.add(unit)
        elif command[:2] == ("systemctl", "restart"):
            self.restarts.append(unit)
            self.active[unit] = unit not in self.refuses
        elif command[:2] == ("systemctl", "disable"):
            self.enabled.discard(unit)
            self.active[unit] = False
        return Done(0, "", "")


def passing_time() -> apply.Clock:
    """A clock that only waiting moves."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return apply.Clock(lambda: now[0], sleep)


def files_and_daemons(host: Systemd, *duties: str, check: bool = False) -> dict[str, str]:
    """The status of each step but those that need root or a user of munge or Slurm."""
    wanted = Wanted(duties, (CONF,))
    planned = [
        step
        for step in apply.steps(host, wanted, passing_time())
        if step.setting in ("slurm.file", "slurm.service") and step.target != "munge.service"
    ]
    return {row["target"]: row["status"] for row in apply.take_steps(planned, silent, check=check)}


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    host = Systemd(tmp_path)
    drop_in = paths.restart_drop_in("slurmd.service")
    first = {"slurmctld.service": "ok", paths.CONF: "changed", drop_in: "changed", "slurmd.service": "changed"}
    assert files_and_daemons(host, "compute") == first
    assert files_and_daemons(host, "compute") == dict.fromkeys(first, "ok")
    assert host.restarts == ["slurmd.service"]


@pytest.mark.parametrize("duty", apply.DAEMONS)
def test_systemd_starts_a_daemon_again_that_failed(tmp_path: Path, duty: str) -> None:
    host = Systemd(tmp_path)
    files_and_daemons(host, duty)
    assert "Restart=on-failure" in (host.read(paths.restart_drop_in(apply.DAEMONS[duty])) or "").splitlines()


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    host = Systemd(tmp_path)
    assert files_and_daemons(host, "compute", check=True)[paths.CONF] == "change"
    assert not any(tmp_path.iterdir())
    assert host.restarts == []


def test_a_killed_agent_leaves_the_restart_to_the_next(tmp_path: Path) -> None:
    host = Systemd(tmp_path)
    files_and_daemons(host, "compute")
    host.write(paths.CONF, "ClusterName=older\n")
    (step,) = [one for one in apply.steps(host, Wanted(("compute",), (CONF,))) if one.target == paths.CONF]
    step.mend()
    host.restarts.clear()
    assert files_and_daemons(host, "compute")["slurmd.service"] == "changed"
    assert host.restarts == ["slurmd.service"]


def test_a_daemon_that_does_not_stay_up_fails_its_step(tmp_path: Path) -> None:
    host = Systemd(tmp_path, refuses=["slurmctld.service"])
    found = files_and_daemons(host, "controller", "compute")
    assert found["slurmctld.service"] == "failed"
    assert "slurmd.service" not in found, "what follows builds on it"


def test_a_duty_that_went_elsewhere_ends_its_daemon(tmp_path: Path) -> None:
    host = Systemd(tmp_path)
    files_and_daemons(host, "controller", "compute")
    assert files_and_daemons(host, "compute")["slurmctld.service"] == "changed"
    assert (host.active, host.enabled) == ({"slurmctld.service": False, "slurmd.service": True}, {"slurmd.service"})


def test_a_daemon_that_cannot_be_asked_fails_its_end(tmp_path: Path) -> None:
    """The former slurmctld may run on, and the step must not say that it does not."""
    host = Systemd(tmp_path, mute=["slurmctld.service"])
    assert files_and_daemons(host, "compute") == {"slurmctld.service": "failed"}


@pytest.mark.parametrize(("pings", "status"), [(3, "changed"), (10_000, "failed")])
def test_a_controller_counts_as_up_once_it_answers(tmp_path: Path, pings: int, status: str) -> None:
    assert files_and_daemons(Systemd(tmp_path, pings=pings), "controller")["slurmctld.service"] == status


@pytest.mark.parametrize(("content", "kept"), [("ClusterName=theirs\n", True), (f"{paths.HEADER}older\n", False)])
def test_a_file_that_is_not_ours_is_kept_beside(tmp_path: Path, content: str, kept: bool) -> None:
    host = Systemd(tmp_path)
    host.write(paths.CONF, content, 0o640)
    files_and_daemons(host, "compute")
    copy = paths.CONF + apply.FORMER
    assert (host.read(paths.CONF), host.read(copy)) == (CONF.content, content if kept else None)
    if kept:
        assert mode(host, copy) == 0o640
        host.write(paths.CONF, "ClusterName=another\n")
        files_and_daemons(host, "compute")
        assert host.read(copy) == content, "the first copy stays"


def mode(host: Systemd, path: str) -> int:
    return stat.S_IMODE(host.path(path).stat().st_mode)


OLD, NEW = b"o" * 1024, b"n" * 1024


@pytest.fixture
def munge_is_me(monkeypatch: pytest.MonkeyPatch) -> None:
    account = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwnam", {"munge": account}.__getitem__)


def key_row(host: Systemd, wanted: Wanted) -> dict[str, Any]:
    (step,) = [step for step in apply.steps(host, wanted) if step.setting == "slurm.munge-key"]
    return apply.take_steps([step], silent, check=False)[0]


def joining(key: bytes | None, digest: bytes = NEW) -> Wanted:
    return Wanted(("compute",), (), sha256(digest).hexdigest(), key)


@pytest.mark.usefixtures("munge_is_me")
def test_another_key_is_replaced_and_kept_beside(tmp_path: Path) -> None:
    host = Systemd(tmp_path)
    host.write_bytes(paths.MUNGE_KEY, OLD, 0o440)
    assert key_row(host, joining(NEW))["status"] == "changed"
    copy = paths.MUNGE_KEY + apply.FORMER
    kept = {path: (host.path(path).read_bytes(), mode(host, path)) for path in (paths.MUNGE_KEY, copy)}
    assert kept == {paths.MUNGE_KEY: (NEW, 0o400), copy: (OLD, 0o440)}
    assert key_row(host, joining(None))["status"] == "ok"


@pytest.mark.usefixtures("munge_is_me")
def test_a_key_that_others_may_read_is_put_right(tmp_path: Path) -> None:
    host = Systemd(tmp_path)
    host.write_bytes(paths.MUNGE_KEY, NEW, 0o444)
    assert key_row(host, joining(None))["status"] == "changed"
    assert (host.path(paths.MUNGE_KEY).read_bytes(), mode(host, paths.MUNGE_KEY)) == (NEW, 0o400)
    assert not host.exists(paths.MUNGE_KEY + apply.FORMER)


@pytest.mark.usefixtures("munge_is_me")
@pytest.mark.parametrize("sent", [None, b"x" * 1024])
def test_a_key_that_is_not_the_clusters_is_not_taken(tmp_path: Path, sent: bytes | None) -> None:
    host = Systemd(tmp_path)
    host.write_bytes(paths.MUNGE_KEY, OLD, 0o400)
    assert key_row(host, joining(sent))["status"] == "failed"
    assert host.path(paths.MUNGE_KEY).read_bytes() == OLD


def test_a_key_of_another_user_is_not_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.getuid())
    other = pwd.struct_passwd((*me[:2], me.pw_uid + 1, *me[3:]))
    monkeypatch.setattr(pwd, "getpwnam", {"munge": other}.__getitem__)
    host = Systemd(tmp_path)
    host.write_bytes(paths.MUNGE_KEY, NEW, 0o400)
    (step,) = [step for step in apply.steps(host, joining(None)) if step.setting == "slurm.munge-key"]
    assert step.inspect() == f"0400 of uid {me.pw_uid}"


@pytest.mark.usefixtures("munge_is_me")
def test_munge_owes_a_restart_before_its_key_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is killed between the two leaves the restart to the next run."""
    host, write = Systemd(tmp_path), Systemd.write_bytes

    def killed(self: Systemd, path: str, content: bytes, bits: int) -> None:
        if path == paths.MUNGE_KEY:
            raise KeyboardInterrupt
        write(self, path, content, bits)

    monkeypatch.setattr(Systemd, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        key_row(host, joining(NEW))
    assert json.loads(host.read(paths.RESTART_OWED) or "[]") == ["munge.service"]


def request(**more: Any) -> str:
    whole: dict[str, Any] = {"duties": ["compute"], "files": [{"name": "slurm.conf", "content": "", "mode": 0o644}]}
    return json.dumps(whole | {"munge_key": SECRET} | more)


SECRET = base64.b64encode(b"s" * 48).decode()


@pytest.mark.parametrize(
    "text",
    [
        request()[:-1],
        json.dumps([SECRET]),
        request(duties=["worker"]),
        request(duties=[]),
        request(munge_key=SECRET + "!"),
        request(more=SECRET),
        request(files=[{"name": "../passwd", "content": SECRET, "mode": 0o644}]),
        request(files=[{"name": "slurm.conf", "content": SECRET, "mode": 0o4755}]),
    ],
)
def test_a_wrong_request_is_refused_without_its_values(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(text)
    assert SECRET[:8] not in str(refused.value)


def test_a_request_keeps_the_key_out_of_its_own_text() -> None:
    wanted = parse(request())
    assert wanted.munge_key == b"s" * 48
    assert "sss" not in repr(wanted)


def test_nodes_are_read_as_scontrol_prints_them() -> None:
    found = scheduler.parse(NODES.read_text())
    assert {name: (node["state"], node["reason"]) for name, node in found.items()} == {
        "node2": ("ALLOCATED", None),
        "node3": ("DOWN+NOT_RESPONDING", "Not responding"),
        "node4": ("IDLE+DRAIN", "a fan is loud, see ticket=7"),
    }
    assert [name for name, node in found.items() if scheduler.is_registered(node)] == ["node2", "node4"]


def test_nodes_are_waited_for_until_all_have_registered(tmp_path: Path) -> None:
    answers = ["NodeName=node2 State=UNKNOWN*\n", "NodeName=node2 State=IDLE Gres=gpu:h100:8 Version=22.05.8\n"]
    longest = f"6_[{','.join(map(str, range(1, 99, 2)))}]"[:64]
    queue = "".join(f"{restarts:<12}{number:<64}\n" for restarts, number in ((2, "7"), (0, longest), (1, "9_1")))

    class Controller(BareHost):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
            held = command[0] == "squeue" and {"PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT"} <= {
                *command[3][9:].split(",")
            }
            return Done(0, queue if held else answers.pop(0), "")

    found = state.wait_for_nodes(Controller(tmp_path), Awaited(("node2",), 600), lambda seconds: None)
    assert (found["error"], found["nodes"]["node2"]["gres"], answers) == (None, "gpu:h100:8", [])
    assert found["requeued"] == ["7", "9_1"]


@pytest.mark.parametrize(
    ("node_state", "document", "check", "drained", "status"),
    [
        ("IDLE", {"cluster": "lab"}, "gpu-count", True, 0),
        ("IDLE+DRAIN", {"cluster": "lab"}, "gpu-count", False, 0),
        (None, {"cluster": "lab"}, "gpu-count", False, 1),
        ("IDLE", {}, "gpu-count", False, 0),
        *[("IDLE", {"cluster": "lab"}, shared, False, 0) for shared in sorted(health.SHARED)],
        ("IDLE", {"cluster": "lab"}, "lustre-mount", True, 0),
    ],
)
def test_an_unfit_node_drains_itself_once_it_was_tuned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node_state: str | None,
    document: dict[str, Any],
    check: str,
    drained: bool,
    status: int,
) -> None:
    """The reason of one that is drained already, or may be, is a person's, perhaps, and stays. What all nodes share drains
    none of them."""
    name, reason = os.uname().nodename.partition(".")[0], f"lustrain: {check}: broken; action=NONE"
    results = [Result("boot", Status.OK, "as planned"), Result(check, Status.FAILED, "broken")]
    told = {"drain": reason, "results": json.loads(json.dumps([to_json(result) for result in results]))}
    monkeypatch.setattr(verify, "verify", lambda *given: (told, 2))

    class Node(BareHost):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
            self.ran.append(tuple(command))
            if node_state is None:
                return Done(TIMED_OUT, "", "scontrol did not end within 30 s")
            return Done(0, f"NodeName={name} State={node_state}\n", "")

    host = Node(tmp_path)
    result, code = health.check(host, {}, Request(document=document))
    update = ("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")
    assert (result["drained"], update in host.ran, code) == (reason if drained else None, drained, status)


def test_shared_checks_go_by_the_names_that_verify_gives() -> None:
    expected, request_ = expected_hardware({}, Request()), Request()
    checks = (clock.clock, home.mount, lustre.targets, storage.s3_mounts)
    names = {module_check({}, expected, request_).check for module_check in checks}
    names.add(slurm.node({}, expected, request_).check)
    assert names | {settings.APART["lustre-stripe"]} == health.SHARED
