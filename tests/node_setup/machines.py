"""Four made-up machines and the facts that the real collectors find on them.

`facts_of("p5")` builds the machine's files below a temporary folder, answers for its programs from `recorded/`, and runs
`collect` over that. Left out: the machine itself. Programs answer at once and always the same, `statvfs` and device numbers
are those of the folder's file system (so `disk` and `/dev/shm` are put in afterwards), and no metadata service is asked: a
stand-in has the answers. `p5` and `gaudi` are fresh nodes of a cluster, nothing tuned.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from node_setup.agent.facts import instance
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Done
from node_setup.agent.settings import catalog
from tests.node_setup.recorded_host import Machine, build, facts_from, recorded

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "cluster": "llm",
    "backend": "hyperpod-slurm",
    "groups": {
        "train": {"type": "p5.48xlarge", "role": "worker", "gpus": 8, "efa": 32, "nvme": 8, "lustre_efa": 2},
        "login": {"type": "c7i.4xlarge", "role": "login", "gpus": 0, "efa": 0, "nvme": 0},
    },
    "lustre": {
        "path": "/fsx",
        "efa": True,
        "throughput_mb_s": 4800,
        "stripes": [{"path": "/fsx/checkpoints", "options": ["-c", "-1", "-S", "16M"], "why": "large files"}],
    },
    "mount": None,
    "tuning": {"profiles": {}, "settings": {}},
}
"""A node document that fits `p5` and `login`."""

GIB = 2**30
KERNEL_DEFAULTS = {
    "vm.max_map_count": "65530",
    "vm.dirty_ratio": "20",
    "vm.dirty_background_ratio": "10",
    "vm.dirty_expire_centisecs": "3000",
    "vm.nr_hugepages": "0",
    "vm.swappiness": "60",
    "net.core.rmem_max": "212992",
    "net.core.wmem_max": "212992",
    "net.core.somaxconn": "4096",
    "net.ipv4.tcp_max_syn_backlog": "4096",
    "net.ipv4.neigh.default.gc_thresh1": "128",
    "net.ipv4.neigh.default.gc_thresh2": "512",
    "net.ipv4.neigh.default.gc_thresh3": "1024",
    "fs.inotify.max_user_watches": "65536",
    "fs.inotify.max_user_instances": "128",
    "kernel.yama.ptrace_scope": "1",
}


def facts_of(name: str, wanted: Wanted | None = None) -> dict[str, Any]:
    """Facts of `p5`, `cpu`, `gaudi` or `login`; a fresh copy each time. Without `wanted` all that the settings ask for."""
    return copy.deepcopy(_facts(name, wanted or catalog.wanted_facts(catalog.load(), DOCUMENT)))


@functools.cache
def _facts(name: str, wanted: Wanted) -> dict[str, Any]:
    machine = MACHINES[name]()
    with tempfile.TemporaryDirectory() as folder:
        facts = facts_from(build(Path(folder), machine), wanted)
    facts["memory"]["shm_gib"] = machine.shm_gib
    room = {"free_bytes": 400 * GIB, "free_inodes": 50_000_000, "read_only": False}
    facts["disk"] = {"/": room, "/etc": room}
    facts["agent"] = {"python": "3.10.12", "seconds": 0.05}
    return facts


def _base(cpus: int, gib: int, model: str) -> Machine:
    files = {
        "/etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="22.04"\n',
        "/proc/sys/kernel/hostname": "ip-10-1-0-17\n",
        "/proc/sys/kernel/osrelease": "6.8.0-1021-aws\n",
        "/proc/sys/kernel/arch": "x86_64\n",
        "/proc/sys/kernel/random/boot_id": "6a4f2f3a-8a0e-4a3c-9a71-0f5d3b1f7c55\n",
        "/proc/1/stat": "1 (systemd) S 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 25 170000000 3000\n",
        "/proc/1/comm": "systemd\n",
        "/run/systemd/system/.keep": "",
        "/proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz-6.8.0-1021-aws root=PARTUUID=1 ro nvme_core.io_timeout=4294967295\n",
        "/proc/cpuinfo": f"processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: {model}\n",
        "/proc/meminfo": _meminfo(gib),
        "/proc/modules": "ena 151552 0 - Live 0x0\nnvme 61440 2 - Live 0x0\n",
        "/proc/mounts": "/dev/root / ext4 rw,relatime,discard 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n",
        "/proc/self/mountinfo": "22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw,discard\n",
        "/sys/devices/system/cpu/online": f"0-{cpus - 1}\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/sys/bus/pci/devices/0000:00:03.0/modalias": "pci:v00001D0Fd00008061sv00001D0Fsd00000000bc01sc08i02\n",
        "/etc/chrony/chrony.conf": "confdir /etc/chrony/conf.d\nsourcedir /etc/chrony/sources.d\n",
        "/etc/sysctl.d/10-ptrace.conf": "kernel.yama.ptrace_scope = 1\n",
        "/usr/lib/sysctl.d/50-default.conf": "kernel.sysrq = 16\n",
        "/etc/security/limits.conf": "# nothing set\n",
        "/var/lib/dpkg/status": _dpkg({"linux-image-6.8.0-1021-aws": "6.8.0-1021.23", "linux-aws": "6.8.0-1021.22"}),
        **{f"/proc/sys/{key.replace('.', '/')}": f"{value}\n" for key, value in KERNEL_DEFAULTS.items()},
    }
    machine = Machine(files=files, services={"chrony.service": "active", "unattended-upgrades.service": "active"})
    _process(machine, 700, "chronyd", ["/usr/sbin/chronyd", "-F", "1"])
    machine.programs[("chronyc", "-c")] = Done(0, recorded("chronyc_tracking.csv"), "")
    _ebs(machine)
    machine.shm_gib = gib / 2
    return machine


def _meminfo(gib: int) -> str:
    lines = {"MemTotal": f"{gib * 2**20} kB", "HugePages_Total": "0", "HugePages_Free": "0", "Hugepagesize": "2048 kB"}
    return "".join(f"{name}:    {value}\n" for name, value in lines.items())


def _dpkg(packages: Mapping[str, str], held: Sequence[str] = ()) -> str:
    wish = {name: "hold" if name in held else "install" for name in packages}
    return "\n".join(
        f"Package: {name}\nStatus: {wish[name]} ok installed\nPriority: optional\nVersion: {version}\n"
        for name, version in packages.items()
    )


def _process(machine: Machine, pid: int, name: str, command: Sequence[str], limits: str = "") -> None:
    machine.files[f"/proc/{pid}/stat"] = f"{pid} ({name}) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 {pid} 1 1\n"
    machine.files[f"/proc/{pid}/cmdline"] = "\0".join(command) + "\0"
    if limits:
        machine.files[f"/proc/{pid}/limits"] = limits


def _disk(
    machine: Machine, name: str, number: str, size: int, model: str, scheduler: str = "[none] mq-deadline"
) -> None:
    folder = f"/sys/block/{name}"
    machine.files[f"{folder}/size"] = f"{size // 512}\n"
    machine.files[f"{folder}/dev"] = f"{number}\n"
    machine.files[f"{folder}/device/model"] = f"{model:40}\n"
    machine.files[f"{folder}/queue/scheduler"] = f"{scheduler}\n"
    machine.disks[name] = size


def _ebs(machine: Machine) -> None:
    _disk(machine, "nvme0n1", "259:0", 500 * GIB, "Amazon Elastic Block Store", "none [mq-deadline]")
    machine.files["/sys/block/nvme0n1/nvme0n1p1/partition"] = "1\n"
    machine.files["/sys/block/nvme0n1/nvme0n1p1/dev"] = "259:1\n"


def _instance_store(machine: Machine, count: int, size: int) -> None:
    for at in range(1, count + 1):
        _disk(machine, f"nvme{at}n1", f"259:{at + 1}", size, "Amazon EC2 NVMe Instance Storage", "none [mq-deadline]")


def _pci(machine: Machine, bus: int, vendor: int, device: int, kind: int) -> str:
    slot = f"0000:{bus:02x}:00.0"
    alias = f"pci:v{vendor:08X}d{device:08X}sv{vendor:08X}sd00000000bc{kind:02X}sc00i00"
    machine.files[f"/sys/bus/pci/devices/{slot}/modalias"] = f"{alias}\n"
    return slot


def _ec2(machine: Machine, kind: str, instance_id: str, life_cycle: str = "on-demand") -> None:
    for name, value in (("sys_vendor", "Amazon EC2"), ("board_asset_tag", instance_id), ("product_name", kind)):
        machine.files[f"/sys/devices/virtual/dmi/id/{name}"] = f"{value}\n"
    machine.identity = {
        "instance-type": kind,
        "instance-id": instance_id,
        "instance-life-cycle": life_cycle,
        "placement/availability-zone-id": "use2-az1",
    }


def _efa(machine: Machine, count: int, device: int) -> None:
    counters = ("rx_bytes", "rx_drops", "tx_bytes", "rdma_read_wr_err", "rdma_write_wr_err", "retrans_timeout_events")
    blocks = []
    for at in range(count):
        _pci(machine, 0x80 + at, 0x1D0F, device, 2)
        name = f"rdmap{0x80 + at}s0"
        folder = f"/sys/class/infiniband/{name}"
        machine.links[f"{folder}/device/driver"] = "../../../../bus/pci/drivers/efa"
        machine.files[f"{folder}/device/vendor"] = "0x1d0f\n"
        machine.files[f"{folder}/ports/1/state"] = "4: ACTIVE\n"
        machine.files.update({f"{folder}/ports/1/hw_counters/{one}": "0\n" for one in counters})
        blocks += [
            f"provider: efa\n    fabric: {fabric}\n    domain: {name}-rdm\n    version: 206.0\n"
            for fabric in ("efa-direct", "efa")
        ]
    tail = "    type: FI_EP_RDM\n    protocol: FI_PROTO_EFA\n"
    machine.programs[("fi_info", "-p", "efa")] = Done(0, "".join(block + tail for block in blocks), "")
    machine.files["/proc/modules"] += (
        "efa 90112 0 - Live 0x0\nib_uverbs 163840 1 efa, Live 0x0\nib_core 475136 2 efa,ib_uverbs, Live 0x0\n"
    )
    machine.files["/opt/amazon/efa_installed_packages"] = recorded("efa_installed_packages.txt")


def _lustre(machine: Machine) -> None:
    mounted = "10.1.1.67@tcp:/xeo3rbev /fsx lustre rw,noatime,checksum,flock,nouser_xattr,lruresize,lazystatfs 0 0\n"
    machine.files["/proc/mounts"] += mounted
    machine.files["/proc/modules"] += (
        "lustre 1064960 1 - Live 0x0\nptlrpc 2600960 1 - Live 0x0\nksocklnd 196608 1 - Live 0x0\n"
    )
    machine.files["/sys/fs/lustre/version"] = "2.15.6\n"
    machine.files["/sys/module/ptlrpc/parameters/ptlrpcd_per_cpt_max"] = "8\n"
    machine.files["/sys/module/ksocklnd/parameters/credits"] = "256\n"
    untuned = "\n".join(
        [f"osc.xeo3rbev-OST{at:04x}-osc-ffff8c4d0cd43800.max_rpcs_in_flight=8" for at in range(6)]
        + [f"osc.xeo3rbev-OST{at:04x}-osc-ffff8c4d0cd43800.max_dirty_mb=2000" for at in range(6)]
        + [f"ldlm.namespaces.xeo3rbev-OST{at:04x}-osc-ffff8c4d0cd43800.lru_size=0" for at in range(6)]
        + [f"ldlm.namespaces.xeo3rbev-OST{at:04x}-osc-ffff8c4d0cd43800.lru_max_age=3900000" for at in range(6)]
        + ["mdc.xeo3rbev-MDT0000-mdc-ffff8c4d0cd43800.max_rpcs_in_flight=8"]
        + ["mdc.xeo3rbev-MDT0000-mdc-ffff8c4d0cd43800.max_mod_rpcs_in_flight=7"]
        + ["llite.xeo3rbev-ffff8c4d0cd43800.statahead_max=128"]
        + ["llite.xeo3rbev-ffff8c4d0cd43800.statahead_agl=1", "llite.xeo3rbev-ffff8c4d0cd43800.statahead_xattr=0", ""]
    )
    machine.programs[("lctl", "get_param")] = Done(0, untuned, "")
    machine.programs[("lnetctl",)] = Done(0, recorded("lnetctl_net_show_v.txt"), "")
    machine.programs[("lnetctl", "peer", "show")] = Done(0, recorded("lnetctl_peer_show.txt"), "")
    machine.programs[("lnetctl", "udsp", "show")] = Done(0, recorded("lnetctl_udsp_show.txt"), "")
    machine.files["/proc/net/route"] = recorded("proc_net_route.txt")
    machine.programs[("lfs", "df")] = Done(0, recorded("lfs_df.txt").replace("/mnt/demo", "/fsx"), "")
    machine.programs[("lfs", "getstripe")] = Done(0, recorded("lfs_getstripe_pfl.txt"), "")
    machine.programs[("find",)] = Done(1, "", "find: '/fsx/checkpoints': No such file or directory")


SLURMD_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max stack size            8388608              unlimited            bytes
Max open files            1024                 524288               files
Max locked memory         8388608              8388608              bytes
"""


