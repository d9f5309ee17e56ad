"""The monthly budget of one cluster, over what its cost tag counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.config import ClusterSpec
from infra.plan.place import COST_TAG, Place

ACTIVATE = f"aws ce update-cost-allocation-tags-status --cost-allocation-tags-status TagKey={COST_TAG},Status=Active"
"""The budget counts nothing until the payer's account has activated the tag: once for all clusters, possible about 24
hours after the first resource has it, and effective up to 24 hours later
(https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/activating-tags.html)."""


@dataclass(frozen=True)
class Notice:
    """Mail when the `kind` of cost goes above `percent` of the limit."""

    kind: Literal["ACTUAL", "FORECASTED"]
    percent: float


NOTICES = (Notice("ACTUAL", 50.0), Notice("ACTUAL", 80.0), Notice("ACTUAL", 100.0), Notice("FORECASTED", 100.0))
"""AWS needs about five weeks of use before it forecasts, so the forecast alone would leave a new cluster unwatched
(https://docs.aws.amazon.com/cost-management/latest/userguide/budgets-best-practices.html)."""


@dataclass(frozen=True)
class BudgetPlan:
    """A cost budget a month in USD; AWS updates it a few times a day, so it warns and does not stop anything.

    Budgets belong to the account, not to a region: the name says the region. What it counts goes by the tag, so clusters of
    one name in several regions count into the budget of each.
    """

    name: str
    limit_usd: str
    tag_value: str
    """As the filter `TagKeyValue` wants it: `user:<key>$<value>`."""
    notices: tuple[Notice, ...]
    emails: tuple[str, ...]


def budget(spec: ClusterSpec, place: Place) -> BudgetPlan | None:
    """None where the user wants none."""
    if spec.budget is None:
        return None
    return BudgetPlan(
        name=f"{spec.name}-{place.region}-monthly",
        limit_usd=f"{spec.budget.monthly_usd:.2f}",
        tag_value=f"user:{COST_TAG}${spec.name}",
        notices=NOTICES,
        emails=spec.budget.emails,
    )
