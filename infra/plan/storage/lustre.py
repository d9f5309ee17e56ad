"""The smallest FSx for Lustre file system that meets a config.

A config of 9.6 TiB is met by 9600 GiB, since sizes are counted as FSx counts them (`infra.catalog.fsx`). Only PERSISTENT_2 is
planned: it alone has EFA, Intelligent-Tiering and a metadata rate of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from infra.catalog.fsx import (
    CACHE_GIB,
    EFA_SMALLEST_MB_S,
    EFA_STEP_GIB,
    GIB_PER_TIB,
    PER_TIB_MB_S,
    SMALLEST_GIB,
    STEP_GIB,
    TIERED_METADATA_IOPS,
    TIERED_STEP_MB_S,
)
from infra.catalog.instances import NITRO_V3, Instance
from infra.config import ClusterSpec, ExistingLustre, Lustre


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
        """All clients together, MB/s; None for an existing file system, whose size is not known."""
        if self.capacity_gib is not None and self.per_tib_mb_s is not None:
            return self.capacity_gib * self.per_tib_mb_s / GIB_PER_TIB
        return self.tiered_mb_s

    @property
    def metadata_mode(self) -> Literal["AUTOMATIC", "USER_PROVISIONED"]:
        return "AUTOMATIC" if self.metadata_iops is None else "USER_PROVISIONED"


WITHOUT_LUSTRE_EFA = (*NITRO_V3, "trn2.", "trn2u.")
"""Families with EFA that FSx does not take it from: it wants Nitro v4 or newer, and no Trainium 2
(https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html)."""


def takes_lustre_efa(kind: Instance | None) -> bool:
    """Whether nodes of a type reach Lustre over EFA."""
    return kind is not None and kind.efa > 0 and not kind.name.startswith(WITHOUT_LUSTRE_EFA)


def efa_wanted(spec: ClusterSpec) -> bool:
    """Whether the cluster's file system serves clients over EFA, one that is there already or one that is to be made.

    What the user says counts. Without a word it is on where a worker's type reaches it so and the file system is large enough
    anyway: EFA cannot be turned on later, and it is never a reason to pay for a larger step than throughput asks for.
    """
    config = spec.storage.lustre
    if config is None:
        return False
    if config.existing is not None:
        return config.existing.efa
    if config.efa is not None:
        return config.efa
    return any(takes_lustre_efa(spec.node_of(group)) for group in spec.workers) and _reaches_efa(config)


def lustre_plan(spec: ClusterSpec) -> LustrePlan | None:
    """Return the file system that this spec means, one that is there already too; None without."""
    config = spec.storage.lustre
    return lustre(config, efa_wanted(spec)) if config else None


def lustre(config: Lustre, efa_wanted: bool) -> LustrePlan:
    """Return the smallest legal file system that meets the config, or the very one that `capacity_gib` and `per_tib_mb_s` name.

    Smallest is by capacity, then by throughput per TiB: at one capacity the lower rate is the cheaper one. Illegal exact
    values are passed on as they are; `lustre_checks.violations` finds what is wrong with them.
    """
    if config.existing is not None:
        return _plan(config, config.existing.efa, "an existing file system is used as it is")
    if config.type == "intelligent-tiering":
        return _tiered(config, efa_wanted)
    if config.capacity_gib is not None and config.per_tib_mb_s is not None:
        binding = "capacity_gib and per_tib_mb_s are given"
        return _plan(config, efa_wanted, binding, config.capacity_gib, config.per_tib_mb_s)
    capacity_gib, per_tib = smallest(wanted_gib(config), wanted_mb_s(config), efa_wanted)
    return _plan(config, efa_wanted, _binding(config, efa_wanted, capacity_gib, per_tib), capacity_gib, per_tib)


def smallest(capacity_gib: float, mb_s: float, efa: bool) -> tuple[int, int]:
    """Least legal (GiB, MB/s per TiB) on SSD with at least this capacity and throughput."""
    return min((legal_gib(max(capacity_gib, mb_s * GIB_PER_TIB / rate), rate, efa), rate) for rate in PER_TIB_MB_S)


def _plan(
    config: Lustre, efa: bool, binding: str, capacity_gib: int | None = None, per_tib_mb_s: int | None = None
) -> LustrePlan:
    return LustrePlan(
        storage="SSD",
        efa=efa,
        mount_path=config.mount_path,
        compression=config.compression,
        backup_days=config.backup_days,
        kms_key=config.kms_key,
        binding=binding,
        capacity_gib=capacity_gib,
        per_tib_mb_s=per_tib_mb_s,
        metadata_iops=config.metadata_iops,
        existing=config.existing,
    )


def _tiered(config: Lustre, efa: bool) -> LustrePlan:
    steps = max(1, math.ceil(wanted_mb_s(config) / TIERED_STEP_MB_S))
    return replace(
        _plan(config, efa, f"throughput of Intelligent-Tiering comes in steps of {TIERED_STEP_MB_S} MB/s"),
        storage="INTELLIGENT_TIERING",
        tiered_mb_s=steps * TIERED_STEP_MB_S,
        read_cache_gib=config.read_cache_gib or steps * CACHE_GIB[0],
        metadata_iops=config.metadata_iops or TIERED_METADATA_IOPS[0],
    )


def wanted_gib(config: Lustre) -> float:
    """Capacity that is wished for, GiB."""
    # 2.3 TiB must be 2300 GiB, not what binary fractions make of it.
    return round((config.capacity_tib or 0) * GIB_PER_TIB, 6)


def wanted_mb_s(config: Lustre) -> float:
    """Throughput that is wished for, all clients together, MB/s."""
    return round((config.throughput_gb_s or 0) * 1000, 6)


def legal_gib(needed: float, per_tib: int, efa: bool) -> int:
    """Return the smallest capacity of at least `needed` that FSx makes, GiB."""
    if efa:
        return EFA_STEP_GIB[per_tib] * max(1, math.ceil(needed / EFA_STEP_GIB[per_tib]))
    return SMALLEST_GIB if needed <= SMALLEST_GIB else STEP_GIB * math.ceil(needed / STEP_GIB)


def _reaches_efa(config: Lustre) -> bool:
    if config.type == "intelligent-tiering":
        return True
    if config.capacity_gib is not None and config.per_tib_mb_s is not None:
        step = EFA_STEP_GIB.get(config.per_tib_mb_s)
        return step is not None and config.capacity_gib % step == 0
    capacity_gib, per_tib = smallest(wanted_gib(config), wanted_mb_s(config), False)
    return capacity_gib * per_tib / GIB_PER_TIB >= EFA_SMALLEST_MB_S


def _binding(config: Lustre, efa: bool, capacity_gib: int, per_tib: int) -> str:
    gib, mb_s = wanted_gib(config), wanted_mb_s(config)
    if efa and capacity_gib > smallest(gib, mb_s, False)[0]:
        return f"EFA at {per_tib} MB/s/TiB comes in steps of {EFA_STEP_GIB[per_tib]} GiB"
    if capacity_gib > smallest(gib, 0, efa)[0]:
        return f"{mb_s / 1000:g} GB/s take {capacity_gib} GiB even at {PER_TIB_MB_S[-1]} MB/s/TiB, the highest rate"
    if efa:
        return f"EFA at {per_tib} MB/s/TiB comes in steps of {EFA_STEP_GIB[per_tib]} GiB; {gib:g} GiB are needed"
    if capacity_gib > SMALLEST_GIB:
        return f"capacity comes in steps of {STEP_GIB} GiB; {gib:g} GiB are needed"
    return f"{SMALLEST_GIB} GiB is the smallest file system there is"
