"""The state of the clock, from the program that keeps it."""

from __future__ import annotations

from typing import Any

from node_setup.agent.facts.reading import MachineReading

UNKNOWN: dict[str, Any] = {"synchronised": None, "source": None, "offset_s": None, "leap": None}
EMPTY: dict[str, Any] = {"time": {**UNKNOWN, "folders": None}}
_FIELDS = 14


FILES = ("/etc/chrony/chrony.conf", "/etc/chrony.conf")
"""The first is Debian's and its kin's, the second Red Hat's."""


def collect(reading: MachineReading) -> dict[str, Any]:
    return {"time": {**_state(reading), "folders": _folders(reading)}}


def _state(reading: MachineReading) -> dict[str, Any]:
    running = {process.name for process in reading.processes}
    if "chronyd" in running and reading.host.which("chronyc"):
        text = reading.output_of("time", ["chronyc", "-c", "-n", "tracking"], 5.0)
        return UNKNOWN if text is None else parse_tracking(text)
    if any(name.startswith("systemd-timesyn") for name in running):
        known = reading.host.exists("/run/systemd/timesync/synchronized")
        return {**UNKNOWN, "synchronised": known, "source": "systemd-timesyncd"}
    return UNKNOWN


def _folders(reading: MachineReading) -> list[str] | None:
    """Return the folders whose `*.sources` chrony reads; None where no file of chrony's own can be read."""
    texts = [text for text in map(reading.host.read, FILES) if text is not None]
    for folder in [folder for text in texts for folder in parse_folders(text, "confdir")]:
        names = (name for name in reading.host.names(folder) if name.endswith(".conf"))
        texts += [reading.host.read(f"{folder}/{name}") or "" for name in names]
    return sorted({folder for text in texts for folder in parse_folders(text, "sourcedir")}) if texts else None


def parse_folders(text: str, directive: str) -> list[str]:
    """Return the folders that a directive of chrony.conf(5) names, case apart; comments begin with one of `!;#%`."""
    lines = (line.split() for line in text.splitlines())
    return [folder.rstrip("/") for words in lines if words and words[0].lower() == directive for folder in words[1:]]


def parse_tracking(text: str) -> dict[str, Any]:
    """Parse `chronyc -c tracking`: reference, its name, stratum, reference time, offset of the system clock in s, … leap
    status.

    The offset is positive where the clock is behind (chronyc's cmdparse order, client.c `process_cmd_tracking`).
    """
    fields = text.strip().split(",")
    if len(fields) != _FIELDS:
        return UNKNOWN
    try:
        offset = float(fields[4])
    except ValueError:
        return UNKNOWN
    leap = fields[13]  # else Normal, or a leap second to come
    return {
        "synchronised": leap != "Not synchronised",
        "source": fields[1] or fields[0],
        "offset_s": offset,
        "leap": leap,
    }
