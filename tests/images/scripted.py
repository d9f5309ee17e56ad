"""A fake registry that says what a test tells it to: for lies and refusals that no real registry can be brought to.

It leaves out everything else: no storage, no authentication of its own.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Said:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Scripted:
    host: str
    asked: list[Asked]


@contextmanager
def scripted(
    script: Callable[[Asked], Said], address: str = "127.0.0.1", *, greets: bool = False, tls: Path | None = None
) -> Iterator[Scripted]:
    """Serves `script` until the end; what it was asked is kept. `greets`: it lets everyone in who asks first, as engines do;
    `tls`: a folder with server.crt and server.key.
    """
    running = Scripted("", [])

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = Asked(self.command, self.path, self.headers, body)
            said = Said(200 if greets else 401) if self.path == "/v2/" else script(asked)
            if self.path != "/v2/":
                running.asked.append(asked)
            self.send_response(said.status)
            for name, value in {"Content-Length": str(len(said.body)), **said.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said.body)

        do_GET = do_HEAD = do_PUT = do_POST = answer

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer((address, 0), Handler)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.crt", tls / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    running.host = f"{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
