"""The job that makes a token set: parallel by processes, restartable after any death, the same bytes for any number of workers.

What is under way lies in a work folder: a record and two files per finished chunk and split, and a record per stored
shard. A chunk's files go as soon as the shards made of them are stored. The index is written last; until then there
is no token set. A second call with the same input and options goes on where the first one stopped; with other ones it
begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from awscrt.checksums import crc64nvme

from lustrain.file_lock import try_lock
from lustrain.problem import UserError, problem
from lustrain.progress import BYTES, Progress
from trainer.data.index import FORMAT, INDEX, TOKENIZER, Index, Split, dtype_for, encode_index, read_index
from trainer.data.tokenize.assembly import SPLITS, WorkFolder
from trainer.data.tokenize.chunks import Job
from trainer.data.tokenize.documents import Reading, Tally, read_documents
from trainer.data.tokenize.inputs import STDIN, Format, Source, Span, find_sources, plan_chunks, refuse_json_lines
from trainer.data.tokenize.job import Run
from trainer.data.tokenizer import TokenizerSpec, build, fastest, read_spec, train
from trainer.storage import ObjectMissingError, ObjectStore, open_store
from trainer.storage.local import LocalStore

TRAINING_BYTES = 64 << 20
"""Input from which a tokenizer is trained, spread evenly; more text changes a vocabulary of this kind very little."""
SAMPLE_BYTES = 256 << 10
"""Input on which the two engines are compared, spread evenly."""


SPOOL_BYTES = 1 << 20
LOCK, SPOOL, MADE_FROM = "lock", "stdin", "made-from"
"""Files of the work folder beside the chunks: who works, standard input, and the identity of input and options."""


@dataclass(frozen=True)
class Request:
    """What to make; `cli.py` explains each option. `tokenizer` is one, or how many ids to train.

    `work` is where to put unfinished state, None for the usual place.
    """

    inputs: tuple[str, ...]
    out: str
    tokenizer: TokenizerSpec | int
    eos: str | None
    format: Format | None
    reading: Reading
    val_fraction: float
    seed: int
    shard_bytes: int
    workers: int
    work: Path | None


@dataclass(frozen=True)
class Result:
    """The finished set and what happened on the way; `resumed` chunks came from an earlier, interrupted call."""

    index: Index
    engine: str
    chunks: int
    resumed: int
    binary: int
    replaced: int
    skipped: int


def tokenize(request: Request, stdin: BinaryIO, report: Callable[[str], None]) -> Result:
    """Make the token set; `report` prints lines of progress.

    UserError when a different set is stored there, another process is at work, or the input cannot be read. After
    KeyboardInterrupt the same call goes on where this one stopped.
    """
    named = None if STDIN in request.inputs else find_sources(request.inputs, request.format, skip=_folder(request.out))
    beginning = b"" if named else _beginning(stdin, request.format)
    # Only now, because this makes the folder: a mistake in what is given must not leave one behind.
    store = open_store(request.out, name="--out")
    work = _work(request, store)
    with _only_one(work):
        folder = WorkFolder(work)
        sources = named.sources if named else (_spooled(beginning, stdin, work / SPOOL, request.format),)
        binary = named.binary if named else 0
        made_from = _fingerprint(request, sources)
        finished = _existing(store, made_from)
        if finished is not None:
            report("this token set is complete already: nothing to do")
            made = Result(finished, "", 0, 0, binary, 0, 0)
        else:
            _begin(folder, made_from, report)
            made = _make(request, plan_chunks(sources), folder, store, made_from, binary, report)
        shutil.rmtree(work)
    return made


def _make(
    request: Request,
    plan: Sequence[tuple[Span, ...]],
    folder: WorkFolder,
    store: ObjectStore,
    made_from: str,
    binary: int,
    report: Callable[[str], None],
) -> Result:
    spec, engine = _tokenizer(request, plan, folder, report)
    report(f"tokenizer: {build(spec).vocab_size:,} ids, {engine}")
    job = Job(str(folder.path), request.out, spec, request.reading, request.seed, request.val_fraction)
    run = Run(job, plan, folder, store, request.shard_bytes)
    resumed = run.resume()
    if resumed:
        report(f"going on with an earlier call: {resumed} of {len(plan)} chunks are done")
    run.finish(request.workers)
    index = _index(spec, run, made_from)
    _publish(store, spec, index)
    replaced = sum(record.replaced for record in run.records.values())
    skipped = sum(record.skipped for record in run.records.values())
    return Result(index, engine, len(plan), resumed, binary, replaced, skipped)


def _folder(out: str) -> Path | None:
    """Where a local token set will lie, so that a walk through its parent does not take it for input."""
    return None if out.startswith("s3://") else Path(unquote(urlsplit(out).path)).expanduser().resolve()


def _work(request: Request, store: ObjectStore) -> Path:
    """Return a folder of this token set alone: it is emptied and removed when the set is done."""
    own = hashlib.sha256(store.uri.encode()).hexdigest()[:16]
    if request.work is not None:
        return request.work / f"tokenize-{own}"
    if isinstance(store, LocalStore):
        return store.root / ".tokenize"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lustrain" / "tokenize" / own


def _beginning(stdin: BinaryIO, format: Format | None) -> bytes:
    """Read the first bytes of standard input; UserError when it is empty, or cannot have the requested format."""
    if format == "parquet":
        raise UserError(problem("--format", format, "standard input cannot be parquet", fix="name the file"))
    beginning = stdin.read(SPOOL_BYTES)
    if not beginning:
        raise UserError(problem("INPUT", STDIN, "standard input is empty", fix="pipe text into it"))
    if format is None:
        refuse_json_lines(STDIN, beginning)
    return beginning


def _spooled(beginning: bytes, stdin: BinaryIO, path: Path, format: Format | None) -> Source:
    """Copy standard input to a file that workers share; its checksum is its identity, so the same input again goes on."""
    size = checksum = 0
    with Progress("read standard input", None, BYTES) as progress, path.open("wb") as file:
        for block in chain([beginning], iter(partial(stdin.read, SPOOL_BYTES), b"")):
            file.write(block)
            checksum = crc64nvme(block, checksum)
            size += len(block)
            progress.advance(len(block))
    return Source(str(path), format or "text", size, f"{checksum:016x}")


@contextmanager
def _only_one(work: Path) -> Iterator[None]:
    """Hold the work folder for this process; remove it at the end if it holds nothing to go on with."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        fd = os.open(work / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        is_ours = try_lock(fd)
    except OSError as error:
        why = f"cannot be used: {error.strerror}"
        fix = "name a folder on a local disk, which has locks and can be written"
        raise UserError(problem("--work", str(work), why, fix=fix)) from error
    if not is_ours:
        os.close(fd)
        why = "another tokenize is at work on this token set"
        raise UserError(problem("--work", str(work), why, fix="wait for it, or stop it"))
    try:
        yield
    except OSError as error:
        why = f"cannot be read or written: {error.strerror or error}"
        fix = "remove the cause and run the same command again: it goes on"
        raise UserError(problem("file", error.filename or str(work), why, fix=fix)) from error
    finally:
        if not (work / MADE_FROM).is_file():
            shutil.rmtree(work, ignore_errors=True)
        os.close(fd)


