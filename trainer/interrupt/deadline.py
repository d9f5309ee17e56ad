"""A known end of the capacity: stop in time before it.

For an EC2 capacity block give the moment when EC2 begins to terminate the instances, which is 30 minutes before the
block's end date (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-monitor.html: the warning comes
40 minutes before the end and announces termination in 10 minutes).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lustrain.problem import UserError
from trainer.config import parse_time
from trainer.interrupt.notice import Notice, OnEvent


class Deadline:
    """Gives notice `margin_s` before the end, counted on the monotonic clock.

    `wall_clock` is called until it returns a time, once; None means not yet. With `ObjectStore.now` a wrong clock on this
    machine does not matter. If it fails, this machine's clock is used, and one warning says so.
    """

    def __init__(
        self,
        text: str,
        margin_s: float,
        *,
        wall_clock: Callable[[], float | None],
        monotonic: Callable[[], float],
        on_event: OnEvent,
    ) -> None:
        self._text = text
        self._end_unix = parse_time(text)
        self._margin_s = margin_s
        self._wall_clock = wall_clock
        self._monotonic = monotonic
        self._on_event = on_event
        self._end: float | None = None

    def poll(self) -> Notice | None:
        if self._end is None:
            requested = self._monotonic()
            now = self._unix_now()
            if now is None:
                return None
            self._end = requested + self._end_unix - now
        if self._monotonic() < self._end - self._margin_s:
            return None
        return Notice("deadline", f"capacity ends at {self._text}", self._end)

    def _unix_now(self) -> float | None:
        try:
            return self._wall_clock()
        except (UserError, OSError) as error:
            detail = f"cannot read the store's clock, so this machine's clock is used: {error}"
            self._on_event("warning", {"source": "deadline", "detail": detail})
            return time.time()
