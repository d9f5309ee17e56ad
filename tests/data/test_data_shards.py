"""Windows out of a local token set: exactly the ids that naive slicing gives, and plain words when the set is not whole."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc64nvme
from hypothesis import given, settings
from hypothesis import strategies as st

from lustrain.problem import UserError
from tests.data.making import document_ends, made, prose, stream, write_lines
from tests.trainer.token_sets import write_shards
from trainer.data import verified
from trainer.data.index import DTYPES, INDEX, Index, Shard, Split, decode_index, dtype_for, encode_index
from trainer.data.shards import TokenSet
from trainer.data.tokenizer import ByteTokenizer
from trainer.data.verified import Ranks
from trainer.sealed import DamagedRecordError, unseal, with_checksum


def write_set(folder: Path, sizes: list[int], vocab_size: int = 257) -> np.ndarray:
    """A token set with shards of the given sizes, some of them tiny; returns the whole stream."""
    ids = np.random.default_rng(sum(sizes)).integers(0, vocab_size, sum(sizes)).astype(DTYPES[dtype_for(vocab_size)])
    write_shards(folder, {"train": np.split(ids, np.cumsum(sizes)[:-1])}, vocab_size)
    return ids


def open_set(folder: Path, **options: Any) -> TokenSet:
    return TokenSet.open(str(folder), "train", cache_dir=folder / "cache", cache_bytes=0, **options)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=7),
    seq_len=st.integers(1, 40),
    vocab_size=st.sampled_from([257, 65536, 65537, 200_000]),
    picks=st.lists(st.integers(0, 10**6), max_size=20),
)
def test_a_gather_is_what_slicing_gives_wherever_shards_end(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seq_len: int, vocab_size: int, picks: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("set")
    ids = write_set(folder, sizes, vocab_size)
    tokens = open_set(folder)
    windows = tokens.windows(seq_len)
    assert windows == max(0, (len(ids) - 1) // seq_len)
    assert len(ids) - 1 - windows * seq_len < seq_len
    wanted = np.array([pick % windows for pick in picks] if windows else [], dtype=np.int64)
    batch = tokens.gather(wanted, seq_len)
    assert batch.shape == (len(wanted), seq_len + 1)
    assert batch.dtype == (np.uint16 if vocab_size <= 65536 else np.uint32) == tokens.index.numpy_dtype
    for row, window in zip(batch, wanted.tolist(), strict=True):
        assert np.array_equal(row, ids[window * seq_len : window * seq_len + seq_len + 1])


def test_a_batch_is_a_copy_that_may_be_changed(tmp_path: Path) -> None:
    ids = write_set(tmp_path, [100, 50])
    tokens = open_set(tmp_path)
    for wanted in ([0, 1], [0, 4]):
        batch = tokens.gather(np.array(wanted), 20)
        batch[:] = 0
    assert np.array_equal(tokens.gather(np.array([0]), 20)[0], ids[:21])


def test_windows_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, [41])
    tokens = open_set(tmp_path)
    assert tokens.windows(20) == 2
    assert tokens.windows(41) == 0
    for window in (-1, 2):
        with pytest.raises(ValueError, match=r"\[0, 2\)"):
            tokens.gather(np.array([window]), 20)


@pytest.mark.slow
def test_set_made_by_tokenize_reads_back_with_its_own_tokenizer(tmp_path: Path) -> None:
    texts = [prose(n, 3000) for n in range(60)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    made(path, "--out", tmp_path / "set", "--tokenizer", "train:500", "--val-fraction", 0)
    tokens = TokenSet.open(str(tmp_path / "set"), "train", cache_dir=tmp_path, cache_bytes=0)
    assert tokens.index.splits["train"].documents == 60
    assert tokens.tokens == stream(tmp_path / "set", "train").size
    ends = document_ends(tmp_path / "set", "train")
    ids, tokenizer = stream(tmp_path / "set", "train"), tokens.tokenizer()
    assert (ids[ends - 1] == tokens.index.eos_id).all()
    assert tokenizer.hash == tokens.index.tokenizer_hash
    assert [tokenizer.decode(part[:-1]) for part in np.split(ids, ends[:-1])] == texts
    (tmp_path / "set" / "tokenizer.json").write_text(
        (tmp_path / "set" / "tokenizer.json").read_text().replace("<|endoftext|>", "<|endofthis|>")
    )
    with pytest.raises(UserError, match="is not the tokenizer of this set"):
        tokens.tokenizer()


def test_missing_and_short_shards_are_named_all_at_once(tmp_path: Path) -> None:
    write_set(tmp_path, [100, 100, 100])
    (tmp_path / "train-00000.tok").unlink()
    (tmp_path / "train-00001.tok").write_bytes(bytes(150))
    (tmp_path / "train-00002.doc").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        open_set(tmp_path)
    assert [line.partition(" = ")[2].partition(";")[0] for line in caught.value.problems] == [
        f"'{tmp_path}/train-00000.tok': is missing",
        f"'{tmp_path}/train-00001.tok': has 150 bytes, the index says 200",
        f"'{tmp_path}/train-00002.doc': has 0 bytes, the index says 8",
    ]


def test_many_missing_shards_do_not_fill_the_screen(tmp_path: Path) -> None:
    write_set(tmp_path, [10] * 40)
    for path in tmp_path.glob("*.tok"):
        path.unlink()
    with pytest.raises(UserError, match="32 more files") as caught:
        open_set(tmp_path)
    assert len(caught.value.problems) == 9


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[16] ^= 4
    path.write_bytes(raw)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that were read so far."""
    sizes: list[int] = []

    def counted(part: memoryview, before: int) -> int:
        sizes.append(len(part))
        return int(crc64nvme(part, before))

    monkeypatch.setattr(verified, "crc64nvme", counted)
    return sizes


