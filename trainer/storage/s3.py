"""Objects in S3 or anything that speaks it: boto3 for control, a parallel data path for large bodies.

Endpoint, region and credentials come from the standard AWS variables and profiles (AWS_ENDPOINT_URL,
AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, AWS_MAX_ATTEMPTS, …). Open a store in the process that uses it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import boto3
from awscrt.checksums import crc64nvme as crc64nvme_of
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError
from botocore.httpsession import where

from lustrain.problem import UserError, problem
from trainer.storage import (
    CorruptObjectError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStore,
    PreconditionError,
    StorageError,
)
from trainer.storage.answers import make_patient, read_times_quickly
from trainer.storage.archive import archive_in_head, archive_in_listing
from trainer.storage.bulk import (
    BROKEN_BODY,
    PART_BYTES,
    BotoBulk,
    Bulk,
    SourceEndedError,
    decoded,
    encoded,
    pause,
    read_at,
)
from trainer.storage.draws import draw_apart
from trainer.storage.keys import bucket_problems, check_key
from trainer.storage.s3_errors import ErrorContext, of_boto, server_time

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ATTEMPTS = 10
"""Per request: botocore's `standard` backoff then bridges some 13 s of failures and 50 s of throttling on average."""
ATTEMPTS_AT_OPEN = 6
"""Fewer, so that a wrong endpoint shows within seconds. AWS_MAX_ATTEMPTS overrides both."""
CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
CONNECTIONS = 32
CONFLICTS = 8
"""How often a conditional put is repeated that met a second one in flight (409)."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_HOSTS_OF_AWS = re.compile(r"\.(amazonaws\.(com|com\.cn|eu)|api\.aws)$")
"""Other servers may know paths only."""
_TOLERATED_AT_OPEN = ("AccessDenied", "AllAccessDisabled")


class S3Store(ObjectStore):
    """`s3://bucket/prefix`; opening asks once whether the bucket can be listed, so that mistakes show at once.

    `name` is as in `open_store`.
    """

    def __init__(self, uri: str, *, name: str = "store") -> None:
        self.uri = uri.rstrip("/")
        self._label = name
        self._bucket, prefix = split_uri(uri, name)
        self._prefix = f"{prefix}/" if prefix else ""
        self._attempts = _attempts(ATTEMPTS_AT_OPEN)
        self._endpoint = "S3"
        with self._reporting(""):
            self._session = boto3.Session()
            make_patient(self._session)
            read_times_quickly(self._session)
            draw_apart()
            self._client = connect(self._session, _region(), self._attempts)
            self._endpoint = self._client.meta.endpoint_url
            region = self._probe().get("x-amz-bucket-region", self._client.meta.region_name)
            self._attempts = _attempts(ATTEMPTS)
            self._client = connect(self._session, region, self._attempts)
            self._endpoint = self._client.meta.endpoint_url
            self._bulk = self._data_path()

    def read(self, key: str) -> tuple[bytes, str]:
        with self._reporting(key):
            for attempt in range(self._attempts):
                answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key), ChecksumMode="ENABLED")
                try:
                    return answer["Body"].read(), answer["ETag"]
                except (FlexibleChecksumError, *BROKEN_BODY) as error:
                    last = error
                if attempt + 1 < self._attempts:
                    pause(attempt)
            raise last

    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        view = buffer.cast("B")
        if len(view):
            self._bulk.download(self._name(key), view, offset, self._context(key))
        else:
            self.stat(key)

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        if if_match is not None:
            condition["IfMatch"] = if_match
        with self._reporting(key, conditional=bool(condition)):
            return self._put(key, body, crc64nvme_of(body), condition)

    def put_file(self, key: str, path: str, size: int, crc64nvme: int) -> None:
        try:
            _require_size(path, size)
            with self._reporting(key):
                if size <= PART_BYTES:
                    self._put(key, _body(path, size), crc64nvme, {})
                else:
                    self._bulk.upload(self._name(key), path, size, crc64nvme, self._context(key))
        except SourceEndedError as error:
            why = f"{path} {error}, {size} bytes were expected"
            raise CorruptObjectError(problem("object", self._shown(key), why)) from error
        except OSError as error:
            raise StorageError(problem("object", self._shown(key), f"cannot read {path}: {error.strerror}")) from error
        stored = self.stat(key)
        if stored.size != size or stored.crc64nvme not in (None, crc64nvme):
            self.delete(key, if_match=stored.etag)
            why = f"{stored.size} bytes with checksum {stored.crc64nvme or 0:016x} were stored, "
            why += f"{size} with {crc64nvme:016x} were expected"
            raise CorruptObjectError(problem("object", self._shown(key), why))

    def stat(self, key: str) -> ObjectInfo:
        with self._reporting(key):
            answer = self._client.head_object(Bucket=self._bucket, Key=self._name(key), ChecksumMode="ENABLED")
        checksum = answer.get("ChecksumCRC64NVME")
        modified = answer["LastModified"].timestamp()
        return ObjectInfo(
            key,
            answer["ContentLength"],
            answer["ETag"],
            modified,
            decoded(checksum) if checksum else None,
            answer.get("StorageClass", ""),
            archive_in_head(answer),
        )

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._reporting(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix, OptionalObjectAttributes=["RestoreStatus"]
            )
            for page in pages:
                for item in page.get("Contents", []):
                    key = item["Key"].removeprefix(self._prefix)
                    if key and not key.endswith("/"):
                        yield ObjectInfo(
                            key,
                            item["Size"],
                            item["ETag"],
                            item["LastModified"].timestamp(),
                            storage_class=item.get("StorageClass", ""),
                            archive=archive_in_listing(item),
                        )

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        condition: dict[str, Any] = {} if if_match is None else {"IfMatch": if_match}
        with self._reporting(key, conditional=bool(condition)):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key), **condition)

    def subfolder(self, path: str) -> ObjectStore:
        """Share this store's connections: opening another one costs a tenth of a second of a processor."""
        found = copy(self)
        found.uri, found._prefix = f"{self.uri}/{path}", f"{self._prefix}{check_key(path)}/"
        return found

    def now(self) -> float:
        with self._reporting(""):
            time = server_time(self._probe())
        if time is None:
            raise StorageError(problem(self._label, self.uri, f"{self._endpoint} sends no Date header"))
        return time

    def _put(self, key: str, body: bytes, crc64nvme: int, condition: dict[str, Any]) -> str:
        for attempt in range(CONFLICTS):
            try:
                answer = self._client.put_object(
                    Bucket=self._bucket,
                    Key=self._name(key),
                    Body=body,
                    ChecksumCRC64NVME=encoded(crc64nvme),
                    **condition,
                )
                return answer["ETag"]
            except ClientError as error:
                if error.response["Error"].get("Code") != "ConditionalRequestConflict" or attempt + 1 == CONFLICTS:
                    raise
            pause(attempt)
        raise AssertionError("the last conflict is raised")

    def _probe(self) -> Mapping[str, str]:
        """Return the headers of a listing of one key, also of a forbidden one: a policy may allow objects only."""
        try:
            answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
            return answer["ResponseMetadata"]["HTTPHeaders"]
        except ClientError as error:
            if error.response["Error"].get("Code") not in _TOLERATED_AT_OPEN:
                raise
            return error.response["ResponseMetadata"]["HTTPHeaders"]

    def _server_date(self) -> str:
        try:
            return self._probe().get("date", "")
        except ClientError as error:
            return str(error.response["ResponseMetadata"]["HTTPHeaders"].get("date", ""))
        except BotoCoreError:
            return ""

    def _data_path(self) -> Bulk:
        from trainer.storage.crt import CrtBulk, endpoint_of

        # botocore's own rules (virtual hosts, dual stack, FIPS, partitions) decide the address.
        url = self._client.generate_presigned_url("get_object", Params={"Bucket": self._bucket, "Key": "k"})
        bucket = endpoint_of(url, "k", self._client.meta.region_name, _ca_file(self._session))
        credentials = self._session.get_credentials()
        if bucket is None or credentials is None:
            return BotoBulk(self._client, self._bucket)

        def current() -> tuple[str, str, str | None]:
            frozen = credentials.get_frozen_credentials()
            return frozen.access_key or "", frozen.secret_key or "", frozen.token

        return CrtBulk(bucket, current, self._attempts, self._server_date)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _shown(self, key: str) -> str:
        return f"{self.uri}/{key}" if key else self.uri

    def _context(self, key: str) -> ErrorContext:
        return ErrorContext(self._shown(key), self._bucket, self._endpoint, self._attempts, self._label)

    @contextmanager
    def _reporting(self, key: str, *, conditional: bool = False) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            line = of_boto(error, self._context(key))
            if conditional and isinstance(line, ObjectMissingError):
                line = PreconditionError(problem("object", self._shown(key), "was removed since it was read"))
            raise line from error


