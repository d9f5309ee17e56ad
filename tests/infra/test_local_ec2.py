"""EC2 and Auto Scaling of the embedded AWS accept what AWS accepts, refuse what it refuses, and lose nothing of a launch."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from infra.catalog.instances import instance
from infra.clock import now
from infra.local.aws import LocalAws
from infra.plan.nodes.gang import gangs
from infra.plan.nodes.nics import nics
from tests.infra.local_network import Network, client, refusal
from tests.infra.specs import AWS, spec_of

pytestmark = pytest.mark.slow

IMAGE = "ami-0123456789abcdef0"
NOWHERE = "sg-0123456789abcdef0"
ENCODED = base64.b64encode(b"x" * 16_385).decode()


@pytest.fixture(scope="module")
def ec2(network: Network) -> Any:
    return network.ec2


def interface(card: int, device: int, kind: str = "interface", **more: Any) -> dict[str, Any]:
    return {"NetworkCardIndex": card, "DeviceIndex": device, "InterfaceType": kind, **more}


def launch(network: Network, name: str = "p5.48xlarge", **more: Any) -> dict[str, Any]:
    """A RunInstances request that EC2 takes."""
    facts = instance(name)
    assert facts is not None
    found = [interface(nic.card, nic.device, nic.kind, Groups=[network.group]) for nic in nics(facts)]
    found[0]["SubnetId"] = network.subnet
    request = {"ImageId": IMAGE, "InstanceType": name, "MinCount": 1, "MaxCount": 1}
    return {**request, "NetworkInterfaces": found, **more}


def warned(ec2: Any, data: dict[str, Any], name: str = "") -> list[str]:
    """Codes of what EC2 warns of when a template is made with this."""
    made = ec2.create_launch_template(
        LaunchTemplateName=name or f"t-{datetime.now(UTC).timestamp()}", LaunchTemplateData=data
    )
    return [error["Code"] for error in made.get("Warning", {}).get("Errors", [])]


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
    assert code in warned(network.ec2, {"InstanceType": name, "NetworkInterfaces": spoiled})


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"IamInstanceProfile": {"Arn": "node"}}, "InvalidParameterValue"),
        ({"IamInstanceProfile": {"Name": "nobody"}}, "InvalidParameterValue"),
        ({"Placement": {"GroupName": "nowhere"}}, "InvalidPlacementGroup.Unknown"),
        ({"ImageId": "resolve:ssm:/aws/service/no-such-image/latest/ami-id"}, "InvalidParameterValue"),
        ({"ImageId": "ubuntu-22.04"}, "InvalidAMIID.Malformed"),
        ({"InstanceMarketOptions": {"MarketType": "capacity-block"}}, "InvalidParameterCombination"),
        ({"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidParameterCombination"),
    ],
)
def test_a_template_that_names_what_is_not_there_is_warned_of(network: Network, change: Any, code: str) -> None:
    request = launch(network)
    data = {key: request[key] for key in ("ImageId", "InstanceType", "NetworkInterfaces")}
    del data["NetworkInterfaces"][0]["SubnetId"]
    assert warned(network.ec2, data) == []
    assert code in warned(network.ec2, {**data, **change})


def test_a_launch_into_what_is_not_there_is_refused(aws: LocalAws, network: Network) -> None:
    for place, code in (
        ({"Groups": [Network(aws).group]}, "InvalidParameter"),
        ({"Groups": [NOWHERE]}, "InvalidGroup.NotFound"),
        ({"SubnetId": "subnet-0123456789abcdef0"}, "InvalidSubnetID.NotFound"),
    ):
        request = launch(network)
        request["NetworkInterfaces"][0] |= place
        assert refusal(network.ec2.run_instances, **request)[0] == code
    unknown = {**launch(network), "InstanceType": "p9.48xlarge"}
    assert refusal(network.ec2.run_instances, **unknown)[0] == "InvalidParameterValue"


def test_a_subnet_without_room_for_all_addresses_takes_none_of_the_instances(network: Network) -> None:
    small = network.ec2.create_subnet(VpcId=network.vpc, CidrBlock="10.0.64.0/28", AvailabilityZoneId="usw2-az2")
    request = launch(network, "m5.large", MinCount=12, MaxCount=12)
    request["NetworkInterfaces"] = [interface(0, 0, Groups=[network.group], SubnetId=small["Subnet"]["SubnetId"])]
    assert refusal(network.ec2.run_instances, **request)[0] == "InsufficientFreeAddressesInSubnet"
    made = network.ec2.run_instances(**{**request, "MinCount": 11, "MaxCount": 11})["Instances"]
    network.ec2.terminate_instances(InstanceIds=[one["InstanceId"] for one in made])


@pytest.mark.parametrize(
    ("text", "code"), [("#!/bin/sh", "InvalidUserData.Malformed"), (ENCODED, "InvalidParameterValue")]
)
def test_user_data_that_is_not_encoded_or_too_long_is_refused(ec2: Any, text: str, code: str) -> None:
    spoiled = {"LaunchTemplateName": "s", "LaunchTemplateData": {"UserData": text}}
    assert refusal(ec2.create_launch_template, **spoiled)[0] == code


def market(kind: str | None, reservation: str) -> dict[str, Any]:
    target = {"CapacityReservationTarget": {"CapacityReservationId": reservation}}
    options = {"InstanceMarketOptions": {"MarketType": kind}} if kind else {}
    return {**options, "CapacityReservationSpecification": target}


def test_placement_groups_live_until_nothing_is_in_them_and_take_only_types_that_may(network: Network) -> None:
    ec2, near = network.ec2, {"Placement": {"GroupName": "near"}}
    ec2.create_placement_group(GroupName="near", Strategy="cluster")
    assert refusal(ec2.create_placement_group, GroupName="near")[0] == "InvalidPlacementGroup.Duplicate"
    assert len(warned(ec2, {"InstanceType": "t3.large", **near})) == 1
    block = {"InstanceType": "p5.48xlarge", **near, **market("capacity-block", "cr-0123456789abcdef0")}
    assert warned(ec2, block) == ["InvalidParameterCombination"]
    assert warned(ec2, {"InstanceType": "g6e.8xlarge", "ImageId": IMAGE, **near}, "in") == []
    inside = {"SubnetId": network.subnet, "LaunchTemplate": {"LaunchTemplateName": "in"}}
    running = ec2.run_instances(MinCount=1, MaxCount=1, **inside)["Instances"][0]["InstanceId"]
    assert refusal(ec2.delete_placement_group, GroupName="near")[0] == "InvalidPlacementGroup.InUse"
    ec2.terminate_instances(InstanceIds=[running])
    ec2.delete_placement_group(GroupName="near")
    assert refusal(ec2.describe_placement_groups, GroupNames=["near"])[0] == "InvalidPlacementGroup.Unknown"


ASKED = {"InstanceType": "p5.48xlarge", "InstancePlatform": "Linux/UNIX", "AvailabilityZoneId": "usw2-az2"}


def test_a_targeted_reservation_gives_its_places_away_and_takes_them_back(network: Network) -> None:
    ec2 = network.ec2
    made = ec2.create_capacity_reservation(**ASKED, InstanceCount=1, InstanceMatchCriteria="targeted")
    wanted = made["CapacityReservation"]["CapacityReservationId"]
    assert warned(ec2, {"InstanceType": "p5.48xlarge", **market(None, wanted)}, "in-reservation") == []
    inside = {"ImageId": IMAGE, "SubnetId": network.subnet, "LaunchTemplate": {"LaunchTemplateName": "in-reservation"}}

    def free() -> int:
        shown = ec2.describe_capacity_reservations(CapacityReservationIds=[wanted])["CapacityReservations"][0]
        return int(shown["AvailableInstanceCount"])

    assert refusal(ec2.run_instances, **inside, MinCount=2, MaxCount=2)[0] == "ReservationCapacityExceeded"
    running = ec2.run_instances(**inside, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    assert free() == 0
    ec2.modify_capacity_reservation(CapacityReservationId=wanted, InstanceCount=3)
    assert free() == 2
    ec2.terminate_instances(InstanceIds=[running])
    assert free() == 3
    ec2.cancel_capacity_reservation(CapacityReservationId=wanted)
    assert refusal(ec2.run_instances, **inside, MinCount=1, MaxCount=1)[0] == "ReservationCapacityExceeded"
    again = refusal(ec2.cancel_capacity_reservation, CapacityReservationId=wanted)
    assert again[0] == "InvalidCapacityReservationState"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"InstanceType": "p9.48xlarge"}, "InvalidParameterValue"),
        ({"AvailabilityZoneId": "use1-az4"}, "InvalidParameterValue"),
        ({"InstanceCount": 0}, "InvalidParameterValue"),
        ({"EndDateType": "limited"}, "MissingParameter"),
        ({"EndDate": datetime(2020, 1, 1, tzinfo=UTC), "EndDateType": "limited"}, "InvalidParameterValue"),
        ({"EndDate": datetime(2040, 1, 1, tzinfo=UTC)}, "InvalidParameterCombination"),
        (
            {"PlacementGroupArn": "arn:aws:ec2:us-west-2:123456789012:placement-group/a"},
            "InvalidPlacementGroup.Unknown",
        ),
    ],
)
def test_a_reservation_that_ec2_would_not_make_is_refused(ec2: Any, change: dict[str, Any], code: str) -> None:
    assert refusal(ec2.create_capacity_reservation, **{**ASKED, "InstanceCount": 2, **change})[0] == code


def test_a_block_that_was_bought_is_neither_changed_nor_cancelled(aws: LocalAws, ec2: Any) -> None:
    block = "cr-0b10c0b10c0b10c0b"
    aws.events.block(block, "p5en.48xlarge", 16, "usw2-az2", "us-west-2", datetime.now(UTC) + timedelta(days=14))
    (made,) = ec2.describe_capacity_reservations(CapacityReservationIds=[block])["CapacityReservations"]
    assert (made["State"], made["ReservationType"], made["AvailableInstanceCount"]) == ("active", "capacity-block", 16)
    assert refusal(ec2.cancel_capacity_reservation, CapacityReservationId=block)[0] == "OperationNotPermitted"
    smaller = {"CapacityReservationId": block, "InstanceCount": 8}
    assert refusal(ec2.modify_capacity_reservation, **smaller)[0] == "OperationNotPermitted"


@pytest.fixture(scope="module")
def scaling(network: Network) -> Any:
    return network.scaling


def template(network: Network, name: str, **data: Any) -> dict[str, str]:
    given = {"ImageId": IMAGE, "InstanceType": "g6e.8xlarge", "SecurityGroupIds": [network.group], **data}
    kept = {key: value for key, value in given.items() if value is not None}
    made = network.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=kept)["LaunchTemplate"]
    return {"LaunchTemplateId": made["LaunchTemplateId"], "Version": "1"}


def gang(network: Network, name: str, launch: dict[str, str], count: int = 2, **more: Any) -> dict[str, Any]:
    sizes = {"MinSize": count, "MaxSize": count, "DesiredCapacity": count}
    where = {"LaunchTemplate": launch, "VPCZoneIdentifier": network.subnet}
    return {"AutoScalingGroupName": name, **where, **sizes, **more}


def group(scaling: Any, name: str) -> dict[str, Any]:
    found = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    return dict(found[0])


def test_a_gang_gets_all_interfaces_of_its_version_in_its_one_subnet(network: Network, scaling: Any) -> None:
    facts = instance("p5.48xlarge")
    assert facts is not None
    wanted = [
        {"NetworkCardIndex": nic.card, "DeviceIndex": nic.device, "InterfaceType": nic.kind, "Groups": [network.group]}
        for nic in nics(facts)
    ]
    launch = template(network, "p5", InstanceType="p5.48xlarge", NetworkInterfaces=wanted, SecurityGroupIds=None)
    network.ec2.create_launch_template_version(
        LaunchTemplateId=launch["LaunchTemplateId"], LaunchTemplateData={"ImageId": IMAGE, "InstanceType": "m5.large"}
    )
    scaling.create_auto_scaling_group(
        **gang(network, "p5", launch, Tags=[{"Key": "k", "Value": "v", "PropagateAtLaunch": True}])
    )
    shown = group(scaling, "p5")
    assert {one["LifecycleState"] for one in shown["Instances"]} == {"InService"}
    assert {one["LaunchTemplate"]["Version"] for one in shown["Instances"]} == {"1"}
    ids = [one["InstanceId"] for one in shown["Instances"]]
    for reservation in network.ec2.describe_instances(InstanceIds=ids)["Reservations"]:
        for one in reservation["Instances"]:
            assert (one["InstanceType"], one["SubnetId"]) == ("p5.48xlarge", network.subnet)
            assert sum(nic["InterfaceType"] == "efa-only" for nic in one["NetworkInterfaces"]) == 32
            assert {"Key": "k", "Value": "v"} in one["Tags"]
    scaling.delete_auto_scaling_group(AutoScalingGroupName="p5", ForceDelete=True)


def test_what_ec2_would_not_launch_makes_no_group(network: Network, scaling: Any) -> None:
    two = [{"NetworkCardIndex": 0, "DeviceIndex": 0}] * 2
    good = template(network, "good")
    for wrong in (
        gang(network, "g", template(network, "twice", NetworkInterfaces=two, SecurityGroupIds=None)),
        gang(network, "g", {"LaunchTemplateId": "lt-0123456789abcdef0", "Version": "1"}),
        gang(network, "g", {**good, "Version": "7"}),
        gang(network, "g", good, VPCZoneIdentifier="subnet-0123456789abcdef0"),
        gang(network, "g", good, DesiredCapacity=3),
    ):
        assert refusal(scaling.create_auto_scaling_group, **wrong)[0] == "ValidationError"


def test_a_name_is_taken_once_and_a_group_with_instances_stays(network: Network, scaling: Any) -> None:
    launch = template(network, "once")
    scaling.create_auto_scaling_group(**gang(network, "once", launch))
    assert refusal(scaling.create_auto_scaling_group, **gang(network, "once", launch))[0] == "AlreadyExists"
    assert refusal(scaling.delete_auto_scaling_group, AutoScalingGroupName="once")[0] == "ResourceInUse"
    scaling.update_auto_scaling_group(AutoScalingGroupName="once", MinSize=0, MaxSize=0, DesiredCapacity=0)
    scaling.delete_auto_scaling_group(AutoScalingGroupName="once")
    assert scaling.describe_auto_scaling_groups(AutoScalingGroupNames=["once"])["AutoScalingGroups"] == []


def test_a_reservation_that_is_not_there_leaves_the_group_empty_and_says_why(network: Network, scaling: Any) -> None:
    target = {"CapacityReservationTarget": {"CapacityReservationId": "cr-0123456789abcdef0"}}
    launch = template(network, "reserved", InstanceType="p5.48xlarge", CapacityReservationSpecification=target)
    scaling.create_auto_scaling_group(**gang(network, "reserved", launch))
    assert group(scaling, "reserved")["Instances"] == []
    activity = scaling.describe_scaling_activities(AutoScalingGroupName="reserved")["Activities"][0]
    assert (activity["StatusCode"], "cr-0123456789abcdef0" in activity["StatusMessage"]) == ("Failed", True)


def test_a_terminated_instance_is_replaced_unless_that_is_suspended(network: Network, scaling: Any) -> None:
    scaling.create_auto_scaling_group(**gang(network, "heals", template(network, "heals")))
    before = {one["InstanceId"] for one in group(scaling, "heals")["Instances"]}
    network.ec2.terminate_instances(InstanceIds=[min(before)])
    after = {one["InstanceId"] for one in group(scaling, "heals")["Instances"]}
    assert (len(after), len(after & before)) == (2, 1)
    scaling.suspend_processes(AutoScalingGroupName="heals", ScalingProcesses=["ReplaceUnhealthy"])
    network.ec2.terminate_instances(InstanceIds=[min(after)])
    shown = {one["InstanceId"]: one["HealthStatus"] for one in group(scaling, "heals")["Instances"]}
    assert shown == {min(after): "Unhealthy", max(after): "Healthy"}


@pytest.mark.parametrize("zone", [{"AvailabilityZone": "us-west-2a"}, {"AvailabilityZoneId": "usw2-az1"}])
def test_a_zone_of_another_region_is_refused(aws: LocalAws, zone: dict[str, str]) -> None:
    ec2 = client(aws, "ec2", "us-east-1")
    vpc = ec2.create_vpc(CidrBlock="10.2.0.0/16")["Vpc"]["VpcId"]
    assert refusal(ec2.create_subnet, VpcId=vpc, CidrBlock="10.2.0.0/18", **zone)[0] == "InvalidParameterValue"


def test_rules_keep_their_description_whoever_the_peer_is_and_let_it_be_changed(network: Network) -> None:
    ec2 = network.ec2
    group = network.closed_group("described")
    lists = ec2.describe_managed_prefix_lists()["PrefixLists"]
    prefix = next(one["PrefixListId"] for one in lists if one["PrefixListName"].endswith(".s3"))
    tcp = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443}
    permissions = [
        {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group, "Description": "self"}]},
        {**tcp, "PrefixListIds": [{"PrefixListId": prefix, "Description": "s3"}]},
        {**tcp, "IpRanges": [{"CidrIp": "10.0.0.0/8", "Description": "vpn"}]},
    ]
    made = ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=permissions)
    assert made["Return"]
    rules = ec2.describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [group]}])["SecurityGroupRules"]
    assert {rule["Description"] for rule in rules if not rule["IsEgress"]} == {"self", "s3", "vpn"}
    own = next(rule for rule in rules if rule.get("Description") == "self")
    change = {"IpProtocol": "-1", "ReferencedGroupId": group, "Description": "all of us"}
    wanted = own["SecurityGroupRuleId"]
    ec2.modify_security_group_rules(
        GroupId=group, SecurityGroupRules=[{"SecurityGroupRuleId": wanted, "SecurityGroupRule": change}]
    )
    shown = ec2.describe_security_group_rules(SecurityGroupRuleIds=[wanted])["SecurityGroupRules"][0]
    assert (shown["Description"], shown["IpProtocol"]) == ("all of us", "-1")
    wrong = [{"SecurityGroupRuleId": wanted, "SecurityGroupRule": {"IpProtocol": "-1", "CidrIpv4": "0.0.0.0/0"}}]
    refused = refusal(ec2.modify_security_group_rules, GroupId=group, SecurityGroupRules=wrong)
    assert refused[0] == "InvalidParameterValue"


def test_endpoints_want_names_that_resolve_groups_that_are_there_and_one_private_name(aws: LocalAws) -> None:
    network = Network(aws)
    ec2 = network.ec2
    asked = {
        "VpcId": network.vpc, "ServiceName": "com.amazonaws.us-west-2.logs", "VpcEndpointType": "Interface",
        "SubnetIds": [network.subnet], "SecurityGroupIds": [network.group], "PrivateDnsEnabled": True,
    }  # fmt: skip
    assert refusal(ec2.create_vpc_endpoint, **asked)[0] == "InvalidParameter"
    ec2.modify_vpc_attribute(VpcId=network.vpc, EnableDnsHostnames={"Value": True})
    made = ec2.create_vpc_endpoint(**asked)["VpcEndpoint"]
    assert (made["PrivateDnsEnabled"], made["Groups"][0]["GroupId"]) == (True, network.group)
    assert refusal(ec2.create_vpc_endpoint, **asked)[0] == "InvalidParameter"
    unknown = {**asked, "SecurityGroupIds": ["sg-0123456789abcdef0"], "PrivateDnsEnabled": False}
    assert refusal(ec2.create_vpc_endpoint, **unknown)[0] == "InvalidGroup.NotFound"
    table = ec2.create_route_table(VpcId=network.vpc)["RouteTable"]["RouteTableId"]
    s3 = {"VpcId": network.vpc, "ServiceName": "com.amazonaws.us-west-2.s3", "VpcEndpointType": "Gateway"}
    gateway = {**s3, "RouteTableIds": [table]}
    assert ec2.create_vpc_endpoint(**gateway)["VpcEndpoint"]["RouteTableIds"] == [table]
    assert refusal(ec2.create_vpc_endpoint, **gateway)[0] == "RouteAlreadyExists"


def test_a_subnet_stays_while_an_instance_runs_in_it_and_goes_after_that(aws: LocalAws) -> None:
    network = Network(aws)
    made = network.ec2.run_instances(
        ImageId=IMAGE, InstanceType="m5.large", MinCount=1, MaxCount=1,
        SubnetId=network.subnet, SecurityGroupIds=[network.group],
    )["Instances"][0]["InstanceId"]  # fmt: skip
    assert refusal(network.ec2.delete_subnet, SubnetId=network.subnet)[0] == "DependencyViolation"
    assert refusal(network.ec2.delete_security_group, GroupId=network.group)[0] == "DependencyViolation"
    network.ec2.terminate_instances(InstanceIds=[made])
    network.ec2.delete_subnet(SubnetId=network.subnet)
    network.ec2.delete_security_group(GroupId=network.group)
    network.ec2.delete_vpc(VpcId=network.vpc)


def test_documented_parameters_name_an_image_and_others_do_not(aws: LocalAws) -> None:
    ssm = client(aws, "ssm")
    for kind in ("p5.48xlarge", "g5g.16xlarge", "trn1.32xlarge", "c7g.16xlarge"):
        (gang,) = gangs(spec_of(kind=kind), AWS, now())
        first = ssm.get_parameter(Name=gang.image.parameter)["Parameter"]["Value"]
        assert first.startswith("ami-")
        assert ssm.get_parameter(Name=gang.image.parameter)["Parameter"]["Value"] == first
    unknown = "/aws/service/deeplearning/ami/x86_64/no-such-image/latest/ami-id"
    assert refusal(ssm.get_parameter, Name=unknown)[0] == "ParameterNotFound"
