"""What is drawn for a noisy world, and what its verdict finds in a journal."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.torture.noise import SPANS, Struck, complaints, draw

STEPS = 60


def records(**changes: Any) -> list[dict[str, Any]]:
    """Two launches that add up, the first of which lost node2; `changes` are of the second."""
    first = {
        "attempt": 1, "nodes": ["node2", "node3"], "started": 0.0, "ended": 100.0, "code": 75, "generation": 1,
        "from_step": 0, "gained": 20, "blamed": ["node2"],
    }  # fmt: skip
    second = {
        "attempt": 2, "nodes": ["node3", "node4"], "started": 110.0, "ended": 200.0, "code": 0, "generation": 2,
        "from_step": 20, "gained": 40, "blamed": [],
    }  # fmt: skip
    return [first, {key: value for key, value in (second | changes).items() if value is not None}]


CRASH = Struck("crash", "node2", 90.0, 120.0)


def test_same_seed_draws_same_faults() -> None:
    assert draw(Random("7"), 30) == draw(Random("7"), 30)
    assert draw(Random("7"), 30) != draw(Random("8"), 30)


def test_each_kind_comes_before_any_comes_again() -> None:
    kinds = [fault.kind for fault in draw(Random("7"), 2 * len(SPANS))]
    assert sorted(kinds[: len(SPANS)]) == sorted(kinds[len(SPANS) :]) == sorted(SPANS)


def test_journal_that_adds_up_has_no_complaint() -> None:
    assert complaints(records(), [CRASH], STEPS) == []


@pytest.mark.parametrize(
    ("changes", "struck"),
    [
        ({"ended": None}, [CRASH]),
        ({"attempt": 3}, [CRASH]),
        ({"generation": 1}, [CRASH]),
        ({"from_step": 10, "gained": 50}, [CRASH]),
        ({"started": 99.0}, [CRASH]),
        ({"gained": 30}, [CRASH]),
        ({"code": 75}, [CRASH]),
        ({}, []),
        ({}, [Struck("crash", "node3", 90.0, 120.0)]),
        ({}, [Struck("slurmctld", "node2", 90.0, 90.0)]),
        ({"blamed": ["node3"]}, [CRASH, Struck("crash", "node3", 20.0, 40.0)]),
    ],
)
def test_journal_that_does_not_add_up_is_named(changes: dict[str, Any], struck: list[Struck]) -> None:
    assert len(complaints(records(**changes), struck, STEPS)) == 1
