"""Findings, rules and changes as lines or as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from infra.catalog.prices import HOME
from infra.finding import LEVELS, Rule, finding
from infra.plan.cost import Cost, Part
from infra.preflight.change import Change
from lustrain.problem import DONE, FAILED, UNREACHABLE, Problem
from lustrain.tables import table

UNREACHED = "could not be checked: AWS cannot be reached"
"""What every online rule reports where AWS did not answer the first question, about the caller's identity."""


def lines(findings: Sequence[Problem]) -> Iterator[str]:
    """Yield all findings, errors first and questions with one and the same answer in one line, then the counts by level."""
    alike: dict[tuple[str, ...], list[Problem]] = defaultdict(list)
    for item in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        mine = () if item.level == "unknown" else (item.code,)
        alike[(item.level, item.path, item.why, item.fix, *mine)].append(item)
    yield from (_folded(same) for same in alike.values())
    yield ", ".join(f"{_counted(sum(one.level == level for one in findings), level)}" for level in LEVELS)


def _folded(same: Sequence[Problem]) -> str:
    """Return one line for questions with one answer."""
    first, codes = same[0], list(dict.fromkeys(finding.code for finding in same))
    if len(codes) == 1:
        return str(first)
    return finding(
        first.path,
        f"{len(codes)} questions {first.why}",
        first.fix,
        code=", ".join(codes),
        level=first.level,
    )


def as_data(findings: Iterable[Problem]) -> list[dict[str, str]]:
    """Return the findings for `--json`."""
    return [
        {
            "code": item.code,
            "level": item.level,
            "path": item.path,
            "message": item.why,
            "fix": item.fix,
            "source": item.source,
        }
        for item in findings
    ]


def exit_code(findings: Sequence[Problem]) -> int:
    """Return 1 where something would fail, 3 where no question reached AWS; one question without an answer is no failure."""
    if any(finding.level == "error" for finding in findings):
        return FAILED
    return UNREACHABLE if any(finding.why == UNREACHED for finding in findings) else DONE


def rule_lines(rules: Iterable[Rule]) -> Iterator[str]:
    """Yield every rule by its code: level, where it looks, what must hold, and the source."""
    for rule in sorted(rules, key=lambda rule: rule.code):
        marks = [mark for mark, there in (("online", rule.permission), ("essential", rule.essential)) if there]
        about = f" ({', '.join(marks)})" if marks else ""
        yield f"{rule.code} {rule.level}{about}: {rule.checks} [{rule.source}]"


def change_lines(changes: Sequence[Change], refused: Sequence[Change]) -> Iterator[str]:
    yield from (change.line() for change in changes)
    if not changes:
        yield "nothing changes"
    elif refused:
        yield f"{len(changes)} changes, {len(refused)} refused: do not run `pulumi up` for this"
    else:
        yield f"{_counted(len(changes), 'change')}"


COST_HEADS = ("part", "USD/hour", "USD/month", "")


def cost_lines(cost: Cost) -> Iterator[str]:
    """Yield the parts of a cluster's cost as a table with its sums, and what the figures leave out."""
    least = "at least: more comes on top, without a known price" if cost.unknown else "while everything runs"
    rows = [_cost_row(part) for part in cost.parts]
    rows.append(("all of it", *_figures(cost), least))
    rows.append(("always on", *_figures(cost.always_on), "of this, whether anybody trains or not"))
    yield from table(COST_HEADS, rows, COST_HEADS[1:3])
    if cost.unknown:
        yield f"price unknown: {', '.join(cost.unknown)}"
    if cost.priced_elsewhere:
        yield f"no price for {cost.region} is known, {HOME}'s is shown: {', '.join(cost.priced_elsewhere)}"
    yield from cost.remarks
    years = " to ".join(dict.fromkeys((cost.dates[0][:4], cost.dates[-1][:4])))
    without = "tax, discounts and what goes by use (S3, logs, backups, traffic)"
    yield f"list prices of {years}, without {without}; `fab cost --json` has the date and source of each"


def _cost_row(part: Part) -> tuple[str, str, str, str]:
    figures = _figures(part)
    if not part.counted:
        figures = ("-", "-") if part.bought else ("?", "?")
    return (part.name, *figures, "; ".join(filter(None, (part.what, part.note))))


def _figures(billed: Cost | Part) -> tuple[str, str]:
    return f"{billed.usd_hour:,.2f}", f"{billed.usd_month:,.0f}"


def cost_data(cost: Cost) -> dict[str, Any]:
    """Return a cluster's cost for `--json`; null stands for what is not counted or has no known price."""
    return {
        "region": cost.region,
        "usd_hour": round(cost.usd_hour, 4),
        "usd_month": round(cost.usd_month, 2),
        "always_on_usd_month": round(cost.always_on.usd_month, 2),
        "unknown": list(cost.unknown),
        "remarks": list(cost.remarks),
        "parts": [_part_data(part) for part in cost.parts],
    }


def _part_data(part: Part) -> dict[str, Any]:
    return {
        "part": part.name,
        "what": part.what,
        "note": part.note,
        "usd_hour": round(part.usd_hour, 4) if part.counted else None,
        "usd_month": round(part.usd_month, 2) if part.counted else None,
        "always_on": part.always_on,
        "unknown": list(part.unknown),
        "prices": [asdict(price) for price in part.prices],
    }


def _counted(count: int, what: str) -> str:
    plural = what if count == 1 or what == "unknown" else f"{what}s"
    return f"{count or 'no'} {plural}"
