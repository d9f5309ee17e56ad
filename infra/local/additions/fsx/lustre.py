"""The rules by which FSx accepts a Lustre file system and the defaults it fills in; without effects.

Sources: https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystem.html (capacity, throughput),
API_CreateFileSystemLustreConfiguration.html and API_CreateFileSystemLustreMetadataConfiguration.html beside it, and
https://docs.aws.amazon.com/fsx/latest/LustreGuide/increase-storage-capacity.html (the steps of EFA file systems).
Capacities are in GiB, throughput per unit in MB/s per TiB, throughput capacity in MB/s.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any, NoReturn

from infra.catalog.fsx import (
    CACHE_GIB,
    EFA_STEP_GIB,
    METADATA_IOPS,
    PER_TIB_MB_S,
    SMALLEST_GIB,
    STEP_GIB,
    TIERED_LARGEST_MB_S,
    TIERED_METADATA_IOPS,
    TIERED_STEP_MB_S,
    automatic_iops,
)
from infra.local.additions.serving import refuse

DEPLOYMENT = "PERSISTENT_2"
VERSIONS = ("2.12", "2.15")
TIERED = "INTELLIGENT_TIERING"


def check_new(request: Mapping[str, Any]) -> None:
    """Refuse a CreateFileSystem request of type LUSTRE that breaks one of the service's rules."""
    lustre = request.get("LustreConfiguration") or {}
    deployment, storage = lustre.get("DeploymentType", "SCRATCH_1"), request.get("StorageType", "SSD")
    if deployment != DEPLOYMENT or storage not in ("SSD", TIERED):
        _bad(f"The embedded AWS makes Lustre file systems of {DEPLOYMENT} on SSD or {TIERED} only, not {deployment}.")
    if len(request["SubnetIds"]) != 1:
        _bad("Lustre file systems take exactly one subnet ID.")
    if any(lustre.get(name) for name in ("ImportPath", "ExportPath", "AutoImportPolicy")):
        _bad(
            "ImportPath, ExportPath and AutoImportPolicy are not supported on PERSISTENT_2; use data repository associations."
        )
    if lustre.get("EfaEnabled") and not lustre.get("MetadataConfiguration"):
        _bad("EFA is supported on PERSISTENT_2 file systems with a metadata configuration only.")
    asked = version(request)
    if asked not in VERSIONS:
        _bad(f"FileSystemTypeVersion {asked} is not one of {', '.join(VERSIONS)}.")
    if lustre.get("EfaEnabled") and asked != "2.15":
        _bad("EFA-enabled file systems need FileSystemTypeVersion 2.15.")
    _check_logs(lustre.get("LogConfiguration"))
    if storage == TIERED:
        _check_tiered(request, lustre)
    else:
        _check_provisioned(request, lustre)


def version(request: Mapping[str, Any]) -> str:
    """Return the Lustre version a request gets: 2.12, with a metadata configuration 2.15, unless it says."""
    metadata = (request.get("LustreConfiguration") or {}).get("MetadataConfiguration")
    newest = metadata or request.get("StorageType") == TIERED
    return str(request.get("FileSystemTypeVersion") or ("2.15" if newest else "2.12"))


def _check_logs(logs: Mapping[str, Any] | None) -> None:
    destination = (logs or {}).get("Destination")
    if destination and ":log-group:/aws/fsx/" not in destination and ":deliverystream/aws-fsx" not in destination:
        _bad(
            "The log destination must be a log group whose name begins with /aws/fsx/ or a stream that begins with aws-fsx."
        )


def _check_tiered(request: Mapping[str, Any], lustre: Mapping[str, Any]) -> None:
    throughput = lustre.get("ThroughputCapacity")
    if request.get("StorageCapacity") is not None:
        _bad("StorageCapacity cannot be set on an Intelligent-Tiering file system.")
    if lustre.get("PerUnitStorageThroughput") is not None:
        _bad("PerUnitStorageThroughput cannot be set on an Intelligent-Tiering file system; set ThroughputCapacity.")
    if not throughput or throughput % TIERED_STEP_MB_S or throughput > TIERED_LARGEST_MB_S:
        _bad(f"ThroughputCapacity must be a multiple of {TIERED_STEP_MB_S} MB/s, at most {TIERED_LARGEST_MB_S}.")
    metadata = lustre.get("MetadataConfiguration") or {}
    if metadata.get("Mode") != "USER_PROVISIONED" or metadata.get("Iops") not in TIERED_METADATA_IOPS:
        _bad("Intelligent-Tiering needs MetadataConfiguration with Mode USER_PROVISIONED and Iops 6000 or 12000.")
    _check_cache(lustre.get("DataReadCacheConfiguration"), throughput)


