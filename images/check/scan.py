"""The gate behind ECR's image scan: a severe finding passes only by an entry with a reason and a last day.

Both kinds of scan are read, basic and enhanced (Amazon Inspector):
https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_DescribeImageScanFindings.html
"""

from __future__ import annotations

import random
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ConfigDict, Field, ValidationError

from images.plan import references
from images.registry import ecr
from lustrain.problem import FAILED, UserError, plain, problem
from lustrain.schema import TOML, Section, like, problems_of

ALLOWED = Path(__file__).parents[1] / "scan-allow.toml"
SEVERITIES = ("CRITICAL", "HIGH", "MEDIUM", "LOW", "INFORMATIONAL", "UNDEFINED", "UNTRIAGED")
"""They stand worst first; the last two are ECR's and Inspector's words for not rated yet, which count as the worst."""
_RATED = SEVERITIES[:5]
LONGEST_DAYS = 366
VERSION = 1
"""The JSON has this version."""

_DONE, _UNDER_WAY = ("COMPLETE", "ACTIVE"), ("IN_PROGRESS", "PENDING")
_ABSENT, _NOT_YET = "no scan", "done without a result"
_PAUSE_S = 5.0
_LIMITS_S = {_ABSENT: 60.0, **dict.fromkeys((*_UNDER_WAY, _NOT_YET), 900.0)}
"""Each status is waited for so long; a scan on push shows up some seconds after the push."""
_START = "aws ecr start-image-scan --repository-name {repository} --image-id imageDigest={digest}"
_FIXES = {
    _ABSENT: "switch scanning on (aws ecr put-image-scanning-configuration --repository-name {repository} "
    f"--image-scanning-configuration scanOnPush=true) and start one now: {_START}",
    _NOT_YET: "ask again later; if this stays so, look at the image in ECR's console",
    "FAILED": f"start it again: {_START}",
    "UNSUPPORTED_IMAGE": "give the digest of one platform instead of an index; else scan with a tool that knows its system",
    "SCAN_ELIGIBILITY_EXPIRED": "push the image again, or let Inspector scan for longer (its ECR re-scan duration)",
    "FINDINGS_UNAVAILABLE": f"start it again: {_START}",
    "LIMIT_EXCEEDED": "try tomorrow: a basic scan of an image runs once in 24 hours",
    "IMAGE_ARCHIVED": "restore the image, which brings its scan back",
    "IMAGE_SIZE_EXCEEDED": "scan it with another tool: it is larger than the scanner takes",
    **dict.fromkeys(_UNDER_WAY, "ask again later"),
}
_REFUSALS = {
    "RepositoryNotFoundException": "push the image first, or check the name, account and region",
    "ImageNotFoundException": "push the image first: fab image-push",
    "AccessDeniedException": "allow ecr:DescribeImageScanFindings",
}


@dataclass(frozen=True)
class EcrImage:
    """An image in ECR."""

    account: str
    region: str
    repository: str
    digest: str

    @classmethod
    def of(cls, ref: str) -> EcrImage:
        """Read `<account>.dkr.ecr.<region>.amazonaws.com/<repository>[:tag]@sha256:…`; UserError for anything else."""
        named = references.parse(ref)
        region = ecr.region_of(named.registry)
        if region is None:
            why, fix = "is not an image in ECR, the only registry whose scans are read", "use its registry's own scan"
            raise UserError(problem("image", ref, why, fix=fix))
        if named.digest is None:
            why, fix = "has no digest, and a tag can move", "give repository@sha256:…, as image.json has it"
            raise UserError(problem("image", ref, why, fix=fix))
        return cls(named.registry.partition(".")[0], region, named.repository, named.digest)

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}"


class Allowed(Section):
    """One entry of `scan-allow.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[str, like(r"\S.*", "the id of a finding", "CVE-2026-12345")]
    reason: Annotated[str, like(r"\S.*", "why it may pass, in words", "not reachable: no server runs")]
    review_by: date
    """The last day on which it holds, like 2027-01-31, without quotes."""


class AllowList(Section):
    """`scan-allow.toml`; an expired entry is valid here, and `judge` reports it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    allow: list[Allowed] = Field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One vulnerability of one package."""

    id: str
    severity: str
    package: str
    version: str
    fixed_in: str
    """Empty: no fix exists, or the scan does not name it."""
    uri: str


@dataclass(frozen=True)
class Decision:
    """The gate's decision about one image."""

    image: str
    threshold: str
    failing: tuple[Finding, ...] = ()
    """At the threshold or worse, and not allowed."""
    allowed: tuple[Finding, ...] = ()
    """At the threshold or worse, and allowed."""
    below: Mapping[str, int] = field(default_factory=dict)
    """Severity → how many findings that pass."""
    expired: tuple[Allowed, ...] = ()
    unused: tuple[Allowed, ...] = ()
    """In force, but without a finding at the threshold or worse."""
    unknown: str | None = None
    """Why there is no result, with the fix."""

    @property
    def passed(self) -> bool:
        return not (self.failing or self.expired or self.unknown)

    @property
    def exit_code(self) -> int:
        """Return 0 where the image passed, else 1."""
        return 0 if self.passed else 1


