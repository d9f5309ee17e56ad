"""The event player: interruptions and faults for the machines of the embedded AWS.

An event is put on the account's event bus, in the form that its service documents, and rules deliver it to their targets;
the instance, its Auto Scaling group and the node's instance metadata change with it. `Events` is a client for any process;
the server plays the events and listens for commands on a second port (`LocalAws.control`).

Forms: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
rebalance-recommendations.html beside it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

NOTICE_SECONDS = 120.0
"""EC2 announces a spot interruption two minutes ahead."""
FAULT = "NvidiaErrorTerminate"


@dataclass(frozen=True)
class Events:
    """Plays events of AWS through the control address of an embedded AWS; ValueError with the server's message on refusal.

    `metadata` is the control address of the `LocalMetadata` that stands for the node, if there is one.
    """

    control: str

    def spot(
        self, instance: str, in_s: float = NOTICE_SECONDS, action: str = "terminate", metadata: str | None = None
    ) -> dict[str, Any]:
        """Play a spot interruption notice: the instance ends `in_s` seconds from now."""
        return self._play("spot", instance=instance, in_s=in_s, action=action, metadata=metadata)

    def rebalance(self, instance: str, metadata: str | None = None) -> dict[str, Any]:
        """Play a rebalance recommendation."""
        return self._play("rebalance", instance=instance, metadata=metadata)

    def node_fault(self, cluster: str, instance: str, region: str, fault: str = FAULT) -> dict[str, Any]:
        """Play a fault that HyperPod detects in a node; with automatic recovery it replaces the node."""
        return self._play("node-fault", cluster=cluster, instance=instance, region=region, fault=fault)

    def state(self) -> dict[str, Any]:
        """Return the lifecycle states of the instances in Auto Scaling groups, and the events that were not delivered."""
        with urllib.request.urlopen(f"{self.control}/control/state", timeout=10) as reply:
            return json.load(reply)  # type: ignore[no-any-return]

    def _play(self, command: str, **details: Any) -> dict[str, Any]:
        return send(f"{self.control}/control/{command}", {k: v for k, v in details.items() if v is not None})


def send(address: str, command: dict[str, Any]) -> dict[str, Any]:
    """Post a command to a control address on loopback; ValueError with the server's message on refusal."""
    if not address.startswith("http://127.0.0.1:"):
        raise ValueError(f"{address}: control addresses are on loopback, http://127.0.0.1:…")
    request = urllib.request.Request(address, json.dumps(command).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.loads(reply.read() or b"{}")  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode() or f"{address} answered {error.code}") from None
