"""Retries: how often, and with which pauses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from lustrain.backoff import pause_s

LONGEST_ASKED_S = 60.0


@dataclass(frozen=True)
class Patience:
    """Tries in all, and seconds between them: doubled each time up to `longest_s`, of which half is left to chance."""

    tries: int = 6
    first_s: float = 0.5
    longest_s: float = 15.0

    def pause(self, tried: int, asked_s: float | None = None) -> float:
        """Seconds before the next try, after `tried` of them; not less than was asked for, up to a minute."""
        pause = pause_s(tried, self.first_s, self.longest_s, draw=lambda: random.uniform(0.5, 1))
        return max(pause, min(asked_s or 0, LONGEST_ASKED_S))


def asked(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None without one that can be read."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
