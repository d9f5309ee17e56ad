"""Each pair of backend and capacity becomes what AWS means by it, or a finding that says why not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.catalog.instances import instance, snapshot
from infra.config import Backend, Capacity, ClusterSpec, Group, parse
from infra.plan.nodes.capacity import MODES, Market, capacity_problems, empty_at, market, reservations
from lustrain.problem import Problem

RESERVATION = "cr-0a1b2c3d4e5f60718"
PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/mine"
BACKENDS: list[Backend] = ["ec2", "hyperpod-slurm", "hyperpod-eks"]
WHOLE: dict[str, dict[str, Any]] = {
    "on-demand": {},
    "spot": {},
    "reservation": {"reservation": RESERVATION},
    "capacity-block": {"reservation": RESERVATION},
    "training-plan": {"training_plan": PLAN},
}


def group(mode: str = "on-demand", kind: str = "p5.48xlarge", count: int = 4, **capacity: Any) -> Group:
    return Group(name="train", instance_type=kind, count=count, capacity=Capacity(mode=mode, **capacity))  # type: ignore[arg-type]


def spec(*groups: Group, backend: Backend = "ec2") -> ClusterSpec:
    named = [one.model_copy(update={"name": f"g{number}"}).model_dump() for number, one in enumerate(groups)]
    return parse({"name": "demo", "backend": backend, "zone_id": "use1-az4", "groups": named})


def paths(one: Group, backend: Backend = "ec2") -> list[str]:
    return [found.path for found in problems(one, backend)]


def problems(one: Group, backend: Backend = "ec2") -> list[Problem]:
    return list(capacity_problems(one, instance(one.ec2_type), backend))


def market_of(one: Group) -> Market:
    return market(one, instance(one.ec2_type))


def test_on_demand_gets_a_placement_group_and_no_market() -> None:
    assert market_of(group()) == Market(own_placement_group=True)


def test_reservation_is_only_place_and_takes_no_placement_group() -> None:
    assert market_of(group("reservation", reservation=RESERVATION)) == Market(reservation=RESERVATION)


def test_reservation_in_a_placement_group_is_launched_into_it() -> None:
    found = market_of(group("reservation", reservation=RESERVATION, placement_group="near"))
    assert (found.placement_group, found.own_placement_group) == ("near", False)


@given(mode=st.sampled_from(sorted(WHOLE)), kind=st.sampled_from(sorted(snapshot().types)))
def test_no_reservation_or_block_gets_a_placement_group_of_ours(mode: str, kind: str) -> None:
    found = market_of(group(mode, kind, **WHOLE[mode]))
    assert not (found.own_placement_group and (mode in ("reservation", "capacity-block") or found.reservation))
    known = instance(kind)
    assert known is not None
    assert not found.own_placement_group or "cluster" in known.placement


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", sorted(WHOLE))
def test_a_backend_takes_its_own_kinds_of_capacity_only(backend: Backend, mode: str) -> None:
    assert paths(group(mode, **WHOLE[mode]), backend) == ([] if mode in MODES[backend] else ["capacity.mode"])


@pytest.mark.parametrize(
    ("mode", "names"),
    [("reservation", "reservation or create"), ("capacity-block", "reservation"), ("training-plan", "training_plan")],
)
def test_a_mode_without_what_it_needs_says_what_that_is(mode: str, names: str) -> None:
    (found,) = problems(group(mode), "hyperpod-eks" if mode == "training-plan" else "ec2")
    assert (found.path, names in found.why) == ("capacity", True)


@pytest.mark.parametrize(
    ("mode", "extra"),
    [
        ("on-demand", {"reservation": RESERVATION}),
        ("spot", {"create": True}),
        ("spot", {"zone_id": "use1-az4"}),
        ("on-demand", {"size": 4}),
        ("capacity-block", {"placement_group": "near"}),
        ("capacity-block", {"create": True}),
        ("reservation", {"training_plan": PLAN}),
        ("on-demand", {"ends_at": datetime(2027, 1, 1, tzinfo=UTC)}),
    ],
)
def test_a_key_that_means_nothing_in_a_mode_is_named(mode: str, extra: dict[str, Any]) -> None:
    assert paths(group(mode, **WHOLE[mode], **extra)) == [f"capacity.{name}" for name in extra]


def test_reservation_to_be_made_is_in_no_group_and_holds_one() -> None:
    assert paths(group("reservation", create=True)) == []
    assert paths(group("reservation", create=True, placement_group="near")) == ["capacity.placement_group"]
    assert paths(group("reservation", create=True, size=4)) == ["capacity.size"]
    assert paths(group("reservation", create=True, count=0)) == ["count"]


@pytest.mark.parametrize(
    ("mode", "kind", "sold"),
    [
        ("spot", "g6e.48xlarge", True),
        ("spot", "trn2u.48xlarge", False),
        ("spot", "hpc7a.96xlarge", False),
        ("capacity-block", "p5en.48xlarge", True),
        ("capacity-block", "g6e.48xlarge", False),
        ("capacity-block", "trn1n.32xlarge", False),
    ],
)
def test_a_type_is_bought_only_in_the_ways_that_it_is_sold(mode: str, kind: str, sold: bool) -> None:
    assert paths(group(mode, kind, **WHOLE[mode])) == ([] if sold else ["capacity.mode"])


def test_type_without_cluster_placement_is_a_warning_or_an_error() -> None:
    (far,) = problems(group(kind="t3.xlarge"))
    assert (far.path, far.level) == ("instance_type", "warning")
    (named,) = problems(group("reservation", "t3.xlarge", reservation=RESERVATION, placement_group="near"))
    assert (named.path, named.level) == ("capacity.placement_group", "error")
    assert paths(group(kind="t3.xlarge", count=1)) == []
    assert paths(placed("none", kind="t3.xlarge")) == []


def placed(placement: str, mode: str = "on-demand", kind: str = "p5.48xlarge", **capacity: Any) -> Group:
    return group(mode, kind, **capacity).model_copy(update={"placement": placement})


@pytest.mark.parametrize("mode", ["on-demand", "spot"])
def test_placement_none_makes_no_placement_group(mode: str) -> None:
    assert market_of(placed("cluster", mode)).own_placement_group
    assert not market_of(placed("none", mode)).own_placement_group
    assert paths(placed("none", mode)) == paths(placed("cluster", mode)) == []


@pytest.mark.parametrize(
    ("placement", "mode", "there", "told"),
    [
        ("none", "reservation", None, []),
        ("none", "reservation", "near", ["placement"]),
        ("cluster", "reservation", "near", []),
        ("cluster", "reservation", None, ["placement"]),
        ("cluster", "capacity-block", None, ["placement"]),
    ],
)
def test_placement_agrees_with_bought_capacity(placement: str, mode: str, there: str | None, told: list[str]) -> None:
    assert paths(placed(placement, mode, reservation=RESERVATION, placement_group=there)) == told


def test_hyperpod_places_nodes_unknown_types_are_not_judged() -> None:
    assert paths(group(kind="ml.t3.xlarge"), "hyperpod-slurm") == []
    assert paths(group("spot", "p9.48xlarge")) == []


def test_what_is_made_is_listed_alone_and_its_end_is_in_utc() -> None:
    found = reservations(
        spec(
            group("spot"),
            group("reservation", create=True),
            group("reservation", reservation=RESERVATION),
            group(
                "reservation", create=True, ends_at=datetime(2027, 2, 14, 13, 30, tzinfo=timezone(timedelta(hours=2)))
            ),
        )
    )
    ends = [(one.group, one.end_type, one.ends_at) for one in found]
    assert ends == [("g1", "unlimited", None), ("g3", "limited", "2027-02-14T11:30:00Z")]
    assert (found[0].instance_type, found[0].count, found[0].zone_id) == ("p5.48xlarge", 4, "use1-az4")


def test_hyperpod_reserves_nothing() -> None:
    assert reservations(spec(group("reservation", create=True), backend="hyperpod-slurm")) == ()


def test_a_blocks_group_is_empty_before_ec2_ends_its_instances() -> None:
    end = datetime(2027, 2, 14, 11, 30, tzinfo=UTC)
    assert empty_at(Capacity(mode="capacity-block", reservation=RESERVATION, ends_at=end)) == "2027-02-14T10:50:00Z"
    assert empty_at(Capacity(mode="capacity-block", reservation=RESERVATION)) is None
    assert empty_at(Capacity(mode="reservation", reservation=RESERVATION, ends_at=end)) is None
