"""What a registry's client believes and whom it tells: digests, tokens, and nobody's passwords but those for this host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from images.registry import http, tags
from images.registry.client import Registry
from images.registry.credentials import Credentials
from lustrain.problem import UserError
from tests.images.scripted import Asked, Said, scripted
from tests.images.shelf import digest_of

OURS, OTHER = b'{"schemaVersion": 2, "a": 1}', b'{"schemaVersion": 2, "b": 2}'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TRIES", 2)
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)


def client(host: str) -> Registry:
    return Registry(host, lambda host: None)


@pytest.mark.parametrize("headers", [{"Docker-Content-Digest": digest_of(OTHER)}, {}])
def test_manifest_requested_by_digest_has_that_digest(
    headers: dict[str, str],
) -> None:
    with scripted(lambda asked: Said(200, OTHER, headers), greets=True) as fake:
        with pytest.raises(UserError, match="does not have the requested digest"):
            client(fake.host).manifest(f"{fake.host}/a@{digest_of(OURS)}")
        assert client(fake.host).manifest(f"{fake.host}/a@{digest_of(OTHER)}").body == OTHER
        assert client(fake.host).digest_of(f"{fake.host}/a:1") == digest_of(OTHER)


def test_manifest_has_the_digest_of_its_tag_in_the_registry() -> None:
    answer = Said(200, OURS, {"Docker-Content-Digest": digest_of(OTHER)})
    with (
        scripted(lambda asked: answer) as fake,
        pytest.raises(UserError, match="not have the requested digest"),
    ):
        client(fake.host).manifest(f"{fake.host}/a:1")


def test_an_ecr_that_says_403_of_an_ended_token_gets_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    passwords = iter(["ended", "fresh"])
    fresh = Credentials("AWS", "fresh").basic

    def answer(asked: Asked) -> Said:
        if asked.headers.get("Authorization") == f"Basic {fresh}":
            return Said(200, OURS)
        status = 403 if asked.headers.get("Authorization") else 401
        return Said(status, headers={"WWW-Authenticate": 'Basic realm="x"'} if status == 401 else {})

    with scripted(answer, greets=True) as fake:
        monkeypatch.setattr(http.ecr, "region_of", lambda host: "us-east-1")
        there = Registry(fake.host, lambda host: Credentials("AWS", next(passwords)))
        assert there.manifest(f"{fake.host}/a:1").body == OURS


def test_a_netrc_is_not_for_registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password hunter22\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with scripted(lambda asked: Said(200, OURS), greets=True) as fake:
        client(fake.host).manifest(f"{fake.host}/a:1")
    assert all("Authorization" not in asked.headers for asked in fake.asked)


def test_a_token_is_for_one_repository_and_one_kind_of_request() -> None:
    def token(asked: Asked) -> Said:
        return Said(200, json.dumps({"token": asked.path.partition("scope=")[2]}).encode())

    with scripted(token) as tokens:

        def answer(asked: Asked) -> Said:
            repository = asked.path.split("/")[2]
            scope = f"{repository}-{asked.method}"
            if asked.headers.get("Authorization") == f"Bearer {scope}":
                return Said(200, OURS)
            realm = f'Bearer realm="http://{tokens.host}/token",scope="{scope}"'
            return Said(401, headers={"WWW-Authenticate": realm})

        with scripted(answer, greets=True) as fake:
            there = client(fake.host)
            for name in ("a", "b", "a"):
                assert there.manifest(f"{fake.host}/{name}:1").body == OURS
            there.put_manifest(f"{fake.host}/a:2", OURS, "x")
            assert there.manifest(f"{fake.host}/a:1").body == OURS
    assert [asked.path.partition("scope=")[2] for asked in tokens.asked] == ["a-GET", "b-GET", "a-PUT"]


def test_tag_of_the_same_image_compressed_otherwise_stays() -> None:
    config = {"digest": digest_of(b"{}")}
    ours, theirs = (json.dumps({"config": config, "layers": [name]}).encode() for name in ("gzip -6", "gzip -9"))
    with scripted(lambda asked: Said(200, ours if digest_of(ours) in asked.path else theirs), greets=True) as fake:
        assert tags.tag(f"{fake.host}/a:1", digest_of(ours)) == digest_of(theirs)
    assert {asked.method for asked in fake.asked} == {"GET"}


def test_docker_hub_is_asked_at_its_registry(only_loopback: list[str]) -> None:
    with pytest.raises(AssertionError, match=r"registry-1\.docker\.io"):
        client("docker.io").digest_of("docker.io/library/debian:12")
    only_loopback.clear()


def test_put_with_lost_answer_is_well_where_tag_has_its_content() -> None:
    """An ECR with immutable tags refuses to be told twice what it has taken."""
    held: dict[str, bytes] = {}

    def answer(asked: Asked) -> Said:
        if asked.method == "PUT":
            held["tag"] = asked.body
            return Said(400, b'{"errors": [{"code": "TAG_INVALID", "message": "the tag is immutable"}]}')
        found = OURS if digest_of(OURS) in asked.path else held.get("tag")
        return Said(200, found, {"Content-Type": "x"}) if found else Said(404)

    with scripted(answer, greets=True) as fake:
        ref, digest = f"{fake.host}/a:1", digest_of(OURS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tags, "connect", lambda reference: client(fake.host))
            assert tags.tag(ref, digest) == digest
            held["tag"] = OTHER
            with pytest.raises(UserError, match="already names a different image") as caught:
                tags.tag(ref, digest)
    assert caught.value.exit_code == 2
