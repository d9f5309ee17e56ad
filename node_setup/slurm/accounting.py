"""What slurm.conf and slurmdbd.conf say of accounting. Pure.

https://slurm.schedmd.com/accounting.html, slurm.conf.html and slurmdbd.conf.html there
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from node_setup.agent.slurm import paths
from node_setup.agent.slurm.accounting import DATABASE

SAMPLES_S = 30
"""Of JobAcctGatherFrequency: Slurm's own value. Each sample wakes a process on every node of a job."""
PURGED = ("Event", "Job", "Resv", "Step", "Suspend", "TXN", "Usage")
"""Kinds of records; slurmdbd keeps those forever that it is not told to drop."""


@dataclass(frozen=True)
class Database:
    """A database elsewhere; `secret` is the ARN of the secret with `username` and `password`."""

    host: str
    port: int
    name: str
    secret: str


def settings(*, by_cgroups: bool, gpus: bool) -> dict[str, str]:
    """Return the keys of slurm.conf but AccountingStorageHost.

    Nothing is enforced: a new cluster has no accounts, and every job would be refused.
    """
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        **({"AccountingStorageTRES": "gres/gpu"} if gpus else {}),
        "JobAcctGatherType": "jobacct_gather/cgroup" if by_cgroups else "jobacct_gather/linux",
        "JobAcctGatherFrequency": str(SAMPLES_S),
    }


def slurmdbd_conf(keep_months: int, database: Database | None, header: str = paths.HEADER) -> str:
    """Return slurmdbd.conf; without the user's name and password where the database is elsewhere."""
    words = {
        "AuthType": "auth/munge",
        # The controller's name may be known to nobody but itself.
        "DbdHost": "localhost",
        "SlurmUser": "slurm",
        "LogFile": f"{paths.LOGS}/slurmdbd.log",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": database.host if database else "localhost",
        **({"StoragePort": str(database.port)} if database else {"StorageUser": "slurm"}),
        "StorageLoc": database.name if database else DATABASE,
        **{f"Purge{kind}After": f"{keep_months}month" for kind in PURGED},
    }
    return header + "".join(f"{name}={value}\n" for name, value in words.items())


def document(cluster: str, keep_months: int, database: Database | None) -> dict[str, Any]:
    """Return what the controller of a stack reads of it in slurm.json."""
    conf = slurmdbd_conf(keep_months, database, paths.STACK_HEADER)
    return {"cluster": cluster, "conf": conf, "secret": database.secret if database else None}
