"""SQS: attributes in the form the service gives them, so that the provider sees no change where there is none."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from moto.sqs.models import Queue

LEFT_OUT = "SQS: a queue's policy is judged for the events of EventBridge only; nothing is encrypted"


@cache
def install() -> None:
    """Put itself around the attributes of queues."""
    shown: Any = Queue.__dict__["attributes"].fget

    def attributes(self: Any) -> dict[str, Any]:
        found: dict[str, Any] = shown(self)
        # The service answers without spaces, and the provider compares the text.
        if "RedrivePolicy" in found:
            found["RedrivePolicy"] = json.dumps(self.redrive_policy, separators=(",", ":"))
        return found

    Queue.attributes = property(attributes)  # type: ignore[assignment]
