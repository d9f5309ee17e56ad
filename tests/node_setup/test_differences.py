"""Which node is not like the others, and which is slower."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.allreduce.outliers import slow_ones
from node_setup.differences import Odd, odd_ones

ONE = dict.fromkeys(("n1", "n2", "n3", "n4"), "train")


def digests(key: str, **values: object) -> dict[str, dict[str, object]]:
    return {host: {key: value} for host, value in values.items()}


def test_the_node_with_another_driver_is_named() -> None:
    found = odd_ones(digests("gpu driver", n1="570", n2="570", n3="550", n4="570"), ONE)
    assert found == [Odd("train", "gpu driver", "570", {"n3": "550"})]
    assert found[0].why == "gpu driver: n3: 550; most have 570"


def test_equal_nodes_are_not_odd() -> None:
    assert odd_ones(digests("kernel", n1="6.8", n2="6.8"), ONE) == []


def test_without_a_majority_everyone_is_told() -> None:
    (odd,) = odd_ones(digests("kernel", n1="a", n2="a", n3="b", n4="b"), ONE)
    assert odd.majority is None
    assert odd.hosts == {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}
    assert odd.why.endswith("no majority")


def test_a_node_that_does_not_know_is_odd_where_most_do() -> None:
    (odd,) = odd_ones({"n1": {"driver": "570"}, "n2": {"driver": "570"}, "n3": {}}, ONE)
    assert odd.hosts == {"n3": None}
    assert odd.why == "driver: n3: unknown; most have 570"


def test_what_most_do_not_know_has_no_majority() -> None:
    (odd,) = odd_ones(digests("driver", n1=None, n2=None, n3="570"), ONE)
    assert odd.majority is None


def test_what_nobody_knows_is_no_difference() -> None:
    assert odd_ones(digests("driver", n1=None, n2=None), ONE) == []


def test_groups_are_not_compared_with_each_other() -> None:
    assert odd_ones(digests("gpus", n1=8, n2=8, head=0), {"n1": "train", "n2": "train", "head": "head"}) == []


def test_tables_are_compared_by_content() -> None:
    assert odd_ones(digests("clocks", n1={"a": 1, "b": 2}, n2={"b": 2, "a": 1}), ONE) == []


@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=9))
def test_the_majority_is_never_odd_and_everyone_else_is(values: list[str | None]) -> None:
    hosts = {f"n{number}": value for number, value in enumerate(values)}
    found = odd_ones({host: {"key": value} for host, value in hosts.items()}, {})
    if len(set(values)) == 1:
        assert found == []
        return
    (odd,) = found
    if odd.majority is None:
        assert odd.hosts == hosts
        assert all(2 * values.count(value) <= len(values) for value in ("a", "b"))
    else:
        assert 2 * values.count(odd.majority) > len(values)
        assert odd.hosts == {host: value for host, value in hosts.items() if value != odd.majority}


def test_the_slow_node_is_named() -> None:
    said = slow_ones({"n1": 478.0, "n2": 481.0, "n3": 480.0, "n4": 479.0, "n5": 290.0})
    assert list(said.slow) == ["n5"]
    assert said.slow["n5"] > 3.5
    assert said.median == 479.0


def test_the_slow_node_is_named_where_all_others_are_the_same() -> None:
    assert list(slow_ones({"n1": 480.0, "n2": 480.0, "n3": 480.0, "n4": 240.0}).slow) == ["n4"]


def test_a_faster_node_is_not_slow() -> None:
    assert slow_ones({"n1": 480.0, "n2": 480.0, "n3": 480.0, "n4": 960.0}).slow == {}


def test_noise_of_a_percent_is_not_slow() -> None:
    assert slow_ones({"n1": 480.0, "n2": 480.1, "n3": 480.0, "n4": 480.1, "n5": 475.0}).slow == {}


def test_three_values_are_too_few() -> None:
    said = slow_ones({"n1": 480.0, "n2": 480.0, "n3": 1.0})
    assert said.slow == {}
    assert "too few" in said.why


def test_a_node_without_a_figure_is_unmeasured_and_moves_no_median() -> None:
    said = slow_ones({"n1": 480.0, "n2": None, "n3": math.nan})
    assert (said.median, said.unmeasured) == (480.0, ("n2", "n3"))


@given(st.lists(st.floats(1, 1e4), min_size=4, max_size=40), st.floats(0.1, 10))
def test_who_is_slow_does_not_depend_on_the_unit(values: list[float], factor: float) -> None:
    ours = slow_ones({str(number): value for number, value in enumerate(values)})
    scaled = slow_ones({str(number): value * factor for number, value in enumerate(values)})
    for host in set(ours.slow) ^ set(scaled.slow):
        z = ours.slow.get(host) or scaled.slow[host]
        assert z == pytest.approx(3.5, rel=1e-6)


@given(st.lists(st.floats(100, 101), min_size=4, max_size=40), st.floats(0.1, 60))
def test_one_far_below_a_tight_field_is_always_found(values: list[float], value: float) -> None:
    said = slow_ones({**{str(number): one for number, one in enumerate(values)}, "slow": value})
    assert list(said.slow) == ["slow"]
