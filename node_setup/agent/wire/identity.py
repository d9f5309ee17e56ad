"""The running agent's file and its digest, by which the caller tells versions apart."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from node_setup.agent import owned
from node_setup.agent.host import Host


class Identity(NamedTuple):
    """This identifies the running agent; all fields are None where it runs from a checkout.

    `path` is the packed agent's, absolute; `sha256` is hexadecimal; `compiled` is where its compiled modules are kept.
    """

    path: str | None = None
    sha256: str | None = None
    compiled: str | None = None


def installed_sha(host: Host) -> str | None:
    """Return the hexadecimal SHA-256 of the agent that the boot unit runs; None where there is none to read."""
    try:
        return sha256(host.path(owned.AGENT).read_bytes()).hexdigest()
    except OSError:
        return None
