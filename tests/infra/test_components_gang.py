"""The EC2 gang as Pulumi resources: the golden files hold what the provider is asked for, for review.

After a wanted change: `RENEW_GOLDEN=1 .venv/bin/pytest tests/infra/test_components_gang.py`, then read the diff.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pulumi
import pytest
import yaml
from pulumi.runtime import MockCallArgs, MockResourceArgs, Mocks
from pulumi.runtime.mocks import MockMonitor

from infra.components.gang import Gang, Reservation, look_up
from infra.components.stack import build as build_cluster
from infra.components.stack import current_place
from infra.config import KEY, ClusterSpec, parse
from infra.plan.nodes.capacity import ReservationPlan, reservations
from infra.plan.nodes.gang import gangs
from infra.plan.place import Place
from infra.plan.stack import Plan
from lustrain.problem import UserError
from tests.infra.registered import run_on

PROGRAM = Path(__file__).parents[2] / "infra"
GOLDEN = Path(__file__).with_name("golden")
STACKS = ["rehearsal", "ec2-spot-g6e", "ec2-capacity-block-p5en", "ec2-p6-b300-reservation"]
TEMPLATE, GROUP = "aws:ec2/launchTemplate:LaunchTemplate", "aws:autoscaling/group:Group"
PLACEMENT = "aws:ec2/placementGroup:PlacementGroup"
RESERVATION = "aws:ec2/capacityReservation:CapacityReservation"
BLOCK = "aws:ec2/capacityBlockReservation:CapacityBlockReservation"
SCHEDULE, HOOK = "aws:autoscaling/schedule:Schedule", "aws:autoscaling/lifecycleHook:LifecycleHook"
ANSWERS: dict[str, dict[str, Any]] = {
    "aws:ssm/getParameter:getParameter": {"value": "ami-0fedcba9876543210"},
    "aws:ec2/getAmi:getAmi": {"rootDeviceName": "/dev/xvda"},
    "aws:index/getAvailabilityZone:getAvailabilityZone": {"name": "us-west-2c"},
}


class Service(Mocks):
    """Answers as AWS would, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        made: dict[str, Any] = {"name": f"{args.name}-1a2b3c4"}
        if args.typ == TEMPLATE:
            made["latestVersion"] = 3
        return f"{args.name}-id", {**made, **args.inputs}

    def call(self, args: MockCallArgs) -> dict[str, Any]:
        self.asked.append((args.token, dict(args.args)))
        return {**args.args, **ANSWERS[args.token]}


class Registered(MockMonitor):
    """Keeps each request of the program by the resource's type."""

    def __init__(self, service: Service | None = None) -> None:
        self.service = service or Service()
        super().__init__(self.service)
        self.requests: list[Any] = []

    def RegisterResource(self, request: Any) -> Any:
        self.requests.append(request)
        return super().RegisterResource(request)

    def of(self, kind: str) -> list[Any]:
        return [request for request in self.requests if request.type == kind]

    def properties(self, kind: str) -> dict[str, Any]:
        """Those of the only resource of this type."""
        (request,) = self.of(kind)
        return dict(pulumi.runtime.rpc.deserialize_properties(request.object))


def run(program: Callable[[], dict[str, pulumi.Output[Any]]]) -> tuple[Registered, dict[str, Any]]:
    monitor = Registered()
    return run_on(monitor, monitor.service, program)


def example(stack: str, **train: Any) -> tuple[ClusterSpec, Place]:
    config = yaml.safe_load((PROGRAM / f"Pulumi.{stack}.yaml").read_text(encoding="utf-8"))["config"]
    config[KEY]["groups"][0].update(train)
    return parse(config[KEY]), Place(config["aws:region"], "123456789012")


def build(stack: str, **train: Any) -> tuple[Registered, dict[str, Any]]:
    """The first gang of an example stack, with the capacity that it reserves."""
    spec, place = example(stack, **train)

    def program() -> dict[str, pulumi.Output[Any]]:
        paid = {one.group: Reservation(f"{one.group}-capacity", one) for one in reservations(spec)}
        plan = gangs(spec, place)[0]
        made = Gang(
            plan.group,
            plan,
            image=look_up(plan.group, plan.image),
            subnet_id="subnet-compute",
            security_group_id="sg-cluster",
            instance_profile_arn="arn:aws:iam::123456789012:instance-profile/node",
            user_data=pulumi.Output.from_input("#!/bin/bash\ntrue\n"),
            reservation_id=paid[plan.group].reservation_id if plan.group in paid else None,
        )
        return {"group": made.auto_scaling_group, "template": made.launch_template_id}

    return run(program)


