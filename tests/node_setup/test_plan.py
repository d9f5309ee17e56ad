"""Which profile a node gets, which settings apply to it and why, and which requests are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lustrain.problem import UserError
from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.agent import document_text
from node_setup.agent.model import Request
from node_setup.agent.run.plan import choose_profile, plan, rows
from node_setup.agent.settings import catalog
from tests.node_setup.kinds_facts import applied, bare

SETTINGS = tuple(one for one in catalog.load() if one.kind in ("sysctl", "limit", "observe", "kernel-argument"))
GROUPS = {
    "train": {"type": "p5.48xlarge", "role": "worker", "gpus": 8},
    "head": {"type": "m5.large", "role": "controller"},
}


def tuned(settings: dict[str, str] | None = None, profiles: dict[str, str] | None = None) -> dict[str, Any]:
    return {"groups": GROUPS, "tuning": {"settings": settings or {}, "profiles": profiles or {}}}


NONE = {"efa__devices": [], "gpu__present": False, "instance__type": None}
LOGIN = tuned(profiles={"train": "login"})
PROFILES: list[tuple[dict[str, Any], Request, str, str]] = [
    ({}, Request(profile="cpu"), "cpu", "requested"),
    ({}, Request(profile="cpu", document=LOGIN), "cpu", "requested"),
    ({}, Request(document=LOGIN), "login", "the cluster's tuning names it for group train"),
    ({}, Request(document=tuned(), group="head"), "login", "the group's role is controller"),
    ({"hpu__present": True}, Request(), "gaudi", "it has Gaudi devices"),
    ({}, Request(), "efa-gpu", "it has EFA devices"),
    ({"efa__devices": []}, Request(), "efa-gpu", "it has GPUs"),
    ({**NONE, "instance__type": "ml.p5.48xlarge"}, Request(), "efa-gpu", "p5.48xlarge has GPUs or EFA, though none"),
    ({**NONE, "instance__type": "dl1.24xlarge"}, Request(), "gaudi", "dl1.24xlarge has Gaudi devices"),
    (NONE, Request(document=tuned()), "efa-gpu", "p5.48xlarge has GPUs"),
    (NONE, Request(), "cpu", "neither GPUs nor EFA nor Gaudi"),
    ({**NONE, "gpu__present": None}, Request(), "cpu", "neither GPUs nor EFA nor Gaudi"),
]


@pytest.mark.parametrize(("facts", "request_", "profile", "why"), PROFILES)
def test_profile_is_by_flag_then_cluster_then_facts(
    facts: dict[str, Any], request_: Request, profile: str, why: str
) -> None:
    chosen, because = choose_profile(bare(**facts), request_)
    assert (chosen, because[: len(why)]) == (profile, why)


TWICE = {**tuned(), "groups": {**GROUPS, "more": GROUPS["train"]}}


@pytest.mark.parametrize(
    ("told", "kind", "request_", "group"),
    [
        ("train", "m5.large", Request(document=tuned()), "train"),
        ("train", None, Request(document=tuned(), group="head"), "head"),
        (None, "ml.p5.48xlarge", Request(document=tuned()), "train"),
        (None, "ml.p5.48xlarge", Request(document=TWICE), None),
        (None, "c5.large", Request(document=tuned()), None),
        (None, None, Request(document=tuned()), None),
    ],
)
def test_group_is_the_recorded_one_or_the_only_one_of_its_type(
    told: str | None, kind: str | None, request_: Request, group: str | None
) -> None:
    facts = {**bare(instance__type=kind), "group": told}
    assert plan(SETTINGS, facts, request_).group == group
    assert json.loads(document_text(request_, facts))["group"] == group


def by_setting(request: Request, **facts: Any) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows(plan(SETTINGS, bare(**facts), request)):
        found.setdefault(row["setting"], []).append(row)
    return found


MAPS, RATIO = "sysctl.vm.max_map_count", "sysctl.vm.dirty_ratio"
REASONS: list[tuple[Request, dict[str, Any], str, Status, str]] = [
    (Request(profile="login"), {}, MAPS, Status.SKIPPED, "for efa-gpu, gaudi, cpu; this node is login"),
    (Request(), {}, RATIO, Status.SKIPPED, "opt-in"),
    (Request(overrides={MAPS: "off"}), {}, MAPS, Status.SKIPPED, "turned off"),
    (Request(overrides={RATIO: "on"}), {"memory__gib": 512.0}, RATIO, Status.SKIPPED, "memory.gib is 512, needs >="),
    (Request(overrides={RATIO: "7"}), {"memory__gib": None}, RATIO, Status.UNKNOWN, "memory.gib"),
]


@pytest.mark.parametrize(("request_", "facts", "name", "status", "why"), REASONS)
def test_a_setting_that_does_not_apply_says_why(
    request_: Request, facts: dict[str, Any], name: str, status: str, why: str
) -> None:
    (row,) = by_setting(request_, **facts)[name]
    assert (row["status"], row["why"][: len(why)]) == (status, why)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (Request(document=tuned({RATIO: "on"})), "5"),
        (Request(document=tuned({RATIO: "7"})), "7"),
        (Request(document=tuned({RATIO: "7"}), overrides={RATIO: "9"}), "9"),
        (Request(overrides={RATIO: "on"}), "5"),
    ],
)
def test_an_opt_in_is_done_when_it_is_named_and_a_flag_wins(request_: Request, wanted: str) -> None:
    runtime = by_setting(request_)[RATIO][0]
    assert (runtime["status"], runtime["wanted"]) == (Status.CHANGE, wanted)


BOTH_WAYS = Request(document=tuned({"limit.memlock": "on"}), overrides={"limit.memlock": "off"})


@pytest.mark.parametrize(
    ("request_", "path", "why"),
    [
        (Request(profile="gpu"), "profile", "no such profile"),
        (Request(document=tuned(profiles={"train": "x"})), "tuning.profiles.train", "no such profile"),
        (Request(document=tuned(), group="trian"), "group", "allowed: train, head"),
        (Request(only=("sysctl.vm.max_mapcount",)), "only", f"did you mean {MAPS}"),
        (Request(only=("lustre.*.x",)), "only", "no such setting"),
        (Request(overrides={"vm.max_map_count": "on"}), "setting.vm.max_map_count", "did you mean"),
        (Request(document=tuned({"x": "1"})), "tuning.settings.x", "no such setting"),
        (Request(overrides={RATIO: "101"}), f"setting.{RATIO}", "allowed: integer 1..100, or on, off"),
        (
            Request(overrides={"limit.memlock": "64\n* hard core 0"}),
            "setting.limit.memlock",
            "allowed: one of unlimited",
        ),
        (Request(document=tuned({RATIO: 5})), f"tuning.settings.{RATIO}", "wrong type"),  # type: ignore[dict-item]
        (BOTH_WAYS, "setting.limit.memlock", "fix: change the cluster"),
    ],
)
def test_a_mistaken_request_is_one_line_and_nothing_is_planned(request_: Request, path: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(SETTINGS, bare(), request_)
    (only,) = caught.value.problems
    assert (only.partition(" = ")[0], why in only) == (path, True)


def test_all_mistakes_of_a_request_come_at_once() -> None:
    with pytest.raises(UserError) as caught:
        plan(SETTINGS, bare(), Request(profile="x", only=("y",), overrides={"z": "on", RATIO: "-1"}))
    assert len(caught.value.problems) == 4


def test_only_takes_patterns_and_plans_and_reports_nothing_else() -> None:
    found = by_setting(Request(only=("sysctl.vm.*", "limit.memlock")))
    assert set(found) == {one.id for one in SETTINGS if one.id.startswith("sysctl.vm.") or one.id == "limit.memlock"}


def test_value_per_unknown_fact_is_unknown() -> None:
    per: dict[str, Any] = {"value": "", "value_per": ("cpu.count", 1000.0), "allowed": "integer"}
    settings = [replace(one, **per) for one in SETTINGS if one.id == MAPS]
    assert plan(settings, bare(), Request()).steps[0].wanted == "192000"
    (remark,) = plan(settings, bare(cpu__count=None), Request()).remarks
    assert remark.status == Status.UNKNOWN


def test_lines_of_a_setting_with_unknown_condition_stay() -> None:
    asked = Request(overrides={RATIO: "on"})
    done = applied(bare(), plan(SETTINGS, bare(), asked).steps)
    assert "vm.dirty_ratio = 5" in done["files"][owned.SYSCTL]["content"]
    done["memory"]["gib"] = None
    again = plan(SETTINGS, done, asked)
    assert again.steps == ()
    assert [one.setting for one in again.remarks if one.status == Status.UNKNOWN] == [RATIO]
