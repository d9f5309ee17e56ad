"""The local launcher hands on what a scheduler needs: one exit code that means something."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import children_of, wait_until
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


@pytest.fixture
def endless(tmp_path: Path) -> Path:
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
    return config


def ends_with_a_checkpoint(job: subprocess.Popen[str], run: Path) -> None:
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=60)[1]
    assert job.returncode == EXIT_REQUEUE, said
    assert committed(open_store(str(run))), said


@pytest.mark.slow
def test_a_notice_to_the_launcher_before_any_rank_listens_ends_in_a_checkpoint_and_85(
    tmp_path: Path, endless: Path
) -> None:
    """`docker stop` of a container that has just begun; a rank that dies of it looks like a failure to every launcher."""
    command = [sys.executable, "-m", "trainer.launch.local", "--nproc", "2", "--", "train", str(endless)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: children_of(job.pid))
    ends_with_a_checkpoint(job, tmp_path / "run")


@pytest.mark.slow
def test_a_notice_while_a_rank_still_loads_torch_ends_in_a_checkpoint_and_85(tmp_path: Path, endless: Path) -> None:
    """Under a launcher that passes signals on and holds none, as torchrun."""
    job = subprocess.Popen([sys.executable, "-m", "trainer", "train", str(endless)], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: "/libtorch" in Path(f"/proc/{job.pid}/maps").read_text())
    ends_with_a_checkpoint(job, tmp_path / "run")
