"""Secrets in Secrets Manager: munge's key, which the controller makes once and every node fetches, and the login of a database.

They go through pipes and this process' memory, and are in no command line and no log.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from lustrain.problem import UserError, problem
from node_setup.agent.host import Host
from node_setup.agent.slurm.apply import KEY_BYTES, Clock

CALL_S = 60.0
POLL_S, LOG_EVERY_S = 10.0, 60.0
LEAST_BYTES = 32
"""Of munge's key: https://github.com/dun/munge/wiki/Man-8-mungekey"""
NO_VALUE = "staging label"
"""In the CLI's answer for a secret without a value: `can't find the specified secret value for staging label: AWSCURRENT`."""
KEPT = ("AWS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
Log = Callable[[str], None]
T = TypeVar("T")


def munge_key(host: Host, secret: str, wait_s: float, log: Log, clock: Clock, *, makes: bool) -> bytes:
    """Return the secret's value; who `makes` the key puts one into a secret that has none. UserError after `wait_s` seconds."""

    def read() -> tuple[bytes | None, str]:
        key, why = _key(host, secret)
        if key is None and makes and NO_VALUE in why:
            why = _put(host, secret, os.urandom(KEY_BYTES))
            if not why:
                log("made munge's key")
                return _key(host, secret)
        return key, why

    fix = "look at the boot of the controller, and at the role of this node"
    return _wait(read, "munge's key", secret, wait_s, log, clock, fix)


def login(host: Host, secret: str, wait_s: float, log: Log, clock: Clock) -> tuple[str, str]:
    """Return the user's name and the password in a secret, as RDS writes them. UserError after `wait_s` seconds."""

    def read() -> tuple[tuple[str, str] | None, str]:
        text, why = _get(host, secret)
        if text is None:
            return None, why
        try:
            table = json.loads(text)
            name, password = table["username"], table["password"]
        except (ValueError, KeyError, TypeError):
            name = password = None
        if not isinstance(name, str) or not isinstance(password, str):
            return None, "its value is no JSON object with username and password"
        return (name, password), ""

    return _wait(
        read, "login of the database", secret, wait_s, log, clock, "look at the secret, and at this node's role"
    )


def _wait(
    read: Callable[[], tuple[T | None, str]], what: str, secret: str, wait_s: float, log: Log, clock: Clock, fix: str
) -> T:
    began, logged_s = clock.monotonic(), -LOG_EVERY_S
    while True:
        value, why = read()
        if value is not None:
            return value
        passed = clock.monotonic() - began
        if passed >= wait_s:
            raise UserError(problem(what, secret, f"is not to be had after {wait_s:.0f} s: {why}", fix=fix))
        if passed - logged_s >= LOG_EVERY_S:
            log(f"waiting for {what} in {secret}, {passed:.0f} of {wait_s:.0f} s: {why}")
            logged_s = passed
        clock.sleep(POLL_S)


def _key(host: Host, secret: str) -> tuple[bytes | None, str]:
    text, why = _get(host, secret)
    if text is None:
        return None, why
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    return (key, "") if len(key) >= LEAST_BYTES else (None, "its value is not a key in base64")


def _get(host: Host, secret: str) -> tuple[str | None, str]:
    return _aws(host, secret, "get-secret-value", "--query", "SecretString", "--output", "text")


def _put(host: Host, secret: str, key: bytes) -> str:
    """Return why it could not be put; empty where it was.

    The version's name is always the same, and Secrets Manager takes one value by a name and refuses another: so there is one
    key, whatever other machine makes one and however late it is to be seen
    (https://docs.aws.amazon.com/secretsmanager/latest/apireference/API_PutSecretValue.html).
    """
    text, version = base64.b64encode(key).decode("ascii"), sha256(secret.encode()).hexdigest()
    words = ("--client-request-token", version, "--secret-string", "file:///dev/stdin")
    return _aws(host, secret, "put-secret-value", *words, stdin=text)[1]


def _aws(host: Host, secret: str, verb: str, *more: str, stdin: str = "") -> tuple[str | None, str]:
    region = secret.split(":")[3] if secret.count(":") >= 6 else ""
    words = ("aws", "secretsmanager", verb, "--secret-id", secret, *more, *(("--region", region) if region else ()))
    done = host.run(words, CALL_S, stdin, KEPT)
    # Not what else it printed, which may be the key.
    return (done.out, "") if done.ok else (None, " ".join(done.err.split()) or f"aws ended with {done.status}")
