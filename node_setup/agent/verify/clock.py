"""Whether a node's clock is close enough for logs, leases and notices to be compared."""

from __future__ import annotations

from lustrain.status import Status
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import Result, fact_at, unread_result

MOST_OFF_S = 0.001
"""This is far more than chrony shows on EC2 with the Amazon Time Sync Service; a node beyond it has lost its source."""


def clock(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    time = facts.get("time")
    if not time:
        return unread_result("clock", facts, "time", "chronyc tracking")
    offset, leap = time.get("offset_s"), time.get("leap")
    if time.get("synchronised") is False:
        return Result("clock", Status.FAILED, "not synchronised; fix: fab node-tune, or systemctl restart chrony")
    if offset is None:
        return Result("clock", Status.UNKNOWN, "the clock's offset is not known: chronyc is missing or does not answer")
    shown = f"{offset * 1000:.3f} ms"
    if abs(offset) >= MOST_OFF_S:
        return Result("clock", Status.FAILED, f"off by {shown}", actual=shown, expected="< 1 ms")
    if leap is None:
        return Result("clock", Status.UNKNOWN, "the clock's leap status is not known", actual=shown)
    if leap != "Normal":
        return Result("clock", Status.WARNING, f"leap status is {leap}", actual=shown)
    return Result(
        "clock", Status.OK, f"by {fact_at(time, 'source') or 'an unnamed source'}", actual=shown, expected="< 1 ms"
    )


CHECKS = (clock,)
