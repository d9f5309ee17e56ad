"""An HTTP proxy in front of an S3 endpoint, on a loopback port of its own, that misbehaves on command.

    with FaultyProxy(moto_s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.inject(Answer(503, "SlowDown"), times=2)      # the next two requests, whatever they are
        proxy.inject(Reset(after=True), method="PUT", key="manifests/", times=1)   # stored, but the answer is lost
        proxy.inject(Answer(500), probability=0.2)          # by the proxy's seeded generator, until heal()
        assert proxy.did["Answer"] == 2

A rule applies to requests whose method and path (with query) its two regular expressions find. Rules are tried in the order
they were injected and the first that applies is used. `did` counts faults by class name, `requests` counts requests by method,
`seen` lists "METHOD /path?query". Bodies pass through memory.
"""

from __future__ import annotations

import http.client
import random
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import pytest
from botocore.retries.standard import ExponentialBackoff

UPSTREAM_SECONDS = 300.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection"}


@dataclass(frozen=True)
class Answer:
    """An S3 error document with this status, without asking the server."""

    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class Delay:
    """Waits before the server is asked."""

    seconds: float


@dataclass(frozen=True)
class Hold:
    """Waits before the server is asked, until the event is set."""

    until: threading.Event


@dataclass(frozen=True)
class Reset:
    """Closes the connection with a TCP reset; `after` the server has done its work, the answer is lost."""

    after: bool = False


@dataclass(frozen=True)
class Cut:
    """Sends this part of the response's body under the full Content-Length, then closes."""

    fraction: float = 0.5


@dataclass(frozen=True)
class Swap:
    """Flips one bit in each of `count` bytes, spread evenly over the body, or in one that `at` names."""

    count: int = 1
    request: bool = False
    at: bytes = b""


@dataclass(frozen=True)
class Skew:
    """Shows another time in the Date header; `refuse` also answers that the client's clock is off."""

    seconds: float
    refuse: bool = False


Fault = Answer | Delay | Hold | Reset | Cut | Swap | Skew


@dataclass
class _Rule:
    fault: Fault
    times: int | None
    probability: float
    method: re.Pattern[str]
    key: re.Pattern[str]


@dataclass
class _Response:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes
    length: int = field(default=0)


class FaultyProxy:
    """A context manager; `endpoint` is where clients should go.

    The CRT client reaches it on `port=80`, or on `port=443` with the paths of a certificate and its key as `tls`.
    """

    def __init__(
        self,
        upstream: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self.did: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.seen: list[str] = []
        self._server = _Server((host, port), _handler(self))
        bound = self._server.server_port
        self.endpoint = f"http://{host}" if bound == 80 else f"http://{host}:{bound}"
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.endpoint = f"https://{host}" if bound == 443 else f"https://{host}:{bound}"

    def inject(
        self, fault: Fault, *, times: int | None = None, probability: float = 1.0, method: str = "", key: str = ""
    ) -> None:
        """Adds a rule behind those that are there; without `times` it stays until `heal`."""
        with self._lock:
            self._rules.append(_Rule(fault, times, probability, re.compile(method), re.compile(key)))

    def heal(self) -> None:
        """Forgets all rules; the counts stay."""
        with self._lock:
            self._rules.clear()

    def choose(self, method: str, path: str) -> Fault | None:
        """Counts a request and says what shall happen to it."""
        with self._lock:
            self.requests[method] += 1
            self.seen.append(f"{method} {path}")
            for rule in self._rules:
                if rule.times == 0 or not (rule.method.search(method) and rule.key.search(path)):
                    continue
                if rule.probability < 1.0 and self._random.random() >= rule.probability:
                    continue
                if rule.times is not None:
                    rule.times -= 1
                self.did[type(rule.fault).__name__] += 1
                return rule.fault
            return None

    def ask(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> _Response:
        """What the server behind says; headers go through as they came, so that signatures stay valid."""
        upstream = http.client.HTTPConnection(*self._upstream, timeout=UPSTREAM_SECONDS)
        try:
            upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                if name.lower() not in _HOP_BY_HOP:
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in {*_HOP_BY_HOP, "content-length"}]
            payload = answer.read()
            length = int(answer.headers.get("Content-Length") or 0) if method == "HEAD" else len(payload)
            return _Response(answer.status, answer.reason, kept, payload, length)
        finally:
            upstream.close()

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        """The endpoint is gone, with every connection that was open."""
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: object) -> None:
        self._open.discard(cast("socket.socket", request))
        super().shutdown_request(cast("socket.socket", request))

    def hang_up(self) -> None:
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what this proxy is for."""


def _handler(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: object) -> None:
            """The counts of the proxy tell what happened."""

        def relay(self) -> None:
            body = self.body()
            fault = proxy.choose(self.command, self.path)
            if isinstance(fault, Reset) and not fault.after:
                return self.reset()
            if isinstance(fault, Answer):
                return self.send(_error(fault.status, fault.code))
            if isinstance(fault, Skew) and fault.refuse:
                return self.send(_skewed(_error(403, "RequestTimeTooSkewed"), fault.seconds))
            if isinstance(fault, Delay):
                time.sleep(fault.seconds)
            if isinstance(fault, Hold):
                fault.until.wait()
            if isinstance(fault, Swap) and fault.request:
                body = _swapped(body, fault)
            response = proxy.ask(self.command, self.path, self.headers.items(), body)
            if isinstance(fault, Reset):
                return self.reset()
            if isinstance(fault, Swap) and not fault.request:
                response.body = _swapped(response.body, fault)
            if isinstance(fault, Skew):
                response = _skewed(response, fault.seconds)
            if isinstance(fault, Cut):
                response.body = response.body[: int(len(response.body) * fault.fraction)]
                self.close_connection = True
            return self.send(response)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = relay

        def body(self) -> bytes:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                chunks = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                # Upstream gets the length instead of the chunks.
                self.headers["Content-Length"] = str(sum(map(len, chunks)))
                return b"".join(chunks)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def send(self, response: _Response) -> None:
            self.send_response_only(response.status, response.reason)
            for name, value in response.headers:
                self.send_header(name, value)
            if response.status not in (204, 304):
                self.send_header("Content-Length", str(response.length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.body)

        def reset(self) -> None:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Both file objects hold the socket open; only their end sends the reset.
            self.rfile.close()
            self.connection.close()

    return Handler


def _error(status: int, code: str) -> _Response:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>injected</Message></Error>'.encode()
    headers = [("Content-Type", "application/xml"), ("Date", formatdate(usegmt=True))]
    return _Response(status, code, headers, body, len(body))


def _skewed(response: _Response, seconds: float) -> _Response:
    kept = [(name, value) for name, value in response.headers if name.lower() != "date"]
    response.headers = [*kept, ("Date", formatdate(time.time() + seconds, usegmt=True))]
    return response


def _swapped(body: bytes, fault: Swap) -> bytes:
    changed = bytearray(body)
    if fault.at:
        if found := re.search(fault.at, body):
            changed[found.end() - 1] ^= 0x10
        return bytes(changed)
    for i in range(min(fault.count, len(changed))):
        changed[(2 * i + 1) * len(changed) // (2 * fault.count)] ^= 0x10
    return bytes(changed)


def shorten_throttling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the delays of a throttled request real, but short: what is tested is what happens, not how long it takes."""
    monkeypatch.setitem(vars(ExponentialBackoff)["_DEFAULT_BACKOFF_CONFIG"], "throttling_base_scale", 0.05)
