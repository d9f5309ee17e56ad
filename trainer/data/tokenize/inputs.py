"""Input files and their cut into chunks: files are listed once, chunks follow from their names and sizes alone.

Chunks do not depend on the number of workers, so neither do the shards made of them. A span of a file is nominal: a
line belongs to the span in which it starts, so spans are planned without reading and nothing is lost or read twice.
A packed file is one span: it can be read from its beginning only.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, cast, get_args

from lustrain.problem import UserError, problem

Format = Literal["text", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)
STDIN = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SMALLEST_CHUNK = 1 << 20
LARGEST_CHUNK = 64 << 20
CHUNKS = 1024
"""Aimed at, between the two sizes: enough that 100 workers end at about the same time, few enough to keep a record of each."""
WHOLE_DOCUMENT = 1 << 20
"""A plain file up to this size is one document; a larger one is cut at line ends into about 64, of 64 KiB to 1 MiB each."""
LARGEST_PACKED = 512 << 20
"""Of a packed file, which one process reads from its beginning to its end."""
MOST_LINES = 20
_PIECES = 64
_SMALLEST_PIECE = 64 << 10
_SNIFFED_BYTES = 8000
"""A file with a NUL among its first 8000 bytes is binary: git's rule (buffer_is_binary in xdiff-interface.c)."""
_BY_SUFFIX: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_NOT_TEXT = frozenset({
    ".arrow", ".avro", ".csv", ".docx", ".epub", ".feather", ".htm", ".html", ".json", ".npy", ".npz", ".orc", ".pdf",
    ".pickle", ".pkl", ".tar", ".tgz", ".tsv", ".xml",
})  # fmt: skip
"""Files that hold more than the text to train on, so that someone has to say what to do with them."""
_UNREAD = {".lz4": "lz4cat", ".zip": "unzip -p"}
"""Packed files that are not read here, and what unpacks them."""


