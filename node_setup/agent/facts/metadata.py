"""The EC2 instance metadata service (IMDSv2): the instance's identity, and announced interruptions.

It is called over plain sockets and never through a proxy. A path that answers 404 has nothing to say; a service that does not
answer, or answers 5xx, says nothing about a notice, which is an error and not its absence.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from typing import Any

from node_setup.agent.facts.reading import MachineReading

EMPTY: dict[str, Any] = {"metadata": {"reachable": False, "notice": None, "error": None}}
ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
ENDPOINT = "http://169.254.169.254"
BUDGET_SECONDS = 10.0
"""For all requests together. The service answers within milliseconds, the processes of a node that trains may wait longer for
a core: a node that is busy must not count as one whose notices cannot be read."""
_TOKEN_SECONDS = "60"
_IDENTITY = {
    "type": "instance-type",
    "id": "instance-id",
    "life_cycle": "instance-life-cycle",
    "zone_id": "placement/availability-zone-id",
}
_NOTICES = {
    "spot": "spot/instance-action",
    "lifecycle": "autoscaling/target-lifecycle-state",
    "maintenance": "events/maintenance/scheduled",
    "rebalance": "events/recommendations/rebalance",
}
"""Paths are in the order of urgency: the first that announces something is the notice."""


class MetadataError(Exception):
    """The service did not answer as it should; the message is one line."""


def collect(reading: MachineReading) -> dict[str, Any]:
    """Return `metadata` and, as `_imds` for the fact `instance`, what the service says of the instance."""
    endpoint = _endpoint(reading)
    if endpoint is None:
        return {**EMPTY, "_imds": {}}
    try:
        if endpoint == ENDPOINT and os.environ.get(DISABLED_VARIABLE, "").lower() == "true":
            raise MetadataError(f"{DISABLED_VARIABLE} = true: the metadata service is not called")
        service = Service(endpoint, time.monotonic() + BUDGET_SECONDS)
        notice = next(
            (notice for notice in (read_notice(kind, service.get(path)) for kind, path in _NOTICES.items()) if notice),
            None,
        )
        identity = {name: service.get(path) for name, path in _IDENTITY.items()}
    except MetadataError as error:
        reading.fault("metadata", str(error))
        return {"metadata": {"reachable": False, "notice": None, "error": str(error)}, "_imds": {}}
    return {"metadata": {"reachable": True, "notice": notice, "error": None}, "_imds": identity}


def read_end(reading: MachineReading) -> dict[str, Any] | None:
    """Return the notice that this instance ends within minutes; None without one, or off EC2. MetadataError."""
    endpoint = _endpoint(reading)
    if endpoint is None:
        return None
    service = Service(endpoint, time.monotonic() + BUDGET_SECONDS)
    read = (read_notice(kind, service.get(_NOTICES[kind])) for kind in ("spot", "lifecycle"))
    return next((notice for notice in read if notice), None)


def _endpoint(reading: MachineReading) -> str | None:
    return os.environ.get(ENDPOINT_VARIABLE) or (ENDPOINT if is_ec2(reading) else None)


def is_ec2(reading: MachineReading) -> bool:
    """Check for an EC2 instance by its firmware alone (EC2 user guide, identify EC2 instances)."""
    folder = "/sys/devices/virtual/dmi/id"
    vendor, asset = (reading.text(f"{folder}/{name}") or "" for name in ("sys_vendor", "board_asset_tag"))
    return vendor == "Amazon EC2" or asset.startswith("i-")


def read_notice(kind: str, body: str | None) -> dict[str, Any] | None:
    """Return {kind, action, at, in_hours} from the answer of a path, the next of several events; None where it announces
    nothing. MetadataError."""
    if body is None:
        return None
    try:
        return _notice(kind, body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MetadataError(f"{_NOTICES[kind]} gave an unreadable answer: {body[:80]!r}") from error


def _notice(kind: str, body: str) -> dict[str, Any] | None:
    if kind == "lifecycle":
        ending = body.strip() == "Terminated"
        return {"kind": kind, "action": "terminate", "at": None, "in_hours": None} if ending else None
    notice = json.loads(body)
    if kind == "spot":
        return {"kind": kind, "action": str(notice["action"]), "at": str(notice["time"]), "in_hours": None}
    if kind == "rebalance":
        return {"kind": kind, "action": "rebalance", "at": str(notice["noticeTime"]), "in_hours": None}
    events = [
        {
            "kind": kind,
            "action": str(each["Code"]),
            "at": str(each["NotBefore"]),
            "in_hours": _hours_to(each["NotBefore"]),
        }
        for each in notice
        if each.get("State", "active") == "active"
    ]
    return min(events, key=lambda event: -math.inf if event["in_hours"] is None else event["in_hours"], default=None)


def _hours_to(when: str) -> float | None:
    """Return the hours until a time like `21 Jan 2026 09:00:43 GMT`; negative for a past time, None where it is not a time."""
    # Loaded with the datetime module behind it only where an event is announced.
    import calendar

    try:
        at = calendar.timegm(time.strptime(when, "%d %b %Y %H:%M:%S GMT"))
    except ValueError:
        return None
    return round((at - time.time()) / 3600, 1)


class Service:
    """Hold one token and make requests with it, all before a deadline."""

    def __init__(self, endpoint: str, deadline: float) -> None:
        match = re.fullmatch(r"http://(\[[0-9A-Fa-f:.]+\]|[^/:\[\]]+)(?::(\d{1,5}))?/?", endpoint)
        if not match:
            raise MetadataError(
                f"{ENDPOINT_VARIABLE} = {endpoint}: not an address; allowed: http://HOST or http://HOST:PORT"
            )
        self._host, self._port, self._deadline = match[1].strip("[]"), int(match[2] or 80), deadline
        self._token = self._new_token()

    def get(self, path: str) -> str | None:
        """Return the body; None where the service has nothing at that path."""
        status, body = self._send("GET", f"/latest/meta-data/{path}", ("X-aws-ec2-metadata-token", self._token))
        if status == 401:
            self._token = self._new_token()
            status, body = self._send("GET", f"/latest/meta-data/{path}", ("X-aws-ec2-metadata-token", self._token))
        if status not in (200, 404):
            raise MetadataError(f"the metadata service answered {status} to {path}")
        return body if status == 200 else None

    def _new_token(self) -> str:
        status, body = self._send("PUT", "/latest/api/token", ("X-aws-ec2-metadata-token-ttl-seconds", _TOKEN_SECONDS))
        if status != 200:
            raise MetadataError(f"the metadata service answered {status} to the request for a token")
        return body.strip()

    def _send(self, method: str, path: str, header: tuple[str, str]) -> tuple[int, str]:
        lines = (f"{method} {path} HTTP/1.1", f"Host: {self._host}", f"{header[0]}: {header[1]}", "Connection: close")
        request = "\r\n".join([*lines, "Content-Length: 0", "", ""]).encode("ascii")
        # As bytes: for text Python loads its codec of international names, which takes 8 ms.
        address = self._host.encode("ascii"), self._port
        try:
            with socket.create_connection(address, self._left()) as link:  # type: ignore[arg-type]
                link.sendall(request)
                answer = self._receive(link)
        except OSError as error:
            raise MetadataError(f"the metadata service did not answer: {error.strerror or error}") from error
        return parse_answer(answer)

    def _receive(self, link: socket.socket) -> bytes:
        answer = b""
        while len(answer) < 65536:
            link.settimeout(self._left())
            more = link.recv(65536)
            if not more:
                break
            answer += more
        return answer

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise MetadataError(f"the metadata service did not answer within {BUDGET_SECONDS:g} s")
        return left


def parse_answer(answer: bytes) -> tuple[int, str]:
    """Return status and body of an HTTP/1.1 answer that ends with its connection. MetadataError for any other."""
    head, gap, body = answer.partition(b"\r\n\r\n")
    match = re.match(rb"HTTP/1\.[01] (\d{3})\b", head)
    if not match or not gap:
        raise MetadataError("the metadata service did not answer in HTTP")
    length = re.search(rb"\r\ncontent-length:\s*(\d+)", head, re.IGNORECASE)
    if length and len(body) < int(length[1]):
        raise MetadataError("the metadata service stopped in the middle of an answer")
    return int(match[1]), body.decode("utf-8", "replace")