def _p5() -> Machine:
    machine = _base(192, 2048, "Intel(R) Xeon(R) Platinum 8488C")
    _ec2(machine, "p5.48xlarge", "i-0123456789abcdef0", "spot")
    machine.files[instance.HYPERPOD] = _resource_config("train", "ml.p5.48xlarge", "i-0123456789abcdef0")
    _instance_store(machine, 8, 3_800_000_000_000 // 512 * 512)
    slots = [_pci(machine, 0x50 + at, 0x10DE, 0x2330, 3) for at in range(8)]
    for at in range(4):
        _pci(machine, 0x40 + at, 0x10DE, 0x22A3, 6)
    _efa(machine, 32, 0xEFA2)
    _nvidia(machine, slots)
    _lustre(machine)
    machine.files["/etc/systemd/system/configure-efa-fsx-lustre-client.service"] = "[Service]\nType=oneshot\n"
    _process(machine, 2100, "slurmd", ["/opt/slurm/sbin/slurmd", "-D"], SLURMD_LIMITS)
    machine.files["/var/lib/dpkg/status"] += "\n" + _dpkg({"lustre-client-modules-aws": "2.15.6-1fsx21"})
    machine.services.update(
        {
            "slurmd.service": "active",
            "nvidia-persistenced.service": "inactive",
            "nvidia-fabricmanager.service": "active",
            "configure-efa-fsx-lustre-client.service": "active",
        }
    )
    return machine


def _resource_config(group: str, kind: str, instance_id: str) -> str:
    one = {"InstanceName": f"{group}-1", "AgentIpAddress": "169.254.0.5", "CustomerIpAddress": "10.1.0.17"}
    groups = [{"Name": group, "InstanceType": kind, "Instances": [{**one, "InstanceId": instance_id}]}]
    return json.dumps({"ClusterConfig": {"ClusterName": "llm"}, "InstanceGroups": groups})


def _nvidia(machine: Machine, slots: Sequence[str]) -> None:
    driver = "570.172.08"
    machine.files["/proc/driver/nvidia/version"] = (
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}\n"
    )
    machine.files["/proc/modules"] += "nvidia 9740288 8 - Live 0x0\nnvidia_uvm 1949696 4 - Live 0x0\n"
    machine.files["/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so"] = ""
    clocks = "345, 2619, 1980, 2619, 1755, 2619, 0x0000000000000001, Completed, Success"
    rows = [
        f"{at}, NVIDIA H100 80GB HBM3, GPU-{at:08x}-0c97-4b1e-683e-eb7d42699053, 0000{slot.upper()}, {driver}, 81559,"
        f" Disabled, 0, No, No, {clocks}\n"
        for at, slot in enumerate(slots)
    ]
    machine.programs[("nvidia-smi",)] = Done(0, "".join(rows), "")
    machine.programs[("nvidia-smi", "--query-compute-apps=pid")] = Done(0, "", "")
    links = "".join(f"         Link {link}: 26.562 GB/s\n" for link in range(18))
    heads = [f"GPU {at}: NVIDIA H100 80GB HBM3 (UUID: GPU-{at})\n" for at in range(len(slots))]
    machine.programs[("nvidia-smi", "nvlink", "-s")] = Done(0, "".join(head + links for head in heads), "")
    none = "         Link 0: Replay Errors: 0\n         Link 0: Recovery Errors: 0\n         Link 0: CRC Errors: 0\n\n"
    machine.programs[("nvidia-smi", "nvlink", "-e")] = Done(0, "".join(head + none for head in heads), "")
    machine.programs[("nv-fabricmanager",)] = Done(0, f"Fabric Manager version is : {driver}\n", "")
    machine.programs[("journalctl",)] = Done(1, "", "")