def test_every_shard_is_read_once_per_node_and_when_it_changes(tmp_path: Path, read: list[int]) -> None:
    write_set(tmp_path, [100, 100, 100])
    for _ in range(2):
        tokens = open_set(tmp_path)
        assert tokens.verify(tmp_path / "cache", None)
        tokens.close()
    assert read == [200, 200, 200]
    flip_a_bit(tmp_path / "train-00000.tok")
    flip_a_bit(tmp_path / "train-00002.tok")
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            open_set(tmp_path).verify(tmp_path / "cache", None)
        assert [line.partition("'")[2].partition(" has checksum")[0] for line in caught.value.problems] == [
            f"{tmp_path}/train-00000.tok':",
            f"{tmp_path}/train-00002.tok':",
        ]
    assert len(read) == 3 + 2 * 2 * 2, "what is damaged is read a second time to be sure, and is not remembered"


def test_shards_are_checked_where_nothing_can_be_remembered(tmp_path: Path) -> None:
    write_set(tmp_path, [100])
    (tmp_path / "file").write_text("no folder")
    assert open_set(tmp_path).verify(tmp_path / "file", None)
    flip_a_bit(tmp_path / "train-00000.tok")
    with pytest.raises(UserError, match="has checksum"):
        open_set(tmp_path).verify(tmp_path / "file", None)


def test_damage_that_is_found_while_training_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(part: memoryview, before: int) -> int:
        assert go_on.wait(300)
        return int(crc64nvme(part, before))

    monkeypatch.setattr(verified, "crc64nvme", slow)
    write_set(tmp_path, [100])
    flip_a_bit(tmp_path / "train-00000.tok")
    tokens = open_set(tmp_path)
    assert not tokens.verify(tmp_path / "cache", 0.0), "a set of terabytes does not hold a start up"
    tokens.gather(np.array([0]), 20)
    go_on.set()
    with pytest.raises(UserError, match="has checksum"):
        tokens.verify(tmp_path / "cache", None)
    with pytest.raises(UserError, match="has checksum"):
        tokens.check()
    tokens.gather(np.array([0]), 20)
    tokens.close()


def test_on_network_file_system_each_shard_is_read_once_per_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    monkeypatch.setattr(verified, "file_system", lambda path, mounts: "lustre")
    write_set(tmp_path, [100, 101, 102, 103, 104, 105, 106])
    for rank in (1, 0, 2, 3):
        tokens = open_set(tmp_path)
        ranks = Ranks(rank, 4, rank % 2, 2)
        assert tokens.verify(tmp_path / f"node-{rank // 2}", None, ranks)
        tokens.close()
    assert sorted(read) == [2 * tokens for tokens in range(100, 107)]


def test_file_in_lustres_archive_alone_is_not_restored_for_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    write_set(tmp_path, [3000])
    for size in (0, 6000):
        os.truncate(tmp_path / "train-00000.tok", size)
    monkeypatch.setattr(verified, "file_system", lambda path, mounts: "lustre")
    assert open_set(tmp_path).verify(tmp_path / "cache", None)
    assert not read


def test_what_start_does_not_wait_for_is_read_by_one_rank_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path, [100, 100, 100])
    monkeypatch.setattr(verified, "REST", 1e9)
    for local_rank in (1, 0):
        go_on, dropped, done = threading.Event(), threading.Event(), list[int]()
        monkeypatch.setattr(verified, "crc64nvme", partial(held_until, go_on, done))
        monkeypatch.setattr(os, "posix_fadvise", lambda *about, dropped=dropped: dropped.set())
        tokens = open_set(tmp_path)
        cache = tmp_path / f"cache-{local_rank}"
        assert not tokens.verify(cache, 0.0, Ranks(local_rank, 2, local_rank, 2))
        go_on.set()
        assert dropped.wait(300), "the page cache is left to the training"
        assert tokens.verify(cache, 20.0 if local_rank else 0.1) == bool(local_rank)
        tokens.close()
        assert done == [200], "the others leave it to local rank 0, which rests before it goes on"


