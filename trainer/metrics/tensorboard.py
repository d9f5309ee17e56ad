"""TensorBoard event files, for those who have TensorBoard (the `tensorboard` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lustrain.problem import UserError, problem

SCALARS = {
    "loss": "train/loss",
    "eval_loss": "eval/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "blocked_seconds": "speed/blocked_seconds",
    "world_size": "run/world_size",
    "attempt": "run/attempt",
}


class TensorBoardSink:
    """A Sink that writes scalars and events under `folder`.

    `first_step` is the first step that this attempt computes: TensorBoard then hides what an earlier attempt had
    computed beyond it. Raises UserError when the package is missing or the folder cannot be written.
    """

    def __init__(self, folder: str, *, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            why, fix = (
                "the tensorboard package is not installed",
                "pip install 'lustrain[tensorboard]', or leave it out",
            )
            raise UserError(problem("metrics.tensorboard", folder, why, fix=fix)) from error
        try:
            self._writer = SummaryWriter(folder, purge_step=first_step)
        except OSError as error:
            raise UserError(problem("metrics.tensorboard", folder, f"cannot be written: {error}")) from error
        self._step = first_step

    def step(self, record: Mapping[str, Any]) -> None:
        self._step = int(record["step"])
        for name, tag in SCALARS.items():
            if name in record:
                self._writer.add_scalar(tag, float(record[name]), self._step)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        from trainer.metrics.terminal import event_line

        self._writer.add_text("events", event_line(kind, fields), self._step)

    def close(self) -> None:
        self._writer.close()
