"""Tests that share something costly or end what others look at run in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import distribution
from tests.distribution import group_of

ROOT = Path(__file__).parent.parent


def test_the_stacks_are_ended_by_the_process_that_brought_them_up_and_looked_at_them() -> None:
    assert group_of("tests/infra/test_stacks.py::test_a[x]") == group_of("tests/infra/test_stacks_change.py::test_b")


def test_a_file_that_shares_nothing_stands_alone() -> None:
    assert group_of("tests/trainer/test_trainer_train.py::test_a") == "tests/trainer/test_trainer_train.py"


@pytest.mark.parametrize("file", sorted({*distribution.SHARED} | {one for one in distribution.LONGEST if "/" in one}))
def test_a_renamed_file_does_not_leave_its_group_unnoticed(file: str) -> None:
    assert (ROOT / file).is_file()


def test_each_group_that_begins_first_has_files() -> None:
    assert {one for one in distribution.LONGEST if "/" not in one} <= set(distribution.SHARED.values())
