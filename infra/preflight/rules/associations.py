"""DRA: what links folders of Lustre with prefixes in S3. The comparing is `infra.plan.storage.associations`'s."""

from __future__ import annotations

import json

from infra.catalog.fsx import API, LUSTRE_GUIDE, MOST_ASSOCIATIONS
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.storage.associations import archived_over, association_key, exports_over, key_statements, overlaps
from infra.plan.storage.buckets import made_buckets
from infra.preflight.rule import Context, Family

CREATE = f"{API}/API_CreateDataRepositoryAssociation.html"
LONGEST_KEY = 1024
"""Bytes of an S3 key (https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html)."""
RULES = Family()


@RULES.add("DRA-001", f"A file system has at most {MOST_ASSOCIATIONS} associations.", CREATE)
def too_many(spec: ClusterSpec, context: Context) -> Problems:
    count = len(context.plan.associations)
    if count > MOST_ASSOCIATIONS:
        fix = "link a common parent folder to a common parent prefix"
        yield finding(
            "storage.lustre.associations", f"{count} associations; a file system takes {MOST_ASSOCIATIONS}", fix
        )


@RULES.add("DRA-002", "No two associations' folders overlap.", CREATE)
@RULES.add("DRA-003", "No two associations' S3 prefixes overlap.", CREATE)
def overlapping(spec: ClusterSpec, context: Context) -> Problems:
    plans = context.plan.associations
    for clash in overlaps(plans):
        code, part, what = ("DRA-002", "path", "folders") if clash.side == "path" else ("DRA-003", "uri", "prefixes")
        first, second = (getattr(plans[index], part) for index in (clash.first, clash.second))
        message = f"{second} overlaps {first} of association {clash.first}"
        yield finding(
            association_key(clash.second, clash.side), message, f"link {what} that lie beside one another", code=code
        )


@RULES.add(
    "DRA-004",
    "Runs do not lie where an association exports to: trainer and FSx would write the same keys.",
    f"{LUSTRE_GUIDE}/autoexport-data-repo-dra.html",
    judgement=True,
)
def runs_exported(spec: ClusterSpec, context: Context) -> Problems:
    uri = context.plan.runs_uri
    clashing = exports_over(spec, context.place, uri)
    for index, plan in enumerate(context.plan.associations):
        if plan in clashing:
            message = f"FSx exports to {plan.uri}, where the trainer writes its runs ({uri})"
            yield finding(
                association_key(index, "export_events"), message, "export to another prefix, or set export_events: []"
            )


@RULES.add(
    "DRA-005",
    "Deletions in the file system are not exported to the checkpoints bucket.",
    f"{LUSTRE_GUIDE}/autoexport-data-repo-dra.html",
    level="warning",
)
def deletions_exported(spec: ClusterSpec, context: Context) -> Problems:
    for index, plan in enumerate(context.plan.associations):
        if plan.own == "checkpoints" and "DELETED" in plan.export_events:
            message = "a file removed from the file system is gone from the checkpoints bucket too"
            yield finding(association_key(index, "export_events"), message, "export NEW and CHANGED only")


@RULES.add(
    "DRA-006",
    "No linked prefix holds objects that a lifecycle rule moves to Glacier.",
    f"{LUSTRE_GUIDE}/releasing-files.html",
    judgement=True,
)
def archived(spec: ClusterSpec, context: Context) -> Problems:
    clashing = archived_over(spec, context.place)
    for index, plan in enumerate(context.plan.associations):
        for linked, rule in clashing:
            if linked == plan:
                message = f"objects under {rule.prefix} of {plan.bucket} move to {rule.storage_class}"
                fix = f"link a prefix outside {rule.prefix}"
                yield finding(association_key(index, "prefix"), message, fix)


