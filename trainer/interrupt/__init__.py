"""Notices that the capacity ends, from all sources, in one flag that the loop reads at every step."""

from __future__ import annotations

from trainer.interrupt.notice import Notice
from trainer.interrupt.watch import Watch, config_problems

__all__ = ["Notice", "Watch", "config_problems"]
