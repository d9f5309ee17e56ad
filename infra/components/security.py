"""Security groups and their rules, each rule a resource of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import pulumi
import pulumi_aws as aws

from infra.plan.network.security import DESCRIPTIONS, Rule
from infra.plan.place import Arn


class _Other(TypedDict, total=False):
    """The argument of a rule that names its peer."""

    cidr_ipv4: pulumi.Input[str]
    prefix_list_id: pulumi.Input[str]
    referenced_security_group_id: pulumi.Input[str]


class SecurityGroups(pulumi.ComponentResource):
    """`ids` by the key of a group. Whatever is attached to one depends on this component, and so on the rules: FSx refuses an
    EFA-enabled file system whose group is still empty."""

    ids: dict[str, pulumi.Output[str]]

    def __init__(
        self,
        name: str,
        rules: Sequence[Rule],
        vpc_id: pulumi.Input[str],
    ) -> None:
        super().__init__("lustrain:infra:SecurityGroups", name)
        self._name = name
        self._groups = {key: self._group(key, vpc_id) for key in dict.fromkeys(rule.group for rule in rules)}
        self.ids = {key: group.id for key, group in self._groups.items()}
        for rule in rules:
            self._rule(rule)
        self.register_outputs({"ids": self.ids})

    def _group(self, key: str, vpc_id: pulumi.Input[str]) -> aws.ec2.SecurityGroup:
        return aws.ec2.SecurityGroup(
            f"{self._name}-{key}",
            # EC2 refuses names that begin with sg-, which a cluster's may.
            name=f"lustrain-{self._name}-{key}",
            description=DESCRIPTIONS[key],
            vpc_id=vpc_id,
            tags={"Name": f"{self._name}-{key}"},
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _rule(self, rule: Rule) -> None:
        kind = aws.vpc.SecurityGroupIngressRule if rule.direction == "ingress" else aws.vpc.SecurityGroupEgressRule
        first, last = rule.ports or (None, None)
        kind(
            f"{self._name}-{rule.key}",
            security_group_id=self.ids[rule.group],
            ip_protocol=rule.protocol,
            from_port=first,
            to_port=last,
            description=rule.why,
            opts=pulumi.ResourceOptions(parent=self),
            **self._other(rule),
        )

    def _other(self, rule: Rule) -> _Other:
        peer = rule.peer
        match peer.kind:
            case "group":
                return {"referenced_security_group_id": self.ids[peer.value]}
            case "group-id":
                return {"referenced_security_group_id": peer.value}
            case "cidr":
                return {"cidr_ipv4": peer.value}
            case "prefix-list-id":
                return {"prefix_list_id": peer.value}
            case "prefix-list":
                return {"prefix_list_id": self._prefix_list(rule)}

    def _prefix_list(self, rule: Rule) -> pulumi.Output[str]:
        """AWS's list of the addresses that a gateway endpoint leads to; its name has the region, which the ARN tells."""
        name = self._groups[rule.group].arn.apply(
            lambda arn: f"com.amazonaws.{Arn.parse(arn).region}.{rule.peer.value}"
        )
        return aws.ec2.get_prefix_list_output(name=name).id
