"""The VPC side of the embedded AWS: zones of one region, rules with descriptions, endpoints, images by parameter."""

from __future__ import annotations

import pytest

from infra.local.aws import LocalAws
from tests.infra.local_network import Network, client, refusal

pytestmark = pytest.mark.slow

ZONES = {"us-east-1": ["use1-az4"], "us-east-2": ["use2-az1", "use2-az2"], "us-west-2": ["usw2-az2", "usw2-az3"]}


@pytest.mark.parametrize(("region", "zone_id"), [(region, one) for region, zones in ZONES.items() for one in zones])
def test_subnets_go_where_a_zone_id_of_their_region_says(aws: LocalAws, region: str, zone_id: str) -> None:
    ec2 = client(aws, "ec2", region)
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    made = ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.0.0/18", AvailabilityZoneId=zone_id)["Subnet"]
    assert made["AvailabilityZoneId"] == zone_id
    assert made["AvailabilityZone"].startswith(region)
    assert (made["DefaultForAz"], made["MapPublicIpOnLaunch"]) == (False, False)


@pytest.mark.parametrize("zone", [{"AvailabilityZone": "us-west-2a"}, {"AvailabilityZoneId": "usw2-az1"}])
def test_a_zone_of_another_region_is_refused(aws: LocalAws, zone: dict[str, str]) -> None:
    ec2 = client(aws, "ec2", "us-east-1")
    vpc = ec2.create_vpc(CidrBlock="10.2.0.0/16")["Vpc"]["VpcId"]
    code, message = refusal(ec2.create_subnet, VpcId=vpc, CidrBlock="10.2.0.0/18", **zone)
    assert code == "InvalidParameterValue"
    assert "Subnets can currently only be created in" in message


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
    assert (
        refusal(ec2.modify_security_group_rules, GroupId=group, SecurityGroupRules=wrong)[0] == "InvalidParameterValue"
    )


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
    gateway = {
        "VpcId": network.vpc,
        "ServiceName": "com.amazonaws.us-west-2.s3",
        "VpcEndpointType": "Gateway",
        "RouteTableIds": [table],
    }
    assert ec2.create_vpc_endpoint(**gateway)["VpcEndpoint"]["RouteTableIds"] == [table]
    assert refusal(ec2.create_vpc_endpoint, **gateway)[0] == "RouteAlreadyExists"


def test_a_subnet_stays_while_an_instance_runs_in_it_and_goes_after_that(aws: LocalAws) -> None:
    network = Network(aws)
    made = network.ec2.run_instances(
        ImageId="ami-0123456789abcdef0", InstanceType="m5.large", MinCount=1, MaxCount=1,
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
    for known in (
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
        "/aws/service/deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
        "/aws/service/neuron/dlami/base/ubuntu-22.04/latest/image_id",
        "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id",
    ):
        first = ssm.get_parameter(Name=known)["Parameter"]["Value"]
        assert first.startswith("ami-")
        assert ssm.get_parameter(Name=known)["Parameter"]["Value"] == first
    unknown = "/aws/service/deeplearning/ami/x86_64/no-such-image/latest/ami-id"
    assert refusal(ssm.get_parameter, Name=unknown)[0] == "ParameterNotFound"
