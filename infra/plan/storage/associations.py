"""Data repository associations: which folders of the file system mirror which S3 prefixes, and which pairs clash.

FSx takes eight of them, works on one at a time, and lets neither side of two associations overlap
(https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateDataRepositoryAssociation.html).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from infra.config import ClusterSpec, DraEvent
from infra.plan.documents import Statement, allow
from infra.plan.place import Place, bucket_names
from infra.plan.storage.buckets import Rule, buckets, made_buckets

Side = Literal["path", "prefix"]


@dataclass(frozen=True)
class AssociationPlan:
    """`path` is a folder of the file system, not of a node; `prefix` has a slash at its end, or is empty for a whole bucket.

    `own` tells which of the cluster's buckets it is, None for a foreign one. With `batch_import` the names of what lies in
    the bucket already are read once, when the association is made; later objects come by `import_events`.
    """

    path: str
    bucket: str
    own: Literal["data", "checkpoints"] | None
    prefix: str
    import_events: tuple[DraEvent, ...]
    export_events: tuple[DraEvent, ...]
    chunk_mib: int
    kms_key: str | None = None
    """Of a bucket that the stack does not make."""

    @property
    def batch_import(self) -> bool:
        return bool(self.import_events)

    @property
    def uri(self) -> str:
        return s3_uri(self.bucket, self.prefix)


@dataclass(frozen=True)
class Overlap:
    """Two associations, by their place in the list, that share something on one side."""

    first: int
    second: int
    side: Side


def s3_uri(bucket: str, prefix: str = "") -> str:
    """As FSx wants it: a prefix ends in a slash, a bucket alone does not."""
    return f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"


def associations(spec: ClusterSpec, place: Place) -> tuple[AssociationPlan, ...]:
    """In the order of the configuration, `data` and `checkpoints` resolved to the cluster's buckets.

    None for an existing file system: nothing in it is changed.
    """
    lustre = spec.storage.lustre
    if lustre is None or lustre.existing is not None:
        return ()
    own = bucket_names(spec, place).by_word
    return tuple(
        AssociationPlan(
            path=wanted.path,
            bucket=own.get(wanted.bucket, wanted.bucket),
            own=_own(own.get(wanted.bucket, wanted.bucket), own),
            prefix=as_prefix(wanted.prefix),
            import_events=wanted.import_events,
            export_events=wanted.export_events,
            chunk_mib=wanted.chunk_mib,
            kms_key=wanted.kms_key,
        )
        for wanted in lustre.associations
    )


def nested(one: str, other: str) -> bool:
    """Whether two paths or URIs are the same place or one lies in the other; `/a` and `/ab` are two places."""
    return all(left == right for left, right in zip(_parts(one), _parts(other), strict=False))


def overlaps(plans: Sequence[AssociationPlan]) -> tuple[Overlap, ...]:
    """Every pair that FSx would refuse, with the side it clashes on; a pair that clashes on both is named twice."""
    overlaps: list[Overlap] = []
    for (first, one), (second, other) in combinations(enumerate(plans), 2):
        if nested(one.path, other.path):
            overlaps.append(Overlap(first, second, "path"))
        if nested(one.uri, other.uri):
            overlaps.append(Overlap(first, second, "prefix"))
    return tuple(overlaps)


def exports_over(spec: ClusterSpec, place: Place, uri: str) -> tuple[AssociationPlan, ...]:
    """Return the associations that export files by themselves to where `uri` lies, or to a place inside it.

    The trainer and FSx would write the same keys, and neither knows of the other. A `uri` that is a folder cannot clash.
    """
    if not uri.startswith("s3://"):
        return ()
    return tuple(plan for plan in associations(spec, place) if plan.export_events and nested(plan.uri, uri))


def archived_over(spec: ClusterSpec, place: Place) -> tuple[tuple[AssociationPlan, Rule], ...]:
    """Associations over keys that a lifecycle rule of ours moves to a Glacier class.

    FSx releases data it can read back from S3; what has moved comes back slower and at a price per GB, or not at all.
    """
    rules = {bucket.key: bucket.rules for bucket in buckets(spec, place)}
    return tuple(
        (plan, rule)
        for plan in associations(spec, place)
        if plan.own is not None
        for rule in rules[plan.own]
        if rule.storage_class is not None and nested(plan.uri, s3_uri(plan.bucket, rule.prefix))
    )


def key_statements(spec: ClusterSpec, place: Place) -> dict[str, Statement]:
    """Return what the policy of each key of linked buckets must hold for FSx to read and write them, by the key of the
    config that names it: buckets that the stack makes have `buckets.kms_key`, others what their association names.

    The policy of AWS's own key of S3 cannot be changed, and need not be.
    """
    made = made_buckets(spec, place)
    linked: dict[str, tuple[str, list[str]]] = {}
    for index, plan in enumerate(associations(spec, place)):
        path, key = association_key(index, "kms_key"), plan.kms_key
        if plan.bucket in made:
            path, key = "buckets.kms_key", spec.buckets.kms_key
        if key and not key.endswith(S3_OWN_KEY):
            linked.setdefault(key, (path, []))[1].append(plan.bucket)
    return {path: _for_fsx(place, dict.fromkeys(names)) for path, names in linked.values()}


S3_OWN_KEY = "alias/aws/s3"


def association_key(index: int, key: str) -> str:
    """Return the path of a key of an association in the config."""
    return f"storage.lustre.associations.{index}.{key}"


def _for_fsx(place: Place, linked: Iterable[str]) -> Statement:
    """Return the statement of a key's policy that lets FSx at these buckets.

    FSx comes with a role of its own for each file system, whose id is not known yet. With S3 bucket keys the context is the
    bucket, without it the object (https://docs.aws.amazon.com/fsx/latest/LustreGuide/s3-server-side-encryption-support.html).
    """
    role = "role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/AWSServiceRoleForFSxS3Access_fs-*"
    context = [place.bucket_arn(bucket, path) for bucket in linked for path in ("", "*")]
    condition: dict[str, dict[str, Any]] = {
        "StringEquals": {
            "kms:CallerAccount": place.account,
            "kms:ViaService": f"s3.{place.region}.{place.dns_suffix}",
        },
        "StringLike": {"kms:EncryptionContext:aws:s3:arn": context},
        "ArnLike": {"aws:PrincipalArn": place.arn("iam", role, region="")},
    }
    actions = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
    return allow("FsxOnLinkedBuckets", actions, "*", condition, Principal={"AWS": "*"})


def _own(bucket: str, own: dict[str, str]) -> Literal["data", "checkpoints"] | None:
    if bucket == own["data"]:
        return "data"
    return "checkpoints" if bucket == own["checkpoints"] else None


def as_prefix(prefix: str) -> str:
    """Return a prefix with a slash at its end and none before it; empty for a whole bucket."""
    bare = prefix.strip("/")
    return f"{bare}/" if bare else ""


def _parts(place: str) -> list[str]:
    return [part for part in place.split("/") if part]
