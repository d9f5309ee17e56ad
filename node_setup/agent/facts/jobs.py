"""What is training on the node now: jobs of Slurm, processes of our trainer and those on a Gaudi. GPU processes come from
`gpu`."""

from __future__ import annotations

import re
from typing import Any

from node_setup.agent.facts.devices.hpu import HABANA
from node_setup.agent.facts.reading import MachineReading, Process

EMPTY: dict[str, Any] = {"jobs": None}
_STEP = re.compile(r"slurmstepd: \[(\d+)")
"""Slurm titles the process of a job's step like this: `slurmstepd: [123.batch]`, `slurmstepd: [123.0]`."""


def collect(reading: MachineReading) -> dict[str, Any]:
    unread = any(error["where"] == "processes" for error in reading.errors)
    return {
        "jobs": None if unread else [*jobs_of(reading.processes), *(on_gaudi(reading) if reading.has(HABANA) else ())]
    }


def join_jobs(
    by_process: list[dict[str, str]] | None, by_gpu: list[dict[str, str]] | None
) -> list[dict[str, str]] | None:
    """Return all jobs; None where none was seen and some source could not be read, so that the node may be busy."""
    seen = [*(by_process or ()), *(by_gpu or ())]
    return None if not seen and None in (by_process, by_gpu) else seen


def jobs_of(processes: list[Process]) -> list[dict[str, str]]:
    steps = (step_of(process) for process in processes)
    slurm = sorted({job for job in steps if job}, key=int)
    trainers = [str(process.pid) for process in processes if is_trainer(process.command)]
    return [{"kind": "slurm", "id": job} for job in slurm] + [{"kind": "trainer", "id": pid} for pid in trainers]


def step_of(process: Process) -> str | None:
    """Return the number of the job of whose step this is slurmstepd; None for all other processes."""
    match = _STEP.match(" ".join(process.command))
    return match[1] if match else None


_MODULE = re.compile(r"(?:-[A-Za-z]*m|--module=?)(.*)", re.DOTALL)
"""This is Python's `-m`, which may follow other letters and may have its module behind it (Python, "Command line and
environment"), and torchrun's `--module`."""


def is_trainer(command: tuple[str, ...]) -> bool:
    """Recognise `python -m trainer train …` however it is written, also below torchrun, which repeats the words."""
    flags = ((_MODULE.fullmatch(word), following) for word, following in zip(command, (*command[1:], "")))
    modules = {match[1] or following for match, following in flags if match}
    return bool(modules & {"trainer", "trainer.__main__"}) and "train" in command


_GAUDI = re.compile(r"/dev/(?:accel/accel|hl)\d+")
"""A process opens one of these to compute, by the driver's older and newer names; hl-smi opens the control devices beside them
(Linux, drivers/accel/habanalabs)."""


def on_gaudi(reading: MachineReading) -> list[dict[str, str]]:
    """List the Python processes that hold an accelerator open: hl-smi lists none, and a node without Slurm has no other trace
    of them."""
    jobs = []
    for process in reading.processes:
        opened = (
            reading.host.link(f"/proc/{process.pid}/fd/{name}")
            for name in reading.host.names(f"/proc/{process.pid}/fd")
        )
        if any(_GAUDI.fullmatch(path or "") for path in opened):
            jobs.append({"kind": "hpu", "id": str(process.pid)})
    return jobs
