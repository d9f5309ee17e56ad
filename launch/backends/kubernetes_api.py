"""kubectl, with its errors as one line and what mends them."""

from __future__ import annotations

import re
from typing import IO

from launch.backends.command import error_text, run
from lustrain.problem import FAILED, UNREACHABLE, USAGE, UserError

_LOST = (
    "connection refused|no such host|i/o timeout|Unable to connect|connection to the server|getting credentials|"
    "TLS handshake timeout|context deadline exceeded"
)


def kubectl(namespace: str, context: str | None, *words: str, text: str = "", output: IO[bytes] | None = None) -> str:
    """Return what kubectl prints, or put it into `output`. UserError: UNREACHABLE, FAILED where it is forbidden, else USAGE."""
    command = ["kubectl", *([f"--context={context}"] if context else []), f"--namespace={namespace}", *words]
    done = run(command, text, fix="kubectl cluster-info", output=output)
    if done.code:
        why = error_text(done, ("error: ", "Error from server", "Unable to connect", "The connection to the server"))
        why = re.sub(r"(error: |Error from server( \(\w+\))?: |error when creating \"STDIN\": )+", "", why)
        lost = re.search(_LOST, done.errors)
        refused = re.search("[Ff]orbidden|cannot create|Unauthorized", done.errors)
        code = UNREACHABLE if lost else FAILED if refused else USAGE
        raise UserError(f"kubectl: {why}; fix: {_fix(done.errors, namespace)}", code)
    return done.out


def _fix(error: str, namespace: str) -> str:
    known = {
        "getting credentials": "aws sso login, or what else logs this user in; then kubectl cluster-info",
        "deadline exceeded": "is the cluster up? kubectl cluster-info",
        "AlreadyExists": "kubectl get service shows whose it is; choose another --name",
        "service account": "kubectl create serviceaccount, or another kubernetes.service_account in the Cluster",
        "namespaces": f"kubectl create namespace {namespace}, or another kubernetes.namespace in the Cluster",
        "context": "kubectl config get-contexts lists them",
        "orbidden": "ask for this right; kubectl auth can-i --list shows those that are given",
        "onnect": "is the cluster up? kubectl cluster-info",
    }
    return next((fix for word, fix in known.items() if word in error), "look at the object: fab train … --dry")
