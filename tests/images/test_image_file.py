"""image.json: what is written is what is read, and nothing else is."""

from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain import image_file
from lustrain.image_file import GitState, Record
from lustrain.problem import UserError

DIGEST = "sha256:" + "0f" * 32
RECORD = Record(
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
any_text = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
records = st.builds(
    Record,
    ref=st.from_regex(r"[a-z][a-z.]*(:[0-9]{1,5})?(/[a-z]+){1,3}:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", fullmatch=True),
    digest=hexadecimal.map("sha256:{}".format),
    target=st.sampled_from(["cpu", "cuda", "gaudi"]),
    platforms=st.lists(st.sampled_from(["linux/amd64", "linux/arm64", "linux/arm64/v8"]), min_size=1, max_size=3).map(
        tuple
    ),
    versions=st.dictionaries(any_text, any_text, max_size=4),
    git=st.builds(
        GitState,
        commit=st.none() | hexadecimal.map(lambda text: text[:40]),
        dirty=st.booleans(),
        changed=st.lists(any_text, max_size=3).map(tuple),
    ),
    content=hexadecimal | hexadecimal.map("sha256:{}".format),
    inputs=st.dictionaries(any_text, st.dictionaries(any_text, any_text, max_size=3), max_size=3),
)


def written(folder: Path, edit: dict[str, Any] | None = None, without: str = "") -> Path:
    path = folder / "image.json"
    image_file.write(path, RECORD)
    table = json.loads(path.read_text()) | (edit or {})
    table.pop(without, None)
    path.write_text(json.dumps(table))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        image_file.read(path)
    assert caught.value.exit_code == 2
    [line] = caught.value.problems
    assert "\n" not in line
    return line


@pytest.mark.slow
@given(record=records)
def test_any_record_comes_back_as_it_was(record: Record, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("record") / "image.json"
    image_file.write(path, record)
    assert image_file.read(path) == record


def test_what_is_deployed_is_the_digest(tmp_path: Path) -> None:
    image_file.write(tmp_path / "image.json", RECORD)
    assert image_file.read(tmp_path / "image.json").deployable == f"127.0.0.1:5000/team/trainer@{DIGEST}"
    assert replace(RECORD, ref="127.0.0.1:5000/team/trainer").deployable == f"127.0.0.1:5000/team/trainer@{DIGEST}"


def test_the_file_says_its_version_and_others_may_read_it(tmp_path: Path) -> None:
    image_file.write(tmp_path / "image.json", RECORD)
    assert json.loads((tmp_path / "image.json").read_text())["version"] == 1
    assert stat.S_IMODE((tmp_path / "image.json").stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["image.json"]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"version": 2}, "image.json: version = 2: a version of this file that is not known here; allowed: 1"),
        ({"version": True}, "image.json: version = True"),
        ({"version": "1"}, "image.json: version = '1'"),
        ({"digst": "x"}, "image.json: digst = 'x': unknown key; fix: did you mean digest?"),
        ({"digest": "sha256:abc"}, "image.json: digest = 'sha256:abc': is not a digest"),
        ({"digest": DIGEST.upper()}, "is not a digest"),
        ({"digest": f"{DIGEST}\n"}, "is not printable"),
        ({"digest": None}, "image.json: digest = None: wrong type"),
        ({"content": "abc"}, "image.json: content = 'abc': is not a content hash"),
        ({"git": {"commit": None, "dirty": 1}}, "image.json: git.dirty = 1: wrong type"),
        ({"git": {"commit": None, "dirty": "yes"}}, "image.json: git.dirty = 'yes': wrong type"),
        ({"platforms": []}, "image.json: platforms = []"),
        ({"platforms": "linux/amd64"}, "image.json: platforms = 'linux/amd64': wrong type"),
        ({"ref": f"registry/name@{DIGEST}"}, "is not a reference with a tag and no digest"),
        ({"ref": ""}, "image.json: ref = '': is not a reference"),
        ({"versions": {"torch": 2.13}}, "image.json: versions.torch = 2.13: wrong type"),
        ({"git": {"commit": "HEAD", "dirty": False}}, "image.json: git.commit = 'HEAD': is not a commit"),
        ({"git": {"dirty": False}}, "image.json: git.commit is missing"),
        ({"inputs": {"code": ["trainer/loop.py"]}}, "image.json: inputs.code ="),
    ],
)
def test_what_is_not_as_written_is_refused_in_one_line(tmp_path: Path, edit: dict[str, Any], told: str) -> None:
    assert told in refusal(written(tmp_path, edit))


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
    assert f"image.json: {key} is missing" in refusal(written(tmp_path, without=key))


def test_a_file_without_a_version_is_not_guessed_at(tmp_path: Path) -> None:
    assert "image.json: version = None" in refusal(written(tmp_path, without="version"))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, {"digest": "x", "content": "y"}, without="ref")
    with pytest.raises(UserError) as caught:
        image_file.read(path)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"version": 1, "digest": "a", "digest": "b"}', "the key 'digest' is given twice"),
        (b'{"version": NaN}', "NaN is not JSON"),
        (b"[]", "not an object"),
    ],
)
def test_what_is_no_json_object_is_one_line_with_the_fix(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "image.json").write_bytes(content)
    line = refusal(tmp_path / "image.json")
    assert told in line
    assert "fab image-build" in line


def test_a_missing_file_says_what_makes_one(tmp_path: Path) -> None:
    assert "no image was built here yet; fix: fab image-build" in refusal(tmp_path / "image.json")
    (tmp_path / "folder.json").mkdir()
    assert "cannot be read" in refusal(tmp_path / "folder.json")


def test_a_record_that_nobody_could_read_is_not_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(UserError) as caught:
        image_file.write(path, Record(**{**vars(RECORD), "digest": "latest"}))
    assert caught.value.exit_code == 2
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["image.json"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device") as caught:
        image_file.write(path, RECORD)
    assert caught.value.exit_code == 1
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["image.json"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        image_file.write(tmp_path / "missing" / "image.json", RECORD)


def test_whoever_reads_while_others_write_finds_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "image.json"
    image_file.write(path, RECORD)
    long = Record(**{**vars(RECORD), "inputs": {"code": {f"trainer/{number}.py": "0" * 64 for number in range(3000)}}})
    stop = threading.Event()
    failed: list[Exception] = []

    def keep_writing() -> None:
        try:
            while not stop.is_set():
                image_file.write(path, RECORD)
                image_file.write(path, long)
        except UserError as error:
            failed.append(error)

    writers = [threading.Thread(target=keep_writing) for _ in range(2)]
    for one in writers:
        one.start()
    try:
        assert all(image_file.read(path) in (RECORD, long) for _ in range(40))
    finally:
        stop.set()
        for one in writers:
            one.join()
    assert not failed
