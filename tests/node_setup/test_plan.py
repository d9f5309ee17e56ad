"""Which profile a node gets, which settings apply to it and why, and which requests are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lustrain.problem import UserError
from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.agent import document_text
from node_setup.agent.model import Request
from node_setup.agent.run.plan import choose_profile, plan, rows
from node_setup.agent.settings import catalog
from tests.node_setup.plain_node import after, bare

SETTINGS = tuple(one for one in catalog.load() if one.kind in ("sysctl", "limit", "observe", "kernel-argument"))
GROUPS = {
    "train": {"type": "p5.48xlarge", "role": "worker", "gpus": 8},
    "head": {"type": "m5.large", "role": "controller"},
}


def tuned(settings: dict[str, str] | None = None, profiles: dict[str, str] | None = None) -> dict[str, Any]:
    return {"groups": GROUPS, "tuning": {"settings": settings or {}, "profiles": profiles or {}}}


NONE = {"efa__devices": [], "gpu__present": False, "instance__type": None}
PROFILES = [
    ({}, Request(profile="cpu"), "cpu", "asked for"),
    ({}, Request(profile="cpu", document=tuned(profiles={"train": "login"})), "cpu", "asked for"),
    (
        {},
        Request(document=tuned(profiles={"train": "login"})),
        "login",
        "the cluster's tuning names it for group train",
    ),
    ({}, Request(document=tuned(), group="head"), "login", "the group's role is controller"),
    ({"hpu__present": True}, Request(), "gaudi", "it has Gaudi devices"),
    ({}, Request(), "efa-gpu", "it has EFA devices"),
    ({"efa__devices": []}, Request(), "efa-gpu", "it has GPUs"),
    (
        {**NONE, "instance__type": "ml.p5.48xlarge"},
        Request(),
        "efa-gpu",
        "p5.48xlarge has GPUs or EFA, though none is found",
    ),
    ({**NONE, "instance__type": "dl1.24xlarge"}, Request(), "gaudi", "dl1.24xlarge has Gaudi devices"),
    (NONE, Request(document=tuned()), "efa-gpu", "p5.48xlarge has GPUs"),
    (NONE, Request(), "cpu", "neither GPUs nor EFA nor Gaudi"),
    ({**NONE, "gpu__present": None}, Request(), "cpu", "neither GPUs nor EFA nor Gaudi"),
]


@pytest.mark.parametrize(("facts", "request_", "profile", "why"), PROFILES)
def test_a_flag_comes_before_the_cluster_and_the_cluster_before_facts(
    facts: dict[str, Any], request_: Request, profile: str, why: str
) -> None:
    chosen, because = choose_profile(bare(**facts), request_)
    assert chosen == profile
    assert because.startswith(why)


@pytest.mark.parametrize(
    ("told", "kind", "asked", "group"),
    [
        ("train", "m5.large", None, "train"),
        ("train", None, "head", "head"),
        (None, "ml.p5.48xlarge", None, "train"),
        (None, "c5.large", None, None),
        (None, None, None, None),
    ],
)
def test_a_node_keeps_the_group_that_it_was_told_and_is_else_of_the_only_one_of_its_type(
    told: str | None, kind: str | None, asked: str | None, group: str | None
) -> None:
    facts = {**bare(instance__type=kind), "group": told}
    request = Request(document=tuned(), group=asked)
    assert plan(SETTINGS, facts, request).group == group
    assert json.loads(document_text(request, facts))["group"] == group
    twice = {**tuned(), "groups": {**GROUPS, "more": GROUPS["train"]}}
    if told is None:
        assert plan(SETTINGS, facts, Request(document=twice)).group is None


def by_setting(request: Request, **facts: Any) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows(plan(SETTINGS, bare(**facts), request)):
        found.setdefault(row["setting"], []).append(row)
    return found


def test_every_setting_has_a_row_and_every_row_all_keys() -> None:
    found = by_setting(Request())
    assert set(found) == {one.id for one in SETTINGS}
    keys = {"setting", "status", "why", "part", "target", "found", "wanted", "needs", "severity"}
    assert all(set(row) == keys for some in found.values() for row in some)


def test_rows_are_in_the_catalogues_order() -> None:
    order = [one.id for one in SETTINGS]
    named = [row["setting"] for row in rows(plan(SETTINGS, bare(), Request()))]
    assert named == sorted(named, key=order.index)


REASONS = [
    (
        {"profile": "login"},
        {},
        "sysctl.vm.max_map_count",
        Status.SKIPPED,
        "for efa-gpu, gaudi, cpu; this node is login",
    ),
    ({}, {}, "sysctl.vm.dirty_ratio", Status.SKIPPED, "opt-in"),
    ({"overrides": {"sysctl.vm.max_map_count": "off"}}, {}, "sysctl.vm.max_map_count", Status.SKIPPED, "turned off"),
    (
        {"overrides": {"sysctl.vm.dirty_ratio": "on"}},
        {"memory__gib": 512.0},
        "sysctl.vm.dirty_ratio",
        Status.SKIPPED,
        "memory.gib is 512, needs >= 1024",
    ),
    (
        {"overrides": {"sysctl.vm.dirty_ratio": "7"}},
        {"memory__gib": None},
        "sysctl.vm.dirty_ratio",
        Status.UNKNOWN,
        "memory.gib",
    ),
]


@pytest.mark.parametrize(("request_", "facts", "name", "status", "why"), REASONS)
def test_a_setting_that_does_not_apply_says_why(
    request_: dict[str, Any], facts: dict[str, Any], name: str, status: str, why: str
) -> None:
    (row,) = by_setting(Request(**request_), **facts)[name]
    assert row["status"] == status
    assert row["why"].startswith(why)


@pytest.mark.parametrize(
    ("document", "overrides", "wanted"),
    [
        (tuned({"sysctl.vm.dirty_ratio": "on"}), {}, "5"),
        (tuned({"sysctl.vm.dirty_ratio": "7"}), {}, "7"),
        (tuned({"sysctl.vm.dirty_ratio": "7"}), {"sysctl.vm.dirty_ratio": "9"}, "9"),
        ({}, {"sysctl.vm.dirty_ratio": "on"}, "5"),
    ],
)
def test_an_opt_in_is_done_when_it_is_named_and_a_flag_wins(document: Any, overrides: Any, wanted: str) -> None:
    runtime = by_setting(Request(document=document, overrides=overrides))["sysctl.vm.dirty_ratio"][0]
    assert (runtime["status"], runtime["wanted"]) == (Status.CHANGE, wanted)


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request(profile="gpu"), "profile = 'gpu': no such profile; allowed: efa-gpu, gaudi, cpu, login"),
        (Request(document=tuned(profiles={"train": "x"})), "tuning.profiles.train = 'x': no such profile"),
        (
            Request(document=tuned(), group="trian"),
            "group = 'trian': the cluster has no such group; allowed: train, head",
        ),
        (Request(only=("sysctl.vm.max_mapcount",)), "no such setting; fix: did you mean sysctl.vm.max_map_count"),
        (Request(only=("lustre.*.x",)), "only = 'lustre.*.x': no such setting"),
        (
            Request(overrides={"vm.max_map_count": "on"}),
            "setting.vm.max_map_count = 'on': no such setting; fix: did you mean",
        ),
        (Request(document=tuned({"x": "1"})), "tuning.settings.x = '1': no such setting"),
        (Request(overrides={"sysctl.vm.dirty_ratio": "101"}), "not allowed; allowed: integer 1..100, or on, off"),
        (
            Request(overrides={"limit.memlock": "64\n* hard core 0"}),
            "not allowed; allowed: one of unlimited, or on, off",
        ),
        (Request(document=tuned({"sysctl.vm.dirty_ratio": 5})), "wrong type"),  # type: ignore[dict-item]
        (
            Request(document=tuned({"limit.memlock": "on"}), overrides={"limit.memlock": "off"}),
            "setting.limit.memlock = 'off': the cluster's tuning says \"on\"; fix: change the cluster",
        ),
    ],
)
def test_a_mistaken_request_is_one_line_and_nothing_is_planned(request_: Request, line: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(SETTINGS, bare(), request_)
    (only,) = caught.value.problems
    assert line in only


def test_all_mistakes_of_a_request_come_at_once() -> None:
    with pytest.raises(UserError) as caught:
        plan(SETTINGS, bare(), Request(profile="x", only=("y",), overrides={"z": "on", "sysctl.vm.dirty_ratio": "-1"}))
    assert len(caught.value.problems) == 4


def test_only_takes_patterns_and_plans_and_reports_nothing_else() -> None:
    found = by_setting(Request(only=("sysctl.vm.*", "limit.memlock")))
    assert set(found) == {one.id for one in SETTINGS if one.id.startswith("sysctl.vm.") or one.id == "limit.memlock"}


def test_a_value_that_is_a_multiple_of_an_unknown_fact_is_unknown() -> None:
    table = {
        "id": "x",
        "kind": "sysctl",
        "key": "vm.max_map_count",
        "profiles": ["efa-gpu"],
        "reason": "r",
        "source": "s",
    }
    settings = catalog.parse({"t": {"setting": [{**table, "value_per": {"fact": "cpu.count", "times": 1000}}]}})
    assert plan(settings, bare(), Request()).steps[0].wanted == "192000"
    (remark,) = plan(settings, bare(cpu__count=None), Request()).remarks
    assert (remark.status, remark.why) == (
        Status.UNKNOWN,
        "cpu.count could not be read, and the value is 1000 times that",
    )


def test_lines_of_a_setting_whose_condition_cannot_be_judged_stay() -> None:
    asked = Request(overrides={"sysctl.vm.dirty_ratio": "on"})
    done = after(bare(), plan(SETTINGS, bare(), asked).steps)
    assert "vm.dirty_ratio = 5" in done["files"][owned.SYSCTL]["content"]
    done["memory"]["gib"] = None
    again = plan(SETTINGS, done, asked)
    assert again.steps == ()
    assert [one.setting for one in again.remarks if one.status == Status.UNKNOWN] == ["sysctl.vm.dirty_ratio"]
