"""What happens to a stack that is up: harmless changes in place, dangerous ones refused as preflight says, and its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.config import parse as parse_spec
from infra.local.engine import PROGRAM, Engine, EngineError, changes
from infra.plan.nodes.bundle import bundle
from infra.preflight.change import Effect
from infra.preflight.explain import explain, explain_bundle
from tests.infra.stacks import AT_ONCE, EXAMPLES, Live, example

pytestmark = pytest.mark.slow
Lives = Callable[[str], Live]
Spec = dict[str, Any]
WITH_SSD = [stack for stack in EXAMPLES if (wish := example(stack).storage.lustre) and wish.type == "ssd"]
ONE_EACH = list({example(stack).backend: stack for stack in (*EXAMPLES, *WITH_SSD)}.values())
"""One stack of each backend: nodes' files, network and file system are declared alike in all stacks of one."""


@dataclass(frozen=True)
class Course:
    """What was seen on a stack's way from a small change to its end.

    `small`: steps that a change of count, budget and alarm took, and `grown` what AWS then said: how many nodes the last group
    wants, and the budget's limit. `edited`: steps after an edit of a lifecycle script, which made `bundle`. `moved` and
    `regrouped`: what the engine said to a new address range and to another security group of the file system. After the end,
    `kept`: types of what is protected; `left`: names of all that the state still knows; `costing`: names of what AWS still runs
    by the hour and the state does not know. `needed`: names of what was protected and of all that it stands on, before.
    """

    small: Mapping[str, str]
    grown: tuple[int, str]
    edited: Mapping[str, str]
    bundle: str
    moved: str
    regrouped: str
    kept: frozenset[str]
    needed: frozenset[str]
    left: frozenset[str]
    costing: frozenset[str]


Courses = Callable[[str], Course]


def changed(spec: Spec) -> Spec:
    """One node more, a larger budget, an earlier alarm."""
    *others, last = spec["groups"]
    capacity = dict(last.get("capacity", {}))
    if "size" in capacity:
        capacity["size"] += 1
    last = {**last, "count": last["count"] + 1} | ({"capacity": capacity} if capacity else {})
    budget = {**spec["budget"], "monthly_usd": spec["budget"]["monthly_usd"] + 1000}
    alarms = {**spec["alarms"], "lustre_free_fraction": 0.2}
    return {**spec, "groups": [*others, last], "budget": budget, "alarms": alarms}


def elsewhere(spec: Spec) -> Spec:
    """The same cluster in another address range: every subnet is replaced, and what lies in it."""
    return {**spec, "network": {**spec.get("network", {}), "cidr": "10.99.0.0/16"}}


def regrouped(spec: Spec) -> Spec:
    """The same cluster with the file system in another security group, which follows from EFA."""
    storage = spec["storage"]
    before = example(next(stack for stack in EXAMPLES if example(stack).name == spec["name"]))
    assert before.storage.lustre is not None
    efa = not (before.storage.lustre.efa or before.backend == "hyperpod-slurm")
    return {**spec, "storage": {**storage, "lustre": {**storage["lustre"], "efa": efa}}}


def up_steps(engine: Engine) -> dict[str, str]:
    """What an update did: the operation for each resource's name, those that stayed left out."""
    said = engine("up", "--yes", "--skip-preview", "--json").splitlines()
    events = (json.loads(line) for line in said if line[:1] == "{")
    return changes(event["resourcePreEvent"]["metadata"] for event in events if "resourcePreEvent" in event)


def run_course(lives: Lives, stack: str, folder: Path) -> Course:
    live = lives(stack)
    engine = live.engine
    spec = changed(engine.spec)
    engine.change(spec)
    small, grown = up_steps(engine), as_aws_says(live)

    edited, edited_bundle, moved, other_group = dict[str, str](), "", "", ""
    if live.stack in ONE_EACH:
        edited, edited_bundle = steps_of_an_edit(engine, spec, folder / "infra")
        moved = answer(live, elsewhere(spec))
        other_group = answer(live, regrouped(spec)) if live.stack in WITH_SSD else ""
        engine.change(spec)

    before = engine.state()
    engine("destroy", "--yes", "--skip-preview", "--exclude-protected")
    rest = engine.resources()
    kept = frozenset(one["type"] for one in rest if one.get("protect"))
    needed, left = frozenset(map(name_of, protected_and_below(before))), frozenset(map(name_of, rest))
    costing = still_costing(live, rest)
    return Course(small, grown, edited, edited_bundle, moved, other_group, kept, needed, left, costing)


