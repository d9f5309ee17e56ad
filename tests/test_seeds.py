"""Every run strikes otherwise, and its seed repeats it."""

from __future__ import annotations

import os

import pytest

from tests import seeds


def test_every_run_draws_a_seed_of_its_own_and_one_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()
    for _ in range(5):
        monkeypatch.delenv(seeds.VARIABLE)
        seeds.pytest_configure()
        drawn.add(os.environ[seeds.VARIABLE])
    assert len(drawn) > 1
    monkeypatch.setenv(seeds.VARIABLE, "7")
    seeds.pytest_configure()
    assert os.environ[seeds.VARIABLE] == "7"
    assert seeds.chance("a").random() == seeds.chance("a").random() != seeds.chance("b").random()
