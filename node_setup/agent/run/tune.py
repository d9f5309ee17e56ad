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
from node_setup.agent.run.outcome import (
    Changes,
    blocking_settings,
    enabled_by_earlier_step,
    reboot_reasons,
    result_rows,
    stopped_services,
    unplanned_changes,
)
from node_setup.agent.run.plan import Plan, plan, rows
from node_setup.agent.run.refusal import refusal
from node_setup.agent.settings import catalog
from node_setup.agent.wire.answer import empty_answer
from node_setup.agent.wire.identity import Identity, installed_sha

Refuse = Callable[[Facts], Optional[str]]

ROUNDS = 3
"""A mount makes a client's parameters appear, and a device its scheduler; nothing in the catalogue hangs on more than two."""


@dataclass
class Inspector:
    """It reads facts and plans from them, as often as needed, and keeps the time that it took."""

    host: Host
    request: Request
    identity: Identity
    settings: tuple[Setting, ...] = field(default_factory=catalog.load)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"facts": 0.0, "plan": 0.0, "apply": 0.0})

    def inspect(self) -> Plan:
        began = time.perf_counter()
        self.facts = facts(self.host, self.request, self.identity, self.settings)
        between = time.perf_counter()
        current = plan(self.settings, self.facts, self.request)
        self.add_seconds("facts", between - began)
        self.add_seconds("plan", time.perf_counter() - between)
        return current

    def add_seconds(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = round(self.seconds[phase] + seconds, 4)


def facts(
    host: Host,
    request: Request,
    identity: Identity,
    settings: tuple[Setting, ...],
    lustre_parameters: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Collect what the settings and the document need, further Lustre parameters, and which agent runs and is installed."""
    wanted = catalog.wanted_facts(settings, request.document)
    wanted = replace(wanted, lustre_parameters=(*wanted.lustre_parameters, *lustre_parameters))
    values: dict[str, Any] = collect(host, wanted)
    values["agent"] = {
        **values["agent"],
        "path": identity.path,
        "sha256": identity.sha256,
        "installed": installed_sha(host),
    }
    return values


def check(host: Host, request: Request, identity: Identity) -> tuple[dict[str, Any], int]:
    """Plan what a tune would do and change nothing. Return the result, and exit status 0 in sync, 2 with drift, 1 where
    something failed.

    A foreign file that wins at the next boot is drift, though none that a tune would undo.
    """
    inspector = Inspector(host, request, identity)
    current = inspector.inspect()
    result = _result(inspector, current, rows(current))
    statuses = {row["status"] for row in result["rows"]}
    differs = bool(statuses & {Status.CHANGE, Status.CONFLICT}) or bool(blocking_settings(result["rows"]))
    code = EXIT_FAILED if Status.FAILED in statuses else EXIT_DRIFT if differs else EXIT_IN_SYNC
    return result, code


def tune(
    host: Host, request: Request, identity: Identity, wait_s: float, log: Log, refuse: Refuse = refusal
) -> tuple[dict[str, Any], int]:
    """Bring the node to what is wanted. Return the result, and exit status 0, 1 where something failed, 4 where refused.

    It waits at most `wait_s` seconds for another agent to end. `refuse` returns why a node is left alone, unless forced.
    """
    try:
        with lock.hold(host, wait_s) as lock_descriptor:
            for left in sweep(host):
                log(f"removed what a killed agent left: {left}")
            return _tune(Inspector(host, request, identity), lock_descriptor, log, refuse)
    except lock.BusyError as busy:
        return {**empty_answer(identity), "refused": str(busy)}, EXIT_REFUSED
    except lock.NoLockError as error:
        return {**empty_answer(identity), "errors": [{"where": owned.LOCK, "why": str(error)}]}, EXIT_FAILED


def _tune(inspector: Inspector, lock_descriptor: int, log: Log, refuse: Refuse) -> tuple[dict[str, Any], int]:
    before = inspector.inspect()
    if not before.steps:
        result = _result(inspector, before, rows(before))
        return result, _code(result)
    refused = None if inspector.request.force else refuse(inspector.facts)
    if refused:
        return {**_result(inspector, before, rows(before)), "refused": refused}, EXIT_REFUSED
    done, after = _apply_until_stable(inspector, before, lock_descriptor, log)
    result = _result(inspector, after, result_rows(done, after))
    result["unplanned"] = unplanned_changes(done, after)
    result["errors"] += _record(inspector.host, result)
    return result, _code(result)


def _apply_until_stable(inspector: Inspector, before: Plan, lock_descriptor: int, log: Log) -> tuple[Changes, Plan]:
    """Apply, inspect again, and apply what only became possible by that."""
    steps: tuple[Step, ...] = before.steps
    done, after, facts_before = Changes(known=before.remarks), before, inspector.facts
    for _ in range(ROUNDS):
        began = time.perf_counter()
        pending.begin(inspector.host, steps, inspector.facts, log)
        with inspector.host.lending(lock_descriptor):
            troubles = apply(inspector.host, steps, log)
        pending.end(inspector.host, steps, inspector.facts, log)
        inspector.add_seconds("apply", time.perf_counter() - began)
        done = replace(done, steps=done.steps + steps, troubles={**done.troubles, **troubles})
        after = inspector.inspect()
        done = replace(done, stopped_services=stopped_services(facts_before, inspector.facts))
        tried = {key(step) for step in done.steps}
        steps = tuple(step for step in after.steps if key(step) not in tried and enabled_by_earlier_step(step, before))
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
    failed = any(row["status"] in bad for row in result["rows"]) or blocking_settings(result["rows"])
    return EXIT_FAILED if failed or result["unplanned"] or result["errors"] else EXIT_IN_SYNC


def _result(inspector: Inspector, current: Plan, shown: list[dict[str, Any]]) -> dict[str, Any]:
    from node_setup.agent.lint import lint

    return {
        **empty_answer(inspector.identity),
        "profile": current.profile,
        "profile_why": current.profile_why,
        "group": current.group,
        "rows": shown,
        "reboot": reboot_reasons(shown),
        "lint": lint(inspector.facts),
        "seconds": dict(inspector.seconds),
    }
