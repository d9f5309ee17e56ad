"""Facts of made-up machines for the tests of kinds, and what a machine would make of a plan's actions.

`run` knows only what these kinds do (files, units, lctl, lfs, mdadm, mkfs.xfs, mount): it has no kernel behind it, refuses
nothing that a real program would refuse, and takes no time. That a real program takes the commands is tested elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from node_setup.agent import owned
from node_setup.agent.kinds import planner
from node_setup.agent.kinds.lustre.stripe import layout_of
from node_setup.agent.model import Put, Remark, Request, Run, Setting, Step, Write
from node_setup.agent.settings.catalog import load

SETTINGS = {setting.id: setting for setting in load()}
Program = Callable[[dict[str, Any], Sequence[str]], None]


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


def plan(
    name: str, facts: dict[str, Any], document: dict[str, Any] | None = None, **changed: str
) -> list[Step | Remark]:
    """What the kind of a setting of the catalogue says of it alone."""
    setting = setting_of(name, **changed)
    return planner(setting.kind)([setting], frozenset([name]), facts, Request(document or {}))


def setting_of(name: str, **changed: str) -> Setting:
    from dataclasses import replace

    return replace(SETTINGS[name], **changed)  # type: ignore[arg-type]


def steps(said: Sequence[Step | Remark]) -> list[Step]:
    return [one for one in said if isinstance(one, Step)]


def remark(said: Sequence[Step | Remark]) -> Remark:
    """The only thing that was said, which changes nothing."""
    [only] = said
    assert isinstance(only, Remark), only
    return only


def commands(said: Sequence[Step | Remark]) -> list[str]:
    return [" ".join(action.command) for step in steps(said) for action in step.actions if isinstance(action, Run)]


def applied(facts: dict[str, Any], said: Sequence[Step | Remark], stop_after: int | None = None) -> dict[str, Any]:
    """The machine after the actions of a plan, or after the first `stop_after` of them: killed there."""
    after = copy.deepcopy(facts)
    actions = [action for step in steps(said) for action in step.actions]
    for action in actions[:stop_after]:
        if isinstance(action, Write):
            after["files"][action.path] = {"content": action.content, "mode": f"{action.mode:04o}"}
        elif isinstance(action, Put):
            name = action.path.split("/")[3]
            next(one for one in after["blocks"] if one["name"] == name)["scheduler"] = action.value
        elif isinstance(action, Run):
            PROGRAMS[action.command[0]](after, action.command[1:])
    return after


def _systemctl(facts: dict[str, Any], words: Sequence[str]) -> None:
    if words[0] == "daemon-reload":
        return
    verb, unit = words
    service = facts["services"].setdefault(unit, {"load": "loaded", "active": "inactive", "enabled": "disabled"})
    if verb == "enable":
        service["enabled"] = "enabled"
    elif unit.endswith(".mount"):
        _mount(facts, facts["files"][f"/etc/systemd/system/{unit}"]["content"])
    else:
        service["active"] = "active"
        drop_in = facts["files"].get(owned.PERSISTENCED)
        if unit == "nvidia-persistenced.service" and (drop_in or not facts.get("packaged_by_ubuntu")):
            for device in facts["gpu"]["devices"]:
                device["persistence"] = True


def _mount(facts: dict[str, Any], unit: str) -> None:
    said = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    source, options = said["What"], [one for one in said["Options"].split(",") if one not in ("_netdev", "nofail")]
    if source.startswith("/dev/disk/by-label/"):
        on = [one for one in (*facts["blocks"], *facts["arrays"]) if one.get("label") == source.rpartition("/")[2]]
        assert len(on) == 1, "the label that the unit mounts is not there"
        on[0]["mountpoints"] = [said["Where"]]
        source = on[0]["path"]
    mount = {"source": source, "target": said["Where"], "fstype": said["Type"], "options": ["rw", *options]}
    facts["mounts"].append(mount)


def _lctl(facts: dict[str, Any], words: Sequence[str]) -> None:
    assert words[0] == "set_param"
    pattern, value = words[1].split("=")
    for instance in facts["lustre"]["parameters"][pattern]:
        facts["lustre"]["parameters"][pattern][instance] = value


def _lfs(facts: dict[str, Any], words: Sequence[str]) -> None:
    assert words[0] == "setstripe"
    facts["lustre"]["stripes"][words[-1]]["layout"] = as_fact(layout_of(words[1:-1])["components"])


def _mkdir(facts: dict[str, Any], words: Sequence[str]) -> None:
    there = facts["lustre"]["stripes"].get(words[-1])
    if not there or not there["exists"]:
        default = as_fact([{"end": -1, "count": 1, "size": None}])
        facts["lustre"]["stripes"][words[-1]] = {"exists": True, "empty": True, "layout": default, "error": None}


def _mdadm(facts: dict[str, Any], words: Sequence[str]) -> None:
    members = [word.rpartition("/")[2] for word in words if word.startswith("/dev/nvme")]
    for block in facts["blocks"]:
        if block["name"] in members:
            block.update(holders=["md127"], blank=False, fstype=None)
    kept = facts.pop("array_on_disk", None) if words[0] == "--assemble" else None
    facts["arrays"] = [kept or array("md127", members)]


def _mkfs(facts: dict[str, Any], words: Sequence[str]) -> None:
    name = {"/dev/md/lustrain": "md127"}.get(words[-1], words[-1].rpartition("/")[2])
    target = next(one for one in (*facts["blocks"], *facts["arrays"]) if one["name"] == name)
    target.update(fstype="xfs", blank=False, label="lustrain")


def _nvidia_smi(facts: dict[str, Any], words: Sequence[str]) -> None:
    index, pair = int(words[1]), words[3]
    memory, graphics = (int(one) for one in pair.split(","))
    facts["gpu"]["devices"][index]["applications"] = {"memory": memory, "graphics": graphics}


PROGRAMS: dict[str, Program] = {
    "systemctl": _systemctl,
    "lctl": _lctl,
    "lfs": _lfs,
    "mkdir": _mkdir,
    "mdadm": _mdadm,
    "mkfs.xfs": _mkfs,
    "nvidia-smi": _nvidia_smi,
    "udevadm": lambda facts, words: None,
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


def disk(name: str, **changed: Any) -> dict[str, Any]:
    """A blank instance-store disk."""
    return {
        "name": name,
        "path": f"/dev/{name}",
        "instance_store": True,
        "scheduler": "none",
        "schedulers": ["none", "mq-deadline"],
        "fstype": None,
        "holders": [],
        "partitions": [],
        "mountpoints": [],
        "blank": True,
        "root": False,
        **changed,
    }


def array(name: str, members: list[str], **changed: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": f"/dev/{name}",
        "level": "raid0",
        "members": members,
        "fstype": None,
        "holders": [],
        "mountpoints": [],
        "blank": True,
        **changed,
    }
