"""What the lab's stand-in programs keep to: state that lives as long as the real one's, and words of the real ones."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rehearsal.lab import hardware
from rehearsal.lab.nodes import Lab, Node, why_not
from tests.conftest import require
from tests.lab.nodes import StartLab
from tests.processes import wait_until

pytestmark = pytest.mark.slow

PROGRAMS = Path(hardware.__file__).parent / "programs"
LUSTRE = ("fs-1.fsx.us-east-1.amazonaws.com@tcp:/abcd", "/fsx")


@pytest.fixture(scope="module")
def pair() -> Iterator[Lab]:
    """Two nodes that the tests of this file share and do not break."""
    require(why_not() is None, str(why_not()))
    with Lab(2, "p5") as lab:
        for node in lab.nodes:
            node.exec("mkdir", "-p", "/fsx")
        yield lab


@pytest.fixture
def node(pair: Lab) -> Iterator[Node]:
    """With Lustre mounted anew."""
    one = pair.nodes[0]
    one.exec("mount", "-t", "lustre", *LUSTRE, "-o", "noatime,flock,_netdev")
    yield one
    one.exec("umount", "/fsx")


def test_every_stand_in_says_first_what_it_is_not() -> None:
    names = {link.rpartition("/")[2] for kind in hardware.KINDS.values() for link in hardware.stand_ins(kind)}
    assert {"systemctl", "lctl", "nvidia-smi", "mkfs.xfs", "fi_info", "hl-smi"} <= names
    for name in names:
        module = PROGRAMS / f"{name.replace('-', '_').replace('.', '_')}.py"
        text = ast.get_docstring(ast.parse(module.read_text())) or ""
        assert text.startswith("Not "), f"{module.name}: {text[:60]!r}"


def test_hardware_of_a_kind_only_has_programs_of_that_kind(lab: StartLab) -> None:
    node = lab(1, "plain").nodes[0]
    for program in ("nvidia-smi", "hl-smi", "lctl", "fi_info"):
        assert node.exec("which", program, check=False).returncode != 0
    assert "unknown filesystem type 'lustre'" in node.exec("mount", "-t", "lustre", *LUSTRE, check=False).stderr
    node.set_hardware("gaudi")
    assert node.exec("sh", "-c", "hl-smi -Q index,name -f csv,noheader | wc -l").stdout.strip() == "8"
    node.set_hardware("plain")
    assert node.exec("which", "hl-smi", check=False).returncode != 0


def test_systemctl_shows_units_in_order_absent_as_not_found(node: Node) -> None:
    wanted = "--property=Id,LoadState,ActiveState,UnitFileState,Result"
    said = node.exec("systemctl", "show", wanted, "--", "slurmd.service", "none.service").stdout
    there, absent = (dict(line.split("=", 1) for line in block.splitlines()) for block in said.strip().split("\n\n"))
    shown = [there[name] for name in ("Id", "LoadState", "ActiveState", "UnitFileState", "Result")]
    assert shown == ["slurmd.service", "loaded", "active", "enabled", "success"]
    assert (absent["Id"], absent["LoadState"], absent["UnitFileState"]) == ("none.service", "not-found", "")


def test_systemctl_heeds_a_changed_unit_only_after_daemon_reload(node: Node) -> None:
    def limits() -> str:
        return node.read(f"/proc/{node.exec('pgrep', '-ox', 'slurmd').stdout.strip()}/limits")

    node.write("/etc/systemd/system/slurmd.service.d/x.conf", "[Service]\nLimitNOFILE=4321\n")
    assert "NeedDaemonReload=yes" in node.exec("systemctl", "show", "slurmd").stdout
    node.exec("systemctl", "restart", "slurmd")
    assert " 4321 " not in limits()
    node.exec("systemctl", "daemon-reload")
    node.exec("systemctl", "restart", "slurmd")
    assert " 4321 " in limits()


def test_enabled_oneshot_runs_at_each_boot_after_what_it_names(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    service = "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo {} >>/var/order'\n"
    unit = "[Unit]\nAfter={}\n" + service + "[Install]\nWantedBy=multi-user.target\n"
    node.write("/etc/systemd/system/a.service", unit.format("b.service", "a"))
    node.write("/etc/systemd/system/b.service", unit.format("", "b"))
    done = node.exec("systemctl", "enable", "a.service", "b.service")
    assert "Created symlink /etc/systemd/system/multi-user.target.wants/a.service" in done.stderr
    node.reboot()
    assert node.read("/var/order").split() == ["b", "a"]
    node.exec("systemctl", "disable", "a")
    node.reboot()
    assert node.read("/var/order").split() == ["b", "a", "b"]


def test_a_unit_that_fails_is_failed_and_says_so(node: Node) -> None:
    node.write("/etc/systemd/system/bad.service", "[Service]\nType=oneshot\nExecStart=/bin/false\n")
    done = node.exec("systemctl", "start", "bad", check=False)
    assert (done.returncode, done.stderr.startswith("Job for bad.service failed")) == (1, True)
    assert node.exec("systemctl", "is-active", "bad", check=False).stdout == "failed\n"
    node.exec("systemctl", "reset-failed", "bad")
    assert node.exec("systemctl", "is-active", "bad", check=False).stdout == "inactive\n"
    assert node.exec("systemctl", "start", "none", check=False).returncode == 5


def test_mounted_lustre_is_in_proc_mounts_and_shared_by_nodes(pair: Lab, node: Node) -> None:
    other = pair.nodes[1]
    row = next(line for line in node.read("/proc/mounts").splitlines() if " /fsx " in line)
    assert row.split()[1:4] == ["/fsx", "lustre", "rw,noatime,flock,checksum,nouser_xattr,lruresize,lazystatfs"]
    node.write("/fsx/shared", "x")
    assert " /fsx " not in other.read("/proc/mounts")
    other.exec("mount", "-t", "lustre", *LUSTRE)
    assert other.read("/fsx/shared") == "x"
    other.exec("umount", "/fsx")
    assert " /fsx " not in other.read("/proc/mounts")
    wrong = other.exec("mount", "-t", "lustre", "fs-1@tcp:/unreachable", "/fsx", check=False)
    assert "Is the MGS specification correct?" in wrong.stderr


def test_lustre_parameters_have_bounds_and_end_with_the_mount(node: Node) -> None:
    pattern = "osc.*OST*.max_rpcs_in_flight"
    assert len(set(node.exec("lctl", "get_param", "-n", pattern).stdout.split())) == 1
    node.exec("lctl", "set_param", f"{pattern}=32")
    values = node.exec("lctl", "get_param", pattern).stdout.splitlines()
    assert [value.endswith("=32") for value in values] == [True] * 4
    assert "out of range" in node.exec("lctl", "set_param", f"{pattern}=257", check=False).stderr
    # More than the servers granted is taken without a word, and is not what one then reads.
    node.exec("lctl", "set_param", "osc.*.max_pages_per_rpc=4096")
    assert set(node.exec("lctl", "get_param", "-n", "osc.*.max_pages_per_rpc").stdout.split()) == {"1024"}
    absent = node.exec("lctl", "get_param", pattern, "mdt.*.x", check=False)
    assert (absent.returncode, len(absent.stdout.splitlines())) == (2, 4)
    assert absent.stderr == "error: get_param: param_path 'mdt/*/x': No such file or directory\n"
    node.exec("umount", "/fsx")
    node.exec("mount", "-t", "lustre", *LUSTRE)
    assert set(node.exec("lctl", "get_param", "-n", pattern).stdout.split()) == {"8"}


def test_a_directorys_layout_is_the_file_systems_and_inherited(pair: Lab, node: Node) -> None:
    node.exec("mkdir", "-p", "/fsx/checkpoints/inner")
    assert "lcm_entry_count:   4" in node.exec("lfs", "getstripe", "-d", "/fsx/checkpoints").stdout
    node.exec("lfs", "setstripe", "-c", "-1", "-S", "16M", "/fsx/checkpoints")
    plain = "stripe_count:  -1 stripe_size:   16777216 pattern:       raid0 stripe_offset: -1\n"
    assert node.exec("lfs", "getstripe", "-d", "/fsx/checkpoints/inner").stdout == plain
    other = pair.nodes[1]
    other.exec("mount", "-t", "lustre", *LUSTRE)
    assert other.exec("lfs", "getstripe", "-d", "/fsx/checkpoints").stdout == plain
    other.exec("umount", "/fsx")
    assert "Inappropriate ioctl" in node.exec("lfs", "getstripe", "-d", "/tmp", check=False).stderr


def test_module_options_count_when_the_module_is_loaded(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    file = "/sys/module/ptlrpc/parameters/ptlrpcd_per_cpt_max"
    node.exec("modprobe", "lustre")
    node.write("/etc/modprobe.d/x.conf", "options ptlrpc ptlrpcd_per_cpt_max=32\n")
    node.exec("modprobe", "lustre")
    assert node.read(file) == "8\n"
    node.write("/etc/modules-load.d/x.conf", "lustre\n")
    node.reboot()
    assert node.read(file) == "32\n"
    assert "not found" in node.exec("/usr/sbin/modprobe", "anything", check=False).stderr


def test_clocks_of_gpus_are_kept_until_the_node_reboots(lab: StartLab) -> None:
    node = lab(1, "p5").nodes[0]
    query = ("nvidia-smi", "--query-gpu=index,clocks.applications.graphics", "--format=csv,noheader,nounits")
    node.exec("nvidia-smi", "-i", "3", "-ac", "2619,1980")
    assert node.exec(*query).stdout.splitlines()[2:4] == ["2, 1830", "3, 1980"]
    assert node.exec("nvidia-smi", "-ac", "2619,9999", check=False).returncode != 0
    unknown = node.exec("nvidia-smi", "--query-gpu=index,nonsense", "--format=csv,noheader", check=False)
    assert 'Field "nonsense" is not a valid field to query.' in unknown.stdout
    node.reboot()
    assert node.exec(*query).stdout.splitlines()[3] == "3, 1830"


def test_array_is_assembled_at_boot_and_no_disk_is_overwritten(lab: StartLab) -> None:
    node = lab(1, "p5").nodes[0]
    disks = ("/dev/nvme1n1", "/dev/nvme2n1")
    create = ("mdadm", "--create", "/dev/md/x", "--level=0", "--raid-devices=2", *disks)
    node.exec(*create)
    node.exec("mkfs.xfs", "-L", "scratch", "/dev/md/x")
    assert "create aborted" in node.exec(*create, check=False).stderr
    assert "existing filesystem" in node.exec("mkfs.xfs", "/dev/md/x", check=False).stderr
    node.exec("mkdir", "/scratch")
    for _ in range(2):
        node.exec("mount", "/dev/disk/by-label/scratch", "/scratch")
        node.exec("sh", "-c", "echo x >>/scratch/file")
        assert "/dev/md127 /scratch xfs" in node.read("/proc/mounts")
        node.reboot()
    assert node.exec("ls", "/sys/block/md127/slaves").stdout.split() == ["nvme1n1", "nvme2n1"]
    node.exec("mount", "/dev/md127", "/scratch")
    assert node.read("/scratch/file") == "x\nx\n"
    assert "special device" in node.exec("/usr/bin/mount", "/dev/md9", "/scratch", check=False).stderr


def test_kernel_arguments_come_with_the_next_boot(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    node.write("/etc/default/grub.d/90-x.cfg", 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX intel_idle.max_cstate=1"\n')
    node.exec("update-grub")
    assert "max_cstate" not in node.read("/proc/cmdline")
    node.reboot()
    assert "intel_idle.max_cstate=1" in node.read("/proc/cmdline").split()
    assert node.read("/sys/module/intel_idle/parameters/max_cstate") == "1\n"


def test_chrony_follows_a_source_once_it_was_told_to_read_it(lab: StartLab) -> None:
    node = lab(1).nodes[0]
    node.exec("chronyc", "reload", "sources")
    node.write("/etc/chrony/sources.d/x.sources", "server 169.254.169.123 prefer iburst\n")
    assert "169.254.169.123" not in node.exec("chronyc", "-c", "-n", "tracking").stdout
    node.exec("chronyc", "reload", "sources")
    assert node.exec("chronyc", "-c", "-n", "tracking").stdout.split(",")[1] == "169.254.169.123"
    node.exec("systemctl", "stop", "chrony")
    assert "506 Cannot talk to daemon" in node.exec("chronyc", "tracking", check=False).stderr


SERVICE = """[Unit]
StartLimitBurst=4
StartLimitIntervalSec=300
[Service]
ExecStart=/bin/sh -c 'echo began >> /run/{name}; {command}'
Restart={restart}
RestartSec=50ms
TimeoutStopSec=1
"""


def service(node: Node, name: str, command: str, restart: str) -> None:
    """Start a service of this test; it is called by a name of its own, so that none is met twice."""
    node.write(f"/etc/systemd/system/{name}.service", SERVICE.format(name=name, command=command, restart=restart))
    node.exec("systemctl", "daemon-reload")
    node.exec("systemctl", "start", name)


def shown(node: Node, name: str, *properties: str) -> list[str]:
    lines = node.exec("systemctl", "show", f"--property={','.join(properties)}", name).stdout.splitlines()
    values = dict(line.split("=", 1) for line in lines)
    return [values[key] for key in properties]


@pytest.mark.parametrize(
    ("name", "command", "restart", "state"),
    [
        ("ends-well", "exit 0", "on-failure", ["inactive", "success", "0", "0"]),
        ("fails", "exit 3", "no", ["failed", "exit-code", "3", "0"]),
        ("dies", "kill -KILL $$", "no", ["failed", "signal", "9", "0"]),
        ("ends-by-term", "kill -TERM $$", "on-failure", ["inactive", "success", "15", "0"]),
        ("fails-for-ever", "exit 3", "on-failure", ["failed", "start-limit-hit", "3", "3"]),
        ("ends-for-ever", "exit 0", "always", ["failed", "start-limit-hit", "0", "3"]),
    ],
)
def test_service_that_ends_is_seen_and_started_as_its_unit_says(
    node: Node, name: str, command: str, restart: str, state: list[str]
) -> None:
    service(node, name, command, restart)
    wait_until(lambda: shown(node, name, "ActiveState", "Result", "ExecMainStatus", "NRestarts") == state)
    assert node.read(f"/run/{name}").count("began") == 1 + int(state[-1])
    assert node.exec("systemctl", "is-active", name, check=False).returncode == 3


def test_transient_unit_keeps_its_result_until_it_is_reset(node: Node) -> None:
    once = ("systemd-run", "--quiet", "--unit=once", "--property=RemainAfterExit=yes", "--", "/bin/sh", "-c", "exit 7")
    result = ("ActiveState", "ExecMainCode", "ExecMainStatus")
    node.exec(*once)
    wait_until(lambda: shown(node, "once", *result) == ["failed", "1", "7"])
    assert node.exec(*once, check=False).returncode == 1
    node.exec("systemctl", "reset-failed", "once")
    assert shown(node, "once", *result) == ["inactive", "0", "0"]
    assert not node.exists("/run/systemd/transient/once.service")


def test_killed_service_is_started_again_and_stopped_one_is_not(node: Node) -> None:
    service(node, "worker", "sleep 613 & wait", "always")
    (first,) = shown(node, "worker", "MainPID")
    node.exec("systemctl", "kill", "--signal=KILL", "worker")
    wait_until(lambda: shown(node, "worker", "ActiveState", "NRestarts") == ["active", "1"])
    (second,) = shown(node, "worker", "MainPID")
    assert first != second
    node.exec("systemctl", "stop", "worker")
    assert shown(node, "worker", "ActiveState", "MainPID") == ["inactive", "0"]
    assert node.exec("pgrep", "-f", "sleep 613", check=False).stdout == "", "what it started ends with it"
    assert node.read("/run/worker").count("began") == 2


def test_service_that_ignores_signals_is_killed_after_its_time(node: Node) -> None:
    service(node, "deaf", 'trap "" TERM; trap "echo heard >> /run/deaf" USR1; while true; do sleep 0.05; done', "no")
    node.exec("systemctl", "kill", "-s", "USR1", "--kill-whom=main", "deaf")
    wait_until(lambda: "heard" in node.read("/run/deaf"))
    began = time.monotonic()
    node.exec("systemctl", "stop", "deaf")
    assert time.monotonic() - began >= 1
    assert shown(node, "deaf", "ActiveState") == ["inactive"]
    assert node.exec("systemctl", "kill", "deaf", check=False).returncode != 0