def _cpu() -> Machine:
    machine = _base(16, 32, "AMD EPYC 9R14")
    machine.files["/proc/sys/kernel/osrelease"] = "6.8.0-60-generic\n"
    return machine


def _login() -> Machine:
    machine = _base(16, 32, "Intel(R) Xeon(R) Platinum 8488C")
    machine.files["/etc/os-release"] = (
        'NAME="Amazon Linux"\nVERSION="2023"\nID="amzn"\nID_LIKE="fedora"\nVERSION_ID="2023"\n'
    )
    del machine.files["/var/lib/dpkg/status"], machine.files["/etc/chrony/chrony.conf"]
    machine.files["/etc/chrony.conf"] = "sourcedir /run/chrony.d\nsourcedir /etc/chrony.d\n"
    machine.programs[("rpm",)] = Done(0, "kernel\t6.1.177-224.371.amzn2023\nlustre-client\t2.15.6-32.amzn2023\n", "")
    machine.services = {"chronyd.service": "active"}
    _ec2(machine, "c7i.4xlarge", "i-0fedcba9876543210")
    machine.files[instance.NODE] = json.dumps({"group": "login", "instance_type": "c7i.4xlarge", "zone_id": "use2-az1"})
    _lustre(machine)
    return machine


def _gaudi() -> Machine:
    machine = _base(96, 768, "Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz")
    _ec2(machine, "dl1.24xlarge", "i-0aaaaaaaaaaaaaaaa")
    machine.files[instance.NODE] = json.dumps({"group": "gaudi", "instance_type": "dl1.24xlarge"})
    _instance_store(machine, 4, 1_000_000_000_000 // 512 * 512)
    _efa(machine, 4, 0xEFA0)
    slots = [_pci(machine, 0x10 + at, 0x1DA3, 0x1000, 0x12) for at in range(8)]
    rows = [f"{at}, {at}, {slot}, HL-205, 1.20.0-abc123, 32768 MiB, 512 MiB, 35 C\n" for at, slot in enumerate(slots)]
    machine.programs[("hl-smi",)] = Done(0, "".join(rows), "")
    machine.files["/proc/modules"] += "habanalabs 3200000 0 - Live 0x0\n"
    machine.files["/sys/module/habanalabs/version"] = "1.20.0-abc123\n"
    return machine


MACHINES: dict[str, Callable[[], Machine]] = {"p5": _p5, "cpu": _cpu, "gaudi": _gaudi, "login": _login}