def steps_of_an_edit(engine: Engine, spec: Spec, copied: Path) -> tuple[dict[str, str], str]:
    """Steps after an edit of a lifecycle script, and the name of the bundle that holds it."""
    shutil.copytree(PROGRAM, copied, ignore=shutil.ignore_patterns("__pycache__"))
    script = copied / "lifecycle" / "on_init.sh"
    script.write_text(script.read_text(encoding="utf-8") + "\necho edited\n", encoding="utf-8")
    engine.use(copied)
    edited = engine.steps()
    engine.use(PROGRAM)
    return edited, bundle(parse_spec(spec), copied / "lifecycle").sha


def answer(live: Live, spec: Spec) -> str:
    """What a preview of `spec` says, refused or not."""
    live.engine.change(spec)
    try:
        return live.engine("preview")
    except EngineError as refusal:
        return str(refusal)


def as_aws_says(live: Live) -> tuple[int, str]:
    account = live.client("sts").get_caller_identity()["Account"]
    budgets = live.client("budgets").describe_budgets(AccountId=account)["Budgets"]
    ours = f"{live.cluster.name}-"
    (limit,) = [one["BudgetLimit"]["Amount"] for one in budgets if one["BudgetName"].startswith(ours)]
    nodes = live.cluster.nodes
    if nodes.hyperpod_cluster:
        groups = live.client("sagemaker").describe_cluster(ClusterName=nodes.hyperpod_cluster)["InstanceGroups"]
        last = live.spec.groups[-1].name
        return next(one["TargetCount"] for one in groups if one["InstanceGroupName"] == last), limit
    last_alone = list(nodes.auto_scaling_groups[-1:])
    asked = live.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=last_alone)
    return asked["AutoScalingGroups"][0]["DesiredCapacity"], limit


