"""Write the node agent's table of instance types anew: `python -m infra.catalog.nodes > node_setup/settings/instances.toml`.

The agent runs on nodes with the standard library alone and carries the few facts that `node-verify` compares with.
"""

from __future__ import annotations

from itertools import groupby

from infra.catalog.instances import Instance, snapshot


def table() -> str:
    """Types with accelerators or EFA with their counts of devices, by the names that the agent's facts have; of all others
    the names, by how many local drives they have. TOML."""
    about = snapshot()
    head = [
        f"# Written by infra.catalog.nodes from a snapshot of {about.date}: {about.source}.",
        "# Types that are not here are unknown, and what is unknown is not ready.",
    ]
    kinds = [kind for _, kind in sorted(about.types.items())]
    rows = [_row(kind) for kind in kinds if _has_devices(kind)]
    plain: dict[int, list[str]] = {}
    for kind in kinds:
        if not _has_devices(kind):
            plain.setdefault(kind.nvme_count, []).append(kind.name)
    lists = [line for drives, names in sorted(plain.items()) for line in _listed(drives, names)]
    return "\n".join([*head, "", "[instance]", *rows, "", "[plain]", *lists]) + "\n"


def _has_devices(kind: Instance) -> bool:
    return bool(kind.efa or kind.accelerators)


def _listed(drives: int, names: list[str]) -> list[str]:
    """One family a line."""
    families = groupby(names, key=lambda name: name.partition(".")[0])
    return [
        f"{drives} = [",
        *("    " + "".join(f'"{name}", ' for name in family).rstrip() for _, family in families),
        "]",
    ]


def _row(kind: Instance) -> str:
    gpus = [device for device in kind.accelerators if device.kind == "gpu"]
    others = [device for device in kind.accelerators if device.kind != "gpu"]
    fields = [f"gpus = {sum(device.count for device in gpus)}"]
    fields += [f'gpu = "{device.name}"' for device in gpus[:1]]
    fields += [f"{device.kind} = {device.count}" for device in others[:1]]
    fields += [f"efa = {kind.efa}", f"nvme = {kind.nvme_count}"]
    return f'"{kind.name}" = {{ {", ".join(fields)} }}'


if __name__ == "__main__":
    print(table(), end="")
