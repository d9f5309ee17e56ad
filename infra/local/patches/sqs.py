"""SQS: moto returns a redrive policy with spaces, in which the provider sees a change; no issue is known."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from moto.sqs.models import Queue

LEFT_OUT = "SQS: a queue's policy is judged for the events of EventBridge only; nothing is encrypted"


@cache
def install() -> None:
    """Replace moto's attributes of queues."""
    moto_attributes: Any = Queue.__dict__["attributes"].fget

    def attributes(self: Any) -> dict[str, Any]:
        attributes: dict[str, Any] = moto_attributes(self)
        # The service returns JSON without spaces, and the provider compares the text.
        if "RedrivePolicy" in attributes:
            attributes["RedrivePolicy"] = json.dumps(self.redrive_policy, separators=(",", ":"))
        return attributes

    Queue.attributes = property(attributes)  # type: ignore[assignment]
