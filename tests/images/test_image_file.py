"""image.json: what is written is what is read, and nothing else is."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain import image_file
from lustrain.image_file import GitState, ImageRecord
from lustrain.problem import UserError

DIGEST = "sha256:" + "0f" * 32
RECORD = ImageRecord(
    ref="127.0.0.1:5000/team/trainer:cpu-torch2.13.0-py311-g0123456789ab",
    digest=DIGEST,
    target="cpu",
    platforms=("linux/amd64",),
    versions={"python": "3.11", "torch": "2.13.0"},
    git=GitState("0123456789abcdef0123456789abcdef01234567", dirty=True, changed=("trainer/loop.py",)),
    content=DIGEST,
    inputs={"base": {"BASE_IMAGE": "x@y"}, "code": {"trainer/loop.py": "ab"}},
)

hexadecimal = st.text("0123456789abcdef", min_size=64, max_size=64)
digests = hexadecimal.map("sha256:{}".format)
any_text = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
platforms = st.sampled_from(["linux/amd64", "linux/arm64", "linux/arm64/v8"])
commits = st.none() | hexadecimal | hexadecimal.map(lambda text: text[:40])
records = st.builds(
    ImageRecord,
    ref=st.from_regex(r"[a-z][a-z.]*(:[0-9]{1,5})?(/[a-z]+){1,3}:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", fullmatch=True),
    digest=digests,
    target=st.sampled_from(["cpu", "cuda", "gaudi"]),
    platforms=st.lists(platforms, min_size=1, max_size=3).map(tuple),
    versions=st.dictionaries(any_text, any_text, max_size=4),
    git=st.builds(GitState, commits, st.booleans(), st.lists(any_text, max_size=3).map(tuple)),
    content=hexadecimal | digests,
    inputs=st.dictionaries(any_text, st.dictionaries(any_text, any_text, max_size=3), max_size=3),
)


def written(folder: Path, edit: dict[str, Any] | None = None, without: str = "") -> Path:
    path = folder / "image.json"
    image_file.write(path, RECORD)
    table = json.loads(path.read_text()) | (edit or {})
    table.pop(without, None)
    path.write_text(json.dumps(table))
    return path


def refusal(path: Path) -> list[str]:
    """What each problem is about."""
    with pytest.raises(UserError) as caught:
        image_file.read(path)
    assert caught.value.exit_code == 2
    assert not [line for line in caught.value.problems if "\n" in line]
    return [line.removeprefix("image.json: ").partition(": ")[0] for line in caught.value.problems]


@pytest.mark.slow
@given(record=records)
def test_any_record_comes_back_as_it_was(record: ImageRecord, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("record") / "image.json"
    image_file.write(path, record)
    assert image_file.read(path) == record
    assert json.loads(path.read_text())["version"] == 1


def test_what_is_deployed_is_the_digest() -> None:
    for ref in (RECORD.ref, "127.0.0.1:5000/team/trainer"):
        assert replace(RECORD, ref=ref).deployable == f"127.0.0.1:5000/team/trainer@{DIGEST}"


CLEAN = {"commit": None, "dirty": False}


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"version": 2}, "version = 2"),
        ({"version": True}, "version = True"),
        ({"version": "1"}, "version = '1'"),
        ({"digst": "x"}, "digst = 'x'"),
        ({"digest": "sha256:abc"}, "digest = 'sha256:abc'"),
        ({"digest": "SHA256:" + "0F" * 32}, "digest = 'SHA256:" + "0F" * 32 + "'"),
        ({"digest": None}, "digest = None"),
        ({"content": "abc"}, "content = 'abc'"),
        ({"git": CLEAN | {"dirty": 1}}, "git.dirty = 1"),
        ({"git": CLEAN | {"dirty": "yes"}}, "git.dirty = 'yes'"),
        ({"git": CLEAN | {"commit": "HEAD"}}, "git.commit = 'HEAD'"),
        ({"git": {"dirty": False}}, "git.commit is missing"),
        ({"platforms": []}, "platforms = []"),
        ({"platforms": "linux/amd64"}, "platforms = 'linux/amd64'"),
        ({"ref": "registry/name@sha256:12"}, "ref = 'registry/name@sha256:12'"),
        ({"versions": {"torch": 2.13}}, "versions.torch = 2.13"),
        ({"inputs": {"code": ["trainer/loop.py"]}}, "inputs.code = ['trainer/loop.py']"),
    ],
)
def test_what_is_not_as_written_is_refused_in_one_line(tmp_path: Path, edit: dict[str, Any], told: str) -> None:
    assert refusal(written(tmp_path, edit)) == [told]


HOSTILE = ("--help", "$(reboot)", "a:b/../..:t", "x", "127.0.0.1:5000/team/trainer", "\x1b[2J", "a\x00", "tpu", "")
LEAVES = {
    "ref": {"ref": ...},
    "digest": {"digest": ...},
    "target": {"target": ...},
    "platform": {"platforms": [...]},
    "commit": {"git": {"commit": ..., "dirty": False}},
    "content": {"content": ...},
}
SHOWN = {
    "version": {"versions": {"torch": ...}},
    "name of a version": {"versions": {...: "1"}},
    "changed": {"git": {"commit": None, "dirty": True, "changed": [...]}},
    "layer": {"inputs": {...: {}}},
    "input": {"inputs": {"code": {...: "1"}}},
}


def put(value: str, into: Any) -> Any:
    """The same with the value in place of the dots."""
    if isinstance(into, dict):
        return {put(value, key): put(value, inner) for key, inner in into.items()}
    return [put(value, inner) for inner in into] if isinstance(into, list) else value if into is ... else into


@pytest.mark.parametrize("leaf", [*LEAVES, *SHOWN])
def test_no_text_that_is_hostile_is_taken(leaf: str, tmp_path: Path) -> None:
    """What a cluster runs has a form; what is only shown moves no cursor."""
    for value in HOSTILE if leaf in LEAVES else [value for value in HOSTILE if not value.isprintable()]:
        refusal(written(tmp_path, put(value, LEAVES.get(leaf) or SHOWN[leaf])))


@pytest.mark.parametrize("key", ["ref", "digest", "target", "platforms", "versions", "git", "content", "inputs"])
def test_no_key_has_a_default(tmp_path: Path, key: str) -> None:
    assert refusal(written(tmp_path, without=key)) == [f"{key} is missing"]
    assert refusal(written(tmp_path, without="version")) == ["version = None"]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    assert len(refusal(written(tmp_path, {"digest": "x", "content": "y"}, without="ref"))) == 3


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b'{"version": NaN}'),
        b'{"version": 1, "digest": "a", "digest": "b"}',
    ],
)
def test_what_is_missing_or_no_json_object_is_one_line_with_fix(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "image.json").write_bytes(content)
    with pytest.raises(UserError, match=r"fix: fab image-build --push$") as caught:
        image_file.read(tmp_path / "image.json")
    assert (len(caught.value.problems), caught.value.exit_code) == (1, 2)


def test_a_record_that_nobody_could_read_is_not_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(UserError) as caught:
        image_file.write(path, replace(RECORD, digest="latest"))
    assert caught.value.exit_code == 2
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["image.json"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """What a full disk leaves is shown of `lustrain.files`."""
    with pytest.raises(UserError, match="cannot be written") as caught:
        image_file.write(tmp_path / "missing" / "image.json", RECORD)
    assert caught.value.exit_code == 1
