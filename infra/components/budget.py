"""The cluster's budget."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.plan.budget import BudgetPlan


class Budget(pulumi.ComponentResource):
    """A monthly cost budget with its mails."""

    def __init__(self, name: str, plan: BudgetPlan, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("lustrain:infra:Budget", name, None, opts)
        aws.budgets.Budget(
            f"{name}-monthly",
            name=plan.name,
            budget_type="COST",
            time_unit="MONTHLY",
            limit_amount=plan.limit_usd,
            limit_unit="USD",
            cost_filters=[aws.budgets.BudgetCostFilterArgs(name="TagKeyValue", values=[plan.tag_value])],
            notifications=[
                aws.budgets.BudgetNotificationArgs(
                    comparison_operator="GREATER_THAN",
                    notification_type=notice.kind,
                    threshold=notice.percent,
                    threshold_type="PERCENTAGE",
                    subscriber_email_addresses=list(plan.emails),
                )
                for notice in plan.notices
            ],
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.register_outputs({})
