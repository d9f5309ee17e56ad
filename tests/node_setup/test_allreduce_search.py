"""A fleet's all-reduce names the node that holds it back, in a run of all and a few rounds of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.allreduce.nccl_tests import floor
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


def test_nodes_that_are_well_need_one_run() -> None:
    fleet = Fleet({})
    said = measure(NODES[:2], "p5.48xlarge", 0, fleet)
    assert (said.together.status, said.suspects.culprits, fleet.rounds) == ("ok", (), [1])


def test_the_slow_node_of_sixteen_is_named_in_two_rounds_of_pairs() -> None:
    fleet = Fleet({NODES[5]: 240.0})
    said = measure(NODES, "p5.48xlarge", 0, fleet)
    assert said.suspects.culprits == (NODES[5],)
    assert fleet.rounds == [1, 8, 2]


def test_a_node_that_fails_to_start_is_named_like_a_slow_one() -> None:
    said = measure(NODES[:6], "p5.48xlarge", 0, Fleet({NODES[0]: 0.0}))
    assert (said.together.status, said.suspects.culprits) == ("failed", (NODES[0],))


def test_two_slow_nodes_leave_open_which_one_it_is() -> None:
    said = measure(NODES[:2], "p5.48xlarge", 0, Fleet({NODES[0]: 100.0}))
    assert (said.together.status, said.suspects.culprits, said.suspects.open) == ("slow", (), tuple(NODES[:2]))


def test_without_a_floor_a_pair_is_told_by_the_other_pairs() -> None:
    said = measure(NODES, "p5en.48xlarge", 0, Fleet({NODES[3]: 200.0}, "p5en.48xlarge"))
    assert said.together.status == "unmeasured"
    assert said.suspects.culprits == (NODES[3],)


def test_where_no_pair_comes_to_a_result_the_search_ends_after_one_round_of_a_large_fleet() -> None:
    nodes = [f"n{number}" for number in range(64)]
    fleet = Fleet(dict.fromkeys(nodes, 0.0))
    said = measure(nodes, "p5.48xlarge", 0, fleet)
    assert (fleet.rounds, said.suspects.culprits, said.suspects.open) == ([1, 32], (), tuple(nodes))
    assert said.ended.startswith("every one of 32 pairs ended without a result")


def test_where_all_pairs_are_slow_the_search_ends_before_all_have_met_all() -> None:
    fleet = Fleet(dict.fromkeys(NODES, 100.0))
    said = measure(NODES, "p5.48xlarge", 0, fleet)
    assert fleet.rounds == [1, 8, 8, 8, 8]
    assert said.ended.startswith("every one of 32 pairs was bad")


@pytest.mark.parametrize("dead", range(3))
def test_the_dead_node_of_three_is_named_though_the_run_of_all_and_two_pairs_print_nothing(dead: int) -> None:
    said = measure(NODES[:3], "p5.48xlarge", 0, Fleet({NODES[dead]: 0.0}))
    assert (said.suspects.culprits, said.ended) == ((NODES[dead],), "")


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
