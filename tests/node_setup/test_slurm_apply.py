"""The agent's part of `fab slurm-up`: steps that look before they act, and a request whose secret no message shows."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from node_setup.agent import verify
from node_setup.agent.host import Done
from node_setup.agent.model import Request
from node_setup.agent.slurm import apply, health, paths, state
from node_setup.agent.slurm.wanted import Awaited, File, Wanted, parse
from tests.node_setup.agents import BareHost, silent

CONF = File("slurm.conf", "ClusterName=lab\n")
NODES = Path(__file__).with_name("recorded") / "scontrol_nodes.txt"


class Systemd(BareHost):
    """A machine of whose programs there are systemctl and scontrol. `refuses` are units that end right after their start."""

    def __init__(self, root: Path, refuses: Sequence[str] = ()) -> None:
        super().__init__(root)
        self.refuses = refuses
        self.active: dict[str, bool] = {}
        self.enabled: set[str] = set()
        self.restarts: list[str] = []

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        unit = command[-1]
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon counts as up at once here, and as not coming up after a blink."""
    monkeypatch.setattr(apply, "STABLE_S", 0.0)
    monkeypatch.setattr(apply, "STARTED_S", 0.01)
    monkeypatch.setattr(apply, "POLL_S", 0.0)


def files_and_daemons(host: Systemd, *duties: str, check: bool = False) -> dict[str, str]:
    """The status of each step but those that need root or a user of munge or Slurm."""
    wanted = Wanted(duties, (CONF,))
    planned = [
        step
        for step in apply.steps(host, wanted)
        if step.setting in ("slurm.file", "slurm.service") and step.target != "munge.service"
    ]
    return {row["target"]: row["status"] for row in apply.take_steps(planned, silent, check=check)}


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    host = Systemd(tmp_path)
    first = {"slurmctld.service": "ok", paths.CONF: "changed", "slurmd.service": "changed"}
    assert files_and_daemons(host, "compute") == first
    assert files_and_daemons(host, "compute") == dict.fromkeys(first, "ok")
    assert host.restarts == ["slurmd.service"]


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
    found = state.parse(NODES.read_text())
    assert {name: (node["state"], node["reason"]) for name, node in found.items()} == {
        "node2": ("ALLOCATED", None),
        "node3": ("DOWN+NOT_RESPONDING", "Not responding"),
        "node4": ("IDLE+DRAIN", "a fan is loud, see ticket=7"),
    }
    assert [name for name, node in found.items() if state.is_registered(node)] == ["node2", "node4"]


def test_nodes_are_waited_for_until_all_have_registered(tmp_path: Path) -> None:
    answers = ["NodeName=node2 State=UNKNOWN*\n", "NodeName=node2 State=IDLE Gres=gpu:h100:8 Version=22.05.8\n"]

    class Controller(BareHost):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
            return Done(0, answers.pop(0), "")

    found = state.wait_for_nodes(Controller(tmp_path), Awaited(("node2",), 600), lambda seconds: None)
    assert (found["error"], found["nodes"]["node2"]["gres"], answers) == (None, "gpu:h100:8", [])


@pytest.mark.parametrize(
    ("node_state", "document", "drained"),
    [("IDLE", {"cluster": "lab"}, True), ("IDLE+DRAIN", {"cluster": "lab"}, False), ("IDLE", {}, False)],
)
def test_an_unfit_node_drains_itself_once_it_was_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_state: str, document: dict[str, Any], drained: bool
) -> None:
    """The reason of one that is drained already is a person's, perhaps, and stays."""
    name, reason = os.uname().nodename.partition(".")[0], "lustrain: gpu-count: 1 of 8 GPUs are missing; action=REPLACE"
    monkeypatch.setattr(verify, "verify", lambda *given: ({"drain": reason}, 2))

    class Node(BareHost):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
            self.ran.append(tuple(command))
            return Done(0, f"NodeName={name} State={node_state}\n", "")

    host = Node(tmp_path)
    result, code = health.check(host, {}, Request(document=document))
    update = ("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")
    assert (result["drained"], update in host.ran, code) == (reason if drained else None, drained, 0)
