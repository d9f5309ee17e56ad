"""Lustre and OpenZFS file systems with FSx's defaults and life cycle, and the root volumes of OpenZFS.

moto stores what a request holds: no defaults, no mount name, no interfaces, no updates, no volumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from moto.fsx.models import fsx_backends
from moto.fsx.responses import FSxResponse

from infra.catalog.fsx import VERSION
from infra.local.additions import lookups
from infra.local.additions.ec2 import interfaces
from infra.local.additions.fsx import lustre as fsx_lustre
from infra.local.additions.fsx import openzfs as fsx_openzfs
from infra.local.additions.serving import Call, refuse, serve
from infra.local.patches.wrapping import get_or_create

LEFT_OUT = (
    "fsx: Lustre PERSISTENT_2 and OpenZFS SINGLE_AZ_HA_2 only, two network interfaces each; sizes, rates and IOPS are taken as "
    "they come, which preflight judges; no data, changes of volumes, backups, or pages of long listings; what is new is there "
    "after its first description, and changes take no time"
)


@dataclass
class FileSystem:
    """`record` is the description without tags and life cycle; moto reads the properties."""

    record: dict[str, Any]
    lifecycle: str = "CREATING"
    """The first description still says so, so that clients have to wait; there is no clock in it."""

    @property
    def file_system_id(self) -> str:
        return str(self.record["FileSystemId"])

    @property
    def resource_arn(self) -> str:
        return str(self.record["ResourceARN"])


@dataclass
class Store:
    """The state of FSx in a region that moto lacks: volumes and data repository associations."""

    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    associations: dict[str, Any] = field(default_factory=dict)


def install() -> None:
    serve(
        FSxResponse,
        "fsx",
        {
            "CreateFileSystem": _create,
            "DescribeFileSystems": _describe,
            "UpdateFileSystem": _update,
            "DeleteFileSystem": _delete,
            "DescribeVolumes": _describe_volumes,
        },
    )


def get_backend(call: Call) -> Any:
    return fsx_backends[call.account][call.region]


def get_store(call: Call) -> Store:
    store: Store = get_or_create(get_backend(call), "lustrain_store", Store)
    return store


def get_file_system(call: Call, file_system_id: str) -> FileSystem:
    file_system: FileSystem | None = get_backend(call).file_systems.get(file_system_id)
    if file_system is None:
        refuse("FileSystemNotFound", f"File system '{file_system_id}' does not exist.")
    return file_system


def arn(call: Call, kind: str, name: str) -> str:
    return f"arn:{call.partition}:fsx:{call.region}:{call.account}:{kind}/{name}"


def list_tags(call: Call, resource_arn: str) -> list[dict[str, str]]:
    tags: list[dict[str, str]] = get_backend(call).list_tags_for_resource(resource_arn)
    return tags


def _create(call: Call) -> Mapping[str, Any]:
    kind = call.params["FileSystemType"]
    if kind not in ("LUSTRE", "OPENZFS"):
        refuse("BadRequest", f"The emulation makes no file systems of type {kind}.")
    vpc = _check_network(call)
    if kind == "LUSTRE":
        fsx_lustre.check_new(call.params)
        _check_lustre_groups(call)
    else:
        fsx_openzfs.check_new(call.params)
    file_system_id = lookups.new_id("fs")
    record = {
        "OwnerId": call.account,
        "CreationTime": datetime.now(UTC),
        "FileSystemId": file_system_id,
        "FileSystemType": kind,
        "StorageCapacity": call.get("StorageCapacity"),
        "StorageType": call.get("StorageType", "SSD"),
        "VpcId": vpc,
        "SubnetIds": call.params["SubnetIds"],
        "NetworkInterfaceIds": [],
        "DNSName": f"{file_system_id}.fsx.{call.region}.amazonaws.com",
        "KmsKeyId": call.get("KmsKeyId", f"arn:{call.partition}:kms:{call.region}:{call.account}:alias/aws/fsx"),
        "ResourceARN": arn(call, "file-system", file_system_id),
        "AdministrativeActions": [],
        "NetworkType": call.get("NetworkType", "IPV4"),
    }
    if kind == "LUSTRE":
        record["LustreConfiguration"] = fsx_lustre.describe_configuration(call.params, _default_logs(call))
        record["FileSystemTypeVersion"] = call.get("FileSystemTypeVersion", VERSION)
    else:
        record["OpenZFSConfiguration"] = fsx_openzfs.describe_configuration(
            call.params, _create_root_volume(call, file_system_id)
        )
    subnets = call.params["SubnetIds"]
    record["NetworkInterfaceIds"] = interfaces.create_interfaces(
        call, (subnets[0], subnets[-1]), call.get("SecurityGroupIds", []), "Created by Amazon FSx"
    )
    file_system = FileSystem({name: value for name, value in record.items() if value is not None})
    get_backend(call).file_systems[file_system_id] = file_system
    get_backend(call).tagger.tag_resource(record["ResourceARN"], call.get("Tags", []))
    return {"FileSystem": _describe_file_system(call, file_system)}


def _default_logs(call: Call) -> str:
    return f"arn:{call.partition}:logs:{call.region}:{call.account}:log-group:/aws/fsx/lustre"


def _check_network(call: Call) -> str:
    """Return the VPC of the request's subnets and security groups."""
    reject = partial(refuse, "InvalidNetworkSettings")
    return lookups.find_vpc(call, call.params["SubnetIds"], call.get("SecurityGroupIds", []), reject)[0]


