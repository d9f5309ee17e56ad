"""Logs, alarms, dashboard and budget of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulumi
import pulumi_aws as aws

from infra.plan.watch.budget import BudgetPlan
from infra.plan.watch.observability import Alarm, Metric, ObservabilityPlan, dashboard


class Observability(pulumi.ComponentResource):
    """`auto_scaling_groups` are names in the order of the plan's groups; an alarm whose subject is not there is not made."""

    log_group: pulumi.Output[str] | None
    """For what launchers and ranks print; None where logs are not carried."""

    def __init__(
        self,
        name: str,
        plan: ObservabilityPlan,
        *,
        file_system_id: pulumi.Output[str] | None,
        home_id: pulumi.Output[str] | None,
        auto_scaling_groups: Sequence[pulumi.Output[str]],
        nat_gateway_id: pulumi.Output[str] | None,
        topic_arn: pulumi.Input[str],
        controller_id: pulumi.Output[str] | None = None,
        monitor_id: pulumi.Output[str] | None = None,
    ) -> None:
        super().__init__("lustrain:infra:Observability", name)
        self._ours = pulumi.ResourceOptions(parent=self)
        known = {"cluster": plan.name, "queue": plan.queue, "dead letters": plan.dead_letters}
        subjects = {"lustre": file_system_id, "home": home_id, "nat": nat_gateway_id}
        subjects |= {"controller": controller_id, "monitor": monitor_id}
        subjects |= {subject: pulumi.Output.from_input(value) for subject, value in known.items()}
        subjects |= dict(zip(plan.groups, auto_scaling_groups, strict=True))
        ids = {subject: id_ for subject, id_ in subjects.items() if id_ is not None}
        groups = {
            group.key: aws.cloudwatch.LogGroup(
                f"{name}-{group.key}", name=group.name, retention_in_days=plan.log_days, opts=self._ours
            )
            for group in plan.log_groups
        }
        for alarm in plan.alarms:
            if alarm.subjects <= ids.keys():
                self._alarm(name, alarm, ids, topic_arn)
        if plan.dashboard:
            self._dashboard(name, plan, ids)
        self.log_group = groups["train"].name if groups else None
        self.register_outputs({"log_group": self.log_group})

    def _alarm(
        self, name: str, alarm: Alarm, ids: Mapping[str, pulumi.Output[str]], topic_arn: pulumi.Input[str]
    ) -> None:
        queries = [
            aws.cloudwatch.MetricAlarmMetricQueryArgs(
                id=metric.id, metric=_metric(metric, ids[metric.subject or alarm.subject]), return_data=False
            )
            for metric in alarm.metrics
        ]
        judged = aws.cloudwatch.MetricAlarmMetricQueryArgs(
            id="judged", expression=alarm.expression, label=alarm.label, return_data=True
        )
        aws.cloudwatch.MetricAlarm(
            f"{name}-{alarm.name}",
            name=alarm.name,
            alarm_description=pulumi.Output.format(alarm.description, id=ids[alarm.subject]),
            metric_queries=[*queries, judged],
            comparison_operator=alarm.comparison,
            threshold=alarm.threshold,
            evaluation_periods=alarm.periods,
            treat_missing_data=alarm.missing,
            alarm_actions=[topic_arn],
            ok_actions=[topic_arn] if alarm.mails_end else [],
            opts=self._ours,
        )

    def _dashboard(self, name: str, plan: ObservabilityPlan, ids: Mapping[str, pulumi.Output[str]]) -> None:
        body = pulumi.Output.json_dumps(dashboard(plan, ids))
        aws.cloudwatch.Dashboard(f"{name}-dashboard", dashboard_name=plan.board, dashboard_body=body, opts=self._ours)


class Budget(pulumi.ComponentResource):
    """A monthly cost budget with its mails."""

    def __init__(self, name: str, plan: BudgetPlan) -> None:
        super().__init__("lustrain:infra:Budget", name)
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


def _metric(metric: Metric, watched: pulumi.Output[str]) -> aws.cloudwatch.MetricAlarmMetricQueryMetricArgs:
    return aws.cloudwatch.MetricAlarmMetricQueryMetricArgs(
        namespace=metric.namespace,
        metric_name=metric.name,
        stat=metric.statistic,
        period=metric.period,
        dimensions={metric.dimension: watched},
    )
