"""BUD: budgets and the recipients of alarms."""

from __future__ import annotations

import re
from collections import Counter

from infra.catalog.prices import HOURS_A_MONTH
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.cost import cost
from infra.preflight.rule import Context, Family

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
        message = "a full file system, an incomplete node group and a NAT bill alert no one"
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


@RULES.add(
    "BUD-004",
    "The monthly budget pays for a month of what is always on, and for one day of the accelerators.",
    BUDGETS,
    level="warning",
)
def small_budget(spec: ClusterSpec, context: Context) -> Problems:
    expected = cost(context.plan)
    month, day = HOURS_A_MONTH * expected.always_on.least_usd_hour, 24 * expected.training.least_usd_hour
    if spec.budget and spec.budget.monthly_usd < month + day:
        largest = max(expected.always_on.parts, key=lambda part: part.usd_hour * part.least)
        message = (
            f"what is always on costs {month:,.0f} USD a month or more, most of it {largest.name} ({largest.what}), and the "
            f"accelerators {day:,.0f} USD a day or more; the month's budget is {spec.budget.monthly_usd:,.0f}"
        )
        fix = f"set {month + 30 * day:,.0f} for a month of all of it, or take less; `fab cost` shows the parts"
        yield finding("budget.monthly_usd", message, fix)


@RULES.add(
    "BUD-005",
    "A budget is set only where AWS Budgets exists: GovCloud's bill comes to a commercial account.",
    ENDPOINTS,
)
def budget_nowhere(spec: ClusterSpec, context: Context) -> Problems:
    if spec.budget and context.partition not in (None, *WITH_BUDGETS):
        message = f"AWS Budgets has no endpoint in {context.partition}: the update would stop there"
        yield finding("budget", message, "remove it, and make the budget in the commercial account that pays")
