"""EC2 and Auto Scaling of the embedded AWS validate like AWS and store every field of a launch."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import pytest

from infra.catalog.instances import instance
from infra.clock import now
from infra.local.aws import LocalAws
from infra.plan.nodes.auto_scaling import node_groups
from infra.plan.nodes.capacity import SPOT_STRATEGY
from infra.plan.nodes.nics import nics
from tests.infra.local_network import Network, client, refusal
from tests.infra.specs import AWS, spec_of

pytestmark = pytest.mark.slow

IMAGE = "ami-0123456789abcdef0"
MISSING_GROUP = "sg-0123456789abcdef0"
ENCODED = base64.b64encode(b"x" * 16_385).decode()


@pytest.fixture(scope="module")
def ec2(network: Network) -> Any:
    return network.ec2


def interface(card: int, device: int, kind: str = "interface", **more: Any) -> dict[str, Any]:
    return {"NetworkCardIndex": card, "DeviceIndex": device, "InterfaceType": kind, **more}


def launch(network: Network, name: str = "p5.48xlarge", **more: Any) -> dict[str, Any]:
    """A valid RunInstances request."""
    instance_type = instance(name)
    assert instance_type is not None
    interfaces = [interface(nic.card, nic.device, nic.kind, Groups=[network.group]) for nic in nics(instance_type)]
    interfaces[0]["SubnetId"] = network.subnet
    request = {"ImageId": IMAGE, "InstanceType": name, "MinCount": 1, "MaxCount": 1}
    return {**request, "NetworkInterfaces": interfaces, **more}


def test_efa_only_interfaces_take_no_address(
    network: Network,
) -> None:
    def free() -> int:
        subnet = network.ec2.describe_subnets(SubnetIds=[network.subnet])["Subnets"][0]
        return int(subnet["AvailableIpAddressCount"])

    before = free()
    instance_id = network.ec2.run_instances(**launch(network))["Instances"][0]["InstanceId"]
    (reservation,) = network.ec2.describe_instances(InstanceIds=[instance_id])["Reservations"]
    interfaces = reservation["Instances"][0]["NetworkInterfaces"]
    slots = {(nic["Attachment"]["NetworkCardIndex"], nic["Attachment"]["DeviceIndex"]) for nic in interfaces}
    assert len(interfaces) == len(slots) == 33
    assert sum(nic["InterfaceType"] == "efa-only" and "PrivateIpAddress" not in nic for nic in interfaces) == 32
    assert all(nic["Groups"] == [{"GroupId": network.group, "GroupName": "cluster"}] for nic in interfaces)
    assert free() == before - 1
    network.ec2.terminate_instances(InstanceIds=[instance_id])
    assert free() == before


@pytest.mark.parametrize(
    ("spoiled", "code"),
    [
        ([interface(0, 0), interface(4, 1, "efa"), interface(4, 1)], "InvalidParameterValue"),
        ([interface(0, 0, AssociatePublicIpAddress=True), interface(1, 0)], "InvalidParameterCombination"),
        ([interface(0, 0), interface(1, 0, "efb")], "InvalidParameterValue"),
        ([interface(0, 0), interface(1, 0, "efa-only", PrivateIpAddress="10.0.0.9")], "InvalidParameterCombination"),
    ],
    ids=["two on one slot", "public address with two", "unknown interface type", "efa-only with an address"],
)
def test_interfaces_that_do_not_go_together_are_refused(
    network: Network, spoiled: list[dict[str, Any]], code: str
) -> None:
    spoiled = [{**spec, "Groups": [network.group]} for spec in spoiled]
    spoiled[0]["SubnetId"] = network.subnet
    assert refusal(network.ec2.run_instances, **launch(network, NetworkInterfaces=spoiled))[0] == code


@pytest.mark.parametrize(
    "change",
    [
        {"IamInstanceProfile": {"Arn": "node"}},
        {"IamInstanceProfile": {"Name": "nobody"}},
        {"Placement": {"GroupName": "nowhere"}},
        {"ImageId": "resolve:ssm:/aws/service/no-such-image/latest/ami-id"},
        {"ImageId": "ubuntu-22.04"},
        {"InstanceMarketOptions": {"MarketType": "capacity-block"}},
        {"SecurityGroupIds": ["sg-0123456789abcdef0"]},
    ],
    ids=str,
)
def test_group_with_a_flawed_template_is_refused(network: Network, scaling: Any, change: dict[str, Any]) -> None:
    request = launch(network)
    data = {key: request[key] for key in ("ImageId", "InstanceType", "NetworkInterfaces")}
    del data["NetworkInterfaces"][0]["SubnetId"]
    flawed = template(
        network, f"flawed-{next(iter(change))}-{len(str(change))}", **{"SecurityGroupIds": None, **data, **change}
    )
    assert refusal(scaling.create_auto_scaling_group, **group_request(network, "g", flawed))[0] == "ValidationError"


def test_launch_into_missing_network_is_refused(aws: LocalAws, network: Network) -> None:
    for members, code in (
        ({"Groups": [Network(aws).group]}, "InvalidParameter"),
        ({"Groups": [MISSING_GROUP]}, "InvalidGroup.NotFound"),
        ({"SubnetId": "subnet-0123456789abcdef0"}, "InvalidSubnetID.NotFound"),
    ):
        request = launch(network)
        request["NetworkInterfaces"][0] |= members
        assert refusal(network.ec2.run_instances, **request)[0] == code


def test_launch_into_full_subnet_is_refused(network: Network) -> None:
    small_subnet = network.ec2.create_subnet(VpcId=network.vpc, CidrBlock="10.0.64.0/28", AvailabilityZoneId="usw2-az2")
    request = launch(network, "m5.large", MinCount=12, MaxCount=12)
    request["NetworkInterfaces"] = [
        interface(0, 0, Groups=[network.group], SubnetId=small_subnet["Subnet"]["SubnetId"])
    ]
    assert refusal(network.ec2.run_instances, **request)[0] == "InsufficientFreeAddressesInSubnet"
    instances = network.ec2.run_instances(**{**request, "MinCount": 11, "MaxCount": 11})["Instances"]
    network.ec2.terminate_instances(InstanceIds=[launched["InstanceId"] for launched in instances])


@pytest.mark.parametrize(
    ("text", "code"), [("#!/bin/sh", "InvalidUserData.Malformed"), (ENCODED, "InvalidParameterValue")]
)
def test_malformed_or_long_user_data_is_refused(ec2: Any, text: str, code: str) -> None:
    request = {"LaunchTemplateName": "s", "LaunchTemplateData": {"UserData": text}}
    assert refusal(ec2.create_launch_template, **request)[0] == code


def test_used_placement_group_cannot_be_deleted(network: Network) -> None:
    ec2 = network.ec2
    ec2.create_placement_group(GroupName="near", Strategy="cluster")
    assert refusal(ec2.create_placement_group, GroupName="near")[0] == "InvalidPlacementGroup.Duplicate"
    launched = template(network, "in", Placement={"GroupName": "near"})
    request = {"SubnetId": network.subnet, "LaunchTemplate": launched}
    instance_id = ec2.run_instances(MinCount=1, MaxCount=1, **request)["Instances"][0]["InstanceId"]
    assert refusal(ec2.delete_placement_group, GroupName="near")[0] == "InvalidPlacementGroup.InUse"
    ec2.terminate_instances(InstanceIds=[instance_id])
    ec2.delete_placement_group(GroupName="near")
    assert refusal(ec2.describe_placement_groups, GroupNames=["near"])[0] == "InvalidPlacementGroup.Unknown"


RESERVATION = {"InstanceType": "p5.48xlarge", "InstancePlatform": "Linux/UNIX", "AvailabilityZoneId": "usw2-az2"}


def test_targeted_reservation_counts_its_instances(network: Network) -> None:
    ec2 = network.ec2
    response = ec2.create_capacity_reservation(**RESERVATION, InstanceCount=1, InstanceMatchCriteria="targeted")
    reservation_id = response["CapacityReservation"]["CapacityReservationId"]
    target = {"CapacityReservationTarget": {"CapacityReservationId": reservation_id}}
    reserved = {"InstanceType": "p5.48xlarge", "CapacityReservationSpecification": target}
    launched = template(network, "in-reservation", **reserved)
    launch_request = {"SubnetId": network.subnet, "LaunchTemplate": launched}

    def free() -> int:
        listing = ec2.describe_capacity_reservations(CapacityReservationIds=[reservation_id])
        return int(listing["CapacityReservations"][0]["AvailableInstanceCount"])

    assert refusal(ec2.run_instances, **launch_request, MinCount=2, MaxCount=2)[0] == "ReservationCapacityExceeded"
    running = ec2.run_instances(**launch_request, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    assert free() == 0
    ec2.modify_capacity_reservation(CapacityReservationId=reservation_id, InstanceCount=3)
    assert free() == 2
    ec2.terminate_instances(InstanceIds=[running])
    assert free() == 3
    ec2.cancel_capacity_reservation(CapacityReservationId=reservation_id)
    assert refusal(ec2.run_instances, **launch_request, MinCount=1, MaxCount=1)[0] == "ReservationCapacityExceeded"
    second_cancel = refusal(ec2.cancel_capacity_reservation, CapacityReservationId=reservation_id)
    assert second_cancel[0] == "InvalidCapacityReservationState"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"AvailabilityZoneId": "use1-az4"}, "InvalidParameterValue"),
        ({"EndDateType": "limited"}, "InvalidParameterCombination"),
        ({"EndDate": datetime(2040, 1, 1, tzinfo=UTC)}, "InvalidParameterCombination"),
        (
            {"PlacementGroupArn": "arn:aws:ec2:us-west-2:123456789012:placement-group/a"},
            "InvalidPlacementGroup.Unknown",
        ),
    ],
)
def test_invalid_reservation_is_refused(ec2: Any, change: dict[str, Any], code: str) -> None:
    assert refusal(ec2.create_capacity_reservation, **{**RESERVATION, "InstanceCount": 2, **change})[0] == code


@pytest.fixture(scope="module")
def scaling(network: Network) -> Any:
    return network.scaling


def template(network: Network, name: str, **data: Any) -> dict[str, str]:
    members = {"ImageId": IMAGE, "InstanceType": "g6e.8xlarge", "SecurityGroupIds": [network.group], **data}
    template_data = {key: value for key, value in members.items() if value is not None}
    response = network.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=template_data)
    return {"LaunchTemplateId": response["LaunchTemplate"]["LaunchTemplateId"], "Version": "1"}


def group_request(network: Network, name: str, launch: dict[str, str], count: int = 2, **more: Any) -> dict[str, Any]:
    sizes = {"MinSize": count, "MaxSize": count, "DesiredCapacity": count}
    where = {"LaunchTemplate": launch, "VPCZoneIdentifier": network.subnet}
    return {"AutoScalingGroupName": name, **where, **sizes, **more}


def group(scaling: Any, name: str) -> dict[str, Any]:
    groups = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    return dict(groups[0])


def test_group_instances_get_all_template_interfaces(network: Network, scaling: Any) -> None:
    facts = instance("p5.48xlarge")
    assert facts is not None
    interfaces = [
        {"NetworkCardIndex": nic.card, "DeviceIndex": nic.device, "InterfaceType": nic.kind, "Groups": [network.group]}
        for nic in nics(facts)
    ]
    launch = template(network, "p5", InstanceType="p5.48xlarge", NetworkInterfaces=interfaces, SecurityGroupIds=None)
    network.ec2.create_launch_template_version(
        LaunchTemplateId=launch["LaunchTemplateId"], LaunchTemplateData={"ImageId": IMAGE, "InstanceType": "m5.large"}
    )
    scaling.create_auto_scaling_group(
        **group_request(network, "p5", launch, Tags=[{"Key": "k", "Value": "v", "PropagateAtLaunch": True}])
    )
    members = group(scaling, "p5")["Instances"]
    assert {member["LifecycleState"] for member in members} == {"InService"}
    assert {member["LaunchTemplate"]["Version"] for member in members} == {"1"}
    ids = [member["InstanceId"] for member in members]
    for reservation in network.ec2.describe_instances(InstanceIds=ids)["Reservations"]:
        for member in reservation["Instances"]:
            assert (member["InstanceType"], member["SubnetId"]) == ("p5.48xlarge", network.subnet)
            assert sum(nic["InterfaceType"] == "efa-only" for nic in member["NetworkInterfaces"]) == 32
            assert {"Key": "k", "Value": "v"} in member["Tags"]
    scaling.delete_auto_scaling_group(AutoScalingGroupName="p5", ForceDelete=True)


def test_group_without_its_template_or_subnet_is_refused(network: Network, scaling: Any) -> None:
    good = template(network, "good")
    for wrong in (
        group_request(network, "g", {"LaunchTemplateId": "lt-0123456789abcdef0", "Version": "1"}),
        group_request(network, "g", {**good, "Version": "7"}),
        group_request(network, "g", good, VPCZoneIdentifier="subnet-0123456789abcdef0"),
        group_request(network, "g", good, DesiredCapacity=3),
    ):
        assert refusal(scaling.create_auto_scaling_group, **wrong)[0] == "ValidationError"


def test_duplicate_and_nonempty_groups_are_protected(network: Network, scaling: Any) -> None:
    launch = template(network, "once")
    scaling.create_auto_scaling_group(**group_request(network, "once", launch))
    assert refusal(scaling.create_auto_scaling_group, **group_request(network, "once", launch))[0] == "AlreadyExists"
    assert refusal(scaling.delete_auto_scaling_group, AutoScalingGroupName="once")[0] == "ResourceInUse"
    scaling.update_auto_scaling_group(AutoScalingGroupName="once", MinSize=0, MaxSize=0, DesiredCapacity=0)
    scaling.delete_auto_scaling_group(AutoScalingGroupName="once")
    assert scaling.describe_auto_scaling_groups(AutoScalingGroupNames=["once"])["AutoScalingGroups"] == []


def mixed(launch: dict[str, Any], *types: str, base: int = 0) -> dict[str, Any]:
    distribution = {
        "OnDemandBaseCapacity": base,
        "OnDemandPercentageAboveBaseCapacity": 0,
        "SpotAllocationStrategy": SPOT_STRATEGY,
    }
    overrides = [{"InstanceType": kind} for kind in types]
    return {
        "LaunchTemplate": {"LaunchTemplateSpecification": launch, "Overrides": overrides},
        "InstancesDistribution": distribution,
    }


def test_mixed_group_has_its_base_on_demand_and_the_rest_on_spot(network: Network, scaling: Any) -> None:
    policy = mixed(template(network, "mixed"), "m5.xlarge", "m5a.xlarge", base=1)
    request = group_request(network, "mixed", {}, MixedInstancesPolicy=policy)
    del request["LaunchTemplate"]
    scaling.create_auto_scaling_group(**request)
    scaling.update_auto_scaling_group(AutoScalingGroupName="mixed", MaxSize=3, DesiredCapacity=3)
    found = group(scaling, "mixed")
    ids = [member["InstanceId"] for member in found["Instances"]]
    assert {member["InstanceType"] for member in found["Instances"]} == {"m5.xlarge"}
    reservations = network.ec2.describe_instances(InstanceIds=ids)["Reservations"]
    markets = [member.get("InstanceLifecycle", "") for item in reservations for member in item["Instances"]]
    assert sorted(markets) == ["", "spot", "spot"]
    overrides = found["MixedInstancesPolicy"]["LaunchTemplate"]["Overrides"]
    assert [override["InstanceType"] for override in overrides] == ["m5.xlarge", "m5a.xlarge"]


def test_mixed_group_with_a_spot_template_is_refused(network: Network, scaling: Any) -> None:
    spot = template(network, "spot", InstanceMarketOptions={"MarketType": "spot"})
    request = group_request(network, "refused", {}, MixedInstancesPolicy=mixed(spot, "m5.xlarge"))
    del request["LaunchTemplate"]
    assert refusal(scaling.create_auto_scaling_group, **request)[0] == "ValidationError"


def test_missing_reservation_leaves_the_group_empty(network: Network, scaling: Any) -> None:
    target = {"CapacityReservationTarget": {"CapacityReservationId": "cr-0123456789abcdef0"}}
    launch = template(network, "reserved", InstanceType="p5.48xlarge", CapacityReservationSpecification=target)
    scaling.create_auto_scaling_group(**group_request(network, "reserved", launch))
    assert group(scaling, "reserved")["Instances"] == []
    activity = scaling.describe_scaling_activities(AutoScalingGroupName="reserved")["Activities"][0]
    assert (activity["StatusCode"], "cr-0123456789abcdef0" in activity["StatusMessage"]) == ("Failed", True)


def test_terminated_instance_is_replaced_unless_suspended(network: Network, scaling: Any) -> None:
    scaling.create_auto_scaling_group(**group_request(network, "heals", template(network, "heals")))
    before = {member["InstanceId"] for member in group(scaling, "heals")["Instances"]}
    network.ec2.terminate_instances(InstanceIds=[min(before)])
    after = {member["InstanceId"] for member in group(scaling, "heals")["Instances"]}
    assert (len(after), len(after & before)) == (2, 1)
    scaling.suspend_processes(AutoScalingGroupName="heals", ScalingProcesses=["ReplaceUnhealthy"])
    network.ec2.terminate_instances(InstanceIds=[min(after)])
    health = {member["InstanceId"]: member["HealthStatus"] for member in group(scaling, "heals")["Instances"]}
    assert health == {min(after): "Unhealthy", max(after): "Healthy"}


@pytest.mark.parametrize("zone", [{"AvailabilityZone": "us-west-2a"}, {"AvailabilityZoneId": "usw2-az1"}])
def test_zone_of_another_region_is_refused(aws: LocalAws, zone: dict[str, str]) -> None:
    ec2 = client(aws, "ec2", "us-east-1")
    vpc = ec2.create_vpc(CidrBlock="10.2.0.0/16")["Vpc"]["VpcId"]
    assert refusal(ec2.create_subnet, VpcId=vpc, CidrBlock="10.2.0.0/18", **zone)[0] == "InvalidParameterValue"


def test_rules_keep_their_descriptions(network: Network) -> None:
    ec2 = network.ec2
    group = network.closed_group("described")
    lists = ec2.describe_managed_prefix_lists()["PrefixLists"]
    prefix = next(prefix_list["PrefixListId"] for prefix_list in lists if prefix_list["PrefixListName"].endswith(".s3"))
    tcp = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443}
    permissions = [
        {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group, "Description": "self"}]},
        {**tcp, "PrefixListIds": [{"PrefixListId": prefix, "Description": "s3"}]},
        {**tcp, "IpRanges": [{"CidrIp": "10.0.0.0/8", "Description": "vpn"}]},
    ]
    response = ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=permissions)
    assert response["Return"]
    rules = ec2.describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [group]}])["SecurityGroupRules"]
    assert {rule["Description"] for rule in rules if not rule["IsEgress"]} == {"self", "s3", "vpn"}


def test_private_dns_needs_names_in_the_vpc(aws: LocalAws) -> None:
    network = Network(aws)
    ec2 = network.ec2
    request = {
        "VpcId": network.vpc, "ServiceName": "com.amazonaws.us-west-2.logs", "VpcEndpointType": "Interface",
        "SubnetIds": [network.subnet], "SecurityGroupIds": [network.group], "PrivateDnsEnabled": True,
    }  # fmt: skip
    assert refusal(ec2.create_vpc_endpoint, **request)[0] == "InvalidParameter"
    ec2.modify_vpc_attribute(VpcId=network.vpc, EnableDnsHostnames={"Value": True})
    endpoint = ec2.create_vpc_endpoint(**request)["VpcEndpoint"]
    assert (endpoint["PrivateDnsEnabled"], endpoint["Groups"][0]["GroupId"]) == (True, network.group)
    table = ec2.create_route_table(VpcId=network.vpc)["RouteTable"]["RouteTableId"]
    s3 = {"VpcId": network.vpc, "ServiceName": "com.amazonaws.us-west-2.s3", "VpcEndpointType": "Gateway"}
    gateway = {**s3, "RouteTableIds": [table]}
    assert ec2.create_vpc_endpoint(**gateway)["VpcEndpoint"]["RouteTableIds"] == [table]


def test_subnet_of_running_instance_cannot_be_deleted(aws: LocalAws) -> None:
    network = Network(aws)
    instance_id = network.ec2.run_instances(
        ImageId=IMAGE, InstanceType="m5.large", MinCount=1, MaxCount=1,
        SubnetId=network.subnet, SecurityGroupIds=[network.group],
    )["Instances"][0]["InstanceId"]  # fmt: skip
    assert refusal(network.ec2.delete_subnet, SubnetId=network.subnet)[0] == "DependencyViolation"
    assert refusal(network.ec2.delete_security_group, GroupId=network.group)[0] == "DependencyViolation"
    network.ec2.terminate_instances(InstanceIds=[instance_id])
    network.ec2.delete_subnet(SubnetId=network.subnet)
    network.ec2.delete_security_group(GroupId=network.group)
    network.ec2.delete_vpc(VpcId=network.vpc)


def test_only_documented_parameters_name_an_image(aws: LocalAws) -> None:
    ssm = client(aws, "ssm")
    for kind in ("p5.48xlarge", "g5g.16xlarge", "trn1.32xlarge", "c7g.16xlarge"):
        (node_group,) = node_groups(spec_of(kind=kind), AWS, now())
        first = ssm.get_parameter(Name=node_group.image.parameter)["Parameter"]["Value"]
        assert first.startswith("ami-")
        assert ssm.get_parameter(Name=node_group.image.parameter)["Parameter"]["Value"] == first
    unknown = "/aws/service/deeplearning/ami/x86_64/no-such-image/latest/ami-id"
    assert refusal(ssm.get_parameter, Name=unknown)[0] == "ParameterNotFound"
