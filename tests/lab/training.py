"""A run of the tiny task on several nodes, and the one without an interruption that it has to equal."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

from trainer.metrics.reader import read_events, read_steps
from trainer.node.launcher import LocalJob
from trainer.storage import open_store

ROOT = Path(__file__).parents[2]
STEPS = 1500
SHARDED_STEPS = 300
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    "LUSTRAIN_SILENT_S": "40",
}
"""What every node's launcher gets beside the path of the interpreter: also time for ranks that a busy machine does not run."""


def config(uri: str, hold: str = "", **train: object) -> str:
    """Settings of a run; `hold` names a file for which it waits once it has something to lose (`tiny_task`)."""
    settings = {"steps": STEPS, "global_batch": 4, "micro_batch": 2} | train
    lines = "\n".join(f"{key} = {value}" for key, value in settings.items())
    return f"""
[run]
uri = "{uri}"
[task]
name = "tests.trainer.tiny_task:Tiny"
hold = "{hold}"
[train]
{lines}
[optimizer]
lr = 0.01
[checkpoint]
every_steps = 20
[parallel]
device = "cpu"
"""


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_steps(open_store(str(run)))}


def attempts(run: Path) -> list[str]:
    """How each attempt began."""
    began = ("started", "resumed")
    return [event["event"] for event in read_events(open_store(str(run))) if event["event"] in began]


def mesh_sets(shard: int) -> list[str]:
    """Arguments that share a model out over so many ranks, in a run that is shorter since its steps take longer."""
    sets = {"parallel.shard": shard, "train.steps": STEPS if shard == 1 else SHARDED_STEPS}
    return [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]


def assert_equals_an_undisturbed_run(run: Path, shard: int = 1) -> None:
    """Compare every loss, to the last bit, with those of two ranks of this machine that nothing happened to."""
    assert len(undisturbed(shard)) == (STEPS if shard == 1 else SHARDED_STEPS)
    assert losses(run) == undisturbed(shard)


@functools.cache
def undisturbed(shard: int) -> dict[int, float]:
    with tempfile.TemporaryDirectory(prefix="lustrain-reference-") as folder:
        file = Path(folder, "config.toml")
        file.write_text(config(f"{folder}/reference"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        assert LocalJob(["train", str(file), *mesh_sets(shard)], 2, environment).wait() == 0
        return losses(Path(folder, "reference"))
