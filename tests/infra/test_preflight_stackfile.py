"""Stack files, as Pulumi would read them: what is wrong with one is one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from invoke.context import Context as Invocation
from invoke.exceptions import Exit

from infra import tasks
from infra.config import parse
from infra.preflight import stackfile
from lustrain.problem import UserError
from tests.infra.edits import config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program folder of the test, without a region in the environment."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(folder: Path, stack: str, values: dict[str, Any]) -> None:
    (folder / f"Pulumi.{stack}.yaml").write_text(yaml.safe_dump({"config": values}), encoding="utf-8")


def test_region_and_cluster_are_read_as_pulumi_reads_them(folder: Path) -> None:
    write(folder, "mine", config("rehearsal"))
    stack = stackfile.read("mine", folder)
    assert (stack.region, stack.spec.name, stackfile.stacks(folder)) == ("us-east-1", "rehearsal", ["mine"])


def test_environment_names_the_region_where_the_file_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = config("rehearsal")
    del values["aws:region"]
    write(folder, "mine", values)
    assert stackfile.read("mine", folder).region is None
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert stackfile.read("mine", folder).region == "eu-west-1"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("config: [", "is not YAML"),
        ("- a", "holds no keys"),
        ("other: 1", "config is missing"),
        ("config: {}", "lustrain:cluster is missing"),
        ("config: " + "[" * 3000, "nested too deep"),
        ("when: 2026-13-45T00:00:00Z", "month"),
        ("config:\n  aws:region: {a: 1}", "aws:region = {'a': 1}: is not text; allowed: like us-east-1"),
        ("config:\n  aws:region: 7", "is not text"),
        ('config:\n  aws:region: "us-east-1\\n"', "must be the name of a region"),
        ('config:\n  aws:region: "\\uDC80"', "must be the name of a region"),
        ("config:\n  a: {b: [{c: 1,\n    d: 2, c: 3}]}", r"config\.a\.b\.0\.c stands twice, again in line 3; fix: "),
        ("config:\n  ? 'a\\e'\n  : &x {z: 1, z: 1}\n  b: *x", "config.a.*z stands twice"),
    ],
)
def test_a_broken_file_is_one_line(folder: Path, text: str, word: str) -> None:
    (folder / "Pulumi.mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=word) as caught:
        stackfile.read("mine", folder)
    assert "\n" not in str(caught.value)


def test_keys_of_several_tables_or_an_anchor_are_not_duplicates(folder: Path) -> None:
    text = "lustrain:cluster: {a: &x {b: 1, c: 2}, d: [{b: 1}, {<<: *x, b: 3}, *x], e: &loop [*loop]}"
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="unknown key") as caught:
        stackfile.read_spec(folder / "spec.yaml")
    assert "twice" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "x\ny", "x" * 5000, "../mine", "a b", "\udc80", "é", "x" * 101])
def test_what_is_no_stacks_name_is_one_printable_line(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="must be the name of a stack; allowed: ") as caught:
        stackfile.read(name, folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere"), os.mkfifo])
def test_what_is_no_file_is_said_to_be_none(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder / "Pulumi.zz.yaml")
    assert stackfile.stacks(folder) == ["zz"]
    with pytest.raises(UserError, match=r"Pulumi\.zz\.yaml is not a file"):
        stackfile.read("zz", folder)


def test_a_key_with_a_line_end_is_told_in_one_line() -> None:
    with pytest.raises(UserError) as caught:
        parse({**config("rehearsal")["lustrain:cluster"], "a\nb": 1})
    (line,) = caught.value.problems
    assert (line.isprintable(), "a\\nb = 1: " in line) == (True, True)


def test_every_mistake_of_the_form_is_a_line_with_what_was_meant(folder: Path) -> None:
    values = config("rehearsal")
    values["lustrain:cluster"] |= {"bugdet": {}, "zone_id": "us-east-1a"}
    write(folder, "mine", values)
    with pytest.raises(UserError, match=r"did you mean budget\?") as caught:
        stackfile.read("mine", folder)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("aws:regio", "did you mean aws:region?"),
        ("AWS:Region", "did you mean aws:region?"),
        ("lustrain:clustr", "did you mean lustrain:cluster?"),
        ("lustrian:cluster", "did you mean lustrain:cluster?"),
        ("lustrain:budget", "remove it; known here: lustrain:cluster"),
        ("aws:profile", ""),
        ("gcp:region", ""),
        ("aws-native:region", ""),
    ],
)
def test_unread_key_is_reported_another_providers_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, fix: str
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    write(folder, "mine", {**config("rehearsal"), key: "us-east-1"})
    try:
        stackfile.read("mine", folder)
        told = []
    except UserError as error:
        told = error.problems
    assert told == ([f"Pulumi.mine.yaml: {key}: unknown key, which nothing reads; fix: {fix}"] if fix else [])


def test_a_stack_that_cannot_be_read_hides_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "bad", {**config("rehearsal"), "lustrain:cluster": {"nme": "x"}})
    write(folder, "good", config("rehearsal"))
    read = stackfile.read
    monkeypatch.setattr(stackfile, "stacks", lambda: ["bad", "good"])
    monkeypatch.setattr(stackfile, "read", lambda stack: read(stack, folder))
    with pytest.raises(Exit) as ended:
        tasks.preflight(Invocation())
    assert ended.value.code == 2
    said = capsys.readouterr().out
    assert said.startswith("good:\ntrain: 2 x g6e.8xlarge, spot")
    assert "no errors" in said
    assert all(line.startswith("bad: lustrain:cluster.") for line in str(ended.value.message).splitlines())
