"""The smallest FSx for Lustre file system that meets a wish, and the checks of one that is spelled out.

A wish of 9.6 TiB is met by 9600 GiB, since sizes are counted as FSx counts them (`infra.catalog.fsx`). Only PERSISTENT_2 is
planned: it alone has EFA, Intelligent-Tiering and a metadata rate of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from infra.catalog.fsx import (
    API,
    CACHE_GIB,
    EFA_SMALLEST_MB_S,
    EFA_STEP_GIB,
    GIB_PER_TIB,
    LUSTRE_GUIDE,
    METADATA_IOPS,
    PER_TIB_MB_S,
    SMALLEST_GIB,
    STEP_GIB,
    TIERED_LARGEST_MB_S,
    TIERED_METADATA_IOPS,
    TIERED_STEP_MB_S,
)
from infra.catalog.instances import instance
from infra.config import ClusterSpec, ExistingLustre, Lustre
from infra.finding import finding
from infra.plan.storage.mounts import mount_problem
from lustrain.problem import Problem

_SIZES = {"capacity_gib": "FSX-001", "capacity_tib": "FSX-001", "per_tib_mb_s": "FSX-003", "throughput_gb_s": "FSX-003"}
"""The rule about each key that says how large or fast a file system is."""


@dataclass(frozen=True)
class LustrePlan:
    """One file system; `binding` says in a sentence which rule made it as large as it is.

    SSD has `capacity_gib` and `per_tib_mb_s`; Intelligent-Tiering grows by itself and has `tiered_mb_s` and
    `read_cache_gib`. `metadata_iops` is None where FSx chooses the rate (AUTOMATIC). With `existing` nothing is made.
    """

    storage: Literal["SSD", "INTELLIGENT_TIERING"]
    efa: bool
    mount_path: str
    compression: str
    backup_days: int
    kms_key: str | None
    binding: str
    capacity_gib: int | None = None
    per_tib_mb_s: int | None = None
    tiered_mb_s: int | None = None
    read_cache_gib: int | None = None
    metadata_iops: int | None = None
    existing: ExistingLustre | None = None

    @property
    def throughput_mb_s(self) -> float | None:
        """All clients together, MB/s; None for an existing file system, whose size we are not told."""
        if self.capacity_gib is not None and self.per_tib_mb_s is not None:
            return self.capacity_gib * self.per_tib_mb_s / GIB_PER_TIB
        return self.tiered_mb_s

    @property
    def metadata_mode(self) -> Literal["AUTOMATIC", "USER_PROVISIONED"]:
        return "AUTOMATIC" if self.metadata_iops is None else "USER_PROVISIONED"


def efa_wanted(spec: ClusterSpec) -> bool:
    """Whether the cluster's file system serves clients over EFA, one that is there already or one that is to be made.

    What the user says counts. Without a word it is on where a worker's type has EFA and the file system is large enough
    anyway: EFA cannot be turned on later, and it is never a reason to pay for a larger step than throughput asks for.
    """
    wish = spec.storage.lustre
    if wish is None:
        return False
    if wish.existing is not None:
        return wish.existing.efa
    if wish.efa is not None:
        return wish.efa
    types = [instance(group.ec2_type) for group in spec.workers]
    return any(found is not None and found.efa > 0 for found in types) and _reaches_efa(wish)


def lustre_plan(spec: ClusterSpec) -> LustrePlan | None:
    """The file system that this spec means, one that is there already too; None without."""
    wish = spec.storage.lustre
    return lustre(wish, efa_wanted(spec)) if wish else None


def lustre(wish: Lustre, efa_wanted: bool) -> LustrePlan:
    """The smallest legal file system that meets the wish, or the very one that `capacity_gib` and `per_tib_mb_s` name.

    Smallest is by capacity, then by throughput per TiB: at one capacity the lower rate is the cheaper one. Illegal exact
    values are passed on as they are; `violations` tells what is wrong with them.
    """
    if wish.existing is not None:
        return _plan(wish, wish.existing.efa, "an existing file system is used as it is")
    if wish.type == "intelligent-tiering":
        return _tiered(wish, efa_wanted)
    if wish.capacity_gib is not None and wish.per_tib_mb_s is not None:
        binding = "capacity_gib and per_tib_mb_s are given"
        return _plan(wish, efa_wanted, binding, wish.capacity_gib, wish.per_tib_mb_s)
    capacity_gib, per_tib = smallest(_wanted_gib(wish), _wanted_mb_s(wish), efa_wanted)
    return _plan(wish, efa_wanted, _binding(wish, efa_wanted, capacity_gib, per_tib), capacity_gib, per_tib)


def smallest(capacity_gib: float, mb_s: float, efa: bool) -> tuple[int, int]:
    """Least legal (GiB, MB/s per TiB) on SSD with at least this capacity and throughput."""
    return min((_legal_gib(max(capacity_gib, mb_s * GIB_PER_TIB / rate), rate, efa), rate) for rate in PER_TIB_MB_S)


def violations(wish: Lustre, efa: bool) -> tuple[Problem, ...]:
    """What AWS would refuse, or what cannot be meant; empty for a good wish. `efa` is what `efa_wanted` says."""
    if wish.existing is not None:
        return (*_mount(wish), *_with_existing(wish))
    by_type = _tiered_violations(wish) if wish.type == "intelligent-tiering" else _ssd_violations(wish, efa)
    return (*_mount(wish), *by_type, *_backups(wish))


def _plan(
    wish: Lustre, efa: bool, binding: str, capacity_gib: int | None = None, per_tib_mb_s: int | None = None
) -> LustrePlan:
    return LustrePlan(
        storage="SSD",
        efa=efa,
        mount_path=wish.mount_path,
        compression=wish.compression,
        backup_days=wish.backup_days,
        kms_key=wish.kms_key,
        binding=binding,
        capacity_gib=capacity_gib,
        per_tib_mb_s=per_tib_mb_s,
        metadata_iops=wish.metadata_iops,
        existing=wish.existing,
    )


def _tiered(wish: Lustre, efa: bool) -> LustrePlan:
    steps = max(1, math.ceil(_wanted_mb_s(wish) / TIERED_STEP_MB_S))
    return LustrePlan(
        storage="INTELLIGENT_TIERING",
        efa=efa,
        mount_path=wish.mount_path,
        compression=wish.compression,
        backup_days=wish.backup_days,
        kms_key=wish.kms_key,
        binding=f"throughput of Intelligent-Tiering comes in steps of {TIERED_STEP_MB_S} MB/s",
        tiered_mb_s=steps * TIERED_STEP_MB_S,
        read_cache_gib=wish.read_cache_gib or steps * CACHE_GIB[0],
        metadata_iops=wish.metadata_iops or TIERED_METADATA_IOPS[0],
    )


def _wanted_gib(wish: Lustre) -> float:
    # 2.3 TiB must be 2300 GiB, not what binary fractions make of it.
    return round((wish.capacity_tib or 0) * GIB_PER_TIB, 6)


def _wanted_mb_s(wish: Lustre) -> float:
    return round((wish.throughput_gb_s or 0) * 1000, 6)


def _legal_gib(needed: float, per_tib: int, efa: bool) -> int:
    if efa:
        return EFA_STEP_GIB[per_tib] * max(1, math.ceil(needed / EFA_STEP_GIB[per_tib]))
    return SMALLEST_GIB if needed <= SMALLEST_GIB else STEP_GIB * math.ceil(needed / STEP_GIB)


def _reaches_efa(wish: Lustre) -> bool:
    if wish.type == "intelligent-tiering":
        return True
    if wish.capacity_gib is not None and wish.per_tib_mb_s is not None:
        step = EFA_STEP_GIB.get(wish.per_tib_mb_s)
        return step is not None and wish.capacity_gib % step == 0
    capacity_gib, per_tib = smallest(_wanted_gib(wish), _wanted_mb_s(wish), False)
    return capacity_gib * per_tib / GIB_PER_TIB >= EFA_SMALLEST_MB_S


def _binding(wish: Lustre, efa: bool, capacity_gib: int, per_tib: int) -> str:
    wanted_gib, wanted_mb_s = _wanted_gib(wish), _wanted_mb_s(wish)
    if efa and capacity_gib > smallest(wanted_gib, wanted_mb_s, False)[0]:
        return f"EFA at {per_tib} MB/s/TiB comes in steps of {EFA_STEP_GIB[per_tib]} GiB"
    if capacity_gib > smallest(wanted_gib, 0, efa)[0]:
        return (
            f"{wanted_mb_s / 1000:g} GB/s take {capacity_gib} GiB even at {PER_TIB_MB_S[-1]} MB/s/TiB, the highest rate"
        )
    if efa:
        return f"EFA at {per_tib} MB/s/TiB comes in steps of {EFA_STEP_GIB[per_tib]} GiB, and the wish is {wanted_gib:g} GiB"
    if capacity_gib > SMALLEST_GIB:
        return f"capacity comes in steps of {STEP_GIB} GiB, and the wish is {wanted_gib:g} GiB"
    return f"{SMALLEST_GIB} GiB is the smallest file system there is"


def _mount(wish: Lustre) -> list[Problem]:
    problem = mount_problem(wish.mount_path)
    if not problem:
        return []
    source = f"{LUSTRE_GUIDE}/mount-fs-auto-mount-onreboot.html"
    return [
        finding(
            "storage.lustre.mount_path",
            f"{wish.mount_path} {problem}",
            "mount it at /fsx",
            code="FSX-008",
            source=source,
        )
    ]


def _with_existing(wish: Lustre) -> list[Problem]:
    keys = ("throughput_gb_s", "capacity_tib", "capacity_gib", "per_tib_mb_s", "read_cache_gib", "efa", "metadata_iops")
    given = [key for key in (*keys, "kms_key") if getattr(wish, key) is not None]
    given += [key for key in ("backup_days", "associations") if getattr(wish, key)]
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


def _backups(wish: Lustre) -> list[Problem]:
    if not (wish.backup_days and wish.associations):
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


def _ssd_violations(wish: Lustre, efa: bool) -> list[Problem]:
    found = _form(wish)
    if wish.capacity_gib is not None and not found:
        found += _capacity(wish.capacity_gib, wish.per_tib_mb_s, efa)
    if wish.per_tib_mb_s is not None and wish.per_tib_mb_s not in PER_TIB_MB_S:
        found.append(
            finding(
                "storage.lustre.per_tib_mb_s",
                f"{wish.per_tib_mb_s} is not a throughput of PERSISTENT_2; allowed: {_listed(PER_TIB_MB_S)}",
                f"set {min(PER_TIB_MB_S, key=lambda rate: abs(rate - (wish.per_tib_mb_s or 0)))}",
                code="FSX-003",
                source=f"{API}/API_CreateFileSystemLustreConfiguration.html",
            )
        )
    if wish.metadata_iops is not None and wish.metadata_iops not in METADATA_IOPS:
        found.append(
            finding(
                "storage.lustre.metadata_iops",
                f"{wish.metadata_iops} is not on the ladder; allowed: 1500, 3000, 6000, multiples of 12000 up to 192000",
                f"set {_at_least(METADATA_IOPS, wish.metadata_iops)}, or remove it and FSx follows the capacity",
                code="FSX-004",
                source=f"{API}/API_CreateFileSystemLustreMetadataConfiguration.html",
            )
        )
    if wish.read_cache_gib is not None:
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


def _form(wish: Lustre) -> list[Problem]:
    """A wish or an exact size, and that whole."""
    exact = {"capacity_gib": wish.capacity_gib, "per_tib_mb_s": wish.per_tib_mb_s}
    wished = {"throughput_gb_s": wish.throughput_gb_s, "capacity_tib": wish.capacity_tib}
    source = f"{API}/API_CreateFileSystemLustreConfiguration.html"
    missing = [key for key, value in exact.items() if value is None]
    if len(missing) == 2:
        return []
    found = [
        finding(
            f"storage.lustre.{key}",
            "is a wish, beside an exact size: only one of them can hold",
            "keep throughput_gb_s and capacity_tib, or capacity_gib and per_tib_mb_s",
            code=_SIZES[key],
            source=source,
        )
        for key, value in wished.items()
        if value is not None
    ]
    if missing:
        other = next(key for key in exact if key not in missing)
        message = f"is missing: {other} needs it, throughput is the product of the two"
        found.append(
            finding(
                f"storage.lustre.{missing[0]}",
                message,
                f"add it, or remove {other}",
                code=_SIZES[missing[0]],
                source=source,
            )
        )
    return found


def _capacity(capacity_gib: int, per_tib: int | None, efa: bool) -> list[Problem]:
    key = "storage.lustre.capacity_gib"
    if efa and per_tib in EFA_STEP_GIB and capacity_gib % EFA_STEP_GIB[per_tib]:
        message = f"EFA at {per_tib} MB/s/TiB comes in steps of {EFA_STEP_GIB[per_tib]} GiB, {capacity_gib} is none"
        fix = f"set {_legal_gib(capacity_gib, per_tib, True)}, or efa: false"
        return [finding(key, message, fix, code="FSX-002", source=f"{LUSTRE_GUIDE}/increase-storage-capacity.html")]
    if capacity_gib != SMALLEST_GIB and capacity_gib % STEP_GIB:
        message = (
            f"{capacity_gib} GiB is not a size of PERSISTENT_2; allowed: {SMALLEST_GIB}, or a multiple of {STEP_GIB}"
        )
        fix = f"set {_legal_gib(capacity_gib, 0, False)}"
        return [finding(key, message, fix, code="FSX-001", source=f"{API}/API_CreateFileSystem.html")]
    return []


def _tiered_violations(wish: Lustre) -> list[Problem]:
    source = f"{LUSTRE_GUIDE}/using-fsx-lustre.html"
    found = [
        finding(
            f"storage.lustre.{key}",
            "has no meaning on Intelligent-Tiering, which grows and shrinks with what is in it",
            f"remove {key}",
            code=_SIZES[key],
            source=source,
        )
        for key in ("capacity_tib", "capacity_gib", "per_tib_mb_s")
        if getattr(wish, key) is not None
    ]
    wanted = _wanted_mb_s(wish)
    if not 0 < wanted <= TIERED_LARGEST_MB_S:
        message = (
            "is missing: Intelligent-Tiering" if not wanted else f"{wanted:g} MB/s is too much: Intelligent-Tiering"
        )
        message += f" is sized by its throughput alone; allowed: steps of 4 GB/s up to {TIERED_LARGEST_MB_S // 1000}"
        found.append(
            finding(
                "storage.lustre.throughput_gb_s",
                message,
                "set 4",
                code="FSX-003",
                source=f"{LUSTRE_GUIDE}/managing-throughput-capacity.html",
            )
        )
    if wish.metadata_iops is not None and wish.metadata_iops not in TIERED_METADATA_IOPS:
        message = (
            f"{wish.metadata_iops} is not one of {_listed(TIERED_METADATA_IOPS)}, which Intelligent-Tiering can have"
        )
        fix = f"set {_at_least(TIERED_METADATA_IOPS, wish.metadata_iops)}"
        found.append(
            finding(
                "storage.lustre.metadata_iops",
                message,
                fix,
                code="FSX-004",
                source=f"{API}/API_CreateFileSystemLustreMetadataConfiguration.html",
            )
        )
    return found + _cache(wish) + _tiered_associations(wish)


def _cache(wish: Lustre) -> list[Problem]:
    steps = max(1, math.ceil(_wanted_mb_s(wish) / TIERED_STEP_MB_S))
    least, most = (steps * bound for bound in CACHE_GIB)
    if wish.read_cache_gib is None or least <= wish.read_cache_gib <= most:
        return []
    message = (
        f"{wish.read_cache_gib} GiB is out of range at {steps * TIERED_STEP_MB_S} MB/s; allowed: {least} to {most}"
    )
    fix = f"set {least if wish.read_cache_gib < least else most}, or remove it for the smallest"
    return [
        finding(
            "storage.lustre.read_cache_gib",
            message,
            fix,
            code="FSX-005",
            source=f"{API}/API_LustreReadCacheConfiguration.html",
        )
    ]


def _tiered_associations(wish: Lustre) -> list[Problem]:
    if not wish.associations:
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
