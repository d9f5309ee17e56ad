"""Pauses between tries."""

from __future__ import annotations

import random
from collections.abc import Callable

JITTER = random.SystemRandom().random
"""Not the process's own stream: a Task's numbers may come from there, and a retry must not change them."""


def pause_s(tried: int, first_s: float, longest_s: float, jitter: Callable[[], float] = JITTER) -> float:
    """Return the seconds to wait after `tried` tries: exponential with full jitter, so that many that failed together spread
    out.

    Source: M. Brooker, "Exponential Backoff And Jitter",
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/ (2015).
    """
    # 2.0 ** 1024 is an OverflowError.
    return jitter() * min(longest_s, first_s * 2.0 ** min(tried - 1, 60))
