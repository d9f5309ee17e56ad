"""The file system for home folders, OpenZFS or EFS, how nodes mount it, and the checks of both.

EFS is mounted by the kernel's NFS client, without TLS; docs/decisions.md says why. The security group decides who reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from infra.catalog.efs import MOUNT_OPTIONS
from infra.catalog.fsx import API, HOME_MB_S
from infra.config import ClusterSpec, Home, HomeType, Storage
from infra.finding import finding
from infra.plan.storage.associations import nested
from infra.plan.storage.mounts import mount_problem
from lustrain.problem import Problem

SOURCE = f"{API}/API_CreateFileSystemOpenZFSConfiguration.html"
BACKUP_DAYS = 7
"""Homes are the one thing here that is mirrored nowhere else."""
EXPORTS: Mapping[HomeType, str] = {"openzfs": "/fsx", "efs": "/"}
OPTIONS: Mapping[HomeType, str] = {
    "openzfs": "nfsvers=4.2,nconnect=16,rsize=1048576,wsize=1048576,timeo=600,hard,noatime,_netdev",
    "efs": MOUNT_OPTIONS,
}
KEYS_OF: Mapping[HomeType, tuple[str, ...]] = {
    "openzfs": ("capacity_gib", "throughput_mb_s"),
    "efs": ("backup", "infrequent_access_days"),
}
"""Keys that one type alone has."""


@dataclass(frozen=True)
class OpenZfsPlan:
    """One file system in one zone, with a standby there: nodes hang while their homes are away.

    Its root volume is exported to whom the security group lets in, root included, who must be able to make homes.
    """

    capacity_gib: int
    throughput_mb_s: int
    kms_key: str | None = None
    deployment: Literal["SINGLE_AZ_HA_2"] = "SINGLE_AZ_HA_2"
    backup_days: int = BACKUP_DAYS
    export_options: tuple[str, ...] = ("rw", "crossmnt", "no_root_squash")


@dataclass(frozen=True)
class EfsPlan:
    """One file system over all zones of the region, with a mount target in each zone that has nodes.

    Elastic throughput, which needs no forecast: homes are idle for hours and then read by all nodes at once
    (https://docs.aws.amazon.com/efs/latest/ug/managing-throughput.html).
    """

    zones: tuple[str, ...]
    """Ids, the cluster's own first."""
    backup: bool
    to_infrequent_access: str | None
    """EFS's own word for the days, such as AFTER_30_DAYS."""
    kms_key: str | None = None
    throughput: Literal["elastic"] = "elastic"


@dataclass(frozen=True)
class NfsMount:
    """What a node mounts where; `export` follows the DNS name."""

    export: str
    path: str
    options: str


def home(spec: ClusterSpec) -> OpenZfsPlan | EfsPlan | None:
    """Return the file system to make, None where there is none to make; never raises, see `violations`."""
    config = spec.storage.home
    if config is None or config.existing is not None:
        return None
    if config.type == "openzfs":
        return OpenZfsPlan(
            capacity_gib=config.capacity_gib, throughput_mb_s=config.throughput_mb_s, kms_key=config.kms_key
        )
    return EfsPlan(
        zones=(spec.zone_id, *spec.other_zones),
        backup=config.backup,
        to_infrequent_access=_after(config.infrequent_access_days),
        kms_key=config.kms_key,
    )


def _after(days: int | None) -> str | None:
    return f"AFTER_{days}_DAY{'' if days == 1 else 'S'}" if days else None


def nfs_mount(config: Home) -> NfsMount:
    return NfsMount(EXPORTS[config.type], config.mount_path, OPTIONS[config.type])


def mounted_by_bundle(spec: ClusterSpec) -> NfsMount | None:
    """Return what the lifecycle bundle mounts: EFS on HyperPod's Slurm, which mounts Lustre and OpenZFS by itself."""
    config = spec.storage.home
    if spec.backend != "hyperpod-slurm" or config is None or config.type != "efs":
        return None
    return nfs_mount(config)


def mount_options(spec: ClusterSpec) -> tuple[str, ...]:
    """Return the options with which nodes mount their homes; none where HyperPod mounts them, with its own."""
    config = spec.storage.home
    if config is None or (spec.hyperpod and mounted_by_bundle(spec) is None):
        return ()
    return tuple(OPTIONS[config.type].split(","))


def violations(storage: Storage) -> tuple[Problem, ...]:
    """Return the settings of the home file system that AWS refuses or that have no meaning, and mounts that hide something."""
    if (config := storage.home) is None:
        return ()
    return (*_keys(config), *_throughput(config), *_mount(storage, config))


def _keys(config: Home) -> Iterator[Problem]:
    """Keys that would be ignored: those of the other type, and those of a new file system beside an existing one."""
    of_new = (*(key for keys in KEYS_OF.values() for key in keys), "kms_key")
    of_others = [key for kind, keys in KEYS_OF.items() if kind != config.type for key in keys]
    for key in of_new if config.existing else of_others:
        if key not in config.model_fields_set:
            continue
        why = f"is not a key of type {config.type}, which has {' and '.join(KEYS_OF[config.type])}"
        fix = "remove the key, or set the other type"
        if config.existing:
            why, fix = "is for a new file system, and the existing one is used as it is", "remove the key"
        yield finding(f"storage.home.{key}", why, fix, code="FSX-018")


def _throughput(config: Home) -> Iterator[Problem]:
    if config.throughput_mb_s in HOME_MB_S or config.type != "openzfs" or config.existing:
        return
    above = next((step for step in HOME_MB_S if step >= config.throughput_mb_s), HOME_MB_S[-1])
    message = f"{config.throughput_mb_s} MB/s is not on the ladder; allowed: {', '.join(map(str, HOME_MB_S))}"
    yield finding("storage.home.throughput_mb_s", message, f"set {above}", code="FSX-016")


def _mount(storage: Storage, config: Home) -> Iterator[Problem]:
    """`/home` itself is what this file system is for."""
    here, path = "storage.home.mount_path", config.mount_path
    if path != "/home" and (problem := mount_problem(path)):
        yield finding(here, f"{path} {problem}", "mount it at /home", code="FSX-009")
    if storage.lustre and nested(path, outer := storage.lustre.mount_path):
        message = f"{path} and storage.lustre.mount_path ({outer}) are one place or one inside the other"
        yield finding(here, message, "mount them side by side, like /home and /fsx", code="FSX-010")
