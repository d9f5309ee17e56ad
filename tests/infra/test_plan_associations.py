"""Links between folders and S3 prefixes stay apart from one another, from the trainer's runs and from Glacier."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.config import ClusterSpec
from infra.plan.storage.associations import (
    AssociationPlan,
    archived_over,
    associations,
    exports_over,
    key_statements,
    nested,
    overlaps,
)
from tests.infra.specs import AWS, EXISTING_LUSTRE, spec_of

CHECKPOINTS = "llm-checkpoints-123456789012-us-east-2"
OUT = ["NEW", "CHANGED"]


def spec(*links: dict[str, Any], **more: Any) -> ClusterSpec:
    return spec_of(**{"name": "llm", "storage": {"lustre": {"associations": list(links)}}, **more})


def link(path: str, bucket: str = "data", prefix: str = "", **more: Any) -> dict[str, Any]:
    return {"path": path, "bucket": bucket, "prefix": prefix, **more}


def plan(path: str, uri: str) -> AssociationPlan:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return AssociationPlan(path, bucket, None, prefix, (), (), 256)


parts = st.lists(st.sampled_from(["a", "ab", "b"]), min_size=1, max_size=3)
places = st.builds(lambda folder, key: plan("/" + "/".join(folder), "s3://" + "/".join(key)), parts, parts)


def test_names_of_the_clusters_buckets_are_resolved_others_kept() -> None:
    found = associations(
        spec(link("/data", prefix="datasets"), link("/out", "checkpoints", "/results/"), link("/lib", "corpus")), AWS
    )
    assert [one.uri for one in found] == [
        "s3://llm-data-123456789012-us-east-2/datasets/",
        f"s3://{CHECKPOINTS}/results/",
        "s3://corpus",
    ]
    assert [one.own for one in found] == ["data", "checkpoints", None]


def test_a_bucket_of_ours_is_known_by_its_physical_name_too() -> None:
    assert associations(spec(link("/out", CHECKPOINTS)), AWS)[0].own == "checkpoints"


def test_nothing_is_linked_to_an_existing_file_system() -> None:
    existing = EXISTING_LUSTRE
    there = spec(storage={"lustre": {"existing": existing, "associations": [link("/data")]}})
    assert associations(there, AWS) == ()
    assert associations(spec(storage={}), AWS) == ()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/a", "/a", True),
        ("/a", "/a/", True),
        ("/a", "/a/b", True),
        ("/a", "/ab", False),
        ("/", "/a", True),
        ("s3://b", "s3://b/x/", True),
        ("s3://b/x/", "s3://b/xy/", False),
        ("s3://b/x/", "s3://c/x/", False),
    ],
)
def test_a_place_lies_in_another_by_whole_names(one: str, other: str, same: bool) -> None:
    assert nested(one, other) is same
    assert nested(other, one) is same


@given(st.lists(places, max_size=5))
def test_overlap_does_not_depend_on_the_order(plans: list[AssociationPlan]) -> None:
    last = len(plans) - 1
    forward = {(overlap.first, overlap.second, overlap.side) for overlap in overlaps(plans)}
    backward = {(last - overlap.second, last - overlap.first, overlap.side) for overlap in overlaps(plans[::-1])}
    assert forward == backward


@given(st.lists(places, max_size=5))
def test_links_are_apart_exactly_when_no_folder_contains_another(
    plans: list[AssociationPlan],
) -> None:
    def contains(outer: str, inner: str) -> bool:
        return (inner.rstrip("/") + "/").startswith(outer.rstrip("/") + "/")

    clashing = any(
        contains(one.path, other.path) or contains(one.uri, other.uri)
        for one in plans
        for other in plans
        if one is not other
    )
    assert bool(overlaps(plans)) is clashing


@pytest.mark.parametrize(
    ("uri", "clashes"),
    [
        (f"s3://{CHECKPOINTS}/results/", True),
        (f"s3://{CHECKPOINTS}/results/runs/", True),
        (f"s3://{CHECKPOINTS}/", True),
        (f"s3://{CHECKPOINTS}", True),
        (f"s3://{CHECKPOINTS}/runs/", False),
        (f"s3://{CHECKPOINTS}/results2/", False),
        ("s3://elsewhere/results/", False),
        ("/fsx/results", False),
    ],
)
def test_an_export_over_the_runs_is_found_from_either_side(uri: str, clashes: bool) -> None:
    exporting = spec(link("/results", "checkpoints", "results", import_events=[], export_events=OUT))
    importing = spec(link("/results", "checkpoints", "results"))
    assert bool(exports_over(exporting, AWS, uri)) is clashes
    assert exports_over(importing, AWS, uri) == ()


def test_a_linked_prefix_that_moves_to_glacier_is_found() -> None:
    found = archived_over(spec(link("/all", "checkpoints")), AWS)
    assert [(one.path, rule.prefix, rule.storage_class) for one, rule in found] == [
        ("/all", "milestone/", "GLACIER_IR")
    ]
    assert archived_over(spec(link("/some", "checkpoints", "results")), AWS) == ()
    assert archived_over(spec(link("/data", "data")), AWS) == ()


def test_keys_policy_lets_fsx_at_the_linked_buckets_made_only() -> None:
    mine = {"buckets": {"kms_key": "alias/mine", "data": "team-data"}}
    linked = spec(link("/data"), link("/out", "checkpoints", "out"), link("/x", "other"), **mine)
    statement = key_statements(linked, AWS)["buckets.kms_key"]
    condition = statement["Condition"]
    bucket = f"arn:aws:s3:::{CHECKPOINTS}"
    assert condition["StringLike"]["kms:EncryptionContext:aws:s3:arn"] == [bucket, f"{bucket}/*"]
    assert condition["StringEquals"]["kms:ViaService"] == "s3.us-east-2.amazonaws.com"
    assert condition["ArnLike"]["aws:PrincipalArn"].endswith("AWSServiceRoleForFSxS3Access_fs-*")
    assert key_statements(spec(link("/data"), **mine), AWS) == {}
    assert key_statements(spec(link("/data")), AWS) == {}
    assert key_statements(spec(link("/data"), buckets={"kms_key": "alias/aws/s3"}), AWS) == {}


def test_keys_of_foreign_buckets_have_a_statement_each() -> None:
    first, second = (f"arn:aws:kms:us-east-2:210987654321:key/{letter * 32}" for letter in "ab")
    links = [link(f"/{name}", name, kms_key=key) for name, key in (("a", first), ("b", second), ("c", second))]
    found = {
        path: statement["Condition"]["StringLike"]["kms:EncryptionContext:aws:s3:arn"]
        for path, statement in key_statements(spec(link("/data"), *links), AWS).items()
    }
    assert found == {
        "storage.lustre.associations.1.kms_key": ["arn:aws:s3:::a", "arn:aws:s3:::a/*"],
        "storage.lustre.associations.2.kms_key": [f"arn:aws:s3:::{end}" for end in ("b", "b/*", "c", "c/*")],
    }
