"""Which day it is for the rules: the clock's, or the one that LUSTRAIN_NOW names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from infra import clock
from infra.components import stack
from infra.preflight import commands
from infra.preflight.offline import run_offline
from lustrain.problem import UserError
from tests.infra.edits import STACKS, config, place, spec_of
from tests.infra.mistakes import BLOCK, EKS, SPOT

LATER = "2027-04-01T09:00:00+09:00"
"""Capacity of the examples has ended by then, and support of their Kubernetes version."""


def errors(name: str) -> set[str]:
    return {one.code for one in run_offline(spec_of(name, {}), place(name)) if one.level == "error"}


def test_examples_pass_on_the_tests_day_and_not_after_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not set().union(*map(errors, STACKS))
    monkeypatch.setenv(clock.NOW, LATER)
    assert (errors(BLOCK), errors(EKS)) == ({"CAP-011"}, {"EKS-010"})


def test_the_task_and_the_program_ask_the_same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "current_place", lambda: place(SPOT))
    monkeypatch.setattr(stack, "declare", lambda *_: {})
    cluster = config(SPOT)["lustrain:cluster"]
    cluster["groups"][0]["capacity"] = {
        "mode": "reservation",
        "reservation": "cr-01234567",
        "ends_at": "2027-02-14T00:00:00Z",
    }
    assert stack.program(cluster) == {}
    monkeypatch.setenv(clock.NOW, LATER)
    with pytest.raises(UserError, match="CAP-011"):
        stack.program(cluster)
    (_, found), *_ = commands.findings(BLOCK, online=False)[0].values()
    assert "CAP-011" in {one.code for one in found}


def test_without_the_variable_it_is_the_clocks_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(clock.NOW)
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("value", ["tomorrow", "2027-04-01", "2027-04-01T09:00:00", "1", "0001-01-01T00:00:00Z"])
def test_a_bad_time_is_one_line_however_many_stacks_are_asked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(clock.NOW, value)
    with pytest.raises(UserError) as caught:
        commands.findings(None, online=False)
    (line,) = caught.value.problems
    assert line.startswith(f"LUSTRAIN_NOW = '{value}': ")
    assert "a time with its zone" in line
