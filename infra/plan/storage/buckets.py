"""The cluster's buckets: data, checkpoints, and the scripts that nodes run when they join.

Runs are the trainer's to prune, which knows what a checkpoint still needs; no rule here expires or moves them. What
scripts want expired or archived they put under `ephemeral/` or `milestone/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.config import ClusterSpec
from infra.finding import finding
from infra.plan.documents import Document, account_only, document, tls_only
from infra.plan.place import Place, bucket_names, runs_uri
from lustrain.problem import Problem

BucketKey = Literal["data", "checkpoints", "lifecycle"]

EPHEMERAL = "ephemeral/"
MILESTONE = "milestone/"
ABORT_DAYS = 1
"""A killed node leaves parts of uploads behind, which are billed and in no listing; no upload of ours takes a day
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpu-abort-incomplete-mpu-lifecycle-config.html)."""
ARCHIVE: Literal["GLACIER_IR"] = "GLACIER_IR"
"""Read at once, unlike the other Glacier classes, and billed for 90 days at least
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html)."""


@dataclass(frozen=True)
class Rule:
    """One lifecycle rule for the keys under `prefix` (empty: all); only what is set happens, days count from creation.

    `noncurrent_days` counts from when a version was replaced or deleted.
    """

    id: str
    prefix: str = ""
    abort_days: int | None = None
    expire_days: int | None = None
    transition_days: int | None = None
    storage_class: Literal["GLACIER_IR"] | None = None
    noncurrent_days: int | None = None
    expired_markers: bool = False


@dataclass(frozen=True)
class BucketPlan:
    """One bucket; with `existing` it is the user's, used as it is and never changed.

    All are private, encrypted (`kms_key`, else S3's own keys), refuse plain HTTP and other accounts, and the account owns every
    object, also of another writer. They are not bound to the VPC's endpoint: a laptop and CI of this account reach them too.
    """

    key: BucketKey
    name: str
    existing: bool
    versioned: bool
    kms_key: str | None
    rules: tuple[Rule, ...]
    policy: Document

    @property
    def encryption(self) -> Literal["aws:kms", "AES256"]:
        return "aws:kms" if self.kms_key else "AES256"


def buckets(spec: ClusterSpec, place: Place) -> tuple[BucketPlan, ...]:
    """Return the buckets for data, checkpoints and lifecycle, in this order.

    Only the scripts are versioned: a replaced node reads them long after they were uploaded, so that even a mistake must
    leave the old ones. Versions of data and checkpoints would double the bill of every key that is written again.
    """
    names = bucket_names(spec, place)
    return (
        _bucket(spec, place, "data", names.data, _shared(spec)),
        _bucket(
            spec, place, "checkpoints", names.checkpoints, (*_shared(spec), *_aged(spec, place, names.checkpoints))
        ),
        _bucket(spec, place, "lifecycle", names.lifecycle, (Rule("abort-uploads", abort_days=ABORT_DAYS),)),
    )


def violations(spec: ClusterSpec, place: Place) -> tuple[Problem, ...]:
    """Where runs would lie under a prefix that belongs to a lifecycle rule; the rule is then left out of the plan.

    A bucket of the user's has no rule of ours.
    """
    if spec.buckets.checkpoints is not None:
        return ()
    uri = runs_uri(spec, place)
    names = bucket_names(spec, place)
    key = "runs_uri" if spec.runs_uri else "buckets.runs_prefix"
    return tuple(
        finding(key, f"{uri} lies where {what}", f"keep runs outside {prefix}", code="S3-007")
        for prefix, what in (
            (EPHEMERAL, f"objects expire after {spec.buckets.ephemeral_days} days"),
            (MILESTONE, f"objects move to {ARCHIVE} after {spec.buckets.milestone_days} days"),
        )
        if _inside_or_around(uri, names.checkpoints, prefix)
    )


def made_buckets(spec: ClusterSpec, place: Place) -> frozenset[str]:
    """Return the names of the buckets that the stack makes."""
    return frozenset(bucket.name for bucket in buckets(spec, place) if not bucket.existing)


def _bucket(spec: ClusterSpec, place: Place, key: BucketKey, name: str, rules: tuple[Rule, ...]) -> BucketPlan:
    existing = getattr(spec.buckets, key) is not None
    whole = [place.bucket_arn(name), place.bucket_arn(name, "*")]
    return BucketPlan(
        key=key,
        name=name,
        existing=existing,
        versioned=key == "lifecycle",
        kms_key=spec.buckets.kms_key,
        rules=() if existing else rules,
        policy=document([tls_only("s3:*", whole), account_only(place.account, "s3:*", whole)]),
    )


def _shared(spec: ClusterSpec) -> tuple[Rule, ...]:
    """Return the lifecycle rules. The last two are for a bucket whose owner turns versions on later.

    No newer versions are kept on top: one of each deleted checkpoint would then be billed for good. S3 takes
    `expired_markers` in a rule of its own only.
    """
    return (
        Rule("abort-uploads", abort_days=ABORT_DAYS),
        Rule("drop-old-versions", noncurrent_days=spec.buckets.noncurrent_days),
        Rule("drop-expired-markers", expired_markers=True),
    )


def _aged(spec: ClusterSpec, place: Place, bucket: str) -> tuple[Rule, ...]:
    wanted = (
        Rule("expire-ephemeral", EPHEMERAL, expire_days=spec.buckets.ephemeral_days),
        Rule("archive-milestones", MILESTONE, transition_days=spec.buckets.milestone_days, storage_class=ARCHIVE),
    )
    # A run lost to a rule cannot be had again; a rule that is left out costs money at most.
    return tuple(rule for rule in wanted if not _inside_or_around(runs_uri(spec, place), bucket, rule.prefix))


def _inside_or_around(uri: str, bucket: str, prefix: str) -> bool:
    """Rules select keys by their first characters."""
    place, uri = f"s3://{bucket}/{prefix}", uri.rstrip("/") + "/"
    return uri.startswith(place) or place.startswith(uri)
