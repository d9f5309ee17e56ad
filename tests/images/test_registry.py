"""What a registry says is checked, who we are is told to nobody else, and every refusal is one line with its way out."""

from __future__ import annotations

import base64
import json
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from images.plan.references import parse
from images.registry import http
from images.registry.client import DOCKER_MANIFEST, Registry
from images.registry.credentials import Credentials
from images.registry.refusals import refusal
from lustrain.problem import UserError
from rehearsal.lab.containers import registry as lab
from rehearsal.lab.containers.engine import why_not
from tests.conftest import require
from tests.images.scripted import Asked, Said, Scripted, scripted
from tests.images.seeds import put_blob, put_image
from tests.images.shelf import digest_of
from tests.lab.faulty_proxy import Answer, Cut, Fault, FaultyProxy, Reset, Swap

SECRET = "correct horse battery"
MANIFEST = b'{"schemaVersion": 2, "config": {"digest": "sha256:0"}}'


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[lab.Registry]:
    require(why_not() is None, str(why_not()))
    with lab.Registry(tmp_path / "closed", users={"ann": SECRET}, tls=True) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TRIES", 3)
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def trusted(closed: lab.Registry, monkeypatch: pytest.MonkeyPatch) -> lab.Registry:
    """A registry with TLS and users, whose CA this user trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(closed.ca))
    return closed


def client(registry: lab.Registry | Scripted | str, credentials: Credentials | None = None) -> Registry:
    return Registry(registry if isinstance(registry, str) else registry.host, lambda host: credentials)


def line_of(caught: pytest.ExceptionInfo[UserError]) -> str:
    (line,) = caught.value.problems
    assert "\n" not in line
    assert SECRET not in line
    assert base64.b64encode(f"ann:{SECRET}".encode()).decode() not in line
    return line


@pytest.mark.slow
def test_what_is_in_a_real_registry_is_read_back(registry: lab.Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = b"x" * 3_000_000
    digest = put_image(registry, "team/a", "1", layer, {"Labels": {"a": "b"}})
    there, ref = client(registry), f"{registry.host}/team/a:1"
    manifest = there.manifest(ref)
    assert (manifest.digest, manifest.media_type) == (digest, DOCKER_MANIFEST)
    assert there.digest_of(ref) == digest
    assert there.manifest(f"{registry.host}/team/a@{digest}").body == manifest.body
    config = json.loads(manifest.body)["config"]["digest"]
    assert json.loads(there.blob(ref, config))["Labels"] == {"a": "b"}
    monkeypatch.setattr(http, "LONGEST", len(layer))
    assert there.blob(ref, digest_of(layer)) == layer
    monkeypatch.setattr(http, "LONGEST", len(layer) - 1)
    with pytest.raises(UserError, match="longer than 2999999 bytes"):
        there.blob(ref, digest_of(layer))


@pytest.mark.slow
def test_tag_that_is_not_there_has_no_digest_until_one_is_put(registry: lab.Registry) -> None:
    digest = put_image(registry, "team/a")
    there, ref, free = client(registry), f"{registry.host}/team/a:1", f"{registry.host}/team/a:2"
    assert (there.digest_of(free), there.digest_of(f"{registry.host}/team/never:1")) == (None, None)
    with pytest.raises(UserError) as caught:
        there.manifest(free)
    assert "see the spelling" in line_of(caught)
    manifest = there.manifest(ref)
    there.put_manifest(free, manifest.body, manifest.media_type)
    assert there.digest_of(free) == digest


@pytest.mark.slow
def test_a_password_opens_a_registry_with_tls_and_no_other_does(trusted: lab.Registry) -> None:
    put_image(trusted, "team/a")
    ref = f"{trusted.host}/team/a:1"
    assert client(trusted, Credentials("ann", SECRET)).digest_of(ref)
    with pytest.raises(UserError) as caught:
        client(trusted, Credentials("ann", "wrong")).digest_of(ref)
    assert "refuses the credentials of user 'ann'" in line_of(caught)
    with pytest.raises(UserError) as caught:
        client(trusted).digest_of(ref)
    assert "requests without credentials, and none for it were found" in line_of(caught)
    assert f"fix: docker login {trusted.host}" in line_of(caught)


@pytest.mark.slow
def test_certificate_of_an_unknown_ca_is_refused_at_once(closed: lab.Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    pauses: list[object] = []
    monkeypatch.setattr(http, "time", SimpleNamespace(sleep=pauses.append))
    with pytest.raises(UserError) as caught:
        client(closed, Credentials("ann", SECRET)).digest_of(f"{closed.host}/team/a:1")
    assert "is not signed by a known CA" in line_of(caught)
    assert pauses == []
    assert not [one for one in closed.requests() if "team" in one[1]]
    monkeypatch.setenv("SSL_CERT_FILE", str(closed.ca))
    assert client(closed, Credentials("ann", SECRET)).digest_of(f"{closed.host}/team/a:1") is None


@pytest.mark.slow
def test_password_that_changed_under_way_is_looked_up_once_more(trusted: lab.Registry) -> None:
    put_image(trusted, "team/a")
    ref, passwords = f"{trusted.host}/team/a:1", [SECRET, "new one", "old"]
    there = Registry(trusted.host, lambda host: Credentials("ann", passwords.pop(0)))
    assert there.digest_of(ref)
    assert len(passwords) == 2
    trusted.set_users({"ann": "new one"})
    assert there.digest_of(ref)
    assert len(passwords) == 1
    trusted.set_users({"ann": "newer still"})
    with pytest.raises(UserError, match="refuses the credentials"):
        there.digest_of(ref)
    assert passwords == []


@pytest.mark.parametrize(
    ("error", "said", "told"),
    [
        (socket.EAI_NONAME, "Name or service not known", "in 3 tries: Name or service not known"),
        (socket.EAI_AGAIN, "Temporary failure in name resolution", "in 6 tries: Temporary failure in name resolution"),
    ],
)
def test_name_without_owner_is_reported_before_a_failed_lookup(
    monkeypatch: pytest.MonkeyPatch, error: int, said: str, told: str
) -> None:
    def nobody(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(error, said)

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr(http, "TRIES", 6)
    with pytest.raises(UserError) as caught:
        client("registry.invalid").manifest("registry.invalid/team/a:1")
    assert told in line_of(caught)


def test_a_registry_that_is_gone_is_one_line_after_bounded_tries(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(UserError) as caught:
        client("127.0.0.1:1").digest_of("127.0.0.1:1/a:1")
    assert "in 3 tries: Connection refused" in line_of(caught)
    assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ([Reset(), Answer(503)], ""),
        ([Cut(0.5), Cut(0.5)], ""),
        ([Cut(0.0)] * 3, "in 3 tries: IncompleteRead"),
        ([Swap(1)], "have a different sha256 sum"),
    ],
)
def test_blob_that_breaks_off_is_requested_again(registry: lab.Registry, faults: list[Fault], told: str) -> None:
    config = bytes(range(256)) * 2000
    digest = put_blob(registry, "a", config)
    with FaultyProxy(registry.url) as proxy:
        host = proxy.endpoint.removeprefix("http://")
        for fault in faults:
            proxy.inject(fault, times=1, key="/blobs/")
        if told:
            with pytest.raises(UserError) as caught:
                client(host).blob(f"{host}/a", digest)
            assert told in line_of(caught)
        else:
            assert client(host).blob(f"{host}/a", digest) == config
        assert sum(proxy.did.values()) == len(faults)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("86400", 60), ("7", 7), ("soon", 0), ("", 0), ("Thu, 01 Jan 2026 00:00:00 GMT", 0)],
)
def test_registry_gets_the_time_it_requests_up_to_a_minute(
    monkeypatch: pytest.MonkeyPatch, header: str, seconds: int
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(http, "time", SimpleNamespace(sleep=pauses.append))
    answers = [Said(429, headers={"Retry-After": header}), Said(200, MANIFEST)]
    with scripted(lambda asked: answers.pop(0)) as fake:
        client(fake).manifest(f"{fake.host}/a:1")
    (pause,) = pauses
    assert seconds <= pause <= seconds + 0.01


def test_a_busy_registry_that_stays_so_is_one_line() -> None:
    with scripted(lambda asked: Said(429, b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "slow"}]}')) as fake:
        with pytest.raises(UserError) as caught:
            client(fake).manifest(f"{fake.host}/a:1")
        assert len(fake.asked) == 3
    assert "in 3 tries: 429 TOOMANYREQUESTS slow" in line_of(caught)


def test_redirect_to_another_host_carries_no_credentials() -> None:
    body = b"a blob"
    with scripted(lambda asked: Said(200, body), "127.0.0.2") as storage:

        def sends_there(asked: Asked) -> Said:
            if "Authorization" not in asked.headers:
                return Said(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
            return Said(307, headers={"Location": f"http://{storage.host}/store?signature=1"})

        with scripted(sends_there) as fake:
            blob = client(fake, Credentials("ann", SECRET)).blob(f"{fake.host}/a", digest_of(body))
            assert blob == body
    assert "Authorization" in fake.asked[-1].headers
    assert ["Authorization" in one.headers for one in storage.asked] == [False]


@pytest.mark.parametrize(
    ("place", "why"),
    [("http://192.0.2.1/blob", "which does not use TLS"), ("ftp://x/y", "does not use TLS"), ("/again", "redirects")],
)
def test_a_redirect_that_leaves_tls_or_never_ends_is_refused(place: str, why: str) -> None:
    with (
        scripted(lambda asked: Said(307, headers={"Location": place})) as fake,
        pytest.raises(UserError, match=why),
    ):
        client(fake).blob(f"{fake.host}/a", digest_of(b""))


def test_other_hosts_are_asked_with_tls_only(only_loopback: list[str]) -> None:
    """Without TLS the client itself would refuse it before the guard of the tests does."""
    with pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        client("192.0.2.1:5000").digest_of("192.0.2.1:5000/a:1")
    only_loopback.clear()


def challenged(tokens: Scripted | str, good: Sequence[str] = ()) -> Callable[[Asked], Said]:
    """A registry that sends to a token service whoever has none of the good tokens."""
    host = tokens if isinstance(tokens, str) else tokens.host
    challenge = f'Bearer realm="http://{host}/token",service="reg",scope="repository:a:pull,push"'

    def answer(asked: Asked) -> Said:
        known = asked.headers.get("Authorization") in good
        return Said(200, MANIFEST) if known else Said(401, headers={"WWW-Authenticate": challenge})

    return answer


@pytest.mark.parametrize(("credentials", "key"), [(Credentials("ann", SECRET), "token"), (None, "access_token")])
def test_token_is_for_what_registry_requires_and_used_to_its_end(credentials: Credentials | None, key: str) -> None:
    given, good = iter(["one", "two"]), ["Bearer one"]
    with (
        scripted(lambda asked: Said(200, json.dumps({key: next(given)}).encode()), "127.0.0.2") as tokens,
        scripted(challenged(tokens, good)) as fake,
    ):
        there, ref = client(fake, credentials), f"{fake.host}/a:1"
        there.manifest(ref)
        there.manifest(ref)
        assert [one.path for one in tokens.asked] == ["/token?service=reg&scope=repository%3Aa%3Apull%2Cpush"]
        good[0] = "Bearer two"
        there.manifest(ref)
    assert len(tokens.asked) == 2
    sent = tokens.asked[0].headers.get("Authorization", "")
    assert sent == (f"Basic {credentials.basic}" if credentials else "")


def test_identity_token_is_exchanged_and_never_sent_to_registry() -> None:
    with (
        scripted(lambda asked: Said(200, b'{"access_token": "short"}')) as tokens,
        scripted(challenged(tokens, ["Bearer short"])) as fake,
    ):
        client(fake, Credentials("", "", SECRET)).manifest(f"{fake.host}/a:1")
    assert (tokens.asked[0].method, b"grant_type=refresh_token" in tokens.asked[0].body) == ("POST", True)
    assert SECRET not in str([dict(one.headers) for one in fake.asked])


@pytest.mark.parametrize("answer", [Said(401), Said(200, b"no json"), Said(200, b"{}")])
def test_a_token_service_that_refuses_is_one_line(answer: Said) -> None:
    with scripted(lambda asked: answer) as tokens, scripted(challenged(tokens)) as fake:
        with pytest.raises(UserError) as caught:
            client(fake, Credentials("ann", SECRET)).manifest(f"{fake.host}/a:1")
        assert len(fake.asked) == 1
    assert "refuses the credentials of user 'ann'" in line_of(caught)


def test_a_token_service_without_tls_elsewhere_is_told_nothing() -> None:
    with scripted(challenged("192.0.2.1")) as fake, pytest.raises(UserError) as caught:
        client(fake, Credentials("ann", SECRET)).manifest(f"{fake.host}/a:1")
    assert "http://192.0.2.1, which does not use TLS" in line_of(caught)


def test_what_is_forbidden_is_in_the_registrys_words_only() -> None:
    words = f"denied for {SECRET}, see https://s3/x?X-Amz-Signature=abc"
    body = json.dumps({"errors": [{"code": "DENIED", "message": words}]}).encode()
    with scripted(lambda asked: Said(403, body)) as fake, pytest.raises(UserError) as caught:
        client(fake, Credentials("ann", SECRET)).manifest(f"{fake.host}/a:1")
    line = line_of(caught)
    assert "DENIED denied for ***" in line
    assert "abc" not in line
    assert "ask for the right to pull from and push to a" in line


@pytest.mark.parametrize("answer", ["connection reset", "received unexpected HTTP status: 500 Internal Server Error"])
def test_a_name_that_looks_like_a_refusal_is_not_one(answer: str) -> None:
    reference = parse("denied-403.example.com/immutable/unauthorized:tag-invalid")
    url = f"https://{reference.registry}/v2/{reference.repository}/manifests/{reference.tag}"
    assert refusal("push", "x", f'{reference}: PUT "{url}": {answer}', reference) is None
