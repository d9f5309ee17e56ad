"""FSx as FSx behaves: Lustre and OpenZFS file systems with the service's rules, defaults and life cycle; OpenZFS volumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from moto.fsx.models import fsx_backends
from moto.fsx.responses import FSxResponse

from infra.local.additions import lookups
from infra.local.additions.ec2 import interfaces
from infra.local.additions.fsx import lustre as fsx_lustre
from infra.local.additions.fsx import openzfs as fsx_openzfs
from infra.local.additions.serving import Call, refuse, serve
from infra.local.additions.wrapping import kept_by

LEFT_OUT = (
    "fsx: Lustre PERSISTENT_2 and OpenZFS SINGLE_AZ_HA_2 only, two network interfaces each; no data, file caches, snapshots, "
    "child volumes, data repository tasks or pages of long listings; the hours of growing and settling pass at once"
)
CREATING_SECONDS = 0.5


@dataclass
class FileSystem:
    """`record` is what DescribeFileSystems shows, less its tags and its life cycle; moto asks for the two properties."""

    record: dict[str, Any]
    born: float = field(default_factory=time.monotonic)

    @property
    def file_system_id(self) -> str:
        return str(self.record["FileSystemId"])

    @property
    def resource_arn(self) -> str:
        return str(self.record["ResourceARN"])

    @property
    def lifecycle(self) -> str:
        return "CREATING" if time.monotonic() - self.born < CREATING_SECONDS else "AVAILABLE"


@dataclass
class Store:
    """What FSx knows in one region besides moto's own: requests by their token, volumes, and data repository associations."""

    requests: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
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
            "UpdateVolume": _update_volume,
        },
    )


def backend(call: Call) -> Any:
    return fsx_backends[call.account][call.region]


def store(call: Call) -> Store:
    found: Store = kept_by(backend(call), "lustrain_store", Store)
    return found


def file_system(call: Call, file_system_id: str) -> FileSystem:
    found: FileSystem | None = backend(call).file_systems.get(file_system_id)
    if found is None:
        refuse("FileSystemNotFound", f"File system '{file_system_id}' does not exist.")
    return found


def once(call: Call, make: Callable[[Call], str]) -> str:
    """Return the id of what `make` makes of a request, or of what it made of the same one under the same token before.

    IncompatibleParameterError when the two requests under a token differ.
    """
    token, requests = call.get("ClientRequestToken"), store(call).requests
    if token not in requests:
        made = make(call)
        if token is not None:
            requests[token] = (call.params, made)
        return made
    request, made = requests[token]
    for name in sorted({*request, *call.params}):
        if request.get(name) != call.params.get(name):
            message = "The client request token was used before with other parameters."
            refuse("IncompatibleParameterError", message, Parameter=name)
    return made


def arn(call: Call, kind: str, name: str) -> str:
    return f"arn:{call.partition}:fsx:{call.region}:{call.account}:{kind}/{name}"


