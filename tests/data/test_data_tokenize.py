"""`python -m trainer tokenize`: every document arrives once, whatever the format, the workers, or the interruptions."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import require
from tests.data.making import (
    command,
    document_ends,
    documents,
    files,
    made,
    prose,
    refused,
    run_tokenize,
    stream,
    write_lines,
)
from tests.seeds import chance
from trainer.__main__ import main
from trainer.data.index import Shard
from trainer.data.shards import TokenSet
from trainer.data.tokenize.assembly import ChunkRecord, Output, WorkFolder
from trainer.data.tokenize.documents import Reading, Tally, is_held_out, read_documents
from trainer.data.tokenize.inputs import find_sources, plan_chunks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 small files, one large one, and some JSONL: 6 MB, several chunks."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "small").mkdir()
    for number in range(600):
        (folder / "small" / f"{number:03d}.txt").write_text(prose(number, 5000))
    (folder / "large.txt").write_text(prose(1000, 2_500_000))
    write_lines(folder / "lines.jsonl", [prose(n, 700) for n in range(2000, 2800)])
    return folder


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", "train:600", "--shard-mib", 1, "--val-fraction", 0.1)
    one = made(corpus, "--out", tmp_path / "one", "--workers", 1, *options)
    three = made(corpus, "--out", tmp_path / "three", "--workers", 3, *options)
    assert files(tmp_path / "one") == files(tmp_path / "three")
    assert one["checksum"] == three["checksum"]
    assert one["chunks"] > 4
    assert one["splits"]["train"]["shards"] > 2
    eos = TokenSet.open(str(tmp_path / "one"), "train", cache_dir=tmp_path, cache_bytes=0).index.eos_id
    ends = np.flatnonzero(stream(tmp_path / "one", "train") == eos) + 1
    assert np.array_equal(document_ends(tmp_path / "one", "train"), ends), "also where documents cross shards"
    assert one["splits"]["train"]["documents"] == len(ends)


@pytest.mark.slow
def test_every_document_arrives_once_and_equal_ones_share_a_side(corpus: Path, tmp_path: Path) -> None:
    made(corpus / "small", corpus / "lines.jsonl", "--out", tmp_path, "--tokenizer", "bytes", "--val-fraction", 0.2)
    given_texts = [path.read_text() for path in sorted((corpus / "small").iterdir())]
    given_texts += [json.loads(line)["text"] for line in (corpus / "lines.jsonl").read_text().splitlines()]
    held_out = [is_held_out(text, 0, 0.2) for text in given_texts]
    assert documents(tmp_path, "train") == [t.encode() for t, out in zip(given_texts, held_out, strict=True) if not out]
    assert documents(tmp_path, "val") == [t.encode() for t, out in zip(given_texts, held_out, strict=True) if out]
    assert 0.15 < sum(held_out) / len(held_out) < 0.25


@pytest.mark.slow
def test_large_plain_file_is_cut_at_line_ends_and_loses_nothing(corpus: Path, tmp_path: Path) -> None:
    result = made(corpus / "large.txt", "--out", tmp_path, "--tokenizer", "bytes", "--val-fraction", 0)
    pieces = documents(tmp_path, "train")
    assert b"".join(pieces) == (corpus / "large.txt").read_bytes()
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert result["splits"]["train"]["documents"] == len(pieces) > 30


INTERRUPTED = ("--tokenizer", "train:600", "--shard-mib", 1, "--workers", 2, "--val-fraction", 0.05)


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    made(corpus, "--out", folder, *INTERRUPTED)
    return files(folder)


@pytest.mark.slow
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_job_that_dies_goes_on_to_identical_bytes(
    corpus: Path, uninterrupted: dict[str, bytes], tmp_path: Path, death: signal.Signals
) -> None:
    out, moments = tmp_path / "killed", chance(f"deaths of tokenize {death}")
    killed = 0
    # One death of a fresh job, and one of a job that goes on.
    while killed < 2:
        process = subprocess.Popen(
            command(corpus, "--out", out, *INTERRUPTED), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wanted = len(list((out / ".tokenize").glob("chunk-*.json"))) + moments.randrange(1, 4)
        while process.poll() is None and len(list((out / ".tokenize").glob("chunk-*.json"))) < wanted:
            time.sleep(0.005)
        process.send_signal(death)
        result, errors = process.communicate(timeout=300)
        # With its result printed only the interpreter's own end is left, in which a signal does what it always does.
        if process.returncode == 0 or result:
            if killed:
                break
            # A quick machine was done before the signal came: once more from the beginning.
            shutil.rmtree(out)
            continue
        killed += 1
        assert process.returncode == (-signal.SIGKILL if death == signal.SIGKILL else 130), errors
        if death != signal.SIGKILL:
            assert errors.splitlines()[-1] == "stopped; what is finished is kept: run the same command again to go on"
            assert "Traceback" not in errors
    done = run_tokenize(corpus, "--out", out, *INTERRUPTED)
    assert done.returncode == 0, done.stderr
    assert killed, "the job ended before it could be killed even once"
    assert files(out) == uninterrupted


@pytest.mark.slow
def test_what_a_power_cut_leaves_of_a_chunk_is_made_again(corpus: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", "bytes", "--shard-mib", 64, "--workers", 2)
    made(corpus, "--out", tmp_path / "whole", *options)
    out = tmp_path / "torn"
    process = subprocess.Popen(command(corpus, "--out", out, *options), stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list((out / ".tokenize").glob("chunk-*.json"))) < 2:
        time.sleep(0.002)
    process.kill()
    process.wait()
    torn = sorted((out / ".tokenize").glob("chunk-*.train.tok"))
    assert torn, "the job ended before it could be killed"
    os.truncate(torn[0], 100)
    torn[-1].write_bytes(bytes(torn[-1].stat().st_size))
    (out / ".tokenize" / "chunk-000001.json").write_bytes(b"{")
    made(corpus, "--out", out, *options)
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "record",
    ["{", "[]", "null", "{}", '{"number": "0"}', "[" * 100_000, json.dumps(asdict(Shard("train-other", 1, 2, 3, 4)))],
    ids=lambda text: text[:9],
)
def test_a_record_of_another_form_counts_as_none(tmp_path: Path, record: str) -> None:
    work = WorkFolder(tmp_path)
    chunk, shard = ChunkRecord(0, {"train": Output(1, 2, 3, 4)}, 0, 0), Shard("train-00000", 1, 2, 3, 4)
    work.write_chunk(chunk)
    work.write_shard(shard)
    assert (work.read_chunk(0), work.read_shards("train")) == (chunk, {0: shard})
    for name in ("chunk-000000.json", "train-00000.json", "train-other.json"):
        (tmp_path / name).write_text(record)
    assert (work.read_chunk(0), work.read_shards("train")) == (None, {})


def test_finished_set_is_left_alone_and_another_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    words = (tmp_path / "a.txt", "--out", tmp_path / "set", "--tokenizer", "bytes", "--val-fraction", 0)
    first = made(*words)
    before = files(tmp_path / "set")
    again = run_tokenize(*words)
    assert "complete already" in again.stderr
    assert made(*words)["checksum"] == first["checksum"]
    (line,) = refused(*words, "--seed", 5)
    assert "holds a token set made of other input or with other options" in line
    assert files(tmp_path / "set") == before


@pytest.mark.slow
def test_changed_input_begins_anew_instead_of_mixing_two_inputs(tmp_path: Path) -> None:
    work = tmp_path / "set" / ".tokenize"
    (tmp_path / "a.txt").write_text("first")
    made(tmp_path / "a.txt", "--out", tmp_path / "set", "--tokenizer", "bytes", "--val-fraction", 0)
    (tmp_path / "set" / "index.json").unlink()
    work.mkdir()
    (work / "made-from").write_text("another input")
    (work / "chunk-000000.json").write_text('{"number": 0, "outputs": {}, "replaced": 0, "skipped": 0}')
    (tmp_path / "a.txt").write_text("second")
    done = run_tokenize(tmp_path / "a.txt", "--out", tmp_path / "set", "--tokenizer", "bytes", "--val-fraction", 0)
    assert "starting over" in done.stderr
    assert documents(tmp_path / "set", "train") == [b"second"]


def test_work_folder_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lustre that is mounted without the option flock answers so."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "a.txt").write_text("text")
    assert main(["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "set"), "--tokenizer", "bytes"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"--work = '{tmp_path / 'set'}")


@pytest.mark.slow
def test_two_jobs_on_one_set_do_not_mix(corpus: Path, tmp_path: Path) -> None:
    words = (corpus, "--out", tmp_path / "set", "--tokenizer", "bytes", "--workers", 1)
    first = subprocess.Popen(command(*words), stderr=subprocess.DEVNULL)
    while first.poll() is None and not (tmp_path / "set" / ".tokenize" / "made-from").exists():
        time.sleep(0.002)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        (line,) = refused(*words)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert "another tokenize is at work" in line
    assert first.wait() == 0


@pytest.mark.slow
def test_standard_input_is_one_more_file(tmp_path: Path) -> None:
    text = prose(5, 3000)
    made("-", "--out", tmp_path / "text", "--tokenizer", "bytes", "--val-fraction", 0, stdin=text.encode())
    assert documents(tmp_path / "text", "train") == [text.encode()]
    lines = b'{"text": "one"}\n\n{"text": "two"}\n{"text": ""}'
    words = ("-", "--format", "jsonl", "--out", tmp_path / "lines", "--tokenizer", "bytes", "--val-fraction", 0)
    made(*words, stdin=lines)
    assert documents(tmp_path / "lines", "train") == [b"one", b"two"]
    assert not (tmp_path / "lines" / ".tokenize").exists()
    assert "complete already" in run_tokenize(*words, stdin=lines).stderr


@pytest.mark.slow
def test_parquet_columns_are_read_by_row_groups(tmp_path: Path) -> None:
    require(importlib.util.find_spec("pyarrow"), "needs the parquet extra")
    import pyarrow
    import pyarrow.parquet

    texts = [f"document {n}: {prose(n, 2000)}" for n in range(900)]
    table = pyarrow.table({"body": texts, "number": list(range(900))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    words = (tmp_path / "a.parquet", "--out", tmp_path / "set", "--tokenizer", "bytes", "--val-fraction", 0)
    (line,) = refused(*words)
    assert "--field = 'text'" in line
    assert "allowed: body" in line
    result = made(*words, "--field", "body", "--workers", 2)
    assert documents(tmp_path / "set", "train") == [text.encode() for text in texts]
    assert result["chunks"] > 1
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no more")
    (line,) = refused(tmp_path / "b.parquet", "--out", tmp_path / "other", "--tokenizer", "bytes")
    assert "is not a parquet file" in line


@pytest.mark.slow
def test_undecodable_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 and \xff")
    (tmp_path / "good.txt").write_text("café")
    (tmp_path / "half.jsonl").write_bytes(b'{"text": "half a pair \\ud800 here"}\n{"text": "ok"}\n')
    result = made(tmp_path / "*.*", "--out", tmp_path / "set", "--tokenizer", "bytes", "--val-fraction", 0)
    assert result["replaced_documents"] == 2
    texts = [document.decode() for document in documents(tmp_path / "set", "train")]
    assert texts[:2] == ["caf� and �", "café"]
    assert "half a pair �" in texts[2]


@pytest.mark.slow
def test_bad_lines_stop_with_their_place_unless_skippable(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": 5}\nnot json\n["text"]\n{"body": "x"}\n{"text": "also good"}\n')
    words = (path, "--out", tmp_path / "set", "--tokenizer", "bytes", "--val-fraction", 0)
    (line,) = refused(*words)
    assert "line at byte 17" in line
    assert "has no text in field 'text'" in line
    assert not (tmp_path / "set" / "index.json").exists()
    assert made(*words, "--skip-bad")["skipped"] == 4
    assert documents(tmp_path / "set", "train") == [b"good", b"also good"]


@pytest.mark.slow
def test_folders_are_walked_sans_hidden_binary_or_output_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    result = made(tmp_path, "--out", tmp_path / "set", "--tokenizer", "bytes", "--val-fraction", 0)
    assert documents(tmp_path / "set", "train") == [b"one", b"two"]
    assert result["binary_files"] == 1


@pytest.mark.slow
def test_all_mistakes_are_reported_at_once_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK")
    out = tmp_path / "set"
    lines = refused(
        tmp_path / "no.txt", tmp_path / "*.none", "s3://b/x", tmp_path / "a.zip", "--out", out, "--tokenizer", "bytes"
    )
    assert [line.partition(": ")[2].partition(";")[0] for line in lines] == [
        "there is no such file",
        "the pattern matches no file",
        "inputs are read from local files",
        "is an archive",
    ]
    lines = refused(
        "-", "x", "--out", out, "--tokenizer", "train:99", "--val-fraction", 1, "--shard-mib", 0, "--workers", 0
    )
    wrong = ["INPUT", "--val-fraction", "--shard-mib", "--workers", "--tokenizer"]
    assert [line.partition(" = ")[0] for line in lines] == wrong
    (tmp_path / "empty.txt").write_text("")
    assert "holds no text" in refused(tmp_path / "empty.txt", "--out", out, "--tokenizer", "bytes")[0]
    assert "standard input is empty" in refused("-", "--out", tmp_path / "in", "--tokenizer", "bytes", stdin=b"")[0]
    (tmp_path / "a.txt").write_text("text")
    for wish in (tmp_path / "none.json", tmp_path / "a.txt", "tran:8192"):
        (line,) = refused(tmp_path / "a.txt", "--out", out, "--tokenizer", wish)
        assert line.startswith("--tokenizer = ")
    assert "allowed: train:N, bytes, or the path of a tokenizer.json" in line
    (line,) = refused(tmp_path / "a.txt", "--out", out, "--tokenizer", "bytes", "--eos", "</s>")
    assert line.startswith("--eos = ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "a.zip", "empty.txt"]


@pytest.mark.slow
def test_killed_worker_ends_the_job_in_one_line_and_it_can_go_on(corpus: Path, tmp_path: Path) -> None:
    words = (corpus, "--out", tmp_path / "set", "--tokenizer", "bytes", "--workers", 1)
    process = subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list((tmp_path / "set" / ".tokenize").glob("chunk-*.json")):
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert workers, "the job ended before its worker could be killed"
    for pid in workers:
        os.kill(int(pid), signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2, errors
    assert "a worker process died" in errors
    assert "Traceback" not in errors
    assert made(*words)["resumed_chunks"] > 0


@pytest.mark.slow
def test_disk_that_takes_no_more_is_one_line_and_job_can_go_on(corpus: Path, tmp_path: Path) -> None:
    """The limit on file sizes stands in for a full disk: writes fail in the same place, with an errno of their own."""
    words = (corpus, "--out", tmp_path / "set", "--tokenizer", "bytes", "--workers", 2, "--val-fraction", 0)
    done = subprocess.run(
        ["prlimit", "--fsize=500000", *command(*words)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot be read or written: File too large" in done.stderr.splitlines()[-1]
    made(*words)


@pytest.mark.slow
def test_folder_for_unfinished_state_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine").write_text("precious")
    (tmp_path / "a.txt").write_text("text")
    done = run_tokenize(
        tmp_path / "a.txt", "--out", tmp_path / "set", "--tokenizer", "bytes", "--work", tmp_path / "work"
    )
    assert (done.returncode, files(tmp_path / "work")) == (0, {"mine": b"precious"})
    assert "no document was held out" in done.stderr


lines_of_text = st.lists(st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b" ")), max_size=60)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lines=lines_of_text, cuts=st.lists(st.integers(0, 2500), max_size=6), closed=st.booleans())
def test_however_a_file_is_cut_into_spans_each_line_is_read_once(
    tmp_path: Path, lines: list[bytes], cuts: list[int], closed: bool
) -> None:
    """Spans are planned from sizes alone; the rule that a line belongs where it starts must hold for any cut."""
    path = tmp_path / "lines.jsonl"
    texts = [line.hex() for line in lines]
    body = "\n".join(json.dumps({"text": text}) for text in texts)
    path.write_text(body + "\n" * closed)
    if not body:
        return
    (source,) = find_sources([str(path)], None).sources
    (chunk,) = plan_chunks([source])
    edges = sorted({0, source.size, *(cut for cut in cuts if cut < source.size)})
    spans = [type(chunk[0])(source, start, stop, stop - start) for start, stop in itertools.pairwise(edges)]
    found = [text for span in spans for text in read_documents(span, Reading(), Tally())]
    assert Counter(found) == Counter(text for text in texts if text)
    assert found == [text for text in texts if text]
