"""When Prometheus scraped last, and whether it comes once more before a finished run stops serving."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

LAST_SCRAPE_S = 45.0
"""How long a finished run serves its end. Launchers of other nodes wait longer: `trainer.node.launcher.LINGER_S`."""
EXPECTED_WITHIN_S = 120.0
"""A scraper that came so lately is expected again: twice Prometheus's default interval
(https://prometheus.io/docs/prometheus/latest/configuration/configuration/#configuration-file)."""


class Scrapes:
    """A collector without metrics, which notes when each scrape begins: registered first, it is collected before the others."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._newest: float | None = None
        self._next = threading.Event()

    def collect(self) -> Iterator[Metric]:
        self._newest = self._monotonic()
        self._next.set()
        return iter(())

    def expect_next(self) -> None:
        """Have `wait_for_next` wait for a scrape that begins from now on."""
        self._next.clear()

    def wait_for_next(self, timeout_s: float = LAST_SCRAPE_S) -> bool:
        """Wait for the scrape after `expect_next` and return whether it began; does not wait where no scraper is expected."""
        newest = self._newest
        if newest is None or self._monotonic() - newest > EXPECTED_WITHIN_S:
            return False
        return self._next.wait(timeout_s)
