"""Lustre's parameters and its mount: facts in, steps out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import UserError
from node_setup.agent.kinds.lustre import mount as lustre_mount
from node_setup.agent.kinds.lustre import parameter as lustre_parameter
from node_setup.agent.model import Remark, Request, Step, Write
from tests.node_setup.kinds_facts import SETTINGS, applied, commands, machine, plan, remark, steps

RPCS, CHANGING = "mdc.*.max_rpcs_in_flight", "mdc.*.max_mod_rpcs_in_flight"
SOURCE = "fs-0123.fsx.us-east-1.amazonaws.com@tcp:/abcdef"
UNIT, AUTOMOUNT = "/etc/systemd/system/fsx.mount", "/etc/systemd/system/fsx.automount"
MOUNT = {"source": SOURCE, "target": "/fsx", "fstype": "lustre", "options": ["rw", "noatime", "flock", "lazystatfs"]}
TRAP = {"source": "systemd-1", "target": "/fsx", "fstype": "autofs", "options": ["rw"]}
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


def test_one_differing_instance_sets_the_whole_pattern() -> None:
    key = "osc.*OST*.max_rpcs_in_flight"
    facts = mounted({key: {"osc.x-OST0000.max_rpcs_in_flight": "32", "osc.x-OST0001.max_rpcs_in_flight": "8"}})
    said = plan("lustre.osc.max_rpcs_in_flight", facts)
    assert (commands(said), steps(said)[0].current) == ([f"lctl set_param {key}=32"], "32, 8")
    assert remark(plan("lustre.osc.max_rpcs_in_flight", applied(facts, said))).status == "ok"


XATTR = "llite.*.statahead_xattr"


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (mounted(None), "unknown"),
        (mounted({}), "unknown"),
        (mounted({XATTR: {}}), "skipped"),
        (mounted({XATTR: {"llite.a.statahead_xattr": "1"}}), "ok"),
        (machine(), "skipped"),
    ],
)
def test_absent_or_unread_parameter_is_reported_not_set(facts: dict[str, Any], status: str) -> None:
    assert remark(plan("lustre.llite.statahead_xattr", facts)).status == status


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


def test_single_rpc_limit_is_checked_against_the_current_other() -> None:
    low = plan("lustre.mdc.max_rpcs_in_flight", mds("64", "50"), value="16")
    assert (remark(low).status, f"{CHANGING} = 50" in remark(low).why) == ("conflict", True)
    assert commands(plan("lustre.mdc.max_mod_rpcs_in_flight", mds("64", "7"))) == [f"lctl set_param {CHANGING}=50"]
    assert remark(plan("lustre.mdc.max_mod_rpcs_in_flight", mds("8", "7"))).status == "conflict"


def blank() -> dict[str, Any]:
    facts = machine()
    facts["files"].update({UNIT: None, AUTOMOUNT: None})
    return facts


def test_mount_on_machines_is_an_owned_unit_and_stable() -> None:
    said = plan("lustre.mount", blank(), MACHINES)
    assert [step.part for step in steps(said)] == ["persisted", "runtime"]
    unit = next(one.content for one in steps(said)[0].actions if isinstance(one, Write) and one.path == UNIT)
    wait = "network-online.target configure-efa-fsx-lustre-client.service lustrain-lnet.service"
    lines = ["Where=/fsx", "Type=lustre", "Options=noatime,flock,_netdev", "Wants=network-online.target"]
    assert {f"What={SOURCE}", *lines, f"After={wait}"} <= set(unit.splitlines())
    made = ["daemon-reload", "enable fsx.automount", "start fsx.mount"]
    assert commands(said) == [f"systemctl {words}" for words in made]


@pytest.mark.parametrize("stop_after", range(6))
def test_interrupted_mount_is_finished_by_the_next_run(stop_after: int) -> None:
    cut = applied(blank(), plan("lustre.mount", blank(), MACHINES), stop_after)
    whole = applied(cut, plan("lustre.mount", cut, MACHINES))
    assert remark(plan("lustre.mount", whole, MACHINES)).status == "ok"
    assert whole["services"]["fsx.automount"]["enabled"] == "enabled"
    assert whole["mounts"] == [{**MOUNT, "options": ["rw", "noatime", "flock"]}]


def test_an_automount_that_was_disabled_is_enabled_again() -> None:
    tuned = applied(blank(), plan("lustre.mount", blank(), MACHINES))
    tuned["services"]["fsx.automount"]["enabled"] = "disabled"
    [step] = steps(plan("lustre.mount", tuned, MACHINES))
    assert step.current == "not enabled"
    assert commands([step]) == ["systemctl daemon-reload", "systemctl enable fsx.automount"]


@pytest.mark.parametrize(
    ("mount", "status"),
    [
        ({"source": "fs-9@tcp:/other"}, "conflict"),
        ({"fstype": "nfs4"}, "conflict"),
        ({"options": ["rw", "flock"]}, "reboot"),
        ({"source": "10.1.1.67@tcp:/other"}, "conflict"),
        ({"source": "10.1.1.67@tcp:/abcdef"}, "ok"),
        ({}, "ok"),
    ],
)
def test_what_is_mounted_is_compared_and_never_unmounted(mount: dict[str, Any], status: str) -> None:
    facts = machine(mounts=[{**MOUNT, **mount}], services={"fsx.automount": {"load": "loaded", "enabled": "enabled"}})
    wish = lustre_mount.MountSpec("/fsx", SOURCE, "noatime,flock,_netdev")
    for path, content in ((UNIT, lustre_mount.mount_unit(wish)), (AUTOMOUNT, lustre_mount.automount_unit(wish))):
        facts["files"][path] = {"content": content, "mode": "0644"}
    assert remark(plan("lustre.mount", facts, MACHINES)).status == status


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
def test_source_matches_under_the_address_of_its_name(found: str, same: bool) -> None:
    assert lustre_mount.same_source(found, SOURCE) is same


@pytest.mark.parametrize(
    ("line", "statuses"),
    [
        (f"{SOURCE} /fsx lustre noatime,flock,_netdev,x-systemd.automount 0 0", ["ok"]),
        (f"{SOURCE} /fsx lustre defaults,_netdev 0 0", ["conflict", "ok"]),
        ("server:/home /fsx nfs4", ["conflict", "ok"]),
    ],
)
def test_fstab_line_is_kept_and_reported_when_it_differs(line: str, statuses: list[str]) -> None:
    facts = blank() | {"mounts": [MOUNT]}
    facts["files"]["/etc/fstab"] = {"content": f"# comment\nLABEL=root / ext4 defaults 0 1\n{line}\n", "mode": "0644"}
    said = plan("lustre.mount", facts, MACHINES)
    assert [one.status for one in said if isinstance(one, Remark)] == statuses
    assert not steps(said)


@pytest.mark.parametrize(
    ("backend", "mounts", "expect", "status"),
    [
        ("ec2", [], {}, "failed"),
        ("hyperpod-slurm", [], {}, "failed"),
        ("hyperpod-eks", [], {}, "failed"),
        ("ec2", [TRAP], {}, "failed"),
        ("ec2", [TRAP, MOUNT], {}, "ok"),
        ("ec2", [MOUNT], {"lustre_source": "fs-9@tcp:/other"}, "conflict"),
    ],
)
def test_mount_made_by_others_is_only_judged(
    backend: str, mounts: list[Any], expect: dict[str, str], status: str
) -> None:
    setting = SETTINGS["lustre.mount"]
    request = Request({"backend": backend, "lustre": {"path": "/fsx"}, "mount": None}, expect=expect)
    found = lustre_mount.plan([setting], frozenset([setting.id]), machine(mounts=mounts), request)
    assert remark(found).status == status


@pytest.mark.parametrize(
    ("facts", "document", "status"),
    [
        (machine(), {"backend": "machines", "lustre": None}, "skipped"),
        (machine(mounts=None), MACHINES, "unknown"),
        (machine(init="other"), MACHINES, "failed"),
        (machine(), {**MACHINES, "mount": None}, "failed"),
    ],
)
def test_nothing_is_written_without_lustre_systemd_or_name(
    facts: dict[str, Any], document: dict[str, Any], status: str
) -> None:
    assert remark(plan("lustre.mount", facts, document)).status == status


def test_unread_units_are_not_written_but_lustre_is_mounted() -> None:
    assert [type(one) for one in plan("lustre.mount", machine(), MACHINES)] == [Remark, Step]


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({**MACHINES, "mount": {"dns_name": "a b", "mount_name": "x"}}, "mount.dns_name"),
        ({**MACHINES, "mount": {"dns_name": "a", "mount_name": "x\nExecStart=/bin/sh"}}, "mount.mount_name"),
        ({**MACHINES, "lustre": {"path": "/fsx/../etc"}}, "lustre.path"),
        ({**MACHINES, "lustre": {"path": "fsx"}}, "lustre.path"),
    ],
)
def test_name_unsafe_in_a_unit_is_refused_in_one_line(document: dict[str, Any], path: str) -> None:
    with pytest.raises(UserError, match=rf"^{path} = .*; allowed: .*; fix: [^\n]*$"):
        plan("lustre.mount", machine(), document)
