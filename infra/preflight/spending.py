"""BUD: that somebody hears what a cluster costs, and that it is in trouble."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from infra.config import ClusterSpec
from infra.preflight.finding import Finding
from infra.preflight.rule import Context, OfflineRule, known_groups

BUDGETS = "https://docs.aws.amazon.com/cost-management/latest/userguide/budgets-best-practices.html"
ENDPOINTS = "https://docs.aws.amazon.com/general/latest/gr/billing.html"
WITH_BUDGETS = ("aws", "aws-cn")
TOPICS = "https://docs.aws.amazon.com/sns/latest/dg/sns-email-notifications.html"


class NoBudget(OfflineRule):
    code = "BUD-001"
    level = "warning"
    checks = "There is a budget."
    source = BUDGETS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.budget is None and context.partition in (None, *WITH_BUDGETS):
            message = "nobody is told when the cluster costs more than it should"
            yield self.finding("budget", message, "add budget: {monthly_usd: …, emails: […]}")


class NobodyAlarmed(OfflineRule):
    code = "BUD-002"
    level = "warning"
    checks = "Alarms reach somebody."
    source = TOPICS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if not spec.alarms.emails:
            message = "a full file system, an incomplete gang and a NAT bill are noticed by nobody"
            yield self.finding("alarms.emails", message, "list an address; each confirms by a mail from AWS")


class Addresses(OfflineRule):
    code = "BUD-003"
    checks = "E-mail addresses are such, and each stands once."
    source = TOPICS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for key, emails in (
            ("budget.emails", spec.budget.emails if spec.budget else ()),
            ("alarms.emails", spec.alarms.emails),
        ):
            counts = Counter(emails)
            for index, one in enumerate(emails):
                if not re.fullmatch(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)+", one) or len(one) > 50:
                    message = f"{one!r} is no address; AWS Budgets takes up to 50 characters"
                    yield self.finding(f"{key}.{index}", message, "write name@example.com")
                if counts[one] > 1 and emails.index(one) != index:
                    yield self.finding(f"{key}.{index}", f"{one} stands {counts[one]} times", "keep one")


class SmallBudget(OfflineRule):
    code = "BUD-004"
    level = "warning"
    checks = "The budget is not spent by the accelerators within a day or two."
    source = BUDGETS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        counts = [group.count * sum(one.count for one in facts.accelerators) for _, group, facts in known_groups(spec)]
        least = sum(counts) * LEAST_USD_PER_ACCELERATOR_HOUR * 24
        if spec.budget and spec.budget.monthly_usd < least:
            message = f"{sum(counts)} accelerators cost more than {least:,.0f} USD in a day, the month's budget is less"
            yield self.finding("budget.monthly_usd", message, "raise it, or take fewer machines")


class BudgetNowhere(OfflineRule):
    code = "BUD-005"
    checks = "A budget is asked for only where AWS Budgets is: GovCloud's bill comes to a commercial account."
    source = ENDPOINTS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.budget and context.partition not in (None, *WITH_BUDGETS):
            message = f"AWS Budgets has no endpoint in {context.partition}: the update would stop there"
            yield self.finding("budget", message, "remove it, and make the budget in the commercial account that pays")


LEAST_USD_PER_ACCELERATOR_HOUR = 0.2
"""Below every hourly price of a GPU or Trainium chip that we train on, spot too; ours, and deliberately low."""

RULES = (NoBudget(), NobodyAlarmed(), Addresses(), SmallBudget(), BudgetNowhere())
