"""`fab node-tune` over SSH on real machines of a lab: what it promises of a fleet, and of the nodes that break in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rehearsal.lab.nodes import Lab
from tests.lab.faults import end_job, hang, read_only_etc, run_job, unhang, use_python, wait_until_hung
from tests.lab.nodes import StartLab
from tests.node_setup.agents import oldest
from tests.node_setup.lab_fleet import Operator, Said

DRIFT = "sysctl.vm.max_map_count"
TUNED = ("/etc", "/var/lib/lustrain")
NODE_SECONDS = 60
"""Less than the agent gives a program that hangs, and all that one busy node may take."""
"""What a node may take; a run may take that and the time to connect, whatever happens on one of them."""


def files(lab: Lab) -> list[dict[str, tuple[str, str]]]:
    """What tuning left on the disk of every node, without what is each node's own."""
    own = ("/etc/hostname", "/etc/ssh/lab_host_key", "/etc/ssh/lab_host_key.pub", "/var/lib/lustrain/last.json")
    trees = [node.tree(*TUNED) for node in lab.nodes]
    return [{path: entry for path, entry in tree.items() if path not in own} for tree in trees]


def differing(some: list[dict[str, tuple[str, str]]], others: list[dict[str, tuple[str, str]]]) -> list[str]:
    """Paths whose mode or content is not the same."""
    pairs = zip(some, others, strict=True)
    return sorted({path for one, other in pairs for path in one | other if one.get(path) != other.get(path)})


@pytest.mark.slow
def test_four_nodes_are_tuned_once_and_in_sync_from_then_on(lab: StartLab, tmp_path: Path) -> None:
    running = lab(4)
    operator = Operator(running, tmp_path)

    first = operator.fab("node-tune")
    assert first.status == 0, first.errors
    for node in running.nodes:
        assert DRIFT in first.rows(node.name, "changed")
        assert first.rows(node.name, "failed", "conflict", "unknown") == []
        assert first.nodes[node.name]["result"]["unplanned"] == []
        assert first.nodes[node.name]["round_trips"] == 2
        assert node.read("/proc/sys/vm/max_map_count").strip() == "524288"
    tuned = files(running)
    assert differing(tuned, [tuned[0]] * len(tuned)) == []

    second = operator.fab("node-tune")
    assert second.status == 0
    for node in running.nodes:
        assert second.rows(node.name, "changed", "failed", "reboot") == []
        assert second.nodes[node.name]["round_trips"] == 1
    assert differing(files(running), tuned) == []

    drifted = running.nodes[2]
    drifted.exec("sh", "-c", "echo 65530 >/proc/sys/vm/max_map_count")
    check = operator.fab("node-tune", "--check")
    assert check.status == 4
    assert {name: check.rows(name, "change") for name in check.nodes} == {
        node.name: [DRIFT] if node is drifted else [] for node in running.nodes
    }
    assert drifted.read("/proc/sys/vm/max_map_count").strip() == "65530"
    assert differing(files(running), tuned) == []

    again = operator.fab("node-tune")
    assert (again.status, again.rows(drifted.name, "changed")) == (0, [DRIFT])
    assert drifted.read("/proc/sys/vm/max_map_count").strip() == "524288"


@pytest.mark.slow
def test_node_with_notice_or_job_is_left_alone_unless_forced(lab: StartLab, tmp_path: Path) -> None:
    running = lab(3, metadata=True)
    noticed, busy, free = running.nodes
    noticed.metadata().spot_notice()
    run_job(busy, 77)
    operator = Operator(running, tmp_path)
    said = operator.fab("node-tune")
    assert said.status == 1
    assert {name: one["status"] for name, one in said.nodes.items()} == {noticed.name: 4, busy.name: 4, free.name: 0}
    assert "spot terminate" in said.nodes[noticed.name]["result"]["refused"]
    assert "slurm 77" in said.nodes[busy.name]["result"]["refused"]
    for node in (noticed, busy):
        assert node.read("/proc/sys/vm/max_map_count").strip() == "65530"
        assert not node.exists("/etc/sysctl.d/90-lustrain.conf")
    noticed.metadata().clear()
    end_job(busy, 77)
    assert operator.fab("node-tune").status == 0