class _Zstandard(io.RawIOBase):
    """What a .zst file holds; EOFError where it ends inside a frame, which the package's own reader takes for the end."""

    def __init__(self, path: str) -> None:
        self._file: BinaryIO | None = None
        try:
            import zstandard
        except ImportError as error:
            fix = "pip install 'lustrain[zstd]'"
            raise UserError(problem("INPUT", path, "reading .zst needs zstandard", fix=fix)) from error
        self._frame = zstandard.ZstdDecompressor().decompressobj
        self._file = open(path, "rb")  # noqa: SIM115
        self._open = self._frame()
        self._left = memoryview(b"")
        self._inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._file is not None
        while not self._left and (packed := self._open.unused_data or self._file.read(1 << 17)):
            if self._open.eof:
                self._open = self._frame()
            self._left = memoryview(self._open.decompress(packed))
            self._inside = not self._open.eof
        if not self._left and self._inside:
            raise EOFError("the file ends inside a frame")
        taken = self._left[: len(buffer)]
        buffer[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


_PACKED: Mapping[str, Callable[[str], IO[bytes]]] = {
    ".gz": cast("Callable[[str], IO[bytes]]", gzip.open),
    ".bz2": cast("Callable[[str], IO[bytes]]", bz2.open),
    ".xz": cast("Callable[[str], IO[bytes]]", lzma.open),
    ".zst": lambda path: cast("IO[bytes]", _Zstandard(path)),
}


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
    def packed(self) -> bool:
        return os.path.splitext(self.path)[1] in _PACKED

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
    """The sources in the order of their documents, and how many files in folders were passed over: binary and archives."""

    sources: tuple[Source, ...]
    binary: int


def find_sources(inputs: Sequence[str], format: Format | None, *, skip: Path | None = None) -> Inputs:
    """Find the files that `inputs` (files, folders, glob patterns) name, each once, sorted within each input.

    Folders are walked without hidden files, binary files and whatever lies below `skip`. The format follows from the
    suffix unless `format` says it. UserError for all inputs that do not exist, match nothing or cannot be read, and without
    `format` for those that are other things than text.
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
        raise UserError([*problems[:MOST_LINES], *(["and more"] if problems[MOST_LINES:] else [])])
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
    if source.packed:
        yield Span(source, 0, source.size, source.size)
        return
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


@contextmanager
def opened(source: Source, buffering: int = -1) -> Iterator[BinaryIO]:
    """Open a source, unpacked where it is packed; UserError where the packed file is damaged or cut off."""
    if not source.packed:
        with open(source.path, "rb", buffering=buffering) as file:
            yield file
        return
    try:
        with _PACKED[os.path.splitext(source.path)[1]](source.path) as packed:
            yield io.BufferedReader(cast("io.RawIOBase", packed), max(buffering, io.DEFAULT_BUFFER_SIZE))
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise _damaged(source.path, error) from error
    except Exception as error:
        # Of a package that may be missing; OSError of bz2 has no number.
        if type(error).__name__ != "ZstdError" and not (isinstance(error, OSError) and error.errno is None):
            raise
        raise _damaged(source.path, error) from error


def looks_like_json_lines(beginning: bytes) -> bool:
    """Whether a text begins with lines that are all JSON objects."""
    whole, _, rest = beginning.removeprefix(BYTE_ORDER_MARK).rpartition(b"\n")
    lines = [line for line in (whole or rest).splitlines() if line.strip()]
    if not lines or not all(line.lstrip().startswith(b"{") for line in lines):
        return False
    if not whole.strip() and len(beginning) >= _SNIFFED_BYTES:
        # The first line goes on beyond what was read.
        return re.match(rb'\s*\{\s*"', rest) is not None
    try:
        return isinstance(json.loads(lines[0]), dict)
    except (ValueError, RecursionError):
        return False


def refuse_json_lines(path: str, beginning: bytes) -> None:
    """UserError for a text that looks like JSON lines: as plain text, braces and keys would be trained on."""
    if looks_like_json_lines(beginning):
        fix = "--format jsonl, or --format text to take it as it is"
        raise UserError(problem("INPUT", path, "looks like JSON lines, and its name does not say so", fix=fix))


def _damaged(path: str, error: Exception) -> UserError:
    return UserError(problem("INPUT", path, f"cannot be unpacked: {error}", fix="get it again, or leave it out"))


def _named(entry: str, skip: Path | None) -> tuple[list[str], int, list[str]]:
    """Paths of one input, binary files passed over, problems."""
    if entry.startswith("s3://"):
        fix = "copy it here first: aws s3 cp --recursive"
        return [], 0, [problem("INPUT", entry, "inputs are read from local files", fix=fix)]
    if os.path.isdir(entry):
        files = list(_walk(Path(entry), skip))
        texts = [
            path for path in files if not _is_archive(path) and (_inner(path) in _BY_SUFFIX or not _is_binary(path))
        ]
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
            if not name.startswith(".") and path.is_file():
                yield path


def _inner(path: Path) -> str:
    """Return the suffix of what a file holds: of `a.jsonl.gz` it is `.jsonl`."""
    return Path(path.stem).suffix if path.suffix in _PACKED or path.suffix in _UNREAD else path.suffix


def _is_archive(path: Path) -> bool:
    return path.suffix in _UNREAD or _inner(path) == ".tar"


def _is_binary(path: Path) -> bool:
    try:
        with opened(Source(str(path), "text", 0, "")) as file:
            return b"\0" in file.read(_SNIFFED_BYTES)
    except (OSError, UserError):
        # Opening it for reading reports it, with all the other problems.
        return False


def _source(path: str, format: Format | None) -> Source:
    suffix, inner = Path(path).suffix, _inner(Path(path))
    packed = suffix in _PACKED
    kind: Format = format or _BY_SUFFIX.get(inner, "text")
    if suffix in _UNREAD:
        fix = f"{_UNREAD[suffix]} {path} | python -m trainer tokenize - --format {kind} …"
        raise UserError(problem("INPUT", path, "is an archive", fix=fix))
    if packed and kind == "parquet":
        raise UserError(problem("INPUT", path, "is a packed parquet file", fix="unpack it: parquet packs by itself"))
    if format is None and inner in _NOT_TEXT:
        fix = "name such files alone, with --format jsonl (each line is a JSON object) or --format text (as they are)"
        raise UserError(problem("INPUT", path, f"{inner} is not plain text", fix=fix))
    try:
        status = os.stat(path)
        if packed and status.st_size > LARGEST_PACKED:
            why = f"is more than {LARGEST_PACKED >> 20} MiB packed, and one process would hold all of its tokens"
            fix = f"zcat, xzcat, bzcat or zstdcat {path} | python -m trainer tokenize - --format {kind} …"
            raise UserError(problem("INPUT", path, why, fix=fix))
        source = Source(path, kind, status.st_size, str(status.st_mtime_ns))
        with opened(source) as file:
            if format is None and kind == "text":
                refuse_json_lines(path, file.read(_SNIFFED_BYTES))
    except OSError as error:
        raise UserError(problem("INPUT", path, f"cannot be read: {error.strerror}")) from error
    return replace(source, weights=_row_groups(path)) if kind == "parquet" and status.st_size else source


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
