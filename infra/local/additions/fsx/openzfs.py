"""FSx for OpenZFS: the service's defaults for a file system and its root volume, as pure functions.

Sources: https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystemOpenZFSConfiguration.html and
API_OpenZFSCreateRootVolumeConfiguration.html beside it. Numbers are not judged, as in `lustre`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.local.additions.serving import refuse

DEPLOYMENT = "SINGLE_AZ_HA_2"
IOPS_PER_GIB = 3


def check_new(request: Mapping[str, Any]) -> None:
    """Refuse a CreateFileSystem request of type OPENZFS that the emulation does not follow."""
    if (request.get("OpenZFSConfiguration") or {}).get("DeploymentType") != DEPLOYMENT or len(
        request["SubnetIds"]
    ) != 1:
        refuse("BadRequest", f"The embedded AWS makes OpenZFS file systems of {DEPLOYMENT} in one subnet only.")


def describe_configuration(request: Mapping[str, Any], root_volume: str) -> dict[str, Any]:
    """Return the OpenZFSConfiguration of a new file system, with the service's defaults."""
    defaults = {
        "AutomaticBackupRetentionDays": 0,
        "CopyTagsToBackups": False,
        "CopyTagsToVolumes": False,
        "WeeklyMaintenanceStartTime": "1:05:00",
        "DailyAutomaticBackupStartTime": "05:00",
    }
    configuration = changed_configuration({**defaults, "RootVolumeId": root_volume}, request)
    configuration.pop("RootVolumeConfiguration", None)
    return configuration


def changed_configuration(current: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenZFSConfiguration after the changes of a request; `StorageCapacity` decides the automatic IOPS."""
    configuration = {**current, **(request.get("OpenZFSConfiguration") or {})}
    if configuration.get("DiskIopsConfiguration", {}).get("Mode") != "USER_PROVISIONED":
        iops = IOPS_PER_GIB * request["StorageCapacity"]
        configuration["DiskIopsConfiguration"] = {"Mode": "AUTOMATIC", "Iops": iops}
    return configuration


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
