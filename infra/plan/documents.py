"""IAM policy documents as plain data, and the S3 locations in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
Statement = dict[str, Any]

VERSION = "2012-10-17"
"""Of the policy language (https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_version.html)."""


def allow(
    sid: str,
    actions: Sequence[str],
    resources: str | Sequence[str],
    condition: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> Statement:
    """One statement that allows; `more` holds `Principal` in the policy of a resource. Lists are sorted, so that a
    document changes only when its meaning does."""
    named = [resources] if isinstance(resources, str) else sorted(set(resources))
    statement: Statement = {"Sid": sid, "Effect": "Allow", "Action": sorted(set(actions)), "Resource": named, **more}
    return statement | ({"Condition": {key: dict(value) for key, value in condition.items()}} if condition else {})


def document(statements: Sequence[Statement]) -> Document:
    return {"Version": VERSION, "Statement": list(statements)}


def characters(statements: Sequence[Statement]) -> int:
    """As IAM counts: without white space between tokens."""
    return len(json.dumps(document(statements), separators=(",", ":")))


def tls_only(actions: str, resources: str | Sequence[str]) -> Statement:
    """One statement that denies every request over plain HTTP
    (https://docs.aws.amazon.com/AmazonS3/latest/userguide/security-best-practices.html)."""
    return {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": actions,
        "Resource": resources if isinstance(resources, str) else list(resources),
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }


def account_only(account: str, actions: str, resources: Sequence[str]) -> Statement:
    """One statement that denies every principal of another account, whatever somebody allows later; services that act for
    themselves have none (https://github.com/aws-samples/data-perimeter-policy-examples)."""
    return {
        "Sid": "AccountOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": actions,
        "Resource": list(resources),
        "Condition": {
            "StringNotEquals": {"aws:PrincipalAccount": account},
            "Bool": {"aws:PrincipalIsAWSService": "false"},
        },
    }


def trust(
    service: str,
    *,
    actions: Sequence[str] = ("sts:AssumeRole",),
    condition: Mapping[str, Mapping[str, Any]] | None = None,
) -> Document:
    """Who may take a role on: a service of AWS.

    The principal is `<service>.amazonaws.com` in every partition. China refuses others' `.amazonaws.com.cn`
    (https://github.com/terraform-aws-modules/terraform-aws-rds-aurora/issues/437,
    https://github.com/terraform-aws-modules/terraform-aws-ecs/issues/124), and the CDK has used the one form everywhere
    since `@aws-cdk/aws-iam:standardizedServicePrincipals`.
    """
    statement: Statement = {
        "Sid": "Trust",
        "Effect": "Allow",
        "Principal": {"Service": f"{service}.amazonaws.com"},
        "Action": sorted(actions),
    }
    return document(
        [statement | ({"Condition": {key: dict(value) for key, value in condition.items()}} if condition else {})]
    )


@dataclass(frozen=True)
class Location:
    """A prefix in a bucket; an empty prefix is all of it."""

    bucket: str
    prefix: str = ""


def location(uri: str) -> Location | None:
    """Where an `s3://bucket/prefix/` points; None for a folder."""
    if not uri.startswith("s3://"):
        return None
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return Location(bucket, f"{prefix.rstrip('/')}/" if prefix.strip("/") else "")
