"""What passes the scan gate and what does not: severities, the allow-list and its last day, waiting, scans without a result.

botocore's Stubber gives ECR's answers, each checked against the model of the service.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.stub import Stubber
from hypothesis import given
from hypothesis import strategies as st

from images.check import scan
from images.check.scan import SEVERITIES, Allowed, Decision, EcrImage, Finding
from images.registry import ecr
from lustrain.problem import UserError

TODAY = date(2026, 11, 21)
DIGEST = "sha256:" + "ab" * 32
PLACE = EcrImage("123456789012", "us-east-1", "lustrain/trainer", DIGEST)
ASKED = {
    "registryId": PLACE.account,
    "repositoryName": PLACE.repository,
    "imageId": {"imageDigest": DIGEST},
    "maxResults": 1000,
}
WHEN = datetime(2026, 11, 20, tzinfo=UTC)


@dataclass
class Clock:
    """Time that passes only where somebody sleeps."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scan, "time", clock)
    return clock


def basic(name: str = "CVE-2026-1", severity: str = "HIGH", package: str = "zlib1g") -> dict[str, Any]:
    attributes = [{"key": "package_name", "value": package}, {"key": "package_version", "value": "1.2"}]
    return {"name": name, "severity": severity, "uri": f"https://example.com/{name}", "attributes": attributes}


def enhanced(name: str, severity: str = "HIGH", fixed: str = "2.0", status: str = "ACTIVE") -> dict[str, Any]:
    package = {"name": "urllib3", "version": "1.0", "fixedInVersion": fixed}
    details = {"vulnerabilityId": name, "vulnerablePackages": [package], "sourceUrl": "https://example.com/x"}
    return {"severity": severity, "status": status, "title": "a title", "packageVulnerabilityDetails": details}


def page(status: str, findings: dict[str, Any] | None = None, token: str | None = None) -> dict[str, Any]:
    found = {"imageScanFindings": {"imageScanCompletedAt": WHEN, **findings}} if findings is not None else {}
    more = {"nextToken": token} if token else {}
    return {"imageScanStatus": {"status": status, "description": f"said {status}"}, **found, **more}


@pytest.fixture
def stub() -> Iterator[Stubber]:
    with Stubber(ecr.client(PLACE.region)) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def answer(stub: Stubber, *pages: dict[str, Any]) -> None:
    token: dict[str, str] = {}
    for one in pages:
        stub.add_response("describe_image_scan_findings", one, {**ASKED, **token})
        token = {"nextToken": one["nextToken"]} if "nextToken" in one else {}


def refuse(stub: Stubber, code: str) -> None:
    stub.add_client_error("describe_image_scan_findings", code, f"the message of {code}", expected_params=ASKED)


def ask(stub: Stubber, *allowed: Allowed, **options: Any) -> Decision:
    return scan.gate(PLACE, stub.client, allowed, today=TODAY, **options)


def until(day: date, name: str = "CVE-2026-1") -> Allowed:
    return Allowed(id=name, reason="no fix yet", review_by=day)


def test_severe_finding_stops_image_and_an_entry_lets_it_pass(stub: Stubber) -> None:
    answer(stub, *[page("COMPLETE", {"findings": [basic(), basic("CVE-2026-2", "LOW")]})] * 2)
    refused, passed = ask(stub), ask(stub, until(TODAY))
    assert refused.failing == (Finding("CVE-2026-1", "HIGH", "zlib1g", "1.2", "", "https://example.com/CVE-2026-1"),)
    assert (refused.exit_code, passed.exit_code, passed.allowed) == (1, 0, refused.failing)
    answer(stub, page("COMPLETE", {"findings": []}))
    assert ask(stub).passed


def test_an_image_without_a_scan_does_not_pass(clock: Clock) -> None:
    with Stubber(ecr.client(PLACE.region)) as stub:
        for _ in range(30):
            refuse(stub, "ScanNotFoundException")
        verdict = ask(stub)
    assert not verdict.passed
    assert 60 <= clock.now < 61, "a scan on push may begin some seconds after the push"
    (line,) = scan.lines(verdict)
    assert "fix: switch scanning on (aws ecr put-image-scanning-configuration" in line
    assert f"--repository-name {PLACE.repository} " in line
    assert f"imageDigest={PLACE.digest}" in line


def test_every_page_of_both_kinds_of_scan_counts(stub: Stubber) -> None:
    first = page("ACTIVE", {"enhancedFindings": [enhanced("CVE-1", "MEDIUM"), enhanced("CVE-2")]}, token="a")
    second = page("ACTIVE", {"enhancedFindings": [enhanced("GHSA-3", "CRITICAL")]}, token="b")
    answer(stub, first, second, page("ACTIVE", {"findings": [basic("CVE-4")]}))
    verdict = ask(stub)
    assert [one.id for one in verdict.failing] == ["GHSA-3", "CVE-2", "CVE-4"], "the worst first"
    assert verdict.below == {"MEDIUM": 1}
    assert verdict.failing[1].fixed_in == "2.0"


