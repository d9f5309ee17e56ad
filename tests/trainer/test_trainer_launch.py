"""The local launcher hands on what a scheduler needs: one exit code that means something."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint.lease import committed
from trainer.errors import EXIT_REQUEUE, UserError
from trainer.launch.local import job_exit_code, main, rank_environment
from trainer.storage import open_store


@pytest.mark.parametrize(
    ("codes", "job"),
    [
        ([0, 0], 0),
        ([85, 85], 85),
        ([0, 85], 85),
        ([86, 86], 86),
        ([-9, 86], 86),
        ([2, -15], 2),
        ([-9, -9], 1),
        ([-9, 85], 1),
        ([1, -15], 1),
        ([3, 85], 3),
    ],
)
def test_the_job_ends_with_the_most_telling_code(codes: list[int], job: int) -> None:
    assert job_exit_code(codes) == job


def test_ranks_meet_on_loopback_and_the_users_thread_count_wins() -> None:
    environment = rank_environment(1, 2, 1234, {"OMP_NUM_THREADS": "7"})
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("1", "2")
    assert environment["OMP_NUM_THREADS"] == "7"


def test_no_ranks_is_a_mistake_in_one_line() -> None:
    with pytest.raises(UserError, match="--nproc = 0"):
        main(["--nproc", "0", "--", "train", "x.toml"])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def maps(pid: int, name: str) -> bool:
    return name in Path(f"/proc/{pid}/maps").read_text()


def wait_until(reached: Callable[[], bool], patience_s: float = 60.0) -> None:
    ends = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("loaded", ["/python", "/libtorch_cpu.so"])
def test_a_notice_while_the_ranks_still_load_torch_ends_in_a_checkpoint_and_85(tmp_path: Path, loaded: str) -> None:
    """`docker stop` of a container that has just begun; a rank that dies of it looks like a failure to every launcher."""
    config = tmp_path / "config.toml"
    config.write_text(
        f"""
[run]
uri = "{tmp_path}/run"
[task]
name = "tests.trainer.tiny_task:Tiny"
[train]
steps = 1000000
global_batch = 4
micro_batch = 2
[optimizer]
lr = 0.01
[parallel]
device = "cpu"
[interrupt]
metadata = false
"""
    )
    command = [sys.executable, "-m", "trainer.launch.local", "--nproc", "2", "--", "train", str(config)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(ranks := children(job.pid)) == 2 and all(maps(rank, loaded) for rank in ranks))
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=60)[1]
    assert job.returncode == EXIT_REQUEUE, said
    assert committed(open_store(f"{tmp_path}/run")), said
