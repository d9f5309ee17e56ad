"""The workspace of Amazon Managed Service for Prometheus that a cluster's metrics go to."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.plan.watch.observability import WorkspacePlan


class Workspace(pulumi.ComponentResource):
    """A workspace of Amazon Managed Service for Prometheus, which is protected and outlives the stack, with the rules that it
    evaluates where the plan has some; those end with the stack."""

    arn: pulumi.Output[str]
    endpoint: pulumi.Output[str]

    def __init__(self, name: str, plan: WorkspacePlan) -> None:
        super().__init__("lustrain:infra:Workspace", name)
        ours = pulumi.ResourceOptions(parent=self)
        # Where a stack of an earlier release has it, with its metrics.
        earlier = pulumi.Alias(parent=pulumi.create_urn(name, "lustrain:infra:Observability"))
        kept = pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True, aliases=[earlier])
        made = aws.amp.Workspace(f"{name}-metrics", alias=plan.alias, opts=kept)
        if plan.rules:
            aws.amp.RuleGroupNamespace(
                f"{name}-rules", name=plan.alias, workspace_id=made.id, data=plan.rules, opts=ours
            )
        if plan.alert_manager:
            aws.amp.AlertManagerDefinition(
                f"{name}-alerts", workspace_id=made.id, definition=plan.alert_manager, opts=ours
            )
        self.arn, self.endpoint = made.arn, made.prometheus_endpoint
        self.register_outputs({"endpoint": self.endpoint})
