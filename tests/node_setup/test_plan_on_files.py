"""Facts read from real files, steps applied to real files: the loop closes without the simulator of `plain_node`.

The files lie in a folder of the test's own. No kernel is behind its /proc/sys, so a value is never refused or clamped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.facts.files import collect as files
from node_setup.agent.facts.kernel import collect as kernel
from node_setup.agent.facts.scene import Scene
from node_setup.agent.host import Host
from node_setup.agent.model import Request
from node_setup.agent.run.apply import apply
from node_setup.agent.run.plan import Plan, plan
from node_setup.agent.settings import catalog

SETTINGS = tuple(one for one in catalog.load() if one.kind in ("sysctl", "limit", "module-option"))
DOCUMENT: dict[str, Any] = {"lustre": {"path": "/fsx", "efa": False}}
REQUEST = Request(profile="cpu", document=DOCUMENT)
BEFORE = {
    "proc/modules": "",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/sys/fs/inotify/max_user_watches": "1048576\n",
    "proc/sys/net/core/rmem_max": "212992\n",
    "sys/module/ksocklnd/parameters/credits": "256\n",
    "etc/sysctl.conf": "# local\nvm/max_map_count = 65530\n",
    "usr/lib/sysctl.d/10-map-count.conf": "-vm.max_map_count=1048576\n",
    "etc/security/limits.conf": "# none\n",
}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    for name, content in BEFORE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "etc/sysctl.d").mkdir()
    (tmp_path / "etc/sysctl.d/99-sysctl.conf").symlink_to("../sysctl.conf")
    return Host(str(tmp_path))


def look(host: Host) -> dict[str, Any]:
    scene = Scene(host, catalog.wanted(SETTINGS, DOCUMENT))
    fixed = {"memory": {"gib": 64.0}, "cpu": {"count": 96}, "lustre": {"lctl": True}, "disk": {}}
    return {**fixed, **kernel(scene), **files(scene)}


def tune(host: Host, request: Request = REQUEST) -> Plan:
    made = plan(SETTINGS, look(host), request)
    assert apply(host, made.steps, lambda line: None) == {}
    return made


def test_what_was_written_is_read_back_as_wanted(host: Host) -> None:
    tune(host)
    again = plan(SETTINGS, look(host), REQUEST)
    assert again.steps == ()
    status = {one.setting: one.status for one in again.remarks if one.status != Status.CONFLICT}
    assert (
        status["sysctl.vm.max_map_count"] == status["limit.memlock"] == status["sysctl.net.core.rmem_max"] == Status.OK
    )
    assert host.read("/proc/sys/vm/max_map_count") == "524288"
    assert host.read("/proc/sys/fs/inotify/max_user_watches") == "1048576\n"


def test_the_old_sysctl_conf_that_debian_links_to_wins_and_is_named(host: Host) -> None:
    made = tune(host)
    (conflict,) = [one for one in made.remarks if one.status == Status.CONFLICT]
    assert conflict.setting == "sysctl.vm.max_map_count"
    assert "/etc/sysctl.d/99-sysctl.conf" in conflict.why
    lines = host.read(owned.SYSCTL) or ""
    assert "vm.max_map_count = 1048576" in lines


def test_drift_of_a_value_and_of_a_file_is_two_steps_and_is_put_right(host: Host) -> None:
    tune(host)
    host.put("/proc/sys/net/core/rmem_max", "212992")
    host.write(owned.LIMITS, "* hard memlock 64\n")
    assert [(step.setting, step.part) for step in plan(SETTINGS, look(host), REQUEST).steps] == [
        ("sysctl.net.core.rmem_max", "runtime"),
        ("limit.memlock", "persisted"),
    ]
    tune(host)
    assert plan(SETTINGS, look(host), REQUEST).steps == ()


def test_turning_all_off_leaves_no_file_and_the_running_values(host: Host) -> None:
    tune(host)
    off = Request(profile="cpu", document=DOCUMENT, overrides={one.id: "off" for one in SETTINGS})
    tune(host, off)
    assert plan(SETTINGS, look(host), off).steps == ()
    assert not host.exists(owned.SYSCTL)
    assert not host.exists(owned.LIMITS)
    assert host.read("/proc/sys/vm/max_map_count") == "524288"
