"""Checks of the shared homes: mounted, from the right server, as planned, and writable by the user who logs in."""

from __future__ import annotations

import re

from lustrain.status import Status
from node_setup.agent.host import Host
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import NONE, Result, fact_at, unread_result

MOUNT_CHECK, WRITE_CHECK = "home-mount", "home-write"
NFS = ("nfs", "nfs4")
NEGOTIATED = ("rsize=", "wsize=", "_netdev")
"""The server may lower the sizes, and `_netdev` is for systemd alone."""
WRITE_S = 20.0


def mount(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that homes are the cluster's file system: in a folder of the root disk they would end with the node."""
    path = fact_at(request.document, "home", "path")
    if not path:
        return Result(MOUNT_CHECK, Status.SKIPPED, "the cluster has no file system for homes")
    mounts = fact_at(facts, "mounts")
    if mounts is None:
        return unread_result(MOUNT_CHECK, facts, "mounts", "mounts")
    here = [mount for mount in mounts if mount["target"] == path]
    if not here:
        why = f"nothing is mounted at {path}: homes lie on the root disk, and end with this node"
        return Result(MOUNT_CHECK, Status.FAILED, why, expected=path)
    source, kind, options = here[-1]["source"], here[-1]["fstype"], here[-1]["options"]
    if kind == "autofs":
        return Result(MOUNT_CHECK, Status.WARNING, f"{path} is mounted on demand, home by home: not looked at")
    if kind not in NFS:
        return Result(MOUNT_CHECK, Status.FAILED, f"{kind} and not NFS is mounted at {path}", NONE, source)
    server, wanted = source.rpartition(":/")[0], request.expect.get("home_server")
    by_address = re.fullmatch(r"[\d.]+|\[.*\]", server)
    if wanted and server.lower() != str(wanted).lower() and not by_address:
        return Result(MOUNT_CHECK, Status.FAILED, f"another server is at {path}", NONE, server, str(wanted))
    if "ro" in options:
        return Result(MOUNT_CHECK, Status.FAILED, f"{path} is mounted read-only", actual=source)
    if missing := [word for word in _shown(request) if word not in options]:
        why = f"{path} is mounted without {', '.join(missing)}; fix: replace the node"
        return Result(MOUNT_CHECK, Status.WARNING, why, actual=source)
    unknown = "" if wanted and not by_address else "; whether it is the right server is not known"
    return Result(MOUNT_CHECK, Status.OK, f"at {path}{unknown}", actual=source)


def _shown(request: Request) -> list[str]:
    """Return the planned options as /proc/mounts shows them."""
    planned = fact_at(request.document, "home", "options") or ()
    return [word.replace("nfsvers=", "vers=") for word in planned if not word.startswith(NEGOTIATED)]


def write_probe(host: Host, facts: Facts, want: ExpectedHardware, request: Request) -> list[Result]:
    """Make and remove a file in the home of the user who logs in, as that user: root's own writes say nothing of theirs."""
    path, user = fact_at(request.document, "home", "path"), request.expect.get("home_user")
    if not path or not user:
        return [Result(WRITE_CHECK, Status.SKIPPED, "the cluster has no file system for homes, or names no user")]
    if mount(facts, want, request).status not in (Status.OK, Status.WARNING):
        return [Result(WRITE_CHECK, Status.UNKNOWN, "not tried: homes are not mounted as they should be")]
    entry = host.run(("getent", "passwd", str(user)), WRITE_S)
    fields = entry.out.strip().split(":")
    if not entry.ok or len(fields) < 6:
        return [Result(WRITE_CHECK, Status.WARNING, f"not tried: this node knows no user {user}")]
    if not fields[5].startswith(f"{path}/"):
        return [Result(WRITE_CHECK, Status.SKIPPED, f"the home of {user} is {fields[5]}, and not under {path}")]
    as_user = ("runuser", "-u", str(user), "--")
    made = host.run((*as_user, "mktemp", f"--tmpdir={fields[5]}", ".lustrain-verify-XXXXXXXX"), WRITE_S)
    removed = host.run((*as_user, "rm", "--", made.out.strip()), WRITE_S) if made.ok else made
    if not removed.ok:
        return [Result(WRITE_CHECK, Status.FAILED, f"{user} cannot write at home: {removed.complaint}")]
    return [Result(WRITE_CHECK, Status.OK, f"{user} made and removed a file in {fields[5]}")]


CHECKS = (mount,)
