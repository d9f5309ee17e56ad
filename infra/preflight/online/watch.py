"""OBS 1xx: what a managed Grafana signs people in by."""

from __future__ import annotations

from infra.aws import Aws
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.watch.grafana import SIGN_IN
from infra.preflight.rule import Context, Family

RULES = Family()


@RULES.add(
    "OBS-101",
    "IAM Identity Center is there for people to sign in to a managed Grafana.",
    SIGN_IN,
    level="warning",
    permission="sso:ListInstances",
)
def identity_center(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    if spec.observability.grafana != "managed":
        return
    pages = aws.identity_center.get_paginator("list_instances").paginate()
    if not [one for page in pages for one in page["Instances"] if one.get("Status", "ACTIVE") == "ACTIVE"]:
        # It has one region, which may be another one.
        message = f"no IAM Identity Center is seen in {aws.region}, and nobody can sign in to Grafana without one"
        fix = "enable it for the account or its organization, set grafana: self, or suppress this where it is in another region"
        yield finding("observability.grafana", message, fix, level="warning")
