"""The EC2 instance metadata service (IMDSv2) on loopback, controlled by tests and the rehearsal.

It serves tokens, the spot notice, the rebalance recommendation, the Auto Scaling lifecycle state, identity and placement.
Paths and bodies follow the EC2 user guide ("Instance metadata categories", "Spot Instance interruption notices").

A second port takes commands from other processes, as JSON:
`POST /control/spot {"action": "terminate", "in_s": 120}`, `/control/rebalance`, `/control/lifecycle {"state": "Terminated"}`,
`/control/expire-tokens`, `/control/fail {"count": 3, "status": 503}`, `/control/clear`, and `GET /control/state`.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

LEFT_OUT = (
    "instance metadata: no IMDSv1, hop limits, IAM role credentials, user data or any other category than those about a node's "
    "end, its identity and its place: these answer 404"
)
MAX_TOKEN_SECONDS = 21_600
"""Six hours, the longest life the service grants a token."""
NOTICE_SECONDS = 120.0
"""EC2 announces a spot interruption two minutes ahead."""
_META = "/latest/meta-data/"
_IDENTITY = {
    "instance-id": "i-0123456789abcdef0",
    "instance-type": "p5.48xlarge",
    "instance-life-cycle": "spot",
    "placement/region": "us-east-1",
    "placement/availability-zone": "us-east-1a",
    "placement/availability-zone-id": "use1-az1",
    "local-ipv4": "127.0.0.1",
}


class LocalMetadata:
    """A context manager around the two servers; its methods may be called from any thread."""

    def __init__(self, identity: Mapping[str, str] | None = None) -> None:
        """`identity` adds or replaces values of the instance, by path below /latest/meta-data/."""
        self._lock = threading.Lock()
        self._tokens: dict[str, float] = {}
        self._identity = {**_IDENTITY, **(identity or {})}
        self._answers: dict[str, str] = dict(self._identity)
        self._failures: list[int] = []
        self._servers: list[ThreadingHTTPServer] = []
        self.requests: Counter[str] = Counter()
        """The number of requests for each path, including failed ones."""

    @property
    def endpoint(self) -> str:
        """The value for AWS_EC2_METADATA_SERVICE_ENDPOINT."""
        return _address(self._servers[0])

    @property
    def control(self) -> str:
        """Base address for commands of other processes."""
        return _address(self._servers[1])

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send a metadata client to this server."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.endpoint, "AWS_EC2_METADATA_DISABLED": "false"}

    def spot_notice(self, action: str = "terminate", in_s: float = NOTICE_SECONDS) -> None:
        """Announce the end of the instance `in_s` seconds from now; `action` is terminate, stop or hibernate."""
        if action not in ("terminate", "stop", "hibernate"):
            raise ValueError(f"EC2 has no spot action {action!r}")
        at = _stamp(in_s)
        with self._lock:
            self._answers["spot/instance-action"] = json.dumps({"action": action, "time": at})
            if action == "terminate":
                self._answers["spot/termination-time"] = at

    def rebalance(self) -> None:
        """Publish a rebalance recommendation with the current time."""
        with self._lock:
            self._answers["events/recommendations/rebalance"] = json.dumps({"noticeTime": _stamp(0)})

    def lifecycle_state(self, state: str = "Terminated") -> None:
        """Set the Auto Scaling target lifecycle state; before that the instance is in no group and the path answers 404."""
        with self._lock:
            self._answers["autoscaling/target-lifecycle-state"] = state

    def expire_tokens(self) -> None:
        """Invalidate every token issued so far."""
        with self._lock:
            self._tokens.clear()

    def fail(self, count: int, status: int = 503) -> None:
        """Answer the next `count` requests, for tokens too, with `status`."""
        with self._lock:
            self._failures = [status] * count

    def clear(self) -> None:
        """Withdraw all notices and failures; tokens stay valid."""
        with self._lock:
            self._answers = dict(self._identity)
            self._failures = []

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {"answers": dict(self._answers), "requests": dict(self.requests)}

    def issue_token(self, ttl: str | None) -> str | None:
        """Return a fresh token for a life of `ttl` seconds as sent in the header; None when the service would refuse that."""
        if ttl is None or not ttl.isdecimal() or not 1 <= int(ttl) <= MAX_TOKEN_SECONDS:
            return None
        token = secrets.token_urlsafe(40)
        with self._lock:
            self._tokens[token] = time.monotonic() + int(ttl)
        return token

    def respond(self, path: str, token: str | None) -> tuple[int, str]:
        """Return the status and body of a GET."""
        with self._lock:
            self.requests[path] += 1
            if self._failures:
                return self._failures.pop(), ""
            if token is None or self._tokens.get(token, 0.0) < time.monotonic():
                return 401, ""
            if path == "/latest/dynamic/instance-identity/document":
                identity = self._identity
                return 200, json.dumps({"instanceId": identity["instance-id"], "region": identity["placement/region"]})
            body = self._answers.get(path.removeprefix(_META)) if path.startswith(_META) else None
            return (404, "") if body is None else (200, body)

    def next_failure(self, path: str) -> int | None:
        """Count a request for a token; return the status it should fail with, if any."""
        with self._lock:
            self.requests[path] += 1
            return self._failures.pop() if self._failures else None

    def start(self) -> LocalMetadata:
        for handler in (_metadata_handler(self), _control_handler(self)):
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            self._servers.append(server)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []

    def __enter__(self) -> LocalMetadata:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "EC2ws"

    def reply(self, status: int, body: str = "", headers: dict[str, str] | None = None) -> None:
        raw = body.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        try:
            self.end_headers()
            self.wfile.write(raw)
        except ConnectionError:
            self.close_connection = True  # the client was killed or gave up: a rehearsal does both on purpose

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing; `LocalMetadata.requests` counts the requests."""


