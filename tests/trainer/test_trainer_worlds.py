"""A run on any number of ranks: the same batches, the same numbers drawn, the same losses."""

from __future__ import annotations

import signal
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.processes import wait_until
from tests.trainer.tiny_runs import commits, events, newest, records, train, write_config
from tests.trainer.tiny_task import Tiny, TinyOptions
from trainer.checkpoint.format.layout import ManifestId
from trainer.config import Config, load
from trainer.loop import Progress, micro_batches
from trainer.parallel import World
from trainer.run.start import check_fit
from trainer.step.passes import passes
from trainer.tasks import make_task

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


def world_of(rank: int, ranks: int) -> World:
    return World(rank, ranks, rank, torch.device("cpu"), torch.distributed.HashStore())


def check_fit_of(config: Config, ranks: int) -> str:
    """Return the one line with which so many ranks are refused; empty where they are not."""
    try:
        check_fit(config, make_task(config.task, seed=0), world_of(0, ranks), lambda kind, fields: None)
    except UserError as error:
        (line,) = error.problems
        return str(line)
    return ""


@pytest.mark.slow
def test_any_number_of_ranks_sees_the_same_batches_and_losses(fork_server: ForkServer, tmp_path: Path) -> None:
    """Five micro-batches a step on 1 to 4 ranks: of all but one rank, some make a pass that does not count."""
    sets = ("train.global_batch=10", "task.samples=512", "eval.every=26", "metrics.batch_digest=true")
    config = write_config(tmp_path, 52, 2, every_steps=1000)
    assert train(config, f"run.uri={tmp_path}/1", *sets) == 0
    one = records(tmp_path / "1")
    assert one[-1]["tokens"] >= 512
    for ranks in (2, 3, 4):
        job = fork_server.start(words(config, f"run.uri={tmp_path}/{ranks}", *sets), ranks)
        assert job.wait() == [0] * ranks, job.said()
        found = records(tmp_path / str(ranks))
        for exact in ("step", "batch_digest", "tokens", "lr"):
            assert [record[exact] for record in found] == [record[exact] for record in one], (exact, ranks)
        for close in ("loss", "eval_loss", "grad_norm"):
            expected = [record[close] for record in one if close in record]
            assert [record[close] for record in found if close in record] == pytest.approx(expected, rel=1e-6, abs=0)


def killed_and_resumed(fork_server: ForkServer, folder: Path, command: Sequence[str], ranks: int, then: int) -> int:
    """Kill a run that waits for the file `go` once it has committed, let `then` ranks end it, and return the step committed."""
    killed = fork_server.start(command, ranks)
    wait_until(lambda: commits(folder / "run"))
    killed.send(signal.SIGKILL)
    assert killed.wait() == [-signal.SIGKILL] * ranks
    committed = commits(folder / "run")[-1].step
    (folder / "go").touch()
    resumed = fork_server.start(command, then)
    assert resumed.wait() == [0] * then, resumed.said()
    return committed


@pytest.mark.slow
def test_a_killed_run_of_three_uneven_ranks_resumes_bit_for_bit(fork_server: ForkServer, tmp_path: Path) -> None:
    """Four micro-batches on three ranks. The run waits before step 50, until it is killed."""
    sets = ("train.global_batch=8", "eval.every=20", f"task.hold={tmp_path}/go")
    config = write_config(tmp_path, 60, 2, every_steps=10)
    newest_step = killed_and_resumed(fork_server, tmp_path, words(config, *sets), 3, 3)
    whole = fork_server.start(words(config, *sets, f"run.uri={tmp_path}/whole"), 3)
    assert whole.wait() == [0] * 3, whole.said()
    assert events(tmp_path / "run", "resumed")[0]["step"] == newest_step
    numbers = ("step", "loss", "grad_norm", "eval_loss")
    found, expected = (
        [[record.get(name) for name in numbers] for record in records(tmp_path / run)] for run in ("run", "whole")
    )
    assert len(expected) == 60
    assert found == expected
    assert newest(tmp_path / "run")[1] == newest(tmp_path / "whole")[1]


