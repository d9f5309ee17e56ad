"""Whatever keeps S3 from serving is one line that names the store, the cause and the fix."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture(autouse=True)
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")


@pytest.fixture
def proxy(moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """On the way to moto."""
    with FaultyProxy(moto_s3.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.mark.slow
def test_a_missing_bucket_is_named_with_its_endpoint(s3: S3Place) -> None:
    line = said(lambda: open_store("s3://not-there/run", name="run.uri"))
    assert line.startswith(f"run.uri = 's3://not-there/run': there is no bucket not-there at {s3.endpoint}")


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///run", "s3://Upper/run", "s3://a/run", "s3://bucket_x/run", "s3://b b/r"]
)
def test_a_wrong_uri_is_told(uri: str) -> None:
    assert said(lambda: open_store(uri, name="run.uri")).startswith("run.uri = ")


@pytest.mark.parametrize("bucket", ["train--use1-az4--x-s3", "point--use1-az4--xa-s3"])
def test_directory_bucket_is_refused(bucket: str) -> None:
    line = said(lambda: open_store(f"s3://{bucket}/run", name="run.uri"))
    assert line.startswith(f"run.uri = 's3://{bucket}/run': is a directory bucket (S3 Express One Zone)")


def test_absent_credentials_differ_from_a_missing_profile(moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for variable, value, told in (
        ("AWS_REGION", "us-east-1", "no credentials"),
        ("AWS_ACCESS_KEY_ID", "local", "no credentials"),
        ("AWS_PROFILE", "nobody", "fix: check AWS_PROFILE and ~/.aws/config"),
    ):
        monkeypatch.setenv(variable, value)
        assert told in said(lambda: open_store(moto_s3.uri()))


@pytest.mark.slow
def test_refused_credentials_are_named(weed_s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-one")
    assert "refuses the credentials (SignatureDoesNotMatch)" in said(lambda: open_store(weed_s3.uri()))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    assert "refuses the credentials (InvalidAccessKeyId)" in said(lambda: open_store(weed_s3.uri()))


def test_an_unreachable_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        line = said(lambda: open_store("s3://bucket/run"))
    assert f"cannot reach {endpoint}" in line
    assert "2 attempts" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words", "times"),
    [
        (Skew(-3600, refuse=True), "60 min ahead of", 1),
        (Skew(3600, refuse=True), "60 min behind", 1),
        (Skew(-86400, refuse=True), "24.0 h ahead of", 1),
        (Answer(503, "SlowDown"), "still answers 503 SlowDown after 2 attempts", 2),
        (Answer(500, "InternalError"), "still answers 500 InternalError after 2 attempts", 2),
        (Answer(403, "ExpiredToken"), "the credentials have expired", 1),
        (Answer(400, "AuthorizationHeaderMalformed"), "the bucket is in another region", 1),
        (Answer(418, "Teapot"), "answers 418 Teapot injected", 1),
    ],
)
def test_refusal_is_explained_and_retried_where_that_may_help(
    proxy: FaultyProxy, moto_s3: S3Place, fault: Answer | Skew, words: str, times: int
) -> None:
    proxy.inject(fault)
    assert words in said(lambda: open_store(moto_s3.uri()))
    assert sum(proxy.did.values()) == times


def test_the_clock_of_a_server_that_is_off_is_used_all_the_same(proxy: FaultyProxy, moto_s3: S3Place) -> None:
    store = open_store(moto_s3.uri())
    here = store.now()
    proxy.inject(Skew(3600))
    assert 3590 < store.now() - here < 3620


def test_policy_that_forbids_listing_shows_at_a_denial(proxy: FaultyProxy, moto_s3: S3Place) -> None:
    proxy.inject(Answer(403, "AccessDenied"), key="list-type=2")
    store = open_store(moto_s3.uri())
    store.put("k", b"x")
    assert store.read("k")[0] == b"x"
    line = said(lambda: list(store.list()))
    assert "refuses: " in line
    assert "policies with the permissions in docs/checkpoints.md" in line


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
def test_the_fast_path_explains_refusals_as_well(
    moto_s3: S3Place, port_80: Callable[[S3Place], FaultyProxy], tmp_path: Path, fault: Answer | Skew, words: str
) -> None:
    proxy = port_80(moto_s3)
    store = open_store(moto_s3.uri())
    assert isinstance(store, S3Store)
    assert isinstance(store._bulk, CrtBulk)
    body = bytes(9 << 20)
    (tmp_path / "file").write_bytes(body)
    file = (str(tmp_path / "file"), len(body), crc64nvme(body))
    store.put_file("there", *file)
    proxy.inject(fault)
    assert words in said(lambda: store.put_file("k", *file))
    assert words in said(lambda: store.read_into("there", memoryview(bytearray(len(body)))))


def test_the_fast_path_explains_a_server_that_is_gone(
    moto_s3: S3Place, port_80: Callable[[S3Place], FaultyProxy]
) -> None:
    proxy = port_80(moto_s3)
    store = open_store(moto_s3.uri())
    store.put("k", bytes(100))
    proxy.stop()
    assert f"cannot reach {proxy.endpoint}" in said(lambda: store.read_into("k", memoryview(bytearray(100))))
    with pytest.raises(StorageError, match="cannot reach"):
        store.put("k", b"x")
