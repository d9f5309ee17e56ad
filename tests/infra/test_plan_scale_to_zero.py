"""Groups of a stack's Slurm that go to zero: what is made of them, who may scale them, and what they cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.local.mocks import Recorder
from infra.plan.cost import cost
from infra.plan.nodes.auto_scaling import group_name
from infra.plan.roles import roles
from infra.plan.stack import Plan
from infra.preflight.change import Effect
from infra.preflight.explain import explain
from tests.infra.edits import place, spec_of
from tests.infra.mistakes import NODE_ROLE, PROFILE, SPOT
from tests.infra.registered import built

STACK = "ec2-slurm-g6e"
TO_ZERO = {"groups.0.min_count": 0}
ALWAYS = {"name": "always", "instance_type": "c7i.4xlarge", "count": 1}
SCALE = {
    "autoscaling:SetDesiredCapacity",
    "autoscaling:SetInstanceProtection",
    "autoscaling:TerminateInstanceInAutoScalingGroup",
}


def scaled_by(edits: dict[str, Any]) -> dict[str, list[str]]:
    """Return the Auto Scaling groups that each role may scale."""
    found = {}
    for role in roles(spec_of(STACK, edits), place(STACK)):
        assert role.policy
        scale = [one for one in role.policy["Statement"] if SCALE & set(one["Action"])]
        found[role.key] = [arn.rpartition("/")[2] for one in scale for arn in one["Resource"]]
    return found


def test_group_is_made_empty_and_auto_scaling_ends_none_of_it() -> None:
    resources, _ = built(STACK, {**TO_ZERO, "groups.1": ALWAYS}, Recorder("us-east-1"))
    groups = resources.of("aws:autoscaling/group:Group")
    shown = [
        (one["minSize"], one["maxSize"], one.get("desiredCapacity"), one.get("protectFromScaleIn"))
        for _, one in sorted(groups.items())
    ]
    assert shown == [(1, 1, 1, None), (0, 4, None, True)]


def test_only_the_controller_scales_and_only_those_groups() -> None:
    own = {"access": {"node_role": NODE_ROLE, "instance_profile": PROFILE}}
    assert scaled_by({**TO_ZERO, "groups.1": ALWAYS}) == {"node": [], "controller": ["slurm-g6e-train-gang-*"]}
    assert scaled_by({**TO_ZERO, **own}) == {"node": ["slurm-g6e-train-gang-*"]}
    assert scaled_by({}) == {"node": [], "controller": [], "login": []}
    spec = spec_of(STACK, TO_ZERO)
    assert group_name(spec, spec.workers[0]) == "slurm-g6e-train"


def test_controller_hears_which_groups_go_to_zero() -> None:
    def scaling(edits: dict[str, Any]) -> Any:
        files = Plan(spec_of(STACK, edits), place(STACK)).bundle.files
        return json.loads(next(file.content for file in files if file.path == "slurm.json")).get("scaling")

    assert scaling({"groups.1": ALWAYS}) is None
    edits = {**TO_ZERO, "groups.0.partition": "gpu", "groups.1": ALWAYS, "scheduler.idle_minutes": 15}
    assert scaling(edits) == {"idle_minutes": 15, "partitions": {"train": "gpu"}, "cpus": {"train": 96}}
    threads = {**edits, "groups.0.threads_per_core": 2}
    assert scaling(threads)["cpus"] == {"train": 192}


def test_group_that_goes_to_zero_may_cost_nothing() -> None:
    total = {
        name: cost(Plan(spec_of(STACK, edits), place(STACK))) for name, edits in {"zero": TO_ZERO, "fixed": {}}.items()
    }
    assert total["zero"].usd_hour == total["fixed"].usd_hour
    zero = {part.name: (part.least, part.always_on) for part in total["zero"].parts}
    assert (zero["train"], zero["train disks"]) == ((0.0, False), (0.0, False))


@pytest.mark.parametrize(
    ("stack", "before", "after", "path"),
    [
        (STACK, {}, TO_ZERO, "groups (train).min_count"),
        (STACK, TO_ZERO, {}, "groups (train).min_count"),
        (STACK, TO_ZERO, {**TO_ZERO, "scheduler.idle_minutes": 20}, "scheduler.idle_minutes"),
    ],
)
def test_change_to_zero_and_back_is_in_place(
    stack: str, before: dict[str, Any], after: dict[str, Any], path: str
) -> None:
    (change,) = explain(spec_of(stack, before), spec_of(stack, after))
    assert (change.path, change.effect) == (path, Effect.IN_PLACE)


def test_without_a_scheduler_no_group_goes_to_zero() -> None:
    spec = spec_of(SPOT, TO_ZERO)
    assert [spec.goes_to_zero(group) for group in spec.groups] == [False]
