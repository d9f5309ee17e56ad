"""The simulated hardware of a node: files of /sys, /proc and /dev that programs read, and services of its image.

Shapes follow the kernel's own files: Documentation/ABI for /sys, proc(5), and what an EC2 instance of the type shows as far
as published (instance sizes: https://aws.amazon.com/ec2/instance-types/). Nothing here computes, transfers or fails.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

LEFT_OUT = (
    "lab nodes: devices are files in an overlay over /sys, which take any text and act on nothing; the count of processors "
    "that programs may run on is the machine's; kernel modules load only in /sys/module; unlimited locked memory is only "
    "shown where the machine may not grant it; systemd, Lustre, EFA, GPUs and Gaudis are programs that keep state and answer "
    "as the real ones do"
)

DRIVER = "570.172.08"
"""The GPUs and the programs that name a driver have this one."""

STOCK_SYSCTLS = {
    "vm/max_map_count": "65530",
    "vm/swappiness": "60",
    "vm/dirty_ratio": "20",
    "vm/dirty_background_ratio": "10",
    "vm/dirty_expire_centisecs": "3000",
    "vm/dirty_writeback_centisecs": "500",
    "vm/overcommit_memory": "0",
    "vm/zone_reclaim_mode": "0",
    "vm/min_free_kbytes": "67584",
    "vm/nr_hugepages": "0",
    "fs/inotify/max_user_watches": "65536",
    "fs/inotify/max_user_instances": "128",
    "fs/inotify/max_queued_events": "16384",
    "fs/file-max": "9223372036854775807",
    "fs/nr_open": "1048576",
    "fs/aio-max-nr": "65536",
    "kernel/numa_balancing": "1",
    "kernel/panic": "0",
    "kernel/yama/ptrace_scope": "1",
    "kernel/pid_max": "4194304",
    "kernel/threads-max": "1000000",
    "net/core/rmem_max": "212992",
    "net/core/wmem_max": "212992",
    "net/core/rmem_default": "212992",
    "net/core/wmem_default": "212992",
    "net/core/netdev_max_backlog": "1000",
}
"""Sysctls of the whole machine, not of a namespace, that a node may be tuned in, with the kernel's defaults on a large
machine (Documentation/admin-guide/sysctl). A node has those that the machine's kernel shows in a new network namespace."""

