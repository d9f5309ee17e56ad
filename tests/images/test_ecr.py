"""An ECR is opened with a token from AWS, asked of the region in its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from images.registry import ecr
from images.registry.credentials import for_registry
from infra.local.aws import LocalAws
from lustrain.problem import UserError
from rehearsal.lab.containers.base import ROOT
from rehearsal.lab.containers.engine import why_not
from tests.conftest import require
from tests.images.ecr_scene import HOST
from tests.images.scripted import Said, scripted


@pytest.fixture(scope="module")
def aws() -> Iterator[LocalAws]:
    with LocalAws() as running:
        yield running


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No docker configuration and no AWS credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize(
    ("host", "region"),
    [
        (HOST, "us-east-1"),
        ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        ("123456789012.dkr.ecr-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
        ("123456789012.dkr-ecr.eu-central-1.on.aws", "eu-central-1"),
        ("public.ecr.aws", None),
        ("ghcr.io", None),
        (f"{HOST}.evil.com", None),
        (f"evil.com/{HOST}", None),
        ("12345.dkr.ecr.us-east-1.amazonaws.com", None),
    ],
)
def test_the_region_is_in_the_name_of_an_ecr_and_of_nothing_else(host: str, region: str | None) -> None:
    assert ecr.region_of(host) == region


@pytest.mark.slow
def test_the_token_is_a_password_for_twelve_hours(aws: LocalAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.endpoint)
    found = for_registry(HOST)
    assert found
    assert (found.username, found.password) == ("AWS", "123456789012-auth-token")
    assert found.ends
    # moto's tokens ended in 2015, as they seem to where a clock is off: they are good for as long as AWS says all the same.
    assert found.ends > datetime.now(UTC) + timedelta(hours=11)
    assert not found.stale
    assert found.renewed().password == found.password
    assert "auth-token" not in repr(found)


def test_no_aws_credentials_is_one_line(nobody: pytest.MonkeyPatch) -> None:
    nobody.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        UserError, match=r"no AWS credentials were found .NoCredentialsError.; fix: log in to AWS"
    ) as caught:
        for_registry(HOST)
    assert len(caught.value.problems) == 1


def test_without_aws_a_docker_login_is_taken(nobody: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nobody.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
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
    ],
)
def test_what_aws_refuses_is_one_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, why: str
) -> None:
    """moto refuses nobody; https://docs.aws.amazon.com/AmazonECR/latest/APIReference/CommonErrors.html says how."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    answer = Said(400, json.dumps({"__type": code, "message": "no"}).encode(), {"x-amzn-ErrorType": code})
    with scripted(lambda asked: answer) as fake:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{fake.host}")
        with pytest.raises(UserError, match=why) as caught:
            for_registry(HOST)
    assert len(caught.value.problems) == 1
    assert "us-east-1" in str(fake.asked[0].headers["Authorization"])


def test_an_answer_without_a_token_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with scripted(lambda asked: Said(200, b'{"authorizationData": []}')) as fake:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{fake.host}")
        with pytest.raises(UserError, match="answered with no token"):
            for_registry(HOST)


@pytest.mark.slow
def test_a_missing_repository_is_told_with_the_command_that_makes_it() -> None:
    assert "aws ecr create-repository --region us-east-1 --repository-name team/a" in ecr.missing(HOST, "team/a")


@pytest.mark.slow
def test_a_push_to_the_real_host_name_goes_through_with_a_token_renewed_once(tmp_path: Path) -> None:
    require(why_not() is None, str(why_not()))
    command = ["unshare", "-m", sys.executable, "-m", "tests.images.ecr_scene", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    environment["DOCKER_CONFIG"] = str(tmp_path)
    hosts = Path("/etc/hosts").read_bytes()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["token"] == "123456789012-auth-token"
    assert told["digest"] == told["held"]
    assert told["refreshed"] == told["held"]
    assert "does not take the credentials of user 'AWS'" in told["refused"]
    # One token at first and one after the refusal; the registry is asked without, with the first, and with the second.
    assert told["tokens"] == 2
    assert set(told["statuses"]) == {401}
    assert told["token"] not in told["refused"]
    assert Path("/etc/hosts").read_bytes() == hosts
    assert HOST.encode() not in hosts
