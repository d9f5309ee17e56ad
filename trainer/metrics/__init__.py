"""One record per step and one per event: stored in the run, and shown to whoever looks."""

from __future__ import annotations

from trainer.metrics.runlog import RunLog
from trainer.metrics.sink import Fanout, Sink

__all__ = ["Fanout", "RunLog", "Sink"]