@RULES.add(
    "DRA-007",
    "An association's folder and prefix go through no . or .., and the prefix is one that S3 takes.",
    f"{LUSTRE_GUIDE}/create-dra-linked-data-repo.html",
)
def folder(spec: ClusterSpec, context: Context) -> Problems:
    for index, plan in enumerate(context.plan.associations):
        if {".", ".."} & set(plan.path.split("/")):
            yield finding(
                association_key(index, "path"), f"{plan.path} goes through . or ..", "write the folder's own path"
            )
        parts = plan.prefix.removesuffix("/").split("/")
        if {".", ".."} & set(parts) or (plan.prefix and "" in parts):
            message = f"{plan.prefix!r} has an empty part, or . or .., which no folder can be called"
            yield finding(association_key(index, "prefix"), message, "write it like datasets/text")
        if len(plan.prefix.encode()) > LONGEST_KEY:
            message = f"{len(plan.prefix.encode())} bytes; an S3 key has at most {LONGEST_KEY}"
            yield finding(association_key(index, "prefix"), message, "shorten it")


@RULES.add("DRA-008", "An association imports or exports something by itself.", CREATE, level="warning")
def once_only(spec: ClusterSpec, context: Context) -> Problems:
    for index, plan in enumerate(context.plan.associations):
        if not plan.import_events and not plan.export_events:
            message = "neither imports nor exports: folder and prefix never see one another's files"
            yield finding(association_key(index, "import_events"), message, "set import_events or export_events")


@RULES.add(
    "DRA-009",
    "An association does not import and export deletions both: a mistake on one side deletes on both.",
    f"{LUSTRE_GUIDE}/autoexport-data-repo-dra.html",
    level="warning",
)
def both_ways(spec: ClusterSpec, context: Context) -> Problems:
    for index, plan in enumerate(context.plan.associations):
        if "DELETED" in plan.import_events and "DELETED" in plan.export_events and plan.own != "checkpoints":
            message = "deletions go both ways: `rm` on a node deletes the data set in S3"
            yield finding(association_key(index, "export_events"), message, "leave DELETED out of export_events")


@RULES.add(
    "DRA-010",
    "FSx may use the key of a linked bucket: only the key's own policy can let it.",
    f"{LUSTRE_GUIDE}/s3-server-side-encryption-support.html",
    level="warning",
)
def key_of_bucket(spec: ClusterSpec, context: Context) -> Problems:
    for path, statement in key_statements(spec, context.place).items():
        message = "FSx links buckets under this key and cannot read them unless the key's policy says so"
        whose = "" if context.account else f", with your account's number for {context.place.account}"
        paste = json.dumps(statement, separators=(",", ":"))
        fix = f"put into the key's policy{whose}, then suppress this: {paste}"
        yield finding(path, message, fix)


@RULES.add(
    "DRA-012",
    "An association names no key for a bucket that the stack makes: that has buckets.kms_key.",
    "infra/config.py",
)
def key_of_own_bucket(spec: ClusterSpec, context: Context) -> Problems:
    made = made_buckets(spec, context.place)
    for index, plan in enumerate(context.plan.associations):
        if plan.kms_key and plan.bucket in made:
            message = f"has no effect: the stack makes {plan.bucket}"
            yield finding(association_key(index, "kms_key"), message, "set buckets.kms_key, or remove it")


@RULES.add(
    "DRA-011",
    "An association's folder is counted from the file system's root, without the path that nodes mount it at.",
    CREATE,
    level="warning",
)
def mount_repeated(spec: ClusterSpec, context: Context) -> Problems:
    mount = spec.storage.lustre.mount_path if spec.storage.lustre else ""
    for index, plan in enumerate(context.plan.associations):
        if f"{plan.path}/".startswith(f"{mount}/"):
            message = f"{plan.path} begins with the mount path: on nodes that is {mount}{plan.path}"
            inner = plan.path.removeprefix(mount) or "/data"
            yield finding(association_key(index, "path"), message, f"write {inner}, which nodes see at {mount}{inner}")
