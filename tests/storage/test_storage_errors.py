"""Whatever keeps S3 from serving is one line that names the store, the cause and the fix."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
from awscrt.checksums import crc64nvme

from lustrain.problem import UserError
from tests.lab.faulty_proxy import Answer, FaultyProxy, Skew
from tests.lab.servers import S3Place
from trainer.errors import EXIT_CONFIG
from trainer.storage import StorageError, open_store
from trainer.storage.crt import CrtBulk
from trainer.storage.s3 import S3Store


def said(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    line = str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG
    assert len(caught.value.problems) == 1
    assert "\n" not in line
    assert "secret" not in line.replace("its secret", "")
    return line


@pytest.fixture
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")


def proxied(place: S3Place, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    proxy = FaultyProxy(place.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return proxy


@pytest.mark.slow
def test_a_missing_bucket_is_named_with_its_endpoint(s3: S3Place) -> None:
    line = said(lambda: open_store("s3://not-there/run", name="run.uri"))
    assert line.startswith("run.uri = 's3://not-there/run': ")
    assert f"there is no bucket not-there at {s3.endpoint}" in line
    assert "fix: create it" in line


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///run", "s3://Upper/run", "s3://a/run", "s3://bucket_x/run", "s3://b b/r"]
)
def test_a_wrong_uri_says_what_is_allowed(uri: str) -> None:
    line = said(lambda: open_store(uri, name="run.uri"))
    assert line.startswith("run.uri = ")
    assert "allowed: s3://bucket/prefix" in line


def test_absent_credentials_are_told_apart_from_refused_ones(moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    line = said(lambda: open_store(moto_s3.uri()))
    assert "no credentials" in line
    assert "fix: set AWS_PROFILE" in line
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    assert "no credentials" in said(lambda: open_store(moto_s3.uri()))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    line = said(lambda: open_store(moto_s3.uri(), name="run.uri"))
    assert line.startswith("run.uri = ")
    assert "nobody" in line
    assert "fix: check AWS_PROFILE and ~/.aws/config" in line


@pytest.mark.slow
def test_refused_credentials_are_named(weed_s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-one")
    assert "refuses the credentials (SignatureDoesNotMatch)" in said(lambda: open_store(weed_s3.uri()))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    assert "refuses the credentials (InvalidAccessKeyId)" in said(lambda: open_store(weed_s3.uri()))


@pytest.mark.usefixtures("two_attempts")
def test_an_unreachable_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        line = said(lambda: open_store("s3://bucket/run"))
    assert f"cannot reach {endpoint}" in line
    assert "2 attempts" in line
    assert "fix: check AWS_ENDPOINT_URL" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("off", "words"), [(-3600, "60 min ahead of"), (3600, "60 min behind"), (-86400, "24.0 h ahead of")]
)
def test_a_wrong_clock_is_told_with_its_size(
    moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch, off: float, words: str
) -> None:
    with proxied(moto_s3, monkeypatch) as proxy:
        proxy.inject(Skew(off, refuse=True))
        line = said(lambda: open_store(moto_s3.uri()))
        assert proxy.did["Skew"] == 1, "a refusal is not asked again"
    assert f"this machine's clock is {words} the store's" in line
    assert "fix: start chrony" in line


def test_the_clock_of_a_server_that_is_off_is_used_all_the_same(
    moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxied(moto_s3, monkeypatch) as proxy:
        store = open_store(moto_s3.uri())
        here = store.now()
        proxy.inject(Skew(3600))
        assert 3590 < store.now() - here < 3620


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Answer(503, "SlowDown"), "still answers 503 SlowDown after 2 attempts"),
        (Answer(500, "InternalError"), "still answers 500 InternalError after 2 attempts"),
        (Answer(403, "ExpiredToken"), "the credentials have expired"),
        (Answer(400, "AuthorizationHeaderMalformed"), "the bucket is in another region"),
        (Answer(418, "Teapot"), "answers 418 Teapot injected"),
    ],
)
@pytest.mark.usefixtures("two_attempts")
def test_a_refusal_is_explained(moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch, fault: Answer, words: str) -> None:
    with proxied(moto_s3, monkeypatch) as proxy:
        proxy.inject(fault)
        assert words in said(lambda: open_store(moto_s3.uri()))


def test_a_policy_that_forbids_listing_shows_when_something_is_denied(
    moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxied(moto_s3, monkeypatch) as proxy:
        proxy.inject(Answer(403, "AccessDenied"), key="list-type=2")
        store = open_store(moto_s3.uri())
        store.put("k", b"x")
        assert store.read("k")[0] == b"x"
        line = said(lambda: list(store.list()))
    assert "refuses: " in line
    assert (
        "fix: compare the role's and the bucket's (and the key's) policies with the permissions in docs/checkpoints.md"
        in line
    )


@pytest.mark.parametrize("attempts", ["0", "many", "-1"])
def test_a_wrong_number_of_attempts_is_refused(monkeypatch: pytest.MonkeyPatch, attempts: str) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", attempts)
    assert "AWS_MAX_ATTEMPTS" in said(lambda: open_store("s3://bucket/run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Answer(403, "AccessDenied"), "refuses: "),
        (Answer(503, "SlowDown"), "still answers 503 SlowDown after 2 attempts"),
        (Answer(404, "NoSuchBucket"), "there is no bucket"),
        (Skew(-7200, refuse=True), "2.0 h ahead of"),
    ],
)
@pytest.mark.usefixtures("two_attempts")
def test_the_fast_path_explains_refusals_as_well(
    moto_s3: S3Place, port_80: Callable[[S3Place], FaultyProxy], fault: Answer | Skew, words: str
) -> None:
    proxy = port_80(moto_s3)
    store = open_store(moto_s3.uri())
    assert isinstance(store, S3Store)
    assert isinstance(store._bulk, CrtBulk)
    size = 9 << 20
    body = bytes(size)
    fd = os.memfd_create("x")
    os.write(fd, body)
    store.put_file("there", f"/proc/self/fd/{fd}", size, crc64nvme(body))
    proxy.inject(fault)
    assert words in said(lambda: store.put_file("k", f"/proc/self/fd/{fd}", size, crc64nvme(body)))
    assert words in said(lambda: store.read_into("there", memoryview(bytearray(size))))
    os.close(fd)


@pytest.mark.usefixtures("two_attempts")
def test_the_fast_path_explains_a_server_that_is_gone(
    moto_s3: S3Place, port_80: Callable[[S3Place], FaultyProxy]
) -> None:
    proxy = port_80(moto_s3)
    store = open_store(moto_s3.uri())
    store.put("k", bytes(100))
    proxy.stop()
    line = said(lambda: store.read_into("k", memoryview(bytearray(100))))
    assert f"cannot reach {proxy.endpoint}" in line
    with pytest.raises(StorageError, match="cannot reach"):
        store.put("k", b"x")
