"""The facts of a node now: `collect(host, wanted)` returns one dict of plain JSON data and never raises.

A fact that could not be read is None, and `errors` holds {where, why}: where is the fact's path, why one line. What a program
printed when it failed is never read as data. Sections are read side by side; one that hangs costs only itself. The keys are in
`schema.NodeFacts`.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from node_setup.agent.facts import (
    clock,
    environment,
    files,
    instance,
    jobs,
    kernel,
    lustre,
    machine,
    metadata,
    mounts,
    scheduler,
    services,
)
from node_setup.agent.facts.devices import blocks, fabric, gpu, hpu
from node_setup.agent.facts.reading import run_side_by_side, start_reading
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Host

__all__ = ["DEADLINE_SECONDS", "Wanted", "collect"]

DEADLINE_SECONDS = 75.0
"""All sections together have this long; every program in them has a shorter limit of its own, so that this ends only what no
kill ends."""

_SECTIONS = (
    machine,
    kernel,
    jobs,
    environment,
    files,
    services,
    clock,
    metadata,
    gpu,
    hpu,
    fabric,
    lustre,
    blocks,
    scheduler,
)
"""Each section has a thread of its own, since many run programs or read devices."""


def collect(host: Host, wanted: Wanted) -> dict[str, Any]:
    """Return all facts of the machine below `host`'s root; `wanted` names the keys that are only read on demand.

    The form is that of `schema.NodeFacts`.
    """
    started = time.monotonic()
    reading = start_reading(host, wanted)
    calls = {_name(module): partial(module.collect, reading) for module in _SECTIONS}
    sections = {name: read or {} for name, read in run_side_by_side(reading, calls, DEADLINE_SECONDS).items()}
    sections["mounts"] = reading.guarded("mounts", lambda: mounts.collect(reading)) or {}
    imds = sections["metadata"].get("_imds", {})
    sections["instance"] = reading.guarded("instance", lambda: instance.collect(reading, imds)) or {}
    facts: dict[str, Any] = {"version": 1, "agent": {}}
    for module in (*_SECTIONS, mounts, instance):
        section = sections[_name(module)]
        facts.update({key: section.get(key, nothing) for key, nothing in module.EMPTY.items()})
    facts["jobs"] = jobs.join_jobs(facts["jobs"], sections["gpu"].get("jobs"))
    of_jobs = reading.guarded("environment.jobs", lambda: environment.of_jobs(reading, facts["jobs"]))
    facts["environment"] = [*facts["environment"], *(of_jobs or ())]
    facts["errors"] = list(reading.errors)
    facts["agent"] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "seconds": round(time.monotonic() - started, 3),
    }
    return facts


def _name(module: Any) -> str:
    return str(module.__name__).rpartition(".")[2]
