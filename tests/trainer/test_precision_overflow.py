"""A run in fp16 that can learn nothing ends, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainer.test_node_local import endless
from tests.trainer.tiny_task import Tiny
from trainer.__main__ import main
from trainer.config import PrecisionConfig
from trainer.errors import EXIT_FAILURE
from trainer.metrics.reader import read_steps
from trainer.step import precision
from trainer.storage import open_store


class Overflowing(Tiny):
    """Its loss is a number, its gradients never are."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * float("inf"))
        return model


@pytest.mark.slow
def test_gradients_that_are_never_finite_end_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sets = {
        "task.name": f"{__name__}:Overflowing",
        "precision.mode": "fp16",
        "precision.fp16_initial_scale": "1024",
    }
    words = [word for pair in sets.items() for word in ("--set", "=".join(pair))]
    assert main(["train", str(endless(tmp_path)), *words]) == EXIT_FAILURE
    store = open_store(f"{tmp_path}/run")
    assert all(record["skipped"] for record in read_steps(store))
    assert "precision.mode" in capfd.readouterr().err


def test_a_scale_that_is_of_no_use_is_not_gone_on_with() -> None:
    scaler = precision.make_scaler(PrecisionConfig(mode="fp16", fp16_initial_scale=1024.0), torch.device("cpu"))
    precision.load_scaler(scaler, {**precision.scaler_state(scaler), "scale": 0.0})
    assert scaler.get_scale() == 1024.0
