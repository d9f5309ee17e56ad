"""A node that tunes itself ends as one that is tuned over SSH, and its exit status says whether it may take jobs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from node_setup.agent import owned
from node_setup.agent.kinds.agent import BOOT_UNIT, UNIT
from node_setup.agent.kinds.agent import plan as plan_agent
from node_setup.agent.kinds.disks.scratch import mount_unit
from node_setup.agent.kinds.gpu.clocks import clocks_unit
from node_setup.agent.kinds.gpu.persistence import DAEMON
from node_setup.agent.kinds.lustre import mount as lustre_mount
from node_setup.agent.kinds.lustre.lnet_efa import lnet_unit
from node_setup.agent.kinds.lustre.mount import MountSpec
from node_setup.agent.model import Copy, Remark, Request, Run, Setting, Step, Write
from node_setup.agent.run.boot import boot, judge, lnet, stored_request
from node_setup.agent.run.lock import hold
from node_setup.agent.run.tune import tune
from node_setup.agent.wire.identity import Identity
from tests.conftest import require
from tests.node_setup.agents import BareHost, silent

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "cluster": "llm",
    "backend": "ec2",
    "groups": {"train": {"type": "c7i.large", "role": "worker", "gpus": 0, "efa": 0, "nvme": 0}},
    "lustre": None,
    "mount": None,
    "tuning": {"profiles": {}, "settings": {"sysctl.vm.max_map_count": "1048576"}},
}
MAPS = "proc/sys/vm/max_map_count"
IN_FLIGHT = (owned.LOCK, owned.REPORT)
"""Who held the lock, and when the last apply was: of these alone no two nodes have the same."""


def machine(root: Path) -> BareHost:
    for path, text in ((MAPS, "65530\n"), ("etc/lustrain/node.json", '{"group": "train"}\n'), ("proc/stat", "cpu 0\n")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return BareHost(root)


def bundle(folder: Path, document: str) -> Identity:
    """The packed agent as a lifecycle script finds it, with the document beside it."""
    folder.mkdir()
    (folder / "node_setup.pyz").write_bytes(b"PK stands for the packed agent")
    (folder / "tuning.json").write_text(document)
    return Identity(str(folder / "node_setup.pyz"), "5e" * 32, None)


def state(root: Path) -> dict[str, bytes]:
    files = {f"/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: content for name, content in files.items() if name not in IN_FLIGHT}


def text(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, indent=1) + "\n"


def test_boot_ends_byte_identical_to_a_tune_over_ssh(
    tmp_path: Path,
) -> None:
    root, identity = tmp_path / "booted", bundle(tmp_path / "bundle", text(DOCUMENT))
    booted, tuned = machine(root), machine(tmp_path / "tuned")
    assert boot(booted, identity, silent)[1] == 0
    tune(tuned, Request(document=DOCUMENT, group="train"), identity, 0.0, silent)
    before = state(root)
    assert before == state(tmp_path / "tuned")
    assert (root / MAPS).read_text() == "1048576"
    assert json.loads(before[owned.TUNING]) == {**DOCUMENT, "group": "train"}
    (root / MAPS).write_text("65530\n")
    lines: list[str] = []
    assert boot(booted, Identity(str(booted.path(owned.AGENT)), identity.sha256, None), lines.append)[1] == 0
    assert lines[0] == f"wanted: {owned.TUNING}"
    assert state(root) == before


def test_document_beside_the_agent_precedes_the_stored_one(tmp_path: Path) -> None:
    host = machine(tmp_path / "node")
    boot(host, bundle(tmp_path / "old", text({**DOCUMENT, "cluster": "old"})), silent)
    request, where = stored_request(host, bundle(tmp_path / "new", text(DOCUMENT)))
    assert (request.document["cluster"], where) == ("llm", str(tmp_path / "new/tuning.json"))
    assert stored_request(host, Identity())[0].document["cluster"] == "old"


@pytest.mark.parametrize(("interfaces", "status"), [(8, 1), (0, 0)])
def test_before_the_mount_only_lustres_network_is_looked_after(tmp_path: Path, interfaces: int, status: int) -> None:
    """This node has an EFA device and no lnetctl: where the cluster gives Lustre interfaces, the caller hears that it goes over
    TCP; nothing else is touched either way."""
    host = machine(tmp_path / "node")
    vendor = tmp_path / "node/sys/class/infiniband/rdmap0s6/device/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1d0f\n")
    before = state(tmp_path / "node")
    group = {**DOCUMENT["groups"]["train"], "efa": 1, "lustre_efa": interfaces}
    lines: list[str] = []
    identity = bundle(tmp_path / "bundle", text({**DOCUMENT, "groups": {"train": group}}))
    assert lnet(host, identity, lines.append)[1] == status
    assert any("there is no lnetctl" in line for line in lines) == bool(status)
    assert state(tmp_path / "node") == before


def test_a_node_without_a_document_is_tuned_by_its_facts(tmp_path: Path) -> None:
    host = machine(tmp_path)
    lines: list[str] = []
    assert boot(host, Identity(), lines.append)[1] == 0
    assert "the facts decide" in lines[0]
    assert (tmp_path / MAPS).read_text() == "524288"


@pytest.mark.parametrize(
    "broken", ["", "{", "[]", '{"version": 2}', '{"version": 1, "tuning": {"settings": {"a": 1}}}']
)
def test_a_broken_document_is_one_line_and_nothing_is_done(broken: str, tmp_path: Path) -> None:
    host = machine(tmp_path / "node")
    with pytest.raises(UserError) as caught:
        boot(host, bundle(tmp_path / "bundle", broken), silent)
    assert len(caught.value.problems) == 1
    assert (tmp_path / "node" / MAPS).read_text() == "65530\n"


def row(severity: str, status: str, setting: str = "sysctl.x") -> dict[str, Any]:
    return {"setting": setting, "severity": severity, "status": status, "target": "/x", "why": "it says no"}


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row("should", "failed"), row("must", "changed")], 0),
        ([row("must", "failed")], 1),
        ([row("must", "ok"), row("should", "unknown"), row("should", "conflict")], 0),
        ([row("must", "unknown")], 1),
        ([row("must", "conflict")], 1),
        ([row("must", "reboot"), row("must", "skipped")], 0),
        ([], 1),
    ],
)
def test_only_what_a_node_must_have_keeps_it_from_jobs(rows: list[dict[str, Any]], code: int) -> None:
    assert judge({"rows": rows, "unplanned": [], "errors": [], "refused": None}, silent) == code


def test_the_log_names_the_setting_that_failed_and_why() -> None:
    rows, lines = [row("must", "failed"), row("should", "ok", "fine")], list[str]()
    judge({"rows": rows, "unplanned": [], "errors": [], "refused": None}, lines.append)
    assert lines == ["failed: sysctl.x (must) /x: it says no", "this node may take no jobs: sysctl.x"]


def test_boot_without_the_lock_fails_and_names_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_setup.agent.run.boot.WAIT_S", 0.2)
    host, lines = machine(tmp_path), list[str]()
    with hold(host, 0.0):
        assert boot(BareHost(tmp_path), Identity(), lines.append)[1] == 1
    assert any(line.startswith("nothing done: another agent changes this node: pid ") for line in lines)


SETTING = Setting("agent.at-boot", "agent", ("cpu",), "a reason", "a source")


def agent_plan(facts: dict[str, Any], request: Request | None = None) -> list[Step | Remark]:
    return plan_agent([SETTING], frozenset({SETTING.id}), facts, request or Request(document=DOCUMENT))


def in_place(**changes: Any) -> dict[str, Any]:
    """Facts of a node with systemd on which all of it is as it should be, but for these."""
    tuning = text({**DOCUMENT, "group": "train"})
    return {
        "agent": {"sha256": "aa" * 32, "installed": "aa" * 32, "path": owned.AGENT},
        "group": "train",
        "init": "systemd",
        "services": {UNIT: {"load": "loaded", "enabled": "enabled"}},
        "files": {owned.TUNING: {"content": tuning}, owned.BOOT_UNIT: {"content": BOOT_UNIT}},
        **changes,
    }


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (in_place(), "ok"),
        (in_place(agent={"sha256": None, "installed": None, "path": None}), "ok"),
        (in_place(init="other"), "skipped"),
        (in_place(init=None), "unknown"),
    ],
    ids=["all in place", "a checkout installs no agent", "no systemd", "systemd unknown"],
)
def test_no_step_is_planned_when_in_sync_or_without_systemd(facts: dict[str, Any], status: str) -> None:
    [only] = agent_plan(facts)
    assert isinstance(only, Remark)
    assert only.status == status


ENABLE, COPY = Run(("systemctl", "enable", UNIT)), Copy("/b.pyz", owned.AGENT)
UNIT_FILE, RELOAD = Write(owned.BOOT_UNIT, BOOT_UNIT), Run(("systemctl", "daemon-reload"))
OF_B = Write(owned.TUNING, text({**DOCUMENT, "group": "b"}))
NEW = {"sha256": "bb" * 32, "path": "/b.pyz"}
OTHER_UNIT = {**in_place()["files"], owned.BOOT_UNIT: {"content": "[Unit]\n"}}


@pytest.mark.parametrize(
    ("change", "target", "found", "actions"),
    [
        ({"agent": {**NEW, "installed": "aa" * 32}}, owned.AGENT, "a" * 12, (COPY,)),
        ({"agent": {**NEW, "installed": None}}, owned.AGENT, None, (COPY,)),
        ({"group": "b"}, owned.TUNING, "cluster llm, group train", (OF_B,)),
        ({"services": {UNIT: {"enabled": "disabled"}}}, owned.BOOT_UNIT, "as planned, disabled", (ENABLE,)),
        ({"services": None}, owned.BOOT_UNIT, "as planned, not enabled", (ENABLE,)),
        ({"files": OTHER_UNIT}, owned.BOOT_UNIT, "different content, enabled", (UNIT_FILE, RELOAD, ENABLE)),
    ],
)
def test_what_differs_of_the_installed_agent_is_put_right(
    change: dict[str, Any], target: str, found: str | None, actions: tuple[Any, ...]
) -> None:
    [only] = agent_plan(in_place(**change))
    assert isinstance(only, Step)
    assert (only.target, only.current, only.actions) == (target, found, actions)


def test_boot_unit_precedes_jobs_and_is_retried() -> None:
    lines: dict[str, str] = {}
    for name, _, value in (line.partition("=") for line in BOOT_UNIT.splitlines()):
        lines[name] = f"{lines.get(name, '')} {value}".strip()
    waits = {"network-online.target", "configure-efa-fsx-lustre-client.service", "lustrain-boot.service"}
    assert waits <= set(lines["After"].split())
    assert (lines["Before"], lines["Restart"]) == ("slurmd.service", "on-failure")
    assert lines["ExecStart"] == f"/usr/bin/python3 -I -S {owned.AGENT} boot"
    assert lines["StartLimitIntervalSec"] == "2h"
    one_pass = int(lines["TimeoutStartSec"]) + int(lines["RestartSec"])
    assert int(lines["StartLimitBurst"]) * one_pass < 2 * 3600, "passes that all time out would never reach the limit"


WISH = MountSpec("/data/fs-x", "fs-0123.fsx.us-east-1.amazonaws.com@tcp:/abcdef", "noatime,flock,_netdev")
UNITS = {
    owned.BOOT_UNIT: BOOT_UNIT,
    owned.LNET_UNIT: lnet_unit(),
    owned.CLOCKS_UNIT: clocks_unit(DAEMON),
    owned.mount_unit("/opt/dlami/nvme"): mount_unit("/opt/dlami/nvme"),
    WISH.unit: lustre_mount.mount_unit(WISH),
    WISH.automount: lustre_mount.automount_unit(WISH),
}


def verified(folder: Path, units: dict[str, str]) -> list[str]:
    """What systemd says of units, each of them by its name."""
    program = shutil.which("systemd-analyze")
    require(program is not None, "no systemd-analyze on this machine")
    for path, content in {DAEMON: "[Service]\nExecStart=/bin/true\n", **units}.items():
        (folder / Path(path).name).write_text(content)
    paths = sorted(str(one) for one in folder.iterdir())
    done = subprocess.run([str(program), "verify", "--man=no", *paths], capture_output=True, text=True, timeout=300)
    return [line for line in done.stderr.splitlines() if any(Path(path).name in line for path in units)]


def test_systemd_has_nothing_to_say_against_our_units(tmp_path: Path) -> None:
    assert verified(tmp_path, UNITS) == []
    assert Path(WISH.unit).name == "data-fs\\x2dx.mount"
    assert verified(tmp_path, {WISH.unit: "[Mount]\nWhat=x\nWhere=/elsewhere\n"}) != []


LUSTRE = {"path": "/fsx", "efa": False, "throughput_mb_s": 1000, "stripes": []}
MOUNTS = "proc/mounts"
MOUNTED = "10.0.0.5@tcp:/abcd /fsx lustre rw,noatime,flock 0 0\n"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ec2", "hyperpod-slurm"])
def test_late_mount_is_waited_for_after_everything_else(backend: str, tmp_path: Path) -> None:
    host, lines = machine(tmp_path / "node"), list[str]()
    (tmp_path / "node" / MOUNTS).write_text("tmpfs /run tmpfs rw 0 0\n")

    def log(line: str) -> None:
        lines.append(line)
        if line.startswith("waiting for Lustre at /fsx"):
            assert (tmp_path / "node" / MAPS).read_text() == "1048576"
            (tmp_path / "node" / MOUNTS).write_text(MOUNTED)

    document = {**DOCUMENT, "backend": backend, "lustre": LUSTRE}
    result, code = boot(host, bundle(tmp_path / "bundle", text(document)), log, 60.0)
    assert code == 0
    assert [row["status"] for row in result["rows"] if row["setting"] == "lustre.mount"] == ["ok"]
    assert any(line.startswith("Lustre is mounted at /fsx after ") for line in lines)


def test_missing_mount_keeps_the_node_from_jobs_after_the_wait(tmp_path: Path) -> None:
    host, lines = machine(tmp_path / "node"), list[str]()
    (tmp_path / "node" / MOUNTS).write_text("tmpfs /run tmpfs rw 0 0\n")
    identity = bundle(tmp_path / "bundle", text({**DOCUMENT, "lustre": LUSTRE}))
    assert boot(host, identity, lines.append, 0.2)[1] == 1
    assert "Lustre is not mounted at /fsx after 0.2 s" in lines
    assert lines[-1] == "this node may take no jobs: lustre.mount"


@pytest.mark.parametrize(
    ("change", "mounts"),
    [
        ({"backend": "machines"}, ""),
        ({"tuning": {"profiles": {}, "settings": {"lustre.mount": "off"}}}, ""),
        ({}, MOUNTED),
        ({}, "/dev/nvme1n1 /fsx xfs rw 0 0\n"),
    ],
    ids=["ours to mount", "not wanted", "there", "another file system"],
)
def test_mount_that_is_ours_present_or_unwanted_is_not_awaited(
    change: dict[str, Any], mounts: str, tmp_path: Path
) -> None:
    host, lines = machine(tmp_path / "node"), list[str]()
    (tmp_path / "node" / MOUNTS).write_text(f"tmpfs /run tmpfs rw 0 0\n{mounts}")
    boot(host, bundle(tmp_path / "bundle", text({**DOCUMENT, "lustre": LUSTRE, **change})), lines.append, 60.0)
    assert not [line for line in lines if line.startswith("waiting")]


def test_retried_boot_leaves_a_running_job_alone(tmp_path: Path) -> None:
    host, lines = machine(tmp_path), list[str]()
    (tmp_path / "proc/300").mkdir()
    (tmp_path / "proc/300/stat").write_text("300 (slurmstepd) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 300 1 1\n")
    (tmp_path / "proc/300/cmdline").write_text("slurmstepd: [123.batch]")
    assert boot(host, Identity(), lines.append)[1] == 0
    assert (tmp_path / MAPS).read_text() == "65530\n"
    assert "nothing done: a job runs: slurm 123; fix: fab node-tune when it has ended" in lines
