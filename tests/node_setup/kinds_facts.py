"""Facts of made-up nodes for the tests of kinds, and what a node would make of a plan's actions.

The simulator knows files, /proc/sys, /sys/block, and of programs only what these kinds make them do. It refuses nothing, takes
no time, and leaves out what only a reboot or a restart brings. That real programs take the commands is tested elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from posixpath import basename
from typing import Any

from node_setup.agent import owned
from node_setup.agent.facts.kernel import parse_limit_file, parse_modprobe_file, parse_sysctl_file
from node_setup.agent.kinds import planner
from node_setup.agent.kinds.lustre.stripe import layout_of
from node_setup.agent.model import Facts, Put, Remark, Remove, Request, Run, Setting, Step, Write
from node_setup.agent.settings.catalog import load
from tests.node_setup.machines import KERNEL_DEFAULTS

SETTINGS = {setting.id: setting for setting in load()}
Program = Callable[[dict[str, Any], Sequence[str]], None]
Said = Sequence[Step | Remark]


def machine(**sections: Any) -> dict[str, Any]:
    """A node with systemd and nothing of ours on it; `sections` replace whole sections."""
    return {
        "init": "systemd",
        "cpu": {"count": 192},
        "memory": {"gib": 2000.0},
        "files": {**dict.fromkeys(owned.PATHS), "/etc/fstab": {"content": "", "mode": "0644"}},
        "services": {},
        "blocks": [],
        "arrays": [],
        "mounts": [],
        "lustre": {"parameters": {}, "stripes": {}, "lfs": True, "lctl": True},
        "gpu": {"present": False, "devices": None},
        **sections,
    }


def service(load: str, active: str, enabled: str, result: str) -> dict[str, str]:
    return {"load": load, "active": active, "enabled": enabled, "result": result}


BARE: dict[str, Any] = {
    "version": 1,
    "os": {"id": "ubuntu", "version": "22.04", "family": "debian"},
    "kernel": {"release": "6.8.0-1021-aws", "arch": "x86_64", "cmdline": {"root": "LABEL=x"}, "thp": "madvise"},
    "cpu": {"count": 192, "vendor": "GenuineIntel", "model": "Xeon"},
    "memory": {"gib": 2000.0, "hugepages_total": 5128, "hugepages_free": 5128, "hugepage_kib": 2048, "shm_gib": 1000.0},
    "instance": {"type": "p5en.48xlarge", "id": "i-0123456789abcdef0", "life_cycle": "spot", "source": "imds"},
    "group": "train",
    "sysctl": {**KERNEL_DEFAULTS, "fs.inotify.max_user_watches": "1048576"},
    "sysctl_files": [],
    "modules": {
        "supported": True,
        "loaded": ["nvidia", "lustre"],
        "parameters": {"ptlrpc.ptlrpcd_per_cpt_max": "8", "ksocklnd.credits": "256"},
        "files": [],
        "aws_lustre_block": False,
    },
    "limits": {
        "files": [{"path": "/etc/security/limits.conf", "lines": []}],
        "slurmd": {"memlock": ["65536", "65536"], "nofile": ["1024", "524288"], "stack": ["8388608", "unlimited"]},
    },
    "lustre": {"client": "2.15", "loaded": True, "lctl": True, "lfs": True, "mounts": []},
    "efa": {"devices": [{"name": "rdmap79s0", "driver": "efa", "state": "ACTIVE"}]},
    "gpu": {"present": True, "driver": "550.90.07", "devices": []},
    "hpu": {"present": False, "devices": []},
    "init": "systemd",
    "services": {
        "slurmd.service": service("loaded", "active", "enabled", "success"),
        "chrony.service": service("loaded", "inactive", "disabled", "success"),
        "chronyd.service": service("not-found", "inactive", "", ""),
        "nvidia-fabricmanager.service": service("loaded", "failed", "enabled", "exit-code"),
        "unattended-upgrades.service": service("loaded", "active", "enabled", "success"),
    },
    "packages": {
        "manager": "apt",
        "held": [],
        "installed": dict.fromkeys(("linux-aws", "linux-image-aws", "lustre-client-modules-aws", "needrestart"), "1.0"),
    },
    "time": {"synchronised": True, "source": "185.125.190.57", "folders": ["/etc/chrony/sources.d"]},
    "disk": {"/": {"free_bytes": 10**10, "free_inodes": 10**6, "read_only": False}},
    "files": dict.fromkeys(owned.PATHS),
}


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


def plan(
    name: str, facts: dict[str, Any], document: dict[str, Any] | None = None, **changed: Any
) -> list[Step | Remark]:
    """What the kind of a setting of the catalogue says of it alone."""
    setting: Setting = replace(SETTINGS[name], **changed)
    return planner(setting.kind)([setting], frozenset([name]), facts, Request(document or {}))


def steps(said: Said) -> list[Step]:
    return [one for one in said if isinstance(one, Step)]


def remark(said: Said) -> Remark:
    """The only thing that was said, which changes nothing."""
    [only] = said
    assert isinstance(only, Remark), only
    return only


def commands(said: Said) -> list[str]:
    return [" ".join(action.command) for step in steps(said) for action in step.actions if isinstance(action, Run)]


def applied(facts: Facts, said: Iterable[Step | Remark], stop_after: int | None = None) -> dict[str, Any]:
    """The node after the actions of a plan, or after the first `stop_after` of them: killed there."""
    after = copy.deepcopy(dict(facts))
    actions = [action for step in steps(list(said)) for action in step.actions]
    for action in actions[:stop_after]:
        if isinstance(action, Write):
            after["files"][action.path] = {"content": action.content, "mode": f"{action.mode:04o}"}
            _reread(after, action.path, action.content)
        elif isinstance(action, Remove):
            after["files"][action.path] = None
            _reread(after, action.path, "")
        elif isinstance(action, Put) and action.path.startswith("/proc/sys/"):
            after["sysctl"][action.path.removeprefix("/proc/sys/").replace("/", ".")] = action.value
        elif isinstance(action, Put):
            next(one for one in after["blocks"] if one["name"] == action.path.split("/")[3])["scheduler"] = action.value
        elif isinstance(action, Run):
            PROGRAMS[action.command[0]](after, action.command[1:])
    return after


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


def _systemctl(facts: dict[str, Any], words: Sequence[str]) -> None:
    if words[0] == "daemon-reload":
        return
    verb, unit = words
    state = facts["services"].setdefault(unit, {"load": "loaded", "active": "inactive", "enabled": "disabled"})
    if verb == "enable":
        state["enabled"] = "enabled"
    elif unit.endswith(".mount"):
        _mount(facts, facts["files"][f"/etc/systemd/system/{unit}"]["content"])
    else:
        state["active"] = "active"
        drop_in = facts["files"].get(owned.PERSISTENCED)
        if unit == "nvidia-persistenced.service" and (drop_in or not facts.get("packaged_by_ubuntu")):
            for device in facts["gpu"]["devices"]:
                device["persistence"] = True


def _mount(facts: dict[str, Any], unit: str) -> None:
    said = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    source, options = said["What"], [one for one in said["Options"].split(",") if one not in ("_netdev", "nofail")]
    if source.startswith("/dev/disk/by-label/"):
        [on] = [one for one in (*facts["blocks"], *facts["arrays"]) if one.get("label") == basename(source)]
        on["mountpoints"] = [said["Where"]]
        source = on["path"]
    mount = {"source": source, "target": said["Where"], "fstype": said["Type"], "options": ["rw", *options]}
    facts["mounts"].append(mount)


def _lctl(facts: dict[str, Any], words: Sequence[str]) -> None:
    pattern, value = words[1].split("=")
    facts["lustre"]["parameters"][pattern] = dict.fromkeys(facts["lustre"]["parameters"][pattern], value)


def _lfs(facts: dict[str, Any], words: Sequence[str]) -> None:
    facts["lustre"]["stripes"][words[-1]]["layout"] = as_fact(layout_of(words[1:-1])["components"])


def _mkdir(facts: dict[str, Any], words: Sequence[str]) -> None:
    there = facts["lustre"]["stripes"].get(words[-1])
    if not there or not there["exists"]:
        default = as_fact([{"end": -1, "count": 1, "size": None}])
        facts["lustre"]["stripes"][words[-1]] = {"exists": True, "empty": True, "layout": default, "error": None}


def _mdadm(facts: dict[str, Any], words: Sequence[str]) -> None:
    members = [basename(word) for word in words if word.startswith("/dev/nvme")]
    for block in facts["blocks"]:
        if block["name"] in members:
            block.update(holders=["md127"], blank=False, fstype=None)
    kept = facts.pop("array_on_disk", None) if words[0] == "--assemble" else None
    facts["arrays"] = [kept or array("md127", members)]


def _mkfs(facts: dict[str, Any], words: Sequence[str]) -> None:
    name = {"/dev/md/lustrain": "md127"}.get(words[-1], basename(words[-1]))
    target = next(one for one in (*facts["blocks"], *facts["arrays"]) if one["name"] == name)
    target.update(fstype="xfs", blank=False, label="lustrain")


def _nvidia_smi(facts: dict[str, Any], words: Sequence[str]) -> None:
    memory, graphics = (int(one) for one in words[3].split(","))
    facts["gpu"]["devices"][int(words[1])]["applications"] = {"memory": memory, "graphics": graphics}


PROGRAMS: dict[str, Program] = {
    "systemctl": _systemctl,
    "lctl": _lctl,
    "lfs": _lfs,
    "mkdir": _mkdir,
    "mdadm": _mdadm,
    "mkfs.xfs": _mkfs,
    "nvidia-smi": _nvidia_smi,
    "modprobe": lambda facts, words: facts["modules"]["loaded"].append(words[0].replace("-", "_")),
    "apt-mark": lambda facts, words: facts["packages"]["held"].extend(words[1:]),
    **dict.fromkeys(("udevadm", "chronyc", "update-grub", "grubby"), lambda facts, words: None),
}


def as_fact(components: list[dict[str, Any]]) -> dict[str, Any]:
    """A layout as `node_setup.agent.facts.lustre.parse_layout` gives it; what was left open reads as the default."""
    ends = [None if one["end"] == -1 else one["end"] for one in components]
    parts = [
        {"end": end, "count": one["count"] or 1, "size": one["size"] or 1 << 20}
        for end, one in zip(ends, components, strict=True)
    ]
    last = {name: parts[-1][name] for name in ("count", "size")}
    return {**last, "components": parts if len(parts) > 1 or parts[0]["end"] is not None else []}


NOTHING_ON_IT: dict[str, Any] = {"fstype": None, "holders": [], "mountpoints": [], "blank": True}


def disk(name: str, **changed: Any) -> dict[str, Any]:
    """A blank instance-store disk."""
    facts = {"name": name, "path": f"/dev/{name}", "instance_store": True, "root": False, "partitions": []}
    return {**facts, **NOTHING_ON_IT, "scheduler": "none", "schedulers": ["none", "mq-deadline"], **changed}


def array(name: str, members: list[str], **changed: Any) -> dict[str, Any]:
    return {"name": name, "path": f"/dev/{name}", "level": "raid0", "members": members, **NOTHING_ON_IT, **changed}
