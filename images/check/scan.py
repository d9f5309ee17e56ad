"""The gate behind ECR's image scan: nothing severe passes but what somebody allowed, with a reason and for a time.

Both kinds of scan are read, basic and enhanced (Amazon Inspector):
https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_DescribeImageScanFindings.html
"""

from __future__ import annotations

import random
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ConfigDict, Field, ValidationError

from images.plan import references
from images.registry import ecr
from lustrain.problem import FAILED, UserError, plain, problem
from lustrain.schema import TOML, Section, like, problems_of

ALLOWED = Path(__file__).parents[1] / "scan-allow.toml"
SEVERITIES = ("CRITICAL", "HIGH", "MEDIUM", "LOW", "INFORMATIONAL", "UNDEFINED", "UNTRIAGED")
"""Worst first; the last two are ECR's and Inspector's words for not rated yet."""
LONGEST_DAYS = 366
VERSION = 1
"""Of the JSON."""

_DONE, _UNDER_WAY = ("COMPLETE", "ACTIVE"), ("IN_PROGRESS", "PENDING")
_ABSENT, _NOT_YET = "no scan", "done without a result"
_START = "aws ecr start-image-scan --repository-name {repository} --image-id imageDigest={digest}"
_FIXES = {
    _ABSENT: "switch scanning on (aws ecr put-image-scanning-configuration --repository-name {repository} "
    f"--image-scanning-configuration scanOnPush=true) and start one now: {_START}",
    _NOT_YET: "ask again later; where it stays so, look at the image in ECR's console",
    "FAILED": f"start it again: {_START}",
    "UNSUPPORTED_IMAGE": "give the digest of one platform instead of an index; else scan with a tool that knows its system",
    "SCAN_ELIGIBILITY_EXPIRED": "push the image again, or let Inspector scan for longer (its ECR re-scan duration)",
    "FINDINGS_UNAVAILABLE": f"start it again: {_START}",
    "LIMIT_EXCEEDED": "try tomorrow: a basic scan of an image runs once in 24 hours",
    "IMAGE_ARCHIVED": "restore the image, which brings its scan back",
    "IMAGE_SIZE_EXCEEDED": "scan it with another tool: it is larger than the scanner takes",
    **dict.fromkeys(_UNDER_WAY, "ask again later"),
}


@dataclass(frozen=True)
class Place:
    """An image in ECR."""

    account: str
    region: str
    repository: str
    digest: str

    @classmethod
    def of(cls, ref: str) -> Place:
        """From `<account>.dkr.ecr.<region>.amazonaws.com/<repository>[:tag]@sha256:…`; UserError for anything else."""
        named = references.parse(ref)
        region = ecr.region_of(named.registry)
        if region is None:
            why, fix = (
                "is not an image in ECR, the only registry whose scans are read",
                "scan it with its registry's own means",
            )
            raise UserError(problem("image", ref, why, fix=fix))
        if named.digest is None:
            why = "has no digest, and a tag may name another image by the time it runs"
            raise UserError(problem("image", ref, why, fix="give repository@sha256:…, as image.json has it"))
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
    """`scan-allow.toml`; an entry that has expired is in order here, `judge` reports it."""

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
    """Empty: there is no fix, or the scan does not tell."""
    uri: str


@dataclass(frozen=True)
class Patience:
    """How long to wait for a scan, in seconds."""

    total_s: float = 900.0
    absent_s: float = 60.0
    """A scan on push shows up some seconds after the push."""
    pause_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Verdict:
    """What the gate says about one image."""

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
    """In force, but nothing at the threshold or worse is what they are for."""
    unknown: str | None = None
    """Why there is no result, with the fix."""

    @property
    def passed(self) -> bool:
        return not (self.failing or self.expired or self.unknown)

    @property
    def exit_code(self) -> int:
        """0 passed, 1 not."""
        return 0 if self.passed else 1


def read_allowed(path: Path = ALLOWED, today: date | None = None) -> tuple[Allowed, ...]:
    """Read the allow-list; UserError, exit code 2, with one line for each mistake."""
    last = (today or datetime.now(UTC).date()) + timedelta(days=LONGEST_DAYS)
    try:
        entries = AllowList.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).allow
    except ValidationError as error:
        raise UserError(problems_of(error, AllowList, path.name, words=TOML)) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(plain(f"{path}: cannot be read: {error}")) from None
    twice = [name for name, count in Counter(entry.id for entry in entries).items() if count > 1]
    problems = [problem(f"{path.name}.allow id", name, "is there twice", fix="keep one") for name in twice]
    problems += [
        problem(
            f"{path.name}.allow {entry.id} review_by", str(entry.review_by), "is too far away", allowed=f"up to {last}"
        )
        for entry in entries
        if entry.review_by > last
    ]
    if problems:
        raise UserError(problems)
    return tuple(entries)