def _metadata_handler(metadata: LocalMetadata) -> type[_Handler]:
    class Handler(_Handler):
        def do_PUT(self) -> None:
            self.body()
            if (status := metadata.next_failure(self.path)) is not None:
                return self.reply(status)
            if self.path != "/latest/api/token":
                return self.reply(404)
            # The service refuses tokens to proxies: https://aws.amazon.com/blogs/security (IMDSv2, open layer-7 firewalls).
            if "X-Forwarded-For" in self.headers:
                return self.reply(403)
            ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            token = metadata.issue_token(ttl)
            if token is None or ttl is None:
                return self.reply(400)
            return self.reply(200, token, {"X-aws-ec2-metadata-token-ttl-seconds": ttl})

        def do_GET(self) -> None:
            self.reply(*metadata.respond(self.path, self.headers.get("X-aws-ec2-metadata-token")))

    return Handler


def _control_handler(metadata: LocalMetadata) -> type[_Handler]:
    commands: dict[str, Callable[..., None]] = {
        "/control/spot": metadata.spot_notice,
        "/control/rebalance": metadata.rebalance,
        "/control/lifecycle": metadata.lifecycle_state,
        "/control/expire-tokens": metadata.expire_tokens,
        "/control/fail": metadata.fail,
        "/control/clear": metadata.clear,
    }

    class Handler(_Handler):
        def do_POST(self) -> None:
            raw = self.body()
            command = commands.get(self.path)
            if command is None:
                return self.reply(404, f"no such command; there are {', '.join(commands)}")
            try:
                command(**json.loads(raw or b"{}"))
            except (TypeError, ValueError) as error:
                return self.reply(400, str(error))
            return self.reply(200)

        def do_GET(self) -> None:
            self.reply(200, json.dumps(metadata.state())) if self.path == "/control/state" else self.reply(404)

    return Handler


def _address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def _stamp(in_s: float) -> str:
    """Return a UTC time in the service's format, in whole seconds."""
    return (datetime.now(UTC) + timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
