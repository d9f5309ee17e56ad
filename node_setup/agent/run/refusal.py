"""Reasons to leave a node alone: a running job, or an interruption that is near."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from node_setup.agent.model import Facts

NEAR_HOURS = 6.0
"""So long before a scheduled event of EC2 a node is left alone. The figure is ours: events are announced days or weeks ahead
(EC2 user guide, "Scheduled events for Amazon EC2 instances"); within hours of one, a node takes no more jobs."""
REBOOTS = ("instance-reboot", "system-reboot")
"""A user's reboot may settle these events: EC2 then moves the instance to other hardware where it can and takes a
`system-reboot` back (EC2 API reference, InstanceMaintenanceOptions, `rebootMigration`)."""
GIVEN_TO_US = ("slurm", "trainer")
"""A scheduler or a person started jobs of these kinds: at a boot the image's own health checks are on the GPUs."""
_NAMED = 5


def refusal(facts: Facts, to_reboot: bool = False) -> str | None:
    """Return why nothing may be changed on this node now, or why it may not be rebooted, and the fix; None where it may.

    Jobs that could not be read refuse as well: `nvidia-smi` hangs, or no longer fits the driver, under jobs too.
    """
    jobs = facts.get("jobs")
    if jobs is None:
        return f"whether a job runs could not be read{_read_error(facts)}; fix: look at the node, or --force"
    if jobs:
        return f"a job runs: {_job_list(jobs)}; fix: drain the node and let the job end, or --force"
    notice = (facts.get("metadata") or {}).get("notice")
    if notice and is_near(notice) and not (to_reboot and notice.get("action") in REBOOTS):
        return f"an interruption is announced: {notice_text(notice)}; fix: let the instance be replaced, or --force"
    return None


def at_boot(facts: Facts) -> str | None:
    """Return what refuses at a boot: a job that runs all the same, as when a boot is tried again after the node was given out.

    Neither unreadable facts nor a notice refuse: a node that boots is better tuned than not.
    """
    jobs = [job for job in facts.get("jobs") or () if job["kind"] in GIVEN_TO_US]
    return f"a job runs: {_job_list(jobs)}; fix: fab node-tune when it has ended" if jobs else None


def is_near(notice: Mapping[str, Any]) -> bool:
    """Check whether the announced event ends the node soon: always for spot and Auto Scaling, whose notices come minutes ahead.

    A scheduled event counts in its last hours, and where its time cannot be read. A rebalance recommendation does not count:
    it names no time, stays for the rest of an instance's life, which may be weeks, and trainers go on under it by default.
    """
    if notice["kind"] == "rebalance":
        return False
    hours = notice.get("in_hours")
    return notice["kind"] != "maintenance" or hours is None or bool(hours < NEAR_HOURS)


def notice_text(notice: Mapping[str, Any]) -> str:
    """Write a notice like `spot terminate at 2026-01-21T09:00:43Z`."""
    when = f" at {notice['at']}" if notice.get("at") else ""
    return " ".join(str(notice[key]) for key in ("kind", "action") if notice.get(key)) + when


def _job_list(jobs: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(f"{job['kind']} {job['id']}" for job in jobs[:_NAMED])
    return f"{names} and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else names


def _read_error(facts: Facts) -> str:
    """Return the error that is to blame, if any."""
    why = [
        error["why"]
        for error in facts.get("errors") or ()
        if error["where"] in ("gpu.processes", "gpu", "processes", "jobs")
    ]
    return f": {why[0]}" if why else ""
