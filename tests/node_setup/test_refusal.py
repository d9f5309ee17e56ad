"""When a node is left alone, by whom, and that what is merely far off or recommended stops nobody."""

from __future__ import annotations

from typing import Any

import pytest

from node_setup.agent.model import Request
from node_setup.agent.run.refusal import at_boot, refusal
from node_setup.agent.verify.expected import expected_hardware
from node_setup.agent.verify.hardware import notice

SLURM, GPU = {"kind": "slurm", "id": "123"}, {"kind": "gpu", "id": "7"}


def announced(kind: str, action: str, in_hours: float | None = None) -> dict[str, Any]:
    said = {"kind": kind, "action": action, "at": "12:00", "in_hours": in_hours}
    return {"jobs": [], "metadata": {"reachable": True, "notice": said, "error": None}}


SPOT, ENDING = announced("spot", "terminate"), announced("lifecycle", "terminate")
REBALANCE = announced("rebalance", "rebalance")
FAR, SOON, WHEN = (announced("maintenance", "system-reboot", hours) for hours in (200.0, 5.9, None))
STOP = announced("maintenance", "instance-stop", 1.0)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"jobs": [], "metadata": {"notice": None}}, None),
        ({"jobs": [], "metadata": None}, None),
        ({"jobs": [GPU]}, "a job runs: gpu 7;"),
        ({"jobs": [{"kind": "gpu", "id": str(n)} for n in range(8)]}, "gpu 4 and 3 more;"),
        ({"jobs": None}, "whether a job runs could not be read;"),
        ({}, "whether a job runs could not be read;"),
        (
            {"jobs": None, "errors": [{"where": "gpu.processes", "why": "it hangs"}]},
            "whether a job runs could not be read: it hangs;",
        ),
        (SPOT, "an interruption is announced: spot terminate at 12:00;"),
        (ENDING, "lifecycle terminate"),
        (SOON, "maintenance system-reboot"),
        (WHEN, "maintenance system-reboot"),
        (FAR, None),
        (REBALANCE, None),
    ],
)
def test_node_with_jobs_or_near_its_end_is_left_alone(facts: dict[str, Any], why: str | None) -> None:
    said = refusal(facts)
    assert (said is None) == (why is None)
    if said and why:
        assert why in said
        assert said.endswith("or --force")


@pytest.mark.parametrize(
    ("facts", "refused"),
    [
        (SOON, False),
        (WHEN, False),
        (STOP, True),
        (SPOT, True),
        ({"jobs": None}, True),
        ({**SOON, "jobs": [SLURM]}, True),
    ],
)
def test_only_a_reboot_that_ec2_announced_is_made_under_notice(facts: dict[str, Any], refused: bool) -> None:
    assert (refusal(facts, to_reboot=True) is not None) is refused


@pytest.mark.parametrize(
    ("facts", "refused"),
    [
        ({"jobs": [SLURM]}, True),
        ({"jobs": [{"kind": "trainer", "id": "9"}]}, True),
        ({"jobs": [GPU]}, False),
        ({"jobs": None}, False),
        ({}, False),
        (SPOT, False),
    ],
)
def test_at_a_boot_only_a_job_that_was_given_out_refuses(facts: dict[str, Any], refused: bool) -> None:
    assert (at_boot(facts) is not None) is refused


@pytest.mark.parametrize(
    ("facts", "status"),
    [(SPOT, "failed"), (SOON, "failed"), (STOP, "failed"), (FAR, "warning"), (REBALANCE, "warning")],
)
def test_node_is_drained_for_a_near_end_only(facts: dict[str, Any], status: str) -> None:
    request = Request()
    said = notice(facts, expected_hardware(facts, request), request)
    assert said.status == status
    assert ("fab node-reboot" in said.why) is (facts["metadata"]["notice"]["action"] == "system-reboot")
