"""Ranks of different versions of Lustrain do not start together: one could commit what another has not stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.trainer.ranks import run_threads
from tests.trainer.tiny_runs import train, write_config
from trainer.config import load
from trainer.errors import EXIT_CONFIG
from trainer.parallel import World
from trainer.parallel.agree import run_on_all_ranks
from trainer.parallel.votes import RankGoneError, StoreVotes
from trainer.run import versions
from trainer.run.start import check_fit_and_versions
from trainer.run.versions import this_version, version_problems
from trainer.tasks import make_task

Start = Callable[[int, StoreVotes], Any]


def started(starts: list[Start]) -> list[Any]:
    """Return what each rank's start returns or raises."""
    store = HashStore()
    return run_threads(len(starts), lambda rank: starts[rank](rank, StoreVotes(store, len(starts))))


def start_of_earlier_version(rank: int, votes: StoreVotes) -> Any:
    """Its first exchange carries no version, and its next one waits for all ranks."""
    run_on_all_ranks(votes, rank, "start/fit", lambda: None)
    return run_on_all_ranks(votes, rank, "start/store", lambda: None)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    config = load(write_config(tmp_path, 8, 1), [])

    def checked(rank: int, votes: StoreVotes) -> Any:
        world = World(rank, votes.world_size, rank, torch.device("cpu"), HashStore())
        task = make_task(config.task, seed=0)
        return check_fit_and_versions(config, task, world, votes, lambda kind, fields: None)

    return checked


def test_ranks_of_one_version_start(start: Start) -> None:
    assert started([start, start]) == [None, None]


@pytest.mark.parametrize("earlier", [0, 2])
def test_rank_of_an_earlier_version_stops_the_start(start: Start, earlier: int) -> None:
    ends = started([start_of_earlier_version if rank == earlier else start for rank in range(3)])
    for error in (end for rank, end in enumerate(ends) if rank != earlier):
        assert isinstance(error, UserError)
        assert [(line.partition(" = ")[0], error.exit_code) for line in error.problems] == [("lustrain", EXIT_CONFIG)]
    # An earlier rank 0 compares nothing: it learns that the others have left.
    assert isinstance(ends[earlier], UserError if earlier else RankGoneError)


def test_line_names_each_version_and_its_ranks() -> None:
    mine = this_version()
    other = {**mine, "save_protocol": mine["save_protocol"] + 1}
    assert version_problems(dict.fromkeys(range(3), mine)) == []
    (line,) = version_problems({0: mine, 1: other, 2: mine, 3: {}, **dict.fromkeys(range(4, 10), other)})
    assert "ranks 0, 2" in line
    assert "ranks 1, 4, 5, 6 and 3 more" in line
    assert "an earlier version on rank 3" in line
    assert len(version_problems({0: mine, 1: {**mine, "lustrain": "0.0.9"}})) == 1


def train_with_version(rank: int, config: Path) -> int:
    versions.SAVE_PROTOCOL += rank
    return train(config)


@pytest.mark.slow
def test_job_of_two_versions_ends_before_it_claims_the_run(fork_server: ForkServer, tmp_path: Path) -> None:
    codes = fork_server.call(train_with_version, 2, write_config(tmp_path, 2, 1))
    assert codes == [EXIT_CONFIG] * 2
    assert not (tmp_path / "run").exists()
