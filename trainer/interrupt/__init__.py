"""Notices that the capacity ends, from all sources, in one flag that the loop reads at every step."""

from __future__ import annotations

from trainer.interrupt.notice import Notice
from trainer.interrupt.watch import NoticeWatcher, config_problems

__all__ = ["Notice", "NoticeWatcher", "config_problems"]