def split_uri(uri: str, name: str = "store") -> tuple[str, str]:
    """Return bucket and prefix (without slashes around it); UserError for anything but `s3://bucket/prefix`."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not uri.startswith("s3://") or not _BUCKET.fullmatch(bucket):
        allowed = "s3://bucket/prefix with a bucket of 3 to 63 lower-case letters, digits, dots and hyphens"
        raise UserError(problem(name, uri, "is not an S3 URI", allowed=allowed))
    if problems := bucket_problems(name, uri, bucket):
        raise UserError(problems)
    if prefix:
        check_key(prefix)
    return bucket, prefix


def connect(session: boto3.Session, region: str | None, attempts: int) -> S3Client:
    """Return a client that reaches buckets of AWS at their region's own host, also in the URLs that it makes.

    By default botocore puts the global host into URLs, where a new bucket answers with a redirect for hours, and one of a
    region launched after March 2019 with an error (https://docs.aws.amazon.com/AmazonS3/latest/userguide/VirtualHosting.html).
    """
    client = _client(session, region, attempts, "auto")
    if not _HOSTS_OF_AWS.search(urlsplit(client.meta.endpoint_url).hostname or ""):
        return client
    return _client(session, region, attempts, "virtual")


def _client(
    session: boto3.Session, region: str | None, attempts: int, addressing: Literal["auto", "virtual"]
) -> S3Client:
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        # Checksums are ours to choose: CRC-64/NVME is sent with every body, so no second one needs computing.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"us_east_1_regional_endpoint": "regional", "addressing_style": addressing},
    )
    return session.client("s3", region_name=region, config=config)


def _region() -> str | None:
    """Read AWS_REGION, which people and the other SDKs set; boto3 alone reads AWS_DEFAULT_REGION and the profile."""
    return os.environ.get("AWS_REGION") or None


def _attempts(default: int) -> int:
    value = os.environ.get("AWS_MAX_ATTEMPTS", "")
    if not value:
        return default
    if not value.isdecimal() or int(value) < 1:
        raise UserError(problem("AWS_MAX_ATTEMPTS", value, "is not a number of attempts", allowed="1, 2, 3, …"))
    return int(value)


def _ca_file(session: boto3.Session) -> str:
    """Return botocore's file of trusted certificates, so that both data paths trust the same."""
    return session._session.get_config_variable("ca_bundle") or where()


def _require_size(path: str, size: int) -> None:
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
    if end < size:
        raise SourceEndedError(f"ends at byte {end}")


def _body(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_at(fd, 0, size)
    finally:
        os.close(fd)