def read_allowed(path: Path = ALLOWED, today: date | None = None) -> tuple[Allowed, ...]:
    """Read the allow-list; UserError, exit code 2, with one line for each mistake."""
    try:
        entries = AllowList.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).allow
    except ValidationError as error:
        raise UserError(problems_of(error, AllowList, path.name, words=TOML)) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(plain(f"{path}: cannot be read: {error}")) from None
    twice = [name for name, count in Counter(entry.id for entry in entries).items() if count > 1]
    problems = [problem(f"{path.name}.allow id", name, "must be unique", fix="keep one entry") for name in twice]
    last = (today or datetime.now(UTC).date()) + timedelta(days=LONGEST_DAYS)
    for entry in entries:
        if entry.review_by > last:
            key = f"{path.name}.allow {entry.id} review_by"
            problems.append(problem(key, str(entry.review_by), "is too far away", allowed=f"up to {last}"))
    if problems:
        raise UserError(problems)
    return tuple(entries)


def check_threshold(threshold: str) -> None:
    """Check that it is a severity that findings have. UserError."""
    if threshold not in _RATED:
        raise UserError(problem("--threshold", threshold, "unknown", allowed=", ".join(_RATED)))


def judge(
    image: str, findings: Sequence[Finding], allowed: Sequence[Allowed], *, today: date, threshold: str = "HIGH"
) -> Decision:
    """Weigh findings against the allow-list. An unknown severity counts as the worst."""
    findings = sorted(dict.fromkeys(findings), key=lambda each: (_rank(each.severity), each.id, each.package))
    severe = [each for each in findings if _rank(each.severity) <= _rank(threshold)]
    in_force = {entry.id for entry in allowed if today <= entry.review_by}
    return Decision(
        image,
        threshold,
        failing=tuple(each for each in severe if each.id not in in_force),
        allowed=tuple(each for each in severe if each.id in in_force),
        below=dict(Counter(each.severity for each in findings[len(severe) :])),
        expired=tuple(entry for entry in allowed if entry.id not in in_force),
        unused=tuple(entry for entry in allowed if entry.id in in_force - {each.id for each in severe}),
    )


def _rank(severity: str) -> int:
    return _RATED.index(severity) if severity in _RATED else 0


