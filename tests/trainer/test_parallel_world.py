"""A rank finds its place from torchrun's variables, is alone without them, and says in one line what is wrong with them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.processes import wait_until
from tests.trainer.ranks import run_ranks
from trainer import parallel
from trainer.config import ParallelConfig
from trainer.errors import EXIT_FAILURE, EXIT_PEERS
from trainer.node.launcher import LOOPBACK, Placement

CPU = ParallelConfig(device="cpu")
TWO = Placement(2, (LOOPBACK, 29500)).environments({})[0]


def test_without_torchrun_one_rank_needs_no_process_group() -> None:
    world = parallel.join(CPU, {"SLURM_NTASKS": "1"})
    assert (world.rank, world.world_size, world.local_rank, world.device.type) == (0, 1, 0, "cpu")
    assert not dist.is_initialized()
    world.store.set("a", "b")
    assert world.store.get("a") == b"b"
    assert parallel.all_reduce_stats(world, [1.5, 2.0]) == [1.5, 2.0]
    world.close()


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (TWO | {"RANK": "x"}, ["RANK"]),
        ({"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}, ["MASTER_PORT", "WORLD_SIZE"]),
        (TWO | {"RANK": "-1", "MASTER_PORT": "http"}, ["MASTER_PORT", "RANK"]),
        (TWO | {"RANK": "2"}, ["RANK"]),
        (TWO | {"RANK": "9" * 5000, "MASTER_PORT": "70000"}, ["MASTER_PORT", "RANK"]),
        ({"SLURM_NTASKS": "2"}, ["SLURM_NTASKS"]),
    ],
)
def test_a_wrong_environment_is_named_whole(environment: dict[str, str], named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parallel.join(CPU, environment)
    assert sorted(line.split()[0] for line in caught.value.problems) == named


@pytest.mark.slow
def test_a_missing_partner_is_one_line_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    placement = Placement.alone(2)
    environment = placement.environments({})[1]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=r"^MASTER_ADDR:MASTER_PORT = '127\.0\.0\.1:\d+': rank 1 of 2 did not meet"
    ) as caught:
        parallel.join(ParallelConfig(device="cpu", timeout_s=1), environment)
    assert caught.value.exit_code == EXIT_PEERS, "a launcher must not take it for the user's mistake"
    assert capfd.readouterr().err == "", "the error says it; torch adds a page of C++ frames"


def meet(rank: int, folder: Path, attempts: str, timeout_s: int) -> int:
    """Joins as a rank of its attempt; 0, or the exit code."""
    # Ranks that came one after the other would miss each other on a busy machine, whatever attempts they are of.
    (folder / f"{rank} is ready").touch()
    wait_until(lambda: len(list(folder.iterdir())) == len(attempts))
    os.environ["LUSTRAIN_ATTEMPT"] = attempts[rank]
    try:
        parallel.join(ParallelConfig(device="cpu", timeout_s=timeout_s)).close()
    except UserError as error:
        return error.exit_code
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attempts", "code", "timeout_s"), [("11", 0, 300), ("12", EXIT_PEERS, 1)], ids=["one attempt", "two attempts"]
)
def test_ranks_of_two_attempts_never_meet(
    fork_server: ForkServer, tmp_path: Path, attempts: str, code: int, timeout_s: int
) -> None:
    assert fork_server.call(meet, 2, tmp_path, attempts, timeout_s) == [code, code]


def test_port_of_a_job_is_its_own_before_rank_0_listens() -> None:
    placement = Placement.alone(1)
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("0.0.0.0", placement.master[1]))
    store = dist.TCPStore(*placement.master, 1, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.slow
def test_taken_port_is_this_ranks_failure_and_not_a_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        environment = Placement(2, (LOOPBACK, taken.getsockname()[1])).environments({})[0]
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError) as caught:
            parallel.join(ParallelConfig(device="cpu", timeout_s=1), environment)
    assert caught.value.exit_code == EXIT_FAILURE


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"^parallel\.device = 'cuda': "):
        parallel.join(ParallelConfig(device="cuda"), {})


def exchange(world: parallel.World) -> Any:
    world.store.set(f"from/{world.rank}", str(world.rank))
    seen = [world.store.get(f"from/{rank}") for rank in range(world.world_size)]
    return parallel.all_reduce_stats(world, [2.0**40 + world.rank, 0.5, float(world.rank)]), seen


@pytest.mark.slow
def test_ranks_sum_in_double_precision_and_share_a_store(fork_server: ForkServer) -> None:
    for sums, seen in run_ranks(fork_server, 2, exchange):
        assert sums == [2.0**41 + 1, 1.0, 1.0], "fp32 would lose the 1"
        assert seen == [b"0", b"1"]
