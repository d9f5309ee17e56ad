"""A whole pass under the node's lock: facts, plan, apply, then facts and plan again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Optional

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.facts import collect
from node_setup.agent.host import Host
from node_setup.agent.model import (
    EXIT_DRIFT,
    EXIT_FAILED,
    EXIT_IN_SYNC,
    EXIT_REFUSED,
    Facts,
    Request,
    Setting,
    Step,
    Write,
)
from node_setup.agent.run import lock, pending
from node_setup.agent.run.apply import Log, apply, key, perform, sweep
from node_setup.agent.run.outcome import Changes, applied, fallen, followed, reboots, unfit, unplanned
from node_setup.agent.run.plan import Plan, plan, rows
from node_setup.agent.run.refusal import refusal
from node_setup.agent.settings import catalog
from node_setup.agent.wire.answer import blank
from node_setup.agent.wire.identity import Identity, installed

Refuse = Callable[[Facts], Optional[str]]

ROUNDS = 3
"""A mount makes a client's parameters appear, and a device its scheduler; nothing in the catalogue hangs on more than two."""


@dataclass
class Looker:
    """Reads facts and plans from them, as often as needed, and keeps the time that it took."""

    host: Host
    request: Request
    identity: Identity
    settings: tuple[Setting, ...] = field(default_factory=catalog.load)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"facts": 0.0, "plan": 0.0, "apply": 0.0})

    def look(self) -> Plan:
        began = time.perf_counter()
        self.facts = facts(self.host, self.request, self.identity, self.settings)
        between = time.perf_counter()
        made = plan(self.settings, self.facts, self.request)
        self.spend("facts", between - began)
        self.spend("plan", time.perf_counter() - between)
        return made

    def spend(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = round(self.seconds[phase] + seconds, 4)


def facts(host: Host, request: Request, identity: Identity, settings: tuple[Setting, ...]) -> dict[str, Any]:
    """Collect what the settings and the document need, and which agent runs and is installed."""
    found: dict[str, Any] = collect(host, catalog.wanted(settings, request.document))
    found["agent"] = {
        **found["agent"],
        "path": identity.path,
        "sha256": identity.sha256,
        "installed": installed(host),
    }
    return found


def check(host: Host, request: Request, identity: Identity) -> tuple[dict[str, Any], int]:
    """Plan what a tune would do; change nothing. The result, and exit 0 in sync, 2 with drift, 1 where something failed.

    A foreign file that wins at the next boot is drift, though none that a tune would undo.
    """
    looker = Looker(host, request, identity)
    made = looker.look()
    result = _result(looker, made, rows(made))
    statuses = {row["status"] for row in result["rows"]}
    differs = bool(statuses & {Status.CHANGE, Status.CONFLICT}) or bool(unfit(result["rows"]))
    code = EXIT_FAILED if Status.FAILED in statuses else EXIT_DRIFT if differs else EXIT_IN_SYNC
    return result, code


def tune(
    host: Host, request: Request, identity: Identity, wait_s: float, log: Log, refuse: Refuse = refusal
) -> tuple[dict[str, Any], int]:
    """Bring the node to what is wanted and say what came of it; exit 0, 1 where something failed, 4 where refused.

    `wait_s` seconds at most are waited for another agent to end. `refuse` says why a node is left alone, unless forced.
    """
    try:
        with lock.held(host, wait_s) as held:
            for left in sweep(host):
                log(f"removed what a killed agent left: {left}")
            return _tune(Looker(host, request, identity), held, log, refuse)
    except lock.BusyError as busy:
        return {**blank(identity), "refused": str(busy)}, EXIT_REFUSED
    except lock.NoLockError as error:
        return {**blank(identity), "errors": [{"where": owned.LOCK, "why": str(error)}]}, EXIT_FAILED


def _tune(looker: Looker, held: int, log: Log, refuse: Refuse) -> tuple[dict[str, Any], int]:
    before = looker.look()
    if not before.steps:
        result = _result(looker, before, rows(before))
        return result, _code(result)
    refused = None if looker.request.force else refuse(looker.facts)
    if refused:
        return {**_result(looker, before, rows(before)), "refused": refused}, EXIT_REFUSED
    done, after = _settle(looker, before, held, log)
    result = _result(looker, after, applied(done, after))
    result["unplanned"] = unplanned(done, after)
    result["errors"] += _record(looker.host, result)
    return result, _code(result)


def _settle(looker: Looker, before: Plan, held: int, log: Log) -> tuple[Changes, Plan]:
    """Apply, look again, and apply what only became possible by that."""
    steps: tuple[Step, ...] = before.steps
    done, after, found = Changes(known=before.remarks), before, looker.facts
    for _ in range(ROUNDS):
        began = time.perf_counter()
        pending.begin(looker.host, steps, looker.facts, log)
        with looker.host.lending(held):
            troubles = apply(looker.host, steps, log)
        pending.end(looker.host, steps, looker.facts, log)
        looker.spend("apply", time.perf_counter() - began)
        done = replace(done, steps=done.steps + steps, troubles={**done.troubles, **troubles})
        after = looker.look()
        done = replace(done, fallen=fallen(found, looker.facts))
        tried = {key(step) for step in done.steps}
        steps = tuple(step for step in after.steps if key(step) not in tried and followed(step, before))
        if not steps:
            break
    return done, after


def _record(host: Host, result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Keep this apply's answer on the node, for the next person who logs in."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    trouble = perform(host, Write(owned.REPORT, json.dumps({"at": at, **result}, indent=1) + "\n"))
    return [{"where": "report", "why": trouble}] if trouble else []


def _code(result: Mapping[str, Any]) -> int:
    """Return the exit code. A conflict is a failure: what the node has now it loses at its next boot."""
    bad = (Status.FAILED, Status.CONFLICT)
    failed = any(row["status"] in bad for row in result["rows"]) or unfit(result["rows"])
    return EXIT_FAILED if failed or result["unplanned"] or result["errors"] else EXIT_IN_SYNC


def _result(looker: Looker, made: Plan, shown: list[dict[str, Any]]) -> dict[str, Any]:
    from node_setup.agent.lint import lint

    return {
        **blank(looker.identity),
        "profile": made.profile,
        "profile_why": made.profile_why,
        "group": made.group,
        "rows": shown,
        "reboot": reboots(shown),
        "lint": lint(looker.facts),
        "seconds": dict(looker.seconds),
    }