def gate(
    place: EcrImage,
    client: Any,
    allowed: Sequence[Allowed],
    *,
    threshold: str = "HIGH",
    today: date | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Decision:
    """Wait for ECR's scan of the image and weigh it. No scan, or one without a result, does not pass.

    `client` is `ecr.client(place.region)`; `say` receives a line now and then during the wait. UserError where ECR or
    the image cannot be reached.
    """
    today = today or datetime.now(UTC).date()
    scan = _wait(place, client, say)
    findings = [finding for page in scan.pages for finding in _findings(page)] if scan.status in _DONE else []
    verdict = judge(str(place), findings, allowed, today=today, threshold=threshold)
    if scan.status in _DONE:
        return verdict
    fix = _FIXES.get(scan.status, "look at the image in ECR's console").format(**asdict(place))
    why = f"not known to be safe: {scan.status}{f' ({scan.description})' if scan.description else ''}; fix: {fix}"
    # Without findings, nothing is known about the use of an entry.
    return replace(verdict, unused=(), unknown=plain(why))


@dataclass(frozen=True)
class _Scan:
    status: str
    description: str = ""
    pages: Sequence[Mapping[str, Any]] = ()


def _wait(place: EcrImage, client: Any, say: Callable[[str], None]) -> _Scan:
    start, next_line = time.monotonic(), 0.0
    while True:
        scan = _read(place, client)
        waited, limit = time.monotonic() - start, _LIMITS_S.get(scan.status, 0.0)
        if waited >= limit:
            return scan
        if waited >= next_line:
            say(f"{place.repository}: scan {scan.status}, {waited:.0f} s so far, at most {limit:.0f} s")
            next_line = 2 * max(waited, _PAUSE_S)
        time.sleep(min(_PAUSE_S * random.uniform(0.8, 1.2), limit - waited))


def _read(place: EcrImage, client: Any) -> _Scan:
    try:
        pages = list(
            client.get_paginator("describe_image_scan_findings").paginate(
                registryId=place.account,
                repositoryName=place.repository,
                imageId={"imageDigest": place.digest},
                PaginationConfig={"PageSize": 1000},
            )
        )
    except ClientError as error:
        details = error.response.get("Error", {})
        code = details.get("Code", "")
        if code == "ScanNotFoundException":
            return _Scan(_ABSENT)
        why = f"ECR in {place.region} refused: {details.get('Message') or code}"
        fix = _REFUSALS.get(code, "try again; see the message")
        raise UserError(problem("scan", str(place), why, fix=fix), FAILED) from None
    except BotoCoreError as error:
        why = f"ECR in {place.region} cannot be reached: {error}"
        fix = "check credentials (aws sts get-caller-identity) and the network"
        raise UserError(problem("scan", str(place), why, fix=fix), FAILED) from None
    states = [page.get("imageScanStatus", {}) for page in pages]
    # A scan that starts over between two pages is not done.
    state = next((state for state in states if state.get("status") not in _DONE), states[0])
    status = str(state.get("status", "without a status"))
    if status in _DONE and not _has_result(pages):
        status = _NOT_YET
    return _Scan(status, str(state.get("description", "")), pages)


def _has_result(pages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether there is a sign of a result: COMPLETE or ACTIVE comes seconds before it (https://github.com/aws/aws-sdk/issues/289)."""
    signs = ("imageScanCompletedAt", "findingSeverityCounts", "findings", "enhancedFindings")
    return any((page.get("imageScanFindings") or {}).get(sign) for page in pages for sign in signs)


def _findings(page: Mapping[str, Any]) -> list[Finding]:
    both = page.get("imageScanFindings") or {}
    enhanced = [finding for each in both.get("enhancedFindings", ()) for finding in _of_enhanced(each)]
    return [*(_of_basic(each) for each in both.get("findings", ())), *enhanced]


def _of_basic(finding: Mapping[str, Any]) -> Finding:
    attributes = {pair["key"]: pair.get("value", "") for pair in finding.get("attributes", ())}
    return Finding(
        finding.get("name", "without a name"),
        finding.get("severity", "without a severity"),
        attributes.get("package_name", ""),
        attributes.get("package_version", ""),
        "",
        finding.get("uri", ""),
    )


def _of_enhanced(finding: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each package. Inspector's suppression rules do not count: they have no last day."""
    if finding.get("status") == "CLOSED":
        return []
    details = finding.get("packageVulnerabilityDetails") or {}
    return [
        Finding(
            details.get("vulnerabilityId") or finding.get("title") or finding.get("findingArn", "without a name"),
            finding.get("severity", "without a severity"),
            package.get("name", ""),
            package.get("version", ""),
            # Inspector's word for none.
            package.get("fixedInVersion", "").replace("NotAvailable", ""),
            details.get("sourceUrl", ""),
        )
        for package in details.get("vulnerablePackages") or [{}]
    ]


def lines(verdict: Decision) -> list[str]:
    """Return the verdict for people: one line each, the sum last."""
    review = ("is past its review", "", "look again, then renew or remove it")
    rows = [f"{_line(finding)}; fix: {_upgrade(finding)}" for finding in verdict.failing]
    rows += [problem(f"scan-allow.toml {entry.id}", str(entry.review_by), *review) for entry in verdict.expired]
    rows += [f"allowed: {_line(finding)}" for finding in verdict.allowed]
    unused = "not needed for this image; remove it unless another image needs it"
    rows += [f"scan-allow.toml {entry.id}: {unused}" for entry in verdict.unused]
    if verdict.unknown:
        return [*rows, f"{verdict.image}: {verdict.unknown}"]
    below = ", ".join(f"{count} {severity}" for severity, count in verdict.below.items()) or "none"
    counts = f"{len(verdict.failing)} at {verdict.threshold} or worse, {len(verdict.allowed)} allowed, below: {below}"
    return [*rows, f"{verdict.image}: {'passed' if verdict.passed else 'not passed'}; {counts}"]


def _line(finding: Finding) -> str:
    return plain(" ".join(filter(None, [finding.severity, finding.id, finding.package, finding.version, finding.uri])))


def _upgrade(finding: Finding) -> str:
    newer = f"{finding.package} {finding.fixed_in}" if finding.fixed_in else "a newer base (versions.toml) or package"
    return plain(f"{newer}, or an entry in scan-allow.toml with a reason")


def as_json(verdict: Decision) -> dict[str, Any]:
    """Return the verdict as JSON data; days as ISO 8601."""
    table = asdict(verdict)
    for name in ("expired", "unused"):
        table[name] = [entry.model_dump(mode="json") for entry in table[name]]
    return {"version": VERSION, "passed": verdict.passed, "exit": verdict.exit_code, **table}
