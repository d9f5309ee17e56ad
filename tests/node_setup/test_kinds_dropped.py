"""A file that one setting alone wants is taken away when the cluster does not want that setting any more."""

from __future__ import annotations

from typing import Any

import pytest

from node_setup.agent import owned
from node_setup.agent.kinds import planner
from node_setup.agent.model import Remark, Remove, Request, Run, Step

CASES = [("scheduler", owned.UDEV), ("gpu-clocks", owned.CLOCKS_UNIT)]


def facts(path: str, **more: Any) -> dict[str, Any]:
    return {"files": {path: {"content": "x", "mode": "0644"}}, **more}


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_a_file_that_nothing_wants_goes_and_a_unit_is_disabled_before(kind: str, path: str) -> None:
    [only] = planner(kind)([], frozenset(), facts(path), Request())
    assert isinstance(only, Step)
    assert Remove(path) in only.actions
    commands = [action.command[1] for action in only.actions if isinstance(action, Run)]
    assert commands == (["disable", "daemon-reload"] if path == owned.CLOCKS_UNIT else [])


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_it_stays_where_only_some_settings_are_asked_for_and_what_is_not_there_is_not_missed(
    kind: str, path: str
) -> None:
    assert planner(kind)([], frozenset(), facts(path), Request(only=("sysctl.*",))) == []
    assert planner(kind)([], frozenset(), {"files": {path: None}}, Request()) == []


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_where_nothing_can_be_written_it_is_told(kind: str, path: str) -> None:
    [only] = planner(kind)([], frozenset(), facts(path, disk={"/etc": {"read_only": True}}), Request())
    assert isinstance(only, Remark)
    assert (only.status, "read-only" in only.why) == ("failed", True)
