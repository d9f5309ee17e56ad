"""No rule of a bucket ever touches a run; the budget and the repository are as wished."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.loaders import Loader
from hypothesis import given
from hypothesis import strategies as st

from infra.config import ClusterSpec
from infra.plan.place import Place, runs_uri
from infra.plan.storage.buckets import BucketPlan, buckets, violations
from infra.plan.storage.repository import keep_last, repository
from infra.plan.watch.budget import budget
from tests.infra.specs import AWS, spec_of


def spec(**more: Any) -> ClusterSpec:
    return spec_of(**{"name": "llm", **more})


def by_key(found: ClusterSpec, place: Place = AWS) -> dict[str, BucketPlan]:
    return {plan.key: plan for plan in buckets(found, place)}


def on_objects(rule: Any) -> bool:
    """Whether a rule removes or moves objects that are there to be read."""
    return rule.expire_days is not None or rule.storage_class is not None


@pytest.mark.parametrize("key", ["data", "checkpoints", "lifecycle"])
def test_a_bucket_of_the_users_is_used_as_it_is(key: str) -> None:
    found = by_key(spec(buckets={key: "mine"}))
    assert (found[key].name, found[key].existing, found[key].rules) == ("mine", True, ())
    assert sum(plan.existing for plan in found.values()) == 1


def test_the_days_of_the_configuration_are_those_of_the_rules() -> None:
    days = {"ephemeral_days": 3, "milestone_days": 60, "noncurrent_days": 9}
    rules = {rule.id: rule for rule in by_key(spec(buckets=days))["checkpoints"].rules}
    assert (rules["expire-ephemeral"].prefix, rules["expire-ephemeral"].expire_days) == ("ephemeral/", 3)
    archive = rules["archive-milestones"]
    assert (archive.prefix, archive.transition_days, archive.storage_class) == ("milestone/", 60, "GLACIER_IR")
    assert rules["drop-old-versions"].noncurrent_days == 9


folders = st.sampled_from(["runs/", "ephemeral/", "milestone/", "ephemeral/runs/", "milestones/", "ephemeral-runs/"])


@given(prefix=st.lists(folders, min_size=1, max_size=3).map("".join), elsewhere=st.booleans())
def test_no_rule_touches_a_run(prefix: str, elsewhere: bool) -> None:
    more = {"runs_uri": "s3://elsewhere/runs/"} if elsewhere else {}
    found = spec(buckets={"runs_prefix": prefix}, **more)
    runs = runs_uri(found, AWS)
    keys = [f"{runs}{key}" for key in ("one/attempts/0/rank0.bin", "one/manifests/17.json")]
    touching = [
        rule.id
        for plan in buckets(found, AWS)
        for rule in plan.rules
        for key in keys
        if on_objects(rule) and key.startswith(f"s3://{plan.name}/{rule.prefix}")
    ]
    assert touching == []


@pytest.mark.parametrize(
    ("more", "paths"),
    [
        ({}, []),
        ({"buckets": {"runs_prefix": "ephemeral/"}}, ["buckets.runs_prefix"]),
        ({"buckets": {"runs_prefix": "milestone/runs/"}}, ["buckets.runs_prefix"]),
        ({"buckets": {"runs_prefix": "ephemeral-runs/"}}, []),
        ({"runs_uri": "s3://llm-checkpoints-123456789012-us-east-2"}, ["runs_uri", "runs_uri"]),
        ({"runs_uri": "s3://elsewhere/ephemeral/"}, []),
        ({"runs_uri": "s3://llm-checkpoints"}, []),
        ({"buckets": {"runs_prefix": "ephemeral/", "checkpoints": "mine"}}, []),
    ],
)
def test_runs_under_a_prefix_with_a_rule_are_found(more: dict[str, Any], paths: list[str]) -> None:
    found = violations(spec(**more), AWS)
    assert [one.path for one in found] == paths


@pytest.mark.parametrize("partition", ["aws", "aws-cn", "aws-us-gov"])
def test_plain_http_and_other_accounts_are_denied_for_the_bucket(partition: str) -> None:
    """Nothing asks for the VPC's endpoint: a laptop and CI of the account would be locked out."""
    place = Place("us-east-2", "123456789012", partition)
    other = {
        "StringNotEquals": {"aws:PrincipalAccount": "123456789012"},
        "Bool": {"aws:PrincipalIsAWSService": "false"},
    }
    for plan in buckets(spec(), place):
        conditions = [{"Bool": {"aws:SecureTransport": "false"}}, other]
        assert [statement["Condition"] for statement in plan.policy["Statement"]] == conditions
        for statement in plan.policy["Statement"]:
            assert (statement["Effect"], statement["Principal"], statement["Action"]) == ("Deny", "*", "s3:*")
            assert statement["Resource"] == [f"arn:{partition}:s3:::{plan.name}", f"arn:{partition}:s3:::{plan.name}/*"]


def test_no_budget_is_made_where_none_is_wished() -> None:
    assert budget(spec(), AWS) is None


@given(st.floats(min_value=0.01, max_value=1e9))
def test_the_limit_is_written_as_a_number_that_aws_reads(limit: float) -> None:
    plan = budget(spec(budget={"monthly_usd": limit, "emails": ["a@example.com"]}), AWS)
    assert plan is not None
    assert abs(float(plan.limit_usd) - limit) <= 0.005 + 1e-6 * limit
    assert "e" not in plan.limit_usd


def test_a_repository_keeps_as_many_images_as_wished() -> None:
    (rule,) = repository(spec(repository={"keep_last": 7})).lifecycle["rules"]
    assert rule["selection"] == {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": 7}
    assert rule["action"] == {"type": "expire"}


def test_the_lifecycle_policy_is_short_enough_for_ecr() -> None:
    shape = Loader().load_service_model("ecr", "service-2")["shapes"]["LifecyclePolicyText"]
    assert shape["min"] <= len(str(keep_last(10**6))) <= shape["max"]
