"""`--online`: prices of today for a plan or a run, and histories of spot prices, by the one module here that asks AWS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from infra import clock
from infra.aws import connect
from infra.catalog.prices import Price
from infra.prices_online import LONGEST_DAYS, Connect, on_demand_prices, spot_history, spot_prices
from lustrain.flags import number
from lustrain.problem import UserError, problem
from planner.flags import SpotAdviceFlags
from planner.plan import Request
from planner.request import region_of
from planner.spot import Change, is_type, read_changes

DAYS = "30"
PRICES_OF = {"on-demand": on_demand_prices, "spot": spot_prices}
"""The ways to pay whose prices AWS tells."""


def with_prices_of_today(request: Request, *, connect: Connect = connect) -> Request:
    """Return the request with AWS's prices of its nodes on demand and on spot. UserError where AWS does not answer."""
    types, now = [request.node.type], clock.now()
    on_demand = on_demand_prices(types, request.region, now, connect=connect)
    return replace(request, today=on_demand | spot_prices(types, request.region, now, connect=connect))


def prices_of_today(
    mode: str, type_name: str, region: str, *, connect: Connect = connect
) -> Mapping[str, Price | None]:
    """Return AWS's price of nodes that are paid in this way. UserError where it tells none, or does not answer."""
    if mode not in PRICES_OF:
        why = f"AWS tells no price of nodes that are paid as {mode}"
        fix = f"leave out --online, or --price {mode}=USD instead"
        raise UserError(problem("--online", True, why, allowed=", ".join(PRICES_OF), fix=fix))
    return PRICES_OF[mode]([type_name], region, clock.now(), connect=connect)


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
