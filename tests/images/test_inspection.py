"""`fab image-verify`: a sound image passes every check, and each fault is found by exactly its own."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from images.check import inspection
from images.check.inspection import FAILED, OK, WARNING, Report, as_json, lines, verify
from images.registry.client import OCI_MANIFEST
from lustrain.image_file import GitState, Record
from lustrain.problem import UserError
from rehearsal.lab.containers.registry import Registry
from tests.images.hand import OCI_TAR, Hand, attestation, entry
from tests.images.tars import config_of, layer, sha256

TARS = [layer({"bin/sh": b"x" * 3000}), layer({"opt/code": b"y"})]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VERSIONS = {"torch": "2.13.0", "python": "3.11"}
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def sound() -> dict[str, Any]:
    labels = {
        "org.opencontainers.image.revision": COMMIT,
        "dev.lustrain.git.dirty": "false",
        "dev.lustrain.target": "cpu",
        **{f"dev.lustrain.versions.{name}": value for name, value in VERSIONS.items()},
        **{f"dev.lustrain.inputs.{name}": "abc" for name in ("base", "code")},
    }
    config = copy.deepcopy(config_of(TARS, history=[{"created_by": "RUN base"}, {"created_by": "COPY code"}]))
    config["config"]["Labels"] = labels
    return config


@pytest.fixture
def hand(session_registry: Registry) -> Hand:
    """A repository of its own in a registry that lives on: starting one for each test takes longer than the tests."""
    return Hand(session_registry, f"team/{uuid4().hex}")


def record(hand: Hand, digest: str) -> Record:
    inputs = {"base": {"image": "x"}, "code": {"trainer/a.py": "1"}}
    git = GitState(COMMIT, dirty=False)
    return Record(hand.ref(), digest, "cpu", ("linux/amd64",), VERSIONS, git, sha256(b"c"), inputs)


def checked(hand: Hand, **more: Any) -> Report:
    return verify(hand.client, hand.ref(), now=NOW, **more)


def faults(report: Report) -> list[tuple[str, str]]:
    return [(row.check, row.status) for row in report.rows if row.status != OK]


def test_a_sound_image_passes_every_check(hand: Hand) -> None:
    digest = hand.image(TARS, sound())
    report = checked(hand, record=record(hand, digest), budgets={"cpu": 1})
    assert faults(report) == []
    assert (report.exit_code, report.digest) == (0, digest)
    checks = ["media types", "revision", "versions", "inputs", "age", "layers", "size", "user", "entrypoint"]
    assert [row.check for row in report.rows] == ["digest", "platforms", *checks, "healthcheck", "secrets"]
    assert {row.platform for row in report.rows[2:]} == {"linux/amd64"}


def setting(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["config"].__setitem__(key, value)


def label(key: str, value: str | None) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        labels = config["config"]["Labels"]
        labels.pop(key, None) if value is None else labels.__setitem__(key, value)

    return change


def history(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["history"][0].__setitem__("created_by", text)


def created(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.__setitem__("created", text)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str, str, str]] = {
    "root by default": (setting("User", ""), "user", FAILED, "root"),
    "root by name": (setting("User", "root:1000"), "user", FAILED, "root"),
    "root by number": (setting("User", "00:1000"), "user", FAILED, "root"),
    "a user by name": (setting("User", "trainer"), "user", WARNING, "Kubernetes"),
    "no entrypoint": (setting("Entrypoint", None), "entrypoint", FAILED, "PID 1"),
    "a shell": (setting("Entrypoint", ["/bin/sh", "-c", "python3 x"]), "entrypoint", FAILED, "SIGTERM"),
    "a health check": (setting("Healthcheck", {"Test": ["CMD", "true"]}), "healthcheck", WARNING, "HEALTHCHECK"),
    "no revision": (label("org.opencontainers.image.revision", None), "revision", FAILED, "no label"),
    "another revision": (label("org.opencontainers.image.revision", "f" * 40), "revision", FAILED, "image.json has"),
    "a dirty tree": (label("dev.lustrain.git.dirty", "true"), "revision", WARNING, "no commit"),
    "another torch": (label("dev.lustrain.versions.torch", "2.9.0"), "versions", FAILED, "torch 2.9.0, not 2.13.0"),
    "no torch": (label("dev.lustrain.versions.torch", None), "versions", FAILED, "torch unknown, not 2.13.0"),
    "a layer's inputs unsaid": (label("dev.lustrain.inputs.code", None), "inputs", FAILED, "code"),
    "an old one": (created("2026-08-01T00:00:00.123456789Z"), "age", WARNING, "111 days"),
    "no date": (lambda config: config.pop("created"), "age", WARNING, "unknown"),
    "the epoch": (created("1970-01-01T00:00:00Z"), "age", WARNING, "impossible"),
    "from tomorrow": (created("2027-01-01T00:00:00Z"), "age", WARNING, "clock"),
    "a build argument": (history("|1 PIP_PASSWORD=hunter2hunter2 /bin/sh -c pip"), "secrets", FAILED, "PIP_PASSWORD"),
    "a login in an address": (history("RUN pip install -i https://me:pw123@host/"), "secrets", FAILED, "an address"),
    "a key in the environment": (
        setting("Env", ["AWS_SECRET_ACCESS_KEY=abcdefgh12345678"]),
        "secrets",
        FAILED,
        "Env 1",
    ),
    "a token in a label": (label("note", "ghp_" + "a1B2" * 9), "secrets", FAILED, "label note: a GitHub token"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_its_own_check_alone(hand: Hand, name: str) -> None:
    change, check, state, told = FAULTS[name]
    config = sound()
    change(config)
    digest = hand.image(TARS, config)
    report = checked(hand, record=record(hand, digest))
    assert faults(report) == [(check, state)]
    (row,) = [row for row in report.rows if row.status != OK]
    assert told in f"{row.what} {row.fix}"
    assert row.fix
    assert report.exit_code == (1 if state == FAILED else 0)
    assert not any(secret in "\n".join(lines(report)) for secret in ("hunter2", "pw123", "abcdefgh1234", "a1B2a1B2"))


def test_without_a_record_labels_must_still_be_there(hand: Hand) -> None:
    hand.image(TARS, config_of(TARS))
    assert faults(checked(hand)) == [("revision", FAILED), ("versions", FAILED), ("inputs", FAILED)]


def test_a_tag_that_moved_is_found_by_its_digest(hand: Hand) -> None:
    was = hand.image(TARS, sound())
    moved = sound()
    moved["created"] = "2026-11-20T13:00:00Z"
    hand.image(TARS, moved)
    report = checked(hand, record=record(hand, was))
    assert faults(report) == [("digest", FAILED)]
    assert f"deploy {hand.name}@{was}" in "\n".join(lines(report))


def test_a_platform_of_the_record_that_is_missing_is_found(hand: Hand) -> None:
    digest = hand.image(TARS, sound())
    wanted = replace(record(hand, digest), platforms=("linux/amd64", "linux/arm64"))
    assert faults(checked(hand, record=wanted)) == [("platforms", FAILED)]


def test_layers_and_bytes_over_the_limits_are_found(hand: Hand) -> None:
    config = sound()
    hand.image(TARS, config)
    assert faults(checked(hand, budgets={"cpu": 0})) == [("size", FAILED)]
    unknown = checked(hand, budgets={"cuda": 0})
    assert faults(unknown) == []
    assert next(row.what for row in unknown.rows if row.check == "size").endswith(" to pull, no budget for target cpu")
    assert faults(checked(hand, oldest_days=0, budgets={"cpu": 1})) == [("age", WARNING)]
    large = [layer({"opt/data": os.urandom(3 << 19)})]
    hand.image(large, {**config, "rootfs": config_of(large)["rootfs"]}, tag="large")
    sizes = [verify(hand.client, hand.ref("large"), now=NOW, budgets={"cpu": most}) for most in (1, 2)]
    assert [("size", FAILED) in faults(report) for report in sizes] == [True, False], "1.5 MiB"
    many = [TARS[0]] * 128
    hand.image(many, {**sound(), "rootfs": config_of(many)["rootfs"]})
    assert faults(checked(hand)) == [("layers", FAILED)]


def test_the_budget_itself_may_be_filled_and_not_a_byte_more() -> None:
    sizes = [inspection._size(size, "cpu", {"cpu": 1}).status for size in (1 << 20, (1 << 20) + 1)]
    assert sizes == [OK, FAILED]


@pytest.mark.parametrize(
    ("kind", "state", "told"),
    [
        (f"{OCI_TAR}+zstd", FAILED, "zstd"),
        (OCI_TAR, WARNING, "not compressed"),
        (f"{OCI_TAR}+gzip", OK, "OCI manifest"),
    ],
)
def test_layers_that_enroot_cannot_read_are_found(hand: Hand, kind: str, state: str, told: str) -> None:
    hand.image(TARS, sound(), media_type=OCI_MANIFEST, layer_type=kind)
    report = checked(hand)
    assert faults(report) == ([] if state == OK else [("media types", state)])
    assert told in next(row.what for row in report.rows if row.check == "media types")


def test_an_index_is_checked_platform_by_platform_and_its_attestations_are_told(hand: Hand) -> None:
    options = {"media_type": OCI_MANIFEST, "layer_type": f"{OCI_TAR}+gzip"}
    arm = {**sound(), "architecture": "arm64"}
    arm["config"]["User"] = "0"
    one, other = hand.image(TARS, sound(), tag="a", **options), hand.image(TARS, arm, tag="b", **options)
    digest = hand.index([entry(one, "linux/amd64"), entry(other, "linux/arm64")])
    report = checked(hand)
    assert report.digest == digest
    assert [(row.check, row.platform) for row in report.rows if row.status != OK] == [("user", "linux/arm64")]
    assert any("linux/arm64: runs as root" in line for line in lines(report))
    wanted = replace(record(hand, digest), platforms=("linux/amd64", "linux/arm64"))
    assert faults(checked(hand, record=wanted)) == [("user", FAILED)]
    hand.index([entry(one, "linux/amd64"), attestation(other)])
    assert faults(checked(hand)) == [("media types", WARNING)]


def test_an_image_that_is_not_there_fails_and_a_mistyped_one_is_refused(hand: Hand) -> None:
    report = verify(hand.client, hand.ref("absent"))
    assert (report.exit_code, [row.check for row in report.rows]) == (1, ["manifest"])
    assert len(lines(report)) == 1
    with pytest.raises(UserError) as caught:
        verify(hand.client, "http://nonsense")
    assert caught.value.exit_code == 2


def test_a_program_reads_the_same_findings(hand: Hand) -> None:
    config = sound()
    config["config"]["User"] = "root"
    digest = hand.image(TARS, config)
    told = json.loads(json.dumps(as_json(checked(hand))))
    assert (told["version"], told["ref"], told["digest"], told["exit"]) == (2, hand.ref(), digest, 1)
    assert [row["check"] for row in told["rows"] if row["status"] == FAILED] == ["user"]


def test_odd_values_of_strangers_break_no_line(hand: Hand) -> None:
    config = sound()
    config["config"] |= {"User": "a\n\x1b[2J", "Entrypoint": ["/x\ny"], "Env": None}
    config["created"] = str(NOW - timedelta(days=1)) + "\n"
    hand.image(TARS, config)
    assert all(line.isprintable() for line in lines(checked(hand)))
