"""A run on any number of ranks: the same batches, the same numbers drawn, the same losses."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.trainer.tiny_runs import commits, events, newest, records, train, write_config
from trainer.checkpoint.format.layout import ManifestId

EARLIER = Path(__file__).parent / "earlier" / "two_ranks.tar.xz"
"""Six steps of the tiny Task on two ranks, with batches of 8 samples in micro-batches of 2. The trainer of commit 8676e83 made
them; its checkpoints also hold every rank's random streams."""
EARLIER_WEIGHTS = "ecc7c884e0c6d858"
"""Their checksum, as that trainer logged it when it resumed from step 6."""


def words(config: Path, *sets: str) -> list[str]:
    return ["train", str(config), *[word for pair in sets for word in ("--set", pair)]]


def earlier_run(folder: Path) -> Path:
    """Unpack the earlier run to `folder/earlier`, and return settings that resume it."""
    with tarfile.open(EARLIER) as archive:
        archive.extractall(folder, filter="data")
    return write_config(folder, 8, 2)


def test_random_streams_in_an_earlier_checkpoint_are_ignored(tmp_path: Path) -> None:
    config, run = earlier_run(tmp_path), tmp_path / "earlier"
    assert {name.split("/")[0] for name in newest(run)[1]} == {"model", "optim", "own"}
    assert train(config, f"run.uri={run}", "train.global_batch=8") == 0
    assert events(run, "resumed")[0]["weights_crc64nvme"] == EARLIER_WEIGHTS
    assert commits(run) == [ManifestId(1, 6), ManifestId(2, 8)]
    assert {name.split("/")[0] for name in newest(run)[1]} == {"model", "optim"}


@pytest.mark.slow
def test_numbers_that_a_task_draws_do_not_depend_on_the_ranks(fork_server: ForkServer, tmp_path: Path) -> None:
    config = write_config(tmp_path, 6, 2, more="[metrics]\nbatch_digest = true\n")
    assert train(config, f"run.uri={tmp_path}/1") == 0
    job = fork_server.start(words(config, f"run.uri={tmp_path}/2"), 2)
    assert job.wait() == [0, 0], job.said()
    one, two = ([record["batch_digest"] for record in records(tmp_path / name)] for name in ("1", "2"))
    assert len(one) == 6
    assert one == two
