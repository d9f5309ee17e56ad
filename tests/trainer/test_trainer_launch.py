"""The local launcher hands on what a scheduler needs: one exit code that means something."""

import pytest

from trainer.errors import UserError
from trainer.launch.local import job_exit_code, main, rank_environment


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
