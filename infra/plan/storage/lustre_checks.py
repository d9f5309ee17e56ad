"""What AWS would refuse of an FSx for Lustre file system that is spelled out, and what cannot be meant."""

from __future__ import annotations

import math

from infra.catalog.fsx import (
    API,
    CACHE_GIB,
    EFA_STEP_GIB,
    LUSTRE_GUIDE,
    METADATA_IOPS,
    PER_TIB_MB_S,
    SMALLEST_GIB,
    STEP_GIB,
    TIERED_LARGEST_MB_S,
    TIERED_METADATA_IOPS,
    TIERED_STEP_MB_S,
    automatic_iops,
)
from infra.config import Lustre
from infra.finding import finding
from infra.plan.storage.lustre import legal_gib, lustre, wanted_mb_s
from infra.plan.storage.mounts import mount_problem
from lustrain.problem import Problem

_SIZES = {"capacity_gib": "FSX-001", "capacity_tib": "FSX-001", "per_tib_mb_s": "FSX-003", "throughput_gb_s": "FSX-003"}
"""The rule about each key that says how large or fast a file system is."""


def violations(config: Lustre, efa: bool) -> tuple[Problem, ...]:
    """Return the faults that AWS refuses or that cannot be meant; empty for a good config. `efa` is what `efa_wanted` says."""
    if config.existing is not None:
        return (*_mount(config), *_with_existing(config))
    by_type = _tiered_violations(config) if config.type == "intelligent-tiering" else _ssd_violations(config, efa)
    return (*_mount(config), *by_type, *_backups(config))


def _mount(config: Lustre) -> list[Problem]:
    problem = mount_problem(config.mount_path)
    if not problem:
        return []
    source = f"{LUSTRE_GUIDE}/mount-fs-auto-mount-onreboot.html"
    return [
        finding(
            "storage.lustre.mount_path",
            f"{config.mount_path} {problem}",
            "mount it at /fsx",
            code="FSX-008",
            source=source,
        )
    ]


def _with_existing(config: Lustre) -> list[Problem]:
    keys = ("throughput_gb_s", "capacity_tib", "capacity_gib", "per_tib_mb_s", "read_cache_gib", "efa", "metadata_iops")
    given = [key for key in (*keys, "kms_key") if getattr(config, key) is not None]
    given += [key for key in ("backup_days", "associations") if getattr(config, key)]
    return [
        finding(
            f"storage.lustre.{key}",
            "has no meaning with `existing`: nothing in an existing file system is changed",
            f"remove {key}, or remove existing",
            code="FSX-012",
            source=f"{LUSTRE_GUIDE}/getting-started.html",
        )
        for key in given
    ]


def _backups(config: Lustre) -> list[Problem]:
    if not (config.backup_days and config.associations):
        return []
    return [
        finding(
            "storage.lustre.backup_days",
            "backups are not supported on a file system that has data repository associations",
            "set backup_days: 0 (what is exported to S3 is kept there), or remove the associations",
            code="FSX-007",
            source=f"{LUSTRE_GUIDE}/using-backups-fsx.html",
        )
    ]


def _ssd_violations(config: Lustre, efa: bool) -> list[Problem]:
    found = _form(config)
    if config.capacity_gib is not None and not found:
        found += _capacity(config.capacity_gib, config.per_tib_mb_s, efa)
    if config.per_tib_mb_s is not None and config.per_tib_mb_s not in PER_TIB_MB_S:
        found.append(
            finding(
                "storage.lustre.per_tib_mb_s",
                f"{config.per_tib_mb_s} is not a throughput of PERSISTENT_2; allowed: {_listed(PER_TIB_MB_S)}",
                f"set {min(PER_TIB_MB_S, key=lambda rate: abs(rate - (config.per_tib_mb_s or 0)))}",
                code="FSX-003",
                source=f"{API}/API_CreateFileSystemLustreConfiguration.html",
            )
        )
    if config.metadata_iops is not None and config.metadata_iops not in METADATA_IOPS:
        found.append(
            finding(
                "storage.lustre.metadata_iops",
                f"{config.metadata_iops} is not on the ladder; allowed: 1500, 3000, 6000, multiples of 12000 up to 192000",
                f"set {_at_least(METADATA_IOPS, config.metadata_iops)}, or remove it and FSx follows the capacity",
                code="FSX-004",
                source=f"{API}/API_CreateFileSystemLustreMetadataConfiguration.html",
            )
        )
    elif config.metadata_iops is not None and not found:
        capacity = lustre(config, efa).capacity_gib or 0
        if config.metadata_iops < (least := automatic_iops(capacity)):
            found.append(
                finding(
                    "storage.lustre.metadata_iops",
                    f"{config.metadata_iops} is below the {least} that {capacity} GiB have by themselves",
                    f"set {least} or more, or remove it and FSx follows the capacity",
                    code="FSX-004",
                    source=f"{LUSTRE_GUIDE}/managing-metadata-performance.html",
                )
            )
    if config.read_cache_gib is not None:
        found.append(
            finding(
                "storage.lustre.read_cache_gib",
                "only Intelligent-Tiering has a read cache",
                "remove it, or set type: intelligent-tiering",
                code="FSX-005",
                source=f"{API}/API_LustreReadCacheConfiguration.html",
            )
        )
    return found


