"""The words in which reports say how a thing is: settings of a node, checks of its health.

Standard library and Python 3.9 only: the node agent carries this file too.
"""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """A text in JSON and in messages; the later one is the worse. What could not be read is UNKNOWN and never OK."""

    SKIPPED = "skipped"
    """It does not apply here."""
    OK = "ok"
    CHANGED = "changed"
    """It was changed, and read back."""
    CHANGE = "change"
    """A plan would change it."""
    REBOOT = "reboot"
    """It is in place on disk and waits for a reboot or a remount."""
    WARNING = "warning"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    """A file that is not ours wins at the next boot."""
    FAILED = "failed"

    # Enum's own text is `Status.OK`, and in a format it depends on the version of Python.
    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form)
