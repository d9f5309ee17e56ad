"""A machine that is a folder of files and a table of what its programs print; the collectors are the real ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from node_setup.agent.facts import collect, metadata
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import NO_PROGRAM, Done, Host

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


@dataclass
class Machine:
    """Files by path, links by path, what programs print by their command's beginning, and what metadata would say."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    disks: dict[str, int] = field(default_factory=dict)
    programs: dict[tuple[str, ...], Done] = field(default_factory=dict)
    services: dict[str, str] = field(default_factory=dict)
    identity: dict[str, str] = field(default_factory=dict)
    shm_gib: float = 1.0


class RecordedHost(Host):
    """A folder as root, and recorded answers in place of programs; the longest command that fits answers."""

    def __init__(self, root: Path, machine: Machine) -> None:
        super().__init__(str(root))
        self.machine = machine
        self.asked: list[tuple[str, ...]] = []

    def which(self, program: str) -> str | None:
        known = {command[0] for command in self.machine.programs} | ({"systemctl"} if self.machine.services else set())
        return f"/usr/bin/{program}" if program in known else None

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        self.asked.append(tuple(command))
        if command[0] == "systemctl" and self.machine.services:
            return Done(0, self._units(command[command.index("--") + 1 :]), "")
        fitting = [one for one in self.machine.programs if tuple(command[: len(one)]) == one]
        if not fitting:
            return Done(NO_PROGRAM, "", f"{command[0]}: No such file or directory")
        return self.machine.programs[max(fitting, key=len)]

    def _units(self, names: Sequence[str]) -> str:
        blocks = []
        for name in names:
            active = self.machine.services.get(name)
            load, enabled = ("not-found", "") if active is None else ("loaded", "enabled")
            lines = (f"Id={name}", f"LoadState={load}", f"ActiveState={active or 'inactive'}")
            blocks.append("\n".join((*lines, f"UnitFileState={enabled}", "Result=success", "")))
        return "\n".join(blocks)


def build(root: Path, machine: Machine) -> RecordedHost:
    """Put a machine's files below `root`."""
    for path, content in machine.files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    for path, target_path in machine.links.items():
        link = root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target_path)
    for name, size in machine.disks.items():
        device = root / "dev" / name
        device.parent.mkdir(parents=True, exist_ok=True)
        device.touch()
        os.truncate(device, size)
    return RecordedHost(root, machine)


def facts_from(host: RecordedHost, wanted: Wanted) -> dict[str, Any]:
    """`collect` with a stand-in for the metadata service."""

    class Answers:
        def __init__(self, endpoint: str, deadline: float) -> None:
            """Nobody is asked."""

        def get(self, path: str) -> str | None:
            return host.machine.identity.get(path)

    with mock.patch.object(metadata, "Service", Answers), mock.patch.dict(os.environ):
        for name in (metadata.ENDPOINT_VARIABLE, metadata.DISABLED_VARIABLE):
            os.environ.pop(name, None)
        return collect(host, wanted)
