"""Whether the node is tuned: a plan of `node-tune` from the same facts must have nothing to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lustrain.status import Status
from node_setup.agent.model import Facts, Request, Setting
from node_setup.agent.run import plan as planning
from node_setup.agent.settings import catalog
from node_setup.agent.verify.result import Result

APART = {"lustre-stripe": "lustre-stripes", "lustre-parameter": "lustre-parameters"}
"""These kinds are shown as checks of their own; all others are one check, `settings`."""


def check_all(facts: Facts, request: Request) -> list[Result]:
    """Return one result for stripes, one for Lustre's parameters, one for all other settings. UserError where the request is
    wrong."""
    made = planning.plan(catalog.load(), facts, request)
    rows: dict[str, list[Mapping[str, Any]]] = {name: [] for name in (*APART.values(), "settings")}
    for row in planning.rows(made):
        kind = made.settings[row["setting"]].kind
        rows[APART.get(kind, "settings")].append(row)
    return [judge(check, setting_rows, made.settings) for check, setting_rows in rows.items()]


def judge(check: str, rows: Iterable[Mapping[str, Any]], settings: Mapping[str, Setting]) -> Result:
    """Fail on a `must` that differs, warn on a `should` that differs; a `must` that could not be read is unknown."""
    rows = [row for row in rows if row["status"] != Status.SKIPPED]
    if not rows:
        return Result(check, Status.SKIPPED, "no setting applies to this node")
    off = [row for row in rows if row["status"] in (Status.CHANGE, Status.FAILED, Status.CONFLICT, Status.REBOOT)]
    must = [row for row in off if settings[row["setting"]].severity == "must"]
    unread = [row for row in rows if row["status"] == Status.UNKNOWN and settings[row["setting"]].severity == "must"]
    in_sync = sum(row["status"] == Status.OK for row in rows)
    if must:
        status, why = Status.FAILED, f"not as it must be: {_names(must)}; fix: fab node-tune"
    elif unread:
        status, why = Status.UNKNOWN, f"could not be read: {_names(unread)}"
    elif off:
        status, why = Status.WARNING, f"not as planned: {_names(off)}; fix: fab node-tune"
    else:
        status, why = Status.OK, "as planned"
    return Result(check, status, why, actual=f"{in_sync} in sync", expected=str(len(rows)))


def _names(rows: Iterable[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(str(row["setting"]) for row in rows))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
