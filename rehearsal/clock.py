"""A progress line for stages that print nothing themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_S = 20.0


@contextmanager
def clock(every_s: float = EVERY_S) -> Iterator[None]:
    """Print how long it has taken so far, every `every_s` seconds until the block ends."""
    began, over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not over.wait(every_s):
            print(f"   … {time.monotonic() - began:.0f} s", flush=True)

    thread = threading.Thread(target=tick, name="clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
