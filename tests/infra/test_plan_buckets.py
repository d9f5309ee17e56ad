"""Buckets are private, encrypted and pruned, and no rule ever touches a run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.config import ClusterSpec, parse
from infra.plan.place import Place, runs_uri
from infra.plan.storage.buckets import BucketPlan, buckets, violations

PLACE = Place("us-east-1", "123456789012")


def spec(**more: Any) -> ClusterSpec:
    return parse(
        {
            "name": "llm",
            "backend": "ec2",
            "zone_id": "use1-az4",
            "groups": [{"name": "train", "instance_type": "p5.48xlarge", "count": 2}],
            **more,
        }
    )


def by_key(found: ClusterSpec, place: Place = PLACE) -> dict[str, BucketPlan]:
    return {plan.key: plan for plan in buckets(found, place)}


def on_objects(rule: Any) -> bool:
    """Whether a rule removes or moves objects that are there to be read."""
    return rule.expire_days is not None or rule.storage_class is not None


def test_three_buckets_of_which_the_scripts_alone_keep_versions() -> None:
    found = by_key(spec())
    assert list(found) == ["data", "checkpoints", "lifecycle"]
    assert [plan.versioned for plan in found.values()] == [False, False, True]
    assert not any(plan.existing for plan in found.values())
    assert found["lifecycle"].name.startswith("sagemaker-")


@pytest.mark.parametrize("key", ["data", "checkpoints", "lifecycle"])
def test_a_bucket_of_the_users_is_used_as_it_is(key: str) -> None:
    found = by_key(spec(buckets={key: "mine"}))
    assert (found[key].name, found[key].existing, found[key].rules) == ("mine", True, ())
    assert sum(plan.existing for plan in found.values()) == 1


def test_parts_of_broken_uploads_go_after_a_day_everywhere() -> None:
    for plan in buckets(spec(), PLACE):
        assert [rule.abort_days for rule in plan.rules if not rule.prefix and rule.abort_days] == [1]


def test_scripts_are_never_removed() -> None:
    (only,) = by_key(spec())["lifecycle"].rules
    assert only.id == "abort-uploads"
    assert not on_objects(only)
    assert only.noncurrent_days is None


def test_the_days_of_the_configuration_are_those_of_the_rules() -> None:
    days = {"ephemeral_days": 3, "milestone_days": 60, "noncurrent_days": 9}
    rules = {rule.id: rule for rule in by_key(spec(buckets=days))["checkpoints"].rules}
    assert (rules["expire-ephemeral"].prefix, rules["expire-ephemeral"].expire_days) == ("ephemeral/", 3)
    archive = rules["archive-milestones"]
    assert (archive.prefix, archive.transition_days, archive.storage_class) == ("milestone/", 60, "GLACIER_IR")
    assert rules["drop-old-versions"].noncurrent_days == 9


def test_data_are_never_expired_or_moved() -> None:
    assert not any(on_objects(rule) for rule in by_key(spec())["data"].rules)


def test_expired_markers_have_a_rule_of_their_own_and_ids_are_unique() -> None:
    for plan in buckets(spec(), PLACE):
        assert len({rule.id for rule in plan.rules}) == len(plan.rules)
        for rule in plan.rules:
            others = (rule.expire_days, rule.noncurrent_days, rule.abort_days, rule.transition_days)
            assert not (rule.expired_markers and any(others))


folders = st.sampled_from(["runs/", "ephemeral/", "milestone/", "ephemeral/runs/", "milestones/", "ephemeral-runs/"])


@given(prefix=st.lists(folders, min_size=1, max_size=3).map("".join), elsewhere=st.booleans())
def test_no_rule_touches_a_run(prefix: str, elsewhere: bool) -> None:
    more = {"runs_uri": "s3://elsewhere/runs/"} if elsewhere else {}
    found = spec(buckets={"runs_prefix": prefix}, **more)
    runs = runs_uri(found, PLACE)
    keys = [f"{runs}{key}" for key in ("one/attempts/0/rank0.bin", "one/manifests/17.json")]
    touching = [
        rule.id
        for plan in buckets(found, PLACE)
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
        ({"runs_uri": "s3://llm-checkpoints-123456789012-us-east-1"}, ["runs_uri", "runs_uri"]),
        ({"runs_uri": "s3://elsewhere/ephemeral/"}, []),
        ({"runs_uri": "s3://llm-checkpoints"}, []),
        ({"buckets": {"runs_prefix": "ephemeral/", "checkpoints": "mine"}}, []),
    ],
)
def test_runs_under_a_prefix_with_a_rule_are_found(more: dict[str, Any], paths: list[str]) -> None:
    found = violations(spec(**more), PLACE)
    assert [one.path for one in found] == paths


@pytest.mark.parametrize("partition", ["aws", "aws-cn", "aws-us-gov"])
def test_plain_http_and_other_accounts_are_denied_for_the_bucket_and_what_is_in_it(partition: str) -> None:
    """Nothing asks for the VPC's endpoint: a laptop and CI of the account would be locked out."""
    place = Place("us-east-1", "123456789012", partition)
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


def test_a_key_of_the_users_encrypts_all_buckets() -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/1234"
    assert {(plan.encryption, plan.kms_key) for plan in buckets(spec(buckets={"kms_key": key}), PLACE)} == {
        ("aws:kms", key)
    }
    assert {(plan.encryption, plan.kms_key) for plan in buckets(spec(), PLACE)} == {("AES256", None)}
