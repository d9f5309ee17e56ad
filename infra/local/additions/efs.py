"""EFS: backups that are switched on and off."""

from __future__ import annotations

from functools import cache
from typing import Any

from moto.efs.models import FileSystem, efs_backends
from moto.efs.responses import EFSResponse

from infra.local.additions.serving import Call, serve

LEFT_OUT = (
    "EFS: no data and no clients; a file system's throughput cannot be changed, nothing is backed up or moved to another "
    "storage class, and deletions take no time"
)


@cache
def install() -> None:
    """Add the action, and a state for backups that are off, of which moto says that there is no policy."""
    FileSystem.backup_policy = property(_backup_policy)  # type: ignore[assignment,method-assign]
    serve(EFSResponse, "efs", {"PutBackupPolicy": _put_backup_policy}, "BadRequest")


def _backup_policy(system: Any) -> dict[str, str]:
    return {"Status": "ENABLED" if system._backup else "DISABLED"}


def _put_backup_policy(call: Call) -> dict[str, Any]:
    _, found = efs_backends[call.account][call.region].describe_file_systems(file_system_id=call.get("FileSystemId"))
    found[0]._backup = call.get("BackupPolicy")["Status"] == "ENABLED"
    return {"BackupPolicy": _backup_policy(found[0])}
