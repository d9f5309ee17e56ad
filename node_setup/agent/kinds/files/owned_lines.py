"""Files of ours that hold the lines of many settings: each line stands under its setting's id, so that one setting can be
changed, or taken away, without a look at the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lustrain.status import Status
from node_setup.agent.model import PERSISTED, Action, Facts, Remark, Remove, Request, Step, Write
from node_setup.agent.owned import HEADER

MODE = 0o644
_ID = re.compile(r"# ([\w.*+-]+)\Z")


@dataclass(frozen=True)
class OwnedLines:
    """This is one file of settings: `preamble` are its fixed first lines; `before` is what has to work before it is written,
    `after` what makes the system take notice; `needs` is by setting what a change waits for."""

    path: str
    preamble: str = ""
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)

    def content(self, lines: Mapping[str, str]) -> str:
        """Return the whole file, settings in the order of their ids."""
        return HEADER + self.preamble + "".join(f"# {name}\n{lines[name]}\n" for name in sorted(lines))

    def lines(self, facts: Facts) -> dict[str, str]:
        """Return what the file holds now, by setting; empty where the file is missing or unknown."""
        file = (facts.get("files") or {}).get(self.path)
        return parse(file["content"]) if file else {}

    def target(
        self, wanted: Mapping[str, str], selected: frozenset[str], facts: Facts, request: Request
    ) -> dict[str, str]:
        """Return what the file is to hold, by setting."""
        return _merge(self.lines(facts), wanted, selected, everything=not request.only)

    def plan(
        self, wanted: Mapping[str, str], selected: frozenset[str], facts: Facts, request: Request
    ) -> list[Step | Remark]:
        """Plan the steps that make the file hold `wanted`: of settings that are not selected the lines stay, and the lines of
        selected settings that are not wanted go."""
        if self.path not in (facts.get("files") or {}):
            return [
                Remark(name, Status.UNKNOWN, f"{self.path} could not be read") for name in wanted if name in selected
            ]
        now, target = self.lines(facts), self.target(wanted, selected, facts, request)
        changed = _changed(now, target) or self._tidied(target, facts, request)
        refused = unwritable(facts, self.path)
        if refused:
            return [
                Remark(name, Status.FAILED, refused, now.get(name), _shown(target.get(name, ""))) for name in changed
            ]
        write: Action = Write(self.path, self.content(target), MODE) if target else Remove(self.path)
        actions = (*self.before, write, *self.after)
        return [self._step(name, now.get(name), target.get(name, ""), actions) for name in changed]

    def _step(self, setting: str, current: str | None, wanted: str, actions: tuple[Action, ...]) -> Step:
        before = None if current is None else _shown(current)
        return Step(setting, PERSISTED, self.path, before, _shown(wanted), actions, self.needs.get(setting, ""))

    def _tidied(self, target: Mapping[str, str], facts: Facts, request: Request) -> list[str]:
        """Return the settings to name where only the rest of the file is not as it should be: other lines, order, mode."""
        file = facts["files"][self.path]
        if file is None or request.only:
            return []
        if target and file["content"] == self.content(target) and int(file["mode"], 8) == MODE:
            return []
        return sorted(target)[:1] or [self.path]


def parse(content: str) -> dict[str, str]:
    """Return the lines under each id; lines under no id have no owner."""
    blocks: dict[str, list[str]] = {}
    name = None
    for line in content.splitlines():
        header = _ID.match(line)
        if header:
            name = header.group(1)
            blocks.setdefault(name, [])
        elif name is not None:
            blocks[name].append(line)
    return {setting: "\n".join(lines) for setting, lines in blocks.items()}


def _merge(
    now: Mapping[str, str], wanted: Mapping[str, str], selected: frozenset[str], everything: bool
) -> dict[str, str]:
    stays = {name: text for name, text in now.items() if name not in selected and (not everything or name in wanted)}
    return {**stays, **{name: text for name, text in wanted.items() if name in selected}}


def _changed(now: Mapping[str, str], target: Mapping[str, str]) -> list[str]:
    return [name for name in sorted({*now, *target}) if now.get(name) != target.get(name)]


def _shown(lines: str) -> str:
    return lines.replace("\n", "; ") or "no line"


def unwritable(facts: Facts, path: str) -> str:
    """Return why nothing can be written there; empty where nothing is known against it."""
    disks: Mapping[str, Any] = facts.get("disk") or {}
    above = [point for point in disks if path == point or path.startswith(point.rstrip("/") + "/")]
    disk = disks[max(above, key=len)] if above else None
    if not disk:
        return ""
    return f"{path} cannot be written: its file system is read-only" if disk.get("read_only") else ""
