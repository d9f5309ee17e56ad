"""Services, from systemd, and packages, from the package manager's database."""

from __future__ import annotations

import re
from typing import Any

from node_setup.agent.facts.reading import MachineReading

EMPTY: dict[str, Any] = {"init": None, "services": None, "packages": {"manager": None, "held": None, "installed": None}}
_PROPERTIES = "Id,LoadState,ActiveState,UnitFileState,Result"
_DPKG = "/var/lib/dpkg/status"
_PACKAGE = "\nPackage: "
_LOCKS = ("/etc/dnf/plugins/versionlock.list", "/etc/yum/pluginconf.d/versionlock.list")


def collect(reading: MachineReading) -> dict[str, Any]:
    init = _init(reading)
    return {"init": init, "services": _services(reading, init), "packages": _packages(reading)}


def _init(reading: MachineReading) -> str | None:
    """Return the init system by the folder that shows whether a machine was booted with systemd (sd_booted(3)), as systemctl
    does."""
    if reading.host.exists("/run/systemd/system"):
        return "systemd"
    return "other" if reading.host.exists("/proc/1/comm") else None


def _services(reading: MachineReading, init: str | None) -> dict[str, Any] | None:
    """Read all units with one call. Without systemd there are none, which is not an error; None where it does not answer."""
    wanted = reading.wanted.services
    if not wanted or init != "systemd":
        return {}
    text = reading.output_of("services", ["systemctl", "show", f"--property={_PROPERTIES}", "--", *wanted])
    return None if text is None else parse_services(wanted, text)


def parse_services(wanted: tuple[str, ...], text: str) -> dict[str, Any]:
    """Parse blocks, which come in the order of the names, separated by an empty line; an alias's block carries another name.

    A unit that is not there has the load state `not-found`.
    """
    blocks = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in text.strip().split("\n\n")]
    if len(blocks) != len(wanted):
        blocks = [next((block for block in blocks if block.get("Id") == name), {}) for name in wanted]
    return {name: _service(block) for name, block in zip(wanted, blocks)}


def _service(block: dict[str, str]) -> dict[str, str]:
    return {
        "load": block.get("LoadState", "not-found"),
        "active": block.get("ActiveState", "inactive"),
        "enabled": block.get("UnitFileState", ""),
        "result": block.get("Result", ""),
    }


def _packages(reading: MachineReading) -> dict[str, Any]:
    """Read dpkg's own table as a file: `apt-mark` and `dpkg-query` take ten times as long."""
    status = reading.host.read(_DPKG)
    if status is not None:
        held, installed = parse_dpkg(status, reading.wanted.packages)
        return {"manager": "apt", "held": held, "installed": installed}
    if not reading.host.which("rpm"):
        return {"manager": None, "held": [], "installed": {}}
    locked = (reading.host.read(path) for path in _LOCKS)
    held = sorted({name for text in locked if text for name in parse_versionlock(text)})
    return {"manager": "dnf", "held": held, "installed": _rpm(reading)}


def parse_dpkg(text: str, patterns: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Return the names on hold, and the versions of the installed packages that match a pattern.

    It is searched by str.find: the table has some 700 kB, over which a regular expression takes some 4 ms for each pattern.
    """
    prefixes = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    held: set[str] = set()
    installed: dict[str, str] = {}
    table = f"\n{text}"
    at = table.find(_PACKAGE)
    while at >= 0:
        after = table.find(_PACKAGE, at + 1)
        name, _, rest = table[at + len(_PACKAGE) : after if after >= 0 else len(table)].partition("\n")
        status = rest.partition("\n")[0].split(" ")
        if status[:2] == ["Status:", "hold"]:
            held.add(name)
        if status[2:] == ["ok", "installed"] and (name in patterns or name.startswith(prefixes)):
            version = re.search(r"^Version: (\S+)$", rest, re.MULTILINE)
            if version:
                installed[name] = version[1]
        at = after
    return sorted(held), installed


def parse_versionlock(text: str) -> list[str]:
    """Return the names of dnf's locked packages, whose lines are `name-epoch:version-release.arch`."""
    lines = (line.strip() for line in text.splitlines())
    matches = (re.match(r"(.+?)-\d+:", line) for line in lines if line and line[0] not in "#!")
    return [match[1] for match in matches if match]


def _rpm(reading: MachineReading) -> dict[str, str] | None:
    if not reading.wanted.packages:
        return {}
    form = "%{NAME}\\t%{VERSION}-%{RELEASE}\\n"
    text = reading.output_of("packages", ["rpm", "-qa", "--queryformat", form, *reading.wanted.packages])
    return None if text is None else dict(line.partition("\t")[::2] for line in text.splitlines())
