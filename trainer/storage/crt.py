"""The fast data path: the AWS Common Runtime moves large objects without holding the interpreter.

About 5 times boto3's throughput at a third of its CPU time (tests/bench/bench_upload.py). Its Python binding takes no
port, so it reaches https on 443 and http on 80 only. Its threads do not survive a fork.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from awscrt import auth, exceptions, http, io
from awscrt import s3 as crt

from lustrain.problem import problem
from trainer.storage import CorruptObjectError, StorageError
from trainer.storage.bulk import PART_BYTES, SourceEndedError
from trainer.storage.s3_errors import ErrorContext, Refusal, of_cut, of_refusal, of_short, unreachable

MEMORY_BYTES = 1 << 30
"""The least that the CRT accepts; it holds the parts in flight, so it bounds what a save may add to a rank's memory."""
THROUGHPUT_GBPS = 10.0
"""Per process, the CRT's own default: with 8 ranks on a node that is 80 Gbit/s of connections."""
LOOPS_PER_CPU = 2
MOST_LOOPS = 8
"""Event loops, each a thread: two per CPU let one send while another waits for its file, 1.5 times as fast as the CRT's
default on 2 CPUs; the bound keeps the ranks of a large node from starting a hundred threads each."""
CONNECT_MS = 5_000

_CODE = re.compile(rb"<Code>([^<]*)</Code>")
_ANSWERS = {
    "AWS_ERROR_S3_SLOW_DOWN": Refusal(503, "SlowDown"),
    "AWS_ERROR_S3_INTERNAL_ERROR": Refusal(500, "InternalError"),
}
"""What the CRT reports by name after its retries, without the answer itself."""
_BODY_ENDED = ("AWS_IO_SOCKET_CLOSED", "AWS_ERROR_HTTP_CONNECTION_CLOSED")


@dataclass(frozen=True)
class BucketEndpoint:
    """How to reach one bucket: `host` with `base` before every key, signed for `region`."""

    tls: bool
    host: str
    base: str
    region: str
    ca_file: str | None


def endpoint_of(url: str, key: str, region: str, ca_file: str | None) -> BucketEndpoint | None:
    """Read a bucket's address off the URL that botocore made for `key`; None where the CRT cannot connect (port, proxy)."""
    parts = urlsplit(url)
    if parts.port not in (None, 443 if parts.scheme == "https" else 80):
        return None
    host = parts.hostname or ""
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return None
    return BucketEndpoint(parts.scheme == "https", host, parts.path.removesuffix(key), region, ca_file)


