"""The rules by which FSx accepts an OpenZFS file system, its defaults and its root volume, as pure functions.

Sources: https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystemOpenZFSConfiguration.html and
API_OpenZFSCreateRootVolumeConfiguration.html beside it. Capacities are in GiB, throughput in MB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from infra.catalog.fsx import HOME_MB_S
from infra.local.additions.serving import refuse

DEPLOYMENT = "SINGLE_AZ_HA_2"
CAPACITY = range(64, 524288 + 1)
IOPS_PER_GIB = 3


def check_new(request: Mapping[str, Any]) -> None:
    """Refuse a CreateFileSystem request of type OPENZFS that breaks one of the service's rules."""
    zfs = request.get("OpenZFSConfiguration") or {}
    if not zfs:
        refuse("MissingFileSystemConfiguration", "OpenZFSConfiguration is required.")
    if (deployment := zfs["DeploymentType"]) != DEPLOYMENT:
        _reject(f"The embedded AWS makes OpenZFS file systems of {DEPLOYMENT} only, not {deployment}.")
    if len(request["SubnetIds"]) != 1:
        _reject(f"{DEPLOYMENT} takes exactly 1 subnet ID(s).")
    _check_throughput(zfs["ThroughputCapacity"])
    if request.get("StorageType", "SSD") == "SSD":
        if request.get("StorageCapacity") not in CAPACITY:
            _reject("StorageCapacity must be between 64 and 524288 GiB.")
        _check_iops(zfs.get("DiskIopsConfiguration"), request["StorageCapacity"])


def _check_throughput(throughput: int) -> None:
    if throughput not in HOME_MB_S:
        _reject(f"ThroughputCapacity {throughput} is not valid for {DEPLOYMENT}: use {', '.join(map(str, HOME_MB_S))}.")


def _check_iops(request: Mapping[str, Any] | None, capacity: int) -> None:
    if (request or {}).get("Mode") == "USER_PROVISIONED" and (request or {}).get("Iops", 0) < IOPS_PER_GIB * capacity:
        _reject(f"Iops must be at least {IOPS_PER_GIB} per GiB, here {IOPS_PER_GIB * capacity}.")


def describe_configuration(request: Mapping[str, Any], root_volume: str) -> dict[str, Any]:
    """Return the OpenZFSConfiguration of a new file system, with the service's defaults."""
    configuration = dict(request["OpenZFSConfiguration"])
    configuration.pop("RootVolumeConfiguration", None)
    configuration.setdefault("AutomaticBackupRetentionDays", 0)
    configuration.setdefault("CopyTagsToBackups", False)
    configuration.setdefault("CopyTagsToVolumes", False)
    configuration.setdefault("WeeklyMaintenanceStartTime", "1:05:00")
    if configuration["AutomaticBackupRetentionDays"]:
        configuration.setdefault("DailyAutomaticBackupStartTime", "05:00")
    configuration["DiskIopsConfiguration"] = iops_configuration(
        configuration.get("DiskIopsConfiguration"), request.get("StorageCapacity") or 0
    )
    configuration["RootVolumeId"] = root_volume
    return configuration


def iops_configuration(request: Mapping[str, Any] | None, capacity: int) -> dict[str, Any]:
    if (request or {}).get("Mode") == "USER_PROVISIONED":
        return dict(request or {})
    return {"Mode": "AUTOMATIC", "Iops": IOPS_PER_GIB * capacity}


def root_volume(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the OpenZFSConfiguration of a file system's root volume."""
    return {
        "VolumePath": "/fsx",
        "RecordSizeKiB": 128,
        "DataCompressionType": "NONE",
        "CopyTagsToSnapshots": False,
        "ReadOnly": False,
        "NfsExports": [{"ClientConfigurations": [{"Clients": "*", "Options": ["rw", "crossmnt"]}]}],
        "UserAndGroupQuotas": [],
        **(request["OpenZFSConfiguration"].get("RootVolumeConfiguration") or {}),
    }


def check_update(record: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Refuse an UpdateFileSystem request that the file system described by `record` cannot follow."""
    changes = request.get("OpenZFSConfiguration") or {}
    if changes.get("ThroughputCapacity") is not None:
        _check_throughput(changes["ThroughputCapacity"])
    capacity = request.get("StorageCapacity")
    if capacity is not None and capacity != record["StorageCapacity"] and capacity < record["StorageCapacity"] * 1.1:
        _reject("StorageCapacity must be at least 10 percent greater than the current storage capacity value.")
    _check_iops(changes.get("DiskIopsConfiguration"), capacity or record["StorageCapacity"])


def _reject(message: str) -> NoReturn:
    refuse("BadRequest", message)
