"""Facts of a node with nothing done to it, and what the kinds' actions do to facts.

The simulator knows files, /proc/sys, modprobe, systemctl and apt-mark. It leaves out that programs fail, that a kernel refuses
a value, and everything that only a reboot or a restart brings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from posixpath import basename
from typing import Any

from node_setup.agent import owned
from node_setup.agent.facts.kernel import parse_limit_file, parse_modprobe_file, parse_sysctl_file
from node_setup.agent.model import Action, Facts, Put, Remove, Run, Step, Write

BARE: dict[str, Any] = {
    "version": 1,
    "os": {"id": "ubuntu", "version": "22.04", "family": "debian"},
    "kernel": {"release": "6.8.0-1021-aws", "arch": "x86_64", "cmdline": {"root": "LABEL=x"}, "thp": "madvise"},
    "cpu": {"count": 192, "vendor": "GenuineIntel", "model": "Xeon", "numa_nodes": 2},
    "memory": {"gib": 2000.0, "hugepages_total": 5128, "hugepages_free": 5128, "hugepage_kib": 2048, "shm_gib": 1000.0},
    "instance": {"type": "p5en.48xlarge", "id": "i-0123456789abcdef0", "life_cycle": "spot", "source": "imds"},
    "group": "train",
    "sysctl": {
        "vm.max_map_count": "65530",
        "fs.inotify.max_user_watches": "1048576",
        "fs.inotify.max_user_instances": "128",
        "net.core.rmem_max": "212992",
        "net.core.wmem_max": "212992",
        "net.core.somaxconn": "4096",
        "net.ipv4.tcp_max_syn_backlog": "4096",
        "vm.dirty_ratio": "20",
        "vm.dirty_background_ratio": "10",
        "vm.dirty_expire_centisecs": "3000",
        "net.ipv4.neigh.default.gc_thresh2": "512",
        "net.ipv4.neigh.default.gc_thresh3": "1024",
    },
    "sysctl_files": [],
    "modules": {
        "supported": True,
        "loaded": ["nvidia", "lustre"],
        "parameters": {"ptlrpc.ptlrpcd_per_cpt_max": "8", "ksocklnd.credits": "256"},
        "files": [],
        "aws_lustre_block": False,
    },
    "limits": {
        "slurmd": {"memlock": ["65536", "65536"], "nofile": ["1024", "524288"], "stack": ["8388608", "unlimited"]}
    },
    "lustre": {"client": "2.15", "loaded": True, "lctl": True, "lfs": True, "mounts": []},
    "efa": {"devices": [{"name": "rdmap79s0", "driver": "efa", "state": "ACTIVE"}]},
    "gpu": {"present": True, "driver": "550.90.07", "devices": []},
    "hpu": {"present": False, "devices": []},
    "init": "systemd",
    "services": {
        "slurmd.service": {"load": "loaded", "active": "active", "enabled": "enabled", "result": "success"},
        "chrony.service": {"load": "loaded", "active": "inactive", "enabled": "disabled", "result": "success"},
        "chronyd.service": {"load": "not-found", "active": "inactive", "enabled": "", "result": ""},
        "nvidia-fabricmanager.service": {
            "load": "loaded",
            "active": "failed",
            "enabled": "enabled",
            "result": "exit-code",
        },
        "unattended-upgrades.service": {
            "load": "loaded",
            "active": "active",
            "enabled": "enabled",
            "result": "success",
        },
    },
    "packages": {
        "manager": "apt",
        "held": [],
        "installed": {
            "linux-aws": "6.8",
            "linux-image-aws": "6.8",
            "lustre-client-modules-aws": "2.15",
            "needrestart": "3.5",
        },
    },
    "time": {
        "synchronised": True,
        "source": "185.125.190.57",
        "offset_s": 0.0002,
        "leap": "Normal",
        "folders": ["/etc/chrony/sources.d"],
    },
    "disk": {"/": {"free_bytes": 10**10, "free_inodes": 10**6, "read_only": False}},
    "files": dict.fromkeys(owned.PATHS),
}
BARE["limits"]["files"] = [{"path": "/etc/security/limits.conf", "lines": []}]


def bare(**changes: Any) -> dict[str, Any]:
    """A p5en that was never tuned; `a__b=value` puts another fact in place."""
    facts = copy.deepcopy(BARE)
    for path, value in changes.items():
        *above, last = path.split("__")
        inner = facts
        for name in above:
            inner = inner[name]
        inner[last] = value
    return facts


def after(facts: Facts, steps: Iterable[Step]) -> dict[str, Any]:
    """The facts that a node would show once the steps' actions were done."""
    new = copy.deepcopy(dict(facts))
    for step in steps:
        for action in step.actions:
            _do(new, action)
    return new


def _do(facts: dict[str, Any], action: Action) -> None:
    if isinstance(action, Put):
        facts["sysctl"][action.path.removeprefix("/proc/sys/").replace("/", ".")] = action.value
    elif isinstance(action, Write):
        facts["files"][action.path] = {"content": action.content, "mode": f"{action.mode:04o}"}
        _reread(facts, action.path, action.content)
    elif isinstance(action, Remove):
        facts["files"][action.path] = None
        _reread(facts, action.path, "")
    elif isinstance(action, Run):
        _run(facts, action.command)


def _reread(facts: dict[str, Any], path: str, content: str) -> None:
    if path == owned.SYSCTL:
        _put_in_order(facts["sysctl_files"], {"path": path, "values": parse_sysctl_file(content)})
    elif path == owned.MODPROBE:
        _put_in_order(facts["modules"]["files"], {"path": path, "options": parse_modprobe_file(content)})
    elif path == owned.LIMITS:
        _put_in_order(facts["limits"]["files"], {"path": path, "lines": parse_limit_file(content)})


def _put_in_order(files: list[dict[str, Any]], file: dict[str, Any]) -> None:
    files[:] = [one for one in files if one["path"] != file["path"]] + [file]
    files.sort(key=lambda one: basename(one["path"]))


def _run(facts: dict[str, Any], command: Sequence[str]) -> None:
    if command[0] == "modprobe":
        facts["modules"]["loaded"].append(command[1].replace("-", "_"))
    elif command[:2] == ("apt-mark", "hold"):
        facts["packages"]["held"] += command[2:]
    elif command[:2] == ("systemctl", "enable"):
        facts["services"][command[2]]["enabled"] = "enabled"
    elif command[:2] == ("systemctl", "start"):
        facts["services"][command[2]]["active"] = "active"
    elif tuple(command) not in NO_FACT:
        assert command[0] == "grubby", f"the simulator does not know {command}"


NO_FACT = (("systemctl", "daemon-reload"), ("chronyc", "reload", "sources"), ("update-grub",))
"""What changes nothing that facts show before a reboot, or within seconds."""
