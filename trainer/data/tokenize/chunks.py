"""The work of one process: a chunk of input becomes ids on disk, and the ids of many chunks become a stored shard."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path

import numpy as np
import numpy.typing as npt
from awscrt.checksums import crc64nvme

from trainer.data.index import DTYPES, Shard, dtype_for, shard_name
from trainer.data.tokenize.assembly import SPLITS, ChunkRecord, Output, Piece, WorkFolder
from trainer.data.tokenize.documents import Reading, Tally, is_held_out, read_documents
from trainer.data.tokenize.inputs import Span
from trainer.data.tokenizer import Ids, Tokenizer, TokenizerSpec, build
from trainer.storage import ObjectStore, open_store

BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at a time: bounds memory, and is large enough that calls cost nothing."""
SMALL_OBJECT = 1 << 20


@dataclass(frozen=True)
class Job:
    """What all chunks of a job have in common."""

    work: str
    out: str
    tokenizer: TokenizerSpec
    reading: Reading
    seed: int
    val_fraction: float


@dataclass
class _Worker:
    """What one worker process keeps between its tasks."""

    job: Job
    tokenizer: Tokenizer
    store: ObjectStore | None = None


_worker: _Worker | None = None


def start_worker(job: Job) -> None:
    """Prepare this process for tasks of `job`, and end it when its parent dies."""
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker = _Worker(job, build(job.tokenizer))


def encode_chunk(number: int, spans: Sequence[Span]) -> ChunkRecord:
    """Tokenizes a chunk into the work folder and records it; the same spans always give the same files."""
    worker = _ready()
    job = worker.job
    tally = Tally()
    encoded: dict[str, list[Ids]] = {split: [] for split in SPLITS}
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    pending = 0
    for span in spans:
        for text in read_documents(span, job.reading, tally):
            texts["val" if is_held_out(text, job.seed, job.val_fraction) else "train"].append(text)
            pending += len(text)
            if pending >= BATCH_CHARACTERS:
                _encode(worker.tokenizer, texts, encoded)
                pending = 0
    _encode(worker.tokenizer, texts, encoded)
    folder = WorkFolder(Path(job.work))
    outputs = {
        split: _write_output(folder, number, split, worker.tokenizer, encoded[split])
        for split in SPLITS
        if encoded[split]
    }
    record = ChunkRecord(number, outputs, tally.replaced, tally.skipped)
    folder.write_chunk(record)
    return record


def assemble_shard(split: str, number: int, pieces: Sequence[Piece]) -> Shard:
    """Store one shard of a split, made of `pieces`, and record it."""
    worker = _ready()
    if worker.store is None:
        worker.store = open_store(worker.job.out, name="--out")
    folder = WorkFolder(Path(worker.job.work))
    dtype = DTYPES[dtype_for(worker.tokenizer.vocab_size)]
    ids = np.empty(sum(piece.stop - piece.start for piece in pieces), dtype)
    ends = []
    position = 0
    for piece in pieces:
        count = piece.stop - piece.start
        path = folder.tokens(piece.chunk, split)
        ids[position : position + count] = np.fromfile(path, dtype, count, offset=piece.start * dtype.itemsize)
        inside = np.fromfile(folder.ends(piece.chunk, split), "<i8")
        ends.append(inside[(inside > piece.start) & (inside <= piece.stop)] + (position - piece.start))
        position += count
    all_ends = np.concatenate(ends).astype("<i8")
    shard = Shard(
        name=shard_name(split, number),
        tokens=ids.size,
        documents=all_ends.size,
        crc64nvme=_store(worker.store, f"{shard_name(split, number)}.tok", ids),
        doc_crc64nvme=_store(worker.store, f"{shard_name(split, number)}.doc", all_ends),
    )
    folder.write_shard(shard)
    return shard


def _ready() -> _Worker:
    if _worker is None:
        raise RuntimeError("start_worker was not called in this process")
    return _worker


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode(tokenizer: Tokenizer, texts: dict[str, list[str]], encoded: dict[str, list[Ids]]) -> None:
    for split, batch in texts.items():
        if batch:
            encoded[split] += tokenizer.encode_batch(batch)
            batch.clear()


def _write_output(folder: WorkFolder, number: int, split: str, tokenizer: Tokenizer, documents: list[Ids]) -> Output:
    """One end-of-text id behind each document; returns what lies in the two files."""
    lengths = np.array([ids.size + 1 for ids in documents], dtype=np.int64)
    ends = np.cumsum(lengths).astype("<i8")
    stream = np.full(int(ends[-1]), tokenizer.eos_id, DTYPES[dtype_for(tokenizer.vocab_size)])
    for ids, end in zip(documents, ends.tolist(), strict=True):
        stream[end - 1 - ids.size : end - 1] = ids
    folder.write(folder.tokens(number, split).name, stream.data)
    folder.write(folder.ends(number, split).name, ends.data)
    return Output(stream.size, ends.size, _crc(stream), _crc(ends))


def _store(store: ObjectStore, key: str, array: npt.NDArray[np.generic]) -> int:
    """Store the array's bytes as one object and return their checksum."""
    checksum = _crc(array)
    if array.nbytes <= SMALL_OBJECT:
        store.put(key, array.tobytes())
        return checksum
    fd = os.memfd_create(key)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(array.data)
        store.put_file(key, f"/proc/self/fd/{fd}", array.nbytes, checksum)
    finally:
        os.close(fd)
    return checksum


def _crc(array: npt.NDArray[np.generic]) -> int:
    return int(crc64nvme(array.view(np.uint8).data))
