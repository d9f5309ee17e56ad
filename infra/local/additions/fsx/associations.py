"""Data repository associations, which moto lacks: links of a folder of a Lustre file system to a bucket or prefix.

FSx makes them in sequence. Intelligent-Tiering and automatic backups exclude them, and the bucket must be in the region of the
file system (https://docs.aws.amazon.com/fsx/latest/LustreGuide/create-dra-linked-data-repo.html).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from moto.fsx.responses import FSxResponse

from infra.local.additions import lookups
from infra.local.additions.fsx.file_systems import arn, get_backend, get_file_system, get_store, list_tags
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "fsx data repository associations: no data moves in either direction; no notifications on the bucket, no MISCONFIGURED "
    "state; folders and prefixes that overlap, and how many there are, are judged by preflight only"
)


@dataclass
class Association:
    """`record` is the description without tags and life cycle."""

    record: dict[str, Any]
    lifecycle: str = "CREATING"


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
    return get_store(call).associations


def _get_association(call: Call, association_id: str) -> Association:
    association = _associations(call).get(association_id)
    if association is None:
        refuse("DataRepositoryAssociationNotFound", f"Data repository association '{association_id}' does not exist.")
    return association


def _create(call: Call) -> Mapping[str, Any]:
    _check_file_system(get_file_system(call, call.params["FileSystemId"]).record)
    _check_bucket(call)
    association_id = lookups.new_id("dra")
    record = {
        "AssociationId": association_id,
        "ResourceARN": arn(call, f"association/{call.params['FileSystemId']}", association_id),
        "FileSystemId": call.params["FileSystemId"],
        "FileSystemPath": call.params["FileSystemPath"],
        "DataRepositoryPath": call.params["DataRepositoryPath"],
        "BatchImportMetaDataOnCreate": call.get("BatchImportMetaDataOnCreate", False),
        "ImportedFileChunkSize": call.get("ImportedFileChunkSize", 1024),
        "S3": _active_policies(call.get("S3", {})),
        "CreationTime": datetime.now(UTC),
    }
    association = _associations(call)[association_id] = Association(record)
    get_backend(call).tagger.tag_resource(record["ResourceARN"], call.get("Tags", []))
    return {"Association": _describe_association(call, association)}


def _check_file_system(record: Mapping[str, Any]) -> None:
    lustre = record.get("LustreConfiguration")
    if not lustre:
        _reject("Data repository associations need FSx for Lustre.")
    if record["StorageType"] == "INTELLIGENT_TIERING":
        _reject("Data repository associations are not supported on Intelligent-Tiering file systems.")
    if lustre["AutomaticBackupRetentionDays"]:
        _reject("Data repository associations are not supported on a file system with automatic backups.")


def _check_bucket(call: Call) -> None:
    bucket = call.params["DataRepositoryPath"].removeprefix("s3://").partition("/")[0]
    bucket_region = lookups.bucket_region(call, bucket)
    if bucket_region is None:
        _reject(f"Amazon FSx is unable to validate access to the S3 bucket {bucket}: the bucket does not exist.")
    if bucket_region != call.region:
        _reject(
            f"The S3 bucket {bucket} is in {bucket_region}; it must be in the region of the file system, {call.region}."
        )


def _active_policies(policies: Mapping[str, Any]) -> dict[str, Any]:
    return {name: policy for name, policy in policies.items() if policy and policy.get("Events")}


def _describe_association(call: Call, association: Association) -> dict[str, Any]:
    return {
        **association.record,
        "Lifecycle": association.lifecycle,
        "Tags": list_tags(call, association.record["ResourceARN"]),
    }


def _describe(call: Call) -> Mapping[str, Any]:
    ids = call.get("AssociationIds") or list(_associations(call))
    matches = [_get_association(call, association_id) for association_id in ids]
    descriptions = [_describe_association(call, association) for association in matches]
    # Each call completes one association, the oldest first.
    for association in _associations(call).values():
        if association.lifecycle == "CREATING":
            association.lifecycle = "AVAILABLE"
            break
    return {"Associations": descriptions}


def _update(call: Call) -> Mapping[str, Any]:
    association = _get_association(call, call.params["AssociationId"])
    record = association.record
    record["ImportedFileChunkSize"] = call.get("ImportedFileChunkSize", record["ImportedFileChunkSize"])
    record["S3"] = _active_policies({**record["S3"], **call.get("S3", {})})
    return {"Association": _describe_association(call, association)}


def _delete(call: Call) -> Mapping[str, Any]:
    association = _get_association(call, call.params["AssociationId"])
    del _associations(call)[association.record["AssociationId"]]
    return {
        "AssociationId": association.record["AssociationId"],
        "Lifecycle": "DELETING",
        "DeleteDataInFileSystem": call.get("DeleteDataInFileSystem", False),
    }


def _reject(message: str) -> NoReturn:
    refuse("BadRequest", message)