def _check_cache(cache: Mapping[str, Any] | None, throughput: int) -> None:
    if not cache:
        _bad("DataReadCacheConfiguration is required when StorageType is INTELLIGENT_TIERING.")
    units = throughput // TIERED_STEP_MB_S
    size = cache.get("SizeGiB")
    if cache.get("SizingMode") == "USER_PROVISIONED":
        if size is None or not CACHE_GIB[0] * units <= size <= CACHE_GIB[1] * units:
            _bad(f"SizeGiB must be between {CACHE_GIB[0] * units} and {CACHE_GIB[1] * units} GiB at {throughput} MB/s.")
    elif size is not None:
        _bad("SizeGiB is valid only with SizingMode USER_PROVISIONED.")


def _check_provisioned(request: Mapping[str, Any], lustre: Mapping[str, Any]) -> None:
    per_unit = lustre.get("PerUnitStorageThroughput")
    for name in ("ThroughputCapacity", "DataReadCacheConfiguration"):
        if lustre.get(name) is not None:
            _bad(f"{name} is valid only when StorageType is {TIERED}.")
    _check_per_unit(per_unit)
    _check_capacity(per_unit, request.get("StorageCapacity"), efa=bool(lustre.get("EfaEnabled")))
    if lustre.get("MetadataConfiguration"):
        _check_metadata(lustre["MetadataConfiguration"])
        _check_baseline(lustre["MetadataConfiguration"], request["StorageCapacity"])


def _check_per_unit(per_unit: int | None) -> None:
    if per_unit not in PER_TIB_MB_S:
        known = ", ".join(map(str, PER_TIB_MB_S))
        refuse(
            "InvalidPerUnitStorageThroughput",
            f"PerUnitStorageThroughput {per_unit} is not valid for {DEPLOYMENT} with SSD storage: use {known}.",
        )


def _check_capacity(per_unit: int | None, capacity: int | None, *, efa: bool) -> None:
    """Refuse a capacity off the steps; those of an EFA file system depend on its throughput per unit."""
    if not capacity:
        _bad("StorageCapacity is required.")
    step = EFA_STEP_GIB[per_unit or 0] if efa else STEP_GIB
    if efa and capacity % step:
        _bad(
            f"StorageCapacity {capacity} is not valid for an EFA-enabled file system with {per_unit} MB/s/TiB: "
            f"use multiples of {step} GiB."
        )
    if capacity % step and capacity != SMALLEST_GIB:
        _bad(f"StorageCapacity {capacity} is not valid: use {SMALLEST_GIB} GiB or multiples of {step} GiB.")


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    iops = metadata.get("Iops")
    if metadata.get("Mode") == "AUTOMATIC":
        if iops is not None:
            _bad("Iops cannot be set when the metadata Mode is AUTOMATIC.")
    elif iops not in METADATA_IOPS:
        _bad(f"Metadata Iops {iops} is not valid: use 1500, 3000, 6000 or a multiple of 12000 up to 192000.")


def _check_baseline(metadata: Mapping[str, Any], capacity: int) -> None:
    least = automatic_iops(capacity)
    if metadata.get("Mode") != "AUTOMATIC" and metadata["Iops"] < least:
        _bad(f"Metadata Iops {metadata['Iops']} is below the baseline {least} of {capacity} GiB.")


def described(request: Mapping[str, Any], default_logs: str) -> dict[str, Any]:
    """Return the LustreConfiguration that FSx shows of a new file system: what was asked for and the service's defaults."""
    asked = dict(request.get("LustreConfiguration") or {})
    asked["MountName"] = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
    asked.setdefault("WeeklyMaintenanceStartTime", "1:05:00")
    asked.setdefault("AutomaticBackupRetentionDays", 0)
    asked.setdefault("CopyTagsToBackups", False)
    asked.setdefault("DataCompressionType", "NONE")
    asked.setdefault("EfaEnabled", False)
    asked["LogConfiguration"] = logs(asked.get("LogConfiguration"), default_logs)
    if asked["AutomaticBackupRetentionDays"]:
        asked.setdefault("DailyAutomaticBackupStartTime", "05:00")
    if asked.get("MetadataConfiguration"):
        asked["MetadataConfiguration"] = metadata(asked["MetadataConfiguration"], request.get("StorageCapacity") or 0)
    return asked


