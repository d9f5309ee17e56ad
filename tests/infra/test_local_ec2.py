"""EC2 of the embedded AWS accepts what EC2 accepts, refuses what it refuses, and loses nothing of a launch."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.catalog.instances import instance, snapshot
from infra.local.aws import LocalAws
from infra.plan.nodes.nics import Nic, nics
from tests.infra.local_network import Network, refusal

pytestmark = pytest.mark.slow

EFA_TYPES = sorted(name for name, facts in snapshot().types.items() if facts.efa)


@pytest.fixture(scope="module")
def ec2(network: Network) -> Any:
    return network.ec2


def interface(card: int, device: int, kind: str = "interface", **more: Any) -> dict[str, Any]:
    return {"NetworkCardIndex": card, "DeviceIndex": device, "InterfaceType": kind, **more}


def interfaces(layout: tuple[Nic, ...], group: str) -> list[dict[str, Any]]:
    return [interface(nic.card, nic.device, nic.kind, Groups=[group]) for nic in layout]


def layout_of(name: str) -> tuple[Nic, ...]:
    facts = instance(name)
    assert facts is not None
    return nics(facts)


def launch(network: Network, name: str = "p5.48xlarge", **more: Any) -> dict[str, Any]:
    """A RunInstances request that EC2 takes."""
    found = interfaces(layout_of(name), network.group)
    found[0]["SubnetId"] = network.subnet
    request = {"ImageId": "ami-0123456789abcdef0", "InstanceType": name, "MinCount": 1, "MaxCount": 1}
    return {**request, "NetworkInterfaces": found, **more}


def test_an_instance_has_each_interface_of_its_launch_on_its_card_and_efa_only_takes_no_address(
    network: Network,
) -> None:
    def free() -> int:
        shown = network.ec2.describe_subnets(SubnetIds=[network.subnet])["Subnets"][0]
        return int(shown["AvailableIpAddressCount"])

    before = free()
    made = network.ec2.run_instances(**launch(network))["Instances"][0]["InstanceId"]
    shown = network.ec2.describe_instances(InstanceIds=[made])["Reservations"][0]["Instances"][0]["NetworkInterfaces"]
    slots = {(one["Attachment"]["NetworkCardIndex"], one["Attachment"]["DeviceIndex"]) for one in shown}
    assert len(shown) == len(slots) == 33
    assert sum(one["InterfaceType"] == "efa-only" and "PrivateIpAddress" not in one for one in shown) == 32
    assert all(one["Groups"] == [{"GroupId": network.group, "GroupName": "cluster"}] for one in shown)
    assert free() == before - 1
    network.ec2.terminate_instances(InstanceIds=[made])
    assert free() == before


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(EFA_TYPES), st.sampled_from(["addresses", "bandwidth"]))
def test_the_layout_that_we_derive_is_one_that_ec2_takes(network: Network, name: str, policy: Any) -> None:
    facts = instance(name)
    assert facts is not None
    made = network.ec2.create_launch_template(
        LaunchTemplateName=f"layout-{datetime.now(UTC).timestamp()}",
        LaunchTemplateData={
            "InstanceType": name,
            "NetworkInterfaces": interfaces(nics(facts, policy), network.group),
        },
    )
    assert "Warning" not in made


@pytest.mark.parametrize(
    ("name", "spoiled", "code"),
    [
        ("p5.48xlarge", [interface(0, 0), *(interface(card, 1, "efa") for card in range(33))], "AttachmentLimitExceeded"),
        ("p6-b300.48xlarge", [interface(0, 0), *(interface(card, 0, "efa") for card in range(17))], "InvalidParameterValue"),
        ("p5.48xlarge", [interface(0, 0), interface(4, 1, "efa"), interface(4, 1)], "InvalidParameterValue"),
        ("p5.48xlarge", [interface(0, 0, "efa-only")], "InvalidParameterCombination"),
        ("p5.48xlarge", [interface(1, 0)], "InvalidParameterValue"),
        ("p5.48xlarge", [interface(0, 0), interface(32, 0)], "InvalidParameterValue"),
        ("p5.48xlarge", [interface(0, 0), interface(1, 2)], "InvalidParameterValue"),
        ("g6e.8xlarge", [interface(0, 0), *(interface(0, n, "efa-only") for n in (1, 2))], "AttachmentLimitExceeded"),
        ("m5.large", [interface(0, 0), interface(0, 1, "efa")], "InvalidParameterCombination"),
        ("p6-b300.48xlarge", [interface(0, 0), interface(0, 1, "efa-only")], "InvalidParameterCombination"),
        ("p5.48xlarge", [interface(0, 0, AssociatePublicIpAddress=True), interface(1, 0)], "InvalidParameterCombination"),
        ("p5.48xlarge", [interface(0, 0), interface(1, 0, "efb")], "InvalidParameterValue"),
    ],
    ids=[
        "more EFA than the type has", "a slot of card 0 twice", "two on one slot", "efa-only as primary", "no primary",
        "a card too many", "a device too many", "two EFA on g6e.8xlarge", "EFA on a type without", "EFA on b300's card 0",
        "public address with two", "unknown interface type",
    ],
)  # fmt: skip
def test_interfaces_that_the_type_does_not_take_are_refused_at_launch_and_warned_of_in_a_template(
    network: Network, name: str, spoiled: list[dict[str, Any]], code: str
) -> None:
    spoiled = [{**one, "Groups": [network.group]} for one in spoiled]
    spoiled[0]["SubnetId"] = network.subnet
    request = {**launch(network), "InstanceType": name, "NetworkInterfaces": spoiled}
    assert refusal(network.ec2.run_instances, **request)[0] == code
    template = {"InstanceType": name, "NetworkInterfaces": spoiled}
    made = network.ec2.create_launch_template(
        LaunchTemplateName=f"bad-{datetime.now(UTC).timestamp()}", LaunchTemplateData=template
    )
    assert code in [error["Code"] for error in made["Warning"]["Errors"]]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"IamInstanceProfile": {"Arn": "node"}}, "InvalidParameterValue"),
        ({"IamInstanceProfile": {"Name": "nobody"}}, "InvalidParameterValue"),
        ({"Placement": {"GroupName": "nowhere"}}, "InvalidPlacementGroup.Unknown"),
        ({"ImageId": "resolve:ssm:/aws/service/deeplearning/ami/x86_64/no-such-image/latest/ami-id"}, "InvalidParameterValue"),
        ({"ImageId": "ubuntu-22.04"}, "InvalidAMIID.Malformed"),
        ({"InstanceMarketOptions": {"MarketType": "capacity-block"}}, "InvalidParameterCombination"),
        ({"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidParameterCombination"),
    ],
)  # fmt: skip
def test_a_launch_that_names_what_is_not_there_is_refused(network: Network, change: dict[str, Any], code: str) -> None:
    data = {
        "ImageId": "ami-0123456789abcdef0",
        "InstanceType": "p5.48xlarge",
        "NetworkInterfaces": interfaces(layout_of("p5.48xlarge"), network.group),
        **change,
    }
    made = network.ec2.create_launch_template(
        LaunchTemplateName=f"bad-{datetime.now(UTC).timestamp()}", LaunchTemplateData=data
    )
    assert code in [error["Code"] for error in made["Warning"]["Errors"]]


def test_a_group_of_another_network_and_one_that_is_nowhere_are_refused(aws: LocalAws, network: Network) -> None:
    strange = Network(aws)
    request = launch(network)
    request["NetworkInterfaces"][0]["Groups"] = [strange.group]
    assert refusal(network.ec2.run_instances, **request)[0] == "InvalidParameter"
    request["NetworkInterfaces"][0]["Groups"] = ["sg-0123456789abcdef0"]
    assert refusal(network.ec2.run_instances, **request)[0] == "InvalidGroup.NotFound"
    request = launch(network)
    request["NetworkInterfaces"][0]["SubnetId"] = "subnet-0123456789abcdef0"
    assert refusal(network.ec2.run_instances, **request)[0] == "InvalidSubnetID.NotFound"


def test_an_unknown_instance_type_is_refused(network: Network) -> None:
    assert refusal(network.ec2.run_instances, **{**launch(network), "InstanceType": "p9.48xlarge"})[0] == (
        "InvalidParameterValue"
    )


def test_a_subnet_without_room_for_all_addresses_takes_none_of_the_instances(network: Network) -> None:
    small = network.ec2.create_subnet(VpcId=network.vpc, CidrBlock="10.0.64.0/28", AvailabilityZoneId="usw2-az2")
    request = launch(network, "m5.large", MinCount=12, MaxCount=12)
    request["NetworkInterfaces"] = [interface(0, 0, Groups=[network.group], SubnetId=small["Subnet"]["SubnetId"])]
    assert refusal(network.ec2.run_instances, **request)[0] == "InsufficientFreeAddressesInSubnet"
    made = network.ec2.run_instances(**{**request, "MinCount": 11, "MaxCount": 11})["Instances"]
    network.ec2.terminate_instances(InstanceIds=[one["InstanceId"] for one in made])


def test_a_template_keeps_its_data_and_tags_and_refuses_user_data_that_is_not_encoded(network: Network) -> None:
    ec2 = network.ec2
    data = {
        "InstanceType": "g6e.8xlarge",
        "UserData": base64.b64encode(b"#!/bin/sh").decode(),
        "TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "b"}]}],
        "CapacityReservationSpecification": {"CapacityReservationPreference": "none"},
    }
    own = [{"ResourceType": "launch-template", "Tags": [{"Key": "x", "Value": "y"}]}]
    made = ec2.create_launch_template(LaunchTemplateName="kept", LaunchTemplateData=data, TagSpecifications=own)
    wanted = made["LaunchTemplate"]["LaunchTemplateId"]
    ec2.create_launch_template_version(
        LaunchTemplateId=wanted, LaunchTemplateData=data | {"InstanceType": "g6e.16xlarge"}
    )
    ec2.create_tags(Resources=[wanted], Tags=[{"Key": "x", "Value": "z"}])
    shown = ec2.describe_launch_template_versions(LaunchTemplateId=wanted)["LaunchTemplateVersions"]
    assert [one["LaunchTemplateData"] for one in shown] == [data, data | {"InstanceType": "g6e.16xlarge"}]
    assert ec2.describe_launch_templates(LaunchTemplateIds=[wanted])["LaunchTemplates"][0]["Tags"] == [
        {"Key": "x", "Value": "z"}
    ]
    spoiled = {"LaunchTemplateName": "s", "LaunchTemplateData": data | {"UserData": "#!/bin/sh"}}
    assert refusal(ec2.create_launch_template, **spoiled)[0] == "InvalidUserData.Malformed"
    large = base64.b64encode(b"x" * 16_385).decode()
    assert refusal(
        ec2.create_launch_template, **spoiled | {"LaunchTemplateData": {"UserData": large}}
    )[0] == "InvalidParameterValue"  # fmt: skip


def test_placement_groups_live_until_nothing_is_in_them_and_take_only_types_that_may(network: Network) -> None:
    ec2 = network.ec2
    made = ec2.create_placement_group(GroupName="near", Strategy="cluster")["PlacementGroup"]
    assert (made["State"], made["Strategy"]) == ("available", "cluster")
    assert refusal(ec2.create_placement_group, GroupName="near")[0] == "InvalidPlacementGroup.Duplicate"
    template = {"InstanceType": "t3.large", "Placement": {"GroupName": "near"}}
    warned = ec2.create_launch_template(LaunchTemplateName="t3", LaunchTemplateData=template)["Warning"]["Errors"]
    assert warned[0]["Message"].startswith(
        "Cluster placement groups are not supported by the 't3.large' instance type."
    )
    block = {
        "InstanceType": "p5.48xlarge",
        "Placement": {"GroupName": "near"},
        **market("capacity-block", "cr-0123456789abcdef0"),
    }
    warned = ec2.create_launch_template(LaunchTemplateName="block", LaunchTemplateData=block)["Warning"]["Errors"]
    assert [one["Code"] for one in warned] == ["InvalidParameterCombination"]
    inside = template | {"InstanceType": "g6e.8xlarge", "ImageId": "ami-0123456789abcdef0"}
    ec2.create_launch_template(LaunchTemplateName="in", LaunchTemplateData=inside)
    made = ec2.run_instances(
        MinCount=1, MaxCount=1, SubnetId=network.subnet, LaunchTemplate={"LaunchTemplateName": "in"}
    )
    running = made["Instances"][0]["InstanceId"]
    assert refusal(ec2.delete_placement_group, GroupName="near")[0] == "InvalidPlacementGroup.InUse"
    ec2.terminate_instances(InstanceIds=[running])
    ec2.delete_placement_group(GroupName="near")
    assert refusal(ec2.describe_placement_groups, GroupNames=["near"])[0] == "InvalidPlacementGroup.Unknown"


def market(kind: str | None, reservation: str) -> dict[str, Any]:
    target = {"CapacityReservationTarget": {"CapacityReservationId": reservation}}
    return {
        **({"InstanceMarketOptions": {"MarketType": kind}} if kind else {}),
        "CapacityReservationSpecification": target,
    }


def test_a_targeted_reservation_gives_its_places_away_and_takes_them_back(network: Network) -> None:
    ec2 = network.ec2
    asked = {"InstanceType": "p5.48xlarge", "InstancePlatform": "Linux/UNIX", "AvailabilityZoneId": "usw2-az2"}
    made = ec2.create_capacity_reservation(**asked, InstanceCount=1, InstanceMatchCriteria="targeted")[
        "CapacityReservation"
    ]
    wanted = made["CapacityReservationId"]
    assert (made["State"], made["AvailabilityZone"], made["EndDateType"]) == ("active", "us-west-2a", "unlimited")
    ec2.create_launch_template(
        LaunchTemplateName="in-reservation", LaunchTemplateData={"InstanceType": "p5.48xlarge", **market(None, wanted)}
    )

    def run(count: int) -> dict[str, Any]:
        return {
            "ImageId": "ami-0123456789abcdef0", "SubnetId": network.subnet, "MinCount": count, "MaxCount": count,
            "LaunchTemplate": {"LaunchTemplateName": "in-reservation"},
        }  # fmt: skip

    def free() -> int:
        shown = ec2.describe_capacity_reservations(CapacityReservationIds=[wanted])["CapacityReservations"][0]
        return int(shown["AvailableInstanceCount"])

    assert refusal(ec2.run_instances, **run(2))[0] == "ReservationCapacityExceeded"
    running = ec2.run_instances(**run(1))["Instances"][0]["InstanceId"]
    assert free() == 0
    ec2.modify_capacity_reservation(CapacityReservationId=wanted, InstanceCount=3)
    assert free() == 2
    ec2.terminate_instances(InstanceIds=[running])
    assert free() == 3
    ec2.cancel_capacity_reservation(CapacityReservationId=wanted)
    assert refusal(ec2.run_instances, **run(1))[0] == "ReservationCapacityExceeded"
    assert (
        refusal(ec2.cancel_capacity_reservation, CapacityReservationId=wanted)[0] == "InvalidCapacityReservationState"
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"InstanceType": "p9.48xlarge"}, "InvalidParameterValue"),
        ({"AvailabilityZoneId": "use1-az4"}, "InvalidParameterValue"),
        ({"InstanceCount": 0}, "InvalidParameterValue"),
        ({"EndDateType": "limited"}, "MissingParameter"),
        ({"EndDate": datetime(2020, 1, 1, tzinfo=UTC), "EndDateType": "limited"}, "InvalidParameterValue"),
        ({"EndDate": datetime(2040, 1, 1, tzinfo=UTC)}, "InvalidParameterCombination"),
        ({"PlacementGroupArn": "arn:aws:ec2:us-west-2:123456789012:placement-group/none"}, "InvalidPlacementGroup.Unknown"),
    ],
)  # fmt: skip
def test_a_reservation_that_ec2_would_not_make_is_refused(ec2: Any, change: dict[str, Any], code: str) -> None:
    asked = {
        "InstanceType": "p5.48xlarge",
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZoneId": "usw2-az2",
        "InstanceCount": 2,
    }
    assert refusal(ec2.create_capacity_reservation, **{**asked, **change})[0] == code


def test_a_block_that_was_bought_is_neither_changed_nor_cancelled(aws: LocalAws, ec2: Any) -> None:
    block = "cr-0b10c0b10c0b10c0b"
    aws.events.block(block, "p5en.48xlarge", 16, "usw2-az2", "us-west-2", datetime.now(UTC) + timedelta(days=14))
    (made,) = ec2.describe_capacity_reservations(CapacityReservationIds=[block])["CapacityReservations"]
    assert (made["State"], made["ReservationType"], made["AvailableInstanceCount"]) == ("active", "capacity-block", 16)
    assert refusal(ec2.cancel_capacity_reservation, CapacityReservationId=block)[0] == "OperationNotPermitted"
    smaller = {"CapacityReservationId": block, "InstanceCount": 8}
    assert refusal(ec2.modify_capacity_reservation, **smaller)[0] == "OperationNotPermitted"
