"""S3: moto takes each condition of a Deny statement as met, and handles requests at once in stores without locks.

No issue about either is known. The emulation is reached over plain HTTP on loopback, which stands for AWS's TLS:
`aws:SecureTransport` counts as true, so a policy that denies plain HTTP denies nothing here. Every caller counts as a user of
the account, not as a service. Statements with conditions that `policies` does not support do not apply.
"""

from __future__ import annotations

import json
import threading
from functools import cache
from typing import Any

from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.models import FakeBucket
from moto.s3.responses import S3Response

from infra.local.patches.policies import conditions_hold
from infra.local.patches.wrapping import around

LEFT_OUT = (
    "S3: plain HTTP counts as TLS in bucket policies and every caller as one of the account, conditions are judged in part, "
    "lifecycle rules are kept, less NewerNoncurrentVersions, and never carried out"
)
_CONTEXT = {"aws:SecureTransport": "true", "aws:PrincipalIsAWSService": "false"}


@cache
def install() -> None:
    """Replace moto's policy checks and request handling."""
    request_lock = threading.RLock()

    @around(FakeBucket, "get_permission")
    def _permission(original: Any, self: Any, action: str, resource: str) -> Any:
        if self.policy is None:
            return PermissionResult.NEUTRAL
        policy = json.loads(self.policy)
        statements = policy["Statement"] if isinstance(policy["Statement"], list) else [policy["Statement"]]
        context = {**_CONTEXT, "aws:PrincipalAccount": str(self.account_id)}
        policy["Statement"] = [
            {name: value for name, value in statement.items() if name != "Condition"}
            for statement in statements
            if conditions_hold(statement, context)
        ]
        return IAMPolicy(json.dumps(policy)).is_action_permitted(action, resource)

    for method in ("_key_response", "_bucket_response"):

        @around(S3Response, method)
        def _serialize(original: Any, *args: Any) -> Any:
            # moto checks a condition before it writes, and closes files that other threads still read.
            with request_lock:
                return original(*args)
