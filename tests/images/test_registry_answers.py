"""What registries answer and users have configured is taken for what it says: its own code counts before its status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from images.plan.references import parse
from images.registry.credentials import for_registry
from images.registry.refusals import GO_ON, NEW_TAG, refusal

REFERENCE = parse("reg.example.com/team/x:t")
PUT = "PUT request to https://reg.example.com/v2/team/x/manifests/t:"


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        (f"{PUT} 400 Bad Request", NEW_TAG),
        (f"{PUT} 409 Conflict", NEW_TAG),
        (f"{PUT} 400 TAG_INVALID: The image tag 't' already exists and is immutable", NEW_TAG),
        (f"{PUT} 400 MANIFEST_INVALID: manifest invalid", "containerd"),
        (f"{PUT} 405 UNSUPPORTED: The operation is unsupported", "containerd"),
        (f"{PUT} 405 Method Not Allowed", "containerd"),
        (f"{PUT} 400 Layers with digests '[sha256:ab]' required for pushing image do not exist", GO_ON),
        ("429 TOOMANYREQUESTS: You have reached your pull rate limit", "docker login reg.example.com"),
    ],
)
def test_a_refusal_has_the_fix_that_the_registrys_words_ask_for(answer: str, fix: str) -> None:
    error = refusal("image", str(REFERENCE), answer, REFERENCE)
    assert error is not None
    assert fix in error.problems[0].fix  # type: ignore[attr-defined]


@pytest.mark.parametrize("answer", ["429 Too Many Requests", "503 Service Unavailable"])
def test_what_a_second_try_may_change_is_no_refusal(answer: str) -> None:
    assert refusal("image", str(REFERENCE), answer, REFERENCE) is None


def test_a_user_and_a_password_are_credentials_without_auth_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    entry = {"username": "ann", "password": "p:w"}
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"reg.example.com": entry}}))
    found = for_registry("reg.example.com")
    assert found is not None
    assert (found.username, found.password) == ("ann", "p:w")