def protected_and_below(resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The protected resources and everything that they depend on.

    To wait for a component is to wait for all that is in it; what a component waits for, all that is in it waits for.
    """
    known = {one["urn"]: one for one in resources}
    todo = {(one["urn"], True) for one in resources if one.get("protect")}
    found: set[tuple[str, bool]] = set()
    while todo:
        urn, whole = step = todo.pop()
        if step in found or urn not in known:
            continue
        found.add(step)
        one = known[urn]
        todo |= {(other, True) for other in one.get("dependencies", [])}
        if one.get("parent"):
            todo.add((one["parent"], False))
        if whole and not one.get("custom"):
            todo |= {(child["urn"], True) for child in resources if child.get("parent") == urn}
    needed = [known[urn] for urn, whole in found if whole]
    return [one for one in needed if one.get("custom") and not one["type"].startswith("pulumi:")]


def still_costing(live: Live, rest: list[dict[str, Any]]) -> frozenset[str]:
    """Ids of gateways, machines, groups and clusters of this stack that AWS still has, less those that the state knows."""
    owner = {"Key": "lustrain:cluster", "Value": live.cluster.name}
    # Filtered here: the emulation gives every gateway of the region whatever tag is asked for.
    gateways = [one for one in live.client("ec2").describe_nat_gateways()["NatGateways"] if owner in one["Tags"]]
    running = {one["NatGatewayId"] for one in gateways if one["State"] not in ("deleted", "deleting")}
    groups = live.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    running |= {one["AutoScalingGroupName"] for one in groups} & set(live.cluster.nodes.auto_scaling_groups)
    if single := list(live.cluster.nodes.instances):
        for answer in live.client("ec2").describe_instances(InstanceIds=single)["Reservations"]:
            running |= {one["InstanceId"] for one in answer["Instances"] if one["State"]["Name"] != "terminated"}
    running |= set(live.client("eks").list_clusters()["clusters"]) & {live.cluster.kubernetes_cluster}
    clusters = live.client("sagemaker").list_clusters()["ClusterSummaries"]
    running |= {one["ClusterArn"] for one in clusters if one["ClusterName"] == live.cluster.nodes.hyperpod_cluster}
    return frozenset(running - {one["id"] for one in rest})


def name_of(resource: Mapping[str, Any]) -> str:
    return str(resource["urn"]).rpartition("::")[2]


@pytest.fixture(scope="module")
def courses(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Courses]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        folders = {stack: tmp_path_factory.mktemp(f"edited-{stack}") for stack in EXAMPLES}
        running = {stack: pool.submit(run_course, lives, stack, folder) for stack, folder in folders.items()}
        yield lambda stack: running[stack].result()


def spec_of(stack: str) -> Spec:
    """What stands in the example's file."""
    return example(stack).model_dump(mode="json", exclude_defaults=True)


def effects(stack: str, change: Callable[[Spec], Spec]) -> set[Effect]:
    """What preflight announces for a change of an example."""
    return {found.effect for found in explain(example(stack), parse_spec(change(spec_of(stack))))}


@pytest.mark.parametrize("stack", EXAMPLES)
def test_count_budget_and_alarm_change_in_place(courses: Courses, stack: str) -> None:
    course, spec = courses(stack), example(stack)
    assert effects(stack, changed) == {Effect.IN_PLACE}
    assert set(course.small.values()) == {"update"}, course.small
    nodes = f"{spec.name}-cluster" if spec.hyperpod else f"{spec.name}-{spec.groups[-1].name}-gang"
    assert {nodes, f"{spec.name}-monthly"} <= set(course.small)
    assert any("lustre" in name for name in course.small) is (stack in WITH_SSD)
    assert spec.budget is not None
    assert (course.grown[0], float(course.grown[1])) == (spec.groups[-1].count + 1, spec.budget.monthly_usd + 1000)


@pytest.mark.parametrize("stack", ONE_EACH)
def test_an_edited_lifecycle_script_is_for_new_nodes_only(courses: Courses, stack: str) -> None:
    course = courses(stack)
    before = bundle(example(stack))
    (announced,) = explain_bundle(before.sha, course.bundle)
    assert announced.effect is Effect.NEW_NODES
    added = {name: step for name, step in course.edited.items() if course.bundle in name}
    others = {name: step for name, step in course.edited.items() if name not in added and before.sha not in name}
    assert set(added.values()) == {"create"}
    assert len(added) == len(before.files)
    assert others
    assert set(others.values()) == {"update"}, others


@pytest.mark.parametrize("stack", ONE_EACH)
def test_a_new_address_range_does_to_storage_what_preflight_says(courses: Courses, stack: str) -> None:
    spec = example(stack)
    has_files = bool(spec.storage.lustre or spec.storage.home)
    assert (Effect.REPLACES_FILE_SYSTEM in effects(stack, elsewhere)) is has_files
    assert ("protect" in courses(stack).moved) is has_files


@pytest.mark.parametrize("stack", [stack for stack in ONE_EACH if stack in WITH_SSD])
def test_another_security_group_of_the_file_system_is_refused(courses: Courses, stack: str) -> None:
    assert {Effect.REPLACES_FILE_SYSTEM, Effect.IMPOSSIBLE} & effects(stack, regrouped)
    assert "protect" in courses(stack).regrouped


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_end_leaves_what_holds_data_or_money_and_its_base(courses: Courses, stack: str) -> None:
    course, spec = courses(stack), example(stack)
    expected = {"aws:s3/bucket:Bucket"}
    if spec.storage.lustre:
        expected.add("aws:fsx/lustreFileSystem:LustreFileSystem")
    if spec.storage.home:
        kinds = {"openzfs": "aws:fsx/openZfsFileSystem:OpenZfsFileSystem", "efs": "aws:efs/fileSystem:FileSystem"}
        expected.add(kinds[spec.storage.home.type])
    if spec.scheduler or spec.monitor:
        expected.add("aws:ebs/volume:Volume")
    if spec.observability.prometheus == "amp":
        expected.add("aws:amp/workspace:Workspace")
    if any(group.capacity.create for group in spec.groups):
        expected.add("aws:ec2/capacityReservation:CapacityReservation")
    if any(group.capacity.mode == "training-plan" for group in spec.groups):
        expected.add("aws:cloudcontrol/resource:Resource")
    assert course.kept == expected
    assert course.left == course.needed
    assert course.costing == frozenset()
