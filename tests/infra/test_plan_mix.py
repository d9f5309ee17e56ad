"""A spot group of several types is one Auto Scaling group whose types are alike in all that its nodes share."""

from __future__ import annotations

from typing import Any

import pytest

from infra.catalog.instances import snapshot
from infra.catalog.prices import price
from infra.config import ClusterSpec
from infra.plan.cost import cost
from infra.plan.nodes.alike import differences
from infra.plan.nodes.auto_scaling import node_groups
from infra.plan.nodes.capacity import Market, Mix
from infra.plan.outputs import DeployedIds, cluster
from infra.plan.stack import Plan
from infra.plan.summary import summary
from infra.preflight.change import Effect
from infra.preflight.explain import explain
from infra.preflight.offline import run_in
from infra.preflight.rule import Context
from lustrain.cluster import node_document
from node_setup.agent.model import Request
from node_setup.agent.verify.expected import expected_hardware
from tests.infra.edits import place, spec_of
from tests.infra.mistakes import KEY, NOW, OTHERS, P9, SPOT, TWO_TYPES

TYPES = ("g6.12xlarge", "g5.12xlarge")
BASE = "groups.0.capacity.on_demand_base"
AT = place(SPOT)


def two_types(**edits: Any) -> ClusterSpec:
    return spec_of(SPOT, {**TWO_TYPES, **edits})


def test_group_of_two_types_passes_preflight() -> None:
    assert run_in(Context.at(two_types(**{BASE: 2}), AT, NOW)) == []


def test_template_of_a_mixed_group_asks_for_no_spot() -> None:
    (node_group,) = node_groups(two_types(**{BASE: 2}), AT, NOW)
    assert (node_group.market, node_group.mix) == (Market(), Mix(("g6.12xlarge", "g5.12xlarge"), 2))
    (plain,) = node_groups(spec_of(SPOT, {}), AT, NOW)
    assert (plain.market.type, plain.mix) == ("spot", None)


def test_base_alone_makes_a_mixed_group_of_one_type() -> None:
    (node_group,) = node_groups(spec_of(SPOT, {BASE: 1}), AT, NOW)
    assert node_group.mix == Mix(("g6e.48xlarge",), 1)
    assert (node_group.market.type, node_group.market.own_placement_group) == (None, True)


def test_cluster_names_the_other_types_of_a_group() -> None:
    groups = cluster(Plan(two_types(), AT), DeployedIds(("asg",))).groups
    assert (groups["train"].type, groups["train"].other_types, groups["train"].gpus) == (
        "g6.12xlarge",
        ("g5.12xlarge",),
        4,
    )
    assert cluster(Plan(spec_of(SPOT, {}), AT), DeployedIds(("asg",))).groups["train"].other_types is None


def test_summary_names_all_types_and_the_base() -> None:
    assert summary(two_types(**{BASE: 2}))[0].startswith(
        "train: 8 x g6.12xlarge or g5.12xlarge, 2 of them on demand, spot"
    )


def test_group_costs_as_its_dearest_type() -> None:
    def train(**edits: Any) -> float:
        return cost(Plan(spec_of(SPOT, edits), AT)).parts[0].usd_hour

    alone = [train(**{"groups.0.instance_type": kind}) for kind in ("g6.12xlarge", "g5.12xlarge")]
    assert alone[0] != alone[1]
    assert train(**TWO_TYPES) == max(alone)


@pytest.mark.parametrize(("first", "other"), [TYPES, TYPES[::-1]])
def test_nodes_on_demand_are_paid_as_the_preferred_type(first: str, other: str) -> None:
    def least(**edits: Any) -> float:
        part = cost(Plan(two_types(**edits), AT)).parts[0]
        return part.least * part.usd_hour

    usd = [known.usd_hour for kind in TYPES if (known := price(kind, AT.region))]
    mixed = {"groups.0.instance_type": first, OTHERS: [other]}
    alone = {"groups.0.instance_type": first, OTHERS: []}
    assert least(**mixed, **{BASE: 2}) - least(**mixed) == pytest.approx(2 * usd[TYPES.index(first)] - 0.2 * min(usd))
    assert least(**mixed) == pytest.approx(0.1 * 8 * min(usd))
    assert least(**alone, **{BASE: 2}) == pytest.approx((2 + 0.6) * usd[TYPES.index(first)])


def test_unpriced_type_counts_as_the_dearest() -> None:
    types = {"p9.48xlarge": P9}
    mixed = spec_of(SPOT, {**TWO_TYPES, OTHERS: ["p9.48xlarge"], "instance_types": types, BASE: 2})
    part = cost(Plan(mixed, AT)).parts[0]
    assert (part.usd_hour, part.unknown) == (0, ("p9.48xlarge",))


