"""NVIDIA's persistence and application clocks: facts in, steps out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from node_setup.agent import owned
from node_setup.agent.kinds.gpu.clocks import clocks_unit
from node_setup.agent.kinds.gpu.persistence import DAEMON, DROP_IN, OTHER_OWNER
from node_setup.agent.model import PERSISTED, RUNTIME, Remark, Step, Write
from tests.node_setup.kinds_facts import applied, commands, machine, plan, remark, service, steps


def persistence(facts: dict[str, Any]) -> list[Step | Remark]:
    return plan("gpu.persistence", facts)


def clocks(facts: dict[str, Any]) -> list[Step | Remark]:
    return plan("gpu.application-clocks", facts)


HIGHEST = {"memory": 2619, "graphics": 1980}
RUNNING = service("loaded", "active", "enabled", "success")
STOPPED = service("loaded", "inactive", "disabled", "success")
MASKED = service("masked", "inactive", "masked", "success")
NONE = {"memory": None, "graphics": None}
CLOCKS_UNIT = {"content": clocks_unit(DAEMON), "mode": "0644"}


def gpus(count: int = 2, **changed: Any) -> dict[str, Any]:
    device = {"persistence": True, "max": HIGHEST, "applications": HIGHEST, **changed}
    return {"present": True, "devices": [{"index": index, **device} for index in range(count)]}


def node(gpu: dict[str, Any], services: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return machine(gpu=gpu, services={DAEMON: dict(RUNNING), **(services or {})}, **sections)


def under_other(on: bool | None) -> dict[str, Any]:
    """A node on which another unit keeps the driver loaded."""
    return node(gpus(persistence=on), {OTHER_OWNER: dict(RUNNING), DAEMON: dict(STOPPED)})


@pytest.mark.parametrize("name", ["gpu.persistence", "gpu.application-clocks"])
@pytest.mark.parametrize(
    ("present", "devices", "status"),
    [(False, None, "skipped"), (None, None, "unknown"), (True, None, "unknown"), (True, [], "unknown")],
)
def test_without_gpus_that_answer_nothing_is_set(name: str, present: bool | None, devices: Any, status: str) -> None:
    assert remark(plan(name, node({"present": present, "devices": devices}))).status == status


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (under_other(True), "ok"),
        (under_other(False), "failed"),
        (under_other(None), "unknown"),
        (node(gpus(), {DAEMON: {}}), "failed"),
        (node(gpus(), {DAEMON: dict(MASKED)}), "failed"),
        (node(gpus(persistence=None)), "unknown"),
        (node(gpus(), init="other"), "skipped"),
        (node(gpus(), init=None), "unknown"),
    ],
)
def test_persistence_that_cannot_be_set_is_reported(facts: dict[str, Any], status: str) -> None:
    assert remark(persistence(facts)).status == status


@pytest.mark.parametrize("changed", [{"applications": NONE}, {"max": NONE}, {"applications": None}, {"max": None}])
def test_a_driver_without_application_clocks_is_no_failure(changed: dict[str, Any]) -> None:
    assert remark(clocks(node(gpus(**changed)))).status == "skipped"


def test_the_daemon_is_enabled_and_started_and_then_left_alone() -> None:
    facts = node(gpus(persistence=False), {DAEMON: dict(STOPPED)})
    said = persistence(facts)
    assert [(step.part, step.current) for step in steps(said)] == [(PERSISTED, "disabled"), (RUNTIME, "inactive")]
    assert commands(said) == [f"systemctl enable {DAEMON}", f"systemctl start {DAEMON}"]
    assert remark(persistence(applied(facts, said))).status == "ok"


def test_ubuntus_daemon_gets_a_drop_in_that_is_restored() -> None:
    facts = node(gpus(persistence=False), {DAEMON: {**RUNNING, "enabled": "static"}}, packaged_by_ubuntu=True)
    said = persistence(facts)
    assert [(step.part, step.target) for step in steps(said)] == [
        (PERSISTED, owned.PERSISTENCED),
        (RUNTIME, "persistence mode"),
    ]
    assert commands(said) == ["systemctl daemon-reload", f"systemctl restart {DAEMON}"]
    assert steps(said)[1].current == "gpu 0, gpu 1 without"
    after = applied(facts, said)
    assert after["files"][owned.PERSISTENCED]["content"] == DROP_IN
    assert remark(persistence(after)).status == "ok"
    after["files"][owned.PERSISTENCED]["content"] += "Nice=5\n"
    assert [(step.part, step.current) for step in steps(persistence(after))] == [(PERSISTED, "differs")]


def test_each_gpu_gets_its_highest_clocks_when_it_fell_back() -> None:
    facts = node(gpus(applications={"memory": 2619, "graphics": 1410}))
    facts["gpu"]["devices"][1]["max"] = {"memory": 3201, "graphics": 1980}
    said = clocks(facts)
    assert [(step.target, step.current, step.wanted) for step in steps(said) if step.part == RUNTIME] == [
        ("gpu 0", "2619,1410", "2619,1980"),
        ("gpu 1", "2619,1410", "3201,1980"),
    ]
    assert commands(said) == [
        "nvidia-smi -i 0 -ac 2619,1980",
        "nvidia-smi -i 1 -ac 3201,1980",
        "systemctl daemon-reload",
        "systemctl enable lustrain-gpu-clocks.service",
    ]
    after = applied(facts, said)
    assert remark(clocks(after)).status == "ok"
    after["gpu"]["devices"][1]["applications"] = {"memory": 1593, "graphics": 1980}
    assert commands(clocks(after)) == ["nvidia-smi -i 1 -ac 3201,1980"]


def test_the_unit_waits_for_whoever_keeps_the_driver_loaded() -> None:
    assert f"Requires={DAEMON}\nAfter={DAEMON}\n" in clocks_unit(DAEMON)
    facts = node(gpus(), {OTHER_OWNER: dict(RUNNING)})
    facts["files"][owned.CLOCKS_UNIT] = CLOCKS_UNIT
    [step] = steps(clocks(facts))
    assert (step.current, step.actions[0]) == ("differs", Write(owned.CLOCKS_UNIT, clocks_unit(OTHER_OWNER)))


def test_clocks_without_systemd_are_set_until_reboot() -> None:
    said = clocks(node(gpus(1, applications={"memory": 2619, "graphics": 1410}), init="other"))
    assert commands(said) == ["nvidia-smi -i 0 -ac 2619,1980"]
    assert [one.status for one in said if isinstance(one, Remark)] == ["skipped"]


def test_the_units_shell_line_sets_each_gpu_to_what_it_states(tmp_path: Path) -> None:
    """With a program of nvidia-smi's name that prints what the real one prints for this query and writes down how it was
    called; systemd's own unquoting is imitated (`$$` and the outer quotes)."""
    log = tmp_path / "log"
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$1" in --query-gpu=index,clocks.max.memory,clocks.max.graphics)\n'
        f'printf "0, 2619, 1980\\n1, 3201, 1965\\n";; *) echo "$@" >> {log};; esac\n'
    )
    smi.chmod(0o755)
    [line] = [one for one in clocks_unit(DAEMON).splitlines() if one.startswith("ExecStart=")]
    assert "$" not in line.replace("$$", "")
    script = line.partition("'")[2].removesuffix("'").replace("$$", "$")
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["/bin/sh", "-c", script], check=True, timeout=300, env={"PATH": path})
    assert log.read_text().splitlines() == ["-i 0 -ac 2619,1980", "-i 1 -ac 3201,1965"]
