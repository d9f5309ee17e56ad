"""A known end of the capacity: stop in time before it.

For an EC2 capacity block give the moment when EC2 begins to terminate the instances, which is 30 minutes before the
block's end date (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-monitor.html: the warning comes
40 minutes before the end and announces termination in 10 minutes).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime

from trainer.errors import UserError, problem
from trainer.interrupt.notice import Notice, OnEvent

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


def parse_rfc3339(text: str) -> float:
    """Unix seconds of an RFC 3339 time (https://www.rfc-editor.org/rfc/rfc3339#section-5.6); ValueError says what is wrong."""
    if not _RFC3339.fullmatch(text):
        raise ValueError("not an RFC 3339 time with a time zone")
    # A leap second (:60) is legal in RFC 3339, and datetime has no place for it.
    return datetime.fromisoformat(re.sub(r"(:\d\d):60", r"\1:59", text.upper())).timestamp()


def deadline_problems(text: str) -> list[str]:
    """The config problem with `interrupt.deadline`, if there is one."""
    try:
        parse_rfc3339(text)
    except ValueError as error:
        return [
            problem(
                "interrupt.deadline",
                text,
                str(error),
                allowed="date, time and zone",
                fix="write it like 2026-12-01T11:30:00Z",
            )
        ]
    return []


class Deadline:
    """Gives notice `margin_s` before the end, counted on the monotonic clock.

    `wall_clock` is asked once, at the first poll; give it `ObjectStore.now`, and a wrong clock on this machine does
    not matter. If it fails, this machine's clock is used and one warning says so.
    """

    def __init__(
        self,
        text: str,
        margin_s: float,
        *,
        wall_clock: Callable[[], float],
        monotonic: Callable[[], float],
        on_event: OnEvent,
    ) -> None:
        self._text = text
        self._end_unix = parse_rfc3339(text)
        self._margin_s = margin_s
        self._wall_clock = wall_clock
        self._monotonic = monotonic
        self._on_event = on_event
        self._end: float | None = None

    def poll(self) -> Notice | None:
        if self._end is None:
            asked = self._monotonic()
            self._end = asked + self._end_unix - self._unix_now()
        if self._monotonic() < self._end - self._margin_s:
            return None
        return Notice("deadline", f"capacity ends at {self._text}", self._end)

    def _unix_now(self) -> float:
        try:
            return self._wall_clock()
        except (UserError, OSError) as error:
            detail = f"cannot ask the store for the time, using this machine's clock: {error}"
            self._on_event("warning", {"source": "deadline", "detail": detail})
            return time.time()
