"""What a scan is given: the allow-list, of which every mistake is one line, and the image, which is in ECR and has a digest."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from images.check import scan
from images.check.scan import Allowed, EcrImage
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
    last = date(2027, 11, 22)
    assert scan.read_allowed(allow_list(tmp_path, f"[[allow]]\n{ENTRY}review_by = {last}\n"), TODAY) == (
        Allowed(id="CVE-1", reason="r", review_by=last),
    )
    assert scan.read_allowed(allow_list(tmp_path, ""), TODAY) == ()


ENTRY = 'id = "CVE-1"\nreason = "r"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[allow]]\nid = "CVE-1"\nreview_by = 2026-12-01', "scan-allow.toml.allow.0.reason is missing"),
        ('[[allow]]\nid = "A"\nreason = "  "\nreview_by = 2026-12-01', "scan-allow.toml.allow.0.reason = '  '"),
        ('[[allow]]\nreason = "r"\nreview_by = 2026-12-01', "scan-allow.toml.allow.0.id is missing"),
        (f"[[allow]]\n{ENTRY}", "scan-allow.toml.allow.0.review_by is missing"),
        (f'[[allow]]\n{ENTRY}review_by = "2026-12-01"', "scan-allow.toml.allow.0.review_by = '2026-12-01'"),
        (f"[[allow]]\n{ENTRY}review_by = 2026-12-01T00:00:00Z", "scan-allow.toml.allow.0.review_by = "),
        (f"[[allow]]\n{ENTRY}review_by = 2027-11-23", "scan-allow.toml.allow CVE-1 review_by = '2027-11-23'"),
        (f"[[allow]]\n{ENTRY}review_by = 2026-12-01\nuntil = 1", "scan-allow.toml.allow.0.until = 1"),
        (f"[[allow]]\n{ENTRY}review_by = 2026-12-01\n" * 2, "scan-allow.toml.allow id = 'CVE-1'"),
        ("[[allowed]]\n", "scan-allow.toml.allowed = [{}]"),
        ("allow = 3\n", "scan-allow.toml.allow = 3"),
        ("allow = [3]\n", "scan-allow.toml.allow.0 = 3"),
        ("[[allow\n", "/"),
    ],
)
def test_entry_without_reason_or_day_or_of_another_form_is_error(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        scan.read_allowed(allow_list(tmp_path, text), TODAY)
    (line,) = caught.value.problems
    assert line.startswith(told)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("ref", "region"),
    [
        (f"123456789012.dkr.ecr.us-east-1.amazonaws.com/a/b@{DIGEST}", "us-east-1"),
        (f"123456789012.dkr.ecr-fips.us-gov-west-1.amazonaws.com/a/b:cpu-1@{DIGEST}", "us-gov-west-1"),
    ],
)
def test_an_image_in_ecr_is_found_by_its_reference(ref: str, region: str) -> None:
    assert EcrImage.of(ref) == EcrImage("123456789012", region, "a/b", DIGEST)


@pytest.mark.parametrize(
    "ref",
    [
        f"docker.io/library/debian@{DIGEST}",
        f"evil.example.com/123456789012.dkr.ecr.us-east-1.amazonaws.com/a@{DIGEST}",
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/a:latest",
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/a@sha256:12",
    ],
)
def test_an_image_elsewhere_or_by_tag_is_refused(ref: str) -> None:
    with pytest.raises(UserError, match=r"^image = ") as caught:
        EcrImage.of(ref)
    assert caught.value.exit_code == 2
