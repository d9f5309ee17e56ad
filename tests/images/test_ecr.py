"""An ECR is opened with a token from AWS, asked of the region in its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from images.plan.references import parse
from images.registry import ecr
from images.registry.credentials import for_registry
from images.registry.refusals import refusal
from infra.local.aws import LocalAws
from lustrain.problem import UserError
from rehearsal.lab.containers.base import ROOT
from rehearsal.lab.containers.engine import why_not
from tests.conftest import require
from tests.images.ecr_scene import HOST
from tests.images.scripted import Said, scripted


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No docker configuration and no AWS credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    return monkeypatch


@pytest.mark.parametrize(
    ("host", "region"),
    [
        (HOST, "us-east-1"),
        ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        ("123456789012.dkr.ecr-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
        ("123456789012.dkr-ecr.eu-central-1.on.aws", "eu-central-1"),
        *((host, None) for host in ("public.ecr.aws", "ghcr.io", f"{HOST}.evil.com", f"evil.com/{HOST}", HOST[1:])),
    ],
)
def test_the_region_is_in_the_name_of_an_ecr_and_of_nothing_else(host: str, region: str | None) -> None:
    assert ecr.region_of(host) == region


@pytest.mark.slow
def test_the_token_is_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalAws() as aws:
        monkeypatch.setenv("AWS_ENDPOINT_URL", aws.endpoint)
        found = for_registry(HOST)
    assert found
    assert (found.username, found.password) == ("AWS", "123456789012-auth-token")
    assert "auth-token" not in repr(found)


@pytest.mark.usefixtures("nobody")
def test_without_aws_credentials_a_docker_login_or_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"NoCredentialsError.*; fix: log in to AWS") as caught:
        for_registry(HOST)
    assert len(caught.value.problems) == 1
    (tmp_path / "config.json").write_text(json.dumps({"auths": {HOST: {"auth": "QVdTOnRva2Vu"}}}))
    found = for_registry(HOST)
    assert found
    assert (found.username, found.password) == ("AWS", "token")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("ExpiredTokenException", "have expired"),
        ("UnrecognizedClientException", "does not know the credentials"),
        ("AccessDeniedException", "allow ecr:GetAuthorizationToken"),
        ("SomethingElse", "gave no token"),
        ("", "answered with no token"),
    ],
)
def test_what_aws_refuses_is_one_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, why: str
) -> None:
    """moto refuses nobody; https://docs.aws.amazon.com/AmazonECR/latest/APIReference/CommonErrors.html says how."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    refusal = Said(400, json.dumps({"__type": code, "message": "no"}).encode(), {"x-amzn-ErrorType": code})
    answer = refusal if code else Said(200, b'{"authorizationData": []}')
    with scripted(lambda asked: answer) as fake:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{fake.host}")
        with pytest.raises(UserError, match=why) as caught:
            for_registry(HOST)
    assert len(caught.value.problems) == 1
    assert "us-east-1" in str(fake.asked[0].headers["Authorization"])


def test_missing_repository_is_one_line_with_the_command_for_it() -> None:
    error = refusal("push", "x", "404 NAME_UNKNOWN", parse(f"{HOST}/team/a:1"))
    assert "aws ecr create-repository --region us-east-1 --repository-name team/a" in str(error)


@pytest.mark.slow
def test_push_to_real_host_name_passes_with_a_token_renewed_once(tmp_path: Path) -> None:
    require(why_not() is None, str(why_not()))
    command = ["unshare", "-m", sys.executable, "-m", "tests.images.ecr_scene", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    environment["DOCKER_CONFIG"] = str(tmp_path)
    hosts = Path("/etc/hosts").read_bytes()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["token"] == "123456789012-auth-token"
    assert told["digest"] == told["held"] == told["refreshed"]
    (line,) = told["refused"]
    assert "refuses the credentials of user 'AWS'" in line
    assert told["token"] not in line
    assert told["statuses"] == [401]
    assert Path("/etc/hosts").read_bytes() == hosts
    assert HOST.encode() not in hosts
