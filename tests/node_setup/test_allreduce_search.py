"""A fleet's all-reduce names the nodes that hold it back, all of them and nobody else, in a run of all and rounds of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_setup.allreduce.nccl_tests import floor
from node_setup.allreduce.pairs import Outcomes, Pair, Suspects, next_round, suspects, tournament
from node_setup.allreduce.search import measure

RECORDED = (Path(__file__).parent / "recorded" / "nccl" / "p5-2-nodes-srun.txt").read_text(encoding="utf-8")
NODES = [f"ip-10-1-0-{number}" for number in range(10, 26)]


class Fleet:
    """Prints what two p5.48xlarge once printed, with another figure where a slow node takes part: as slow as its slowest."""

    def __init__(self, slow: dict[str, float], kind: str = "p5.48xlarge") -> None:
        self.slow = slow
        self.size = str(floor(kind).bytes)
        self.rounds: list[int] = []

    def __call__(self, sets: Sequence[tuple[str, ...]]) -> list[str]:
        self.rounds.append(len(sets))
        assert len({node for one in sets for node in one}) == sum(map(len, sets))
        return [self.printed(nodes) for nodes in sets]

    def printed(self, nodes: tuple[str, ...]) -> str:
        figure = min((self.slow.get(node, 479.28) for node in nodes), default=0.0)
        if figure == 0:
            return "srun: error: node did not respond"
        return RECORDED.replace("8589934592 ", f"{self.size} ").replace("479.28", f"{figure:.2f}")


MANY = [f"n{number}" for number in range(64)]
P5, P5EN = "p5.48xlarge", "p5en.48xlarge"


@pytest.mark.parametrize(
    ("nodes", "kind", "slow", "status", "culprits", "rounds", "ended"),
    [
        (NODES[:2], P5, {}, "ok", (), [1], ""),
        (NODES, P5, {NODES[5]: 240.0}, "unmeasured", (NODES[5],), [1, 8, 2], ""),
        (NODES[:6], P5, {NODES[0]: 0.0}, "failed", (NODES[0],), None, ""),
        (NODES[:2], P5, {NODES[0]: 100.0}, "slow", (), None, ""),
        (NODES, P5EN, {NODES[3]: 200.0}, "unmeasured", (NODES[3],), None, ""),
        (NODES, P5, dict.fromkeys(NODES, 100.0), "unmeasured", (), [1, 8, 8, 8, 8], "every one of 32 pairs was bad"),
        (MANY, P5, dict.fromkeys(MANY, 0.0), "failed", (), [1, 32], "every one of 32 pairs ended without a result"),
        *((NODES[:3], P5, {dead: 0.0}, "failed", (dead,), None, "") for dead in NODES[:3]),
    ],
)
def test_slow_node_is_named_in_few_rounds_of_pairs(
    nodes: list[str],
    kind: str,
    slow: dict[str, float],
    status: str,
    culprits: tuple[str, ...],
    rounds: list[int] | None,
    ended: str,
) -> None:
    fleet = Fleet(slow, kind)
    said = measure(nodes, kind, 0, fleet)
    assert (said.all_nodes.status, said.suspects.culprits) == (status, culprits)
    assert fleet.rounds == (rounds or fleet.rounds)
    assert said.ended.startswith(ended)
    assert bool(said.ended) == bool(ended)
    assert said.suspects.open == (tuple(nodes) if status != "ok" and not culprits else ())


def test_no_round_begins_when_the_time_is_over() -> None:
    fleet = Fleet({NODES[5]: 240.0})
    said = measure(NODES, "p5.48xlarge", 0, fleet, lambda: "late" if len(fleet.rounds) == 2 else "")
    assert (fleet.rounds, said.suspects.culprits, said.ended) == ([1, 8], (), "late")


def test_one_node_is_no_all_reduce() -> None:
    with pytest.raises(ValueError, match="two or more"):
        measure(NODES[:1], "p5.48xlarge", 0, Fleet({}))


@given(st.sets(st.sampled_from(NODES), max_size=5), st.integers(8, 16))
def test_the_culprits_are_the_slow_nodes_and_nobody_else(slow: set[str], size: int) -> None:
    nodes = NODES[:size]
    said = measure(nodes, "p5.48xlarge", 0, Fleet(dict.fromkeys(slow, 200.0)))
    assert set(said.suspects.culprits) == slow & set(nodes)
    assert said.suspects.open == ()


SOME = [f"n{number}" for number in range(24)]


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
def test_tournament_has_every_pair_once_and_no_node_twice(size: int) -> None:
    nodes = SOME[:size]
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
    nodes = SOME[:size]
    bad = data.draw(st.sets(st.sampled_from(nodes), max_size=size - 2))
    said, _ = run(nodes, bad)
    assert set(said.cleared) == set(nodes) - bad
    assert (set(said.culprits), said.open) == (bad, ())


def test_where_every_run_is_bad_it_is_nobodys_fault_alone() -> None:
    said, rounds = run(SOME[:6], set(SOME[:6]))
    assert (said.culprits, said.open, rounds) == ((), tuple(SOME[:6]), 5)


def test_one_bad_run_convicts_nobody() -> None:
    outcomes: Outcomes = {frozenset("ab"): False, frozenset("bc"): True}
    assert suspects("abc", outcomes) == Suspects(("b", "c"), (), ("a",))
