"""Kernel modules that nothing else loads at boot: loaded now, and listed in a file for the next boot."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.files.owned_lines import OwnedLines
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import RUNTIME, Facts, Remark, Request, Run, Setting, Step

FILE = OwnedLines(owned.MODULES_LOAD)


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    modules = facts.get("modules")
    settings = [setting for setting in chosen if setting.id in selected]
    if modules is None or modules.get("supported") is None:
        return [Remark(setting.id, Status.UNKNOWN, "the kernel's modules could not be read") for setting in settings]
    if not modules.get("supported"):
        return [Remark(setting.id, Status.SKIPPED, "this kernel takes no modules") for setting in settings]
    loaded = {_name(module) for module in modules.get("loaded") or ()}
    planned: list[Step | Remark] = [_load(setting) for setting in settings if _name(setting.key) not in loaded]
    planned += FILE.plan({setting.id: setting.key for setting in chosen}, selected, facts, request)
    return with_ok(planned, chosen, selected, dict.fromkeys((setting.id for setting in settings), "loaded"))


def _load(setting: Setting) -> Step:
    return Step(setting.id, RUNTIME, setting.key, "not loaded", "loaded", (Run(("modprobe", setting.key)),))


def _name(module: str) -> str:
    """Return a module's name with `_`: the kernel takes - and _ in it for the same."""
    return module.replace("-", "_")
