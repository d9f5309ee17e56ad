"""Both data paths over https, trusting the certificates that the user names and no others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme

from tests.conftest import require
from tests.images.certificates import certify
from tests.lab.faulty_proxy import FaultyProxy
from tests.lab.servers import S3Place
from trainer.storage import StorageError, open_store
from trainer.storage.bulk import BotoBulk
from trainer.storage.crt import CrtBulk
from trainer.storage.s3 import S3Store

HOST = f"127.81.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA, and a certificate for HOST with its key."""
    return certify(tmp_path_factory.mktemp("tls"), HOST).parent


@pytest.fixture(params=[443, 0], ids=["crt", "boto3"])
def endpoint(
    request: pytest.FixtureRequest, moto_s3: S3Place, tls: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    pair = (tls / "server.crt", tls / "server.key")
    try:
        proxy = FaultyProxy(moto_s3.endpoint, host=HOST, port=request.param, tls=pair)
    except PermissionError:
        require(False, "port 443 may not be bound here: run as root or lower net.ipv4.ip_unprivileged_port_start")
        raise
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with proxy:
        yield proxy.endpoint


@pytest.mark.slow
def test_objects_travel_over_https_to_a_trusted_server(
    endpoint: str, moto_s3: S3Place, tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls / "ca.crt"))
    store = open_store(moto_s3.uri())
    assert isinstance(store, S3Store)
    assert isinstance(store._bulk, BotoBulk if endpoint.count(":") == 2 else CrtBulk)
    body = os.urandom((9 << 20) + 1)
    fd = os.memfd_create("staged")
    os.write(fd, body)
    store.put_file("data", f"/proc/self/fd/{fd}", len(body), crc64nvme(body))
    os.close(fd)
    buffer = bytearray(len(body))
    store.read_into("data", memoryview(buffer))
    assert bytes(buffer) == body


def test_a_server_that_is_not_trusted_gets_nothing(endpoint: str, moto_s3: S3Place) -> None:
    with pytest.raises(StorageError, match=r"cannot reach https://.*certificate verify failed"):
        open_store(moto_s3.uri())
    assert moto_s3.client().list_objects_v2(Bucket=moto_s3.bucket)["KeyCount"] == 0