@pytest.mark.slow
def test_run_of_four_ranks_that_loses_one_goes_on_with_three(fork_server: ForkServer, tmp_path: Path) -> None:
    """Eight micro-batches a step, which three ranks cannot share evenly. The four wait before step 50 until they are killed."""
    sets = ("train.global_batch=16", "metrics.batch_digest=true", f"task.hold={tmp_path}/go")
    config = write_config(tmp_path, 60, 2, every_steps=10)
    committed = killed_and_resumed(fork_server, tmp_path, words(config, *sets), 4, 3)
    (resumed,) = events(tmp_path / "run", "resumed")
    assert (resumed["step"], resumed["saved_world_size"]) == (committed, 4)
    assert train(config, *sets, f"run.uri={tmp_path}/whole") == 0
    found, expected = records(tmp_path / "run"), records(tmp_path / "whole")
    assert {record["world_size"] for record in found} == {4, 3}
    for exact in ("step", "batch_digest"):
        assert [record[exact] for record in found] == [record[exact] for record in expected]
    for close in ("loss", "grad_norm"):
        assert [record[close] for record in found] == pytest.approx([one[close] for one in expected], rel=1e-6, abs=0)


def test_a_surplus_pass_is_the_ranks_first_one_again(tmp_path: Path) -> None:
    """The same samples and the same numbers drawn: its gradient is finite where that of the first is."""
    task = Tiny(TinyOptions(), seed=1)
    task.open(tmp_path)
    training: Any = SimpleNamespace(
        config=load(write_config(tmp_path, 8, 2), ["train.global_batch=6"]),
        task=task,
        passes=lambda count: passes(count, 1, 2),
        progress=Progress(),
    )
    made = [(one.counts, batch["x"], torch.rand(4)) for one, batch, _ in micro_batches(training, 5)]
    (counts, *first), (surplus, *again) = made
    assert (counts, surplus) == (True, False)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("sets", "ranks", "line"),
    [
        ([], 2, ""),
        ([], 3, "train.micro_batch = 2: a step has 2 micro-batches, fewer than the 3 ranks; allowed: divisors of 4 up to 1"),
        ([], 5, "train.micro_batch = 2: a step has 2 micro-batches, fewer than the 5 ranks; fix: "),
        (["train.micro_batch=1"], 3, ""),
        (["parallel.tensor=2"], 4, "parallel.tensor = 2: the Task Tiny has no tensor_plan; allowed: 1; fix: "),
        (["train.micro_batch=3"], 1, "train.global_batch = 4: is not a multiple of micro_batch = 3; allowed: "),
    ],
)  # fmt: skip
def test_more_ranks_than_micro_batches_are_refused(tmp_path: Path, sets: list[str], ranks: int, line: str) -> None:
    refused = check_fit_of(load(write_config(tmp_path, 8, 2), sets), ranks)
    assert refused.startswith(line)
    assert bool(refused) == bool(line)


@pytest.mark.slow
def test_an_earlier_checkpoint_of_two_ranks_resumes_on_three(fork_server: ForkServer, tmp_path: Path) -> None:
    config, run = earlier_run(tmp_path), tmp_path / "earlier"
    job = fork_server.start(words(config, f"run.uri={run}", "train.global_batch=8"), 3)
    assert job.wait() == [0] * 3, job.said()
    (resumed,) = events(run, "resumed")
    assert (resumed["step"], resumed["saved_world_size"], resumed["weights_crc64nvme"]) == (6, 2, EARLIER_WEIGHTS)
    assert [record["step"] for record in records(run)] == list(range(1, 9))
    assert commits(run) == [ManifestId(1, 6), ManifestId(2, 8)]


def test_random_streams_in_an_earlier_checkpoint_are_ignored(tmp_path: Path) -> None:
    config, run = earlier_run(tmp_path), tmp_path / "earlier"
    assert {name.split("/")[0] for name in newest(run)[1]} == {"model", "optim", "own"}
    assert train(config, f"run.uri={run}", "train.global_batch=8") == 0
    assert events(run, "resumed")[0]["weights_crc64nvme"] == EARLIER_WEIGHTS
    assert commits(run) == [ManifestId(1, 6), ManifestId(2, 8)]
    assert {name.split("/")[0] for name in newest(run)[1]} == {"model", "optim"}