_STAND_IN = "/opt/simulated/run"
_EVERYWHERE = (
    "systemctl",
    "systemd-run",
    "reboot",
    "shutdown",
    "poweroff",
    "modprobe",
    "mount",
    "umount",
    "udevadm",
    "update-grub",
    "chronyc",
)
# Where a caller names the whole path, or mount(8) looks for its helper, the stand-in has to be as well.
_BY_PATH = (
    "usr/bin/systemctl",
    "usr/bin/systemd-run",
    "usr/sbin/modprobe",
    "usr/sbin/reboot",
    "usr/sbin/shutdown",
    "usr/sbin/poweroff",
)
# As EFA's installer leaves it.
_EFA_PACKAGES = """# EFA installer version: 1.43.2
# Debug packages installed: no
# Packages installed:
libfabric1-aws_2.1.0amzn5.0_amd64 rdma-core_58.0-1_amd64 efa_2.17.1-1.amzn1_amd64
"""
_DPKG = Path("/var/lib/dpkg/status")
_GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One kind of machine. `type` empty: no cloud instance. Sizes of disks in bytes, memory in GiB."""

    type: str = ""
    cpus: int = 2
    memory_gib: int = 8
    numa_nodes: int = 1
    gpus: int = 0
    gpu_name: str = ""
    gaudis: int = 0
    efa: int = 0
    disks: int = 0
    disk_bytes: int = 0
    lustre: bool = False
    slurm: bool = False


KINDS = {
    "plain": Hardware(),
    "login": Hardware(type="m7i.large", cpus=2, memory_gib=8, lustre=True),
    "cpu": Hardware(type="c7i.24xlarge", cpus=96, memory_gib=192, lustre=True, slurm=True),
    "p5": Hardware(
        type="p5.48xlarge",
        cpus=192,
        memory_gib=2048,
        numa_nodes=2,
        gpus=8,
        gpu_name="NVIDIA H100 80GB HBM3",
        efa=32,
        disks=8,
        disk_bytes=3_800_000_000_000,
        lustre=True,
        slurm=True,
    ),
    "gaudi": Hardware(
        type="dl1.24xlarge",
        cpus=96,
        memory_gib=768,
        numa_nodes=2,
        gaudis=8,
        efa=4,
        disks=4,
        disk_bytes=1_000_000_000_000,
        lustre=True,
        slurm=True,
    ),
}


def write_hardware(hardware: Hardware, folder: Path) -> None:
    """Write the node's simulated part of /sys, /proc and /dev, and what its disk image holds from the start.

    `folder/sys` is laid over the machine's own sysfs; `proc` and `dev` are bound file by file; `disk` is a layer of the
    node's root, below what the node writes itself.
    """
    files = {
        **_processors(hardware),
        **_memory(hardware),
        **_identity(hardware),
        **_devices(hardware),
        **_disks(hardware),
    }
    files |= {f"disk/usr/lib/systemd/system/{name}": text for name, text in _units(hardware).items()}
    files["disk/etc/default/grub"] = 'GRUB_CMDLINE_LINUX_DEFAULT="console=tty1 console=ttyS0"\nGRUB_CMDLINE_LINUX=""\n'
    if _DPKG.exists():
        files["disk/var/lib/dpkg/status"] = _DPKG.read_text() + _packages(hardware)
    files["disk/var/lib/simulated/hardware.json"] = json.dumps(asdict(hardware), indent=1)
    # tmpfs is as large as half of the memory by default.
    files["shm_gib"] = f"{hardware.memory_gib // 2}\n"
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for kind in ("sys", "proc", "dev", "disk"):
        (folder / kind).mkdir(exist_ok=True)
    for link, points_to in _links(hardware).items():
        target = folder / "disk" / link
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(points_to)
    (folder / "sys/class/dmi").mkdir(parents=True)
    (folder / "sys/class/dmi/id").symlink_to("/sys/devices/virtual/dmi/id")
    for number in range(1, hardware.disks + 1):
        # As large as the real one and all hole: a file system may be made on it, but not be mounted.
        os.truncate(folder / f"dev/nvme{number}n1", hardware.disk_bytes)
    for place in ("block", "class/block", "class/infiniband", "bus/pci/devices"):
        (folder / "sys" / place).mkdir(parents=True, exist_ok=True)
        os.setxattr(folder / "sys" / place, "trusted.overlay.opaque", b"y")


def _processors(hardware: Hardware) -> dict[str, str]:
    last = hardware.cpus - 1
    entry = "processor\t: {}\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8488C\n\n"
    files = {
        "proc/cpuinfo": "".join(entry.format(number) for number in range(hardware.cpus)),
        "sys/devices/system/cpu/online": f"0-{last}\n",
        "sys/devices/system/cpu/possible": f"0-{last}\n",
        "sys/devices/system/cpu/present": f"0-{last}\n",
    }
    each = hardware.cpus // hardware.numa_nodes
    for node in range(hardware.numa_nodes):
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{node * each}-{(node + 1) * each - 1}\n"
    return files


def _memory(hardware: Hardware) -> dict[str, str]:
    # What firmware and the kernel's own image keep for themselves is 2 to 3 % on EC2.
    total = int(hardware.memory_gib * 0.975 * 2**20)
    pages = 5128 if hardware.efa else 0
    rows = {"MemTotal": total, "MemFree": total * 9 // 10, "MemAvailable": total * 9 // 10}
    text = "".join(f"{name}:{value:>15} kB\n" for name, value in rows.items())
    counts = {"HugePages_Total": pages, "HugePages_Free": pages, "HugePages_Rsvd": 0, "HugePages_Surp": 0}
    text += "".join(f"{name}:{value:>8}\n" for name, value in counts.items())
    cmdline = "BOOT_IMAGE=/boot/vmlinuz root=LABEL=cloudimg-rootfs ro console=tty1 nvme_core.io_timeout=4294967295"
    return {
        "proc/modules": "".join(f"{name} 16384 1 - Live 0x0000000000000000\n" for name in _modules(hardware)),
        "proc/meminfo": text + "Hugepagesize:       2048 kB\n",
        "proc/cmdline": f"{cmdline}\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }


def _modules(hardware: Hardware) -> list[str]:
    """Return the modules that are loaded from the start, for /sys/module: not every kernel has a table of modules."""
    modules = ["ena"] if hardware.type else []
    if hardware.efa:
        modules += ["efa", "ib_uverbs", "ib_core"]
    if hardware.gpus:
        modules += ["nvidia", "nvidia_modeset"]
    return modules + (["habanalabs", "habanalabs_en"] if hardware.gaudis else [])


def _identity(hardware: Hardware) -> dict[str, str]:
    if not hardware.type:
        return {
            "sys/devices/virtual/dmi/id/sys_vendor": "QEMU\n",
            "sys/devices/virtual/dmi/id/product_name": "Standard PC\n",
        }
    return {
        "sys/devices/virtual/dmi/id/sys_vendor": "Amazon EC2\n",
        "sys/devices/virtual/dmi/id/bios_vendor": "Amazon EC2\n",
        "sys/devices/virtual/dmi/id/board_vendor": "Amazon EC2\n",
        "sys/devices/virtual/dmi/id/product_name": f"{hardware.type}\n",
        "sys/devices/virtual/dmi/id/board_asset_tag": "i-0123456789abcdef0\n",
        "sys/hypervisor/uuid": "ec2e1916-9099-7caf-fd21-012345abcdef\n",
    }


def _devices(hardware: Hardware) -> dict[str, str]:
    files: dict[str, str] = {}
    for number in range(hardware.gpus):
        files |= _pci(0x50 + number, 0, 0x10DE, 0x2330, 0x03, 0x02)
        files[f"dev/nvidia{number}"] = ""
    for number in range(hardware.gaudis):
        files |= _pci(0x90 + number, 0, 0x1DA3, 0x1000, 0x12, 0x00)
        files[f"sys/class/accel/accel{number}/device/device_type"] = "GAUDI\n"
        files[f"dev/accel{number}"] = ""
    for number in range(hardware.efa):
        name = f"rdmap{79 + number}s0"
        files |= _pci(0x10 + number, 0, 0x1D0F, 0xEFA1, 0x02, 0x00)
        port = f"sys/class/infiniband/{name}/ports/1"
        files[f"{port}/state"] = "4: ACTIVE\n"
        files[f"{port}/link_layer"] = "Unspecified\n"
        files[f"sys/class/infiniband/{name}/node_type"] = "7: <unknown>\n"
        files[f"sys/class/infiniband/{name}/device/vendor"] = "0x1d0f\n"
        files[f"sys/class/infiniband/{name}/device/uevent"] = "DRIVER=efa\n"
        for counter in (
            "tx_bytes",
            "rx_bytes",
            "rx_drops",
            "rdma_read_wr_err",
            "rdma_write_wr_err",
            "retrans_timeout_events",
        ):
            files[f"{port}/hw_counters/{counter}"] = "0\n"
    versions = {"nvidia": DRIVER, "efa": "2.17.1g", "habanalabs": "1.22.0"}
    for module in _modules(hardware):
        files[f"sys/module/{module}/initstate"] = "live\n"
        if module in versions:
            files[f"sys/module/{module}/version"] = f"{versions[module]}\n"
    if hardware.efa:
        files["disk/opt/amazon/efa_installed_packages"] = _EFA_PACKAGES
    if hardware.efa and hardware.gpus:
        files["disk/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"] = "not a library: stands for AWS's plugin of NCCL\n"
    return files


def _disks(hardware: Hardware) -> dict[str, str]:
    if not hardware.type:
        return {}
    root = _disk("nvme0n1", "Amazon Elastic Block Store", 500 * _GIB)
    root |= {
        "sys/block/nvme0n1/nvme0n1p1/partition": "1\n",
        "sys/block/nvme0n1/nvme0n1p1/size": f"{499 * _GIB // 512}\n",
    }
    for number in range(1, hardware.disks + 1):
        root |= _disk(f"nvme{number}n1", "Amazon EC2 NVMe Instance Storage", hardware.disk_bytes)
        root[f"dev/nvme{number}n1"] = ""
    return root


def _disk(name: str, model: str, size: int) -> dict[str, str]:
    return {
        f"sys/block/{name}/size": f"{size // 512}\n",
        f"sys/block/{name}/removable": "0\n",
        f"sys/block/{name}/ro": "0\n",
        f"sys/block/{name}/device/model": f"{model:<40}\n",
        f"sys/block/{name}/queue/rotational": "0\n",
        # Some images' kernels give NVMe a scheduler, and the disks of one of these do have one.
        f"sys/block/{name}/queue/scheduler": "none [mq-deadline] kyber bfq\n",
        f"sys/block/{name}/queue/nr_requests": "63\n",
    }


def _pci(bus: int, slot: int, vendor: int, device: int, kind: int, sub: int) -> dict[str, str]:
    place = f"sys/bus/pci/devices/0000:{bus:02x}:{slot:02x}.0"
    alias = f"pci:v{vendor:08X}d{device:08X}sv{vendor:08X}sd{device:08X}bc{kind:02X}sc{sub:02X}i00"
    return {
        f"{place}/modalias": f"{alias}\n",
        f"{place}/vendor": f"0x{vendor:04x}\n",
        f"{place}/device": f"0x{device:04x}\n",
        f"{place}/class": f"0x{kind:02x}{sub:02x}00\n",
    }


def stand_ins(hardware: Hardware) -> list[str]:
    """Return the paths below / where a program stands in for one of hardware or of systemd."""
    names = list(_EVERYWHERE)
    if hardware.lustre:
        names += ["lctl", "lfs", "lnetctl"]
    if hardware.gpus:
        names += ["nvidia-smi", "nv-fabricmanager"]
    if hardware.gaudis:
        names += ["hl-smi"]
    if hardware.disks:
        names += ["mdadm", "mkfs.xfs"]
    efa = ["opt/amazon/efa/bin/fi_info"] if hardware.efa else []
    return [*(f"usr/local/bin/{name}" for name in names), *_BY_PATH, "usr/sbin/mount.lustre", *efa]


def _links(hardware: Hardware) -> dict[str, str]:
    """Return the symbolic links of the node's disk: its programs, its services' processes, and what is enabled."""
    links = dict.fromkeys(stand_ins(hardware), _STAND_IN)
    # The kernel names a process after the path that it was started by, so a link to `sleep` runs under any name.
    for name, unit in _daemons(hardware).items():
        links[f"usr/libexec/simulated/{name}"] = "/usr/bin/sleep"
        links[f"etc/systemd/system/multi-user.target.wants/{unit}"] = f"/usr/lib/systemd/system/{unit}"
    return links


def _packages(hardware: Hardware) -> str:
    """Return entries of dpkg's table for packages that the image would have; nothing of them is installed."""
    names = ["linux-aws", "needrestart"] if hardware.type else []
    names += ["lustre-client-modules-aws"] if hardware.lustre else []
    names += ["nvidia-driver-570-server-open"] if hardware.gpus else []
    entry = (
        "Package: {}\nStatus: install ok installed\nPriority: optional\nSection: kernel\nInstalled-Size: 1\n"
        "Maintainer: nobody <nobody@example.com>\nArchitecture: all\nVersion: 1.0\nDescription: only an entry in this table\n\n"
    )
    return "".join(entry.format(name) for name in names)


def _daemons(hardware: Hardware) -> dict[str, str]:
    """Return the unit of each process by its name; all of them sleep."""
    daemons = {"chronyd": "chrony.service"}
    if hardware.slurm:
        daemons["slurmd"] = "slurmd.service"
    if hardware.gpus:
        daemons |= {
            "nvidia-persistenced": "nvidia-persistenced.service",
            "nv-fabricmanager": "nvidia-fabricmanager.service",
        }
    return daemons


def _units(hardware: Hardware) -> dict[str, str]:
    return {
        unit: f"[Unit]\nDescription={name}, which only sleeps\n[Service]\nType=exec\n"
        f"ExecStart=/usr/libexec/simulated/{name} infinity\n[Install]\nWantedBy=multi-user.target\n"
        for name, unit in _daemons(hardware).items()
    }
