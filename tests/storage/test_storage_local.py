"""A folder as a store: bad places, full disks, killed and competing writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme

from lustrain.problem import UserError
from tests.conftest import require
from tests.seeds import chance
from trainer.storage import ObjectMissingError, StorageError, open_store
from trainer.storage.folder import STALE_SECONDS, Folder


def run_python(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)


def unfinished(root: Path) -> list[Path]:
    return sorted((root / ".lustrain").glob(".tmp-*"))


def test_a_store_can_be_named_by_path_or_file_uri(tmp_path: Path) -> None:
    open_store(str(tmp_path / "a run")).put("k", b"x")
    for uri in (f"file://{tmp_path}/a%20run", f"file://localhost{tmp_path}/a%20run"):
        assert open_store(uri, create=False).read("k")[0] == b"x"


def test_an_unusable_place_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for uri, create, why in [
        (str(file), True, "a folder is needed"),
        (str(file / "below" / "it"), True, "a folder is needed"),
        (str(file), False, "is not a folder"),
        (str(tmp_path / "missing"), False, "there is no such folder"),
        ("gs://bucket/run", True, "unknown kind of URI; allowed: a folder"),
        ("file://server/share", True, "unknown kind of URI; allowed: a folder"),
        ("", True, "is not a path"),
        ("a\0b", True, "is not a path"),
    ]:
        with pytest.raises(UserError, match=why) as caught:
            open_store(uri, create=create, name="run.uri")
        assert len(caught.value.problems) == 1
        assert str(caught.value).startswith("run.uri = ")
        assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["file"]


def test_a_key_cannot_lie_below_another_object(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"x")
    with pytest.raises(StorageError, match=r"/a/b/c'.*a part of the path is a file"):
        store.put("a/b/c", b"x")
    with pytest.raises(StorageError, match=r"/a'.*a folder has the object's name"):
        store.put("a", b"x")
    with pytest.raises(ObjectMissingError):
        store.read("a/b/c")
    with pytest.raises(ObjectMissingError):
        store.read("a")
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


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of writing an object."""
    process = run_python(HOLD, str(tmp_path))
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_a_killed_writer_left_is_swept_and_never_listed(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    store = open_store(str(tmp_path))
    assert len(unfinished(tmp_path)) == 1
    store.put("k", b"x")
    assert len(unfinished(tmp_path)) == 1, "the writer lives, its file is not ours to remove"
    assert [info.key for info in store.list()] == ["k"]
    writer.kill()
    writer.wait()
    assert [info.key for info in store.list()] == ["k"]
    open_store(str(tmp_path)).put("k", b"x")
    assert unfinished(tmp_path) == []


def test_an_unfinished_file_of_another_machine_goes_when_it_is_old(tmp_path: Path) -> None:
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
print("ready", flush=True)
i = 0
while True:
    print(i, flush=True)
    store.put_file(f"attempts/{i % 3}/rank", f"/proc/self/fd/{fd}", len(body), crc64nvme(body))
    print(i, flush=True)
    store.put(f"manifests/{i}.json", body[:1000], if_absent=True)
    print(i, flush=True)
    store.delete(f"manifests/{i}.json")
    i += 1
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_objects_only(tmp_path: Path) -> None:
    moments = chance("kills in a folder")
    body = bytes(range(256)) * 8192
    found = 0
    for _ in range(12):
        process = run_python(PUT_FOREVER, str(tmp_path))
        assert process.stdout
        # It says when it begins a call, and the kill comes while that is under way.
        for _ in range(moments.randrange(2, 40)):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
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


FULL_DISK = """
import json, os, subprocess, sys
from awscrt.checksums import crc64nvme
from trainer.storage import StorageError, open_store
root = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root], check=True)
store = open_store(root)
def attempt(action):
    try:
        action()
        return ""
    except StorageError as error:
        return str(error)
def put_file(key, size):
    fd = os.memfd_create("x")
    os.write(fd, bytes(size))
    store.put_file(key, f"/proc/self/fd/{fd}", size, crc64nvme(bytes(size)))
said = [attempt(lambda: put_file("fits", 3_000_000)), attempt(lambda: put_file("too-large", 3_000_000))]
said.append(attempt(lambda: store.put("small", bytes(2_000_000))))
files = sorted(f for _, _, names in os.walk(root) for f in names)
store.delete("fits")
said.append(attempt(lambda: put_file("fits-again", 3_000_000)))
subprocess.run(["mount", "-o", "remount,ro", root], check=True)
said.append(attempt(lambda: store.put("late", b"x")))
whole = store.read("fits-again")[0] == bytes(3_000_000)
print(json.dumps({"said": said, "files": files, "whole": whole}))
"""


def test_a_full_or_read_only_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    """On a real file system of 4 MB, mounted in a namespace of its own."""
    import json

    private = ["unshare", "--user", "--map-root-user", "--mount"]
    allowed = subprocess.run([*private, "true"], capture_output=True, check=False).returncode == 0
    require(allowed, "mounting a small disk needs user namespaces (kernel.unprivileged_userns_clone)")
    command = [*private, sys.executable, "-c", FULL_DISK, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    fits, too_large, small, again, late = result["said"]
    assert (fits, again) == ("", "")
    assert "no space left: 3 MB needed, 1.19 MB free" in too_large
    assert "no space left: 2 MB needed" in small
    assert str(tmp_path) in small
    assert "fix: free space there" in too_large
    assert result["files"] == [".lock", "fits"], "only what was unfinished is gone"
    assert "Read-only file system" in late
    assert result["whole"] is True


@pytest.mark.slow
def test_a_large_object_is_read_by_several_threads(tmp_path: Path) -> None:
    body = os.urandom(64 << 20)
    (tmp_path / "data").write_bytes(body)
    buffer = bytearray(len(body) - 10)
    open_store(str(tmp_path)).read_into("data", memoryview(buffer), 7)
    assert crc64nvme(bytes(buffer)) == crc64nvme(body[7:-3])