def _fingerprint(request: Request, sources: Sequence[Source]) -> str:
    """Identity of input and options: equal fingerprints make equal token sets."""
    match request.tokenizer:
        case int(size):
            tokenizer = f"train:{size}"
        case TokenizerSpec(kind="bytes"):
            tokenizer = "bytes"
        case spec:
            tokenizer = hashlib.sha256(spec.text.encode()).hexdigest()
    body = [
        FORMAT,
        [tokenizer, request.eos, request.val_fraction, request.shard_bytes, request.seed],
        [request.reading.field, request.reading.skip_bad],
        [[os.path.abspath(source.path), source.format, source.size, source.identity] for source in sources],
    ]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _existing(store: ObjectStore, made_from: str) -> Index | None:
    try:
        store.stat(INDEX)
    except ObjectMissingError:
        return None
    index = read_index(store)
    if index.made_from != made_from:
        why = "holds a token set made of other input or with other options"
        raise UserError(problem("--out", store.uri, why, fix="choose another place, or remove the old set first"))
    return index


def _begin(folder: WorkFolder, made_from: str, report: Callable[[str], None]) -> None:
    """Empty the work folder unless it belongs to the same input and options."""
    plan = folder.path / MADE_FROM
    if plan.is_file() and plan.read_text() == made_from:
        return
    if plan.is_file():
        report("input or options have changed since an earlier, unfinished call: starting over")
    for path in folder.path.iterdir():
        if path.name not in (LOCK, SPOOL):
            path.unlink()
    folder.write(MADE_FROM, made_from.encode())


def _tokenizer(
    request: Request, plan: Sequence[tuple[Span, ...]], folder: WorkFolder, report: Callable[[str], None]
) -> tuple[TokenizerSpec, str]:
    """Return the tokenizer and its engine; one to be trained is trained now, unless an earlier call did."""
    kept = folder.path / TOKENIZER
    wanted = request.tokenizer
    if isinstance(wanted, TokenizerSpec):
        spec = wanted
    elif kept.is_file():
        spec = read_spec(str(kept))
    else:
        with Progress("train the tokenizer", None, BYTES) as progress:
            spec = train(wanted, _counted(_spread(plan, request.reading, TRAINING_BYTES), progress))
        folder.write(TOKENIZER, spec.text.encode())
        if (size := build(spec).vocab_size) < wanted:
            report(f"the input yields only {size:,} of the {wanted:,} requested ids")
    return fastest(spec, list(_spread(plan, request.reading, SAMPLE_BYTES)))


def _counted(texts: Iterator[str], progress: Progress) -> Iterator[str]:
    for text in texts:
        yield text
        progress.advance(len(text))


def _spread(plan: Sequence[tuple[Span, ...]], reading: Reading, limit: int) -> Iterator[str]:
    """Documents of about `limit` bytes, the same share from the beginning of every chunk, or every k-th of very many."""
    picked = plan[:: max(1, len(plan) * 4096 // limit)]
    share = limit // len(picked)
    for spans in picked:
        left = share
        for text in (text for span in spans for text in read_documents(span, reading, Tally())):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def _index(spec: TokenizerSpec, run: Run, made_from: str) -> Index:
    tokenizer = build(spec)
    splits = {
        split: Split(tuple(plan.done[number] for number in sorted(plan.done)))
        for split, plan in run.splits.items()
        if plan.done
    }
    if not splits:
        raise UserError(problem("INPUT", "", "holds no document with any text", fix="check the input and --field"))
    return Index(
        dtype=dtype_for(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_kind=tokenizer.kind,
        tokenizer_hash=tokenizer.hash,
        splits=splits,
        made_from=made_from,
    )


def _publish(store: ObjectStore, spec: TokenizerSpec, index: Index) -> None:
    """Remove shards that an earlier, abandoned call left there, then make the set exist."""
    names = {shard.name for split in index.splits.values() for shard in split.shards}
    for split in SPLITS:
        for info in list(store.list(f"{split}-")):
            match = re.fullmatch(r"((?:train|val)-\d{5,})\.(tok|doc)", info.key)
            if match and match[1] not in names:
                store.delete(info.key)
    if spec.kind == "huggingface":
        store.put(TOKENIZER, spec.text.encode())
    store.put(INDEX, encode_index(index))
