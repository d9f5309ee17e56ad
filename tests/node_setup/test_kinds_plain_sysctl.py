"""Kernel parameters at run time and at boot, and the one file that holds the lines of many settings."""

from __future__ import annotations

from typing import Any

import pytest

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds import planner
from node_setup.agent.model import PERSISTED, RUNTIME, Put, Remark, Remove, Request, Setting, Step, Write
from node_setup.agent.owned import HEADER
from tests.node_setup.plain_node import bare
from tests.node_setup.test_kinds_plain import MAPS, RATIO, brief, done, said, setting


def sysctl_file(path: str, value: str) -> dict[str, Any]:
    return {"path": path, "values": {"vm.max_map_count": value}}


def test_a_file_read_later_at_boot_with_another_value_is_a_conflict_beside_the_change() -> None:
    facts = bare(sysctl_files=[sysctl_file("/etc/sysctl.d/99-sysctl.conf", value="65530")])
    lines = said(MAPS, facts)
    assert [kind for kind, _ in brief(lines)] == [RUNTIME, PERSISTED, Status.CONFLICT]
    remark = lines[-1]
    assert isinstance(remark, Remark)
    assert "/etc/sysctl.d/99-sysctl.conf" in remark.why
    assert "vm.max_map_count = 65530" in remark.why
    assert brief(done(MAPS, facts)) == [(Status.CONFLICT, "65530"), (Status.OK, "524288")]


@pytest.mark.parametrize(
    ("path", "value", "conflict"),
    [
        ("/usr/lib/sysctl.d/10-map-count.conf", "65530", False),
        ("/run/sysctl.d/95-later.conf", "65530", True),
        ("/run/sysctl.d/95-later.conf", "600000", False),
        ("/etc/sysctl.conf", "65530", True),
    ],
)
def test_only_what_comes_later_and_will_not_do_conflicts(path: str, value: str, conflict: bool) -> None:
    lines = said(MAPS, bare(sysctl_files=[sysctl_file(path, value=value)]))
    assert (Status.CONFLICT in [kind for kind, _ in brief(lines)]) is conflict


@pytest.mark.parametrize("path", ["/usr/lib/sysctl.d/10-map-count.conf", "/etc/sysctl.d/99-sysctl.conf"])
def test_our_file_is_not_the_one_that_lowers_what_another_file_sets(path: str) -> None:
    steps = said(MAPS, bare(sysctl_files=[sysctl_file(path, value="1048576")]))
    assert [step.wanted for step in steps if isinstance(step, Step)] == ["524288", "vm.max_map_count = 1048576"]


def test_our_file_is_not_the_one_that_lowers_the_kernels_own_default() -> None:
    (step,) = said(MAPS, bare(sysctl={"vm.max_map_count": "1048576"}))
    assert isinstance(step, Step)
    assert step.wanted == "vm.max_map_count = 1048576"


def test_fields_are_raised_one_by_one() -> None:
    one = setting("sysctl", "net.ipv4.tcp_rmem", "8192 87380 16777216", compare="at-least")
    step = said(one, bare(sysctl={"net.ipv4.tcp_rmem": "4096 131072 6291456"}))[0]
    assert isinstance(step, Step)
    assert step.actions == (Put("/proc/sys/net/ipv4/tcp_rmem", "8192 131072 16777216"),)


def test_one_file_holds_all_lines_sorted_and_each_step_writes_the_same() -> None:
    steps = planner("sysctl")([RATIO, MAPS], frozenset({RATIO.id, MAPS.id}), bare(), Request())
    writes = {
        action for step in steps if isinstance(step, Step) for action in step.actions if isinstance(action, Write)
    }
    text = f"{HEADER}# {RATIO.id}\nvm.dirty_ratio = 5\n# {MAPS.id}\nvm.max_map_count = 524288\n"
    assert writes == {Write(owned.SYSCTL, text)}


def held(*lines: str, mode: str = "0644") -> dict[str, Any]:
    return {**dict.fromkeys(owned.PATHS), owned.SYSCTL: {"content": HEADER + "".join(lines), "mode": mode}}


MAPS_LINE, RATIO_LINE = f"# {MAPS.id}\nvm.max_map_count = 524288\n", f"# {RATIO.id}\nvm.dirty_ratio = 5\n"
DONE = {"sysctl": {"vm.max_map_count": "524288", "vm.dirty_ratio": "5"}}


def persisted(
    chosen: list[Setting], selected: set[str], files: dict[str, Any], only: tuple[str, ...] = ()
) -> list[Step]:
    lines = planner("sysctl")(chosen, frozenset(selected), bare(files=files, **DONE), Request(only=only))
    return [line for line in lines if isinstance(line, Step)]


def test_a_setting_that_was_turned_off_disappears_from_the_file() -> None:
    (step,) = persisted([MAPS], {MAPS.id, RATIO.id}, held(MAPS_LINE, RATIO_LINE))
    assert (step.setting, step.found, step.wanted) == (RATIO.id, "vm.dirty_ratio = 5", "no line")
    assert step.actions == (Write(owned.SYSCTL, HEADER + MAPS_LINE),)


def test_a_file_without_lines_goes() -> None:
    (step,) = persisted([], {RATIO.id}, held(RATIO_LINE))
    assert step.actions == (Remove(owned.SYSCTL),)


def test_a_line_of_an_older_agents_setting_disappears_but_not_while_only_some_are_asked_for() -> None:
    files = held("# sysctl.retired\nvm.x = 1\n", MAPS_LINE)
    assert [step.setting for step in persisted([MAPS], {MAPS.id}, files)] == ["sysctl.retired"]
    assert persisted([MAPS], {MAPS.id}, files, only=(MAPS.id,)) == []


def test_lines_of_settings_that_are_not_asked_for_stay_as_they_are() -> None:
    other = RATIO_LINE.replace("5", "40")
    (step,) = persisted([MAPS, RATIO], {MAPS.id}, held(other), only=(MAPS.id,))
    assert step.actions == (Write(owned.SYSCTL, HEADER + other + MAPS_LINE),)


@pytest.mark.parametrize(
    "files",
    [
        held(MAPS_LINE, "vm.swappiness = 0\n"),
        held("vm.swappiness = 0\n", MAPS_LINE),
        held(MAPS_LINE, MAPS_LINE),
        held(MAPS_LINE, mode="0600"),
        {owned.SYSCTL: {"content": MAPS_LINE, "mode": "0644"}},
    ],
)
def test_anything_else_in_our_file_or_another_mode_is_put_right(files: dict[str, Any]) -> None:
    (step,) = persisted([MAPS], {MAPS.id}, files)
    assert step.actions == (Write(owned.SYSCTL, HEADER + MAPS_LINE),)
