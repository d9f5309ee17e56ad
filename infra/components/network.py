"""The VPC, its subnets, routes and endpoints, or the ids of a network that exists already."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pulumi
import pulumi_aws as aws

from infra.components.roles import Roles
from infra.config import ExistingNetwork
from infra.plan.network.endpoints import EndpointPlan
from infra.plan.network.security import EVERYWHERE
from infra.plan.network.vpc import FlowLogPlan, NetworkPlan, RouteTablePlan, in_zone


class Network(pulumi.ComponentResource):
    """`nat_gateway_id` is None where nothing leaves through a NAT; `route_table_ids` is empty for an existing network.
    `zone_subnet_ids` has the compute subnets of zones that are not the cluster's, by zone id."""

    vpc_id: pulumi.Output[str]
    compute_subnet_id: pulumi.Output[str]
    zone_subnet_ids: dict[str, pulumi.Output[str]]
    control_subnet_ids: list[pulumi.Output[str]]
    nat_gateway_id: pulumi.Output[str] | None
    route_table_ids: list[pulumi.Output[str]]

    def __init__(self, name: str, plan: NetworkPlan) -> None:
        super().__init__("lustrain:infra:Network", name)
        self._name = name
        if plan.existing is not None:
            self._pass_on(plan.existing)
        else:
            self._make(plan)
        self.register_outputs(
            {
                "vpc_id": self.vpc_id,
                "compute_subnet_id": self.compute_subnet_id,
                "zone_subnet_ids": self.zone_subnet_ids,
                "control_subnet_ids": self.control_subnet_ids,
                "nat_gateway_id": self.nat_gateway_id,
                "route_table_ids": self.route_table_ids,
            }
        )

    def _pass_on(self, existing: ExistingNetwork) -> None:
        self.vpc_id = pulumi.Output.from_input(existing.vpc_id)
        self.compute_subnet_id = pulumi.Output.from_input(existing.compute_subnet_id)
        self.zone_subnet_ids = {zone: pulumi.Output.from_input(one) for zone, one in existing.zone_subnet_ids.items()}
        self.control_subnet_ids = [pulumi.Output.from_input(one) for one in existing.control_subnet_ids]
        self.nat_gateway_id = None
        self.route_table_ids = []

    def _make(self, plan: NetworkPlan) -> None:
        vpc = aws.ec2.Vpc(
            f"{self._name}-vpc",
            cidr_block=plan.cidr,
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags={"Name": plan.name},
            opts=self._opts(),
        )
        subnets = {
            subnet.key: aws.ec2.Subnet(
                f"{self._name}-{subnet.key}",
                vpc_id=vpc.id,
                cidr_block=subnet.cidr,
                availability_zone_id=subnet.zone_id,
                # Instances with several interfaces cannot have one, and none here should.
                map_public_ip_on_launch=False,
                tags={"Name": f"{plan.name}-{subnet.key}"},
                opts=self._opts(),
            )
            for subnet in plan.subnets
        }
        nat = self._nat(plan, vpc, subnets["public"]) if plan.nat else None
        tables = [self._table(table, vpc, subnets, nat) for table in plan.route_tables]
        if plan.flow_logs is not None:
            self._flow_logs(plan.flow_logs, vpc)
        self.vpc_id = vpc.id
        self.compute_subnet_id = subnets["compute"].id
        self.zone_subnet_ids = {
            one.zone_id: subnets[one.key].id for one in plan.subnets if one.key == in_zone(one.zone_id)
        }
        self.control_subnet_ids = [subnet.id for key, subnet in subnets.items() if key.startswith("control-")]
        self.nat_gateway_id = nat.id if nat else None
        self.route_table_ids = [table.id for table in tables]

    def _nat(self, plan: NetworkPlan, vpc: aws.ec2.Vpc, subnet: aws.ec2.Subnet) -> aws.ec2.NatGateway:
        self._gateway = aws.ec2.InternetGateway(
            f"{self._name}-internet", vpc_id=vpc.id, tags={"Name": plan.name}, opts=self._opts()
        )
        # An address can only be used, and a NAT gateway only work, where an internet gateway is attached.
        after = self._opts(self._gateway)
        address = aws.ec2.Eip(f"{self._name}-nat-address", domain="vpc", opts=after)
        return aws.ec2.NatGateway(
            f"{self._name}-nat",
            allocation_id=address.id,
            subnet_id=subnet.id,
            tags={"Name": plan.name},
            opts=after,
        )

    def _table(
        self,
        plan: RouteTablePlan,
        vpc: aws.ec2.Vpc,
        subnets: Mapping[str, aws.ec2.Subnet],
        nat: aws.ec2.NatGateway | None,
    ) -> aws.ec2.RouteTable:
        table = aws.ec2.RouteTable(f"{self._name}-{plan.key}", vpc_id=vpc.id, opts=self._opts())
        for key in plan.subnets:
            aws.ec2.RouteTableAssociation(
                f"{self._name}-{plan.key}-{key}",
                route_table_id=table.id,
                subnet_id=subnets[key].id,
                opts=self._opts(),
            )
        if nat is not None:
            to_internet = plan.default == "internet"
            aws.ec2.Route(
                f"{self._name}-{plan.key}-default",
                route_table_id=table.id,
                destination_cidr_block=EVERYWHERE,
                gateway_id=self._gateway.id if to_internet else None,
                nat_gateway_id=None if to_internet else nat.id,
                opts=self._opts(self._gateway),
            )
        return table

    def _flow_logs(self, plan: FlowLogPlan, vpc: aws.ec2.Vpc) -> None:
        roles = Roles(self._name, (plan.role,), opts=self._opts())
        group = aws.cloudwatch.LogGroup(
            f"{self._name}-flow-logs", name=plan.log_group, retention_in_days=plan.days, opts=self._opts()
        )
        aws.ec2.FlowLog(
            f"{self._name}-flow-logs",
            vpc_id=vpc.id,
            traffic_type="ALL",
            log_destination_type="cloud-watch-logs",
            log_destination=group.arn,
            iam_role_arn=roles.arns[plan.role.key],
            opts=self._opts(*roles.ready),
        )

    def _opts(self, *after: pulumi.Resource) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(parent=self, depends_on=list(after))


class Endpoints(pulumi.ComponentResource):
    """The VPC endpoints that the network's plan lists, with their `ids` by key; interfaces are in `security_group_id`."""

    ids: dict[str, pulumi.Output[str]]

    def __init__(
        self,
        name: str,
        plan: NetworkPlan,
        network: Network,
        security_group_id: pulumi.Input[str] | None = None,
    ) -> None:
        super().__init__("lustrain:infra:Endpoints", name)
        self._name, self._network, self._group = name, network, security_group_id
        self.ids = {one.key: self._endpoint(one).id for one in plan.endpoints}
        self.register_outputs({"ids": self.ids})

    def _endpoint(self, plan: EndpointPlan) -> aws.ec2.VpcEndpoint:
        network, gateway = self._network, plan.kind == "Gateway"
        groups = [self._group] if self._group is not None else []
        return aws.ec2.VpcEndpoint(
            f"{self._name}-{plan.key}",
            vpc_id=network.vpc_id,
            service_name=plan.service,
            vpc_endpoint_type=plan.kind,
            route_table_ids=network.route_table_ids if gateway else None,
            policy=json.dumps(plan.policy) if plan.policy else None,
            subnet_ids=None if gateway else [network.compute_subnet_id],
            security_group_ids=None if gateway else groups,
            private_dns_enabled=None if gateway else True,
            opts=pulumi.ResourceOptions(parent=self),
        )
