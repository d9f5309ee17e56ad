"""The rules by which FSx accepts a Lustre file system, and its defaults, as pure functions.

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
        _reject(
            f"The embedded AWS makes Lustre file systems of {DEPLOYMENT} on SSD or {TIERED} only, not {deployment}."
        )
    if len(request["SubnetIds"]) != 1:
        _reject("Lustre file systems take exactly one subnet ID.")
    if any(lustre.get(name) for name in ("ImportPath", "ExportPath", "AutoImportPolicy")):
        _reject(
            "ImportPath, ExportPath and AutoImportPolicy are not supported on PERSISTENT_2; use data repository associations."
        )
    if lustre.get("EfaEnabled") and not lustre.get("MetadataConfiguration"):
        _reject("EFA is supported on PERSISTENT_2 file systems with a metadata configuration only.")
    version = lustre_version(request)
    if version not in VERSIONS:
        _reject(f"FileSystemTypeVersion {version} is not one of {', '.join(VERSIONS)}.")
    if lustre.get("EfaEnabled") and version != "2.15":
        _reject("EFA-enabled file systems need FileSystemTypeVersion 2.15.")
    _check_logs(lustre.get("LogConfiguration"))
    if storage == TIERED:
        _check_tiered(request, lustre)
    else:
        _check_provisioned(request, lustre)


def lustre_version(request: Mapping[str, Any]) -> str:
    """Return the Lustre version of a request: its own, else 2.15 with a metadata configuration, else 2.12."""
    metadata = (request.get("LustreConfiguration") or {}).get("MetadataConfiguration")
    latest = metadata or request.get("StorageType") == TIERED
    return str(request.get("FileSystemTypeVersion") or ("2.15" if latest else "2.12"))


def _check_logs(logs: Mapping[str, Any] | None) -> None:
    destination = (logs or {}).get("Destination")
    if destination and ":log-group:/aws/fsx/" not in destination and ":deliverystream/aws-fsx" not in destination:
        _reject(
            "The log destination must be a log group whose name begins with /aws/fsx/ or a stream that begins with aws-fsx."
        )


def _check_tiered(request: Mapping[str, Any], lustre: Mapping[str, Any]) -> None:
    throughput = lustre.get("ThroughputCapacity")
    if request.get("StorageCapacity") is not None:
        _reject("StorageCapacity cannot be set on an Intelligent-Tiering file system.")
    if lustre.get("PerUnitStorageThroughput") is not None:
        _reject("PerUnitStorageThroughput cannot be set on an Intelligent-Tiering file system; set ThroughputCapacity.")
    if not throughput or throughput % TIERED_STEP_MB_S or throughput > TIERED_LARGEST_MB_S:
        _reject(f"ThroughputCapacity must be a multiple of {TIERED_STEP_MB_S} MB/s, at most {TIERED_LARGEST_MB_S}.")
    metadata = lustre.get("MetadataConfiguration") or {}
    if metadata.get("Mode") != "USER_PROVISIONED" or metadata.get("Iops") not in TIERED_METADATA_IOPS:
        _reject("Intelligent-Tiering needs MetadataConfiguration with Mode USER_PROVISIONED and Iops 6000 or 12000.")
    _check_cache(lustre.get("DataReadCacheConfiguration"), throughput)


def _check_cache(cache: Mapping[str, Any] | None, throughput: int) -> None:
    if not cache:
        _reject("DataReadCacheConfiguration is required when StorageType is INTELLIGENT_TIERING.")
    units = throughput // TIERED_STEP_MB_S
    size = cache.get("SizeGiB")
    if cache.get("SizingMode") == "USER_PROVISIONED":
        if size is None or not CACHE_GIB[0] * units <= size <= CACHE_GIB[1] * units:
            _reject(
                f"SizeGiB must be between {CACHE_GIB[0] * units} and {CACHE_GIB[1] * units} GiB at {throughput} MB/s."
            )
    elif size is not None:
        _reject("SizeGiB is valid only with SizingMode USER_PROVISIONED.")


def _check_provisioned(request: Mapping[str, Any], lustre: Mapping[str, Any]) -> None:
    per_unit = lustre.get("PerUnitStorageThroughput")
    for name in ("ThroughputCapacity", "DataReadCacheConfiguration"):
        if lustre.get(name) is not None:
            _reject(f"{name} is valid only when StorageType is {TIERED}.")
    _check_per_unit(per_unit)
    _check_capacity(per_unit, request.get("StorageCapacity"), efa=bool(lustre.get("EfaEnabled")))
    if lustre.get("MetadataConfiguration"):
        _check_metadata(lustre["MetadataConfiguration"])
        _check_baseline(lustre["MetadataConfiguration"], request["StorageCapacity"])


def _check_per_unit(per_unit: int | None) -> None:
    if per_unit not in PER_TIB_MB_S:
        allowed = ", ".join(map(str, PER_TIB_MB_S))
        refuse(
            "InvalidPerUnitStorageThroughput",
            f"PerUnitStorageThroughput {per_unit} is not valid for {DEPLOYMENT} with SSD storage: use {allowed}.",
        )


def _check_capacity(per_unit: int | None, capacity: int | None, *, efa: bool) -> None:
    """Refuse a capacity between the steps; the steps of an EFA file system depend on its throughput per unit."""
    if not capacity:
        _reject("StorageCapacity is required.")
    step = EFA_STEP_GIB[per_unit or 0] if efa else STEP_GIB
    if efa and capacity % step:
        _reject(
            f"StorageCapacity {capacity} is not valid for an EFA-enabled file system with {per_unit} MB/s/TiB: "
            f"use multiples of {step} GiB."
        )
    if capacity % step and capacity != SMALLEST_GIB:
        _reject(f"StorageCapacity {capacity} is not valid: use {SMALLEST_GIB} GiB or multiples of {step} GiB.")


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    iops = metadata.get("Iops")
    if metadata.get("Mode") == "AUTOMATIC":
        if iops is not None:
            _reject("Iops cannot be set when the metadata Mode is AUTOMATIC.")
    elif iops not in METADATA_IOPS:
        _reject(f"Metadata Iops {iops} is not valid: use 1500, 3000, 6000 or a multiple of 12000 up to 192000.")


def _check_baseline(metadata: Mapping[str, Any], capacity: int) -> None:
    minimum = automatic_iops(capacity)
    if metadata.get("Mode") != "AUTOMATIC" and metadata["Iops"] < minimum:
        _reject(f"Metadata Iops {metadata['Iops']} is below the baseline {minimum} of {capacity} GiB.")


def describe_configuration(request: Mapping[str, Any], default_logs: str) -> dict[str, Any]:
    """Return the LustreConfiguration of a new file system: the request's members and the service's defaults."""
    configuration = dict(request.get("LustreConfiguration") or {})
    configuration["MountName"] = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
    configuration.setdefault("WeeklyMaintenanceStartTime", "1:05:00")
    configuration.setdefault("AutomaticBackupRetentionDays", 0)
    configuration.setdefault("CopyTagsToBackups", False)
    configuration.setdefault("DataCompressionType", "NONE")
    configuration.setdefault("EfaEnabled", False)
    configuration["LogConfiguration"] = log_configuration(configuration.get("LogConfiguration"), default_logs)
    if configuration["AutomaticBackupRetentionDays"]:
        configuration.setdefault("DailyAutomaticBackupStartTime", "05:00")
    if configuration.get("MetadataConfiguration"):
        configuration["MetadataConfiguration"] = metadata_configuration(
            configuration["MetadataConfiguration"], request.get("StorageCapacity") or 0
        )
    return configuration


def log_configuration(request: Mapping[str, Any] | None, default: str) -> dict[str, Any]:
    if not request or request["Level"] == "DISABLED":
        return {"Level": "DISABLED"}
    return {"Level": request["Level"], "Destination": request.get("Destination", default).removesuffix(":*")}


def metadata_configuration(request: Mapping[str, Any], capacity: int) -> dict[str, Any]:
    if request.get("Mode") == "AUTOMATIC":
        return {"Mode": "AUTOMATIC", "Iops": automatic_iops(capacity)}
    return {"Mode": "USER_PROVISIONED", "Iops": request["Iops"]}


def check_update(record: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Refuse an UpdateFileSystem request that the file system described by `record` cannot follow."""
    current: Mapping[str, Any] = record["LustreConfiguration"]
    changes: Mapping[str, Any] = request.get("LustreConfiguration") or {}
    storage = record["StorageType"]
    per_unit = changes.get("PerUnitStorageThroughput")
    if per_unit is not None:
        if current["EfaEnabled"] and per_unit != current.get("PerUnitStorageThroughput"):
            _reject("PerUnitStorageThroughput of an EFA-enabled file system cannot be changed.")
        _check_per_unit(None if storage == TIERED else per_unit)
    _check_growth(record, request, per_unit or current.get("PerUnitStorageThroughput"))
    if changes.get("MetadataConfiguration"):
        _check_metadata_growth(current, changes["MetadataConfiguration"], tiered=storage == TIERED)
    throughput = changes.get("ThroughputCapacity")
    if throughput is not None and (storage != TIERED or throughput % TIERED_STEP_MB_S):
        _reject(f"ThroughputCapacity is valid on Intelligent-Tiering only, in multiples of {TIERED_STEP_MB_S} MB/s.")
    if changes.get("DataReadCacheConfiguration"):
        if storage != TIERED:
            _reject(f"DataReadCacheConfiguration is valid only when StorageType is {TIERED}.")
        _check_cache(changes["DataReadCacheConfiguration"], throughput or current["ThroughputCapacity"])
    version = request.get("FileSystemTypeVersion")
    if version and VERSIONS.index(version) < VERSIONS.index(record["FileSystemTypeVersion"]):
        _reject(f"FileSystemTypeVersion cannot go back from {record['FileSystemTypeVersion']} to {version}.")
    _check_logs(changes.get("LogConfiguration"))


