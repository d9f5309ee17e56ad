"""What tests of node tuning may rely on: nodes are separate machines, and leave this one as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from infra.local.metadata import LocalMetadata
from rehearsal.lab import network
from rehearsal.lab.hardware import STOCK_SYSCTLS
from rehearsal.lab.network import Subnet
from rehearsal.lab.nodes import Lab, Node
from tests.lab.faults import run_job
from tests.lab.nodes import StartLab
from tests.processes import children_of, wait_until

pytestmark = pytest.mark.slow


def ssh(lab: Lab, node: Node, command: str) -> subprocess.CompletedProcess[str]:
    options = (
        f"UserKnownHostsFile={lab.known_hosts}",
        "StrictHostKeyChecking=yes",
        "BatchMode=yes",
        "ConnectTimeout=300",
    )
    flags = [flag for option in options for flag in ("-o", option)]
    words = ["ssh", "-F", "none", "-i", str(lab.key), *flags, f"root@{node.address}", command]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def host_sysctls() -> dict[str, str]:
    paths = {key: Path("/proc/sys", key) for key in STOCK_SYSCTLS}
    return {key: path.read_text() for key, path in paths.items() if path.exists()}


def test_each_node_answers_ssh_by_its_own_name_with_its_own_key(lab: StartLab) -> None:
    running = lab(3)
    said = [ssh(running, node, "hostname") for node in running.nodes]
    assert [done.stdout.strip() for done in said] == ["node1", "node2", "node3"]
    keys = [line.split()[-1] for line in Path(running.known_hosts).read_text().splitlines()]
    assert len(set(keys)) == 3


def test_files_of_a_node_are_its_own_and_outlive_a_reboot(lab: StartLab) -> None:
    one, other = lab(2).nodes
    one.write("/etc/sysctl.d/50-own.conf", "# only here\n")
    one.write("/run/gone", "x")
    before = one.read("/proc/sys/kernel/random/boot_id")
    one.reboot()
    assert one.read("/etc/sysctl.d/50-own.conf") == "# only here\n"
    assert not one.exists("/run/gone")
    assert one.read("/proc/sys/kernel/random/boot_id") != before
    assert not other.exists("/etc/sysctl.d/50-own.conf")
    assert not Path("/etc/sysctl.d/50-own.conf").exists()


def test_a_replaced_node_knows_nothing_of_the_one_before(lab: StartLab) -> None:
    running = lab(1)
    node = running.nodes[0]
    node.write("/etc/lustrain/tuning.json", "{}")
    old = Path(running.known_hosts).read_text()
    node.replace()
    assert not node.exists("/etc/lustrain/tuning.json")
    assert Path(running.known_hosts).read_text() != old


def test_no_sysctl_of_this_machine_changes_whatever_node_writes(lab: StartLab) -> None:
    before, untuned = host_sysctls(), Path("/proc/sys/vm/laptop_mode").read_text()
    node, other = lab(2).nodes
    for key in before:
        if node.exists(f"/proc/sys/{key}"):
            node.exec("sh", "-c", f"echo 424242 >/proc/sys/{key}")
            assert node.read(f"/proc/sys/{key}") == "424242\n"
    # One of a network is the kernel's own.
    somaxconn = "/proc/sys/net/core/somaxconn"
    mine, theirs = Path(somaxconn).read_text(), other.read(somaxconn)
    node.exec("sh", "-c", f"echo 12345 >{somaxconn}")
    for path, value in ((somaxconn, "nonsense"), ("/proc/sys/vm/laptop_mode", "7")):
        assert node.exec("sh", "-c", f"echo {value} >{path}", check=False).returncode != 0
    assert (node.read(somaxconn), other.read(somaxconn)) == ("12345\n", theirs)
    assert Path(somaxconn).read_text() == mine
    assert host_sysctls() == before
    assert Path("/proc/sys/vm/laptop_mode").read_text() == untuned


def test_boot_starts_from_stock_values_and_applies_the_disk(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    node.exec("sh", "-c", "echo 1 >/proc/sys/vm/swappiness; echo 99 >/proc/sys/vm/dirty_ratio")
    node.write("/etc/sysctl.d/90-x.conf", "vm.max_map_count = 777777\nnet.ipv4.tcp_fin_timeout = 31\n")
    node.reboot()
    assert node.read("/proc/sys/vm/swappiness").strip() == STOCK_SYSCTLS["vm/swappiness"]
    assert node.read("/proc/sys/vm/dirty_ratio").strip() == STOCK_SYSCTLS["vm/dirty_ratio"]
    assert node.read("/proc/sys/vm/max_map_count").strip() == "777777"
    assert node.read("/proc/sys/net/ipv4/tcp_fin_timeout").strip() == "31"


def test_disks_of_a_node_take_a_scheduler_unseen_by_this_machine(lab: StartLab) -> None:
    def schedulers() -> dict[str, str]:
        return {str(file): file.read_text() for file in Path("/sys/block").glob("*/queue/scheduler")}

    before = schedulers()
    node = lab(1, "p5").nodes[0]
    rule = 'ACTION=="add|change", KERNEL=="nvme[1-9]*n[0-9]*", ATTR{queue/scheduler}="none"\n'
    node.exec("sh", "-c", "echo none >/sys/block/nvme1n1/queue/scheduler")
    node.reboot()
    assert "[mq-deadline]" in node.read("/sys/block/nvme1n1/queue/scheduler")
    node.write("/etc/udev/rules.d/90-x.rules", rule)
    node.reboot()
    assert "[none]" in node.read("/sys/block/nvme1n1/queue/scheduler")
    assert "[mq-deadline]" in node.read("/sys/block/nvme0n1/queue/scheduler")
    assert schedulers() == before


def test_a_node_without_its_link_is_silent_and_comes_back(lab: StartLab) -> None:
    running = lab(2)
    cut, other = running.nodes
    cut.link(False)
    assert ssh(running, cut, "true").returncode == 255
    assert ssh(running, other, "true").returncode == 0
    cut.link(True)
    assert ssh(running, cut, "true").returncode == 0


def test_a_crashed_node_is_gone_until_it_is_booted(lab: StartLab) -> None:
    (node,) = lab(1).nodes
    node.exec("sh", "-c", "echo kept >/etc/kept")
    node.crash()
    assert not node.running
    with pytest.raises(RuntimeError, match="node1 is off"):
        node.exec("true")
    node.boot()
    assert node.read("/etc/kept") == "kept\n"


@pytest.mark.parametrize("command", ["systemctl reboot", "reboot", "/usr/sbin/shutdown -r now"])
def test_node_that_restarts_itself_boots_again_also_under_nohup(lab: StartLab, command: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = lab(1)
    finally:
        signal.signal(signal.SIGHUP, before)
    (node,) = running.nodes
    boot = node.read("/proc/sys/kernel/random/boot_id")
    ssh(running, node, command)
    wait_until(lambda: node.boots == 2)
    assert node.read("/proc/sys/kernel/random/boot_id") != boot


def test_a_node_that_switches_itself_off_stays_off(lab: StartLab) -> None:
    running = lab(1)
    (node,) = running.nodes
    ssh(running, node, "systemctl poweroff")
    wait_until(lambda: not node.running)
    assert not node.restart_if_asked()
    assert (node.running, node.boots) == (False, 1)


@pytest.mark.parametrize("program", ["reboot", "shutdown", "poweroff"])
def test_programs_that_end_a_node_refuse_to_run_on_this_machine(program: str) -> None:
    refusal = import_module("rehearsal.lab.programs.state").Refusal
    with pytest.raises(refusal, match="not a node of a lab"):
        import_module(f"rehearsal.lab.programs.{program}").main(["-r", "now"])


_KILLED = """
import sys, time
from rehearsal.lab.nodes import Lab
lab = Lab(2).up()
print(lab.subnet.link, lab.subnet.folder, *(node.pid for node in lab.nodes), flush=True)
sys.stdin.read()
"""


def test_killed_lab_leaves_nothing_that_the_next_does_not_clean(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert holder.stdout is not None
    link, folder, *pids = holder.stdout.readline().split()
    assert Path("/sys/class/net", link).exists()
    holder.kill()
    holder.communicate()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    wait_until(lambda: not Path("/sys/class/net", link).exists())
    assert link not in Path("/proc/self/mountinfo").read_text()
    taken: list[Subnet] = []
    try:
        # Whoever takes its number next, in whatever process, removes the folder; it need not be us.
        while Path(folder).exists():
            taken.append(Subnet())
    finally:
        for subnet in taken:
            subnet.release()
    assert list(tmp_path.iterdir()) == []


def test_two_labs_run_side_by_side_in_own_temporary_folders(
    lab: StartLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lab(1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    second = lab(1)
    assert first.subnet.link != second.subnet.link
    for running in (first, second):
        assert ssh(running, running.nodes[0], "hostname").stdout == "node1\n"


def test_a_link_that_no_lock_of_ours_tells_of_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Subnet()
    subprocess.run(["ip", "link", "add", theirs.link, "type", "bridge"], check=True)
    try:
        # As in a container that shares the machine's network and not its files.
        monkeypatch.setattr(network, "LOCKS", tmp_path)
        monkeypatch.setattr(network, "NUMBERS", [int(theirs.link.removeprefix("lustrain"))])
        with pytest.raises(RuntimeError, match="all 1 lab subnets are in use"):
            Subnet()
        assert Path("/sys/class/net", theirs.link).exists()
    finally:
        theirs.release()
    assert not Path("/sys/class/net", theirs.link).exists()


def test_lab_that_is_down_leaves_no_zombie_process(lab: StartLab) -> None:
    others = set(children_of(os.getpid()))
    running = lab(2)
    run_job(running.nodes[0], 1)
    started = set(children_of(os.getpid())) - others
    assert len(started) >= 4, "the lab, its nodes and the job"
    running.down()
    assert not started & set(children_of(os.getpid()))


_NOTICE = """
import json, urllib.request
base = "http://169.254.169.254/latest/"
asked = urllib.request.Request(base + "api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
token = urllib.request.urlopen(asked, timeout=300).read().decode()
asked = urllib.request.Request(base + "meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token})
print(json.load(urllib.request.urlopen(asked, timeout=300))["action"])
"""


def test_a_nodes_instance_metadata_is_its_own(lab: StartLab) -> None:
    running = lab(2)
    asked, other = running.nodes
    asked.metadata().spot_notice()
    assert asked.exec("python3", "-c", _NOTICE).stdout == "terminate\n"
    assert "Connection refused" in other.exec("python3", "-c", _NOTICE, check=False).stderr
    asked.reboot()
    assert asked.exec("python3", "-c", _NOTICE).stdout == "terminate\n"


def test_node_reaches_a_server_of_this_machine_after_a_reboot_too(lab: StartLab) -> None:
    (node,) = lab(1).nodes
    read = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    with LocalMetadata({"instance-id": "i-1"}) as server:
        place = urlsplit(server.control)
        node.forward((str(place.hostname), int(str(place.port))))
        ask = ("/usr/bin/python3", "-c", read, f"{server.control}/control/state")
        assert "i-1" in node.exec(*ask).stdout
        node.reboot()
        assert "i-1" in node.exec(*ask).stdout


def test_machine_that_is_off_at_first_boots_as_its_instance(lab: StartLab) -> None:
    first, second = lab(2, metadata=True, off=1).nodes
    assert (first.running, second.running) == (True, False)
    second.instance = "i-0fedcba9876543210"
    state = second.boot().metadata().state()
    assert state["answers"]["instance-id"] == "i-0fedcba9876543210"


@pytest.mark.torture
def test_sixty_four_nodes_boot_on_one_machine(lab: StartLab) -> None:
    running = lab(64)
    assert [node.exec("hostname").stdout.strip() for node in running.nodes] == [f"node{n}" for n in range(1, 65)]
