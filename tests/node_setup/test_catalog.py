"""The settings' tables: what is shipped is right, and each mistake in one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from node_setup.agent.settings import catalog, data

GOOD: dict[str, Any] = {
    "id": "sysctl.vm.max_map_count",
    "kind": "sysctl",
    "key": "vm.max_map_count",
    "value": "524288",
    "profiles": ["cpu"],
    "reason": "many maps",
    "source": "somewhere",
}


def parse(*tables: dict[str, Any]) -> Any:
    return catalog.parse({"kernel": {"setting": list(tables)}})


def test_what_is_shipped_is_right_and_says_where_it_is_from() -> None:
    settings = catalog.load()
    assert len(settings) > 40
    assert all(one.source and one.reason for one in settings)


def test_opt_ins_are_those_that_the_research_did_not_find_good_for_all() -> None:
    opt_in = {one.id for one in catalog.load() if not one.default and one.kind == "sysctl"}
    assert {name.removeprefix("sysctl.") for name in opt_in} == {
        "vm.dirty_ratio",
        "vm.dirty_background_ratio",
        "vm.dirty_expire_centisecs",
        "net.core.somaxconn",
        "net.ipv4.tcp_max_syn_backlog",
        "net.ipv4.neigh.default.gc_thresh2",
        "net.ipv4.neigh.default.gc_thresh3",
    }


@pytest.mark.parametrize("key", ["kernel.yama.ptrace_scope", "vm.nr_hugepages", "net.ipv4.tcp_congestion_control"])
def test_what_costs_security_or_belongs_to_an_installer_is_not_set(key: str) -> None:
    assert key not in {one.key for one in catalog.load() if one.kind == "sysctl"}


def test_a_setting_has_its_defaults_and_its_lists_as_tuples() -> None:
    (one,) = parse({**GOOD, "when": ["cpu.count > 64"]})
    assert (one.compare, one.severity, one.default, one.needs) == ("exact", "should", True, "")
    assert (one.profiles, one.when) == (("cpu",), ("cpu.count > 64",))


def test_a_value_can_be_a_multiple_of_a_fact() -> None:
    table = {key: value for key, value in GOOD.items() if key != "value"}
    (one,) = parse({**table, "value_per": {"fact": "cpu.count", "times": 100}})
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


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse({**GOOD, "kind": "x", "compare": "y"}, {"id": "z"})
    assert len(caught.value.problems) == 2 + 4


def test_an_id_is_there_once_and_so_is_a_key_of_a_kind() -> None:
    with pytest.raises(UserError, match="is there twice"):
        parse(GOOD, GOOD)
    with pytest.raises(UserError, match=r"sysctl.vm.max_map_count has the same sysctl"):
        parse(GOOD, {**GOOD, "id": "other"})


def test_tables_beside_settings_are_refused_and_files_without_settings_are_other_data() -> None:
    with pytest.raises(UserError, match="unknown table"):
        catalog.parse({"kernel": {"setting": [GOOD], "settings": []}})
    assert catalog.parse({"xid": {"xid": [{"number": 79}]}}) == ()


def test_what_is_wanted_follows_from_keys_conditions_and_the_document() -> None:
    settings = parse(
        {**GOOD, "when": ["services.dlami-nvme.service", "packages.installed.needrestart", "sysctl.vm.swappiness > 1"]},
        {**GOOD, "id": "h", "kind": "hold", "key": "", "value": "", "options": {"packages": ["linux-aws"]}},
        {**GOOD, "id": "o", "kind": "module-option", "key": "ptlrpc.x", "value": "1"},
        {**GOOD, "id": "p", "kind": "lustre-parameter", "key": "osc.*.x", "value": "1"},
        {**GOOD, "id": "u", "kind": "unit", "key": "chrony.service", "value": ""},
    )
    lustre = {"path": "/fsx-1", "stripes": [{"path": "/fsx-1/checkpoints", "options": []}]}
    wanted = catalog.wanted(settings, {"lustre": lustre, "mount": {"dns_name": "x", "mount_name": "y"}})
    assert wanted.sysctls == ("vm.max_map_count", "vm.swappiness")
    assert wanted.packages == ("linux-aws", "needrestart")
    assert wanted.module_parameters == ("ptlrpc.x",)
    assert wanted.lustre_parameters == ("osc.*.x",)
    assert wanted.stripe_paths == ("/fsx-1/checkpoints",)
    assert {"chrony.service", "dlami-nvme.service", "slurmd.service"} <= set(wanted.services)
    assert wanted.mount_units[0] == "/etc/systemd/system/fsx\\x2d1.mount"


def test_nothing_is_wanted_of_a_mount_that_others_own() -> None:
    assert catalog.wanted(parse(GOOD), {"lustre": {"path": "/fsx"}, "mount": None}).mount_units == ()


def test_a_checkout_reads_every_file_of_the_folder() -> None:
    assert set(data.tables()) == {path.stem for path in (Path(data.__file__).parents[2] / "settings").glob("*.toml")}
