"""The effects of an update on file systems, buckets and images."""

from __future__ import annotations

from collections.abc import Iterator

from infra.catalog.fsx import automatic_iops
from infra.config import Association, ClusterSpec
from infra.plan.place import Place, runs_uri
from infra.plan.storage.lustre import LustrePlan, lustre_plan
from infra.preflight.change import Change, Effect, protected, shown

NOWHERE = Place("region", "account")
"""Names of buckets are compared, not used."""


def file_system(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Compare the file system as it is planned, not as it is written: a group with EFA may turn EFA of the file system on."""
    here, before, after = "storage.lustre", lustre_plan(old), lustre_plan(new)
    if before is None or after is None:
        if before is not None and not before.existing:
            yield protected(here, "the file system")
        elif before is not None:
            yield Change(here, Effect.NEW_NODES, "is no longer mounted")
        elif after is not None:
            yield Change(here, Effect.NEW_NODES, "is made, and mounted on new nodes")
        return
    if before.existing or after.existing:
        if not before.existing:
            yield protected(here, "the file system")
        if before.existing != after.existing:
            message = "new nodes mount the new file system"
            yield Change(f"{here}.existing", Effect.NEW_NODES, message, "", "copy the data first")
        return
    yield from _lustre_replaced(before, after)
    yield from _lustre_updated(before, after)


def _lustre_replaced(before: LustrePlan, after: LustrePlan) -> Iterator[Change]:
    fixed = {"storage": "type", "efa": "efa", "kms_key": "kms_key"}
    for name, key in fixed.items():
        if getattr(before, name) != getattr(after, name):
            message = f"{getattr(before, name)} becomes {getattr(after, name)}, which no file system can"
            instead = "keep the old value (efa can be set), or export to S3 and make a second stack"
            path = f"storage.lustre.{key}"
            yield Change(
                path, Effect.REPLACES_FILE_SYSTEM, message, "all that lies in Lustre and is not in S3", instead
            )


def _lustre_updated(before: LustrePlan, after: LustrePlan) -> Iterator[Change]:
    if before == after or before.storage != after.storage:
        return
    if (before.capacity_gib or 0) > (after.capacity_gib or 0):
        message = f"{before.capacity_gib} GiB cannot shrink to {after.capacity_gib}"
        yield Change(
            "storage.lustre.capacity_gib", Effect.IMPOSSIBLE, message, "", "keep the capacity, or make a second stack"
        )
    elif before.capacity_gib != after.capacity_gib:
        message = f"{before.capacity_gib} GiB grow to {after.capacity_gib}; six hours at least until the next change"
        yield Change("storage.lustre.capacity_gib", Effect.IN_PLACE, message)
    if before.per_tib_mb_s != after.per_tib_mb_s:
        message = f"{before.per_tib_mb_s} MB/s per TiB become {after.per_tib_mb_s}"
        if before.efa and after.efa:
            instead = "grow capacity_gib instead, or make a second stack"
            yield Change("storage.lustre.per_tib_mb_s", Effect.IMPOSSIBLE, f"{message}, fixed with EFA", "", instead)
        else:
            yield Change("storage.lustre.per_tib_mb_s", Effect.IN_PLACE, f"{message}; clients pause for minutes")
    if (before.metadata_iops or 0) > (after.metadata_iops or 0) > 0:
        message = f"{before.metadata_iops} cannot go down to {after.metadata_iops}"
        yield Change("storage.lustre.metadata_iops", Effect.IMPOSSIBLE, message, "", "keep the rate")
    elif after.metadata_iops and after.metadata_iops < (least := automatic_iops(after.capacity_gib or 0)):
        message = f"{after.metadata_iops} is below the {least} of {after.capacity_gib} GiB"
        yield Change("storage.lustre.metadata_iops", Effect.IMPOSSIBLE, message, "", f"set {least} or more")
    elif before.metadata_iops != after.metadata_iops:
        yield Change("storage.lustre.metadata_iops", Effect.IN_PLACE, "clients pause for minutes")
    for name in ("tiered_mb_s", "read_cache_gib", "compression", "backup_days"):
        if getattr(before, name) != getattr(after, name):
            message = f"{getattr(before, name)} becomes {getattr(after, name)}"
            message += ", for new files" if name == "compression" else ""
            yield Change(f"storage.lustre.{name}", Effect.IN_PLACE, message)
    if before.mount_path != after.mount_path:
        message = "new nodes mount it elsewhere; paths in jobs and runs break"
        yield Change("storage.lustre.mount_path", Effect.NEW_NODES, message, "", "keep the path")


def associations(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    before = {association.path: association for association in _associations(old)}
    after = {item.path: item for item in _associations(new)}
    for path, one in before.items():
        here = f"storage.lustre.associations ({path})"
        other = after.get(path)
        if other is None:
            message = "is deleted; files in Lustre stay, and are no longer mirrored"
            yield Change(
                here, Effect.REPLACES_ASSOCIATION, message, "changes that were not exported yet", "export them first"
            )
        elif (one.bucket, one.prefix) != (other.bucket, other.prefix):
            message = "links another prefix: a new association is made, and reads all file names again"
            lost = "changes that were not exported yet"
            yield Change(here, Effect.REPLACES_ASSOCIATION, message, lost, "wait until exports are done")
        elif one != other:
            yield Change(here, Effect.IN_PLACE, "events, chunk size or the bucket's key change, for new files")
    for path in (path for path in after if path not in before):
        yield Change(f"storage.lustre.associations ({path})", Effect.IN_PLACE, "is added; FSx makes one at a time")


def home(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    before, after = old.storage.home, new.storage.home
    if before == after:
        return
    if before is None or after is None:
        if before is None:
            done = "is mounted" if after and after.existing else "is made"
            message = f"{done}; new nodes have their homes there"
            yield Change("storage.home", Effect.NEW_NODES, message, "", "copy homes that lie on root disks")
        elif before.existing:
            yield Change("storage.home", Effect.NEW_NODES, "is no longer mounted")
        else:
            yield protected("storage.home", "the file system of homes")
        return
    if (before.type, before.existing) != (after.type, after.existing):
        if not before.existing:
            yield protected("storage.home", "the file system of homes")
        message = "new nodes have their homes in the other file system"
        key = "type" if before.type != after.type else "existing"
        yield Change(f"storage.home.{key}", Effect.NEW_NODES, message, "", "copy the homes first")
        return
    if before.kms_key != after.kms_key and not after.existing:
        message = f"{shown(before.kms_key)} becomes {shown(after.kms_key)}, which no file system can"
        instead = "keep the old key, or make a second stack and copy the homes"
        yield Change("storage.home.kms_key", Effect.REPLACES_FILE_SYSTEM, message, "all homes", instead)
    for key in ("backup", "infrequent_access_days"):
        if (was := getattr(before, key)) != (now := getattr(after, key)):
            yield Change(f"storage.home.{key}", Effect.IN_PLACE, f"{shown(was)} becomes {shown(now)}")
    if after.capacity_gib < before.capacity_gib:
        message = f"{before.capacity_gib} GiB cannot shrink to {after.capacity_gib}"
        yield Change("storage.home.capacity_gib", Effect.IMPOSSIBLE, message, "", "keep the capacity")
    elif after.capacity_gib > before.capacity_gib:
        yield Change("storage.home.capacity_gib", Effect.IN_PLACE, f"grows to {after.capacity_gib} GiB")
    if after.throughput_mb_s != before.throughput_mb_s:
        yield Change("storage.home.throughput_mb_s", Effect.IN_PLACE, f"becomes {after.throughput_mb_s} MB/s")
    if after.mount_path != before.mount_path:
        yield Change("storage.home.mount_path", Effect.NEW_NODES, "new nodes mount it elsewhere")


def s3_mounts(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    before, after = old.storage.s3_mounts, new.storage.s3_mounts
    if before != after:
        shown_paths = [shown([mount.path for mount in mounts]) for mounts in (before, after)]
        message = f"mounts of buckets, or their keys, change: {' becomes '.join(dict.fromkeys(shown_paths))}"
        kept = {mount.path for mount in after}
        removed = [mount.path for mount in before if mount.path not in kept]
        if removed:
            message += f"; then `fab node-tune`, which unmounts {' and '.join(removed)} on running nodes"
        if [mount for mount in set(before) - set(after) if mount.path in kept]:
            message += "; replace running nodes, which keep the old mounts, maybe without the right to them"
        yield Change("storage.s3_mounts", Effect.NEW_NODES, message)


def objects(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    before, after = runs_uri(old, NOWHERE), runs_uri(new, NOWHERE)
    if before != after and old.name == new.name:
        message = f"{before} becomes {after}: a run that resumes looks for its checkpoints there"
        path = "runs_uri" if new.runs_uri != old.runs_uri else "buckets.runs_prefix"
        yield Change(path, Effect.IN_PLACE, message, "nothing, but runs seem new", "copy the old prefix over first")
    for key in ("data", "checkpoints", "lifecycle"):
        if getattr(old.buckets, key) != getattr(new.buckets, key):
            if getattr(old.buckets, key) is None:
                yield protected(f"buckets.{key}", "the bucket that the stack made")
            yield Change(f"buckets.{key}", Effect.IN_PLACE, "a different bucket is used", "", "copy the objects first")
    days = (("ephemeral_days", "objects under ephemeral/"), ("noncurrent_days", "old versions"))
    for key, what in days:
        before_days, after_days = getattr(old.buckets, key), getattr(new.buckets, key)
        if after_days < before_days:
            message = f"{before_days} days become {after_days}, for existing objects too"
            yield Change(
                f"buckets.{key}", Effect.DELETES_OBJECTS, message, f"{what} older than that, within a day", "copy them"
            )
        elif after_days > before_days:
            yield Change(f"buckets.{key}", Effect.IN_PLACE, f"{before_days} days become {after_days}")
    if new.repository.keep_last < old.repository.keep_last:
        message = f"only the last {new.repository.keep_last} images are kept"
        yield Change(
            "repository.keep_last", Effect.DELETES_OBJECTS, message, "older images, within a day", "pull those you need"
        )


def _associations(spec: ClusterSpec) -> tuple[Association, ...]:
    return spec.storage.lustre.associations if spec.storage.lustre else ()
