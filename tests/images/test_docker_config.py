"""buildx is let into an ECR with a token of today, beside what the user has configured, and nothing of it stays."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest

from images.registry.credentials import docker_config
from infra.local.aws import LocalAws

ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com"


@pytest.mark.slow
def test_build_that_reaches_ecr_has_its_token_and_users_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli-plugins").mkdir()
    theirs = {"credsStore": "desktop", "auths": {"ghcr.io": {"auth": "eDp5"}}, "credHelpers": {"quay.io": "quay"}}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with LocalAws() as aws:
        for name, value in aws.environment.items():
            monkeypatch.setenv(name, value)
        with docker_config({ECR, "127.0.0.1:5000"}, {"DOCKER_CONFIG": str(tmp_path)}) as variables:
            folder = Path(variables["DOCKER_CONFIG"])
            found = json.loads((folder / "config.json").read_text())
            assert stat.S_IMODE((folder / "config.json").stat().st_mode) == 0o600
            assert (folder / "cli-plugins").resolve() == tmp_path / "cli-plugins"
    user, _, password = base64.b64decode(found["auths"][ECR]["auth"]).decode().partition(":")
    assert (user, bool(password)) == ("AWS", True)
    assert found["auths"]["ghcr.io"] == theirs["auths"]["ghcr.io"]  # type: ignore[index]
    # Docker asks the store for every registry that has no helper of its own; "" is none.
    assert (found["credsStore"], found["credHelpers"]) == ("desktop", {"quay.io": "quay", ECR: ""})
    assert not folder.exists()
    assert json.loads((tmp_path / "config.json").read_text()) == theirs


def test_helper_that_the_user_has_for_it_is_left_to_do_its_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"credHelpers": {ECR: "ecr-login"}}))
    with docker_config([ECR], {"DOCKER_CONFIG": str(tmp_path)}) as variables:
        found = json.loads((Path(variables["DOCKER_CONFIG"]) / "config.json").read_text())
    assert (found["credHelpers"], found["auths"]) == ({ECR: "ecr-login"}, {})


def test_without_an_ecr_nothing_is_made(tmp_path: Path) -> None:
    with docker_config(["ghcr.io"], {"HOME": str(tmp_path)}) as variables:
        assert variables == {}
