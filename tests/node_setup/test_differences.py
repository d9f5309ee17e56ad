"""Which node is not like the others, and which is slower."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.allreduce.outliers import find_slow_hosts
from node_setup.differences import Difference, find_differences

ONE = dict.fromkeys(("n1", "n2", "n3", "n4"), "train")


def digests(key: str, **values: object) -> dict[str, dict[str, object]]:
    return {host: {key: value} for host, value in values.items()}


@pytest.mark.parametrize(
    ("digests", "why"),
    [
        (digests("gpu driver", n1="570", n2="570", n3="550", n4="570"), "gpu driver: n3: 550; most have 570"),
        ({"n1": {"driver": "570"}, "n2": {"driver": "570"}, "n3": {}}, "driver: n3: unknown; most have 570"),
        (digests("kernel", n1="a", n2="a", n3="b", n4="b"), "kernel: n1: a, n2: a, n3: b, n4: b; no majority"),
    ],
)
def test_the_node_with_another_driver_is_named(digests: dict[str, dict[str, object]], why: str) -> None:
    assert [odd.why for odd in find_differences(digests, ONE)] == [why]


def test_facts_are_compared_by_content_within_a_group() -> None:
    assert find_differences(digests("gpus", n1=8, n2=8, head=0), {"n1": "train", "n2": "train", "head": "head"}) == []
    assert find_differences(digests("clocks", n1={"a": 1, "b": 2}, n2={"b": 2, "a": 1}), ONE) == []


@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=9))
def test_the_majority_is_never_odd_and_everyone_else_is(values: list[str | None]) -> None:
    hosts = {f"n{number}": value for number, value in enumerate(values)}
    found = find_differences({host: {"key": value} for host, value in hosts.items()}, dict.fromkeys(hosts, "train"))
    most = next((value for value in ("a", "b") if 2 * values.count(value) > len(values)), None)
    odd = {host: value for host, value in hosts.items() if most is None or value != most}
    assert found == ([] if len(set(values)) == 1 else [Difference("train", "key", most, odd)])


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ((478.0, 481.0, 480.0, 479.0, 290.0), ["n4"]),
        ((480.0, 480.0, 480.0, 240.0), ["n3"]),
        ((480.0, 480.0, 480.0, 960.0), []),
        ((480.0, 480.1, 480.0, 480.1, 475.0), []),
        ((480.0, 480.0, 1.0), []),
    ],
    ids=["slow", "all others the same", "faster", "noise of a percent", "three are too few"],
)
def test_the_slow_node_is_named(values: tuple[float, ...], slow: list[str]) -> None:
    assert list(find_slow_hosts({f"n{number}": value for number, value in enumerate(values)}).slow) == slow


def test_unmeasured_node_moves_no_median_and_few_are_reported() -> None:
    said = find_slow_hosts({"n1": 480.0, "n2": None, "n3": math.nan})
    assert (said.median, said.unmeasured, "too few" in said.why) == (480.0, ("n2", "n3"), True)


@given(st.lists(st.floats(1, 1e4), min_size=4, max_size=40), st.floats(0.1, 10))
def test_who_is_slow_does_not_depend_on_the_unit(values: list[float], factor: float) -> None:
    ours = find_slow_hosts({str(number): value for number, value in enumerate(values)})
    scaled = find_slow_hosts({str(number): value * factor for number, value in enumerate(values)})
    for host in set(ours.slow) ^ set(scaled.slow):
        z = ours.slow.get(host) or scaled.slow[host]
        assert z == pytest.approx(3.5, rel=1e-6)


@given(st.lists(st.floats(100, 101), min_size=4, max_size=40), st.floats(0.1, 60))
def test_one_far_below_a_tight_field_is_always_found(values: list[float], value: float) -> None:
    said = find_slow_hosts({**{str(number): one for number, one in enumerate(values)}, "slow": value})
    assert list(said.slow) == ["slow"]
    assert said.slow["slow"] > 3.5
