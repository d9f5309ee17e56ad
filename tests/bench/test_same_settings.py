"""What the tools are compared by: read from rows and files, and told apart from what is not so."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.bench.peers import playbook
from tests.bench.same_settings import File, Unit, Wanted, derived
from tests.lab.nodes import StartLab, lab

__all__ = ["lab"]

DROP_IN = "/etc/systemd/system/slurmd.service.d/90-lustrain.conf"
BOOT_UNIT = "/etc/systemd/system/lustrain-tune.service"


class Files:
    """A node that only has files, all of one mode."""

    def __init__(self, files: dict[str, str], mode: str = "644") -> None:
        self._files = files
        self._mode = mode

    def read(self, path: str) -> str:
        return self._files[path]

    def exec(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        assert command[:3] == ("stat", "-c", "%a"), command
        return subprocess.CompletedProcess(command, 0, f"{self._mode}\n", "")


def row(setting: str, part: str | None, target: str | None, wanted: str, status: str = "changed") -> dict[str, Any]:
    return {"setting": setting, "status": status, "part": part, "target": target, "wanted": wanted}


ROWS = [
    row("sysctl.vm.dirty_ratio", "runtime", "/proc/sys/vm/dirty_ratio", "5"),
    row("sysctl.vm.dirty_ratio", "persisted", "/etc/sysctl.d/90-lustrain.conf", "vm.dirty_ratio = 5"),
    row("slurmd-limit.nofile", "persisted", DROP_IN, "LimitNOFILE=131072"),
    row("slurmd-limit.nofile", "runtime", "slurmd.service", "131072"),
    row("slurmd-limit.memlock", "runtime", "slurmd.service", "infinity"),
    row("agent.at-boot", "persisted", BOOT_UNIT, "as planned, enabled"),
    row("unit.chrony", None, None, "", status="ok"),
    row("unit.chronyd", None, None, "", status="skipped"),
]
FILES = Files({DROP_IN: "[Service]\n", BOOT_UNIT: "[Unit]\n"})


def test_rows_become_values_files_units_and_limits() -> None:
    found = derived(ROWS, FILES, lambda folder: folder == "/etc/systemd/system")
    assert found.sysctls == (("vm.dirty_ratio", "5"),)
    assert found.files == (
        File(DROP_IN, "[Service]\n", "0644", own_folder=True, restarts="slurmd.service"),
        File(BOOT_UNIT, "[Unit]\n", "0644"),
    )
    assert found.units == (Unit("chrony.service", True), Unit("lustrain-tune.service", False))
    assert found.limits == (
        ("slurmd.service", "Max open files", "131072"),
        ("slurmd.service", "Max locked memory", "unlimited"),
    )
    assert (found.tasks, found.states) == (5, 8)


def test_change_that_ansible_cannot_express_is_not_left_out() -> None:
    with pytest.raises(ValueError, match="nothing that other tools"):
        derived([row("hold.kernel", "persisted", "apt-mark", "linux-aws")], FILES, lambda folder: True)


def test_ansible_gets_each_setting_once_and_needed_restarts() -> None:
    found = derived(ROWS, FILES, lambda folder: True)
    play = playbook(found)
    assert len(play["tasks"]) == found.tasks
    assert [task["notify"] for task in play["tasks"] if "notify" in task] == ["slurmd.service"]
    assert [handler["name"] for handler in play["handlers"]] == ["slurmd.service"]


@pytest.mark.slow
def test_a_look_at_a_node_tells_what_is_so_from_what_is_not(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    node.write("/etc/sysctl.d/10-x.conf", "vm.swappiness = 60\n")
    node.write("/etc/x.conf", "kept\n")
    right = Wanted(
        (("vm.swappiness", "60"),), (File("/etc/x.conf", "kept\n", "0644"),), (Unit("chrony.service", True),)
    )
    assert right.missing(node) == []
    wrong = Wanted(
        (("vm.swappiness", "10"),),
        (File("/etc/x.conf", "other\n", "0600"), File("/etc/y.conf", "", "0644")),
        (Unit("none.service", True),),
        (("slurmd.service", "Max open files", "7"),),
    )
    said = wrong.missing(node)
    for part in ("swappiness now", "swappiness at boot", "another content", "another mode", "y.conf: missing"):
        assert any(part in line for line in said), (part, said)
    for part in ("none.service: not enabled", "none.service: not active", "slurmd.service: Max open files"):
        assert any(part in line for line in said), (part, said)
