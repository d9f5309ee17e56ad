"""The outcome of the node's boot script."""

from __future__ import annotations

from lustrain.status import Status
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import Result, fact_at


def boot(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check the outcome that `infra/plan/nodes/first_boot.sh` leaves behind; HyperPod and a user's own machines have none.

    An alarm counts failed boots by the cluster; this check names the node.
    """
    outcome = fact_at(facts, "boot_outcome")
    if outcome is None:
        return Result("boot", Status.SKIPPED, "no boot script of ours ran here")
    word, _, rest = str(outcome).strip().partition(" ")
    if word == "failed":
        fix = "see /var/log/lustrain-boot.log, then systemctl restart lustrain-boot"
        return Result("boot", Status.FAILED, f"the boot script failed at: {rest or 'an unnamed step'}; fix: {fix}")
    if word == "ready":
        return Result("boot", Status.OK, "the boot script came to its end", actual=str(outcome).strip())
    return Result(
        "boot", Status.UNKNOWN, "the boot script left no outcome that is known here", actual=str(outcome)[:80]
    )


CHECKS = (boot,)
