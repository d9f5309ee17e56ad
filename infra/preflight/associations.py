"""DRA: what links folders of Lustre with prefixes in S3. The comparing is `infra.plan.storage.associations`'s."""

from __future__ import annotations

import json
from collections.abc import Iterable

from infra.config import ClusterSpec
from infra.plan.place import runs_uri
from infra.plan.storage.associations import MOST, archived_over, associations, exports_over, key_statement, overlaps
from infra.plan.storage.lustre import API, LUSTRE_GUIDE
from infra.preflight.finding import Finding
from infra.preflight.rule import Context, OfflineRule

CREATE = f"{API}/API_CreateDataRepositoryAssociation.html"
LONGEST_KEY = 1024
"""Bytes of an S3 key (https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html)."""


def _key(index: int, key: str) -> str:
    return f"storage.lustre.associations.{index}.{key}"


class TooMany(OfflineRule):
    code = "DRA-001"
    checks = f"A file system has at most {MOST} associations."
    source = CREATE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        count = len(associations(spec, context.place))
        if count > MOST:
            fix = "link a common parent folder to a common parent prefix"
            yield self.finding("storage.lustre.associations", f"{count} associations; a file system takes {MOST}", fix)


class PathsOverlap(OfflineRule):
    code = "DRA-002"
    checks = "No association's folder is, or lies inside, another one's."
    source = CREATE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        plans = associations(spec, context.place)
        for found in overlaps(plans):
            if found.side == "path":
                message = f"{plans[found.second].path} overlaps {plans[found.first].path} of association {found.first}"
                yield self.finding(_key(found.second, "path"), message, "link folders that lie beside one another")


class PrefixesOverlap(OfflineRule):
    code = "DRA-003"
    checks = "No association's S3 prefix is, or lies inside, another one's."
    source = CREATE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        plans = associations(spec, context.place)
        for found in overlaps(plans):
            if found.side == "prefix":
                message = f"{plans[found.second].uri} overlaps {plans[found.first].uri} of association {found.first}"
                yield self.finding(_key(found.second, "prefix"), message, "link prefixes that lie beside one another")


class RunsExported(OfflineRule):
    code = "DRA-004"
    checks = "Runs do not lie where an association exports to: trainer and FSx would write the same keys."
    source = f"{LUSTRE_GUIDE}/autoexport-data-repo-dra.html"
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        uri = runs_uri(spec, context.place)
        clashing = exports_over(spec, context.place, uri)
        for index, plan in enumerate(associations(spec, context.place)):
            if plan in clashing:
                message = f"FSx exports to {plan.uri}, where the trainer writes its runs ({uri})"
                yield self.finding(
                    _key(index, "export_events"), message, "export to another prefix, or set export_events: []"
                )


class DeletionsExported(OfflineRule):
    code = "DRA-005"
    level = "warning"
    checks = "Deletions in the file system are not exported to the checkpoints bucket."
    source = f"{LUSTRE_GUIDE}/autoexport-data-repo-dra.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for index, plan in enumerate(associations(spec, context.place)):
            if plan.own == "checkpoints" and "DELETED" in plan.export_events:
                message = "a file removed from the file system is gone from the checkpoints bucket too"
                yield self.finding(_key(index, "export_events"), message, "export NEW and CHANGED only")


class Archived(OfflineRule):
    code = "DRA-006"
    checks = "No linked prefix holds objects that a lifecycle rule moves to Glacier."
    source = f"{LUSTRE_GUIDE}/releasing-files.html"
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        clashing = archived_over(spec, context.place)
        for index, plan in enumerate(associations(spec, context.place)):
            for linked, rule in clashing:
                if linked == plan:
                    message = f"objects under {rule.prefix} of {plan.bucket} move to {rule.storage_class}"
                    fix = f"link a prefix outside {rule.prefix}"
                    yield self.finding(_key(index, "prefix"), message, fix)


class Folder(OfflineRule):
    code = "DRA-007"
    checks = "An association's folder and prefix go through no . or .., and the prefix is one that S3 takes."
    source = f"{LUSTRE_GUIDE}/create-dra-linked-data-repo.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for index, plan in enumerate(associations(spec, context.place)):
            if {".", ".."} & set(plan.path.split("/")):
                yield self.finding(
                    _key(index, "path"), f"{plan.path} goes through . or ..", "write the folder's own path"
                )
            parts = plan.prefix.removesuffix("/").split("/")
            if {".", ".."} & set(parts) or (plan.prefix and "" in parts):
                message = f"{plan.prefix!r} has an empty part, or . or .., which no folder can be called"
                yield self.finding(_key(index, "prefix"), message, "write it like datasets/text")
            if len(plan.prefix.encode()) > LONGEST_KEY:
                message = f"{len(plan.prefix.encode())} bytes; an S3 key has at most {LONGEST_KEY}"
                yield self.finding(_key(index, "prefix"), message, "shorten it")


class OnceOnly(OfflineRule):
    code = "DRA-008"
    level = "warning"
    checks = "An association imports or exports something by itself."
    source = CREATE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for index, plan in enumerate(associations(spec, context.place)):
            if not plan.import_events and not plan.export_events:
                message = "neither imports nor exports: folder and prefix never see one another's files"
                yield self.finding(_key(index, "import_events"), message, "set import_events or export_events")


class BothWays(OfflineRule):
    code = "DRA-009"
    level = "warning"
    checks = "An association does not import and export deletions both: one side's mistake is then the other's loss."
    source = f"{LUSTRE_GUIDE}/autoexport-data-repo-dra.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for index, plan in enumerate(associations(spec, context.place)):
            if "DELETED" in plan.import_events and "DELETED" in plan.export_events and plan.own != "checkpoints":
                message = "deletions go both ways: `rm` on a node deletes the data set in S3"
                yield self.finding(_key(index, "export_events"), message, "leave DELETED out of export_events")


class KeyOfBucket(OfflineRule):
    code = "DRA-010"
    level = "warning"
    checks = "FSx may use the key of a linked bucket: only the key's own policy can let it."
    source = f"{LUSTRE_GUIDE}/s3-server-side-encryption-support.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if statement := key_statement(spec, context.place):
            message = "FSx links buckets under this key and cannot read them unless the key's policy says so"
            whose = "" if context.account else f", with your account's number for {context.place.account}"
            paste = json.dumps(statement, separators=(",", ":"))
            fix = f"put into the key's policy{whose}, then suppress this: {paste}"
            yield self.finding("buckets.kms_key", message, fix)


class MountRepeated(OfflineRule):
    code = "DRA-011"
    level = "warning"
    checks = "An association's folder is counted from the file system's root, without the path that nodes mount it at."
    source = CREATE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        mount = spec.storage.lustre.mount_path if spec.storage.lustre else ""
        for index, plan in enumerate(associations(spec, context.place)):
            if f"{plan.path}/".startswith(f"{mount}/"):
                message = f"{plan.path} begins with the mount path: on nodes that is {mount}{plan.path}"
                inner = plan.path.removeprefix(mount) or "/data"
                yield self.finding(_key(index, "path"), message, f"write {inner}, which nodes see at {mount}{inner}")


RULES = (
    TooMany(),
    PathsOverlap(),
    PrefixesOverlap(),
    RunsExported(),
    DeletionsExported(),
    Archived(),
    Folder(),
    OnceOnly(),
    BothWays(),
    KeyOfBucket(),
    MountRepeated(),
)
