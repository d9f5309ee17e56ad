"""FSx for Lustre: which members of a request go together, and the service's defaults, as pure functions.

No number is judged here: the plan takes sizes, rates and IOPS from `infra.catalog.fsx`, and a check against the same table
could never fail. tests/infra/test_catalog.py holds that table against AWS's own text.

Sources: https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystemLustreConfiguration.html,
API_CreateFileSystemLustreMetadataConfiguration.html beside it, and
https://docs.aws.amazon.com/fsx/latest/LustreGuide/efa-file-systems.html.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any

from infra.catalog.fsx import VERSION, automatic_iops
from infra.local.additions.serving import refuse

DEPLOYMENT = "PERSISTENT_2"
TIERED = "INTELLIGENT_TIERING"
_OF_SSD = ("PerUnitStorageThroughput",)
_OF_TIERED = ("ThroughputCapacity", "DataReadCacheConfiguration")


def check_new(request: Mapping[str, Any]) -> None:
    """Refuse a CreateFileSystem request of type LUSTRE whose members do not go together."""
    lustre = request.get("LustreConfiguration") or {}
    storage, metadata = request.get("StorageType", "SSD"), lustre.get("MetadataConfiguration") or {}
    needed, foreign = (_OF_TIERED, _OF_SSD) if storage == TIERED else (_OF_SSD, _OF_TIERED)
    destination = (lustre.get("LogConfiguration") or {}).get("Destination", ":log-group:/aws/fsx/")
    version = request.get("FileSystemTypeVersion", VERSION)
    for broken, message in (
        (
            lustre.get("DeploymentType") != DEPLOYMENT or storage not in ("SSD", TIERED),
            f"The embedded AWS makes Lustre file systems of {DEPLOYMENT} on SSD or {TIERED} only.",
        ),
        (len(request["SubnetIds"]) != 1, "Lustre file systems take exactly one subnet ID."),
        (
            lustre.get("EfaEnabled") and not (metadata and version == VERSION),
            f"EFA is supported with a metadata configuration and FileSystemTypeVersion {VERSION} only.",
        ),
        (
            ":log-group:/aws/fsx/" not in destination,
            "The log destination must be a log group whose name begins with /aws/fsx/.",
        ),
        (
            not all(lustre.get(name) for name in needed) or any(lustre.get(name) for name in foreign),
            f"Storage of type {storage} needs {' and '.join(needed)} and takes no {' or '.join(foreign)}.",
        ),
        (
            (request.get("StorageCapacity") is None) != (storage == TIERED),
            f"StorageCapacity is required, but not for storage of type {TIERED}.",
        ),
        (
            metadata and (metadata.get("Mode") == "AUTOMATIC") == ("Iops" in metadata),
            "Metadata Iops are required in Mode USER_PROVISIONED, and cannot be set in Mode AUTOMATIC.",
        ),
        (storage == TIERED and metadata.get("Mode") != "USER_PROVISIONED", f"{TIERED} needs metadata Mode USER_PROVISIONED."),
    ):  # fmt: skip
        if broken:
            refuse("BadRequest", message)


def describe_configuration(request: Mapping[str, Any], default_logs: str) -> dict[str, Any]:
    """Return the LustreConfiguration of a new file system: the request's members and the service's defaults."""
    return changed_configuration(
        {
            "MountName": "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8)),
            "WeeklyMaintenanceStartTime": "1:05:00",
            "AutomaticBackupRetentionDays": 0,
            "CopyTagsToBackups": False,
            "DataCompressionType": "NONE",
            "EfaEnabled": False,
            "LogConfiguration": {"Level": "DISABLED"},
        },
        request,
        default_logs,
    )


def changed_configuration(current: Mapping[str, Any], request: Mapping[str, Any], default_logs: str) -> dict[str, Any]:
    """Return a LustreConfiguration after the changes of a request; `StorageCapacity` decides the automatic IOPS."""
    configuration = {**current, **(request.get("LustreConfiguration") or {})}
    logs = configuration["LogConfiguration"]
    if logs["Level"] != "DISABLED":
        destination = logs.get("Destination", default_logs).removesuffix(":*")
        configuration["LogConfiguration"] = {**logs, "Destination": destination}
    if (configuration.get("MetadataConfiguration") or {}).get("Mode") == "AUTOMATIC":
        iops = automatic_iops(request["StorageCapacity"])
        configuration["MetadataConfiguration"] = {"Mode": "AUTOMATIC", "Iops": iops}
    if configuration["AutomaticBackupRetentionDays"]:
        configuration.setdefault("DailyAutomaticBackupStartTime", "05:00")
    return configuration
