"""BUD: budgets and the recipients of alarms."""

from __future__ import annotations

import re
from collections import Counter

from infra.catalog.instances import Instance
from infra.config import ClusterSpec, Group
from infra.finding import finding
from infra.preflight.rule import Context, Family, Problems, known_groups

BUDGETS = "https://docs.aws.amazon.com/cost-management/latest/userguide/budgets-best-practices.html"
ENDPOINTS = "https://docs.aws.amazon.com/general/latest/gr/billing.html"
WITH_BUDGETS = ("aws", "aws-cn")
TOPICS = "https://docs.aws.amazon.com/sns/latest/dg/sns-email-notifications.html"
RULES = Family()


@RULES.add("BUD-001", "The stack has a budget.", BUDGETS, level="warning")
def no_budget(spec: ClusterSpec, context: Context) -> Problems:
    if spec.budget is None and context.partition in (None, *WITH_BUDGETS):
        message = "no mail is sent when the cluster costs more than it should"
        yield finding("budget", message, "add budget: {monthly_usd: …, emails: […]}")


@RULES.add("BUD-002", "Alarms have a recipient.", TOPICS, level="warning")
def alarms_without_recipient(spec: ClusterSpec, context: Context) -> Problems:
    if not spec.alarms.emails:
        message = "a full file system, an incomplete gang and a NAT bill alert no one"
        yield finding("alarms.emails", message, "list an address; each confirms by a mail from AWS")


@RULES.add("BUD-003", "E-mail addresses are valid, and each stands once.", TOPICS)
def addresses(spec: ClusterSpec, context: Context) -> Problems:
    for key, emails in (
        ("budget.emails", spec.budget.emails if spec.budget else ()),
        ("alarms.emails", spec.alarms.emails),
    ):
        counts = Counter(emails)
        for index, one in enumerate(emails):
            if not re.fullmatch(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)+", one) or len(one) > 50:
                message = f"{one!r} is not an e-mail address; AWS Budgets takes up to 50 characters"
                yield finding(f"{key}.{index}", message, "write name@example.com")
            if counts[one] > 1 and emails.index(one) != index:
                yield finding(f"{key}.{index}", f"{one} stands {counts[one]} times", "keep one")


@RULES.add("BUD-004", "The monthly budget is more than one day of the accelerators.", BUDGETS, level="warning")
def small_budget(spec: ClusterSpec, context: Context) -> Problems:
    day = 24 * sum(least_usd_an_hour(group, facts) for _, group, facts in known_groups(spec))
    if spec.budget and spec.budget.monthly_usd < day:
        chips = sum(group.count * one.count for _, group, facts in known_groups(spec) for one in facts.accelerators)
        message = f"{chips} accelerators cost {day:,.0f} USD a day or more, the month's budget is"
        message += f" {spec.budget.monthly_usd:,.0f}"
        yield finding("budget.monthly_usd", message, f"set {30 * day:,.0f} for a month, or take fewer machines")


@RULES.add(
    "BUD-005",
    "A budget is set only where AWS Budgets exists: GovCloud's bill comes to a commercial account.",
    ENDPOINTS,
)
def budget_nowhere(spec: ClusterSpec, context: Context) -> Problems:
    if spec.budget and context.partition not in (None, *WITH_BUDGETS):
        message = f"AWS Budgets has no endpoint in {context.partition}: the update would stop there"
        yield finding("budget", message, "remove it, and make the budget in the commercial account that pays")


USD_AN_HOUR = {
    "NVIDIA A100": 2.74,
    "NVIDIA A10G": 1.0,
    "NVIDIA B200": 14.24,
    "NVIDIA B300": 17.8,
    "NVIDIA H100": 6.88,
    "NVIDIA H200": 7.91,
    "NVIDIA L40S": 1.86,
    "NVIDIA RTX PRO 4500": 2.52,
    "NVIDIA T4g": 0.42,
    "NVIDIA V100": 3.9,
    "Trainium": 1.34,
}
"""Of one accelerator in the type of its family where it costs least, on demand in us-east-1 (https://instances.vantage.sh as
of November 2025); that has no price of its own, the machine around it is part of it."""
LEAST_USD_AN_HOUR = 0.2
"""Of those without a price above; ours, below every type that has any."""
LEAST_SHARE = {"spot": 0.1, "capacity-block": 0.5, "training-plan": 0.5}
"""What of the price on demand remains at least: spot is up to 90 % off (https://aws.amazon.com/ec2/spot/pricing/), half for
blocks and plans is ours: an H100 was sold at 0.57 to 0.71 of it."""


def least_usd_an_hour(group: Group, facts: Instance) -> float:
    """Return what a group's accelerators cost at least while its machines run."""
    node = sum(one.count * USD_AN_HOUR.get(one.name, LEAST_USD_AN_HOUR) for one in facts.accelerators)
    return group.count * node * LEAST_SHARE.get(group.capacity.mode, 1.0)