class CrtBulk:
    """The data path over the CRT. `credentials` is called for each request, so that keys and token may be renewed.

    `server_date` fetches a Date header, to name how far a clock is off: the CRT does not pass the server's header on.
    """

    def __init__(
        self,
        bucket: BucketEndpoint,
        credentials: Callable[[], tuple[str, str, str | None]],
        attempts: int,
        server_date: Callable[[], str],
    ) -> None:
        self._reach = bucket
        self._credentials = credentials
        self._attempts = attempts
        self._server_date = server_date
        self._lock = threading.Lock()
        self._client: crt.S3Client | None = None

    def upload(self, key: str, path: str, size: int, crc64nvme: int, context: ErrorContext) -> None:
        headers = [("Content-Length", str(size)), ("Content-Type", "application/octet-stream")]
        sums = crt.S3ChecksumConfig(
            algorithm=crt.S3ChecksumAlgorithm.CRC64NVME, location=crt.S3ChecksumLocation.TRAILER
        )
        try:
            self._run(
                type=crt.S3RequestType.PUT_OBJECT,
                request=self._request("PUT", key, headers),
                send_filepath=path,
                checksum_config=sums,
            )
        except crt.S3ResponseError as error:
            # After a lost answer a repeated completion finds no upload any more; the caller's check of the object decides.
            if _refusal(error).code != "NoSuchUpload":
                raise self._line(error, context) from error
        except exceptions.AwsCrtError as error:
            if error.name == "AWS_ERROR_S3_INCORRECT_CONTENT_LENGTH":
                raise SourceEndedError("ended early") from error
            raise self._line(error, context) from error

    def download(self, key: str, view: memoryview, offset: int, context: ErrorContext) -> None:
        wanted, arrived = offset + len(view), 0
        answered: list[tuple[str, str]] = []

        def on_headers(headers: list[tuple[str, str]], **_: object) -> None:
            answered.extend(headers)

        def on_body(chunk: bytes, offset: int, **_: object) -> None:
            nonlocal arrived
            at = offset - first
            view[at : at + len(chunk)] = chunk
            arrived += len(chunk)

        first = offset
        span = ("Range", f"bytes={offset}-{wanted - 1}")
        try:
            self._run(
                type=crt.S3RequestType.GET_OBJECT,
                request=self._request("GET", key, [span]),
                on_headers=on_headers,
                on_body=on_body,
            )
        except crt.S3ResponseError as error:
            if error.status_code == 416:
                raise of_short(f"at most {offset}", wanted, context) from error
            raise self._line(error, context) from error
        except exceptions.AwsCrtError as error:
            raise self._line(error, context) from error
        if arrived != len(view):
            total = {name.lower(): value for name, value in answered}.get("content-range", "/fewer").rpartition("/")[2]
            raise of_short(total, wanted, context)

    def _line(self, error: exceptions.AwsCrtError, context: ErrorContext) -> StorageError:
        if isinstance(error, crt.S3ResponseError):
            return of_refusal(_refusal(error), context)
        if error.name == "AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED":
            return of_refusal(Refusal(403, "RequestTimeTooSkewed", date=self._server_date()), context)
        return _line(error, context)

    def _request(self, method: str, key: str, headers: list[tuple[str, str]]) -> http.HttpRequest:
        path = self._reach.base + quote(key, safe="/~")
        return http.HttpRequest(method, path, http.HttpHeaders([("Host", self._reach.host), *headers]))

    def _run(self, **request: Any) -> None:
        with self._lock:
            self._client = self._client or self._connect()
        finished: Future[None] = self._client.make_request(**request).finished_future
        try:
            finished.result()
        except BaseException:
            finished.cancel()
            raise

    def _connect(self) -> crt.S3Client:
        # The provider must not hold this object: the circle would run through C, where no collector sees it.
        credentials = self._credentials
        provider = auth.AwsCredentialsProvider.new_delegate(lambda: auth.AwsCredentials(*credentials()))
        region = self._reach.region
        return crt.S3Client(
            bootstrap=_bootstrap(),
            region=region,
            tls_mode=crt.S3RequestTlsMode.ENABLED if self._reach.tls else crt.S3RequestTlsMode.DISABLED,
            tls_connection_options=_trust(self._reach.ca_file) if self._reach.tls else None,
            signing_config=crt.create_default_s3_signing_config(region=region, credential_provider=provider),
            part_size=PART_BYTES,
            throughput_target_gbps=THROUGHPUT_GBPS,
            # Parts are sent straight from the file, which lies in memory: buffering them first would copy every byte once more.
            fio_options=crt.S3FileIoOptions(should_stream=True),
            memory_limit=MEMORY_BYTES,
            retry_config=crt.S3RetryConfig(max_retries=max(1, self._attempts - 1)),
            connect_timeout_ms=CONNECT_MS,
        )


@functools.cache
def _bootstrap() -> io.ClientBootstrap:
    """One set of event loops for every store of the process; it lives as long as the process."""
    loops = io.EventLoopGroup(min(MOST_LOOPS, LOOPS_PER_CPU * len(os.sched_getaffinity(0))))
    return io.ClientBootstrap(loops, io.DefaultHostResolver(loops))


def _trust(ca_file: str | None) -> io.TlsConnectionOptions | None:
    if ca_file is None:
        return None
    options = io.TlsContextOptions()
    options.override_default_trust_store_from_path(None, ca_file)
    return io.ClientTlsContext(options).new_connection_options()


def _refusal(error: crt.S3ResponseError) -> Refusal:
    code = _CODE.search(error.body or b"")
    headers = {name.lower(): value for name, value in error.headers or []}
    return Refusal(error.status_code, code[1].decode("ascii", "replace") if code else "", date=headers.get("date", ""))


def _line(error: exceptions.AwsCrtError, context: ErrorContext) -> StorageError:
    if error.name in _ANSWERS:
        return of_refusal(_ANSWERS[error.name], context)
    if error.name in _BODY_ENDED:
        return of_cut(context)
    if "CHECKSUM" in error.name:
        return CorruptObjectError(problem("object", context.shown, f"arrived with a wrong checksum ({error.name})"))
    if error.name.startswith(("AWS_IO_", "AWS_ERROR_HTTP_")):
        return StorageError(unreachable(f"{error.name}: {error.message}", context))
    return StorageError(problem("object", context.shown, f"{error.name}: {error.message}"))