def logs(asked: Mapping[str, Any] | None, default: str) -> dict[str, Any]:
    if not asked or asked["Level"] == "DISABLED":
        return {"Level": "DISABLED"}
    return {"Level": asked["Level"], "Destination": asked.get("Destination", default).removesuffix(":*")}


def metadata(asked: Mapping[str, Any], capacity: int) -> dict[str, Any]:
    if asked.get("Mode") == "AUTOMATIC":
        return {"Mode": "AUTOMATIC", "Iops": automatic_iops(capacity)}
    return {"Mode": "USER_PROVISIONED", "Iops": asked["Iops"]}


def check_update(record: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Refuse an UpdateFileSystem request that the file system described by `record` cannot follow."""
    now: Mapping[str, Any] = record["LustreConfiguration"]
    asked: Mapping[str, Any] = request.get("LustreConfiguration") or {}
    storage = record["StorageType"]
    per_unit = asked.get("PerUnitStorageThroughput")
    if per_unit is not None:
        if now["EfaEnabled"] and per_unit != now.get("PerUnitStorageThroughput"):
            _bad("PerUnitStorageThroughput of an EFA-enabled file system cannot be changed.")
        _check_per_unit(None if storage == TIERED else per_unit)
    _check_growth(record, request, per_unit or now.get("PerUnitStorageThroughput"))
    if asked.get("MetadataConfiguration"):
        _check_metadata_growth(now, asked["MetadataConfiguration"], tiered=storage == TIERED)
    throughput = asked.get("ThroughputCapacity")
    if throughput is not None and (storage != TIERED or throughput % TIERED_STEP_MB_S):
        _bad(f"ThroughputCapacity is valid on Intelligent-Tiering only, in multiples of {TIERED_STEP_MB_S} MB/s.")
    if asked.get("DataReadCacheConfiguration"):
        if storage != TIERED:
            _bad(f"DataReadCacheConfiguration is valid only when StorageType is {TIERED}.")
        _check_cache(asked["DataReadCacheConfiguration"], throughput or now["ThroughputCapacity"])
    wanted = request.get("FileSystemTypeVersion")
    if wanted and VERSIONS.index(wanted) < VERSIONS.index(record["FileSystemTypeVersion"]):
        _bad(f"FileSystemTypeVersion cannot go back from {record['FileSystemTypeVersion']} to {wanted}.")
    _check_logs(asked.get("LogConfiguration"))


def _check_growth(record: Mapping[str, Any], request: Mapping[str, Any], per_unit: int | None) -> None:
    capacity = request.get("StorageCapacity")
    if capacity is None or capacity == record.get("StorageCapacity"):
        return
    if record["StorageType"] == TIERED:
        _bad(f"The storage capacity of a file system with {TIERED} storage cannot be changed.")
    if capacity < record["StorageCapacity"]:
        _bad(f"StorageCapacity must be greater than the current {record['StorageCapacity']} GiB.")
    _check_capacity(per_unit, capacity, efa=record["LustreConfiguration"]["EfaEnabled"])
    asked = (request.get("LustreConfiguration") or {}).get("MetadataConfiguration")
    if metadata := record["LustreConfiguration"].get("MetadataConfiguration"):
        _check_baseline({**metadata, **(asked or {})}, capacity)


def _check_metadata_growth(now: Mapping[str, Any], asked: Mapping[str, Any], *, tiered: bool) -> None:
    current = now.get("MetadataConfiguration")
    if not current:
        _bad("A metadata configuration cannot be added to a file system that was created without one.")
    if tiered and (asked.get("Mode") == "AUTOMATIC" or asked.get("Iops") not in TIERED_METADATA_IOPS):
        _bad("Intelligent-Tiering needs metadata Mode USER_PROVISIONED and Iops 6000 or 12000.")
    _check_metadata({"Mode": current["Mode"], **asked})
    if asked.get("Iops") is not None and asked["Iops"] < current["Iops"]:
        _bad(f"Metadata Iops can only be increased; the file system has {current['Iops']}.")


def _bad(message: str) -> NoReturn:
    refuse("BadRequest", message)
