"""What a scan is given: the allow-list, of which every mistake is one line, and the image, which is in ECR and has a digest."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from images.check import scan
from images.check.scan import Allowed, Place
from lustrain.problem import UserError

TODAY = date(2026, 11, 21)
DIGEST = "sha256:" + "ab" * 32


def allow_list(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "scan-allow.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_allow_list_of_this_project_is_in_force() -> None:
    assert all(one.review_by >= datetime.now(UTC).date() for one in scan.read_allowed())


def test_an_allow_list_is_read_as_written(tmp_path: Path) -> None:
    text = '[[allow]]\nid = "CVE-1"\nreason = "r"\nreview_by = 2026-11-21\n'
    assert scan.read_allowed(allow_list(tmp_path, text), TODAY) == (Allowed(id="CVE-1", reason="r", review_by=TODAY),)
    assert scan.read_allowed(allow_list(tmp_path, ""), TODAY) == ()


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ('id = "CVE-1"\nreview_by = 2026-12-01', "allow.0.reason is missing"),
        ('id = "CVE-1"\nreason = "  "\nreview_by = 2026-12-01', "allow.0.reason = '  ': is not why it may pass"),
        ('reason = "r"\nreview_by = 2026-12-01', "allow.0.id is missing"),
        ('id = "CVE-1"\nreason = "r"', "allow.0.review_by is missing"),
        (
            'id = "CVE-1"\nreason = "r"\nreview_by = "2026-12-01"',
            "review_by = '2026-12-01': wrong type; allowed: a day without quotes, like 2027-01-31",
        ),
        ('id = "CVE-1"\nreason = "r"\nreview_by = 2026-12-01T00:00:00Z', "wrong type; allowed: a day without quotes"),
        ('id = "CVE-1"\nreason = "r"\nreview_by = 2027-11-23', "is too far away; allowed: up to 2027-11-22"),
        ('id = "CVE-1"\nreason = "r"\nreview_by = 2026-12-01\nuntil = 1', "allow.0.until = 1: unknown key"),
    ],
)
def test_an_entry_without_a_reason_or_a_day_is_an_error(tmp_path: Path, entry: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        scan.read_allowed(allow_list(tmp_path, f"[[allow]]\n{entry}\n"), TODAY)
    (line,) = caught.value.problems
    assert told in line
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[allowed]]\n", "allowed = [{}]: unknown key"),
        ("allow = 3\n", "allow = 3: wrong type; allowed: a list"),
        ("allow = [3]\n", "allow.0 = 3: wrong type; allowed: a table of keys"),
        ("[[allow\n", "cannot be read"),
        ('[[allow]]\nid = "A"\nreason = "r"\nreview_by = 2026-12-01\n' * 2, "allow id = 'A': must be unique"),
    ],
)
def test_a_list_of_another_form_is_an_error(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        scan.read_allowed(allow_list(tmp_path, text), TODAY)
    assert told in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("ref", "region"),
    [
        (f"123456789012.dkr.ecr.us-east-1.amazonaws.com/a/b@{DIGEST}", "us-east-1"),
        (f"123456789012.dkr.ecr.us-east-1.amazonaws.com/a/b:cpu-1@{DIGEST}", "us-east-1"),
        (f"123456789012.dkr.ecr-fips.us-gov-west-1.amazonaws.com/a/b@{DIGEST}", "us-gov-west-1"),
        (f"123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn/a/b@{DIGEST}", "cn-north-1"),
        (f"123456789012.dkr-ecr.eu-west-1.on.aws/a/b@{DIGEST}", "eu-west-1"),
    ],
)
def test_an_image_in_ecr_is_found_by_its_reference(ref: str, region: str) -> None:
    assert Place.of(ref) == Place("123456789012", region, "a/b", DIGEST)


@pytest.mark.parametrize(
    ("ref", "told"),
    [
        (f"docker.io/library/debian@{DIGEST}", "is not an image in ECR"),
        (f"123456789012.dkr.ecr.us-east-1.amazonaws.com/@{DIGEST}", "image = .*not a repository's name"),
        (f"evil.example.com/123456789012.dkr.ecr.us-east-1.amazonaws.com/a@{DIGEST}", "is not an image in ECR"),
        ("123456789012.dkr.ecr.us-east-1.amazonaws.com/a:latest", "has no digest"),
        ("123456789012.dkr.ecr.us-east-1.amazonaws.com/a@sha256:12", "image = .*is not a digest"),
    ],
)
def test_an_image_elsewhere_or_by_tag_is_refused(ref: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        Place.of(ref)
    assert caught.value.exit_code == 2
