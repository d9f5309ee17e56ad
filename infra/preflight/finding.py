"""What a rule says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lustrain.problem import plain

Level = Literal["error", "warning", "unknown"]
"""`unknown`: an online rule could not look (no permission, no network); that is never `ok`."""

UNREACHED = "could not be checked: AWS cannot be reached"
"""The message of every online rule where AWS did not even tell who asks."""


@dataclass(frozen=True)
class Finding:
    """One mistake: `path` names the key, `message` what is wrong with its value, `source` where AWS says so."""

    code: str
    level: Level
    path: str
    message: str
    fix: str
    source: str

    def line(self) -> str:
        return plain(f"{self.code} {self.level}: {self.path}: {self.message}; fix: {self.fix}")
