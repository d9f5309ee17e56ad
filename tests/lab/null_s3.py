"""An S3 that accepts every upload and keeps nothing but sizes, so that a client's own speed can be measured.

Bodies are discarded by the kernel (MSG_TRUNC), never copied into this process. Runs as a process of its own:
`with NullS3() as sink: sink.endpoint`. It listens on port 80 of a loopback address, the only plain-http port that the CRT can
reach. It answers what uploads need: multipart and single puts, HEAD with the size that was sent, an empty listing.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import defaultdict
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

HOST = "127.82.0.1"
DISCARD_BYTES = 4 << 20
_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'


class NullS3:
    """A context manager around the process; PermissionError when port 80 may not be bound here."""

    def __init__(self, host: str = HOST) -> None:
        self.endpoint = f"http://{host}"
        self._host = host

    def __enter__(self) -> NullS3:
        command = [sys.executable, "-m", "tests.lab.null_s3", self._host]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline() if self._process.stdout else ""
        if line.strip() != "ready":
            self._process.wait()
            raise PermissionError(f"port 80 of {self._host} cannot be bound: {line.strip()}; run as root")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


class _Sink:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = defaultdict(int)

    def answer(self, method: str, target: str, size: int) -> tuple[str, bytes]:
        """Extra header lines and body for a request whose object bytes numbered `size`."""
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        if method == "POST" and "uploads" in query:
            with self._lock:
                self._sizes[parts.path] = 0
            made = "<Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId>"
            return "", f"{_XML}<InitiateMultipartUploadResult>{made}</InitiateMultipartUploadResult>".encode()
        if method == "POST":
            done = '<Bucket>b</Bucket><Key>k</Key><ETag>"e"</ETag>'
            return "", f"{_XML}<CompleteMultipartUploadResult>{done}</CompleteMultipartUploadResult>".encode()
        if method == "PUT":
            with self._lock:
                self._sizes[parts.path] = size + (self._sizes[parts.path] if "partNumber" in query else 0)
            return 'ETag: "e"\r\n', b""
        if method == "GET":
            empty = "<Name>b</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
            return "", f"{_XML}<ListBucketResult>{empty}</ListBucketResult>".encode()
        return "", b""

    def size_of(self, target: str) -> int:
        with self._lock:
            return self._sizes[urlsplit(target).path]

    def serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        scratch = memoryview(bytearray(DISCARD_BYTES))
        rest = b""
        with connection:
            while (head := _head(connection, rest)) is not None:
                lines, rest = head
                method, target, _ = lines[0].split(" ", 2)
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines[1:])}
                if headers.get("expect") == "100-continue":
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                length = int(headers.get("content-length", 0))
                rest = _discard(connection, rest, length, scratch)
                size = int(headers.get("x-amz-decoded-content-length", length))
                extra, body = self.answer(method, target, size)
                announced = self.size_of(target) if method == "HEAD" else len(body)
                modified = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n" if method == "HEAD" else ""
                answer = f"HTTP/1.1 200 OK\r\n{extra}{modified}Content-Length: {announced}\r\n"
                etag = 'ETag: "e"\r\n' if method == "HEAD" else ""
                connection.sendall(f"{answer}{etag}Content-Type: application/xml\r\n\r\n".encode() + body)


def _head(connection: socket.socket, rest: bytes) -> tuple[list[str], bytes] | None:
    """Lines of the next request's head and what follows it; None when the client is done."""
    while b"\r\n\r\n" not in rest:
        more = connection.recv(65536)
        if not more:
            return None
        rest += more
    head, _, rest = rest.partition(b"\r\n\r\n")
    return head.decode("latin-1").split("\r\n"), rest


def _discard(connection: socket.socket, rest: bytes, length: int, scratch: memoryview) -> bytes:
    """What of `rest` lies behind a body of `length` bytes, once that body has arrived."""
    left = length - len(rest)
    while left > 0:
        count = connection.recv_into(scratch, min(left, len(scratch)), socket.MSG_TRUNC)
        if count == 0:
            raise ConnectionError("the client hung up within a body")
        left -= count
    return rest[length:] if len(rest) > length else b""


def main(host: str) -> None:
    """Serves until standard input ends."""
    try:
        server = socket.create_server((host, 80), backlog=128)
    except OSError as error:
        print(error.strerror, flush=True)
        return
    print("ready", flush=True)
    sink = _Sink()

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=sink.serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