def _check_growth(record: Mapping[str, Any], request: Mapping[str, Any], per_unit: int | None) -> None:
    capacity = request.get("StorageCapacity")
    if capacity is None or capacity == record.get("StorageCapacity"):
        return
    if record["StorageType"] == TIERED:
        _reject(f"The storage capacity of a file system with {TIERED} storage cannot be changed.")
    if capacity < record["StorageCapacity"]:
        _reject(f"StorageCapacity must be greater than the current {record['StorageCapacity']} GiB.")
    _check_capacity(per_unit, capacity, efa=record["LustreConfiguration"]["EfaEnabled"])
    changes = (request.get("LustreConfiguration") or {}).get("MetadataConfiguration")
    if metadata := record["LustreConfiguration"].get("MetadataConfiguration"):
        _check_baseline({**metadata, **(changes or {})}, capacity)


def _check_metadata_growth(current: Mapping[str, Any], changes: Mapping[str, Any], *, tiered: bool) -> None:
    metadata = current.get("MetadataConfiguration")
    if not metadata:
        _reject("A metadata configuration cannot be added to a file system that was created without one.")
    if tiered and (changes.get("Mode") == "AUTOMATIC" or changes.get("Iops") not in TIERED_METADATA_IOPS):
        _reject("Intelligent-Tiering needs metadata Mode USER_PROVISIONED and Iops 6000 or 12000.")
    _check_metadata({"Mode": metadata["Mode"], **changes})
    if changes.get("Iops") is not None and changes["Iops"] < metadata["Iops"]:
        _reject(f"Metadata Iops can only be increased; the file system has {metadata['Iops']}.")


def _reject(message: str) -> NoReturn:
    refuse("BadRequest", message)
