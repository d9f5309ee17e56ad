"""A node's devices, features and memory in Slurm's words, from its facts. Pure: https://slurm.schedmd.com/gres.conf.html"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

MEMORY_KEPT = 0.02
"""Not promised to jobs: a node that reports less than its line says, as after an update of the kernel, is drained."""


def real_memory(memory_mib: int) -> int:
    """Return the memory for jobs, in MiB."""
    return int(memory_mib * (1 - MEMORY_KEPT))


def gres(gpus: Sequence[Mapping[str, object]]) -> str:
    """Return the devices as a node's line and `scontrol` name them: `gpu:h100:8`."""
    types = [str(gpu["type"]) for gpu in gpus]
    return ",".join(f"gpu:{name}:{types.count(name)}" for name in dict.fromkeys(types))


def features(words: Iterable[str | None]) -> list[str]:
    """Return the words as features, which jobs may ask for by --constraint."""
    return [*dict.fromkeys(re.sub(r"[^A-Za-z0-9_.-]", "-", word) for word in words if word)]


def device_words(gpus: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the lines of gres.conf without their nodes; devices in a row that are local to the same cores share one."""
    runs: list[list[Mapping[str, object]]] = []
    for gpu in gpus:
        last = runs[-1][-1] if runs else None
        same = last is not None and all(last[key] == gpu[key] for key in ("type", "cores"))
        if same and last is not None and last["minor"] == int(str(gpu["minor"])) - 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return [_run_words(run) for run in runs]


def _run_words(run: Sequence[Mapping[str, object]]) -> str:
    first, last, cores = run[0]["minor"], run[-1]["minor"], run[0]["cores"]
    assert isinstance(cores, list)
    file = f"/dev/nvidia{first}" if first == last else f"/dev/nvidia[{first}-{last}]"
    return f"Name=gpu Type={run[0]['type']} File={file}" + (f" Cores={_ranges(cores)}" if cores else "")


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as Slurm does: `0-2,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