def whole(value: Any) -> Any:
    """Numbers arrive as floats."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return [whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.fixture(params=STACKS)
def golden(request: pytest.FixtureRequest) -> tuple[str, Path]:
    stack = str(request.param)
    return stack, GOLDEN / f"ec2-{stack.removeprefix('ec2-')}.json"


@pytest.mark.slow
def test_the_provider_is_asked_for_what_was_reviewed(golden: tuple[str, Path]) -> None:
    stack, path = golden
    monitor, _ = build(stack)
    kinds = [PLACEMENT, RESERVATION, TEMPLATE, GROUP, HOOK, SCHEDULE]
    found = {kind: whole(monitor.properties(kind)) for kind in kinds if monitor.of(kind)}
    text = json.dumps(found, indent=1) + "\n"
    if os.environ.get("RENEW_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
def test_no_field_is_used_that_the_provider_behind_pulumi_does_not_know(stack: str) -> None:
    monitor, _ = build(stack)
    template, group = monitor.properties(TEMPLATE), monitor.properties(GROUP)
    assert not {"networkPerformanceOptions", "secondaryInterfaces", "vpcSecurityGroupIds", "region"} & template.keys()
    assert "groupId" not in template.get("placement", {})
    assert not {"instanceLifecyclePolicy", "mixedInstancesPolicy", "region"} & group.keys()


@pytest.mark.slow
def test_user_data_arrives_as_base64_and_the_outputs_name_what_was_made() -> None:
    monitor, values = build("rehearsal")
    assert base64.b64decode(monitor.properties(TEMPLATE)["userData"]) == b"#!/bin/bash\ntrue\n"
    assert values == {"group": "train-gang-1a2b3c4", "template": "train-nvidia-x86-64-id"}


def test_the_group_launches_one_numbered_version_of_the_template() -> None:
    monitor, _ = build("rehearsal")
    assert monitor.properties(GROUP)["launchTemplate"] == {"id": "train-nvidia-x86-64-id", "version": "3"}


def test_an_image_that_was_looked_up_stays_and_one_that_was_named_follows_the_name() -> None:
    monitor, _ = build("rehearsal")
    assert list(monitor.of(TEMPLATE)[0].ignoreChanges) == ["imageId"]
    assert monitor.properties(TEMPLATE)["imageId"] == "ami-0fedcba9876543210"
    monitor, _ = build("rehearsal", image_id="ami-0123456789abcdef0")
    assert list(monitor.of(TEMPLATE)[0].ignoreChanges) == []
    assert monitor.properties(TEMPLATE)["imageId"] == "ami-0123456789abcdef0"


def test_the_root_volume_of_a_named_image_is_the_images_root() -> None:
    monitor, _ = build("rehearsal", image_id="ami-0123456789abcdef0")
    assert monitor.properties(TEMPLATE)["blockDeviceMappings"][0]["deviceName"] == "/dev/xvda"
    (asked,) = [args for token, args in monitor.service.asked if token == "aws:ec2/getAmi:getAmi"]
    assert asked["filters"] == [{"name": "image-id", "values": ["ami-0123456789abcdef0"]}]
    monitor, _ = build("rehearsal")
    assert monitor.properties(TEMPLATE)["blockDeviceMappings"][0]["deviceName"] == "/dev/sda1"
    assert [token for token, _ in monitor.service.asked] == ["aws:ssm/getParameter:getParameter"]


@pytest.mark.parametrize("image_id", [None, "ami-0123456789abcdef0"])
def test_an_image_that_cannot_be_looked_up_stops_the_program_in_one_line_before_anything_is_declared(
    image_id: str | None,
) -> None:
    class RefusalError(grpc.RpcError):
        """As the engine hands on what a provider says."""

        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNKNOWN

        def details(self) -> str:
            return "invoking it: 1 error occurred:\n\t* reading it: not found\n\n"

    class Refusing(Service):
        def call(self, args: MockCallArgs) -> dict[str, Any]:
            if args.token in ("aws:ssm/getParameter:getParameter", "aws:ec2/getAmi:getAmi"):
                raise RefusalError
            return super().call(args)

    spec, place = example("rehearsal", **({"image_id": image_id} if image_id else {}))
    monitor = Registered(Refusing())
    with pytest.raises(UserError) as caught:
        run_on(monitor, monitor.service, lambda: build_cluster(Plan(spec, place)))
    (line,) = caught.value.problems
    assert line.startswith(f"image_id of group train = '{image_id or '/aws/service/'}")
    assert "1 error occurred: * reading it: not found; fix: name an image of the region" in line
    assert line.isprintable()
    # The engine's own entry of a stack comes with the first program of a process.
    assert [one.type for one in monitor.requests if one.type != "pulumi:pulumi:Stack"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("invoking it:\n\t* no valid credential sources\n", "invoking it: * no valid credential sources"),
        ("got <!DOCTYPE html>\n<html>Log in to go on</html>", "an HTML page, so that something else than AWS answers"),
    ],
)
def test_an_aws_that_cannot_be_asked_where_we_are_stops_the_program_in_one_line(
    monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    def refuse() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr("pulumi_aws.get_partition", refuse)
    with pytest.raises(UserError) as caught:
        current_place()
    (line,) = caught.value.problems
    assert line.startswith(f"AWS cannot be asked: {said}; fix: log in")


def test_a_key_of_the_users_encrypts_the_root_volume() -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/01234567-89ab-cdef-0123-456789abcdef"
    monitor, _ = build("rehearsal", volume_kms_key=key)
    assert monitor.properties(TEMPLATE)["blockDeviceMappings"][0]["ebs"]["kmsKeyId"] == key
    monitor, _ = build("rehearsal")
    assert "kmsKeyId" not in monitor.properties(TEMPLATE)["blockDeviceMappings"][0]["ebs"]


def test_spot_lies_in_a_placement_group_of_its_own_and_reserved_capacity_in_none() -> None:
    monitor, _ = build("ec2-spot-g6e")
    assert monitor.properties(PLACEMENT)["strategy"] == "cluster"
    assert monitor.properties(TEMPLATE)["placement"] == {"groupName": "train-near-1a2b3c4"}
    for stack in ("ec2-p6-b300-reservation", "ec2-capacity-block-p5en"):
        monitor, _ = build(stack)
        assert monitor.of(PLACEMENT) == []
        assert "placement" not in monitor.properties(TEMPLATE)


def test_a_reservation_that_the_stack_makes_is_the_one_that_its_gang_launches_into() -> None:
    monitor, _ = build("ec2-p6-b300-reservation")
    made = monitor.properties(RESERVATION)
    assert (made["availabilityZone"], made["instanceCount"], made["endDateType"]) == ("us-west-2c", 2, "limited")
    target = monitor.properties(TEMPLATE)["capacityReservationSpecification"]
    assert target == {"capacityReservationTarget": {"capacityReservationId": "train-capacity-reservation-id"}}


def test_reserved_capacity_is_protected_and_outlives_the_stack() -> None:
    plan = ReservationPlan("train", "p5.48xlarge", 4, "usw2-az2")
    monitor, values = run(lambda: {"id": Reservation("paid", plan).reservation_id})
    (request,) = monitor.of(RESERVATION)
    assert request.protect
    assert request.retainOnDelete
    assert values["id"] == f"{request.name}-id"


@pytest.mark.parametrize("stack", STACKS)
def test_a_template_names_a_reservation_or_a_preference_never_both(stack: str) -> None:
    monitor, _ = build(stack)
    assert len(monitor.properties(TEMPLATE).get("capacityReservationSpecification", {"none": None})) == 1


@pytest.mark.parametrize("stack", STACKS)
def test_no_group_ends_a_healthy_node_because_another_would_be_safer(stack: str) -> None:
    monitor, _ = build(stack)
    assert not monitor.properties(GROUP).get("capacityRebalance", False)


def test_a_destroy_leaves_nodes_their_time_to_save_and_waits_for_the_last() -> None:
    monitor, _ = build("ec2-spot-g6e")
    (group,), (hook,) = monitor.of(GROUP), monitor.of(HOOK)
    assert hook.retainOnDelete, "or it goes before the group that depends on nothing of it"
    assert group.customTimeouts.delete == "1h"
    assert not group.retainOnDelete


def test_a_block_with_another_count_is_asked_for_it() -> None:
    monitor, _ = build("ec2-capacity-block-p5en")
    assert list(monitor.of(GROUP)[0].ignoreChanges) == []


def test_only_a_block_with_a_known_end_has_a_schedule() -> None:
    monitor, _ = build("ec2-capacity-block-p5en")
    schedule = monitor.properties(SCHEDULE)
    assert (schedule["startTime"], schedule["desiredCapacity"]) == ("2027-02-14T10:55:00Z", 0)
    monitor, _ = build("ec2-spot-g6e")
    assert monitor.of(SCHEDULE) == []
