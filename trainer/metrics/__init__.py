"""Records of steps and events: stored in the run, and shown on a terminal or in TensorBoard."""

from __future__ import annotations

from trainer.metrics.runlog import RunLog
from trainer.metrics.sink import Sink
from trainer.metrics.tensorboard import TensorBoardSink
from trainer.metrics.terminal import TerminalSink

__all__ = ["RunLog", "Sink", "TensorBoardSink", "TerminalSink"]
