"""NVIDIA's persistence and application clocks: facts in, steps out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from node_setup.agent import owned
from node_setup.agent.kinds.gpu.clocks import clocks_unit
from node_setup.agent.kinds.gpu.persistence import DAEMON, DROP_IN, OTHER_OWNER
from node_setup.agent.model import PERSISTED, RUNTIME, Remark, Step
from node_setup.agent.settings.catalog import wanted
from tests.conftest import require
from tests.node_setup.kinds_facts import SETTINGS, applied, commands, machine, plan, remark, steps

HIGHEST = {"memory": 2619, "graphics": 1980}
RUNNING = {"load": "loaded", "active": "active", "enabled": "enabled", "result": "success"}
STOPPED = {"load": "loaded", "active": "inactive", "enabled": "disabled", "result": "success"}
NONE = {"memory": None, "graphics": None}


def gpus(count: int = 2, **changed: Any) -> dict[str, Any]:
    device = {"persistence": True, "max": HIGHEST, "applications": HIGHEST, **changed}
    return {"present": True, "devices": [{"index": index, **device} for index in range(count)]}


def node(gpu: dict[str, Any], services: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return machine(gpu=gpu, services={DAEMON: dict(RUNNING), **(services or {})}, **sections)


def clocks(facts: dict[str, Any]) -> list[Step | Remark]:
    return plan("gpu.application-clocks", facts)


def persistence(facts: dict[str, Any]) -> list[Step | Remark]:
    return plan("gpu.persistence", facts)


@pytest.mark.parametrize("name", ["gpu.persistence", "gpu.application-clocks"])
@pytest.mark.parametrize(
    ("gpu", "status"),
    [
        ({"present": False, "devices": None}, "skipped"),
        ({"present": None, "devices": None}, "unknown"),
        ({"present": True, "devices": None}, "unknown"),
        ({"present": True, "devices": []}, "unknown"),
    ],
)
def test_without_gpus_that_answer_nothing_is_set(name: str, gpu: dict[str, Any], status: str) -> None:
    assert remark(plan(name, node(gpu))).status == status


def test_the_daemon_is_enabled_and_started_and_then_left_alone() -> None:
    facts = node(gpus(persistence=False), {DAEMON: dict(STOPPED)})
    said = persistence(facts)
    assert [(step.part, step.found) for step in steps(said)] == [(PERSISTED, "disabled"), (RUNTIME, "inactive")]
    assert commands(said) == [f"systemctl enable {DAEMON}", f"systemctl start {DAEMON}"]
    assert remark(persistence(applied(facts, said))).status == "ok"


def test_ubuntus_daemon_is_told_to_do_its_work() -> None:
    ubuntu = {DAEMON: {**RUNNING, "enabled": "static"}}
    facts = node(gpus(persistence=False), ubuntu, packaged_by_ubuntu=True)
    said = persistence(facts)
    assert [(step.part, step.target) for step in steps(said)] == [
        (PERSISTED, owned.PERSISTENCED),
        (RUNTIME, "persistence mode"),
    ]
    assert commands(said) == ["systemctl daemon-reload", f"systemctl restart {DAEMON}"]
    assert steps(said)[1].found == "gpu 0, gpu 1 without"
    after = applied(facts, said)
    assert after["files"][owned.PERSISTENCED]["content"] == DROP_IN
    assert remark(persistence(after)).status == "ok"


def test_a_drop_in_of_ours_that_was_changed_is_put_back() -> None:
    facts = node(gpus())
    facts["files"][owned.PERSISTENCED] = {"content": DROP_IN + "Nice=5\n", "mode": "0644"}
    assert [(step.part, step.found) for step in steps(persistence(facts))] == [(PERSISTED, "differs")]


@pytest.mark.parametrize(("on", "status"), [(True, "ok"), (False, "failed"), (None, "unknown")])
def test_another_owner_of_persistence_is_left_to_it(on: bool | None, status: str) -> None:
    facts = node(gpus(persistence=on), {OTHER_OWNER: dict(RUNNING), DAEMON: dict(STOPPED)})
    only = remark(persistence(facts))
    assert only.status == status
    assert OTHER_OWNER in only.why


@pytest.mark.parametrize("service", [{}, {"load": "masked", "active": "inactive", "enabled": "masked"}])
def test_a_daemon_that_is_not_there_is_a_failure_with_its_fix(service: dict[str, str]) -> None:
    only = remark(persistence(node(gpus(), {DAEMON: service})))
    assert only.status == "failed"
    assert "fix: " in only.why


def test_without_systemd_there_is_no_daemon_to_set() -> None:
    assert remark(persistence(node(gpus(), init="other"))).status == "skipped"
    assert remark(persistence(node(gpus(), init=None))).status == "unknown"


def test_the_highest_clocks_are_those_that_each_gpu_states() -> None:
    facts = node(gpus(applications={"memory": 2619, "graphics": 1410}))
    facts["gpu"]["devices"][1]["max"] = {"memory": 3201, "graphics": 1980}
    said = clocks(facts)
    assert [(step.target, step.found, step.wanted) for step in steps(said) if step.part == RUNTIME] == [
        ("gpu 0", "2619,1410", "2619,1980"),
        ("gpu 1", "2619,1410", "3201,1980"),
    ]
    assert commands(said) == [
        "nvidia-smi -i 0 -ac 2619,1980",
        "nvidia-smi -i 1 -ac 3201,1980",
        "systemctl daemon-reload",
        "systemctl enable lustrain-gpu-clocks.service",
    ]
    assert remark(clocks(applied(facts, said))).status == "ok"


def test_one_gpu_that_fell_back_is_set_alone() -> None:
    facts = node(gpus(8), {"lustrain-gpu-clocks.service": dict(RUNNING)})
    facts["files"][owned.CLOCKS_UNIT] = {"content": clocks_unit(DAEMON), "mode": "0644"}
    assert remark(clocks(facts)).status == "ok"
    facts["gpu"]["devices"][5]["applications"] = {"memory": 1593, "graphics": 1980}
    assert commands(clocks(facts)) == ["nvidia-smi -i 5 -ac 2619,1980"]


@pytest.mark.parametrize("changed", [{"applications": NONE}, {"max": NONE}, {"applications": None}, {"max": None}])
def test_a_driver_without_application_clocks_is_no_failure(changed: dict[str, Any]) -> None:
    only = remark(clocks(node(gpus(**changed))))
    assert only.status == "skipped"
    assert SETTINGS["gpu.application-clocks"].severity == "should"


def test_the_unit_waits_for_whoever_keeps_the_driver_loaded() -> None:
    assert f"Requires={DAEMON}\nAfter={DAEMON}\n" in clocks_unit(DAEMON)
    facts = node(gpus(), {OTHER_OWNER: dict(RUNNING)})
    facts["files"][owned.CLOCKS_UNIT] = {"content": clocks_unit(DAEMON), "mode": "0644"}
    [step] = steps(clocks(facts))
    assert step.found == "differs"
    after = applied(facts, [step])
    assert f"After={OTHER_OWNER}" in after["files"][owned.CLOCKS_UNIT]["content"]


def test_without_systemd_the_clocks_are_set_for_now_and_it_says_so() -> None:
    said = clocks(node(gpus(1, applications={"memory": 2619, "graphics": 1410}), init="other"))
    assert commands(said) == ["nvidia-smi -i 0 -ac 2619,1980"]
    assert [one.status for one in said if isinstance(one, Remark)] == ["skipped"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    require(shutil.which("systemd-analyze") is not None, "no systemd-analyze")
    (tmp_path / "lustrain-gpu-clocks.service").write_text(clocks_unit(DAEMON))
    (tmp_path / DAEMON).write_text("[Service]\nExecStart=/bin/true\n")
    units = sorted(str(one) for one in tmp_path.iterdir())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""


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


def test_the_catalogue_has_read_what_these_kinds_look_at() -> None:
    asked = wanted(SETTINGS.values(), {})
    assert {DAEMON, OTHER_OWNER, "lustrain-gpu-clocks.service", "nvidia-fabricmanager.service"} <= set(asked.services)
    assert {owned.PERSISTENCED, owned.CLOCKS_UNIT} <= set(owned.PATHS)


def test_gaudi_has_only_what_its_vendor_documents() -> None:
    ours = [setting for setting in SETTINGS.values() if setting.id.startswith("gaudi.")]
    assert ours
    assert all(setting.kind == "module-load" and "docs.habana.ai" in setting.source for setting in ours)
    assert all(setting.profiles == ("gaudi",) for setting in ours)
