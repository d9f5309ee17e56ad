"""Input files and their cut into chunks: files are listed once, chunks follow from their names and sizes alone.

Chunks do not depend on the number of workers, so neither do the shards made of them. A span of a file is nominal: a
line belongs to the span in which it starts, so spans are planned without reading and nothing is lost or read twice.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lustrain.problem import UserError, problem

Format = Literal["text", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)
STDIN = "-"
SMALLEST_CHUNK = 1 << 20
LARGEST_CHUNK = 64 << 20
CHUNKS = 1024
"""Aimed at, between the two sizes: enough that 100 workers end at about the same time, few enough to keep a record of each."""
WHOLE_DOCUMENT = 1 << 20
"""A plain file up to this size is one document; a larger one is cut at line ends into about 64, of 64 KiB to 1 MiB each."""
_PIECES = 64
_SMALLEST_PIECE = 64 << 10
_SNIFFED_BYTES = 8000
"""A file with a NUL among its first 8000 bytes is binary: git's rule (buffer_is_binary in xdiff-interface.c)."""
_BY_SUFFIX: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_PACKED = {".gz": "zcat", ".xz": "xzcat", ".bz2": "bzcat", ".zst": "zstdcat", ".lz4": "lz4cat", ".zip": "unzip -p"}


@dataclass(frozen=True)
class Source:
    """One input file. `weights` are the bytes of each row group of a parquet file, empty for other formats."""

    path: str
    format: Format
    size: int
    identity: str
    """Changes whenever the content might have: modification time, or a checksum for standard input."""
    weights: tuple[int, ...] = ()

    @property
    def piece_bytes(self) -> int:
        """Grid on which a plain text file is cut into documents."""
        if self.size <= WHOLE_DOCUMENT:
            return self.size
        return min(WHOLE_DOCUMENT, max(_SMALLEST_PIECE, 1 << (self.size // _PIECES - 1).bit_length()))


@dataclass(frozen=True)
class Span:
    """Part [start, stop) of a source: bytes, or row groups of a parquet file. `weight` is its share of the work in bytes."""

    source: Source
    start: int
    stop: int
    weight: int


@dataclass(frozen=True)
class Inputs:
    """The sources in the order of their documents, and how many binary files in folders were passed over."""

    sources: tuple[Source, ...]
    binary: int


def find_sources(inputs: Sequence[str], format: Format | None, *, skip: Path | None = None) -> Inputs:
    """Find the files that `inputs` (files, folders, glob patterns) name, each once, sorted within each input.

    Folders are walked without hidden files, binary files and whatever lies below `skip`. The format follows from the
    suffix unless `format` says it. UserError for all inputs that do not exist, match nothing or cannot be read.
    """
    paths: dict[str, None] = {}
    problems: list[str] = []
    binary = 0
    for entry in inputs:
        names, skipped, refused = _named(entry, skip)
        binary += skipped
        problems += refused
        paths.update(dict.fromkeys(names))
    sources = []
    for path in paths:
        try:
            sources.append(_source(path, format))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    if not any(source.size for source in sources):
        raise UserError(problem("INPUT", " ".join(inputs), "holds no text at all", fix="name files that are not empty"))
    return Inputs(tuple(source for source in sources if source.size), binary)


def plan_chunks(sources: Sequence[Source]) -> list[tuple[Span, ...]]:
    """Consecutive spans of about equal work; a function of the sources and nothing else."""
    total = sum(sum(source.weights) or source.size for source in sources)
    target = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, total // CHUNKS))
    chunks: list[tuple[Span, ...]] = []
    open_chunk: list[Span] = []
    room = target
    for grain in (grain for source in sources for grain in _grains(source, target)):
        last = open_chunk[-1] if open_chunk else None
        if last is not None and last.source is grain.source:
            open_chunk[-1] = Span(last.source, last.start, grain.stop, last.weight + grain.weight)
        else:
            open_chunk.append(grain)
        room -= grain.weight
        if room <= 0:
            chunks.append(tuple(open_chunk))
            open_chunk, room = [], target
    if open_chunk:
        chunks.append(tuple(open_chunk))
    return chunks


def _grains(source: Source, target: int) -> Iterator[Span]:
    """Yield the smallest spans of a source between which a chunk may end."""
    if source.format == "parquet":
        for number, weight in enumerate(source.weights):
            yield Span(source, number, number + 1, weight)
        return
    piece = source.piece_bytes if source.format == "text" else target
    # Many small pieces make one grain, so that the plan of a terabyte stays short.
    step = max(1, target // piece) * piece
    for start in range(0, source.size, step):
        stop = min(start + step, source.size)
        yield Span(source, start, stop, stop - start)


def _named(entry: str, skip: Path | None) -> tuple[list[str], int, list[str]]:
    """Paths of one input, binary files passed over, problems."""
    if entry.startswith("s3://"):
        fix = "copy it here first: aws s3 cp --recursive"
        return [], 0, [problem("INPUT", entry, "inputs are read from local files", fix=fix)]
    if os.path.isdir(entry):
        files = list(_walk(Path(entry), skip))
        texts = [path for path in files if path.suffix in _BY_SUFFIX or not _is_binary(path)]
        if not texts:
            return [], 0, [problem("INPUT", entry, "the folder holds no text files", fix="name another folder")]
        return [str(path) for path in texts], len(files) - len(texts), []
    if os.path.exists(entry):
        return [entry], 0, []
    if glob.has_magic(entry):
        matches = sorted(path for path in glob.glob(entry, recursive=True) if os.path.isfile(path))
        if matches:
            return matches, 0, []
        return [], 0, [problem("INPUT", entry, "the pattern matches no file", fix="check it; ** goes into folders")]
    return [], 0, [problem("INPUT", entry, "there is no such file", fix="check the path")]


def _walk(folder: Path, skip: Path | None) -> Iterable[Path]:
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        folders[:] = sorted(n for n in folders if not n.startswith(".") and (here / n).resolve() != skip)
        for name in sorted(files):
            path = here / name
            if not name.startswith(".") and path.suffix not in _PACKED and path.is_file():
                yield path


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(_SNIFFED_BYTES)
    except OSError:
        # Whoever opens it for reading reports it, with all the other problems.
        return False


def _source(path: str, format: Format | None) -> Source:
    suffix = Path(path).suffix
    if suffix in _PACKED:
        fix = f"{_PACKED[suffix]} {path} | python -m trainer tokenize - …"
        raise UserError(problem("INPUT", path, "is compressed", fix=fix))
    kind: Format = format or _BY_SUFFIX.get(suffix, "text")
    try:
        status = os.stat(path)
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UserError(problem("INPUT", path, f"cannot be read: {error.strerror}")) from error
    weights = _row_groups(path) if kind == "parquet" and status.st_size else ()
    return Source(path, kind, status.st_size, str(status.st_mtime_ns), weights)


def _row_groups(path: str) -> tuple[int, ...]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        fix = "pip install 'lustrain[parquet]'"
        raise UserError(problem("INPUT", path, "reading parquet needs pyarrow", fix=fix)) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata = file.metadata
            return tuple(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    except (OSError, pyarrow.lib.ArrowException) as error:
        raise UserError(problem("INPUT", path, f"is not a parquet file: {error}")) from error