def _form(config: Lustre) -> list[Problem]:
    """Check that the config names throughput and capacity, or an exact size, and all of it."""
    exact = {"capacity_gib": config.capacity_gib, "per_tib_mb_s": config.per_tib_mb_s}
    wanted = {"throughput_gb_s": config.throughput_gb_s, "capacity_tib": config.capacity_tib}
    source = f"{API}/API_CreateFileSystemLustreConfiguration.html"
    missing = [key for key, value in exact.items() if value is None]
    if len(missing) == 2:
        return []
    problems = [
        finding(
            f"storage.lustre.{key}",
            "stands beside an exact size: only one of them can hold",
            "keep throughput_gb_s and capacity_tib, or capacity_gib and per_tib_mb_s",
            code=_SIZES[key],
            source=source,
        )
        for key, value in wanted.items()
        if value is not None
    ]
    if missing:
        other = next(key for key in exact if key not in missing)
        message = f"is missing: {other} needs it, throughput is the product of the two"
        problems.append(
            finding(
                f"storage.lustre.{missing[0]}",
                message,
                f"add it, or remove {other}",
                code=_SIZES[missing[0]],
                source=source,
            )
        )
    return problems


def _capacity(capacity_gib: int, per_tib: int | None, efa: bool) -> list[Problem]:
    key = "storage.lustre.capacity_gib"
    if efa and per_tib in EFA_STEP_GIB and capacity_gib % EFA_STEP_GIB[per_tib]:
        message = f"EFA at {per_tib} MB/s/TiB comes in steps of {EFA_STEP_GIB[per_tib]} GiB, {capacity_gib} is none"
        fix = f"set {legal_gib(capacity_gib, per_tib, True)}, or efa: false"
        return [finding(key, message, fix, code="FSX-002", source=f"{LUSTRE_GUIDE}/increase-storage-capacity.html")]
    if capacity_gib != SMALLEST_GIB and capacity_gib % STEP_GIB:
        message = (
            f"{capacity_gib} GiB is not a size of PERSISTENT_2; allowed: {SMALLEST_GIB}, or a multiple of {STEP_GIB}"
        )
        fix = f"set {legal_gib(capacity_gib, 0, False)}"
        return [finding(key, message, fix, code="FSX-001", source=f"{API}/API_CreateFileSystem.html")]
    return []


def _tiered_violations(config: Lustre) -> list[Problem]:
    source = f"{LUSTRE_GUIDE}/using-fsx-lustre.html"
    problems = [
        finding(
            f"storage.lustre.{key}",
            "has no meaning on Intelligent-Tiering, which grows and shrinks with what is in it",
            f"remove {key}",
            code=_SIZES[key],
            source=source,
        )
        for key in ("capacity_tib", "capacity_gib", "per_tib_mb_s")
        if getattr(config, key) is not None
    ]
    wanted = wanted_mb_s(config)
    if not 0 < wanted <= TIERED_LARGEST_MB_S:
        message = (
            "is missing: Intelligent-Tiering" if not wanted else f"{wanted:g} MB/s is too much: Intelligent-Tiering"
        )
        message += f" is sized by its throughput alone; allowed: steps of 4 GB/s up to {TIERED_LARGEST_MB_S // 1000}"
        problems.append(
            finding(
                "storage.lustre.throughput_gb_s",
                message,
                "set 4",
                code="FSX-003",
                source=f"{LUSTRE_GUIDE}/managing-throughput-capacity.html",
            )
        )
    if config.metadata_iops is not None and config.metadata_iops not in TIERED_METADATA_IOPS:
        message = (
            f"{config.metadata_iops} is not one of {_listed(TIERED_METADATA_IOPS)}, which Intelligent-Tiering can have"
        )
        fix = f"set {_at_least(TIERED_METADATA_IOPS, config.metadata_iops)}"
        problems.append(
            finding(
                "storage.lustre.metadata_iops",
                message,
                fix,
                code="FSX-004",
                source=f"{API}/API_CreateFileSystemLustreMetadataConfiguration.html",
            )
        )
    return problems + _cache(config) + _tiered_associations(config)


def _cache(config: Lustre) -> list[Problem]:
    steps = max(1, math.ceil(wanted_mb_s(config) / TIERED_STEP_MB_S))
    least, most = (steps * bound for bound in CACHE_GIB)
    if config.read_cache_gib is None or least <= config.read_cache_gib <= most:
        return []
    message = (
        f"{config.read_cache_gib} GiB is out of range at {steps * TIERED_STEP_MB_S} MB/s; allowed: {least} to {most}"
    )
    fix = f"set {least if config.read_cache_gib < least else most}, or remove it for the smallest"
    return [
        finding(
            "storage.lustre.read_cache_gib",
            message,
            fix,
            code="FSX-005",
            source=f"{API}/API_LustreReadCacheConfiguration.html",
        )
    ]


def _tiered_associations(config: Lustre) -> list[Problem]:
    if not config.associations:
        return []
    return [
        finding(
            "storage.lustre.associations",
            "Intelligent-Tiering has no data repository associations",
            "remove them, or set type: ssd",
            code="FSX-006",
            source=f"{API}/API_DataRepositoryAssociation.html",
        )
    ]


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _at_least(ladder: tuple[int, ...], value: int) -> int:
    return next((step for step in ladder if step >= value), ladder[-1])