@pytest.mark.parametrize(
    ("first", "others", "base", "warned"),
    [
        ("p5.48xlarge", [], 3, True),
        ("p5.48xlarge", [], 4, False),
        ("p5.48xlarge", ["p5en.48xlarge"], 0, True),
        ("p5.48xlarge", ["g6.48xlarge"], 0, False),
        ("g6.48xlarge", ["p5.48xlarge"], 0, False),
    ],
)
def test_large_gang_counts_spot_nodes_of_scarce_types(first: str, others: list[str], base: int, warned: bool) -> None:
    found = run_in(Context.at(two_types(**{"groups.0.instance_type": first, OTHERS: others, BASE: base}), AT, NOW))
    assert ("CAP-017" in [finding.code for finding in found]) == warned


def test_type_by_hand_is_used_where_it_is_a_further_type() -> None:
    types = {"p9.48xlarge": P9, "p9a.48xlarge": P9}
    edits = {"groups.0.instance_type": "p9.48xlarge", OTHERS: ["p9a.48xlarge"], "instance_types": types}
    assert "EC2-014" not in [finding.code for finding in run_in(Context.at(two_types(**edits), AT, NOW))]


def test_both_launching_roles_need_the_volume_key() -> None:
    found = run_in(Context.at(two_types(**{BASE: 2, "groups.0.volume_kms_key": KEY}), AT, NOW))
    grants = [finding.fix for finding in found if finding.code == "IAM-007"]
    assert [("AWSServiceRoleForEC2Spot" in fix, "AutoScaling" in fix) for fix in grants] == [
        (True, False),
        (False, True),
    ]


MODE = "groups.0.capacity.mode"


@pytest.mark.parametrize(
    ("old", "new", "effect"),
    [
        (two_types(**{BASE: 1}), two_types(**{BASE: 3}), Effect.REPLACES_NODES),
        (two_types(**{BASE: 2}), two_types(), Effect.REPLACES_NODES),
        (two_types(), two_types(**{BASE: 2, "groups.0.capacity.size": 9}), Effect.REPLACES_NODES),
        (two_types(), two_types(**{BASE: 2, "groups.0.capacity.zone_id": "use1-az4"}), Effect.REPLACES_NODES),
        (spec_of(SPOT, {}), spec_of(SPOT, {BASE: 2}), Effect.REPLACES_NODES),
        (spec_of(SPOT, {MODE: "on-demand"}), spec_of(SPOT, {BASE: 2}), Effect.REPLACES_NODES),
        (two_types(**{MODE: "on-demand", OTHERS: []}), two_types(), Effect.REPLACES_NODES),
        (two_types(**{OTHERS: []}), two_types(), None),
        (spec_of(SPOT, {BASE: 2}), spec_of(SPOT, {}), Effect.NEW_NODES),
        (two_types(**{BASE: 2}), two_types(**{MODE: "on-demand", OTHERS: []}), Effect.NEW_NODES),
    ],
)
def test_a_policy_with_other_shares_replaces_running_nodes(
    old: ClusterSpec, new: ClusterSpec, effect: Effect | None
) -> None:
    changes = {change.path: change for change in explain(old, new)}
    change = changes.get("groups (train).capacity")
    assert (change and change.effect) == effect


def test_nodes_on_demand_that_no_policy_ends_are_to_be_ended() -> None:
    (change,) = explain(spec_of(SPOT, {BASE: 2}), spec_of(SPOT, {}))
    assert "2 nodes on demand" in change.message
    assert "end the nodes on demand" in change.instead


def test_dropped_type_names_the_nodes_that_fail_verify() -> None:
    changes = {change.path: change for change in explain(two_types(), two_types(**{OTHERS: []}))}
    change = changes["groups (train).other_types"]
    assert (change.effect, "nodes of g5.12xlarge keep running" in change.message) == (Effect.NEW_NODES, True)
    swapped = {"groups.0.instance_type": "g5.12xlarge", OTHERS: ["g6.12xlarge"]}
    kept = {change.path: change for change in explain(two_types(), two_types(**swapped))}
    assert "keep running" not in kept["groups (train).other_types"].message


ACCELERATORS = P9["accelerators"]
CARDS = P9["network_cards"]


