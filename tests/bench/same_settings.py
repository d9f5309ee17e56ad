"""Which settings are compared: those of ours that other tools have words for, as values, files and units.

What is wanted is not written down here but read from what our own tune did to a node (`derived`): its rows name the targets,
the node has the files. Anybody's work is then judged by one and the same look at the node (`Wanted.missing`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from posixpath import basename, dirname
from typing import Any, Protocol

SETTINGS = (
    "sysctl.*",
    "observe.*",
    "limit.*",
    "slurmd-limit.*",
    "file.*",
    "clock.*",
    "unit.*",
    "agent.*",
)
"""Globs of our settings that sysctl, file and service modules can bring about; `observe` only looks."""
SWITCHED_ON = (
    "sysctl.vm.dirty_ratio",
    "sysctl.vm.dirty_background_ratio",
    "sysctl.vm.dirty_expire_centisecs",
    "sysctl.net.core.somaxconn",
    "sysctl.net.ipv4.tcp_max_syn_backlog",
)
"""Settings that are not tuned unless asked for, and that are asked for here."""

_LIMITS = {"memlock": "Max locked memory", "nofile": "Max open files", "stack": "Max stack size"}


class Place(Protocol):
    """A node as far as it is looked into."""

    def read(self, path: str) -> str: ...

    def exec(self, *command: str, stdin: str = "") -> Any: ...


@dataclass(frozen=True)
class File:
    """A whole file, its mode in octal digits, whether its folder has to be made, and the service that has to restart by it."""

    path: str
    content: str
    mode: str
    own_folder: bool = False
    restarts: str = ""


@dataclass(frozen=True)
class Unit:
    """A unit that is enabled, and that runs if `running`."""

    name: str
    running: bool


@dataclass(frozen=True)
class Wanted:
    """What every tool is to bring about: kernel values (now and at boot), whole files, units, and limits of a service's
    process as /proc names them."""

    sysctls: tuple[tuple[str, str], ...]
    files: tuple[File, ...]
    units: tuple[Unit, ...]
    limits: tuple[tuple[str, str, str], ...] = ()

    @property
    def tasks(self) -> int:
        """How many things a tool that names each once has to be told."""
        return len(self.sysctls) + len(self.files) + len(self.units)

    @property
    def states(self) -> int:
        """How many values, files, switches and limits there are to look at; of a kernel value the running and the kept one."""
        return 2 * len(self.sysctls) + len(self.files) + len(self.units) + len(self.limits)

    def missing(self, node: Place) -> list[str]:
        """What is not so on the node, a line each."""
        done = node.exec("python3", "-I", "-c", LOOK, stdin=json.dumps(asdict(self)))
        return list(json.loads(done.stdout))


def derived(rows: Iterable[Mapping[str, Any]], node: Place, had_folder: Callable[[str], bool]) -> Wanted:
    """What our tune brought about on a node that had been as its image is, by the rows of its answer.

    `had_folder`: whether a folder was there before. ValueError for a change that fits none of the forms.
    """
    changed = [row for row in rows if row["status"] == "changed"]
    sysctls: dict[str, str] = {}
    units = {name: Unit(name, True) for name in _units(rows)}
    limits: list[tuple[str, str, str]] = []
    paths: dict[str, str] = {}
    for row in changed:
        target, name = str(row["target"]), str(row["setting"])
        if name.startswith("sysctl."):
            if row["part"] == "runtime":
                sysctls[name.removeprefix("sysctl.")] = str(row["wanted"])
        elif target.endswith(".service") and row["part"] == "runtime":
            value = "unlimited" if row["wanted"] == "infinity" else str(row["wanted"])
            limits.append((target, _LIMITS[name.rpartition(".")[2]], value))
        elif target.startswith("/etc/") and row["part"] == "persisted":
            paths[target] = ""
            if target.endswith(".service"):
                units[basename(target)] = Unit(basename(target), False)
        else:
            raise ValueError(f"{name}: nothing that other tools are told in these words: {target}")
    for service in {limit[0] for limit in limits}:
        paths |= {path: service for path in paths if dirname(path).endswith(f"/{service}.d")}
    files = (
        File(path, node.read(path), _mode(node, path), not had_folder(dirname(path)), by) for path, by in paths.items()
    )
    return Wanted(tuple(sysctls.items()), tuple(files), tuple(units.values()), tuple(limits))


def _units(rows: Iterable[Mapping[str, Any]]) -> Sequence[str]:
    """Services that are to run and did so before, which other tools look at as well."""
    return [f"{row['setting'].removeprefix('unit.')}.service" for row in rows if _is_running_unit(row)]


def _is_running_unit(row: Mapping[str, Any]) -> bool:
    return str(row["setting"]).startswith("unit.") and row["status"] == "ok"


def _mode(node: Place, path: str) -> str:
    return f"{int(node.exec('stat', '-c', '%a', path).stdout, 8):04o}"


LOOK = r"""
import glob, json, os, subprocess, sys

wanted, wrong, kept = json.load(sys.stdin), [], {}
for path in sorted(glob.glob("/etc/sysctl.d/*.conf"), key=os.path.basename):
    for line in open(path):
        key, equals, value = line.partition("=")
        if equals:
            kept[key.strip()] = value.split()
for key, value in wanted["sysctls"]:
    now = open("/proc/sys/" + key.replace(".", "/")).read().split()
    for when, found in (("now", now), ("at boot", kept.get(key))):
        if found != value.split():
            wrong.append(f"{key} {when}: {found}, wanted {value}")
for file in wanted["files"]:
    if not os.path.exists(file["path"]):
        wrong.append(file["path"] + ": missing")
        continue
    if open(file["path"]).read() != file["content"]:
        wrong.append(file["path"] + ": another content")
    if os.stat(file["path"]).st_mode & 0o7777 != int(file["mode"], 8):
        wrong.append(file["path"] + ": another mode")
def ask(*words):
    return subprocess.run(["systemctl", *words], capture_output=True, text=True).stdout.strip()
for unit in wanted["units"]:
    if ask("is-enabled", unit["name"]) != "enabled":
        wrong.append(unit["name"] + ": not enabled")
    if unit["running"] and ask("is-active", unit["name"]) != "active":
        wrong.append(unit["name"] + ": not active")
for service, limit, value in wanted["limits"]:
    process = ask("show", "--property=MainPID", "--value", service)
    lines = open(f"/proc/{process}/limits").read().splitlines()
    found = [line[len(limit):].split()[0] for line in lines if line.startswith(limit)]
    if found != [value]:
        wrong.append(f"{service}: {limit} is {found}, wanted {value}")
print(json.dumps(wrong))
"""
