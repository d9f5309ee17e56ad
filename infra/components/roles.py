"""IAM roles as their plans say."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pulumi
import pulumi_aws as aws

from infra.plan.roles import RolePlan


class Roles(pulumi.ComponentResource):
    """`arns`, and on EC2 `profile_arns`, by the role's key. Whatever uses a role depends on
    `ready`: a role without its policies is refused or cannot work."""

    arns: dict[str, pulumi.Output[str]]
    profile_arns: dict[str, pulumi.Output[str]]
    ready: list[pulumi.Resource]

    def __init__(self, name: str, plans: Sequence[RolePlan], opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("lustrain:infra:Roles", name, None, opts)
        self._name = name
        self.arns, self.ready, self.profile_arns = {}, [], {}
        for plan in plans:
            self._make(plan)
        self.register_outputs({"arns": self.arns, "profile_arns": self.profile_arns})

    def _make(self, plan: RolePlan) -> None:
        if plan.existing is not None:
            self.arns[plan.key] = pulumi.Output.from_input(plan.existing)
            if plan.existing_profile is not None:
                self.profile_arns[plan.key] = pulumi.Output.from_input(plan.existing_profile)
            return
        named, child = f"{self._name}-{plan.key}", pulumi.ResourceOptions(parent=self)
        role = aws.iam.Role(
            named,
            path=plan.path,
            description=plan.description,
            assume_role_policy=json.dumps(plan.trust),
            permissions_boundary=plan.boundary,
            opts=child,
        )
        self.arns[plan.key] = role.arn
        self.ready.append(role)
        if plan.policy is not None:
            policy = json.dumps(plan.policy)
            self.ready.append(aws.iam.RolePolicy(named, role=role.name, policy=policy, opts=child))
        for arn in plan.managed:
            attached = aws.iam.RolePolicyAttachment(
                f"{named}-{arn.rpartition('/')[2]}", role=role.name, policy_arn=arn, opts=child
            )
            self.ready.append(attached)
        if plan.instance_profile:
            profile = aws.iam.InstanceProfile(named, path=plan.path, role=role.name, opts=child)
            self.profile_arns[plan.key] = profile.arn
            self.ready.append(profile)
