"""Data repository associations: a folder of a Lustre file system linked to a bucket or a prefix, with the service's rules.

At most eight for a file system, worked on one at a time; no folder and no prefix inside another one; not on
Intelligent-Tiering, nor beside backups; the bucket in the same region.
https://docs.aws.amazon.com/fsx/latest/LustreGuide/create-dra-linked-data-repo.html
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from moto.fsx.responses import FSxResponse

from infra.catalog.fsx import MOST_ASSOCIATIONS
from infra.local.additions import lookups
from infra.local.additions.fsx.file_systems import arn, backend, file_system, once, store, tags
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "fsx data repository associations: no data moves in either direction; no notifications on the bucket, no MISCONFIGURED "
    "state, no file caches, no tags given to an update"
)
LINKING_SECONDS = 0.3


@dataclass
class Association:
    """`record` is what DescribeDataRepositoryAssociations shows, less tags and life cycle; `ready` is a monotonic time."""

    record: dict[str, Any]
    ready: float

    @property
    def lifecycle(self) -> str:
        return "AVAILABLE" if time.monotonic() >= self.ready else "CREATING"


def install() -> None:
    serve(
        FSxResponse,
        "fsx",
        {
            "CreateDataRepositoryAssociation": _create,
            "DescribeDataRepositoryAssociations": _describe,
            "UpdateDataRepositoryAssociation": _update,
            "DeleteDataRepositoryAssociation": _delete,
        },
    )


def _associations(call: Call) -> dict[str, Association]:
    return store(call).associations


def _association(call: Call) -> Association:
    name = call.params["AssociationId"]
    found = _associations(call).get(name)
    if found is None:
        refuse("DataRepositoryAssociationNotFound", f"Data repository association '{name}' does not exist.")
    return found


def _create(call: Call) -> Mapping[str, Any]:
    return {"Association": _shown(call, _associations(call)[once(call, _make)])}


def _make(call: Call) -> str:
    _check_file_system(file_system(call, call.params["FileSystemId"]).record)
    others = [one for one in _associations(call).values() if one.record["FileSystemId"] == call.params["FileSystemId"]]
    if len(others) >= MOST_ASSOCIATIONS:
        message = f"A file system takes at most {MOST_ASSOCIATIONS} associations."
        refuse("ServiceLimitExceeded", message, Limit="FILE_SYSTEM_COUNT")
    folder, repository = _check_paths(call)
    for other in others:
        if _nested(folder, _folder(other.record["FileSystemPath"])):
            _bad(f"FileSystemPath {folder} overlaps with {other.record['FileSystemPath']} of another association.")
        if _nested(repository, _folder(other.record["DataRepositoryPath"])):
            _bad(
                f"DataRepositoryPath {repository} overlaps with {other.record['DataRepositoryPath']} of another association."
            )
    made = lookups.new_id("dra")
    record = {
        "AssociationId": made,
        "ResourceARN": arn(call, f"association/{call.params['FileSystemId']}", made),
        "FileSystemId": call.params["FileSystemId"],
        "FileSystemPath": call.params["FileSystemPath"],
        "DataRepositoryPath": call.params["DataRepositoryPath"],
        "BatchImportMetaDataOnCreate": call.get("BatchImportMetaDataOnCreate", False),
        "ImportedFileChunkSize": call.get("ImportedFileChunkSize", 1024),
        "S3": _policies(call.get("S3", {})),
        "CreationTime": datetime.now(UTC),
    }
    queue = max((other.ready for other in others), default=0.0)
    _associations(call)[made] = Association(record, max(queue, time.monotonic()) + LINKING_SECONDS)
    backend(call).tagger.tag_resource(record["ResourceARN"], call.get("Tags", []))
    return made


def _check_file_system(record: Mapping[str, Any]) -> None:
    lustre = record.get("LustreConfiguration")
    if not lustre:
        _bad("Data repository associations need FSx for Lustre.")
    if record["StorageType"] == "INTELLIGENT_TIERING":
        _bad("Data repository associations are not supported on Intelligent-Tiering file systems.")
    if lustre["AutomaticBackupRetentionDays"]:
        _bad("Data repository associations are not supported on a file system with automatic backups.")


def _check_paths(call: Call) -> tuple[str, str]:
    folder = call.get("FileSystemPath", "")
    if not folder.startswith("/"):
        _bad("FileSystemPath must begin with a forward slash.")
    repository = call.params["DataRepositoryPath"]
    bucket, _, _ = repository.removeprefix("s3://").partition("/")
    if not repository.startswith("s3://") or not bucket:
        _bad("DataRepositoryPath must have the form s3://bucket/prefix/.")
    lives = lookups.bucket_region(call, bucket)
    if lives is None:
        _bad(f"Amazon FSx is unable to validate access to the S3 bucket {bucket}: the bucket does not exist.")
    if lives != call.region:
        _bad(f"The S3 bucket {bucket} is in {lives}; it must be in the region of the file system, {call.region}.")
    return _folder(folder), _folder(repository)


def _folder(path: str) -> str:
    return path.rstrip("/") + "/"


def _nested(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _policies(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: policy for name, policy in asked.items() if policy and policy.get("Events")}


def _shown(call: Call, found: Association) -> dict[str, Any]:
    return {**found.record, "Lifecycle": found.lifecycle, "Tags": tags(call, found.record["ResourceARN"])}


def _describe(call: Call) -> Mapping[str, Any]:
    known = _associations(call)
    for name in call.get("AssociationIds", []):
        if name not in known:
            refuse("DataRepositoryAssociationNotFound", f"Data repository association '{name}' does not exist.")
    found = [known[name] for name in call.get("AssociationIds") or known]
    for wanted in call.get("Filters", []):
        if wanted["Name"] == "file-system-id":
            found = [one for one in found if one.record["FileSystemId"] in wanted["Values"]]
    return {"Associations": [_shown(call, one) for one in found]}


def _update(call: Call) -> Mapping[str, Any]:
    found = _association(call)
    if found.lifecycle != "AVAILABLE":
        _bad(f"Data repository association {found.record['AssociationId']} is {found.lifecycle}; it must be AVAILABLE.")
    found.record["ImportedFileChunkSize"] = call.get("ImportedFileChunkSize", found.record["ImportedFileChunkSize"])
    found.record["S3"] = _policies({**found.record["S3"], **call.get("S3", {})})
    return {"Association": _shown(call, found)}


def _delete(call: Call) -> Mapping[str, Any]:
    found = _association(call)
    del _associations(call)[found.record["AssociationId"]]
    return {
        "AssociationId": found.record["AssociationId"],
        "Lifecycle": "DELETING",
        "DeleteDataInFileSystem": call.get("DeleteDataInFileSystem", False),
    }


def _bad(message: str) -> NoReturn:
    refuse("BadRequest", message)
