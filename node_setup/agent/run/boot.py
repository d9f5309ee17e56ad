"""The tune of a node by itself: from a lifecycle script's bundle at its first boot, from its boot unit afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.facts.reading import parse_mounts
from node_setup.agent.host import Host
from node_setup.agent.kinds.lustre.mount import NOT_MOUNTED, made_by_others
from node_setup.agent.model import EXIT_FAILED, EXIT_IN_SYNC, Request
from node_setup.agent.run.apply import Log
from node_setup.agent.run.outcome import blocking_settings
from node_setup.agent.run.refusal import at_boot
from node_setup.agent.run.tune import tune
from node_setup.agent.wire.identity import Identity
from node_setup.agent.wire.request import document

WAIT_S = 120.0
MOUNT_WAIT_S = 300.0
"""A boot waits so long for a mount that others make. The figure is ours: AWS does not promise that HyperPod mounts before it
runs a lifecycle script, and a node that leaves for a mount which is seconds late is replaced by one that is late as well."""
POLL_INTERVAL_S, LOG_INTERVAL_S = 2.0, 30.0
LNET = "lustre.efa"
"""Without this setting Lustre is mounted over TCP."""
BUNDLED_DOCUMENT = "tuning.json"
"""The node document has this name in a bundle, in the folder of the packed agent."""


def boot(host: Host, identity: Identity, log: Log, mount_wait_s: float = MOUNT_WAIT_S) -> tuple[dict[str, Any], int]:
    """Tune this node by the document that lies on it; exit 1 only where it lacks a setting without which it may take no jobs.

    Where Lustre is another program's to mount and is not mounted yet, all else is done at once, and what depends on the mount
    follows within `mount_wait_s` seconds. A job that runs all the same is left alone (`refusal.at_boot`).
    """
    request, where = stored_request(host, identity)
    log(f"wanted: {where}")
    result, _ = tune(host, request, identity, WAIT_S, log, at_boot)
    path = missing_mount(result, request)
    if path is not None and wait_for_mount(host, path, mount_wait_s, log):
        result, _ = tune(host, request, identity, WAIT_S, log, at_boot)
    return result, judge(result, log)


def lnet(host: Host, identity: Identity, log: Log) -> tuple[dict[str, Any], int]:
    """Bring up Lustre's network over EFA and no more, by the document on this node, since that has to be there before any
    mount."""
    request, where = stored_request(host, identity)
    log(f"wanted: {where}")
    result, code = tune(host, replace(request, only=(LNET,)), identity, WAIT_S, log, at_boot)
    judge(result, log)
    return result, code


def missing_mount(result: Mapping[str, Any], request: Request) -> str | None:
    """Return the mount point that a setting needs and that another program has yet to mount."""
    missed = any(row["status"] == Status.FAILED and row["found"] == NOT_MOUNTED for row in result["rows"])
    return made_by_others(request) if missed and not result["refused"] else None


def wait_for_mount(host: Host, path: str, wait_s: float, log: Log) -> bool:
    """Wait up to `wait_s` seconds for Lustre at `path`, and return whether it is there; each half minute a line is logged."""
    began = time.monotonic()
    logged_s = -LOG_INTERVAL_S
    while True:
        passed = time.monotonic() - began
        mounts = parse_mounts(host.read("/proc/mounts") or "")
        if any(mount.target == path and mount.fstype == "lustre" for mount in mounts):
            log(f"Lustre is mounted at {path} after {passed:.0f} s")
            return True
        if passed >= wait_s:
            log(f"Lustre is not mounted at {path} after {wait_s:g} s")
            return False
        if passed - logged_s >= LOG_INTERVAL_S:
            log(f"waiting for Lustre at {path}, which is not ours to mount: {passed:.0f} of {wait_s:g} s")
            logged_s = passed
        time.sleep(min(POLL_INTERVAL_S, wait_s - passed))


def stored_request(host: Host, identity: Identity) -> tuple[Request, str]:
    """Return the request that lies on this node, and where: beside the packed agent, else in /etc, else nothing but the facts.

    UserError where a document is there and wrong.
    """
    beside = os.path.join(os.path.dirname(identity.path), BUNDLED_DOCUMENT) if identity.path else None
    text = Host().read(beside) if beside else None
    if text is not None:
        return Request(document=_without_group(document(str(beside), text))), str(beside)
    return last_request(host)


def last_request(host: Host) -> tuple[Request, str]:
    """Return the request that the last tune left on the node."""
    text = host.read(owned.TUNING)
    if text is None:
        return Request(), "no cluster document; the facts decide"
    return Request(document=_without_group(document(owned.TUNING, text))), owned.TUNING


def judge(result: dict[str, Any], log: Log) -> int:
    """Log what is not as it should be, and return the exit status of a boot."""
    for row in result["rows"]:
        if row["status"] not in (Status.OK, Status.SKIPPED, Status.CHANGED):
            log(f"{row['status']}: {row['setting']} ({row['severity']}) {row['target'] or ''}: {row['why']}")
    for line in result["unplanned"]:
        log(f"differs, though no step changes it: {line}")
    for error in result["errors"]:
        log(f"error: {error['where']}: {error['why']}")
    if result["refused"]:
        log(f"nothing done: {result['refused']}")
    missing = blocking_settings(result["rows"])
    if missing:
        log(f"this node may take no jobs: {', '.join(missing)}")
    # Without rows no facts were read: the lock was not to be had.
    return EXIT_FAILED if missing or not result["rows"] else EXIT_IN_SYNC


def _without_group(table: dict[str, Any]) -> dict[str, Any]:
    """Return the document without the group, which is the node's own and a fact."""
    return {key: value for key, value in table.items() if key != "group"}
