"""The instance metadata server behaves like IMDSv2 towards a node, and does what a script tells it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest

from infra.local.metadata import LocalMetadata
from tests.processes import wait_until

META = "/latest/meta-data/"


def ask(url: str, method: str = "GET", body: bytes = b"", **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body or None, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def token(imds: LocalMetadata, ttl: str = "21600", **headers: str) -> tuple[int, str]:
    headers["X_aws_ec2_metadata_token_ttl_seconds"] = ttl
    return ask(f"{imds.endpoint}/latest/api/token", "PUT", b"", **headers)


def get(imds: LocalMetadata, path: str, with_token: str) -> tuple[int, str]:
    return ask(f"{imds.endpoint}{META}{path}", X_aws_ec2_metadata_token=with_token)


def test_nothing_is_told_without_a_token(imds: LocalMetadata) -> None:
    assert ask(f"{imds.endpoint}{META}instance-id")[0] == 401
    assert get(imds, "instance-id", "made-up")[0] == 401
    assert get(imds, "instance-id", token(imds)[1]) == (200, "i-0123456789abcdef0")


@pytest.mark.parametrize(
    ("ttl", "headers", "status"),
    [
        *((ttl, {}, 400) for ttl in ("0", "21601", "-1", "soon")),
        *((ttl, {}, 200) for ttl in ("1", "21600")),
        ("60", {"X_Forwarded_For": "10.0.0.1"}, 403),
    ],
)
def test_token_with_an_impossible_life_or_for_a_proxy_is_refused(
    imds: LocalMetadata, ttl: str, headers: dict[str, str], status: int
) -> None:
    assert token(imds, ttl, **headers)[0] == status


@pytest.mark.slow
def test_a_token_expires(imds: LocalMetadata) -> None:
    good, short = token(imds)[1], token(imds, "1")[1]
    wait_until(lambda: get(imds, "instance-id", short)[0] == 401)
    assert get(imds, "instance-id", good)[0] == 200
    imds.expire_tokens()
    assert get(imds, "instance-id", good)[0] == 401


def test_a_spot_notice_appears_when_the_script_says_so(imds: LocalMetadata) -> None:
    good = token(imds)[1]
    assert get(imds, "spot/instance-action", good)[0] == 404
    before = datetime.now(UTC)
    imds.spot_notice(in_s=120)
    after = datetime.now(UTC)
    notice = json.loads(get(imds, "spot/instance-action", good)[1])
    assert notice["action"] == "terminate"
    at = datetime.strptime(notice["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert before + timedelta(seconds=119) <= at <= after + timedelta(seconds=120)
    imds.clear()
    assert get(imds, "spot/instance-action", good)[0] == 404


def test_another_process_may_drive_it(imds: LocalMetadata) -> None:
    good = token(imds)[1]
    assert ask(f"{imds.control}/control/rebalance", "POST")[0] == 200
    assert "noticeTime" in json.loads(get(imds, "events/recommendations/rebalance", good)[1])
    assert ask(f"{imds.control}/control/lifecycle", "POST", b'{"state": "Terminated"}')[0] == 200
    assert get(imds, "autoscaling/target-lifecycle-state", good) == (200, "Terminated")
    assert ask(f"{imds.control}/control/fail", "POST", b'{"count": 2, "status": 503}')[0] == 200
    assert [get(imds, "instance-id", good)[0] for _ in range(3)] == [503, 503, 200]
    state = json.loads(ask(f"{imds.control}/control/state")[1])
    assert state["requests"][f"{META}instance-id"] == 3


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("spot", b'{"action": "explode"}', 400),
        ("spot", b"not json", 400),
        ("spot", b'{"when": 3}', 400),
        ("x", b"{}", 404),
    ],
)
def test_a_wrong_command_is_refused(imds: LocalMetadata, path: str, body: bytes, status: int) -> None:
    assert ask(f"{imds.control}/control/{path}", "POST", body)[0] == status
    assert get(imds, "spot/instance-action", token(imds)[1])[0] == 404
