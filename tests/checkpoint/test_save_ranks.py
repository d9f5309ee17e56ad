"""Promises of a save by several processes: every byte of every rank or no checkpoint, in a folder and in S3."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.checkpoint.saving import PATIENCE_S, sample_tensors
from tests.checkpoint.written import assert_holds, manifests_of
from tests.fork_server import ForkServer
from tests.lab.servers import S3Place
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.load.parts import read_manifest
from trainer.storage import open_store

pytestmark = pytest.mark.slow


@pytest.fixture
def board() -> TCPStore:
    """The store that votes go through, hosted outside the ranks as torchrun's agent does."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def save(
    server: ForkServer, world: int, board: TCPStore, uri: str, steps: int, *options: str
) -> tuple[list[list[str]], list[int]]:
    """What each rank printed, line by line, and how it ended."""
    job = server.start([str(board.port), uri, str(steps), *options], world, module="tests.checkpoint.saving_rank")
    codes = job.wait(4 * PATIENCE_S)
    return [rank.said().splitlines() for rank in job.ranks], codes


def test_ranks_store_shared_state_once_and_all_learn_the_commit(
    fork_server: ForkServer, board: TCPStore, tmp_path: Path
) -> None:
    uri = str(tmp_path / "run")
    said, codes = save(fork_server, 3, board, uri, 3)
    assert codes == [0, 0, 0], said
    assert said == [[f"{step} True committed" for step in (1, 2, 3)]] * 3
    store = open_store(uri)
    for step in (1, 2, 3):
        assert_holds(store, ManifestId(1, step), sample_tensors(step))
    manifest = read_manifest(store, ManifestId(1, 3))
    sizes = [part.data_size for part in manifest.parts]
    assert len(sizes) == manifest.world_size == 3
    assert max(sizes) < 0.4 * sum(sizes)


def test_rank_that_dies_in_a_save_costs_that_checkpoint_only(
    fork_server: ForkServer, board: TCPStore, tmp_path: Path
) -> None:
    uri = str(tmp_path / "run")
    (first, second), codes = save(fork_server, 2, board, uri, 2, "--dies", "1", "2")
    assert codes == [0, -signal.SIGKILL], first
    assert first[0] == second[0] == "1 True committed"
    assert len(second) == 1
    assert first[1].startswith("2 False no vote from rank 1")
    store = open_store(uri)
    assert manifests_of(store) == [ManifestId(1, 1)]
    assert_holds(store, ManifestId(1, 1), sample_tensors(1))


def test_ranks_save_to_s3(fork_server: ForkServer, board: TCPStore, s3: S3Place) -> None:
    said, codes = save(fork_server, 2, board, s3.uri(), 2)
    assert codes == [0, 0], said
    assert said == [["1 True committed", "2 True committed"]] * 2
    for step in (1, 2):
        assert_holds(open_store(s3.uri()), ManifestId(1, step), sample_tensors(step))
