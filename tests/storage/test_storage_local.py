"""A folder as a store: bad places, full disks, killed and competing writers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme

from lustrain.problem import UserError
from tests.checkpoint.saving import small_disk
from tests.seeds import chance
from trainer.storage import ObjectMissingError, StorageError, open_store
from trainer.storage.folder import STALE_SECONDS, Folder


@contextmanager
def running(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Python at work in a folder, until the block ends: a kill."""
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def unfinished(root: Path) -> list[Path]:
    return sorted((root / ".lustrain").glob(".tmp-*"))


def test_a_store_can_be_named_by_path_or_file_uri(tmp_path: Path) -> None:
    open_store(str(tmp_path / "a run")).put("k", b"x")
    for uri in (f"file://{tmp_path}/a%20run", f"file://localhost{tmp_path}/a%20run"):
        assert open_store(uri, create=False).read("k")[0] == b"x"


@pytest.mark.parametrize(
    ("place", "create", "why"),
    [
        ("{}/file", True, "a folder is needed"),
        ("{}/file/below/it", True, "a folder is needed"),
        ("{}/file", False, "is not a folder"),
        ("{}/missing", False, "there is no such folder"),
        ("gs://bucket/run", True, "unknown kind of URI"),
        ("file://server/share", True, "unknown kind of URI"),
        ("", True, "is not a path"),
        ("a\0b", True, "is not a path"),
    ],
)
def test_an_unusable_place_is_one_line_and_nothing_is_written(
    tmp_path: Path, place: str, create: bool, why: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=why) as caught:
        open_store(place.format(tmp_path), create=create, name="run.uri")
    (line,) = caught.value.problems
    assert line.startswith("run.uri = ")
    assert "\n" not in line
    assert os.listdir(tmp_path) == ["file"]


def test_a_key_cannot_lie_below_another_object(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"x")
    for key, why in (("a/b/c", "a part of the path is a file"), ("a", "a folder has the object's name")):
        with pytest.raises(StorageError, match=f"/{key}'.*{why}"):
            store.put(key, b"x")
        with pytest.raises(ObjectMissingError):
            store.read(key)
    assert unfinished(tmp_path) == []


def test_emptied_folders_go_and_others_stay(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for key in ("attempts/a/rank-0", "attempts/a/rank-1", "attempts/b/rank-0"):
        store.put(key, b"x")
    store.delete("attempts/a/rank-0")
    assert (tmp_path / "attempts/a").is_dir()
    store.delete("attempts/a/rank-1")
    assert os.listdir(tmp_path / "attempts") == ["b"]
    store.delete("attempts/b/rank-0")
    assert os.listdir(tmp_path) == [".lustrain"]


def test_a_put_survives_the_removal_of_its_emptied_folder(tmp_path: Path) -> None:
    """One thread puts and another deletes in the same folder, which therefore comes and goes all the time."""
    store = open_store(str(tmp_path))

    def come_and_go(name: str) -> None:
        for _ in range(15):
            store.put(f"a/b/{name}", b"x")
            store.delete(f"a/b/{name}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, ["w", "x", "y", "z"]))
    assert list(store.list()) == []


HOLD = """
import sys, time
from pathlib import Path
from trainer.storage.folder import Folder
with Folder(Path(sys.argv[1])).unfinished() as (fd, tmp):
    print(tmp, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_writer_left_is_swept_and_never_listed(tmp_path: Path) -> None:
    with running(HOLD, tmp_path) as writer:
        assert writer.stdout
        assert writer.stdout.readline()
        store = open_store(str(tmp_path))
        store.put("k", b"x")
        assert len(unfinished(tmp_path)) == 1, "the writer lives, its file is not ours to remove"
        assert [info.key for info in store.list()] == ["k"]
    assert [info.key for info in store.list()] == ["k"]
    open_store(str(tmp_path)).put("k", b"x")
    assert unfinished(tmp_path) == []


def test_unfinished_file_of_another_machine_goes_when_it_is_old(tmp_path: Path) -> None:
    open_store(str(tmp_path)).put("k", b"x")
    young, old = (tmp_path / ".lustrain" / f".tmp-otherone-{name}" for name in ("young", "old"))
    young.write_bytes(b"x")
    old.write_bytes(b"x")
    past = time.time() - STALE_SECONDS - 60
    os.utime(old, (past, past))
    open_store(str(tmp_path)).put("k", b"x")
    assert unfinished(tmp_path) == [young]


PUT_FOREVER = """
import os, sys
from awscrt.checksums import crc64nvme
from trainer.storage import open_store
store = open_store(sys.argv[1])
body = bytes(range(256)) * 8192
fd = os.memfd_create("x")
os.write(fd, body)
i = 0
while True:
    for act in (
        lambda: store.put_file(f"attempts/{i % 3}/rank", f"/proc/self/fd/{fd}", len(body), crc64nvme(body)),
        lambda: store.put(f"manifests/{i}.json", body[:1000], if_absent=True),
        lambda: store.delete(f"manifests/{i}.json"),
    ):
        print(i, flush=True)
        act()
    i += 1
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_objects_only(tmp_path: Path) -> None:
    moments = chance("kills in a folder")
    body = bytes(range(256)) * 8192
    found = 0
    for _ in range(12):
        with running(PUT_FOREVER, tmp_path) as process:
            assert process.stdout
            # It says when it begins a call, and the kill comes while that is under way.
            for _ in range(moments.randrange(2, 40)):
                process.stdout.readline()
        store = open_store(str(tmp_path))
        for info in store.list():
            assert store.read(info.key)[0] == (body if info.key.startswith("attempts") else body[:1000])
            found += 1
            store.delete(info.key)
    assert found > 12


def test_a_lock_held_by_a_stopped_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.storage.folder.LOCK_SECONDS", 0.2)
    store = open_store(str(tmp_path))
    with Folder(tmp_path).locked(), pytest.raises(StorageError, match="another process has held its lock"):
        store.put("k", b"x")
    store.put("k", b"x")


def test_a_full_or_read_only_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    body = bytes(3_000_000)
    (tmp_path / "file").write_bytes(body)
    file = (str(tmp_path / "file"), len(body), crc64nvme(body))
    with small_disk(tmp_path / "small", 4) as small:
        store = open_store(str(small))
        store.put_file("fits", *file)
        with pytest.raises(StorageError, match=r"no space left: 3 MB needed, 1\.19 MB free; fix: free space there"):
            store.put_file("too-large", *file)
        with pytest.raises(StorageError, match=f"{small}.*no space left: 2 MB needed"):
            store.put("small", bytes(2_000_000))
        names = [name for _, _, names in os.walk(small) for name in names]
        assert sorted(names) == [".lock", "fits"], "only what was unfinished is gone"
        store.delete("fits")
        store.put_file("fits-again", *file)
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        with pytest.raises(StorageError, match="Read-only file system"):
            store.put("late", b"x")
        assert store.read("fits-again")[0] == body


@pytest.mark.slow
def test_a_large_object_is_read_by_several_threads(tmp_path: Path) -> None:
    body = os.urandom(64 << 20)
    (tmp_path / "data").write_bytes(body)
    buffer = bytearray(len(body) - 10)
    open_store(str(tmp_path)).read_into("data", memoryview(buffer), 7)
    assert crc64nvme(bytes(buffer)) == crc64nvme(body[7:-3])
