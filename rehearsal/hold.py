"""What the stack's Slurm trains in the rehearsal: the language model, in a run that does not end before its interruptions."""

from __future__ import annotations

import time
from pathlib import Path

from trainer.tasks import Batch, Ids
from trainer.tasks.language_model import LanguageModel, LanguageModelOptions

NAME = f"{__name__}:HeldLanguageModel"
POLL_S = 0.05


class HeldOptions(LanguageModelOptions):
    hold: str = ""
    """A file that each launch waits for in one of its evaluations."""
    hold_evaluation: int = 0
    """Which one that is, from 1; 0 for none."""


class HeldLanguageModel(LanguageModel):
    """Waits in an evaluation, because the watchdog would kill a step that long."""

    Options = HeldOptions
    options: HeldOptions
    _first: list[int] | None = None
    _evaluations = 0

    def eval_batch(self, ids: Ids) -> Batch:
        # Every evaluation begins with the same samples.
        self._first = self._first or ids.tolist()
        if ids.tolist() == self._first:
            self._evaluations += 1
            while self._evaluations == self.options.hold_evaluation and not Path(self.options.hold).exists():
                time.sleep(POLL_S)
        return super().eval_batch(ids)
