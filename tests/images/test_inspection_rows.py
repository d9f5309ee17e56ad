"""`fab image-verify`: a sound image passes every check, and each fault is found by exactly its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from images.check.inspection import FAILED, OK, WARNING, Report, as_json, lines, verify
from images.registry.client import OCI_MANIFEST
from lustrain.image_file import GitState, ImageRecord
from tests.images.shelf import OCI_TAR, Shelf, attestation, config_of, digest_of, entry

LAYERS = [b"sh", b"code"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VERSIONS = {"torch": "2.13.0", "python": "3.11"}
NOW = datetime(2026, 11, 21, tzinfo=UTC)
CHECKS = "digest platforms|media types|revision versions inputs age layers size user entrypoint healthcheck secrets"
REVISION, DIRTY = "org.opencontainers.image.revision", "dev.lustrain.git.dirty"
TORCH, CODE = "dev.lustrain.versions.torch", "dev.lustrain.inputs.code"


def sound(layers: list[bytes] = LAYERS) -> dict[str, Any]:
    labels = {REVISION: COMMIT, DIRTY: "false", "dev.lustrain.target": "cpu"}
    labels |= {f"dev.lustrain.versions.{name}": value for name, value in VERSIONS.items()}
    labels |= {f"dev.lustrain.inputs.{name}": "abc" for name in ("base", "code")}
    config = copy.deepcopy(config_of(layers, history=[{"created_by": "RUN base"}, {"created_by": "COPY code"}]))
    config["config"]["Labels"] = labels
    return config


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def record(digest: str) -> ImageRecord:
    inputs = {"base": {"image": "x"}, "code": {"trainer/a.py": "1"}}
    git = GitState(COMMIT, dirty=False)
    return ImageRecord(Shelf.ref, digest, "cpu", ("linux/amd64",), VERSIONS, git, digest_of(b"c"), inputs)


def checked(shelf: Shelf, **more: Any) -> Report:
    return verify(shelf, shelf.ref, now=NOW, **more)


def faults(report: Report) -> list[tuple[str, str]]:
    return [(row.check, row.status) for row in report.rows if row.status != OK]


def row_of(report: Report, check: str) -> tuple[str, str]:
    (row,) = [row for row in report.rows if row.check == check]
    return row.status, f"{row.what} {row.fix}"


def test_a_sound_image_passes_every_check(shelf: Shelf) -> None:
    digest = shelf.image(LAYERS, sound())
    report = checked(shelf, record=record(digest), budgets={"cpu": 1})
    assert (faults(report), report.exit_code, report.digest) == ([], 0, digest)
    first, media, others = CHECKS.split("|")
    assert [row.check for row in report.rows] == [*first.split(), media, *others.split()]
    assert [row.platform for row in report.rows] == ["", "", *["linux/amd64"] * 11]
    assert not [line for line in lines(report) if "linux/amd64: " in line], "one platform need not be told"
    assert ["as in image.json" in row_of(one, "digest")[1] for one in (report, checked(shelf))] == [True, False]


Change = Callable[[dict[str, Any]], object]


def setting(key: str, value: object) -> Change:
    return lambda config: config["config"].__setitem__(key, value)


def label(key: str, value: str = "") -> Change:
    """Without a value the label goes."""
    return lambda config: (
        config["config"]["Labels"].update({key: value}) if value else config["config"]["Labels"].pop(key)
    )


def history(text: str) -> Change:
    return lambda config: config["history"][0].__setitem__("created_by", text)


FAULTS: list[tuple[Change, str, str, str]] = [
    (setting("User", ""), "user", FAILED, "root"),
    (setting("User", "root:1000"), "user", FAILED, "root"),
    (setting("User", "00:1000"), "user", FAILED, "root"),
    (setting("User", "trainer"), "user", WARNING, "Kubernetes"),
    (setting("Entrypoint", None), "entrypoint", FAILED, "PID 1"),
    (setting("Entrypoint", ["/bin/sh", "-c", "python3 x"]), "entrypoint", FAILED, "SIGTERM"),
    (setting("Healthcheck", {"Test": ["CMD", "true"]}), "healthcheck", WARNING, "HEALTHCHECK"),
    (label(REVISION), "revision", FAILED, "no label"),
    (label(REVISION, "f" * 40), "revision", FAILED, "image.json has"),
    (label(DIRTY, "true"), "revision", WARNING, "no commit"),
    (label(TORCH, "2.9.0"), "versions", FAILED, "torch 2.9.0, not 2.13.0"),
    (label(TORCH), "versions", FAILED, "torch unknown, not 2.13.0"),
    (label(CODE), "inputs", FAILED, "inputs.code"),
    (history("|1 PIP_PASSWORD=hunter2hunter2 /bin/sh -c pip"), "secrets", FAILED, "PIP_PASSWORD"),
    (history("RUN pip install -i https://me:pw123@host/"), "secrets", FAILED, "an address"),
    (setting("Env", ["AWS_SECRET_ACCESS_KEY=abcdefgh12345678"]), "secrets", FAILED, "Env 1"),
    (label("note", "ghp_" + "a1B2" * 9), "secrets", FAILED, "label note: a GitHub token"),
]


@pytest.mark.parametrize(("change", "check", "status", "told"), FAULTS)
def test_each_fault_is_found_by_its_own_check_alone(
    shelf: Shelf, change: Change, check: str, status: str, told: str
) -> None:
    config = sound()
    change(config)
    report = checked(shelf, record=record(shelf.image(LAYERS, config)))
    assert faults(report) == [(check, status)]
    assert told in row_of(report, check)[1]
    assert report.exit_code == (1 if status == FAILED else 0)
    assert "; fix: " in next(line for line in lines(report) if check in line)
    assert not any(secret in "\n".join(lines(report)) for secret in ("hunter2", "pw123", "abcdefgh1234", "a1B2a1B2"))


@pytest.mark.parametrize(
    ("created", "status", "told"),
    [
        ("2026-08-23T00:00:00Z", OK, "90 days"),
        ("2026-08-23T00:00:00", OK, "90 days"),
        ("2026-08-22T23:59:59.123456789Z", WARNING, "90 days since its commit"),
        ("2026-11-22T00:00:00Z", OK, "0 days"),
        ("2026-11-22T00:00:01Z", WARNING, "impossible"),
        ("2013-01-01T00:00:00Z", WARNING, "days since its commit"),
        ("2012-12-31T00:00:00Z", WARNING, "impossible"),
        ("some day", WARNING, "unknown: made at 'some day'"),
        (None, WARNING, "unknown: made at ''"),
    ],
)
def test_the_age_is_that_of_the_commit(shelf: Shelf, created: str | None, status: str, told: str) -> None:
    shelf.image(LAYERS, sound() | {"created": created})
    found, said = row_of(checked(shelf), "age")
    assert (found, told in said) == (status, True), said


@pytest.mark.parametrize(
    ("sizes", "budgets", "status"),
    [
        (1 << 19, {"cpu": 1}, OK),
        ((1 << 19) + 1, {"cpu": 1}, FAILED),
        (1 << 30, {"cuda": 1}, OK),
        (1 << 30, None, OK),
    ],
)
def test_a_budget_may_be_filled_and_not_overrun(
    shelf: Shelf, sizes: int, budgets: dict[str, int] | None, status: str
) -> None:
    shelf.image(LAYERS, sound(), size=sizes)
    found, said = row_of(checked(shelf, budgets=budgets), "size")
    assert (found, "no budget for target cpu" in said) == (status, budgets == {"cuda": 1})


def test_more_layers_than_nodes_can_mount_are_found(shelf: Shelf) -> None:
    for count, status in ((127, OK), (128, FAILED)):
        many = [LAYERS[0]] * count
        shelf.image(many, sound(many))
        assert row_of(checked(shelf), "layers")[0] == status


def test_without_a_record_labels_must_still_be_there(shelf: Shelf) -> None:
    shelf.image(LAYERS)
    assert faults(checked(shelf)) == [("revision", FAILED), ("versions", FAILED), ("inputs", FAILED)]


def test_moved_tag_or_a_missing_platform_is_noticed_by_record(shelf: Shelf) -> None:
    was = shelf.image(LAYERS, sound())
    both = replace(record(was), platforms=("linux/amd64", "linux/arm64"))
    assert faults(checked(shelf, record=both)) == [("platforms", FAILED)]
    shelf.image(LAYERS, sound() | {"created": "2026-11-20T13:00:00Z"})
    report = checked(shelf, record=record(was))
    assert faults(report) == [("digest", FAILED)]
    assert f"deploy 127.0.0.1:5000/team/x@{was}" in row_of(report, "digest")[1]


@pytest.mark.parametrize(
    ("kind", "status", "told"),
    [
        (f"{OCI_TAR}+zstd", FAILED, "zstd"),
        (OCI_TAR, WARNING, "not compressed"),
        (f"{OCI_TAR}+gzip", OK, "OCI manifest"),
    ],
)
def test_layers_that_enroot_cannot_read_are_found(shelf: Shelf, kind: str, status: str, told: str) -> None:
    shelf.image(LAYERS, sound(), media_type=OCI_MANIFEST, layer_type=kind)
    found, said = row_of(checked(shelf), "media types")
    assert (found, told in said) == (status, True)


def test_index_is_checked_by_platform_with_its_attestations(shelf: Shelf) -> None:
    arm = {**sound(), "architecture": "arm64"}
    arm["config"]["User"] = "0"
    one, other = shelf.image(LAYERS, sound(), "a"), shelf.image(LAYERS, arm, "b")
    digest = shelf.index([entry(one, "linux/amd64"), entry(other, "linux/arm64")])
    wanted = replace(record(digest), platforms=("linux/amd64", "linux/arm64"))
    report = checked(shelf, record=wanted)
    assert report.digest == digest
    assert [(row.check, row.platform) for row in report.rows if row.status != OK] == [("user", "linux/arm64")]
    assert any("linux/arm64: runs as root" in line for line in lines(report))
    assert "docker manifest in an index, gzip" in {row.what for row in report.rows}
    shelf.index([entry(one, "linux/amd64"), attestation(other)])
    assert faults(checked(shelf)) == [("media types", WARNING)]


def test_a_program_reads_the_same_findings(shelf: Shelf) -> None:
    config = sound()
    config["config"]["User"] = "root"
    digest = shelf.image(LAYERS, config)
    told = json.loads(json.dumps(as_json(checked(shelf))))
    assert (told["version"], told["ref"], told["digest"], told["exit"]) == (2, shelf.ref, digest, 1)
    assert [row["check"] for row in told["rows"] if row["status"] == FAILED] == ["user"]


def test_odd_values_of_strangers_break_no_line(shelf: Shelf) -> None:
    config = sound() | {"created": "2026-11-20T00:00:00+00:00\n"}
    config["config"] |= {"User": "a\n\x1b[2J", "Entrypoint": ["/x\ny"], "Env": None}
    shelf.image(LAYERS, config)
    assert all(line.isprintable() for line in lines(checked(shelf)))