@pytest.mark.parametrize(
    "other",
    [
        {"accelerators": {**ACCELERATORS, "count": 4}},
        {"accelerators": {**ACCELERATORS, "memory_gib": 256}},
        {"accelerators": {**ACCELERATORS, "name": "AMD MI500"}},
        {"architecture": "arm64"},
        {"network_cards": [CARDS[0], {**CARDS[1], "count": 15}], "efa": 15},
        {"vcpus": 96},
        {"memory_gib": 2048},
        {"threads_per_core": 1},
        {"nvme": 0},
    ],
    ids=lambda other: "+".join(other),
)
def test_each_difference_of_two_types_is_found(other: dict[str, Any]) -> None:
    types = {"p9.48xlarge": P9, "p9a.48xlarge": {**P9, **other}}
    edits = {"groups.0.instance_type": "p9.48xlarge", OTHERS: ["p9a.48xlarge"], "instance_types": types}
    spec = spec_of(SPOT, {**edits, "groups.0.placement": "none", "storage": {}})
    assert [problem.path for problem in differences(spec, spec.groups[0], "groups.0")] == [f"{OTHERS}.0"]


BOTH_BY_HAND = {"instance_types": {"p9.48xlarge": P9, "p5en.48xlarge": P9}, "groups.0.efa": None}
"""Types alike in all but the EFA interfaces that Lustre gets."""


@pytest.mark.parametrize(
    ("kinds", "edits", "fixes"),
    [
        (("g6.12xlarge", "g5.12xlarge"), {"groups.0.efa": True}, ["set efa: false"]),
        (("g6.12xlarge", "g5.12xlarge"), {}, []),
        (("c6i.32xlarge", "c6i.metal"), {}, ["set threads_per_core: 2"]),
        (("c6i.32xlarge", "c6i.metal"), {"groups.0.threads_per_core": 2}, []),
        (("g7.2xlarge", "g7.4xlarge"), {}, ["take types with as many vCPUs"]),
        (("g6.8xlarge", "gr6.8xlarge"), {}, ["take types with as many vCPUs"]),
        (("m8azn.24xlarge", "hpc6a.48xlarge"), {}, ["take a type that is sold as spot"]),
        (("c7i.4xlarge", "c7i-flex.4xlarge"), {"groups.0.placement": "cluster"}, ["set placement: none"]),
        (("c7i.4xlarge", "c7i-flex.4xlarge"), {}, []),
        (("p9.48xlarge", "p5en.48xlarge"), {**BOTH_BY_HAND, "storage.lustre.efa": True}, ["set efa: false"]),
        (("p9.48xlarge", "p5en.48xlarge"), {**BOTH_BY_HAND, "storage.lustre.efa": False}, []),
    ],
)
def test_pair_of_types_differs_in_one_trait(kinds: tuple[str, str], edits: dict[str, Any], fixes: list[str]) -> None:
    spec = two_types(**{"groups.0.instance_type": kinds[0], OTHERS: [kinds[1]], **edits})
    found = list(differences(spec, spec.groups[0], "groups.0"))
    assert [problem.fix.partition(", ")[0].partition(" and ")[0] for problem in found] == fixes


def test_types_by_hand_have_as_many_drives() -> None:
    types = {"p9.48xlarge": P9, "p9a.48xlarge": {**P9, "nvme": 8}}
    spec = spec_of(SPOT, {"groups.0.instance_type": "p9.48xlarge", OTHERS: ["p9a.48xlarge"], "instance_types": types})
    assert [problem.path for problem in differences(spec, spec.groups[0], "groups.0")] == [f"{OTHERS}.0"]


@pytest.mark.parametrize("by_hand", TYPES)
def test_types_are_described_by_hand_all_or_none(by_hand: str) -> None:
    (other,) = set(TYPES) - {by_hand}
    described = {
        "architecture": "x86_64",
        "vcpus": 48,
        "memory_gib": 192,
        "threads_per_core": 2,
        "accelerators": {"name": "NVIDIA L4", "count": 4, "memory_gib": 22},
        "nvme": snapshot().types[other].nvme_count,
    }
    spec = two_types(instance_types={by_hand: described}, **{"groups.0.efa": False})
    assert [problem.path for problem in differences(spec, spec.groups[0], "groups.0")] == [f"{OTHERS}.0"]


@pytest.mark.parametrize("kind", TYPES)
def test_node_of_each_type_is_judged_by_its_own_drives(kind: str) -> None:
    document = node_document(cluster(Plan(two_types(), AT), DeployedIds(("asg",))))
    want = expected_hardware({"instance": {"type": kind}}, Request(document, "train"))
    assert (want.other, want.nvme) == (False, snapshot().types[kind].nvme_count)
    assert len({snapshot().types[each].nvme_count for each in TYPES}) == 2