def tags(call: Call, resource_arn: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = backend(call).list_tags_for_resource(resource_arn)
    return found


def _create(call: Call) -> Mapping[str, Any]:
    return {"FileSystem": _shown(call, file_system(call, once(call, _make)))}


def _make(call: Call) -> str:
    kind = call.params["FileSystemType"]
    if kind not in ("LUSTRE", "OPENZFS"):
        refuse("BadRequest", f"The emulation makes no file systems of type {kind}.")
    vpc = _check_network(call)
    if kind == "LUSTRE":
        fsx_lustre.check_new(call.params)
        _check_lustre_groups(call)
    else:
        fsx_openzfs.check_new(call.params)
    made = lookups.new_id("fs")
    record = {
        "OwnerId": call.account,
        "CreationTime": datetime.now(UTC),
        "FileSystemId": made,
        "FileSystemType": kind,
        "StorageCapacity": call.get("StorageCapacity"),
        "StorageType": call.get("StorageType", "SSD"),
        "VpcId": vpc,
        "SubnetIds": call.params["SubnetIds"],
        "NetworkInterfaceIds": [],
        "DNSName": f"{made}.fsx.{call.region}.amazonaws.com",
        "KmsKeyId": call.get("KmsKeyId", f"arn:{call.partition}:kms:{call.region}:{call.account}:alias/aws/fsx"),
        "ResourceARN": arn(call, "file-system", made),
        "AdministrativeActions": [],
        "NetworkType": call.get("NetworkType", "IPV4"),
    }
    if kind == "LUSTRE":
        record["LustreConfiguration"] = fsx_lustre.described(call.params, _default_logs(call))
        record["FileSystemTypeVersion"] = fsx_lustre.version(call.params)
    else:
        record["OpenZFSConfiguration"] = fsx_openzfs.described(call.params, _make_root_volume(call, made))
    subnets = call.params["SubnetIds"]
    record["NetworkInterfaceIds"] = interfaces.put(
        call, (subnets[0], subnets[-1]), call.get("SecurityGroupIds", []), "Created by Amazon FSx"
    )
    backend(call).file_systems[made] = FileSystem({name: value for name, value in record.items() if value is not None})
    backend(call).tagger.tag_resource(record["ResourceARN"], call.get("Tags", []))
    return made


def _default_logs(call: Call) -> str:
    return f"arn:{call.partition}:logs:{call.region}:{call.account}:log-group:/aws/fsx/lustre"


def _check_network(call: Call) -> str:
    """Return the VPC of the request's subnets and security groups."""
    wrong = partial(refuse, "InvalidNetworkSettings")
    return lookups.vpc_of(call, call.params["SubnetIds"], call.get("SecurityGroupIds", []), wrong)[0]


def _check_lustre_groups(call: Call) -> None:
    """Check that the file servers can talk to each other on port 988, and with EFA on everything, through the groups they
    are given.

    https://docs.aws.amazon.com/fsx/latest/LustreGuide/troubleshooting-file-system-creation.html
    """
    ids = call.get("SecurityGroupIds", [])
    groups = [found for found in (lookups.group(call, group_id) for group_id in ids) if found is not None]
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


def _make_root_volume(call: Call, file_system_id: str) -> str:
    made = lookups.new_id("fsvol")
    store(call).volumes[made] = {
        "CreationTime": datetime.now(UTC),
        "FileSystemId": file_system_id,
        "Lifecycle": "AVAILABLE",
        "Name": "fsx",
        "ResourceARN": arn(call, f"volume/{file_system_id}", made),
        "VolumeId": made,
        "VolumeType": "OPENZFS",
        "AdministrativeActions": [],
        "OpenZFSConfiguration": fsx_openzfs.root_volume(call.params),
    }
    return made


def _shown(call: Call, found: FileSystem) -> dict[str, Any]:
    return {**found.record, "Lifecycle": found.lifecycle, "Tags": tags(call, found.resource_arn)}


def _describe(call: Call) -> Mapping[str, Any]:
    ids = call.get("FileSystemIds") or list(backend(call).file_systems)
    return {"FileSystems": [_shown(call, file_system(call, one)) for one in ids]}


def _update(call: Call) -> Mapping[str, Any]:
    found = file_system(call, call.params["FileSystemId"])
    if found.lifecycle != "AVAILABLE":
        refuse("BadRequest", f"File system {found.file_system_id} is {found.lifecycle}; it must be AVAILABLE.")
    record = found.record
    if record["FileSystemType"] == "LUSTRE":
        fsx_lustre.check_update(record, call.params)
        _change_lustre(call, record)
    else:
        fsx_openzfs.check_update(record, call.params)
        _change_openzfs(call, record)
    record["AdministrativeActions"] = [_done("FILE_SYSTEM_UPDATE")]
    return {"FileSystem": _shown(call, found)}


def _change_lustre(call: Call, record: dict[str, Any]) -> None:
    asked = dict(call.get("LustreConfiguration", {}))
    now = record["LustreConfiguration"]
    linked = any(one.record["FileSystemId"] == record["FileSystemId"] for one in store(call).associations.values())
    if asked.get("AutomaticBackupRetentionDays") and linked:
        refuse("BadRequest", "Backups are not supported on a file system with a data repository association.")
    for name in ("StorageCapacity", "FileSystemTypeVersion"):
        record[name] = call.get(name, record.get(name))
    if "LogConfiguration" in asked:
        asked["LogConfiguration"] = fsx_lustre.logs(asked["LogConfiguration"], _default_logs(call))
    metadata = now.get("MetadataConfiguration")
    if metadata:
        wanted = {**metadata, **asked.get("MetadataConfiguration", {})}
        asked["MetadataConfiguration"] = fsx_lustre.metadata(wanted, record.get("StorageCapacity") or 0)
    now.update(asked)


def _change_openzfs(call: Call, record: dict[str, Any]) -> None:
    asked = dict(call.get("OpenZFSConfiguration", {}))
    now = record["OpenZFSConfiguration"]
    record["StorageCapacity"] = call.get("StorageCapacity", record["StorageCapacity"])
    wanted = asked.pop("DiskIopsConfiguration", now["DiskIopsConfiguration"])
    now.update(asked, DiskIopsConfiguration=fsx_openzfs.iops(wanted, record["StorageCapacity"]))


def _done(kind: str) -> dict[str, Any]:
    return {
        "AdministrativeActionType": kind,
        "ProgressPercent": 100,
        "RequestTime": datetime.now(UTC),
        "Status": "COMPLETED",
    }


def _delete(call: Call) -> Mapping[str, Any]:
    found = file_system(call, call.params["FileSystemId"])
    kind = found.record["FileSystemType"]
    # FSx keeps a last backup of OpenZFS unless told not to, and of Lustre only when told to.
    options = call.get(f"{'Lustre' if kind == 'LUSTRE' else 'OpenZFS'}Configuration", {})
    kept = {}
    if not options.get("SkipFinalBackup", kind == "LUSTRE"):
        kept = {"FinalBackupId": backend(call).create_backup(found.file_system_id, None, None, None).backup_id}
    for things in (store(call).volumes, store(call).associations):
        for name in [name for name, one in things.items() if _belongs(one, found)]:
            del things[name]
    interfaces.take(call, found.record["NetworkInterfaceIds"])
    del backend(call).file_systems[found.file_system_id]
    response = "LustreResponse" if kind == "LUSTRE" else "OpenZFSResponse"
    return {"FileSystemId": found.file_system_id, "Lifecycle": "DELETING", response: kept}


def _belongs(one: Any, found: FileSystem) -> bool:
    record = one if isinstance(one, dict) else one.record
    return bool(record["FileSystemId"] == found.file_system_id)


def _volume(call: Call, volume_id: str) -> dict[str, Any]:
    found = store(call).volumes.get(volume_id)
    if found is None:
        refuse("VolumeNotFound", f"Volume '{volume_id}' does not exist.")
    return found


def _describe_volumes(call: Call) -> Mapping[str, Any]:
    volumes = [_volume(call, one) for one in call.get("VolumeIds") or list(store(call).volumes)]
    for wanted in call.get("Filters", []):
        if wanted["Name"] == "file-system-id":
            volumes = [volume for volume in volumes if volume["FileSystemId"] in wanted["Values"]]
    return {"Volumes": [{**volume, "Tags": tags(call, volume["ResourceARN"])} for volume in volumes]}


def _update_volume(call: Call) -> Mapping[str, Any]:
    volume = _volume(call, call.params["VolumeId"])
    volume["OpenZFSConfiguration"].update(call.get("OpenZFSConfiguration", {}))
    volume["AdministrativeActions"] = [_done("VOLUME_UPDATE")]
    return {"Volume": volume}
