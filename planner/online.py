"""`--online`: prices of today for a plan, and a history of spot prices, by the one module of this room that asks AWS."""

from __future__ import annotations

from dataclasses import replace

from infra import clock
from infra.preflight.online.prices import LONGEST_DAYS, Connect, connect, machine_prices, spot_history
from lustrain.flags import number
from lustrain.problem import UserError, problem
from planner.flags import SpotAdviceFlags
from planner.plan import Request
from planner.request import region_of
from planner.spot import Change, is_type, read_changes

DAYS = "30"


def with_prices_of_today(request: Request, *, connect: Connect = connect) -> Request:
    """Return the request with AWS's prices of its nodes on demand and on spot. UserError where AWS does not answer."""
    today = machine_prices([request.node.type], request.region, clock.now(), spot=True, connect=connect)
    return replace(request, today=today)


def changes_of(flags: SpotAdviceFlags, *, connect: Connect = connect) -> list[Change]:
    """Return the spot prices of the types that stand in place of a file. UserError where AWS does not answer or has none."""
    types = [name.strip() for name in flags.history.split(",")]
    if wrong := next((name for name in types if not is_type(name)), None):
        fix = "types, separated by commas, like p5.48xlarge,p5en.48xlarge"
        raise UserError(problem("HISTORY", wrong, "is not an instance type, which --online takes", fix=fix))
    days = int(number("--days", flags.days or DAYS, 1, LONGEST_DAYS))
    region = region_of(flags.region, None)
    changes = read_changes(spot_history(types, region, clock.now(), days, connect=connect))
    if without := sorted(set(types) - {change.type for change in changes}):
        why = f"{region} has had no spot price of it"
        raise UserError(problem("HISTORY", ",".join(without), why, fix="another --region, or leave the type out"))
    return changes
