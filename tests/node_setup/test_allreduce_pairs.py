"""Rounds of pairs name the bad nodes, all of them and nobody else."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_setup.allreduce.pairs import Outcomes, Pair, Suspects, next_round, suspects, tournament

NODES = [f"n{number}" for number in range(24)]


def run(nodes: list[str], bad: set[str]) -> tuple[Suspects, int]:
    """All rounds, where a run is bad when one of its nodes is; and how many rounds that took."""
    outcomes: dict[Pair, bool] = {}
    rounds = 0
    while pairs := next_round(nodes, outcomes):
        rounds += 1
        assert all(pair not in outcomes for pair in pairs)
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs), "nobody runs twice at once"
        outcomes |= {pair: not pair & bad for pair in pairs}
    return suspects(nodes, outcomes), rounds


@given(st.integers(0, 24))
def test_a_tournament_has_every_pair_once_and_nobody_twice_in_a_round(size: int) -> None:
    nodes = NODES[:size]
    rounds = tournament(nodes)
    assert sorted(map(sorted, (pair for pairs in rounds for pair in pairs))) == sorted(
        map(list, map(sorted, combinations(nodes, 2)))
    )
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(2, 24), st.data())
def test_the_bad_nodes_are_named_wherever_two_are_good(size: int, data: st.DataObject) -> None:
    nodes = NODES[:size]
    bad = data.draw(st.sets(st.sampled_from(nodes), max_size=size - 2))
    said, _ = run(nodes, bad)
    assert set(said.cleared) == set(nodes) - bad
    assert (set(said.culprits), said.open) == (bad, ())


def test_one_bad_node_among_sixteen_is_named_in_two_rounds() -> None:
    for node in NODES[:16]:
        said, rounds = run(NODES[:16], {node})
        assert (said.culprits, rounds) == ((node,), 2)


def test_two_nodes_that_fail_together_accuse_nobody() -> None:
    said, _ = run(["a", "b"], {"a"})
    assert said == Suspects((), (), ("a", "b"))


def test_where_every_run_is_bad_it_is_nobodys_fault_alone() -> None:
    said, rounds = run(NODES[:6], set(NODES[:6]))
    assert (said.culprits, said.open, rounds) == ((), tuple(NODES[:6]), 5)


def test_one_bad_run_convicts_nobody() -> None:
    outcomes: Outcomes = {frozenset("ab"): False, frozenset("bc"): True}
    assert suspects("abc", outcomes) == Suspects(("b", "c"), (), ("a",))
