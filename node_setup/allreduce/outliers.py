"""Nodes and pairs that are slower than the others, by the median of all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

FEWEST = 4
"""With fewer values a median cannot tell which of them is off."""
CUT = 3.5
"""This is the cut of the modified z-score (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993)."""
LEAST_SHARE = 0.03
"""Values within this share of the median differ by noise only."""
_MAD_TO_SIGMA = 1.4826
"""This is the standard deviation of normal values by the median of their absolute deviations (the same source)."""


@dataclass(frozen=True)
class SlowHosts:
    """These are the slow hosts: `slow` maps hosts to how many robust standard deviations they lie below the median; `why` says
    why nothing was judged."""

    median: float | None
    slow: Mapping[str, float]
    unmeasured: tuple[str, ...] = ()
    why: str = ""


def find_slow_hosts(values: Mapping[str, float | None]) -> SlowHosts:
    """Return the hosts far below the median of all, which a few bad ones do not move; higher is better. Values that are not
    finite numbers are not measured."""
    measured = {host: value for host, value in values.items() if value is not None and math.isfinite(value)}
    unmeasured = tuple(host for host in values if host not in measured)
    if not measured:
        return SlowHosts(None, {}, unmeasured, "nothing was measured")
    middle = median(measured.values())
    if len(measured) < FEWEST:
        return SlowHosts(
            middle, {}, unmeasured, f"{len(measured)} values are too few to tell which is off; {FEWEST} at least"
        )
    gaps = {host: middle - value for host, value in measured.items()}
    # The floor also stands in for the spread where more than half of the values are the same and it is zero.
    spread = max(_MAD_TO_SIGMA * median(map(abs, gaps.values())), LEAST_SHARE * abs(middle) / CUT)
    slow = {host: gap / spread for host, gap in gaps.items() if gap > CUT * spread}
    return SlowHosts(middle, slow, unmeasured)
