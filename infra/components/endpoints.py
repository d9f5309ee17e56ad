"""VPC endpoints as the network's plan lists them."""

from __future__ import annotations

import json

import pulumi
import pulumi_aws as aws

from infra.components.network import Network
from infra.plan.endpoints import EndpointPlan
from infra.plan.network import NetworkPlan


class Endpoints(pulumi.ComponentResource):
    """`ids` by the endpoint's key; `security_group_id` is the group of interfaces, None where there are none."""

    ids: dict[str, pulumi.Output[str]]

    def __init__(
        self,
        name: str,
        plan: NetworkPlan,
        network: Network,
        security_group_id: pulumi.Input[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("lustrain:infra:Endpoints", name, None, opts)
        self._name, self._network, self._group = name, network, security_group_id
        made = {
            one.key: self._gateway(one) if one.kind == "Gateway" else self._interface(one) for one in plan.endpoints
        }
        self.ids = {key: endpoint.id for key, endpoint in made.items()}
        self.register_outputs({"ids": self.ids})

    def _gateway(self, plan: EndpointPlan) -> aws.ec2.VpcEndpoint:
        return aws.ec2.VpcEndpoint(
            f"{self._name}-{plan.key}",
            vpc_id=self._network.vpc_id,
            service_name=plan.service,
            vpc_endpoint_type=plan.kind,
            route_table_ids=self._network.route_table_ids,
            policy=json.dumps(plan.policy) if plan.policy else None,
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _interface(self, plan: EndpointPlan) -> aws.ec2.VpcEndpoint:
        return aws.ec2.VpcEndpoint(
            f"{self._name}-{plan.key}",
            vpc_id=self._network.vpc_id,
            service_name=plan.service,
            vpc_endpoint_type=plan.kind,
            subnet_ids=[self._network.compute_subnet_id],
            security_group_ids=[self._group] if self._group is not None else [],
            private_dns_enabled=True,
            opts=pulumi.ResourceOptions(parent=self),
        )
