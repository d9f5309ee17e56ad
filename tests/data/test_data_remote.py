"""Token sets in S3: the same ids whatever fits the cache, one download per node, and nothing damaged is ever used."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lustrain.problem import UserError
from tests.data.making import command, files, made, prose, run_tokenize, stream, write_lines
from tests.lab.faulty_proxy import Answer, Delay, FaultyProxy, Swap
from tests.lab.servers import S3Place
from tests.processes import wait_until
from tests.storage.objects import objects
from trainer.data.cache import resident_shards
from trainer.data.index import Index, Shard, Split
from trainer.data.shards import TokenSet
from trainer.storage import ArchivedError, ObjectInfo, open_store
from trainer.storage.archive import INTELLIGENT_TIERING
from trainer.storage.local import LocalStore

SEQ = 64
MIB = 1 << 20


@pytest.fixture(scope="module")
def local_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of 1 MiB (the last one shorter), and a small one of held-out documents."""
    folder = tmp_path_factory.mktemp("local")
    path = write_lines(folder / "a.jsonl", [prose(n, 20_000) for n in range(95)])
    made(path, "--out", folder / "set", "--tokenizer", "bytes", "--shard-mib", 1, "--val-fraction", 0.04)
    return folder / "set"


@pytest.fixture
def proxy(moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(moto_s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def upload(local_set: Path, uri: str) -> str:
    store = open_store(uri)
    for name, body in files(local_set).items():
        store.put(name, body)
    return uri


def open_set(uri: str, cache: Path, mib: int) -> TokenSet:
    return TokenSet.open(uri, "train", cache_dir=cache, cache_bytes=mib * MIB)


def cached(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*.tok"))


def assert_same_ids(tokens: TokenSet, local_set: Path) -> None:
    ids = stream(local_set, "train")
    wanted = np.random.default_rng(3).integers(0, tokens.windows(SEQ), 40)
    edges = np.cumsum([shard.stat().st_size // 2 for shard in sorted(local_set.glob("train-*.tok"))][:-1]) // SEQ
    for batch in (wanted, edges):
        found = tokens.gather(batch, SEQ)
        assert all(np.array_equal(row, ids[w * SEQ : w * SEQ + SEQ + 1]) for row, w in zip(found, batch, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("mib", "shards"), [(0, 0), (1, 0), (2, 1), (64, 4)])
def test_ids_do_not_depend_on_the_cache(local_set: Path, s3: S3Place, tmp_path: Path, mib: int, shards: int) -> None:
    tokens = open_set(upload(local_set, s3.uri()), tmp_path, mib)
    assert_same_ids(tokens, local_set)
    wait_until(lambda: len(cached(tmp_path)) == shards)
    assert_same_ids(tokens, local_set)
    tokens.close()


@pytest.mark.slow
def test_every_shard_is_downloaded_once_for_a_nodes_processes(
    local_set: Path, moto_s3: S3Place, proxy: FaultyProxy, tmp_path: Path
) -> None:
    uri = upload(local_set, moto_s3.uri())
    proxy.seen.clear()
    proxy.inject(Delay(0.3), method="GET", key=r"\.tok")
    code = (
        "import sys, time, pathlib; from trainer.data.shards import TokenSet;"
        "t = TokenSet.open(sys.argv[1], 'train', cache_dir=pathlib.Path(sys.argv[2]), cache_bytes=1 << 30);"
        "\nwhile not t.is_mapped: time.sleep(0.02)\n"
        "import numpy; print(int(t.gather(numpy.arange(t.windows(1)), 1)[:, 0].astype(numpy.int64).sum()))"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, uri, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    sums = {int(rank.communicate(timeout=300)[0]) for rank in ranks}
    assert sums == {int(stream(local_set, "train")[:-1].astype(np.int64).sum())}
    bodies = [request for request in proxy.seen if request.startswith("GET") and ".tok" in request]
    assert len(bodies) == 4, bodies
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_second_job_reads_the_cache_not_a_partial_download(
    local_set: Path, moto_s3: S3Place, proxy: FaultyProxy, tmp_path: Path
) -> None:
    uri = upload(local_set, moto_s3.uri())
    first = open_set(uri, tmp_path, 64)
    wait_until(lambda: len(cached(tmp_path)) == 4)
    first.close()
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    killed = folder / "train-00002.tok"
    killed.rename(killed.with_name("train-00002.tok.part"))
    os.truncate(killed.with_name("train-00002.tok.part"), 1000)
    os.truncate(folder / "train-00001.tok", 77)
    proxy.seen.clear()
    second = open_set(uri, tmp_path, 64)
    wait_until(lambda: len(cached(tmp_path)) == 4 and (folder / "train-00001.tok").stat().st_size == MIB)
    assert_same_ids(second, local_set)
    second.close()
    downloads = {one.split("/")[-1][:15] for one in proxy.seen if one.startswith("GET") and ".tok" in one}
    assert {"train-00001.tok", "train-00002.tok"} <= downloads
    assert not list(folder.glob("*.part"))
    assert files(folder).keys() == {f"train-0000{n}.tok" for n in range(4)}


@pytest.mark.slow
def test_bytes_damaged_on_the_way_are_asked_for_again(
    local_set: Path, moto_s3: S3Place, proxy: FaultyProxy, tmp_path: Path
) -> None:
    uri = upload(local_set, moto_s3.uri())
    proxy.inject(Swap(), method="GET", key=r"\.tok", times=1)
    proxy.inject(Answer(503), method="GET", key=r"\.tok", times=2)
    tokens = open_set(uri, tmp_path, 64)
    wait_until(lambda: len(cached(tmp_path)) == 4)
    tokens.close()
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert {name: (local_set / name).read_bytes() for name in cached(tmp_path)} == files(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("server", "mib"), [("weed_s3", 0), ("moto_s3", 64)])
def test_a_swapped_shard_is_reported_and_never_used(
    request: pytest.FixtureRequest, local_set: Path, tmp_path: Path, server: str, mib: int
) -> None:
    """Byte ranges rely on the checksum that the server keeps; moto keeps none for small objects."""
    place: S3Place = request.getfixturevalue(server)
    uri = upload(local_set, place.uri())
    open_store(uri).put("train-00001.tok", (local_set / "train-00000.tok").read_bytes())
    tokens = open_set(uri, tmp_path, mib)

    def read_everything() -> None:
        while True:
            tokens.gather(np.arange(0, tokens.windows(SEQ), 300), SEQ)

    with pytest.raises(UserError, match=r"train-00001\.tok.*the index says"):
        read_everything()
    tokens.close()
    assert "train-00001.tok" not in cached(tmp_path)


@pytest.mark.slow
def test_missing_and_short_shards_in_s3_are_found_at_once(local_set: Path, s3: S3Place, tmp_path: Path) -> None:
    uri = upload(local_set, s3.uri())
    store = open_store(uri)
    store.delete("train-00000.tok")
    store.put("train-00003.tok", b"short")
    with pytest.raises(UserError) as caught:
        open_set(uri, tmp_path, 0)
    assert [line.partition("': ")[2].partition(";")[0] for line in caught.value.problems] == [
        "is missing",
        f"has 5 bytes, the index says {(local_set / 'train-00003.tok').stat().st_size:,}",
    ]
    with pytest.raises(UserError, match="no token set here"):
        open_set(s3.uri("elsewhere"), tmp_path, 0)


@pytest.mark.slow
def test_archived_shards_are_counted_before_training(local_set: Path, moto_s3: S3Place, tmp_path: Path) -> None:
    uri = upload(local_set, moto_s3.uri("set"))
    moto_s3.archive("set/train-00000.doc", "GLACIER")
    open_set(uri, tmp_path, 0).close()
    for number in (1, 2):
        moto_s3.archive(f"set/train-0000{number}.tok", "GLACIER")
    with pytest.raises(ArchivedError) as caught:
        open_set(uri, tmp_path, 0)
    (line,) = caught.value.problems
    assert line.startswith(f"token set = '{uri}': 2 of 4 objects cannot be read")
    assert f"restore-object --bucket {moto_s3.bucket} --key set/train-00001.tok " in line


def test_archive_tier_that_a_listing_hides_takes_one_request(
    local_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []

    class Tiered(LocalStore):
        """All of it in Intelligent-Tiering, and in an archive tier, which only a look at an object shows."""

        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            return (replace(info, storage_class=INTELLIGENT_TIERING) for info in super().list(prefix))

        def stat(self, key: str) -> ObjectInfo:
            looked_at.append(key)
            info = replace(super().stat(key), storage_class=INTELLIGENT_TIERING)
            return replace(info, archive="DEEP_ARCHIVE_ACCESS")

    monkeypatch.setattr("trainer.data.shards.open_store", lambda uri, **_: Tiered(uri, create=False))
    with pytest.raises(ArchivedError, match=r"at least 1 of 4 objects .* train-00000\.tok in DEEP_ARCHIVE_ACCESS"):
        open_set(str(local_set), tmp_path, 0)
    assert looked_at == ["train-00000.tok"]


@pytest.mark.slow
def test_a_prefetched_batch_is_the_batch(local_set: Path, moto_s3: S3Place, proxy: FaultyProxy, tmp_path: Path) -> None:
    uri = upload(local_set, moto_s3.uri())
    tokens = open_set(uri, tmp_path, 0)
    batches = [np.arange(n, n + 8) * 500 for n in range(7)]
    plain = [tokens.gather(batch, SEQ) for batch in batches]
    proxy.seen.clear()
    for batch in batches:
        tokens.prefetch(batch, SEQ)
    wait_until(lambda: len(proxy.seen) >= 4 * 8)
    asked = len(proxy.seen)
    assert np.array_equal(tokens.gather(batches[-1], SEQ), plain[-1])
    assert all(np.array_equal(tokens.gather(b, SEQ), p) for b, p in zip(batches, plain, strict=True))
    assert asked <= 7 * 8
    tokens.close()


@pytest.mark.slow
def test_an_old_set_makes_room_and_who_has_it_mapped_reads_on(
    local_set: Path, moto_s3: S3Place, tmp_path: Path
) -> None:
    old = upload(local_set, moto_s3.uri("old"))
    (tmp_path / "b.txt").write_text(prose(77, 1_300_000))
    made(tmp_path / "b.txt", "--out", moto_s3.uri("new"), "--tokenizer", "bytes", "--shard-mib", 1, "--val-fraction", 0)
    cache = tmp_path / "cache"
    first = open_set(old, cache, 4)
    wait_until(lambda: len(cached(cache)) == 4)
    assert_same_ids(first, local_set)
    second = open_set(moto_s3.uri("new"), cache, 4)
    wait_until(lambda: len([p for p in cache.glob("*/*.tok") if second.index.checksum[:32] in str(p)]) == 3)
    assert sum(path.stat().st_size for path in cache.glob("*/*.tok")) <= 4 * MIB
    assert_same_ids(first, local_set)
    first.close()
    second.close()


@pytest.mark.slow
def test_a_full_disk_and_an_unusable_cache_are_one_line(
    local_set: Path, moto_s3: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = upload(local_set, moto_s3.uri())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another cache folder"):
        open_set(uri, tmp_path / "file", 64)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tokens = open_set(uri, tmp_path / "cache", 64)

    def read_on() -> None:
        while True:
            tokens.gather(np.arange(3), SEQ)

    with pytest.raises(UserError, match="no space left for another"):
        read_on()
    tokens.close()
    assert not list((tmp_path / "cache").glob("*/*"))


def test_ranks_and_splits_agree_on_what_is_kept() -> None:
    def split(*sizes: int) -> Split:
        return Split(tuple(Shard(f"x-{n:05d}", size, 1, 0, 0) for n, size in enumerate(sizes)))

    index = Index("uint16", 257, 256, "bytes", "", {"train": split(100, 100, 50), "val": split(10, 5)}, "")
    assert resident_shards(index, 10**9) == {"train": 3, "val": 2}
    assert resident_shards(index, 2 * 215) == {"train": 2, "val": 2}
    assert resident_shards(index, 2 * 12) == {"train": 0, "val": 1}
    assert resident_shards(index, 0) == {"train": 0, "val": 0}


@pytest.mark.slow
def test_tokenizing_to_s3_gives_folders_objects_also_after_kill(
    s3: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = write_lines(tmp_path / "a.jsonl", [prose(n, 30_000) for n in range(200)])
    options = ("--tokenizer", "bytes", "--shard-mib", 1, "--workers", 2, "--val-fraction", 0.03)
    made(path, "--out", tmp_path / "set", *options)
    work = tmp_path / "home" / "lustrain" / "tokenize"
    for shards in (1, 3):
        process = subprocess.Popen(command(path, "--out", s3.uri(), *options), stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(work.glob("*/train-*.json"))) < shards:
            time.sleep(0.005)
        process.kill()
        process.wait()
    assert not any(key == "index.json" for key in objects(open_store(s3.uri())))
    stale = open_store(s3.uri())
    stale.put("train-00017.tok", b"left by an earlier, larger job")
    done = run_tokenize(path, "--out", s3.uri(), *options)
    assert done.returncode == 0, done.stderr
    assert "going on with an earlier call" in done.stderr
    assert objects(open_store(s3.uri())) == files(tmp_path / "set")
    assert not list(work.iterdir())


@pytest.mark.slow
def test_a_missing_bucket_is_one_line_and_leaves_nothing(moto_s3: S3Place, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    done = run_tokenize(tmp_path / "a.txt", "--out", f"s3://{moto_s3.bucket}-not/x", "--tokenizer", "bytes")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"{moto_s3.bucket}-not" in done.stderr
