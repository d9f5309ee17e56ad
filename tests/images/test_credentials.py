"""Who we are to a registry comes from the docker configuration or from AWS, and nothing of it is ever shown."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from images.registry.credentials import Credentials, for_registry
from lustrain.problem import UserError

SECRET = "s3cret-words"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """config.json of a user who has nothing else."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "config.json"


def login(config: Path, host: str, user: str = "ann", password: str = SECRET) -> None:
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    config.write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "docker-credential-vault"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_login_is_found_by_its_host(config: Path) -> None:
    login(config, "ghcr.io")
    found = for_registry("ghcr.io")
    assert found
    assert (found.username, found.password) == ("ann", SECRET)
    assert for_registry("quay.io") is None


def test_docker_hub_is_found_under_the_name_that_docker_login_writes(config: Path) -> None:
    login(config, "https://index.docker.io/v1/")
    assert for_registry("docker.io")


@pytest.mark.parametrize("text", [None, "{}", '{"auths": {}}', '{"auths": {"ghcr.io": {}}}', '{"experimental": "on"}'])
def test_who_never_logged_in_is_nobody(config: Path, text: str | None) -> None:
    if text is not None:
        config.write_text(text)
    assert for_registry("ghcr.io") is None


def test_a_login_that_changed_is_read_again(config: Path) -> None:
    login(config, "ghcr.io")
    before = for_registry("ghcr.io")
    login(config, "ghcr.io", password="another")
    after = for_registry("ghcr.io")
    assert before
    assert after
    assert (before.password, after.password) == (SECRET, "another")


@pytest.mark.parametrize("key", ["credsStore", "credHelpers"])
def test_a_credential_helper_is_asked(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    helper(tmp_path, monkeypatch, f"""printf '{{"Username": "bob", "Secret": "{SECRET}"}}'""")
    config.write_text(json.dumps({key: "vault" if key == "credsStore" else {"ghcr.io": "vault"}}))
    found = for_registry("ghcr.io")
    assert found
    assert (found.username, found.password) == ("bob", SECRET)
    assert (for_registry("quay.io") is None) == (key == "credHelpers")


def test_an_identity_token_stays_one(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper(tmp_path, monkeypatch, f"""printf '{{"Username": "<token>", "Secret": "{SECRET}"}}'""")
    config.write_text(json.dumps({"credsStore": "vault"}))
    found = for_registry("ghcr.io")
    assert found
    assert found.identity_token == SECRET


def test_a_helper_that_is_not_there_is_one_line(config: Path) -> None:
    config.write_text(json.dumps({"credsStore": "nowhere"}))
    with pytest.raises(UserError, match=r"docker-credential-nowhere.*is not on PATH.*fix:") as caught:
        for_registry("ghcr.io")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("script", [f"echo {SECRET}; exit 1", f"echo {SECRET}", "echo '{}'", "echo '[]'"])
def test_a_helper_that_fails_is_one_line_without_what_it_said(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    helper(tmp_path, monkeypatch, script)
    config.write_text(json.dumps({"credHelpers": {"ghcr.io": "vault"}}))
    with pytest.raises(UserError, match=r"the credential helper failed for ghcr\.io") as caught:
        for_registry("ghcr.io")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '"x"', '{"auths": 3}', '{"auths": {"ghcr.io": {"auth": "%%%"}}}', '{"auths": {"a": "s3cret-words"}}'],
)
def test_a_configuration_that_cannot_be_read_is_one_line(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(UserError, match=r"cannot be read as docker's config\.json.*docker login. again") as caught:
        for_registry("ghcr.io")
    assert SECRET not in str(caught.value)
    assert caught.value.exit_code == 2


def test_nothing_secret_is_printed() -> None:
    one = Credentials("ann", SECRET, SECRET)
    assert SECRET not in repr(one)
    assert one.hide(f"user ann has {SECRET}.") == "user ann has ***."
    assert Credentials("ann", "").hide("ann") == "ann"
