"""Not chrony: names the best of the configured sources, and says that the clock follows it to some microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .state import change, peek, refuse

_FALLBACK = "198.51.100.7"


def main(arguments: Sequence[str]) -> int:
    if peek("systemd").get("units", {}).get("chrony.service", {}).get("active") != "active":
        refuse("506 Cannot talk to daemon")
    words = [argument for argument in arguments if not argument.startswith("-")]
    if words[:2] == ["reload", "sources"]:
        with change("chrony") as state:
            state["source"] = _preferred() or _FALLBACK
        print("200 OK")
    elif words[:1] == ["tracking"]:
        source = peek("chrony").get("source") or _preferred() or _FALLBACK
        number = "".join(f"{int(part):02X}" for part in source.split("."))
        tail = (
            "4,1753630752.756016394,0.000042,-0.000048721,0.000203645,-3.485,-0.022,0.079,0.000577283,0.000112625,16.0"
        )
        print(f"{number},{source},{tail},Normal")
    else:
        refuse(f"chronyc: this stand-in knows tracking and reload sources, not {' '.join(words)!r}")
    return 0


def _preferred() -> str | None:
    files = [*Path("/etc/chrony/sources.d").glob("*.sources"), *Path("/etc/chrony.d").glob("*.sources")]
    for file in sorted(files):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] in (["server"], ["pool"]) and len(words) > 1:
                return words[1]
    return None
