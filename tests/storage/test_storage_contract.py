"""What every store promises, whichever backend and data path is behind it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lab.faulty_proxy import FaultyProxy
from tests.lab.servers import S3Place
from trainer.storage import (
    CorruptObjectError,
    ObjectMissingError,
    ObjectStore,
    PreconditionError,
    StorageError,
    open_store,
)
from trainer.storage.bulk import PART_BYTES, BotoBulk
from trainer.storage.crt import CrtBulk
from trainer.storage.keys import check_key
from trainer.storage.s3 import S3Store

BACKENDS = [
    "local",
    pytest.param("moto", marks=pytest.mark.slow),
    pytest.param("moto on port 80", id="moto-crt", marks=pytest.mark.slow),
    pytest.param("weed", marks=pytest.mark.slow),
    pytest.param("weed on port 80", id="weed-crt", marks=pytest.mark.slow),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path, port_80: Callable[[S3Place], FaultyProxy]
) -> ObjectStore:
    if backend == "local":
        return open_store(str(tmp_path / "run"))
    place: S3Place = request.getfixturevalue(f"{backend.split()[0]}_s3")
    if backend.endswith("80"):
        port_80(place)
    opened = open_store(place.uri("runs/one"))
    assert isinstance(opened, S3Store)
    assert isinstance(opened._bulk, CrtBulk if backend.endswith("80") else BotoBulk)
    return opened


@contextmanager
def memory_file(body: bytes) -> Iterator[str]:
    """A path to `body` in memory, as the checkpoint writer has it; some other bytes follow it."""
    fd = os.memfd_create("staged")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(body + b"left over from a larger save")
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_subfolder_is_a_store_of_its_own(store: ObjectStore) -> None:
    store.put("runs/two/launch/a", b"a")
    store.put("runs/twofold", b"b")
    inner = store.subfolder("runs/two")
    assert inner.uri == f"{store.uri}/runs/two"
    inner.put("b", b"b")
    assert keys(inner) == ["b", "launch/a"]
    assert (inner.read("launch/a")[0], read_back(inner, "b", 1)) == (b"a", b"b")
    assert store.read("runs/two/b")[0] == b"b"


def read_back(store: ObjectStore, key: str, size: int, offset: int = 0) -> bytes:
    buffer = bytearray(size)
    store.read_into(key, memoryview(buffer), offset)
    return bytes(buffer)


def test_what_is_put_is_read_listed_and_deleted(store: ObjectStore) -> None:
    etag = store.put("manifests/one.json", b"first")
    assert store.read("manifests/one.json") == (b"first", etag)
    info = store.stat("manifests/one.json")
    assert (info.key, info.size, info.etag) == ("manifests/one.json", 5, etag)
    assert info.crc64nvme in (None, crc64nvme(b"first"))
    assert [(i.key, i.size, i.etag) for i in store.list()] == [("manifests/one.json", 5, etag)]
    assert store.put("manifests/one.json", b"second") != etag
    assert store.read("manifests/one.json")[0] == b"second"
    store.delete("manifests/one.json")
    store.delete("manifests/one.json")
    assert keys(store) == []


def test_what_is_missing_is_said_to_be_missing(store: ObjectStore) -> None:
    store.put("there", b"x")
    asks: list[Callable[[str], object]] = [store.read, store.stat]
    asks += [lambda key: read_back(store, key, 4), lambda key: read_back(store, key, 0)]
    for ask in asks:
        with pytest.raises(ObjectMissingError, match=r"/gone'"):
            ask("gone")


SEGMENT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn")), min_size=1, max_size=12)


def usable(key: str) -> bool:
    try:
        return bool(check_key(key))
    except StorageError:
        return False


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.lists(SEGMENT, min_size=1, max_size=3).map("/".join).filter(usable))
def test_any_key_that_is_accepted_comes_back_unchanged(store: ObjectStore, key: str) -> None:
    body = key.encode()
    store.put(key, body)
    try:
        assert store.read(key)[0] == body
        assert read_back(store, key, len(body)) == body
        assert keys(store) == [key]
        assert keys(store, key[:1]) == [key]
    finally:
        store.delete(key)
    assert keys(store) == []


UNUSABLE = [
    *("", "/a", "a//b", "a\\b", "a/", ".", "a/../b", ".lustrain/x", "a\nb", "a\0b", "\ud800", "\x85"),
    *("x" * 256, "x/" * 500),
]


@pytest.mark.parametrize("key", UNUSABLE)
def test_a_key_that_some_backend_could_not_keep_is_refused(tmp_path: Path, key: str) -> None:
    store = open_store(str(tmp_path))
    for use in (store.read, store.stat, store.delete, lambda k: store.put(k, b"")):
        with pytest.raises(StorageError, match=r"^key = "):
            use(key)
    assert keys(store) == []


def test_a_listing_is_by_prefix_and_in_key_order(store: ObjectStore, backend: str) -> None:
    for key in ("b", "a/z", "a-b", "a/b/c", "a.c", "ab", "a/b-d", "é"):
        store.put(key, b"x")
    everything = ["a-b", "a.c", "a/b-d", "a/b/c", "a/z", "ab", "b", "é"]
    # SeaweedFS sorts folder by folder, so `a/z` comes before `a-b`; S3 and we sort whole keys.
    ordered = sorted if backend.startswith("weed") else list
    assert ordered(keys(store)) == everything
    for prefix in ("a", "a/", "a/b", "a/b/", "a-", "ab", "c", "a/b/c", "nothing/here/"):
        assert ordered(keys(store, prefix)) == [key for key in everything if key.startswith(prefix)]


@pytest.mark.parametrize("backend", ["local", pytest.param("moto", marks=pytest.mark.slow)], indirect=True)
def test_a_listing_is_complete_beyond_one_page(store: ObjectStore) -> None:
    names = [f"metrics/{i:06d}.jsonl" for i in range(150)]
    for name in names:
        store.put(name, b"")
    assert keys(store, "metrics/") == names


def test_of_many_who_create_at_once_exactly_one_wins(store: ObjectStore) -> None:
    start = threading.Barrier(8)

    def create(i: int) -> bytes | None:
        start.wait()
        try:
            store.put("manifests/x.json", b"by %d" % i, if_absent=True)
        except PreconditionError:
            return None
        return b"by %d" % i

    with ThreadPoolExecutor(8) as pool:
        winners = [body for body in pool.map(create, range(8)) if body]
    assert len(winners) == 1
    assert store.read("manifests/x.json")[0] == winners[0]


@pytest.mark.slow
def test_no_increment_is_lost_between_competing_writers(store: ObjectStore) -> None:
    store.put("lease.json", b"0")

    def increment(_: int) -> None:
        while True:
            body, etag = store.read("lease.json")
            try:
                store.put("lease.json", b"%d" % (int(body) + 1), if_match=etag)
                return
            except PreconditionError:
                continue

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(12)))
    assert store.read("lease.json")[0] == b"12"


@pytest.mark.slow
def test_a_stale_condition_changes_nothing(store: ObjectStore) -> None:
    old = store.put("lease.json", b"1")
    new = store.put("lease.json", b"2", if_match=old)
    for stale in (
        lambda: store.put("lease.json", b"3", if_match=old),
        lambda: store.put("lease.json", b"3", if_absent=True),
        lambda: store.delete("lease.json", if_match=old),
    ):
        with pytest.raises(PreconditionError):
            stale()
    assert store.read("lease.json") == (b"2", new)
    store.delete("lease.json", if_match=new)
    for gone in (lambda: store.put("lease.json", b"4", if_match=new), lambda: store.delete("lease.json", if_match=new)):
        with pytest.raises(PreconditionError):
            gone()
    assert keys(store) == []


def test_an_etag_from_a_listing_is_as_good_as_one_from_a_read(store: ObjectStore) -> None:
    store.put("small", b"x")
    with memory_file(bytes(3 << 20)) as path:
        store.put_file("large", path, 3 << 20, crc64nvme(bytes(3 << 20)))
    for info in list(store.list()):
        assert store.stat(info.key).etag == info.etag
        store.delete(info.key, if_match=info.etag)
    assert keys(store) == []


@pytest.mark.parametrize("size", [0, 1, (8 << 20) + 1, pytest.param(40 << 20, marks=pytest.mark.slow)])
def test_a_file_arrives_whole_and_without_what_follows_it(store: ObjectStore, size: int) -> None:
    body = os.urandom(size)
    with memory_file(body) as path:
        store.put_file("attempts/a/rank-00000.bin", path, size, crc64nvme(body))
    info = store.stat("attempts/a/rank-00000.bin")
    assert info.size == size
    assert info.crc64nvme in (None, crc64nvme(body))
    assert read_back(store, "attempts/a/rank-00000.bin", size) == body


# moto alone takes a single put whatever its checksum says, so the small size is tested where checksums are real.
ANNOUNCED = [
    *(("local", 1000), ("local", (8 << 20) + 1), ("moto", (8 << 20) + 1), ("moto on port 80", (8 << 20) + 1)),
    *(pytest.param(where, 1000, marks=pytest.mark.slow) for where in ("weed", "weed on port 80")),
    *(pytest.param(where, (8 << 20) + 1, marks=pytest.mark.slow) for where in ("weed", "weed on port 80")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size"), ANNOUNCED, indirect=["backend"])
def test_a_file_that_is_not_what_was_announced_is_refused(store: ObjectStore, size: int) -> None:
    body = os.urandom(size)
    with memory_file(body) as path, pytest.raises(CorruptObjectError, match=r"bin'"):
        store.put_file("attempts/a/rank-00000.bin", path, size, crc64nvme(body) ^ 1)
    assert keys(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [1000, (8 << 20) + 1])
def test_a_file_that_ends_too_early_is_refused(store: ObjectStore, tmp_path: Path, size: int) -> None:
    source = tmp_path / "short"
    source.write_bytes(bytes(size - 1))
    with pytest.raises(CorruptObjectError, match=f"short ends at byte {size - 1}"):
        store.put_file("k", str(source), size, 0)
    with pytest.raises(StorageError, match="No such file"):
        store.put_file("k", str(tmp_path / "nothing"), size, 0)
    assert keys(store) == []


@pytest.mark.slow
def test_any_part_of_an_object_can_be_read(store: ObjectStore) -> None:
    body = os.urandom((17 << 20) + 5)
    with memory_file(body) as path:
        store.put_file("data", path, len(body), crc64nvme(body))
    part = 8 << 20
    for offset, size in [(0, 1), (part - 1, 2), (part, part), (3, 2 * part), (len(body) - 7, 7), (5, len(body) - 5)]:
        assert read_back(store, "data", size, offset) == body[offset : offset + size]
    for offset, size in [(len(body) - 7, 8), (len(body), 1), (len(body) + 100, part + 1), (0, len(body) + 1)]:
        with pytest.raises(CorruptObjectError, match=r"/data'"):
            read_back(store, "data", size, offset)


def test_a_reader_sees_the_old_object_or_the_new_one(store: ObjectStore) -> None:
    bodies = [bytes([i]) * 200_000 for i in (1, 2)]
    store.put("config.toml", bodies[0])
    done = threading.Event()

    def replace() -> None:
        for i in range(20):
            store.put("config.toml", bodies[i % 2])
        done.set()

    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(replace)
        while not done.is_set() and not replaced.done():
            assert store.read("config.toml")[0] in bodies
        replaced.result()


@pytest.mark.slow
def test_the_clock_of_the_store_dates_its_objects(store: ObjectStore) -> None:
    before = store.now()
    store.put("k", b"x")
    # Servers tell whole seconds.
    assert before - 2 <= store.stat("k").modified <= store.now() + 2


@pytest.mark.slow
def test_unused_stores_give_back_their_descriptors(moto_s3: S3Place, port_80: Callable[[S3Place], FaultyProxy]) -> None:
    port_80(moto_s3)

    def use(number: int) -> int:
        store = open_store(moto_s3.uri(f"runs/{number}"))
        body = b"x" * (PART_BYTES + 1)
        with memory_file(body) as path:
            store.put_file("object", path, len(body), crc64nvme(body))
        del store
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    counts = [use(number) for number in range(8)]
    # The first opens what the process shares; connections close a moment after their store is gone.
    assert counts[-1] < counts[0] + 30, counts
