"""Conditions: what holds, what fails with which reason, and what cannot be known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.agent.kinds.compare import merged, satisfies
from node_setup.agent.settings import allowed
from node_setup.agent.settings.condition import FAILS, HOLDS, UNKNOWN, judge, parse

TREE: dict[str, Any] = {
    "memory": {"gib": 32.0},
    "cpu": {"count": None, "vendor": "GenuineIntel"},
    "lustre": {"mounts": [], "lctl": True},
    "gpu": {"present": None},
    "services": {
        "dlami-nvme.service": {"load": "not-found", "active": "inactive"},
        "slurmd.service": {"load": "loaded", "active": "active"},
    },
    "packages": {"installed": {"linux-aws": "6.8"}},
    "sysctl": {"vm.swappiness": "60"},
    "document": {"backend": "machines", "lustre": None},
    "group": {"role": "worker"},
    "profile": "cpu",
}

CASES = [
    ("memory.gib >= 32", HOLDS, ""),
    ("memory.gib > 64", FAILS, "memory.gib is 32, needs > 64"),
    ("memory.gib != 32", FAILS, "memory.gib is 32, needs != 32"),
    ("cpu.vendor == GenuineIntel", HOLDS, ""),
    ("cpu.vendor in AuthenticAMD, ARM", FAILS, "cpu.vendor is GenuineIntel, needs one of AuthenticAMD, ARM"),
    ('profile in ["cpu", "login"]', HOLDS, ""),
    ("cpu.count > 64", UNKNOWN, "cpu.count could not be read, needs > 64"),
    ("cpu.cores > 64", UNKNOWN, "cpu.cores could not be read, needs > 64"),
    ("gpu.present", UNKNOWN, "gpu.present could not be read, needs it"),
    ("not gpu.present", UNKNOWN, "gpu.present could not be read, needs it not to be there"),
    ("lustre.mounts", FAILS, "no lustre.mounts"),
    ("not lustre.mounts", HOLDS, ""),
    ("lustre.lctl == true", HOLDS, ""),
    ("not lustre.lctl", FAILS, "lustre.lctl is true"),
    ("not services.dlami-nvme.service", HOLDS, ""),
    ("services.dlami-nvme.service", FAILS, "no services.dlami-nvme.service"),
    ("services.slurmd.service", HOLDS, ""),
    ("services.slurmd.service.active == active", HOLDS, ""),
    ("services.chrony.service", FAILS, "no services.chrony.service"),
    ("packages.installed.linux-aws", HOLDS, ""),
    ("packages.installed.needrestart", FAILS, "no packages.installed.needrestart"),
    ("sysctl.vm.swappiness < 61", HOLDS, ""),
    ("document.lustre.path", FAILS, "no document.lustre.path"),
    ("not document.lustre.efa", HOLDS, ""),
    ("document.backend == ec2", FAILS, "document.backend is machines, needs == ec2"),
    ("document.cluster == a", FAILS, "document.cluster is not set, needs == a"),
    ("group.role == worker", HOLDS, ""),
]


@pytest.mark.parametrize(("text", "status", "why"), CASES)
def test_a_condition_holds_fails_with_its_reason_or_is_unknown(text: str, status: str, why: str) -> None:
    outcome = judge(parse(text), TREE)
    assert (outcome.status, outcome.why) == (status, why)


def test_what_is_not_on_the_node_is_unknown_as_long_as_nobody_could_look() -> None:
    tree = {"services": None, "packages": {"installed": None}}
    assert judge(parse("services.slurmd.service"), tree).status == UNKNOWN
    assert judge(parse("not packages.installed.x"), tree).status == UNKNOWN


@pytest.mark.parametrize("text", ["", "a b", "> 3", "a.b >", "a.b > x", "a.b ~ c", "not a == b"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=5), st.integers() | st.none()), st.text("ab", min_size=1))
def test_a_condition_and_its_negation_never_agree_unless_unknown(tree: dict[str, Any], path: str) -> None:
    plain, negated = judge(parse(path), tree).status, judge(parse(f"not {path}"), tree).status
    assert (plain == UNKNOWN) == (negated == UNKNOWN)
    assert plain == UNKNOWN or {plain, negated} == {HOLDS, FAILS}


@pytest.mark.parametrize(
    ("rule", "value", "taken"),
    [
        ("integer", "-3", True),
        ("integer", "3.5", False),
        ("integer", "٣", False),
        ("integer >= 5", "5", True),
        ("integer >= 5", "4", False),
        ("integer <= 5", "6", False),
        ("integer 1..100", "100", True),
        ("integer 1..100", "0", False),
        ("one of none, mq-deadline", "none", True),
        ("one of none, mq-deadline", "noop", False),
        ("text", "a b", True),
        ("text", "a\nb", False),
        ("text", " a", False),
        ("text", "", False),
        ("text", "x" * 201, False),
    ],
)
def test_a_rule_takes_what_it_says(rule: str, value: str, taken: bool) -> None:
    assert allowed.is_rule(rule)
    assert allowed.accepts(rule, value) is taken


@pytest.mark.parametrize(
    ("found", "wanted", "compare", "enough"),
    [
        ("4096\t131072 6291456", "4096 131072 6291456", "exact", True),
        ("0x10", "16", "exact", True),
        ("unlimited", "infinity", "exact", True),
        ("10 20", "10", "exact", False),
        ("10 20", "10 21", "at-least", False),
        ("11 21", "10 21", "at-least", True),
        ("3", "5", "at-most", True),
        ("", "5", "at-most", False),
        ("madvise", "never", "at-least", False),
    ],
)
def test_values_compare_field_by_field(found: str, wanted: str, compare: str, enough: bool) -> None:
    assert satisfies(found, wanted, compare) is enough


NUMBERS = st.lists(st.integers(0, 2**31), min_size=1, max_size=3)


@given(NUMBERS, NUMBERS, st.sampled_from(["exact", "at-least", "at-most"]))
def test_what_is_written_will_do_and_at_least_lowers_no_field(
    found: list[int], wanted: list[int], compare: str
) -> None:
    ours, theirs = " ".join(map(str, wanted)), " ".join(map(str, found))
    written = merged(theirs, ours, compare)
    assert satisfies(written, ours, compare)
    if len(found) == len(wanted) and compare == "at-least":
        assert satisfies(written, theirs, "at-least")
