"""What a run has cost so far by its own records, what interruptions were of it, and where it ends at this pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.report import account

REPEATED, STARTS, BETWEEN = "repeated steps", "starts", "between attempts"
"""Parts of `launch.report.account` that interruptions cause; the first start would have been without any."""


@dataclass(frozen=True)
class Share:
    """Seconds of the run's time that went into something, and what the nodes cost meanwhile."""

    name: str
    seconds: float
    usd: float


@dataclass(frozen=True)
class Spent:
    """USD of the nodes since the first launch; what was bought beside them is not in it."""

    shares: tuple[Share, ...]
    node_hours: float
    usd: float
    interruptions: int
    interruptions_usd: float
    goodput: float
    step: int
    steps: int
    remaining_s: float
    """Until the last step, with interruptions as often as so far."""
    remaining_usd: float


def spent(
    launches: Sequence[Mapping[str, Any]],
    generations: Mapping[int, Sequence[Mapping[str, Any]]],
    steps: int,
    usd_hour: float,
) -> Spent:
    """Return what nodes at `usd_hour` each have cost a run of `steps`; every launch has an end.

    Nodes count from a launch to the next one, since they are paid while the run waits for another; where their number
    changed, each share of the time costs the average. ValueError where there is no launch, or no step was done.
    """
    done = max((int(record["step"]) for records in generations.values() for record in records), default=0)
    if not launches or not done:
        raise ValueError("nothing was trained yet")
    shares = account(launches, generations)
    until = [launch["started"] for launch in launches[1:]] + [launches[-1]["ended"]]
    node_s = sum(
        (end - launch["started"]) * (len(launch["nodes"]) + len(launch.get("idle", ())))
        for launch, end in zip(launches, until, strict=True)
    )
    seconds = sum(share.seconds for share in shares)
    usd = node_s / 3600 * usd_hour
    by_name = {share.name: share.seconds for share in shares}
    again = by_name[STARTS] * (len(launches) - 1) / len(launches)
    lost = by_name[REPEATED] + again + sum(time for name, time in by_name.items() if name.startswith(BETWEEN))
    remaining = seconds / done * max(0, steps - done)
    return Spent(
        tuple(Share(share.name, share.seconds, usd * share.seconds / seconds) for share in shares),
        node_s / 3600,
        usd,
        len(launches) - 1,
        usd * lost / seconds,
        by_name["progress"] / seconds,
        done,
        steps,
        remaining,
        usd / seconds * remaining,
    )
