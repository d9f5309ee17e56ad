"""The tiny task with steps that take a while, so that a run lasts as long as what happens to it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from tests.trainer.tiny_task import Tiny, TinyOptions
from trainer.config import Section
from trainer.tasks import Batch, Ids


class PacedOptions(TinyOptions):
    pace_s: float = 0.0
    """Seconds that each training batch takes at least, as long as the file `until` is not there."""
    until: str = ""


class Paced(Tiny):
    Options: ClassVar[type[Section]] = PacedOptions

    def train_batch(self, ids: Ids) -> Batch:
        if self.options.pace_s and not Path(self.options.until).exists():
            time.sleep(self.options.pace_s)
        return super().train_batch(ids)