def judge(
    image: str, findings: Sequence[Finding], allowed: Sequence[Allowed], *, today: date, threshold: str = "HIGH"
) -> Verdict:
    """Weigh findings against the allow-list. A severity that nobody knows is taken for the worst."""
    if threshold not in SEVERITIES[:5]:
        raise UserError(problem("--threshold", threshold, "unknown", allowed=", ".join(SEVERITIES[:5])))
    severe = [one for one in dict.fromkeys(findings) if _rank(one.severity) <= _rank(threshold)]
    below = Counter(one.severity for one in dict.fromkeys(findings) if _rank(one.severity) > _rank(threshold))
    in_force = {one.id for one in allowed if today <= one.review_by}
    present = {one.id for one in severe}
    return Verdict(
        image,
        threshold,
        failing=tuple(sorted((one for one in severe if one.id not in in_force), key=_order)),
        allowed=tuple(sorted((one for one in severe if one.id in in_force), key=_order)),
        below={severity: below[severity] for severity in SEVERITIES if below[severity]},
        expired=tuple(one for one in allowed if one.id not in in_force),
        unused=tuple(one for one in allowed if one.id in in_force - present),
    )


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES[:5] else 0


def _order(one: Finding) -> tuple[int, str, str]:
    return (_rank(one.severity), one.id, one.package)


def client_for(place: Place) -> Any:
    """boto3's client for ECR in the place's region, with bounded time-outs and retries."""
    settings = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard", "total_max_attempts": 5})
    try:
        return boto3.client("ecr", region_name=place.region, config=settings)
    except BotoCoreError as error:
        raise UserError(plain(f"scan: no client for ECR in {place.region}: {error}")) from None