@pytest.mark.slow
def test_tuned_node_is_ready_until_it_loses_its_file_system(lab: StartLab, tmp_path: Path) -> None:
    running = lab(2, "p5", metadata=True)
    operator = Operator(running, tmp_path)
    assert operator.fab("node-tune").status == 0
    assert operator.fab("node-verify").status == 0
    worse = running.nodes[1]
    worse.exec("umount", "/fsx")
    worse.exec("systemctl", "mask", "fsx.mount")
    said = operator.fab("node-verify")
    assert said.status == 4
    assert [said.nodes[node.name]["result"]["ready"] for node in running.nodes] == [True, False]
    assert "lustre-mount" in said.nodes[worse.name]["result"]["drain"]


@pytest.mark.slow
def test_each_broken_node_is_reported_and_costs_others_nothing(lab: StartLab, tmp_path: Path) -> None:
    path = oldest()
    running = lab(8, folders=[path.parents[1]])
    away, hanging, sealed, asking, rebooted, full, old, well = running.nodes
    away.link(False)
    hang(hanging, "apt-mark")
    read_only_etc(sealed)
    asking.add_user("ann", "password")
    hang(rebooted, "apt-mark")
    full.exec("mkdir", "-p", "/var/lib/lustrain")
    full.fill_disk()
    use_python(old, path)

    hosts = tmp_path / "hosts"
    lines = [f"{'ann@' if node is asking else ''}{node.address} train" for node in running.nodes]
    hosts.write_text("".join(f"{line}\n" for line in lines))
    operator = Operator(running, tmp_path)
    task = operator.start("node-tune", "--hosts-file", str(hosts), "--timeout", str(NODE_SECONDS))
    wait_until_hung(rebooted, "apt-mark", 300)
    rebooted.crash()
    rebooted.boot()
    said = operator.said(task)

    assert said.status == 1
    kinds = {name: one["outcome"] for name, one in said.nodes.items()}
    assert kinds == {
        away.name: "unreachable",
        hanging.name: "timeout",
        sealed.name: "answered",
        asking.name: "no sudo",
        rebooted.name: "lost",
        full.name: "disk",
        old.name: "answered",
        well.name: "answered",
    }
    assert said.nodes[hanging.name]["status"] == 124
    assert "stopped by SIGTERM" in said.nodes[hanging.name]["result"]["errors"][0]["why"]
    assert DRIFT in said.rows(sealed.name, "failed")
    assert any("Read-only file system" in row["why"] for row in said.nodes[sealed.name]["result"]["rows"])
    for node in (old, well):
        assert said.nodes[node.name]["status"] == 0
        assert DRIFT in said.rows(node.name, "changed")
    assert said.nodes[old.name]["result"]["python"] == _version(path)
    for node in (away, asking, rebooted, full):
        assert said.nodes[node.name]["why"]
    _mended(running, tmp_path, operator)


def _version(python: Path) -> str:
    return subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]


def _mended(running: Lab, tmp_path: Path, operator: Operator) -> None:
    """Once each node's trouble is over, the same command brings all of them to the same state."""
    away, hanging, sealed, asking, rebooted, full, _, _ = running.nodes
    away.link(True)
    unhang(hanging, "apt-mark")
    unhang(rebooted, "apt-mark")
    read_only_etc(sealed, False)
    full.free_disk()
    asking.write("/etc/sudoers.d/ann", "ann ALL=(ALL) NOPASSWD: ALL\n", 0o440)
    said = operator.fab("node-tune", "--hosts-file", str(tmp_path / "hosts"))
    assert {name: one["status"] for name, one in said.nodes.items()} == {node.name: 0 for node in running.nodes}, show(
        said
    )
    for node in running.nodes:
        assert node.read("/proc/sys/vm/max_map_count").strip() == "524288"


def show(said: Said) -> str:
    return "\n".join(f"{name}: {one['outcome']} {one['why']} {one['fix']}" for name, one in said.nodes.items())
