"""The settings' tables, each mistake in one, and what their conditions and comparisons say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import UserError
from node_setup.agent.kinds.compare import merge, satisfies
from node_setup.agent.settings import allowed, catalog, condition, data
from node_setup.agent.settings.condition import FAILS, HOLDS, UNKNOWN, judge

GOOD: dict[str, Any] = {"id": "sysctl.vm.max_map_count", "kind": "sysctl", "key": "vm.max_map_count", "value": "524288",
                        "profiles": ["cpu"], "reason": "many maps", "source": "somewhere"}  # fmt: skip


def parse(*tables: dict[str, Any]) -> Any:
    return catalog.parse({"kernel": {"setting": list(tables)}})


def test_shipped_settings_are_valid_sourced_and_safe() -> None:
    settings = catalog.load()
    assert len(settings) > 40
    assert all(one.source and one.reason for one in settings)
    left = {"kernel.yama.ptrace_scope", "vm.nr_hugepages", "net.ipv4.tcp_congestion_control"}
    assert not left & {one.key for one in settings if one.kind == "sysctl"}
    assert all(one.profiles == ("gaudi",) for one in settings if one.id.startswith("gaudi."))


def test_setting_is_parsed_with_defaults_tuples_and_value_per() -> None:
    (one,) = parse({**GOOD, "when": ["cpu.count > 64"]})
    assert (one.compare, one.severity, one.default, one.needs, one.value_per) == ("exact", "should", True, "", None)
    assert (one.profiles, one.when) == (("cpu",), ("cpu.count > 64",))
    (one,) = parse({**GOOD, "value": "", "value_per": {"fact": "cpu.count", "times": 100}})
    assert one.value_per == ("cpu.count", 100.0)


MISTAKES = [
    ({"id": "a b"}, ".id = 'a b': not an id"),
    ({"keys": "x"}, ".keys = 'x': unknown key; fix: did you mean key"),
    ({"kind": "sysctrl"}, ".kind = 'sysctrl': unknown; allowed: module-option"),
    ({"source": ""}, ".source is missing"),
    ({"profiles": []}, ".profiles is missing"),
    ({"profiles": ["gpu"]}, ".profiles = 'gpu': unknown; allowed: efa-gpu, gaudi, cpu, login"),
    ({"profiles": "cpu"}, ".profiles = 'cpu': wrong type"),
    ({"when": ["cpu.count above 3"]}, ".when = 'cpu.count above 3': not a condition"),
    ({"when": ["cpu.count > many"]}, "> needs a number on its right"),
    ({"compare": "more"}, ".compare = 'more': unknown"),
    ({"severity": "high"}, ".severity = 'high': unknown"),
    ({"needs": "restart"}, ".needs = 'restart': unknown"),
    ({"default": "no"}, ".default = 'no': wrong type"),
    ({"options": []}, ".options = []: wrong type"),
    ({"value": 524288}, ".value = 524288: wrong type; allowed: text in quotes"),
    ({"allowed": "number"}, ".allowed = 'number': not a rule"),
    ({"allowed": "integer >= 600000"}, ".value = '524288': does not fit `allowed`"),
    ({"value_per": {"fact": "cpu.count", "times": 2}}, ".value = '524288': value_per is given too"),
    ({"key": ""}, ".key is missing: a sysctl needs it"),
    ({"value": ""}, ".value is missing: a sysctl needs it"),
    ({"kind": "hold", "options": {}}, ".options.packages is missing: a hold needs it"),
    ({"value": "", "value_per": {"fact": "cpu.count"}}, ".value_per = {'fact': 'cpu.count'}: not a formula"),
]


@pytest.mark.parametrize(("change", "line"), MISTAKES)
def test_a_mistake_in_a_table_is_one_line_that_names_it(change: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse({**GOOD, **change})
    assert line in str(caught.value)
    assert all(one.startswith(f"kernel.toml: {change.get('id', GOOD['id'])}.") for one in caught.value.problems)


@pytest.mark.parametrize(
    ("tables", "count", "words"),
    [
        ({"setting": [{**GOOD, "kind": "x", "compare": "y"}, {"id": "z"}]}, 6, "kernel.toml"),
        ({"setting": [GOOD, GOOD]}, 1, "is there twice"),
        ({"setting": [GOOD, {**GOOD, "id": "other"}]}, 1, "sysctl.vm.max_map_count has the same sysctl"),
        ({"setting": [GOOD], "settings": []}, 1, "unknown table"),
    ],
)
def test_what_is_wrong_with_tables_together_is_named_all_at_once(
    tables: dict[str, Any], count: int, words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        catalog.parse({"kernel": tables})
    assert len(caught.value.problems) == count


def test_files_without_settings_are_other_data() -> None:
    assert catalog.parse({"xid": {"xid": [{"number": 79}]}}) == ()


def test_wanted_facts_follow_from_keys_conditions_and_document() -> None:
    settings = parse(
        {**GOOD, "when": ["services.dlami-nvme.service", "packages.installed.needrestart", "sysctl.vm.swappiness > 1"]},
        {**GOOD, "id": "h", "kind": "hold", "key": "", "value": "", "options": {"packages": ["linux-aws"]}},
        {**GOOD, "id": "o", "kind": "module-option", "key": "ptlrpc.x", "value": "1"},
        {**GOOD, "id": "p", "kind": "lustre-parameter", "key": "osc.*.x", "value": "1"},
        {**GOOD, "id": "u", "kind": "unit", "key": "chrony.service", "value": ""},
    )
    lustre = {"path": "/fsx-1", "stripes": [{"path": "/fsx-1/checkpoints", "options": []}]}
    wanted = catalog.wanted_facts(settings, {"lustre": lustre, "mount": {"dns_name": "x", "mount_name": "y"}})
    assert (wanted.sysctls, wanted.packages) == (("vm.max_map_count", "vm.swappiness"), ("linux-aws", "needrestart"))
    assert (wanted.module_parameters, wanted.lustre_parameters) == (("ptlrpc.x",), ("osc.*.x",))
    assert wanted.stripe_paths == ("/fsx-1/checkpoints",)
    assert {"chrony.service", "dlami-nvme.service", "slurmd.service"} <= set(wanted.services)
    assert wanted.mount_units[0] == "/etc/systemd/system/fsx\\x2d1.mount"
    assert catalog.wanted_facts(parse(GOOD), {"lustre": {"path": "/fsx"}, "mount": None}).mount_units == ()


def test_what_kinds_look_at_is_read() -> None:
    document = {"lustre": {"path": "/fsx", "stripes": []}, "mount": {"dns_name": "x", "mount_name": "y"}}
    asked = catalog.wanted_facts(catalog.load(), document)
    units = [f"/etc/systemd/system/{name}" for name in ("fsx.mount", "fsx.automount", "opt-dlami-nvme.mount")]
    assert {"/etc/fstab", *units} <= set(asked.mount_units)
    ours = ("opt-dlami-nvme.mount", "fsx.automount", "lustrain-gpu-clocks.service", "lustrain-lnet.service")
    gpus = ("nvidia-persistenced.service", "parallelcluster_nvidia.service", "nvidia-fabricmanager.service")
    assert {"dlami-nvme.service", *ours, *gpus} <= set(asked.services)


def test_a_checkout_reads_every_file_of_the_folder() -> None:
    assert set(data.tables()) == {path.stem for path in (Path(data.__file__).parents[2] / "settings").glob("*.toml")}


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
    outcome = judge(condition.parse(text), TREE)
    assert (outcome.status, outcome.why) == (status, why)


def test_absent_value_is_unknown_while_its_fact_is_unread() -> None:
    tree = {"services": None, "packages": {"installed": None}}
    assert judge(condition.parse("services.slurmd.service"), tree).status == UNKNOWN
    assert judge(condition.parse("not packages.installed.x"), tree).status == UNKNOWN


@pytest.mark.parametrize("text", ["", "a b", "> 3", "a.b >", "a.b > x", "a.b ~ c", "not a == b"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        condition.parse(text)


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=5), st.integers() | st.none()), st.text("ab", min_size=1))
def test_a_condition_and_its_negation_never_agree_unless_unknown(tree: dict[str, Any], path: str) -> None:
    plain, negated = judge(condition.parse(path), tree).status, judge(condition.parse(f"not {path}"), tree).status
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
    written = merge(theirs, ours, compare)
    assert satisfies(written, ours, compare)
    if len(found) == len(wanted) and compare == "at-least":
        assert satisfies(written, theirs, "at-least")
