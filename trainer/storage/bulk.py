"""Large objects to and from S3 in parallel parts: the small interface of the two data paths, and the one over boto3."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from awscrt.checksums import crc64nvme as crc64nvme_of
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)

from lustrain.backoff import pause_s
from trainer.storage.s3_errors import ErrorContext, of_boto, of_short

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

PART_BYTES = 8 << 20
"""Part of an upload and range of a download: the size that was fastest for both paths (tests/bench/bench_upload.py)."""
MAX_PARTS = 10_000
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""
THREADS = 8
LONGEST_PAUSE = 20.0

BROKEN_BODY = (IncompleteReadError, ResponseStreamingError, HTTPClientError)
"""Errors of a body that ends early or stalls; botocore repeats requests, but not the reading of their bodies."""
_T = TypeVar("_T")


class SourceEndedError(Exception):
    """The file to upload is shorter than was announced."""


class Bulk(Protocol):
    """Both calls retry a bounded number of times and then raise a StorageError that names `context`."""

    def upload(self, key: str, path: str, size: int, crc64nvme: int, context: ErrorContext) -> None:
        """Store `size` > 0 bytes of the file; a failure leaves no unfinished upload behind."""

    def download(self, key: str, view: memoryview, offset: int, context: ErrorContext) -> None:
        """Fill `view`, of at least one byte, with the object's bytes from `offset` on."""


class BotoBulk:
    """The data path for endpoints that the CRT cannot reach (any port but 80 and 443, or behind a proxy)."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def upload(self, key: str, path: str, size: int, crc64nvme: int, context: ErrorContext) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._upload(key, fd, size, crc64nvme)
        except (BotoCoreError, ClientError) as error:
            raise of_boto(error, context) from error
        finally:
            os.close(fd)

    def _upload(self, key: str, fd: int, size: int, crc64nvme: int) -> None:
        client, bucket = self._client, self._bucket
        made = client.create_multipart_upload(
            Bucket=bucket, Key=key, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
        )
        upload = made["UploadId"]
        step = part_bytes(size)

        def send(number: int) -> CompletedPartTypeDef:
            body = read_at(fd, (number - 1) * step, min(step, size - (number - 1) * step))
            sum_ = encoded(crc64nvme_of(body))
            sent = client.upload_part(
                Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=body, ChecksumCRC64NVME=sum_
            )
            return {"PartNumber": number, "ETag": sent["ETag"], "ChecksumCRC64NVME": sum_}

        try:
            parts = _together(send, range(1, -(-size // step) + 1))
            client.complete_multipart_upload(
                Bucket=bucket,
                Key=key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                ChecksumCRC64NVME=encoded(crc64nvme),
                ChecksumType="FULL_OBJECT",
                MpuObjectSize=size,
            )
        except ClientError as error:
            # After a lost answer a repeated completion finds no upload any more; the caller's check of the object decides.
            if error.response["Error"].get("Code") != "NoSuchUpload":
                self._abort(key, upload)
                raise
        except BaseException:
            self._abort(key, upload)
            raise

    def _abort(self, key: str, upload: str) -> None:
        """Abort an upload, best effort: what stays is invisible, and a bucket's lifecycle rule ends it."""
        with suppress(BotoCoreError, ClientError):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)

    def download(self, key: str, view: memoryview, offset: int, context: ErrorContext) -> None:
        def fetch(start: int) -> None:
            self._fetch(key, view[start : start + PART_BYTES], offset + start, offset + len(view), context)

        _together(fetch, range(0, len(view), PART_BYTES))

    def _fetch(self, key: str, part: memoryview, start: int, wanted: int, context: ErrorContext) -> None:
        span = f"bytes={start}-{start + len(part) - 1}"
        for attempt in range(context.attempts):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=span)
            except ClientError as error:
                if error.response["Error"].get("Code") == "InvalidRange":
                    raise of_short(f"at most {start}", wanted, context) from error
                raise of_boto(error, context) from error
            except BotoCoreError as error:
                raise of_boto(error, context) from error
            if answer["ContentLength"] != len(part):
                raise of_short(answer.get("ContentRange", "/fewer").rpartition("/")[2], wanted, context)
            try:
                part[:] = answer["Body"].read()
                return
            except BROKEN_BODY as error:
                if attempt + 1 == context.attempts:
                    raise of_boto(error, context) from error
            pause(attempt)


def part_bytes(size: int) -> int:
    """Return bytes per part, in whole MiB, so that at most MAX_PARTS are needed."""
    least = -(-size // MAX_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


def read_at(fd: int, start: int, size: int) -> bytes:
    """Read `size` bytes of the file; SourceEndedError when it holds fewer."""
    body = os.pread(fd, size, start)
    while len(body) < size:
        more = os.pread(fd, size - len(body), start + len(body))
        if not more:
            raise SourceEndedError(f"ends at byte {start + len(body)}")
        body += more
    return body


def encoded(crc64nvme: int) -> str:
    """Return a CRC-64/NVME as S3 writes it: base64 of its 8 bytes, most significant first."""
    return base64.b64encode(crc64nvme.to_bytes(8, "big")).decode()


def decoded(checksum: str) -> int:
    return int.from_bytes(base64.b64decode(checksum), "big")


def pause(attempt: int) -> None:
    """Sleep before the next attempt: exponential with full jitter, as botocore's `standard` retries do."""
    time.sleep(pause_s(attempt + 1, 0.5, LONGEST_PAUSE))


def _together(action: Callable[[int], _T], items: Iterable[int]) -> list[_T]:
    """Run `action` on all items in threads, results in order; the first error cancels what has not begun and is raised."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(action, item) for item in items]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            if error := future.exception():
                raise error
    return [future.result() for future in futures]
