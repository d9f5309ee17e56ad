"""The snapshot of offerings, written anew by `infra.catalog.refresh`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping

from infra.catalog.instances import snapshot


def render(offered: Iterable[Mapping[str, str]], source: str, date: str) -> str:
    """Return the whole snapshot as text: types of one family that lie in the same zones share a line. Types without EFA and
    accelerators are left out: where they are is no question."""
    covered: set[str] = set()
    zones: dict[str, set[str]] = defaultdict(set)
    for item in offered:
        covered.add(item["Location"])
        kind = snapshot().types.get(item["InstanceType"])
        if kind and (kind.efa or kind.accelerators):
            zones[kind.name].add(item["Location"])
    lines: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(zones):
        lines[name.partition(".")[0], *sorted(zones[name])].append(name)
    rows = [{"types": names, "zones": where} for (_, *where), names in lines.items()]
    head = {"source": source, "date": date, "asked": sorted(covered)}
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (head, *rows))
