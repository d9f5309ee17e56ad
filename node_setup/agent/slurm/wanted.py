"""The request of `slurm-apply` and `slurm-state`, read strictly; no message repeats a value, since one of them is a secret."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lustrain.problem import UserError
from node_setup.agent.slurm import paths

DUTIES = ("controller", "compute", "client")
_FIELDS = {"duties", "files", "munge_digest", "munge_key", "check", "accounting"}


@dataclass(frozen=True)
class File:
    """A file of Slurm's folder, by its name in it, or one elsewhere, by its path."""

    name: str
    content: str = field(repr=False)
    mode: int = 0o644
    owner: str | None = None
    """A user; None: root."""

    @property
    def path(self) -> str:
        return self.name if self.name.startswith("/") else f"{paths.FOLDER}/{self.name}"


@dataclass(frozen=True)
class Accounting:
    """This is what the controller shall have for Slurm's records: slurmdbd.conf as text, which may hold a password, and unless
    the database is elsewhere, a MariaDB of its own, whose data lie beside the queue where that is on a volume."""

    cluster: str
    conf: str = field(repr=False)
    own_database: bool = True
    on_volume: bool = False


@dataclass(frozen=True)
class Wanted:
    """This is what a node shall have: `munge_digest` is the SHA-256 in hex of the cluster's key, None on the controller, whose
    own key is the cluster's; `munge_key` is the key itself. Daemons that are not `enabled` are started by the boot, not by
    systemd: after the mounts."""

    duties: tuple[str, ...]
    files: tuple[File, ...]
    munge_digest: str | None = None
    munge_key: bytes | None = field(default=None, repr=False)
    check: bool = False
    enabled: bool = True
    accounting: Accounting | None = None


def parse(text: str) -> Wanted:
    """Read the request of `slurm-apply`. UserError."""
    table = _table(text)
    if odd := sorted(set(table) - _FIELDS):
        raise UserError(f"request: unknown keys {', '.join(odd)}; allowed: {', '.join(sorted(_FIELDS))}")
    duties, files, key = table.get("duties"), table.get("files"), table.get("munge_key")
    if not isinstance(duties, list) or not duties or any(duty not in DUTIES for duty in duties):
        raise UserError(f"request.duties: is no list of duties; allowed: {', '.join(DUTIES)}")
    if not isinstance(files, list) or not all(map(_is_file, files)):
        raise UserError("request.files: is no list of files; allowed: objects with name, content and mode")
    try:
        decoded = None if key is None else base64.b64decode(key, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise UserError("request.munge_key: is not base64") from None
    accounting = table.get("accounting")
    if accounting is not None and not _is_accounting(accounting):
        raise UserError("request.accounting: is no accounting; allowed: an object with cluster and conf")
    made = tuple(File(file["name"], file["content"], file["mode"]) for file in files)
    recorded = None if accounting is None else Accounting(accounting["cluster"], accounting["conf"])
    check = bool(table.get("check"))
    return Wanted(tuple(duties), made, table.get("munge_digest"), decoded, check, accounting=recorded)


@dataclass(frozen=True)
class Awaited:
    """These are the nodes that shall register, and the seconds that they may take."""

    nodes: tuple[str, ...]
    wait_s: float


def parse_awaited(text: str) -> Awaited:
    """Read the request of `slurm-state`. UserError."""
    table = _table(text)
    nodes, wait_s = table.get("nodes"), table.get("wait_s", 0)
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise UserError("request.nodes: is no list of names")
    if not isinstance(wait_s, (int, float)) or wait_s < 0:
        raise UserError("request.wait_s: is no number of seconds; allowed: 0 or more")
    return Awaited(tuple(nodes), float(wait_s))


def _table(text: str) -> Mapping[str, Any]:
    try:
        table = json.loads(text)
    except ValueError:
        raise UserError("request: is not JSON; allowed: one object") from None
    if not isinstance(table, dict):
        raise UserError("request: wrong type; allowed: one object")
    return table


def _is_accounting(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"cluster", "conf"} and all(map(_is_text, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_file(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"name", "content", "mode"}:
        return False
    name, content, mode = value["name"], value["content"], value["mode"]
    plain = isinstance(name, str) and name not in ("", ".", "..") and "/" not in name
    return plain and isinstance(content, str) and mode in (0o644, 0o755)