def test_what_inspector_closed_is_gone_suppressed_is_not(stub: Stubber) -> None:
    found = [enhanced("CVE-1", status="CLOSED"), enhanced("CVE-2", status="SUPPRESSED", fixed="NotAvailable")]
    answer(stub, page("ACTIVE", {"enhancedFindings": found}))
    (one,) = ask(stub).failing
    assert (one.id, one.fixed_in) == ("CVE-2", "")


def test_a_finding_without_a_package_is_not_lost(stub: Stubber) -> None:
    answer(stub, page("ACTIVE", {"enhancedFindings": [{"severity": "HIGH", "title": "a secret in a file"}]}))
    assert [one.id for one in ask(stub).failing] == ["a secret in a file"]


def test_the_scan_is_waited_for_with_a_line_now_and_then(stub: Stubber, clock: Clock) -> None:
    said = list[str]()
    refuse(stub, "ScanNotFoundException")
    answer(stub, *[page("PENDING")] * 3, *[page("IN_PROGRESS")] * 26, page("COMPLETE", {"findings": []}))
    assert ask(stub, say=said.append).passed
    assert len(clock.slept) == 30
    assert len(set(clock.slept)) > 15, "pauses differ, so that many who wait do not ask at once"
    assert 4 <= len(said) <= 7, "at once, and then each time as long again has passed"


def test_nothing_is_waited_for_for_ever(clock: Clock) -> None:
    with Stubber(ecr.client(PLACE.region)) as stub:
        answer(stub, *[page("IN_PROGRESS")] * 300)
        verdict = ask(stub)
    assert 900 <= clock.now < 901
    assert "IN_PROGRESS (said IN_PROGRESS)" in (verdict.unknown or "")
    assert verdict.exit_code == 1


def test_scan_that_is_done_before_it_has_a_result_is_waited_for(stub: Stubber) -> None:
    """As https://github.com/aws/aws-sdk/issues/289 shows it: taken at its word, every fresh image would pass."""
    empty = page("COMPLETE") | {"imageScanFindings": {"findings": []}}
    answer(stub, empty, empty, page("COMPLETE", {"enhancedFindings": [enhanced("CVE-1")]}))
    assert [one.id for one in ask(stub).failing] == ["CVE-1"]


def test_a_scan_that_starts_over_between_pages_is_asked_again(stub: Stubber) -> None:
    answer(stub, page("COMPLETE", {"findings": []}, token="a"), page("IN_PROGRESS"))
    answer(stub, page("COMPLETE", {"findings": [basic()]}))
    assert not ask(stub).passed


FIXES = {
    "FAILED": "aws ecr start-image-scan --repository-name lustrain/trainer",
    "UNSUPPORTED_IMAGE": "digest of one platform",
    "SCAN_ELIGIBILITY_EXPIRED": "push",
    "FINDINGS_UNAVAILABLE": "aws ecr start-image-scan",
    "LIMIT_EXCEEDED": "24 hours",
    "IMAGE_ARCHIVED": "restore",
    "IMAGE_SIZE_EXCEEDED": "another tool",
    "SOMETHING_NEW": "console",
}


@pytest.mark.parametrize("status", FIXES)
def test_scan_without_a_result_does_not_pass_and_says_what_to_do(stub: Stubber, clock: Clock, status: str) -> None:
    answer(stub, page(status))
    verdict = ask(stub, until(TODAY))
    assert (clock.slept, verdict.passed) == ([], False)
    (line,) = scan.lines(verdict)
    assert f"{status} (said {status})" in line
    assert FIXES[status] in line.partition("fix: ")[2]
    assert verdict.unused == (), "without findings nothing is known about the use of an entry"


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("RepositoryNotFoundException", "name, account and region"),
        ("ImageNotFoundException", "fab image-push"),
        ("AccessDeniedException", "allow ecr:DescribeImageScanFindings"),
        ("ServerException", "try again"),
    ],
)
def test_a_refusal_of_ecr_is_one_line(stub: Stubber, code: str, fix: str) -> None:
    refuse(stub, code)
    with pytest.raises(UserError, match=f"refused: the message of {code}; fix: .*{fix}") as caught:
        ask(stub)
    assert (len(caught.value.problems), caught.value.exit_code) == (1, 1)


