"""Network, security groups, endpoints and roles as Pulumi resources: what is made, with which arguments, after what."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pulumi
import pytest
from pulumi.runtime import MockCallArgs, MockResourceArgs
from pulumi.runtime.mocks import MockMonitor

from infra.components.network import Endpoints, Network
from infra.components.roles import Roles
from infra.components.security import SecurityGroups
from infra.config import ClusterSpec
from infra.local.mocks import Recorder
from infra.plan.network.security import rules
from infra.plan.network.vpc import network
from infra.plan.roles import roles
from tests.infra.registered import run_on
from tests.infra.specs import AWS, EXISTING, spec_of

REGION = AWS.region
Outputs = dict[str, pulumi.Output[Any]]


class Aws(Recorder):
    """Groups have ARNs of the region; only the list of S3's addresses may be asked for."""

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        found, state = super().new_resource(args)
        return found, {**state, "arn": f"arn:aws:ec2:{self.region}:123456789012:{args.name}"}

    def call(self, args: MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]] | None]:
        assert args.token == "aws:ec2/getPrefixList:getPrefixList"
        return {"id": f"list of {args.args['name']}", "name": args.args["name"]}, []


class Monitor(MockMonitor):
    """Keeps each request by type and name."""

    def __init__(self) -> None:
        super().__init__(Aws(REGION))
        self.requests: dict[tuple[str, str], Any] = {}

    def RegisterResource(self, request: Any) -> Any:
        self.requests[request.type, request.name] = request
        return super().RegisterResource(request)  # type: ignore[no-untyped-call]

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Arguments of all resources of a type, by name."""
        found = {name: one for (typ, name), one in self.requests.items() if typ == kind}
        return {name: dict(pulumi.runtime.rpc.deserialize_properties(one.object)) for name, one in found.items()}

    def waits_for(self, kind: str, name: str) -> set[str]:
        return {urn.rpartition("::")[2] for urn in self.requests[kind, name].dependencies}


def run(program: Callable[[], Outputs]) -> tuple[Monitor, dict[str, Any]]:
    """What a program registered, and the values of its outputs."""
    return run_on(Monitor(), Aws(REGION), program)


def whole(spec: ClusterSpec) -> Callable[[], Outputs]:
    """All four components as a stack puts them together."""

    def program() -> Outputs:
        plan = network(spec, AWS)
        made = Network("demo", plan)
        groups = SecurityGroups("demo", rules(spec), made.vpc_id)
        ends = Endpoints("demo", plan, made, groups.ids.get("endpoints"))
        found = Roles("demo", roles(spec, AWS))
        nothing = pulumi.Output.from_input("")
        return {
            "vpc": made.vpc_id,
            "compute": made.compute_subnet_id,
            "zones": pulumi.Output.all(**made.zone_subnet_ids),
            "control": pulumi.Output.all(*made.control_subnet_ids),
            "nat": made.nat_gateway_id or nothing,
            "tables": pulumi.Output.all(*made.route_table_ids),
            "groups": pulumi.Output.all(**groups.ids),
            "endpoints": pulumi.Output.all(**ends.ids),
            "roles": pulumi.Output.all(**found.arns),
            "profile": found.instance_profile_arn or nothing,
        }

    return program


@pytest.mark.slow
def test_an_open_network_leads_out_through_a_nat_gateway_that_waits_for_the_internet_gateway() -> None:
    monitor, values = run(whole(spec_of()))
    (vpc,) = monitor.of("aws:ec2/vpc:Vpc").values()
    assert (vpc["enableDnsSupport"], vpc["enableDnsHostnames"]) == (True, True)
    assert vpc["tags"] == {"Name": "demo"}
    subnets = monitor.of("aws:ec2/subnet:Subnet")
    assert {name: one["availabilityZoneId"] for name, one in subnets.items()} == {
        "demo-compute": "use2-az1",
        "demo-public": "use2-az1",
    }
    assert not any(one["mapPublicIpOnLaunch"] for one in subnets.values())
    routes = monitor.of("aws:ec2/route:Route")
    assert {(name, one.get("gatewayId"), one.get("natGatewayId")) for name, one in routes.items()} == {
        ("demo-private-default", None, "demo-nat-id"),
        ("demo-public-default", "demo-internet-id", None),
    }
    for kind, name in [
        ("aws:ec2/route:Route", "demo-public-default"),
        ("aws:ec2/route:Route", "demo-private-default"),
        ("aws:ec2/eip:Eip", "demo-nat-address"),
        ("aws:ec2/natGateway:NatGateway", "demo-nat"),
    ]:
        assert "demo-internet" in monitor.waits_for(kind, name)
    assert values["nat"] == "demo-nat-id"
    assert values["compute"] == "demo-compute-id"


def test_groups_in_another_zone_find_their_subnet_made_or_existing() -> None:
    monitor, values = run(whole(spec_of(zone="use2-az3")))
    assert values["zones"] == {"use2-az3": "demo-compute-use2-az3-id"}
    assert monitor.of("aws:ec2/subnet:Subnet")["demo-compute-use2-az3"]["availabilityZoneId"] == "use2-az3"
    there = {**EXISTING, "zone_subnet_ids": {"use2-az3": "subnet-0fedcba9876543210"}}
    assert run(whole(spec_of(zone="use2-az3", network={"existing": there})))[1]["zones"] == there["zone_subnet_ids"]


def test_a_closed_network_has_no_way_out_and_an_interface_in_the_compute_subnet_for_each_service() -> None:
    monitor, values = run(whole(spec_of(network={"closed": True})))
    for kind in ("internetGateway:InternetGateway", "natGateway:NatGateway", "eip:Eip", "route:Route"):
        assert not monitor.of(f"aws:ec2/{kind}")
    assert values["nat"] == ""
    ends = monitor.of("aws:ec2/vpcEndpoint:VpcEndpoint")
    gateway = ends.pop("demo-s3")
    assert (gateway["vpcEndpointType"], gateway["routeTableIds"]) == ("Gateway", ["demo-private-id"])
    assert "*" not in [one for part in json.loads(gateway["policy"])["Statement"] for one in part["Resource"]]
    assert len(ends) == 12
    for one in ends.values():
        assert (one["subnetIds"], one["securityGroupIds"]) == (["demo-compute-id"], ["demo-endpoints-id"])
        assert one["privateDnsEnabled"] is True


@pytest.mark.slow
def test_the_way_to_s3_out_of_a_closed_network_is_the_prefix_list_of_its_region() -> None:
    monitor, _ = run(whole(spec_of(network={"closed": True})))
    out = monitor.of("aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule")["demo-cluster-egress-tcp-443-s3"]
    assert out["prefixListId"] == "list of com.amazonaws.us-east-2.s3"
    assert (out["fromPort"], out["toPort"]) == (443, 443)


@pytest.mark.parametrize("direction", ["Ingress", "Egress"])
def test_efa_rules_name_their_own_group_and_no_ports(direction: str) -> None:
    monitor, _ = run(whole(spec_of()))
    kind = f"aws:vpc/securityGroup{direction}Rule:SecurityGroup{direction}Rule"
    rule = monitor.of(kind)[f"demo-cluster-{direction.lower()}-all-cluster"]
    assert (rule["securityGroupId"], rule["referencedSecurityGroupId"]) == ("demo-cluster-id", "demo-cluster-id")
    assert rule["ipProtocol"] == "-1"
    assert not {"fromPort", "toPort", "cidrIpv4", "prefixListId"} & set(rule)


def test_groups_have_no_rules_inside_and_a_name_that_ec2_takes() -> None:
    groups = run(whole(spec_of(storage={"home": {}})))[0].of("aws:ec2/securityGroup:SecurityGroup")
    assert set(groups) == {"demo-cluster", "demo-home"}
    for group in groups.values():
        assert not {"ingress", "egress"} & set(group)
        assert group["name"].startswith("lustrain-")


def test_an_existing_network_is_passed_on_and_nothing_in_it_is_made_but_groups() -> None:
    monitor, values = run(whole(spec_of("hyperpod-eks", network={"existing": EXISTING})))
    assert (values["vpc"], values["compute"]) == (EXISTING["vpc_id"], EXISTING["compute_subnet_id"])
    assert values["control"] == EXISTING["control_subnet_ids"]
    assert not any((values["nat"], values["tables"], values["endpoints"]))
    made = {kind for kind, _ in monitor.requests if kind.startswith("aws:ec2/")}
    assert made == {"aws:ec2/securityGroup:SecurityGroup"}
    (group,) = monitor.of("aws:ec2/securityGroup:SecurityGroup").values()
    assert group["vpcId"] == EXISTING["vpc_id"]


@pytest.mark.slow
def test_the_control_plane_gets_its_two_subnets_in_the_private_table() -> None:
    monitor, values = run(whole(spec_of("hyperpod-eks")))
    assert values["control"] == ["demo-control-0-id", "demo-control-1-id"]
    joined = monitor.of("aws:ec2/routeTableAssociation:RouteTableAssociation").values()
    private = {one["subnetId"] for one in joined if one["routeTableId"] == "demo-private-id"}
    assert private == {"demo-compute-id", "demo-control-0-id", "demo-control-1-id"}


@pytest.mark.slow
def test_flow_logs_wait_for_their_roles_rights() -> None:
    monitor, _ = run(whole(spec_of(network={"flow_logs": True})))
    (group,) = monitor.of("aws:cloudwatch/logGroup:LogGroup").values()
    assert (group["name"], group["retentionInDays"]) == ("/lustrain/demo/flow-logs", 30)
    (log,) = monitor.of("aws:ec2/flowLog:FlowLog").values()
    assert (log["vpcId"], log["trafficType"]) == ("demo-vpc-id", "ALL")
    assert "demo-flow-logs" in monitor.waits_for("aws:ec2/flowLog:FlowLog", "demo-flow-logs")
    assert not run(whole(spec_of()))[0].of("aws:ec2/flowLog:FlowLog")


def test_roles_carry_their_documents_and_only_ec2_has_a_profile() -> None:
    monitor, values = run(whole(spec_of()))
    (plan,) = roles(spec_of(), AWS)
    (role,) = monitor.of("aws:iam/role:Role").values()
    assert (json.loads(role["assumeRolePolicy"]), role["path"]) == (plan.trust, "/lustrain/demo/")
    (policy,) = monitor.of("aws:iam/rolePolicy:RolePolicy").values()
    assert json.loads(policy["policy"]) == plan.policy
    attached = monitor.of("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    assert [one["policyArn"] for one in attached.values()] == list(plan.managed)
    assert values["profile"].endswith("demo-node")
    eks = run(whole(spec_of("hyperpod-eks")))[1]
    assert set(eks["roles"]) == {"node", "eks-cluster"}
    assert eks["profile"] == ""
