"""Lustre's parameters and its mount: facts in, steps out."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import UserError
from node_setup.agent.kinds.lustre import mount as lustre_mount
from node_setup.agent.kinds.lustre import parameter as lustre_parameter
from node_setup.agent.model import Remark, Request, Step, Write
from node_setup.agent.settings.catalog import wanted
from tests.conftest import require
from tests.node_setup.kinds_facts import SETTINGS, applied, commands, machine, plan, remark, steps

RPCS, CHANGING = "mdc.*.max_rpcs_in_flight", "mdc.*.max_mod_rpcs_in_flight"
SOURCE = "fs-0123.fsx.us-east-1.amazonaws.com@tcp:/abcdef"
UNIT, AUTOMOUNT = "/etc/systemd/system/fsx.mount", "/etc/systemd/system/fsx.automount"
MOUNT = {"source": SOURCE, "target": "/fsx", "fstype": "lustre", "options": ["rw", "noatime", "flock", "lazystatfs"]}
MACHINES = {
    "backend": "machines",
    "lustre": {"path": "/fsx", "stripes": []},
    "mount": {"dns_name": "fs-0123.fsx.us-east-1.amazonaws.com", "mount_name": "abcdef"},
}


def mounted(parameters: dict[str, Any] | None, **sections: Any) -> dict[str, Any]:
    lustre = {"parameters": parameters, "stripes": {}, "lfs": True}
    return machine(mounts=[MOUNT], lustre=lustre, **sections)


def mds(rpcs: str, changing: str) -> dict[str, Any]:
    return mounted({RPCS: {"mdc.a.max_rpcs_in_flight": rpcs}, CHANGING: {"mdc.a.max_mod_rpcs_in_flight": changing}})


def both(facts: dict[str, Any], rpcs: str, changing: str) -> list[Step | Remark]:
    pair = [
        replace(SETTINGS["lustre.mdc.max_rpcs_in_flight"], value=rpcs),
        replace(SETTINGS["lustre.mdc.max_mod_rpcs_in_flight"], value=changing),
    ]
    return lustre_parameter.plan(pair, frozenset(one.id for one in pair), facts, Request())


def test_one_instance_that_differs_is_enough_to_set_all_of_the_pattern() -> None:
    key = "osc.*OST*.max_rpcs_in_flight"
    facts = mounted({key: {"osc.x-OST0000.max_rpcs_in_flight": "32", "osc.x-OST0001.max_rpcs_in_flight": "8"}})
    said = plan("lustre.osc.max_rpcs_in_flight", facts)
    assert commands(said) == ["lctl set_param osc.*OST*.max_rpcs_in_flight=32"]
    assert steps(said)[0].found == "32, 8"
    again = plan("lustre.osc.max_rpcs_in_flight", applied(facts, said))
    assert remark(again).status == "ok"
    assert "all 2 instances; set again at each boot" in remark(again).why


@pytest.mark.parametrize(
    ("parameters", "status", "why"),
    [
        (None, "unknown", "could not be read"),
        ({}, "unknown", "could not be read"),
        ({"llite.*.statahead_xattr": {}}, "skipped", "this client has no parameter"),
        ({"llite.*.statahead_xattr": {"llite.a.statahead_xattr": "1"}}, "ok", "the only instance"),
    ],
)
def test_a_parameter_that_is_not_there_or_not_read_is_said_and_not_set(
    parameters: dict[str, Any] | None, status: str, why: str
) -> None:
    only = remark(plan("lustre.llite.statahead_xattr", mounted(parameters)))
    assert only.status == status
    assert why in only.why


def test_without_a_mount_there_is_nothing_to_set() -> None:
    only = remark(plan("lustre.ldlm.lru_max_age", machine()))
    assert only.status == "skipped"
    assert "no Lustre file system is mounted" in only.why


def test_requests_that_change_something_stay_below_all_requests_whichever_way_both_move() -> None:
    raised = commands(both(mds("8", "7"), "64", "50"))
    assert raised == [f"lctl set_param {RPCS}=64", f"lctl set_param {CHANGING}=50"]
    lowered = commands(both(mds("64", "50"), "16", "10"))
    assert lowered == [f"lctl set_param {CHANGING}=10", f"lctl set_param {RPCS}=16"]


@given(st.integers(2, 256), st.integers(1, 255), st.integers(2, 256), st.integers(1, 255))
def test_the_client_refuses_no_step_of_the_pair(rpcs: int, changing: int, new_rpcs: int, new_changing: int) -> None:
    if changing >= rpcs:
        return
    said = both(mds(str(rpcs), str(changing)), str(new_rpcs), str(new_changing))
    if new_changing >= new_rpcs:
        assert steps(said) == []
        assert any(isinstance(one, Remark) and one.status == "conflict" for one in said)
        return
    now = {RPCS: rpcs, CHANGING: changing}
    for step in steps(said):
        now[step.target] = int(step.wanted)
        assert now[CHANGING] < now[RPCS], f"the client would refuse {step.target} = {step.wanted}"
    assert now == {RPCS: new_rpcs, CHANGING: new_changing}


def test_one_of_the_pair_alone_is_measured_against_what_the_other_is_now() -> None:
    low = plan("lustre.mdc.max_rpcs_in_flight", mds("64", "50"), value="16")
    assert remark(low).status == "conflict"
    assert f"must stay above {CHANGING} = 50" in remark(low).why
    assert commands(plan("lustre.mdc.max_mod_rpcs_in_flight", mds("64", "7"))) == [f"lctl set_param {CHANGING}=50"]
    assert remark(plan("lustre.mdc.max_mod_rpcs_in_flight", mds("8", "7"))).status == "conflict"


def test_the_catalogue_sets_requests_before_those_that_change_something_and_opt_ins_are_off() -> None:
    names = [name for name, setting in SETTINGS.items() if setting.kind == "lustre-parameter"]
    assert names.index("lustre.mdc.max_rpcs_in_flight") < names.index("lustre.mdc.max_mod_rpcs_in_flight")
    off = {name for name in names if not SETTINGS[name].default}
    assert off == {
        "lustre.osc.max_dirty_mb",
        "lustre.osc.max_pages_per_rpc",
        "lustre.llite.max_read_ahead_mb",
        "lustre.llite.max_read_ahead_per_file_mb",
    }


def test_on_machines_the_mount_is_a_unit_of_ours_and_then_stays_as_it_is() -> None:
    facts = machine()
    facts["files"].update({UNIT: None, AUTOMOUNT: None})
    said = plan("lustre.mount", facts, MACHINES)
    assert [step.part for step in steps(said)] == ["persisted", "runtime"]
    unit = next(
        action.content for action in steps(said)[0].actions if isinstance(action, Write) and action.path == UNIT
    )
    for line in (
        f"What={SOURCE}",
        "Where=/fsx",
        "Type=lustre",
        "Options=noatime,flock,_netdev",
        "Wants=network-online.target",
        "After=network-online.target configure-efa-fsx-lustre-client.service lustrain-lnet.service",
    ):
        assert line in unit.splitlines()
    assert commands(said) == [
        "systemctl daemon-reload",
        "systemctl enable fsx.automount",
        "systemctl start fsx.mount",
    ]
    assert remark(plan("lustre.mount", applied(facts, said), MACHINES)).status == "ok"


@pytest.mark.parametrize("stop_after", range(6))
def test_a_mount_that_was_cut_off_anywhere_is_finished_by_the_next_run(stop_after: int) -> None:
    facts = machine()
    facts["files"].update({UNIT: None, AUTOMOUNT: None})
    cut = applied(facts, plan("lustre.mount", facts, MACHINES), stop_after)
    whole = applied(cut, plan("lustre.mount", cut, MACHINES))
    assert remark(plan("lustre.mount", whole, MACHINES)).status == "ok"
    assert whole["services"]["fsx.automount"]["enabled"] == "enabled"
    assert whole["mounts"] == [{**MOUNT, "options": ["rw", "noatime", "flock"]}]


def test_an_automount_that_was_disabled_is_enabled_again() -> None:
    facts = machine()
    facts["files"].update({UNIT: None, AUTOMOUNT: None})
    tuned = applied(facts, plan("lustre.mount", facts, MACHINES))
    tuned["services"]["fsx.automount"]["enabled"] = "disabled"
    [step] = steps(plan("lustre.mount", tuned, MACHINES))
    assert step.found == "not enabled"
    assert commands([step]) == ["systemctl daemon-reload", "systemctl enable fsx.automount"]


@pytest.mark.parametrize(
    ("mount", "status", "why"),
    [
        ({"source": "fs-9@tcp:/other"}, "conflict", "another file system is mounted at /fsx"),
        ({"fstype": "nfs4"}, "conflict", "holds another file system"),
        ({"options": ["rw", "flock"]}, "reboot", "mounted without noatime"),
        ({"source": "10.1.1.67@tcp:/other"}, "conflict", "another file system is mounted at /fsx"),
        ({"source": "10.1.1.67@tcp:/abcdef"}, "ok", "10.1.1.67@tcp:/abcdef is mounted"),
        ({}, "ok", f"{SOURCE} is mounted"),
    ],
)
def test_what_is_mounted_is_compared_and_never_unmounted(mount: dict[str, Any], status: str, why: str) -> None:
    facts = machine(mounts=[{**MOUNT, **mount}], services={"fsx.automount": {"load": "loaded", "enabled": "enabled"}})
    wish = lustre_mount.Wish("/fsx", SOURCE, "noatime,flock,_netdev")
    for path, content in ((UNIT, lustre_mount.mount_unit(wish)), (AUTOMOUNT, lustre_mount.automount_unit(wish))):
        facts["files"][path] = {"content": content, "mode": "0644"}
    only = remark(plan("lustre.mount", facts, MACHINES))
    assert only.status == status
    assert why in only.why


@pytest.mark.parametrize(
    ("found", "same"),
    [
        (SOURCE, True),
        ("10.1.1.67@tcp:/abcdef", True),
        ("10.1.1.67@tcp,10.1.1.67@efa:/abcdef", True),
        ("10.1.1.67@tcp:10.1.1.68@tcp:/abcdef", True),
        ("10.1.1.67@tcp:/abcdeg", False),
        ("fs-9.fsx.us-east-1.amazonaws.com@tcp:/abcdef", False),
        (":/abcdef", False),
        ("", False),
    ],
)
def test_a_file_system_is_the_same_under_the_address_that_its_name_became(found: str, same: bool) -> None:
    assert lustre_mount.same_source(found, SOURCE) is same


def test_what_lies_under_an_automount_is_the_mount_that_counts() -> None:
    trap = {"source": "systemd-1", "target": "/fsx", "fstype": "autofs", "options": ["rw"]}
    facts = machine(mounts=[trap, MOUNT])
    assert remark(plan("lustre.mount", facts, {**MACHINES, "backend": "ec2", "mount": None})).status == "ok"
    facts = machine(mounts=[trap])
    assert remark(plan("lustre.mount", facts, {**MACHINES, "backend": "ec2", "mount": None})).status == "failed"


@pytest.mark.parametrize(
    ("line", "statuses"),
    [
        (f"{SOURCE} /fsx lustre noatime,flock,_netdev,x-systemd.automount 0 0", ["ok"]),
        (f"{SOURCE} /fsx lustre defaults,_netdev 0 0", ["conflict", "ok"]),
        ("server:/home /fsx nfs4", ["conflict", "ok"]),
    ],
)
def test_a_line_of_fstab_is_left_to_its_owner_and_reported_when_it_is_another(line: str, statuses: list[str]) -> None:
    facts = machine(mounts=[MOUNT])
    facts["files"].update({UNIT: None, AUTOMOUNT: None})
    facts["files"]["/etc/fstab"] = {"content": f"# comment\nLABEL=root / ext4 defaults 0 1\n{line}\n", "mode": "0644"}
    said = plan("lustre.mount", facts, MACHINES)
    assert [one.status for one in said if isinstance(one, Remark)] == statuses
    assert not steps(said)


@pytest.mark.parametrize(
    ("backend", "who"),
    [
        ("ec2", "first boot script"),
        ("hyperpod-slurm", "HyperPod mounts it"),
        ("hyperpod-eks", "HyperPod mounts it"),
    ],
)
def test_elsewhere_a_missing_mount_names_who_should_have_made_it(backend: str, who: str) -> None:
    document = {"backend": backend, "lustre": {"path": "/fsx"}, "mount": None}
    only = remark(plan("lustre.mount", machine(), document))
    assert only.status == "failed"
    assert who in only.why


def test_elsewhere_the_operator_may_know_which_file_system_it_must_be() -> None:
    document = {"backend": "ec2", "lustre": {"path": "/fsx"}, "mount": None}
    setting = SETTINGS["lustre.mount"]
    request = Request(document, expect={"lustre_source": "fs-9@tcp:/other"})
    only = remark(lustre_mount.plan([setting], frozenset([setting.id]), machine(mounts=[MOUNT]), request))
    assert only.status == "conflict"


def test_without_lustre_without_systemd_without_a_name_nothing_is_written() -> None:
    assert remark(plan("lustre.mount", machine(), {"backend": "machines", "lustre": None})).status == "skipped"
    assert remark(plan("lustre.mount", machine(mounts=None), MACHINES)).status == "unknown"
    assert "needs systemd" in remark(plan("lustre.mount", machine(init="other"), MACHINES)).why
    assert remark(plan("lustre.mount", machine(), {**MACHINES, "mount": None})).status == "failed"
    unread = machine()
    assert [type(one).__name__ for one in plan("lustre.mount", unread, MACHINES)] == ["Remark", "Step"]


@pytest.mark.parametrize(
    "document",
    [
        {**MACHINES, "mount": {"dns_name": "a b", "mount_name": "x"}},
        {**MACHINES, "mount": {"dns_name": "a", "mount_name": "x\nExecStart=/bin/sh"}},
        {**MACHINES, "lustre": {"path": "/fsx/../etc"}},
        {**MACHINES, "lustre": {"path": "fsx"}},
    ],
)
def test_a_name_that_would_not_stay_a_name_in_a_unit_is_refused_in_one_line(document: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"allowed: .*; fix: ") as error:
        plan("lustre.mount", machine(), document)
    assert "\n" not in str(error.value)


def test_the_catalogue_has_read_what_the_mount_looks_at() -> None:
    asked = wanted(SETTINGS.values(), MACHINES)
    assert {UNIT, AUTOMOUNT, "/etc/fstab"} <= set(asked.mount_units)
    assert "fsx.automount" in asked.services


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    require(shutil.which("systemd-analyze") is not None, "no systemd-analyze")
    wish = lustre_mount.Wish("/data/fs-x", SOURCE, "noatime,flock,_netdev")
    for path, content in (
        (wish.unit, lustre_mount.mount_unit(wish)),
        (wish.automount, lustre_mount.automount_unit(wish)),
    ):
        (tmp_path / path.rpartition("/")[2]).write_text(content)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data-fs\\x2dx.automount", "data-fs\\x2dx.mount"]
    assert _verified(tmp_path) == ""
    (tmp_path / "data-fs\\x2dx.mount").write_text("[Mount]\nWhat=x\nWhere=/elsewhere\n")
    assert _verified(tmp_path) != ""


def _verified(folder: Path) -> str:
    units = sorted(str(one) for one in folder.iterdir())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=300
    )
    return done.stderr
