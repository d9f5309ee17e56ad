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


def login(config: Path, host: str, password: str = SECRET) -> None:
    auth = base64.b64encode(f"ann:{password}".encode()).decode()
    config.write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "docker-credential-vault"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_login_is_found_by_its_host_and_read_anew_each_time(config: Path) -> None:
    for password in (SECRET, "another"):
        login(config, "ghcr.io", password=password)
        assert for_registry("ghcr.io") == Credentials("ann", password)
    assert for_registry("quay.io") is None
    # The name that `docker login` writes for Docker Hub.
    login(config, "https://index.docker.io/v1/")
    assert for_registry("docker.io") == Credentials("ann", SECRET)


@pytest.mark.parametrize("text", [None, "{}", '{"auths": {}}', '{"auths": {"ghcr.io": {}}}', '{"experimental": "on"}'])
def test_who_never_logged_in_is_nobody(config: Path, text: str | None) -> None:
    if text is not None:
        config.write_text(text)
    assert for_registry("ghcr.io") is None


@pytest.mark.parametrize("key", ["credsStore", "credHelpers"])
@pytest.mark.parametrize(("user", "secrets"), [("bob", (SECRET, None)), ("<token>", ("", SECRET))])
def test_credential_helper_gives_a_password_or_an_identity_token(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    user: str,
    secrets: tuple[str, str | None],
) -> None:
    helper(tmp_path, monkeypatch, f"""printf '{{"Username": "{user}", "Secret": "{SECRET}"}}'""")
    config.write_text(json.dumps({key: "vault" if key == "credsStore" else {"ghcr.io": "vault"}}))
    found = for_registry("ghcr.io")
    assert found
    assert (found.password, found.identity_token) == secrets
    assert (for_registry("quay.io") is None) == (key == "credHelpers")


def test_a_helper_that_is_not_there_is_one_line(config: Path) -> None:
    config.write_text(json.dumps({"credsStore": "nowhere"}))
    with pytest.raises(UserError, match=r"docker-credential-nowhere.*is not on PATH") as caught:
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
