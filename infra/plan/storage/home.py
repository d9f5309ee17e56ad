"""The OpenZFS file system for home folders, and the checks of its mount point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.catalog.fsx import API, HOME_MB_S
from infra.config import Home, Storage
from infra.finding import finding
from infra.plan.storage.mounts import mount_problem
from lustrain.problem import Problem

SOURCE = f"{API}/API_CreateFileSystemOpenZFSConfiguration.html"
BACKUP_DAYS = 7
"""Homes are the one thing here that is mirrored nowhere else."""


@dataclass(frozen=True)
class HomePlan:
    """One file system in one zone, with a standby there: nodes hang while their homes are away.

    Its root volume is exported to whom the security group lets in, root included, who must be able to make homes.
    """

    capacity_gib: int
    throughput_mb_s: int
    mount_path: str
    deployment: Literal["SINGLE_AZ_HA_2"] = "SINGLE_AZ_HA_2"
    backup_days: int = BACKUP_DAYS
    export_options: tuple[str, ...] = ("rw", "crossmnt", "no_root_squash")


def home(config: Home) -> HomePlan:
    """Return the planned file system; never raises, see `violations`."""
    return HomePlan(
        capacity_gib=config.capacity_gib, throughput_mb_s=config.throughput_mb_s, mount_path=config.mount_path
    )


def violations(storage: Storage) -> tuple[Problem, ...]:
    """Return the settings of the home file system that AWS refuses, and mounts that would hide something."""
    if storage.home is None:
        return ()
    return (*_throughput(storage.home), *_mount(storage.home), *_beside(storage))


def _throughput(config: Home) -> list[Problem]:
    if config.throughput_mb_s in HOME_MB_S:
        return []
    above = next((step for step in HOME_MB_S if step >= config.throughput_mb_s), HOME_MB_S[-1])
    message = f"{config.throughput_mb_s} MB/s is not on the ladder; allowed: {', '.join(map(str, HOME_MB_S))}"
    return [finding("storage.home.throughput_mb_s", message, f"set {above}", code="FSX-016", source=SOURCE)]


def _mount(config: Home) -> list[Problem]:
    """`/home` itself is what this file system is for."""
    problem = "" if config.mount_path == "/home" else mount_problem(config.mount_path)
    if not problem:
        return []
    return [
        finding(
            "storage.home.mount_path",
            f"{config.mount_path} {problem}",
            "mount it at /home",
            code="FSX-009",
            source=SOURCE,
        )
    ]


def _beside(storage: Storage) -> list[Problem]:
    if storage.home is None or storage.lustre is None:
        return []
    inner, outer = storage.home.mount_path, storage.lustre.mount_path
    if not (f"{inner}/".startswith(f"{outer}/") or f"{outer}/".startswith(f"{inner}/")):
        return []
    message = f"{inner} and storage.lustre.mount_path ({outer}) are one place or one inside the other"
    return [finding("storage.home.mount_path", message, "mount them side by side, like /home and /fsx", code="FSX-010")]
