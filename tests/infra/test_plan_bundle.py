"""The lifecycle bundle has one name for one content, and holds nothing that fails on a node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.plan.bundle import FOLDER, MAX_BYTES, ON_CREATE, ON_INIT, Bundle, bundle
from infra.problems import InfraError

SCRIPT = b"#!/bin/bash\necho here\n"
FILES = st.dictionaries(
    st.sampled_from(["a", "b", "ab", "d/a", "d/b"]), st.text("abd/\n\0", max_size=4).map(str.encode), min_size=1
)


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def of(folder: Path, files: dict[str, bytes]) -> Bundle:
    return bundle(written(folder, files), entries=())


def test_our_own_bundle_is_in_order_and_holds_both_entries() -> None:
    ours = bundle()
    assert {ON_INIT, ON_CREATE} <= {file.path for file in ours.files}
    assert ours.prefix == f"lifecycle/{ours.sha}"
    assert all(file.source.is_relative_to(FOLDER) for file in ours.files)


def test_equal_files_have_equal_names_whenever_and_in_whichever_order_they_were_written(tmp_path: Path) -> None:
    files = {"a.sh": SCRIPT, "z.sh": SCRIPT, "deep/b.json": b"{}"}
    first = of(tmp_path / "one", files)
    second = of(tmp_path / "two", dict(reversed(files.items())))
    os.utime(tmp_path / "two" / "a.sh", (0, 0))
    assert first.sha == second.sha == bundle(tmp_path / "two", entries=()).sha
    assert [file.path for file in first.files] == ["a.sh", "deep/b.json", "z.sh"]
    assert first.key(first.files[1]) == f"lifecycle/{first.sha}/deep/b.json"


@given(FILES, FILES)
def test_names_are_equal_exactly_when_paths_and_contents_are(
    tmp_path_factory: pytest.TempPathFactory, left: dict[str, bytes], right: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("bundles")
    shas = [of(folder / side, files).sha for side, files in (("left", left), ("right", right))]
    assert (shas[0] == shas[1]) == (left == right)


def test_hidden_files_and_caches_do_not_change_the_name(tmp_path: Path) -> None:
    plain = of(tmp_path, {"a.sh": SCRIPT})
    assert of(tmp_path, {".a.sh.swp": b"x", "__pycache__/a.pyc": b"x"}) == plain


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.sh": b"#!/bin/bash\r\necho here\r\n"}, "lifecycle/a.sh = 'CRLF': has Windows line ends"),
        ({"facts.json": b"{}\r\n"}, "lifecycle/facts.json = 'CRLF': has Windows line ends"),
        ({"a.sh": b"\xef\xbb\xbf#!/bin/bash\n"}, "lifecycle/a.sh = 'BOM': begins with a byte order mark"),
        ({"a.sh": b"echo here\n"}, "lifecycle/a.sh = 'echo here': is no first line of a script"),
        ({"a.sh": b""}, "lifecycle/a.sh = '': is no first line of a script"),
        ({"big.pyz": bytes(MAX_BYTES + 1)}, f"lifecycle/ = {MAX_BYTES + 1}: bytes in all are too many"),
    ],
)
def test_what_would_fail_on_a_node_is_told_before(tmp_path: Path, files: dict[str, bytes], said: str) -> None:
    with pytest.raises(InfraError) as told:
        of(tmp_path, files)
    assert [line[: len(said)] for line in told.value.problems] == [said]


def test_all_problems_are_told_at_once_and_missing_entries_by_name(tmp_path: Path) -> None:
    written(tmp_path, {ON_INIT: b"echo\r\n"})
    with pytest.raises(InfraError) as told:
        bundle(tmp_path)
    assert [line.split(" = ")[0] for line in told.value.problems] == [
        f"lifecycle/{name}" for name in (ON_CREATE, ON_INIT, ON_INIT)
    ]


def test_a_packed_agent_may_hold_any_bytes(tmp_path: Path) -> None:
    assert of(tmp_path, {"node_setup.pyz": b"PK\r\n\xef\xbb\xbf"}).files[0].path == "node_setup.pyz"


def test_a_link_is_refused(tmp_path: Path) -> None:
    written(tmp_path, {"a.sh": SCRIPT})
    (tmp_path / "b.sh").symlink_to("a.sh")
    with pytest.raises(InfraError, match=r"lifecycle/b\.sh = 'link'"):
        bundle(tmp_path, entries=())