def gate(
    place: Place,
    client: Any,
    allowed: Sequence[Allowed],
    *,
    threshold: str = "HIGH",
    today: date | None = None,
    patience: Patience | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Wait for ECR's scan of the image and weigh it. No scan, or one without a result, does not pass.

    `client` is `client_for(place)`; `say` hears now and then how long the wait is. UserError where ECR or
    the image cannot be reached.
    """
    today = today or datetime.now(UTC).date()
    patience = patience or Patience()
    status, said, pages = _ended(place, client, patience, say)
    findings = [] if status not in _DONE else [one for page in pages for one in _findings(page)]
    verdict = judge(str(place), findings, allowed, today=today, threshold=threshold)
    if status in _DONE:
        return verdict
    fix = _FIXES.get(status, "look at the image in ECR's console").format(**asdict(place))
    why = f"not known to be safe: {status}{f' ({said})' if said else ''}; fix: {fix}"
    # Without findings nothing tells whether an entry is of use.
    return Verdict(str(place), threshold, expired=verdict.expired, unknown=plain(why))


def _ended(
    place: Place, client: Any, patience: Patience, say: Callable[[str], None]
) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the scan's status, what ECR says to it, and its pages, once it has ended or patience has."""
    start, told = patience.clock(), 0.0
    while True:
        status, said, pages = _asked(place, client)
        waited = patience.clock() - start
        limit = {_ABSENT: patience.absent_s, **dict.fromkeys((*_UNDER_WAY, _NOT_YET), patience.total_s)}.get(
            status, 0.0
        )
        if waited >= limit:
            return status, said, pages
        if waited >= 2 * told:
            say(f"{place.repository}: scan {status}, {waited:.0f} s so far, at most {limit:.0f} s")
            told = max(waited, patience.pause_s)
        patience.sleep(min(patience.pause_s * random.uniform(0.8, 1.2), limit - waited))


def _asked(place: Place, client: Any) -> tuple[str, str, list[dict[str, Any]]]:
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
        code = error.response.get("Error", {}).get("Code", "")
        if code == "ScanNotFoundException":
            return _ABSENT, "", []
        raise _refused(place, code, error) from None
    except BotoCoreError as error:
        fix = "check credentials (aws sts get-caller-identity) and the network"
        raise UserError(
            problem("scan", str(place), f"ECR in {place.region} cannot be asked: {error}", fix=fix), FAILED
        ) from None
    told = [page.get("imageScanStatus", {}) for page in pages]
    # A scan that starts over between two pages is not done.
    worst = next((one for one in told if one.get("status") not in _DONE), told[0])
    status, said = str(worst.get("status", "without a status")), str(worst.get("description", ""))
    return (status if status not in _DONE or _has_result(pages) else _NOT_YET), said, pages


def _has_result(pages: Sequence[Mapping[str, Any]]) -> bool:
    """ECR says COMPLETE or ACTIVE some seconds before there is anything: https://github.com/aws/aws-sdk/issues/289"""
    found = [page.get("imageScanFindings") or {} for page in pages]
    signs = ("imageScanCompletedAt", "findingSeverityCounts", "findings", "enhancedFindings")
    return any(one.get(sign) for one in found for sign in signs)


def _refused(place: Place, code: str, error: ClientError) -> UserError:
    fixes = {
        "RepositoryNotFoundException": "push the image first, or check the name, account and region",
        "ImageNotFoundException": "push the image first: fab image-push",
        "AccessDeniedException": "allow ecr:DescribeImageScanFindings",
    }
    why = f"ECR in {place.region} refused: {error.response.get('Error', {}).get('Message') or code}"
    return UserError(problem("scan", str(place), why, fix=fixes.get(code, "try again; see the message")), FAILED)


def _findings(page: Mapping[str, Any]) -> list[Finding]:
    found = page.get("imageScanFindings") or {}
    enhanced = [one for each in found.get("enhancedFindings", ()) for one in _of_enhanced(each)]
    return [*(_of_basic(one) for one in found.get("findings", ())), *enhanced]


def _of_basic(found: Mapping[str, Any]) -> Finding:
    more = {one["key"]: one.get("value", "") for one in found.get("attributes", ())}
    return Finding(
        found.get("name", "without a name"),
        found.get("severity", "without a severity"),
        more.get("package_name", ""),
        more.get("package_version", ""),
        "",
        found.get("uri", ""),
    )


def _of_enhanced(found: Mapping[str, Any]) -> list[Finding]:
    """One for each package. Inspector's own suppression rules have no day on which they end, so they do not count here."""
    if found.get("status") == "CLOSED":
        return []
    details = found.get("packageVulnerabilityDetails") or {}
    return [
        Finding(
            details.get("vulnerabilityId") or found.get("title") or found.get("findingArn", "without a name"),
            found.get("severity", "without a severity"),
            package.get("name", ""),
            package.get("version", ""),
            # Inspector's word for none.
            package.get("fixedInVersion", "").replace("NotAvailable", ""),
            details.get("sourceUrl", ""),
        )
        for package in details.get("vulnerablePackages") or [{}]
    ]


def lines(verdict: Verdict) -> list[str]:
    """Return the verdict for people: one line each, the sum last."""
    found = [f"{_line(one)}; fix: {_upgrade(one)}" for one in verdict.failing]
    found += [
        problem(
            f"scan-allow.toml {one.id}",
            str(one.review_by),
            "is past its review",
            fix="look again, then renew or remove it",
        )
        for one in verdict.expired
    ]
    found += [f"allowed: {_line(one)}" for one in verdict.allowed]
    found += [
        f"scan-allow.toml {one.id}: not needed for this image; remove it if for no other" for one in verdict.unused
    ]
    if verdict.unknown:
        return [*found, f"{verdict.image}: {verdict.unknown}"]
    below = ", ".join(f"{count} {severity}" for severity, count in verdict.below.items()) or "none"
    counts = f"{len(verdict.failing)} at {verdict.threshold} or worse, {len(verdict.allowed)} allowed, below: {below}"
    return [*found, f"{verdict.image}: {'passed' if verdict.passed else 'not passed'}; {counts}"]


def _line(one: Finding) -> str:
    return plain(" ".join(filter(None, [one.severity, one.id, one.package, one.version, one.uri])))


def _upgrade(one: Finding) -> str:
    newer = f"{one.package} {one.fixed_in}" if one.fixed_in else "a newer base (versions.toml) or package"
    return plain(f"{newer}, or an entry in scan-allow.toml with a reason")


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict for programs; days as ISO 8601."""
    table = asdict(verdict)
    for name, entries in (("expired", verdict.expired), ("unused", verdict.unused)):
        table[name] = [entry.model_dump(mode="json") for entry in entries]
    return {"version": VERSION, "passed": verdict.passed, "exit": verdict.exit_code, **table}