def test_an_endpoint_that_does_not_answer_is_one_line() -> None:
    class Deaf:
        def get_paginator(self, name: str) -> Any:
            raise EndpointConnectionError(endpoint_url="https://api.ecr")

    with pytest.raises(UserError, match=r"cannot be reached: .*https://api\.ecr.*fix: check credentials"):
        scan.gate(PLACE, Deaf(), [], today=TODAY)


def test_the_day_of_an_entry_is_that_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Late:
            return cls(2026, 11, 21, 23, 59, 59, tzinfo=tz)

    monkeypatch.setattr(scan, "datetime", Late)
    with Stubber(ecr.client(PLACE.region)) as stub:
        for _ in range(2):
            answer(stub, page("COMPLETE", {"findings": [basic()]}))
        assert scan.gate(PLACE, stub.client, [until(TODAY)]).passed
        assert not scan.gate(PLACE, stub.client, [until(TODAY - timedelta(days=1))]).passed


_FINDINGS = st.lists(
    st.builds(
        Finding,
        st.sampled_from(["CVE-1", "CVE-2", "CVE-3", "CVE-4"]),
        st.sampled_from([*SEVERITIES, "A_NEW_WORD"]),
        st.sampled_from(["a", "b"]),
        st.just("1"),
        st.just(""),
        st.just(""),
    ),
    max_size=12,
)
_ALLOWED = st.lists(
    st.builds(
        Allowed,
        id=st.sampled_from(["CVE-1", "CVE-2", "CVE-9"]),
        reason=st.just("r"),
        review_by=st.dates(date(2026, 11, 19), date(2026, 11, 23)),
    ),
    unique_by=lambda one: one.id,
)


@pytest.mark.slow
@given(_FINDINGS, _ALLOWED, st.sampled_from(SEVERITIES[:5]))
def test_every_finding_counts_once_and_nothing_severe_slips(
    findings: list[Finding], allowed: list[Allowed], threshold: str
) -> None:
    verdict = scan.judge("x", findings, allowed, today=TODAY, threshold=threshold)
    assert len(verdict.failing) + len(verdict.allowed) + sum(verdict.below.values()) == len(set(findings))
    # What nobody has rated may be anything.
    worse = (*SEVERITIES[: SEVERITIES.index(threshold) + 1], *SEVERITIES[5:])
    valid = {one.id for one in allowed if one.review_by >= TODAY}
    slipped = {one for one in findings if one.severity in (*worse, "A_NEW_WORD") and one.id not in valid}
    assert slipped == set(verdict.failing)
    assert verdict.passed == (not slipped and all(one.review_by >= TODAY for one in allowed))


def test_every_severity_and_status_that_botocore_knows_is_known() -> None:
    shapes = botocore.session.get_session().get_service_model("ecr")
    assert set(shapes.shape_for("FindingSeverity").enum) == set(SEVERITIES) - {"UNTRIAGED"}
    assert set(shapes.shape_for("ScanStatus").enum) <= {*FIXES, "COMPLETE", "ACTIVE", "IN_PROGRESS", "PENDING"}


def test_an_unknown_threshold_is_told() -> None:
    with pytest.raises(UserError, match=r"--threshold = 'high'"):
        scan.check_threshold("high")
    scan.check_threshold("INFORMATIONAL")


def test_people_and_programs_read_the_same_verdict() -> None:
    found = [Finding("CVE-1", "HIGH", "p", "1", "2", "u"), Finding("CVE-2", "LOW", "p", "1", "", "")]
    found.append(Finding("CVE-4", "CRITICAL", "q", "1", "", ""))
    allowed = [until(TODAY, "CVE-9"), until(TODAY, "CVE-4"), until(TODAY - timedelta(days=1), "CVE-3")]
    verdict = scan.judge("x", found, allowed, today=TODAY)
    lines = scan.lines(verdict)
    assert [line.partition("; ")[0] for line in lines] == [
        "HIGH CVE-1 p 1 u",
        "scan-allow.toml CVE-3 = '2026-11-20': is past its review",
        "allowed: CRITICAL CVE-4 q 1",
        "scan-allow.toml CVE-9: not needed for this image",
        "x: not passed",
    ]
    assert "fix: p 2, or an entry" in lines[0]
    assert lines[-1].endswith("1 at HIGH or worse, 1 allowed, below: 1 LOW")
    read = json.loads(json.dumps(scan.as_json(verdict)))
    assert (read["version"], read["passed"], read["exit"], read["image"]) == (1, False, 1, "x")
    assert [(one["id"], one["fixed_in"]) for one in read["failing"]] == [("CVE-1", "2")]
    assert read["expired"] == [{"id": "CVE-3", "reason": "no fix yet", "review_by": "2026-11-20"}]
    assert (read["below"], [one["id"] for one in read["unused"]]) == ({"LOW": 1}, ["CVE-9"])
