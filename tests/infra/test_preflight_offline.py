"""Each rule finds its mistake, names the key and the fix, and says nothing about a good cluster."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from infra.catalog.instances import Card, Instance, instance
from infra.plan.place import Place
from infra.preflight import instances
from infra.preflight.finding import Finding
from infra.preflight.offline import ABOUT_SUPPRESSIONS, LAST_OFFLINE, OFFLINE, run_offline
from infra.preflight.rule import Context
from tests.infra.edits import GONE, STACKS, place, spec_of
from tests.infra.mistakes import EKS, MISTAKES, NOW, SPOT, Mistake


def found(mistake: Mistake) -> list[Finding]:
    return run_offline(spec_of(mistake.stack, mistake.edits), mistake.place or place(mistake.stack), NOW)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_each_mistake_is_found_with_its_key_and_a_fix(mistake: Mistake) -> None:
    hits = [finding for finding in found(mistake) if finding.code == mistake.code]
    assert [finding.path for finding in hits if finding.path == mistake.path], [one.line() for one in found(mistake)]
    for finding in hits:
        assert finding.fix
        assert finding.source
        assert "\n" not in finding.line()
        assert finding.line().startswith(f"{finding.code} {finding.level}: {finding.path}: ")


@pytest.mark.parametrize("stack", STACKS)
def test_no_rule_says_anything_about_an_example_stack(stack: str) -> None:
    assert run_offline(spec_of(stack, {}), place(stack), NOW) == []


def test_every_rule_has_a_mistake_here() -> None:
    planted = {mistake.code for mistake in MISTAKES} | {"EC2-010", "CFG-013"}
    assert planted == set(OFFLINE) | set(ABOUT_SUPPRESSIONS)


def test_there_are_at_least_45_rules_and_each_has_a_code_of_its_own() -> None:
    rules = [*OFFLINE.values(), *ABOUT_SUPPRESSIONS.values()]
    assert len({rule.code for rule in rules}) == len({type(rule) for rule in rules}) == len(rules) >= 45
    assert all(int(rule.code[-3:]) <= LAST_OFFLINE for rule in rules)
    assert all(rule.checks.endswith(".") and rule.source for rule in rules)


def test_interfaces_that_do_not_fit_on_the_cards_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = instance("g6e.48xlarge")
    assert real is not None
    cards = (Card(0, 1, frozenset({"interface"})), *real.cards[1:])
    odd = Instance(**{**vars(real), "cards": cards})
    monkeypatch.setattr(instances, "known_groups", lambda spec: [("groups.0", spec.groups[0], odd)])
    hits = list(OFFLINE["EC2-010"].check(spec_of(SPOT, {}), instances.Context()))
    assert [finding.path for finding in hits] == ["groups.0.instance_type"]
    assert "3 of 4" in hits[0].message


def test_an_unknown_type_comes_with_what_was_probably_meant() -> None:
    mistake = next(one for one in MISTAKES if one.code == "EC2-001")
    hit = next(one for one in found(mistake) if one.code == "EC2-001")
    assert "g6e.48xlarge" in hit.fix


def test_all_mistakes_are_told_at_once_errors_first() -> None:
    edits = {"zone_id": "usw2-az1", "budget": GONE, "groups.0.instance_type": "p9.huge", "runs_uri": "s3://x/runs"}
    findings = run_offline(spec_of(SPOT, edits), place(SPOT), NOW)
    assert {"NET-001", "BUD-001", "EC2-001", "S3-004"} <= {finding.code for finding in findings}
    assert [finding.level for finding in findings] == sorted(finding.level for finding in findings)


def test_a_suppressed_finding_is_silent_and_the_suppression_is_not_complained_about() -> None:
    suppress = [{"code": "BUD-001", "reason": "the department watches the bill"}]
    assert run_offline(spec_of(SPOT, {"budget": GONE, "suppress": suppress}), place(SPOT), NOW) == []


def test_what_no_plan_can_be_built_on_cannot_be_suppressed() -> None:
    suppress = [{"code": "EC2-001", "reason": "a new type of today"}]
    findings = run_offline(spec_of(SPOT, {"groups.0.instance_type": "p9.huge", "suppress": suppress}), place(SPOT), NOW)
    assert {"EC2-001", "CFG-091"} <= {finding.code for finding in findings}


def test_a_suppression_of_an_online_rule_is_left_alone_offline() -> None:
    suppress = [{"code": "EC2-102", "reason": "the quota is being raised"}]
    assert run_offline(spec_of(SPOT, {"suppress": suppress}), place(SPOT), NOW) == []


@pytest.mark.parametrize(("partition", "refused"), [("aws", False), ("aws-cn", False), ("aws-us-gov", True)])
def test_a_budget_is_refused_where_aws_has_none(partition: str, refused: bool) -> None:
    found = OFFLINE["BUD-005"].check(spec_of(SPOT, {}), Context(partition=partition))
    assert [finding.level for finding in found] == (["error"] if refused else [])
    without = run_offline(spec_of(SPOT, {"budget": GONE}), Place("us-gov-west-1", "123456789012", "aws-us-gov"), NOW)
    assert not {"BUD-001", "BUD-005"} & {finding.code for finding in without}


@pytest.mark.parametrize(
    ("version", "today", "fix"),
    [
        ("1.33", datetime(2026, 7, 29, 23, tzinfo=UTC), None),
        ("1.33", datetime(2026, 7, 30, tzinfo=UTC), "set 1.34"),
        ("1.34", datetime(2026, 12, 2, tzinfo=UTC), None),
        ("1.34", datetime(2026, 12, 3, tzinfo=UTC), "when HyperPod takes it"),
    ],
)
def test_a_kubernetes_version_is_warned_of_from_the_day_after_its_standard_support(
    version: str, today: datetime, fix: str | None
) -> None:
    found = list(OFFLINE["EKS-010"].check(spec_of(EKS, {"eks.version": version}), Context(now=today)))
    assert [finding.level for finding in found] == (["warning"] if fix else [])
    assert all(fix is not None and fix in finding.fix for finding in found)


def test_without_a_place_the_rules_about_places_are_silent_and_that_is_said() -> None:
    found = run_offline(spec_of(SPOT, {"zone_id": "usw2-az1"}), None, NOW)
    assert [(one.code, one.level, one.path) for one in found] == [("CFG-013", "warning", "aws:region")]
