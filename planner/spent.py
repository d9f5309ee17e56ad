"""What a run has cost so far by its own records, what interruptions were of it, and where it ends at this pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from launch.report import BETWEEN, GROWTH, STOP, account, cause_of_end, share_of_useful_steps
from trainer.metrics.reader import merge_steps

REPEATED, STARTS, STOPPED = "repeated steps", "starts", f"{BETWEEN}, after {STOP}"
"""Parts of `launch.report.account`: lost, as is other time between launches; lost but for the first start; not paid."""


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
    lost_usd: float
    """Starts after the first one, paid time between launches, and steps that were repeated, also after a roll back."""
    goodput: float
    """As in `trainer.metrics.goodput`, from the first launch to the last one's end."""
    step: int
    """The last one of the run's history, without steps that were undone."""
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
    """Return what nodes at `usd_hour` each have cost a run of `steps`; the launches are those of `launch.report.with_ends`.

    Nodes count from a launch to the next one, since they are paid while the run waits for another, but after a stop only to
    the launch's end: who stops a run gives its nodes back. Where their number changed, each share of the paid time costs
    the average. ValueError where there is no launch, or no step was done.
    """
    history = merge_steps(generations)
    shares = account(launches, generations) if launches else []
    has_paid_time = any(share.seconds > 0 for share in shares if share.name != STOPPED)
    goodput = share_of_useful_steps(launches, generations, launches[0]["started"]) if launches else None
    if not history or not has_paid_time or goodput is None:
        raise ValueError("nothing was trained yet")
    done = int(history[-1]["step"])
    until = [
        min(launch["ended"], after["started"]) if cause_of_end(launch) == STOP else after["started"]
        for launch, after in pairwise(launches)
    ] + [launches[-1]["ended"]]
    node_s = sum(
        (end - launch["started"]) * (len(launch["nodes"]) + len(launch.get("idle", ())))
        for launch, end in zip(launches, until, strict=True)
    )
    usd = node_s / 3600 * usd_hour
    paid = {share.name: 0.0 if share.name == STOPPED else share.seconds for share in shares}
    paid_s = sum(paid.values())
    again = paid[STARTS] * (len(launches) - 1) / len(launches)
    lost = paid[REPEATED] + again + sum(time for name, time in paid.items() if name.startswith(BETWEEN))
    remaining = paid_s / done * max(0, steps - done)
    return Spent(
        tuple(Share(share.name, share.seconds, usd * paid[share.name] / paid_s) for share in shares),
        node_s / 3600,
        usd,
        sum(cause_of_end(launch) not in (STOP, GROWTH) for launch in launches[:-1]),
        usd * lost / paid_s,
        goodput,
        done,
        steps,
        remaining,
        usd / paid_s * remaining,
    )