def _check_lustre_groups(call: Call) -> None:
    """Check that the security groups let the file servers reach each other on port 988, and with EFA on all ports.

    https://docs.aws.amazon.com/fsx/latest/LustreGuide/troubleshooting-file-system-creation.html
    """
    ids = call.get("SecurityGroupIds", [])
    groups = [group for group in (lookups.find_security_group(call, group_id) for group_id in ids) if group is not None]
    if (call.get("LustreConfiguration") or {}).get("EfaEnabled") and not any(group.open_to_itself for group in groups):
        refuse(
            "InvalidNetworkSettings",
            "Insufficient security group permissions to create an EFA-enabled file system. "
            "Update security group to allow all internal inbound and outbound traffic",
        )
    for rules in (
        [rule for group in groups for rule in group.ingress],
        [rule for group in groups for rule in group.egress],
    ):
        if groups and not any(rule.covers("tcp", 988) and (rule.cidr or rule.group in ids) for rule in rules):
            refuse(
                "InvalidNetworkSettings",
                "The file system cannot be created because the default security group in the subnet provided or the "
                "provided security groups do not permit Lustre LNET network traffic on port 988",
            )


def _create_root_volume(call: Call, file_system_id: str) -> str:
    volume_id = lookups.new_id("fsvol")
    get_store(call).volumes[volume_id] = {
        "CreationTime": datetime.now(UTC),
        "FileSystemId": file_system_id,
        "Lifecycle": "AVAILABLE",
        "Name": "fsx",
        "ResourceARN": arn(call, f"volume/{file_system_id}", volume_id),
        "VolumeId": volume_id,
        "VolumeType": "OPENZFS",
        "AdministrativeActions": [],
        "OpenZFSConfiguration": fsx_openzfs.root_volume(call.params),
    }
    return volume_id


def _describe_file_system(call: Call, file_system: FileSystem) -> dict[str, Any]:
    return {**file_system.record, "Lifecycle": file_system.lifecycle, "Tags": list_tags(call, file_system.resource_arn)}


def _describe(call: Call) -> Mapping[str, Any]:
    ids = call.get("FileSystemIds") or list(get_backend(call).file_systems)
    file_systems = [get_file_system(call, file_system_id) for file_system_id in ids]
    descriptions = [_describe_file_system(call, file_system) for file_system in file_systems]
    for file_system in file_systems:
        file_system.lifecycle = "AVAILABLE"
    return {"FileSystems": descriptions}


def _update(call: Call) -> Mapping[str, Any]:
    file_system = get_file_system(call, call.params["FileSystemId"])
    record = file_system.record
    if call.get("StorageCapacity", record.get("StorageCapacity", 0)) < record.get("StorageCapacity", 0):
        refuse("BadRequest", f"The storage capacity of {file_system.file_system_id} cannot be decreased.")
    current_iops, iops = map(_metadata_iops, (record, call.params))
    if iops and iops < current_iops:
        refuse("BadRequest", f"The metadata IOPS of {file_system.file_system_id} cannot be decreased.")
    record |= {name: call.params[name] for name in ("StorageCapacity", "FileSystemTypeVersion") if call.get(name)}
    request = {**call.params, "StorageCapacity": record.get("StorageCapacity")}
    if record["FileSystemType"] == "LUSTRE":
        current = record["LustreConfiguration"]
        record["LustreConfiguration"] = fsx_lustre.changed_configuration(current, request, _default_logs(call))
    else:
        record["OpenZFSConfiguration"] = fsx_openzfs.changed_configuration(record["OpenZFSConfiguration"], request)
    # The provider waits for this action.
    now = datetime.now(UTC)
    update = {"AdministrativeActionType": "FILE_SYSTEM_UPDATE", "Status": "COMPLETED", "RequestTime": now}
    record["AdministrativeActions"] = [update]
    return {"FileSystem": _describe_file_system(call, file_system)}


def _metadata_iops(description: Mapping[str, Any]) -> int:
    configuration = description.get("LustreConfiguration") or {}
    return int((configuration.get("MetadataConfiguration") or {}).get("Iops") or 0)


def _delete(call: Call) -> Mapping[str, Any]:
    file_system = get_file_system(call, call.params["FileSystemId"])
    for resources in (get_store(call).volumes, get_store(call).associations):
        for name in [name for name, resource in resources.items() if _belongs_to(resource, file_system)]:
            del resources[name]
    interfaces.delete_interfaces(call, file_system.record["NetworkInterfaceIds"])
    del get_backend(call).file_systems[file_system.file_system_id]
    return {"FileSystemId": file_system.file_system_id, "Lifecycle": "DELETING"}


def _belongs_to(resource: Any, file_system: FileSystem) -> bool:
    record = resource if isinstance(resource, dict) else resource.record
    return bool(record["FileSystemId"] == file_system.file_system_id)


def _get_volume(call: Call, volume_id: str) -> dict[str, Any]:
    volume = get_store(call).volumes.get(volume_id)
    if volume is None:
        refuse("VolumeNotFound", f"Volume '{volume_id}' does not exist.")
    return volume


def _describe_volumes(call: Call) -> Mapping[str, Any]:
    volumes = [_get_volume(call, volume_id) for volume_id in call.get("VolumeIds") or list(get_store(call).volumes)]
    return {"Volumes": [{**volume, "Tags": list_tags(call, volume["ResourceARN"])} for volume in volumes]}
