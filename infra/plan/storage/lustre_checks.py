"""What AWS would refuse of an FSx for Lustre file system that is spelled out, and what cannot be meant."""

from __future__ import annotations

import math
from collections.abc import Iterator

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


def _fault(key: str, why: str, fix: str, code: str, source: str = "") -> Problem:
    """Return what is wrong with a key; `source` where it is not the one of the rule `code`."""
    return finding(f"storage.lustre.{key}", why, fix, code=code, source=source)


def _mount(config: Lustre) -> Iterator[Problem]:
    if problem := mount_problem(config.mount_path):
        yield _fault("mount_path", f"{config.mount_path} {problem}", "mount it at /fsx", "FSX-008")


def _with_existing(config: Lustre) -> Iterator[Problem]:
    keys = ("throughput_gb_s", "capacity_tib", "capacity_gib", "per_tib_mb_s", "read_cache_gib", "efa", "metadata_iops")
    given = [key for key in (*keys, "kms_key") if getattr(config, key) is not None]
    given += [key for key in ("backup_days", "associations") if getattr(config, key)]
    for key in given:
        message = "has no meaning with `existing`: nothing in an existing file system is changed"
        yield _fault(key, message, f"remove {key}, or remove existing", "FSX-012")


def _backups(config: Lustre) -> Iterator[Problem]:
    if config.backup_days and config.associations:
        message = "backups are not supported on a file system that has data repository associations"
        fix = "set backup_days: 0 (what is exported to S3 is kept there), or remove the associations"
        yield _fault("backup_days", message, fix, "FSX-007")


def _ssd_violations(config: Lustre, efa: bool) -> list[Problem]:
    rate, iops = config.per_tib_mb_s, config.metadata_iops
    problems = [*_form(config)]
    if config.capacity_gib is not None and not problems:
        problems += _capacity(config.capacity_gib, rate, efa)
    if rate is not None and rate not in PER_TIB_MB_S:
        message = f"{rate} is not a throughput of PERSISTENT_2; allowed: {_listed(PER_TIB_MB_S)}"
        nearest = min(PER_TIB_MB_S, key=lambda known: abs(known - (rate or 0)))
        problems.append(_fault("per_tib_mb_s", message, f"set {nearest}", "FSX-003"))
    if iops is not None and iops not in METADATA_IOPS:
        message = f"{iops} is not on the ladder; allowed: 1500, 3000, 6000, multiples of 12000 up to 192000"
        fix = f"set {_at_least(METADATA_IOPS, iops)}, or remove it and FSx follows the capacity"
        problems.append(_fault("metadata_iops", message, fix, "FSX-004"))
    elif iops is not None and not problems:
        capacity = lustre(config, efa).capacity_gib or 0
        if iops < (least := automatic_iops(capacity)):
            message = f"{iops} is below the {least} that {capacity} GiB have by themselves"
            fix = f"set {least} or more, or remove it and FSx follows the capacity"
            source = f"{LUSTRE_GUIDE}/managing-metadata-performance.html"
            problems.append(_fault("metadata_iops", message, fix, "FSX-004", source))
    if config.read_cache_gib is not None:
        fix = "remove it, or set type: intelligent-tiering"
        problems.append(_fault("read_cache_gib", "only Intelligent-Tiering has a read cache", fix, "FSX-005"))
    return problems


def _form(config: Lustre) -> Iterator[Problem]:
    """Check that the config names throughput and capacity, or an exact size, and all of it."""
    source = f"{API}/API_CreateFileSystemLustreConfiguration.html"
    exact = ("capacity_gib", "per_tib_mb_s")
    missing = [key for key in exact if getattr(config, key) is None]
    if len(missing) == 2:
        return
    for key in ("throughput_gb_s", "capacity_tib"):
        if getattr(config, key) is not None:
            message = "stands beside an exact size: only one of them can hold"
            fix = "keep throughput_gb_s and capacity_tib, or capacity_gib and per_tib_mb_s"
            yield _fault(key, message, fix, _SIZES[key], source)
    for key in missing:
        other = next(one for one in exact if one != key)
        message = f"is missing: {other} needs it, throughput is the product of the two"
        yield _fault(key, message, f"add it, or remove {other}", _SIZES[key], source)


def _capacity(capacity_gib: int, per_tib: int | None, efa: bool) -> Iterator[Problem]:
    if efa and per_tib in EFA_STEP_GIB and capacity_gib % EFA_STEP_GIB[per_tib]:
        message = f"EFA at {per_tib} MB/s/TiB comes in steps of {EFA_STEP_GIB[per_tib]} GiB, {capacity_gib} is none"
        fix = f"set {legal_gib(capacity_gib, per_tib, True)}, or efa: false"
        yield _fault("capacity_gib", message, fix, "FSX-002")
    elif capacity_gib != SMALLEST_GIB and capacity_gib % STEP_GIB:
        allowed = f"{SMALLEST_GIB}, or a multiple of {STEP_GIB}"
        message = f"{capacity_gib} GiB is not a size of PERSISTENT_2; allowed: {allowed}"
        yield _fault("capacity_gib", message, f"set {legal_gib(capacity_gib, 0, False)}", "FSX-001")


def _tiered_violations(config: Lustre) -> Iterator[Problem]:
    for key in ("capacity_tib", "capacity_gib", "per_tib_mb_s"):
        if getattr(config, key) is not None:
            message = "has no meaning on Intelligent-Tiering, which grows and shrinks with what is in it"
            yield _fault(key, message, f"remove {key}", _SIZES[key], f"{LUSTRE_GUIDE}/using-fsx-lustre.html")
    wanted = wanted_mb_s(config)
    if not 0 < wanted <= TIERED_LARGEST_MB_S:
        message = f"{wanted:g} MB/s is too much" if wanted else "is missing"
        message += ": Intelligent-Tiering is sized by its throughput alone"
        message += f"; allowed: steps of 4 GB/s up to {TIERED_LARGEST_MB_S // 1000}"
        source = f"{LUSTRE_GUIDE}/managing-throughput-capacity.html"
        yield _fault("throughput_gb_s", message, "set 4", "FSX-003", source)
    iops = config.metadata_iops
    if iops is not None and iops not in TIERED_METADATA_IOPS:
        message = f"{iops} is not one of {_listed(TIERED_METADATA_IOPS)}, which Intelligent-Tiering can have"
        yield _fault("metadata_iops", message, f"set {_at_least(TIERED_METADATA_IOPS, iops)}", "FSX-004")
    yield from _cache(config)
    if config.associations:
        message = "Intelligent-Tiering has no data repository associations"
        yield _fault("associations", message, "remove them, or set type: ssd", "FSX-006")


def _cache(config: Lustre) -> Iterator[Problem]:
    steps = max(1, math.ceil(wanted_mb_s(config) / TIERED_STEP_MB_S))
    least, most = (steps * bound for bound in CACHE_GIB)
    size = config.read_cache_gib
    if size is not None and not least <= size <= most:
        message = f"{size} GiB is out of range at {steps * TIERED_STEP_MB_S} MB/s; allowed: {least} to {most}"
        fix = f"set {least if size < least else most}, or remove it for the smallest"
        yield _fault("read_cache_gib", message, fix, "FSX-005")


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _at_least(ladder: tuple[int, ...], value: int) -> int:
    return next((step for step in ladder if step >= value), ladder[-1])
