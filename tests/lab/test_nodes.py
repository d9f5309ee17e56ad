"""What tests of node tuning may rely on: nodes are separate machines, and leave this one as it was."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

from rehearsal.lab import network
from rehearsal.lab.hardware import STOCK_SYSCTLS
from rehearsal.lab.network import Subnet
from rehearsal.lab.nodes import Lab, Node
from tests.conftest import LeakedConnectionError
from tests.lab.faults import calls, end_job, freeze, hang, read_only_etc, run_job, unhang, use_python
from tests.lab.nodes import StartLab
from tests.node_setup.agents import interpreter
from tests.processes import children_of, wait_until

pytestmark = pytest.mark.slow


def ssh(
    lab: Lab, node: Node, command: str, user: str = "root", timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    options = [
        f"UserKnownHostsFile={lab.known_hosts}",
        "StrictHostKeyChecking=yes",
        "BatchMode=yes",
        "ConnectTimeout=300",
    ]
    flags = [flag for option in options for flag in ("-o", option)]
    return subprocess.run(
        ["ssh", "-F", "none", "-i", lab.key, *flags, f"{user}@{node.address}", command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def host_sysctls() -> dict[str, str]:
    paths = {key: Path("/proc/sys", key) for key in STOCK_SYSCTLS}
    return {key: path.read_text() for key, path in paths.items() if path.exists()}


def test_each_node_answers_ssh_by_its_own_name_with_its_own_key(lab: StartLab) -> None:
    running = lab(3)
    said = [ssh(running, node, "hostname") for node in running.nodes]
    assert [done.stdout.strip() for done in said] == ["node1", "node2", "node3"]
    keys = [line.split()[-1] for line in Path(running.known_hosts).read_text().splitlines()]
    assert len(set(keys)) == 3


def test_files_of_a_node_are_its_own_and_outlive_a_reboot_where_a_disk_would_keep_them(lab: StartLab) -> None:
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


def test_no_sysctl_of_this_machine_changes_whatever_a_node_writes(lab: StartLab) -> None:
    before, untuned = host_sysctls(), Path("/proc/sys/vm/laptop_mode").read_text()
    node = lab(1).nodes[0]
    for key in before:
        if node.exists(f"/proc/sys/{key}"):
            node.exec("sh", "-c", f"echo 424242 >/proc/sys/{key}")
            assert node.read(f"/proc/sys/{key}") == "424242\n"
    assert node.exec("sh", "-c", "echo 7 >/proc/sys/vm/laptop_mode", check=False).returncode != 0
    assert host_sysctls() == before
    assert Path("/proc/sys/vm/laptop_mode").read_text() == untuned


def test_sysctls_of_a_network_are_the_kernels_and_each_nodes_own(lab: StartLab) -> None:
    one, other = lab(2).nodes
    mine, theirs = Path("/proc/sys/net/core/somaxconn").read_text(), other.read("/proc/sys/net/core/somaxconn")
    one.exec("sh", "-c", "echo 12345 >/proc/sys/net/core/somaxconn")
    assert one.exec("sh", "-c", "echo nonsense >/proc/sys/net/core/somaxconn", check=False).returncode != 0
    assert one.read("/proc/sys/net/core/somaxconn") == "12345\n"
    assert other.read("/proc/sys/net/core/somaxconn") == theirs
    assert Path("/proc/sys/net/core/somaxconn").read_text() == mine


def test_a_boot_starts_from_stock_values_and_applies_what_the_disk_says(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    node.exec("sh", "-c", "echo 1 >/proc/sys/vm/swappiness; echo 99 >/proc/sys/vm/dirty_ratio")
    node.write("/etc/sysctl.d/90-x.conf", "vm.max_map_count = 777777\nnet.ipv4.tcp_fin_timeout = 31\n")
    node.reboot()
    assert node.read("/proc/sys/vm/swappiness").strip() == STOCK_SYSCTLS["vm/swappiness"]
    assert node.read("/proc/sys/vm/dirty_ratio").strip() == STOCK_SYSCTLS["vm/dirty_ratio"]
    assert node.read("/proc/sys/vm/max_map_count").strip() == "777777"
    assert node.read("/proc/sys/net/ipv4/tcp_fin_timeout").strip() == "31"


def test_disks_of_a_node_take_a_scheduler_that_no_disk_of_this_machine_sees(lab: StartLab) -> None:
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
    running = lab(1)
    node = running.nodes[0]
    node.exec("sh", "-c", "echo kept >/etc/kept")
    node.crash()
    assert not node.running
    with pytest.raises(RuntimeError, match="node1 is off"):
        node.exec("true")
    node.boot()
    assert node.read("/etc/kept") == "kept\n"


@pytest.mark.parametrize("command", ["systemctl reboot", "reboot", "/usr/sbin/shutdown -r now"])
def test_a_node_that_restarts_itself_boots_again(lab: StartLab, command: str) -> None:
    running = lab(1)
    node = running.nodes[0]
    before = node.read("/proc/sys/kernel/random/boot_id")
    ssh(running, node, command)
    wait_until(lambda: node.boots == 2)
    assert node.read("/proc/sys/kernel/random/boot_id") != before


def test_a_restart_is_seen_under_nohup_too(lab: StartLab) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = lab(1)
    finally:
        signal.signal(signal.SIGHUP, before)
    ssh(running, running.nodes[0], "reboot")
    wait_until(lambda: running.nodes[0].boots == 2)


def test_a_node_that_switches_itself_off_stays_off(lab: StartLab) -> None:
    running = lab(1)
    node = running.nodes[0]
    ssh(running, node, "systemctl poweroff")
    wait_until(lambda: not node.running)
    assert not node.restart_if_asked()
    assert not node.running
    assert node.boots == 1


@pytest.mark.parametrize("program", ["reboot", "shutdown", "poweroff"])
def test_the_programs_that_end_a_node_refuse_to_run_on_this_machine(program: str) -> None:
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


def test_a_lab_whose_process_is_killed_leaves_nothing_that_the_next_does_not_clean(tmp_path: Path) -> None:
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


def test_two_labs_run_side_by_side_though_their_temporary_folders_differ(
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


def test_a_lab_that_is_down_leaves_no_process_that_nobody_waits_for(lab: StartLab) -> None:
    others = set(children_of(os.getpid()))
    running = lab(2)
    run_job(running.nodes[0], 1)
    started = set(children_of(os.getpid())) - others
    assert len(started) >= 4, "the lab, its nodes and the job"
    running.down()
    assert not started & set(children_of(os.getpid()))


def test_only_networks_of_running_labs_are_reached_besides_loopback(lab: StartLab, loopback_guard: list[str]) -> None:
    running = lab(1)
    address = running.nodes[0].address
    with socket.create_connection((address, 22), 5) as connection:
        assert connection.recv(4) == b"SSH-"
    others = ("10.78.0.11", "10.77.249.11", "169.254.169.254")
    for other in others:
        with pytest.raises(LeakedConnectionError):
            socket.create_connection((other, 22), 1)
    running.down()
    with pytest.raises(LeakedConnectionError):
        socket.create_connection((address, 22), 1)
    assert {*others, address} <= set(loopback_guard)
    loopback_guard.clear()


def test_a_read_only_etc_refuses_writes_until_it_is_made_writable(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    read_only_etc(node)
    assert "Read-only file system" in node.exec("touch", "/etc/x", check=False).stderr
    read_only_etc(node, False)
    node.exec("touch", "/etc/x")


def test_a_full_disk_has_no_byte_left_and_costs_other_nodes_none(lab: StartLab) -> None:
    full, other = lab(2).nodes
    full.fill_disk()
    assert "No space left" in full.exec("sh", "-c", "head -c 8192 /dev/zero >/var/x", check=False).stderr
    other.exec("sh", "-c", "head -c 8192 /dev/zero >/var/x")
    full.free_disk()
    full.exec("sh", "-c", "head -c 8192 /dev/zero >/var/x")


@pytest.mark.parametrize(("sudo", "status"), [("none", 1), ("password", 1), ("free", 0)])
def test_sudo_of_an_ordinary_user_is_the_real_one(lab: StartLab, sudo: str, status: int) -> None:
    running = lab(1)
    node = running.nodes[0]
    node.add_user("ann", sudo)
    assert ssh(running, node, "id -un", user="ann").stdout == "ann\n"
    done = ssh(running, node, "sudo -n id -un", user="ann")
    assert done.returncode == status
    assert done.stdout == ("root\n" if status == 0 else "")
    assert ("password is required" in done.stderr) == (status != 0)


def test_limits_of_the_node_do_not_lock_its_users_out(lab: StartLab) -> None:
    running = lab(1)
    node = running.nodes[0]
    node.add_user("ann", "free")
    node.write(
        "/etc/security/limits.d/90-x.conf", "* soft memlock unlimited\n* hard memlock unlimited\n* - nofile 2222\n"
    )
    assert ssh(running, node, "ulimit -n; sudo -n true", user="ann").stdout == "2222\n"


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_a_node_runs_the_python_that_it_is_given(lab: StartLab, version: str) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    path = Path(str(found)).resolve()
    running = lab(1, folders=[path.parents[1]])
    use_python(running.nodes[0], path)
    assert ssh(running, running.nodes[0], "python3 --version").stdout.startswith(f"Python {version}.")
    assert running.nodes[0].exec("systemctl", "is-active", "chrony").stdout == "active\n"


def test_a_program_that_hangs_does_so_for_its_callers_only(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    hang(node, "chronyc")
    assert node.exec("timeout", "0.3", "chronyc", "tracking", check=False).returncode == 124
    unhang(node, "chronyc")
    assert node.exec("chronyc", "-c", "tracking").stdout.endswith("Normal\n")
    assert calls(node, "chronyc") == ["chronyc -c tracking"]


def test_a_frozen_sshd_takes_connections_and_says_nothing(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    freeze(node)
    with socket.create_connection((node.address, 22), 300) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(4)
    freeze(node, False)
    with socket.create_connection((node.address, 22), 300) as connection:
        assert connection.recv(4) == b"SSH-"


def test_a_job_of_slurm_is_seen_by_its_title(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    job = run_job(node, 123)
    wait_until(lambda: "slurmstepd: [123.batch]" in node.exec("ps", "-eo", "args").stdout)
    assert node.exec("pgrep", "-x", "slurmstepd").stdout.strip()
    end_job(node, 123)
    assert job.wait(300) != 0


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


def test_two_trees_are_equal_only_if_names_modes_and_contents_are(lab: StartLab) -> None:
    one, other = lab(2).nodes
    for node in (one, other):
        node.write("/etc/lustrain/a b", "x\n", 0o600)
        node.exec("ln", "-s", "/etc/hosts", "/etc/lustrain/link")
    assert one.tree("/etc/lustrain", "/etc/none") == other.tree("/etc/lustrain", "/etc/none")
    assert one.tree("/etc/lustrain")["/etc/lustrain/link"][1] == "/etc/hosts"
    other.exec("chmod", "644", "/etc/lustrain/a b")
    assert one.tree("/etc/lustrain") != other.tree("/etc/lustrain")
    other.write("/etc/lustrain/a b", "y\n", 0o600)
    assert one.tree("/etc/lustrain") != other.tree("/etc/lustrain")


@pytest.mark.torture
def test_sixty_four_nodes_boot_on_one_machine(lab: StartLab) -> None:
    running = lab(64)
    assert [node.exec("hostname").stdout.strip() for node in running.nodes] == [f"node{n}" for n in range(1, 65)]
