"""Objects of S3 that lie in an archive: nothing reads them until they are restored, which takes minutes to days.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/archived-objects.html
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from lustrain.problem import problem
from trainer.storage import ArchivedError, ObjectInfo

INTELLIGENT_TIERING = "INTELLIGENT_TIERING"
"""Has archive tiers too, which a listing does not show: only a HEAD of the object names them."""
_ARCHIVES = {"GLACIER", "DEEP_ARCHIVE"}
"""Storage classes; GLACIER_IR is read like any other."""


def archive_in_listing(item: Mapping[str, Any]) -> str:
    """Return the archive that an item of ListObjectsV2 lies in; empty where it can be read, also as a restored copy."""
    if item.get("RestoreStatus", {}).get("IsRestoreInProgress") is False:
        return ""
    return _archive(item)


def archive_in_head(answer: Mapping[str, Any]) -> str:
    """Return the same by the answer of HeadObject, which also names the archive tiers of Intelligent-Tiering."""
    if 'ongoing-request="false"' in answer.get("Restore", ""):
        return ""
    return str(answer.get("ArchiveStatus") or _archive(answer))


def refuse_archived(name: str, uri: str, objects: Iterable[ObjectInfo]) -> None:
    """ArchivedError, one line with their number and an example, where some of the objects lie in an archive.

    `name` is what the user calls `uri`, the store's.
    """
    every = list(objects)
    archived = [info for info in every if info.archive]
    if not archived:
        return
    first = archived[0]
    hidden = any(info.storage_class == INTELLIGENT_TIERING for info in every)
    count = f"{'at least ' if hidden else ''}{len(archived)} of {len(every)} objects"
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    key = f"{prefix}/{first.key}".lstrip("/")
    request = "Days=30" if first.archive in _ARCHIVES else "{}"
    words = ["aws", "s3api", "restore-object", "--bucket", bucket, "--key", key, "--restore-request", request]
    why = f"{count} cannot be read before they are restored from an archive, such as {first.key} in {first.archive}"
    fix = f"restore each (`{shlex.join(words)}`), wait until that is done, then start again"
    raise ArchivedError(problem(name, uri, why, fix=fix))


def _archive(answer: Mapping[str, Any]) -> str:
    storage_class = str(answer.get("StorageClass", ""))
    return storage_class if storage_class in _ARCHIVES else ""
