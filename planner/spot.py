"""What a history of spot prices says: which types and zones are cheap and steady, and when a capacity block costs less.

Prices say nothing of how often AWS takes nodes back: that is seen in runs (`fab run-cost`), and rated by AWS's placement scores
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html), which `fab preflight --online` asks for.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from infra.catalog.instances import instance
from infra.catalog.prices import price
from lustrain.problem import UserError, problem
from lustrain.tables import table
from planner.flags import SpotAdviceFlags

COMMAND = "aws ec2 describe-spot-price-history --instance-types p5.48xlarge --product-descriptions Linux/UNIX"
"""Its answer is a history: https://docs.aws.amazon.com/cli/latest/reference/ec2/describe-spot-price-history.html"""
LINUX = frozenset({"Linux/UNIX", "Linux/UNIX (Amazon VPC)"})
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d+")
_ZONE, _TYPE = re.compile(rf"{_REGION.pattern}[a-z0-9-]+"), re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")
NEAR = 1.1
"""Prices up to a tenth above the lowest count as alike: among them the steadiest is worth more."""
FLEXIBLE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-best-practices.html"
"""Be flexible about instance types and Availability Zones."""
DAY_S = 86_400.0


@dataclass(frozen=True)
class Change:
    """USD an hour of a type in a zone, from a Unix time until its next change."""

    type: str
    zone: str
    time: float
    usd: float


@dataclass(frozen=True)
class Market:
    """One type in one zone over the time of the history; USD an hour of a node, the mean weighted by time.

    `volatility` is the standard deviation, weighted by time, of the mean. `block_usd` is the catalogue's price of a capacity
    block: spot costs more for `block_cheaper` of the time, and more on average for the same work where its goodput is below
    `break_even` of the block's. None where a price or the number of GPUs is not known.
    """

    type: str
    zone: str
    days: float
    now: float
    mean: float
    least: float
    most: float
    volatility: float
    changes: int
    gpu_hour_usd: float | None
    on_demand_usd: float | None
    block_usd: float | None
    block_cheaper: float | None
    break_even: float | None


def read_history(path: Path) -> list[Change]:
    """Return the changes of Linux prices in a file with the answer of describe-spot-price-history. UserError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        raise UserError(problem("HISTORY", str(path), why, fix=f"{COMMAND} > {path.name or 'history.json'}")) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            problem("HISTORY", str(path), f"is not JSON: {error}", fix=f"{COMMAND} > history.json")
        ) from None
    rows = document.get("SpotPriceHistory") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise UserError(problem("HISTORY", str(path), "has no list SpotPriceHistory", fix=f"{COMMAND} > history.json"))
    changes = read_changes(rows)
    if not changes:
        raise UserError(problem("HISTORY", str(path), "has no price of Linux", fix=f"{COMMAND} > history.json"))
    return changes


def require_online(flags: SpotAdviceFlags) -> None:
    """UserError for a flag that has no meaning for a file."""
    given = {"--region": flags.region, "--days": flags.days}
    lines = [problem(name, value, "only valid with --online") for name, value in given.items() if value is not None]
    if lines and not flags.online:
        raise UserError(lines)


def is_type(name: str) -> bool:
    """Check whether this has the form of an instance type's name."""
    return _TYPE.fullmatch(name) is not None


def read_changes(rows: Sequence[Any]) -> list[Change]:
    """Return the changes of Linux prices in the rows of a history. UserError for rows that are none."""
    changes, problems = [], []
    for number, row in enumerate(rows):
        try:
            change = _change(row)
        except (KeyError, TypeError, ValueError) as error:
            key = error.args[0] if isinstance(error, KeyError) else error
            fix = "leave the row out, or fetch the history again"
            problems.append(problem(f"SpotPriceHistory[{number}]", row, f"is no price ({key})", fix=fix))
            continue
        changes += [change] if change else []
    if problems:
        raise UserError(problems[:3])
    return changes


def _change(row: Mapping[str, Any]) -> Change | None:
    """Return a row's price; None where it is of another system. KeyError, TypeError or ValueError for what is none."""
    if row["ProductDescription"] not in LINUX:
        return None
    usd = float(row["SpotPrice"])
    if not 0 < usd < 100_000:
        raise ValueError("SpotPrice is out of range")
    time = datetime.fromisoformat(row["Timestamp"])
    type_name, zone = row["InstanceType"], row["AvailabilityZone"]
    for key, value, form in (("InstanceType", type_name, _TYPE), ("AvailabilityZone", zone, _ZONE)):
        if not form.fullmatch(value):
            raise ValueError(f"{key} is none")
    return Change(type_name, zone, time.replace(tzinfo=time.tzinfo or UTC).timestamp(), usd)


