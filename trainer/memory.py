"""The memory of this machine and of its GPUs: what there is, and what is free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

MEMINFO, OWN_CGROUP, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_RECLAIMABLE = ("inactive_file", "active_file")
"""File pages of a control group and those below it, in its memory.stat; in version 1 `total_` stands before these names."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the host or of one GPU: all there is, and what is free now."""

    name: str
    total: int
    free: int


def host_memory(meminfo: Path = MEMINFO, own_cgroup: Path = OWN_CGROUP, cgroups: Path = CGROUPS) -> Memory | None:
    """Memory with its swap, or a control group's limit where that is lower; None where the kernel does not say."""
    bytes_of = _pairs(meminfo, unit=1024)
    if "MemTotal:" not in bytes_of:
        return None
    limits = [limit for limit, _ in _limits(own_cgroup, cgroups)]
    total = min([bytes_of["MemTotal:"] + bytes_of.get("SwapTotal:", 0), *limits])
    free = available_memory(meminfo, own_cgroup, cgroups)
    swap_free = bytes_of.get("SwapFree:", 0)
    return Memory("this machine", total, min(total, (total if free is None else free) + swap_free))


def available_memory(meminfo: Path = MEMINFO, own_cgroup: Path = OWN_CGROUP, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes available without swapping or meeting a control group's limit; None where that is unknown."""
    free = [limit - used for limit, used in _limits(own_cgroup, cgroups)]
    if (available := _pairs(meminfo, unit=1024).get("MemAvailable:")) is not None:
        free.append(available)
    return min(free, default=None)


def gpu_memory(device: torch.device) -> Memory | None:
    """Return the memory of a rank's GPU; None for the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Memory(f"GPU {device.index or 0}", total, free)


def _limits(own_cgroup: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of this process's control group and of each above it that has a limit: without one it
    says `max`, or in version 1 a number that is more than any memory.

    Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    for number, controllers, path in (line.split(":", 2) for line in _lines(own_cgroup) if line.count(":") >= 2):
        first = "memory" in controllers.split(",")
        if not first and number != "0":
            continue
        root = cgroups / "memory" if first else cgroups
        most, now = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        reclaimable = [f"total_{name}" if first else name for name in _RECLAIMABLE]
        # Seen from a namespace of control groups, a process outside of its root has a path that climbs.
        own = root if ".." in Path(path).parts else root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and (limit := _number(folder / most)) is not None:
                # The kernel frees file pages before it enforces the limit; shared memory is not among them.
                pages = _pairs(folder / "memory.stat")
                yield limit, (_number(folder / now) or 0) - sum(pages.get(name, 0) for name in reclaimable)


def _number(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _pairs(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name and a number, multiplied by `unit`."""
    words = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) * unit for pair in words if len(pair) > 1 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
