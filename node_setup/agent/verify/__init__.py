"""Whether a node is fit to train: small pure checks of facts, then the few that do something."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lustrain.problem import UserError, problem
from lustrain.status import Status
from node_setup.agent.host import Host
from node_setup.agent.model import EXIT_DRIFT, EXIT_IN_SYNC, Facts, Request
from node_setup.agent.verify import (
    clock,
    efa,
    first_boot,
    gpu,
    hardware,
    home,
    lustre,
    probes,
    settings,
    slurm,
    storage,
)
from node_setup.agent.verify.digest import digest
from node_setup.agent.verify.expected import ExpectedHardware, expected_hardware
from node_setup.agent.verify.result import HYPERPOD, READY, Result, drain, fact_at, to_json, worst

VERSION = 1
TIERS = ("facts", "fast")
"""`facts` only reads; `fast` also writes to Lustre and to a home, which takes a few seconds and fits a Slurm prolog."""
TOPICS = (first_boot, hardware, gpu, efa, lustre, home, slurm, clock, storage)

Check = Callable[[Facts, ExpectedHardware, Request], Result]


def verify(host: Host, facts: Facts, request: Request, tier: str = "fast") -> tuple[dict[str, Any], int]:
    """Return all results as JSON, and the agent's exit status: 0 ready, 2 not. UserError where the request is wrong."""
    if tier not in TIERS:
        raise UserError(problem("tier", tier, "unknown", allowed=", ".join(TIERS)))
    want = expected_hardware(facts, request)
    results = [_timed(check, facts, want, request) for topic in TOPICS for check in topic.CHECKS]
    results += _all_timed("settings", lambda: settings.check_all(facts, request))
    if tier == "fast":
        results += _all_timed("lustre-write", lambda: probes.write_probe(host, facts, want, request))
        results += _all_timed("home-write", lambda: home.write_probe(host, facts, want, request))
    ready = all(result.status in READY for result in results)
    first = worst(results)
    answer = {
        "version": VERSION,
        "host": fact_at(facts, "host", "name") or platform.node(),
        "facts_digest": digest(facts),
        "jobs": fact_at(facts, "jobs"),
        "results": [to_json(result) for result in results],
        "ready": ready,
        "drain": drain(results),
        "hyperpod": HYPERPOD.get(first.action) if first else None,
    }
    return answer, EXIT_IN_SYNC if ready else EXIT_DRIFT


_ODD_FACTS = (AttributeError, KeyError, TypeError, ValueError)
"""Code raises these when facts have a form that it does not know, say from another version's collectors."""


def _timed(check: Check, facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    started = time.monotonic()
    try:
        result = check(facts, want, request)
    except _ODD_FACTS as error:
        result = _odd(f"{check.__module__.rpartition('.')[2]}-{check.__name__}".replace("_", "-"), error)
    return replace(result, seconds=time.monotonic() - started)


def _all_timed(name: str, run: Callable[[], Iterable[Result]]) -> list[Result]:
    """Return results that come together; the first carries the time of all."""
    started = time.monotonic()
    try:
        results = list(run())
    except _ODD_FACTS as error:
        results = [_odd(name, error)]
    return [replace(results[0], seconds=time.monotonic() - started), *results[1:]]


def _odd(name: str, error: Exception) -> Result:
    return Result(
        name, Status.UNKNOWN, f"facts have a form that this check does not know: {type(error).__name__}: {error}"
    )