def markets(changes: Sequence[Change]) -> list[Market]:
    """Return each type in each zone, the cheapest first, by GPU where all have GPUs; all until the newest change of any."""
    ends = max(change.time for change in changes)
    by_market: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
    for change in changes:
        by_market[change.type, change.zone][change.time] = change.usd
    ranked = [_market(*key, sorted(prices.items()), ends) for key, prices in by_market.items()]
    by_gpu = all(one.gpu_hour_usd for one in ranked)
    return sorted(ranked, key=lambda one: ((one.gpu_hour_usd if by_gpu else one.mean) or 0.0, one.type, one.zone))


def _market(type_name: str, zone: str, prices: Sequence[tuple[float, float]], ends: float) -> Market:
    spans = [(after - time, usd) for (time, usd), (after, _) in pairwise([*prices, (ends, 0.0)])]
    # The newest change of all has lasted no time yet.
    whole = sum(seconds for seconds, _ in spans)
    weights = [(seconds / whole if whole else 1 / len(spans), usd) for seconds, usd in spans]
    mean = sum(weight * usd for weight, usd in weights)
    deviation = math.sqrt(sum(weight * (usd - mean) ** 2 for weight, usd in weights))
    region = _REGION.match(zone)
    on_demand, block = (
        known.usd_hour if region and (known := price(f"{prefix}{type_name}", region[0])) else None
        for prefix in ("", "capacity-block:")
    )
    facts = instance(type_name)
    gpus = sum(device.count for device in facts.accelerators) if facts else 0
    figures = [usd for _, usd in prices]
    return Market(
        type_name,
        zone,
        whole / DAY_S,
        figures[-1],
        mean,
        min(figures),
        max(figures),
        deviation / mean,
        len(figures) - 1,
        mean / gpus if gpus else None,
        on_demand,
        block,
        None if block is None else sum(weight for weight, usd in weights if usd > block),
        None if block is None else min(1.0, mean / block),
    )


def advice(ranked: Sequence[Market]) -> list[str]:
    """Return what follows from the prices, a sentence each; `ranked` is in the order of `markets`."""
    first = ranked[0]
    alike = [one for one in ranked if _cost(one, ranked) <= NEAR * _cost(first, ranked)]
    steady = min(alike, key=lambda one: one.volatility)
    lines = [f"cheapest: {first.type} in {first.zone}, {first.mean:,.2f} USD/h"]
    if steady is not first:
        lines.append(f"steadiest within {NEAR - 1:.0%} of it: {steady.type} in {steady.zone}, {steady.mean:,.2f} USD/h")
    if others := [one for one in alike if one is not first]:
        lines.append(f"{len(others)} more within {NEAR - 1:.0%} of it: AWS advises to take several ({FLEXIBLE})")
    for one in ranked:
        if one.break_even is None or one.block_usd is None:
            continue
        if one.mean >= one.block_usd:
            lines.append(
                f"{one.type} in {one.zone}: a capacity block at {one.block_usd:,.2f} USD/h is cheaper on average"
            )
        elif one is first:
            lines.append(
                f"{one.type}: a capacity block at {one.block_usd:,.2f} USD/h is cheaper where spot's goodput is below "
                f"{one.break_even:.0%} of the block's; `fab plan-training` says both"
            )
    return [*lines, "prices do not say how often AWS takes nodes back"]


def _cost(one: Market, ranked: Sequence[Market]) -> float:
    by_gpu = all(other.gpu_hour_usd for other in ranked)
    return (one.gpu_hour_usd if by_gpu else None) or one.mean


HEADS = (
    *("type", "zone", "days", "now", "mean", "least", "most", "volatility", "changes a day"),
    *("USD/GPU-h", "on-demand", "block", "block cheaper"),
)


def lines(ranked: Sequence[Market]) -> Iterator[str]:
    """Yield the table, in USD an hour of a node, and the advice."""
    yield from table(HEADS, [_row(one) for one in ranked], HEADS[2:])
    yield from advice(ranked)


def _row(one: Market) -> tuple[str, ...]:
    def usd(value: float | None) -> str:
        return "?" if value is None else f"{value:,.2f}"

    return (
        one.type,
        one.zone,
        f"{one.days:.1f}",
        *map(usd, (one.now, one.mean, one.least, one.most)),
        f"{one.volatility:.1%}",
        f"{one.changes / one.days:.1f}" if one.days else "?",
        *map(usd, (one.gpu_hour_usd, one.on_demand_usd, one.block_usd)),
        "?" if one.block_cheaper is None else f"{one.block_cheaper:.0%} of the time",
    )


def data(ranked: Sequence[Market]) -> dict[str, Any]:
    """Return markets and advice for `--json`."""
    return {"markets": [asdict(one) for one in ranked], "advice": advice(ranked)}
