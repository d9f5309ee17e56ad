"""Options of kernel modules: they count when a module is loaded, so a module loaded without them waits for a reboot."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.compare import satisfies
from node_setup.agent.kinds.files.owned_lines import OwnedLines
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import Facts, Remark, Request, Setting, Step

AWS_SCRIPT = (
    "AWS's configure-efa-fsx-lustre-client wrote the Lustre modules' options itself, chosen for this instance type"
)


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    modules = facts.get("modules")
    settings = [setting for setting in chosen if setting.id in selected]
    if modules is None or modules.get("supported") is None:
        return [Remark(setting.id, Status.UNKNOWN, "the kernel's modules could not be read") for setting in settings]
    off = {setting.id: _not_here(setting, facts) for setting in chosen}
    planned: list[Step | Remark] = [
        Remark(setting.id, Status.SKIPPED, off[setting.id]) for setting in settings if off[setting.id]
    ]
    ours = [setting for setting in chosen if not off[setting.id]]
    waiting = {setting.id: "reboot" for setting in ours if _loaded_otherwise(setting, facts)}
    file = OwnedLines(owned.MODPROBE, needs=waiting)
    planned += file.plan({setting.id: _line(setting) for setting in ours}, selected, facts, request)
    stepped = {line.setting for line in planned}
    planned += [
        _waits(setting, facts, request)
        for setting in ours
        if setting.id in selected and setting.id in waiting and setting.id not in stepped
    ]
    planned += [remark for setting in ours if setting.id in selected for remark in _conflict(setting, facts)]
    return with_ok(planned, ours, selected, {setting.id: modules["parameters"].get(setting.key) for setting in ours})


def _not_here(setting: Setting, facts: Facts) -> str:
    if not facts["modules"].get("supported"):
        return "this kernel takes no modules"
    return AWS_SCRIPT if facts["modules"].get("aws_lustre_block") else ""


def _line(setting: Setting) -> str:
    module, _, option = setting.key.partition(".")
    return f"options {module} {option}={setting.value}"


def _loaded_otherwise(setting: Setting, facts: Facts) -> bool:
    running = facts["modules"]["parameters"].get(setting.key)
    return running is not None and not satisfies(running, setting.value, setting.compare)


def _waits(setting: Setting, facts: Facts, request: Request) -> Remark:
    running, module = facts["modules"]["parameters"][setting.key], setting.key.partition(".")[0]
    why = f"{module} was loaded with {running}; its options count from the next boot on"
    if str(request.document.get("backend", "")).startswith("hyperpod"):
        why += "; HyperPod loads it before anything of ours runs, so each node that it brings needs a reboot once"
    return Remark(setting.id, Status.REBOOT, why, running, setting.value)


def _conflict(setting: Setting, facts: Facts) -> list[Remark]:
    """Return a conflict where another file wins: modprobe joins the options of all files in their order, and the kernel takes
    the last of an option given twice."""
    module, _, option = setting.key.partition(".")
    for file in reversed(facts["modules"].get("files") or ()):
        if file["path"] == owned.MODPROBE:
            return []
        value = file["options"].get(module, {}).get(option)
        if value is not None and _wins(file["path"]) and not satisfies(value, setting.value, setting.compare):
            why = (
                f"{file['path']} comes after {owned.MODPROBE} and sets {option}={value}; fix: take the option out of it"
            )
            return [Remark(setting.id, Status.CONFLICT, why, value, setting.value)]
    return []


def _wins(path: str) -> bool:
    return path.rpartition("/")[2] > owned.MODPROBE.rpartition("/")[2]