def held_until(go_on: threading.Event, done: list[int], part: memoryview, before: int) -> int:
    assert go_on.wait(300)
    done.append(len(part))
    return int(crc64nvme(part, before))


@pytest.mark.parametrize(("failures", "warnings"), [(2, 0), (3, 1)])
def test_a_read_that_fails_is_tried_again_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failures: int, warnings: int
) -> None:
    errors = [OSError(errno.EIO, "Input/output error")] * failures

    def failing(part: memoryview, before: int) -> int:
        if errors:
            raise errors.pop()
        return int(crc64nvme(part, before))

    monkeypatch.setattr(verified, "crc64nvme", failing)
    monkeypatch.setattr(verified, "RETRY_S", 0.0)
    write_set(tmp_path, [100])
    assert open_set(tmp_path).verify(tmp_path / "cache", None)
    assert len(caplog.records) == warnings
    assert len(list((tmp_path / "cache" / "verified").iterdir())) == 1 - warnings


def test_a_checksum_is_wrong_only_if_the_disk_says_so_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [7]
    monkeypatch.setattr(
        verified, "crc64nvme", lambda part, before: wrong.pop() if wrong else int(crc64nvme(part, before))
    )
    write_set(tmp_path, [100])
    assert open_set(tmp_path).verify(tmp_path / "cache", None)
    assert not wrong


def test_longest_and_latest_mount_point_says_what_holds_a_file() -> None:
    mounts = """/dev/nvme0n1p1 / ext4 rw 0 0
10.0.0.9@tcp:/abc /fsx lustre rw 0 0
/dev/nvme1n1 /fsx/scratch xfs rw 0 0
fs-1.efs:/ /home/a\\040b nfs4 rw 0 0
automount /data autofs rw 0 0
server:/data /data nfs rw 0 0
"""
    expected = {
        "/fsx/set": "lustre",
        "/fsx/scratch/set": "xfs",
        "/fsx2": "ext4",
        "/home/a b/set": "nfs4",
        "/data": "nfs",
    }
    assert {path: verified.file_system(Path(path), mounts) for path in expected} == expected
    assert verified.file_system(Path("/"), "") == ""


def test_an_id_outside_of_the_vocabulary_is_one_line(tmp_path: Path) -> None:
    ids = write_set(tmp_path, [100])
    index = decode_index((tmp_path / INDEX).read_bytes(), "here")
    (tmp_path / INDEX).write_bytes(encode_index(replace(index, vocab_size=int(ids.max()))))
    with pytest.raises(UserError, match=f"holds token id {ids.max()}, but its vocabulary has {ids.max()} ids"):
        open_set(tmp_path).gather(np.arange(4), 20)


@pytest.mark.parametrize("damage", [b"[" * 100_000, b'{"kind": "token-set", "format": 1, "n": Infinity}'])
def test_an_index_that_ends_a_parser_is_one_line(damage: bytes) -> None:
    with pytest.raises(UserError, match="json is damaged"):
        decode_index(damage, "here")
    with pytest.raises(DamagedRecordError):
        unseal(damage)


def test_a_wrong_split_or_place_says_what_there_is(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [100])
    with pytest.raises(UserError, match="allowed: train"):
        TokenSet.open(str(tmp_path / "set"), "val", cache_dir=tmp_path, cache_bytes=0)
    (tmp_path / "empty").mkdir()
    for place, expected in [("empty", "no token set here"), ("nowhere", "nowhere")]:
        with pytest.raises(UserError, match=expected):
            open_set(tmp_path / place)
    assert not (tmp_path / "nowhere").exists()


@given(place=st.integers(0, 10**6), value=st.integers(1, 255))
def test_an_index_with_a_flipped_bit_is_never_used(place: int, value: int) -> None:
    index = Index(
        "uint16", 257, 256, "bytes", ByteTokenizer.hash, {"train": Split((Shard("train-00000", 9, 1, 2, 3),))}, "x"
    )
    raw = bytearray(encode_index(index))
    raw[place % len(raw)] ^= value
    try:
        found = decode_index(bytes(raw), "set")
    except UserError:
        return
    # White space of the JSON means nothing; whatever is accepted says the same.
    assert (found, found.checksum) == (index, index.checksum)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    write_set(tmp_path, [100])
    body = unseal((tmp_path / INDEX).read_bytes())
    (tmp_path / INDEX).write_text(json.dumps(with_checksum({**body, "format": 2, "new": True})))
    with pytest.raises(UserError, match="upgrade lustrain"):
        open_set(tmp_path)


def test_equal_ids_have_equal_checksums_wherever_they_came_from() -> None:
    split = {"train": Split((Shard("train-00000", 9, 1, 2, 3),))}
    one, two = (Index("uint16", 257, 256, "bytes", "hash", split, origin) for origin in ("here", "there"))
    assert one.checksum == two.checksum
    assert encode_index(one) != encode_index(two)
