"""Whether a node's clock is close enough for logs, leases and notices to be compared."""

from __future__ import annotations

from lustrain.status import Status
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import Expected
from node_setup.agent.verify.result import Result, known, unread

MOST_OFF_S = 0.001
"""Far more than chrony shows on EC2 with the Amazon Time Sync Service; a node beyond it has lost its source."""


def clock(facts: Facts, want: Expected, request: Request) -> Result:
    time = facts.get("time")
    if not time:
        return unread("clock", facts, "time", "chronyc tracking")
    offset, leap = time.get("offset_s"), time.get("leap")
    if time.get("synchronised") is False:
        return Result("clock", Status.FAILED, "not synchronised; fix: fab node-tune, or systemctl restart chrony")
    if offset is None:
        return Result("clock", Status.UNKNOWN, "the clock's offset is not known: chronyc is missing or does not answer")
    shown = f"{offset * 1000:.3f} ms"
    if abs(offset) >= MOST_OFF_S:
        return Result("clock", Status.FAILED, f"off by {shown}", found=shown, expected="< 1 ms")
    if leap is None:
        return Result("clock", Status.UNKNOWN, "the clock's leap status is not known", found=shown)
    if leap != "Normal":
        return Result("clock", Status.WARNING, f"leap status is {leap}", found=shown)
    return Result(
        "clock", Status.OK, f"by {known(time, 'source') or 'an unnamed source'}", found=shown, expected="< 1 ms"
    )


CHECKS = (clock,)
