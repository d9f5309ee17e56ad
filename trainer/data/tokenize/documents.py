"""The documents in a span: a plain file or a piece of a large one, a JSONL line, a parquet row. Empty ones are left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from lustrain.problem import UserError, problem
from trainer.data.tokenize.inputs import BYTE_ORDER_MARK, WHOLE_DOCUMENT, Source, Span, opened

READ_BYTES = 1 << 20
"""Long lines come three times faster out of a buffer of this size than out of Python's 8 KiB."""
PARQUET_ROWS = 1024
"""Rows decoded at a time, so that a row group of any size needs little memory."""


@dataclass(frozen=True)
class Reading:
    """How to find the text: `field` of a JSON object or parquet row; `skip_bad` leaves out what has none."""

    field: str = "text"
    skip_bad: bool = False


@dataclass
class Tally:
    """What was wrong on the way: documents in which undecodable bytes became U+FFFD, and lines or rows that were left out."""

    replaced: int = 0
    skipped: int = 0


def read_documents(span: Span, reading: Reading, tally: Tally) -> Iterator[str]:
    """Read the texts of a span in order, each valid Unicode; UserError for the first bad line or row unless skipped."""
    if span.source.format == "parquet":
        texts = _parquet(span, reading)
    elif span.source.format == "jsonl":
        texts = _json_lines(span, reading, tally)
    else:
        texts = _packed_pieces(span.source, tally) if span.source.packed else _pieces(span, tally)
    for text in texts:
        if text is None:
            tally.skipped += 1
        elif text:
            yield _valid(text, tally)


def is_held_out(text: str, seed: int, fraction: float) -> bool:
    """Whether a document belongs to `val`: by a keyed hash of its text, so equal documents are always on the same side."""
    if fraction <= 0:
        return False
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def _pieces(span: Span, tally: Tally) -> Iterator[str]:
    with open(span.source.path, "rb") as file:
        start = _line_start(file, span.start, span.source)
        for edge in range(span.start, span.stop, span.source.piece_bytes):
            stop = _line_start(file, min(edge + span.source.piece_bytes, span.source.size), span.source)
            file.seek(start)
            yield _decoded(file.read(stop - start), tally, first=start == 0)
            start = stop


def _packed_pieces(source: Source, tally: Tally) -> Iterator[str]:
    """One document up to a size, above it pieces cut at line ends: how long it is unpacked, only its end tells."""
    with opened(source) as file:
        first = True
        while piece := file.read(WHOLE_DOCUMENT):
            yield _decoded(piece + file.readline(), tally, first=first)
            first = False


def _json_lines(span: Span, reading: Reading, tally: Tally) -> Iterator[str | None]:
    source = span.source
    with opened(source, READ_BYTES) as file:
        position = 0 if source.packed else _line_start(file, span.start, source)
        if not source.packed:
            file.seek(position)
        while (source.packed or position < span.stop) and (line := file.readline()):
            if line.strip():
                yield _json_text(line, source, position, reading, tally)
            position += len(line)


def _json_text(line: bytes, source: Source, position: int, reading: Reading, tally: Tally) -> str | None:
    why = ""
    try:
        record = json.loads(_decoded(line, tally, first=position == 0))
    except (ValueError, RecursionError) as error:
        why = f"is not JSON: {error}"
    else:
        text = record.get(reading.field) if isinstance(record, dict) else None
        if isinstance(text, str):
            return text
        why = f"has no text in field {reading.field!r}"
        if isinstance(record, dict):
            why += f" (its fields: {', '.join(map(str, list(record)[:8]))})"
    if reading.skip_bad:
        return None
    where = f"{source.path}, line at byte {position}"
    raise UserError(
        problem(where, _shown(line), why, fix="correct the line, choose another --field, or pass --skip-bad")
    )


def _parquet(span: Span, reading: Reading) -> Iterator[str | None]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(span.source.path) as file:
        schema = file.schema_arrow
        texts = [f.name for f in schema if pyarrow.types.is_string(f.type) or pyarrow.types.is_large_string(f.type)]
        if reading.field not in texts:
            why, allowed = f"{span.source.path} has no such text column", ", ".join(texts) or "none"
            raise UserError(problem("--field", reading.field, why, allowed=allowed))
        batches = file.iter_batches(
            PARQUET_ROWS, row_groups=list(range(span.start, span.stop)), columns=[reading.field]
        )
        for batch in batches:
            for value in batch.column(0).to_pylist():
                if value is None and not reading.skip_bad:
                    where = f"{span.source.path}, column {reading.field}"
                    raise UserError(problem(where, "null", "a row has no text", fix="correct it, or pass --skip-bad"))
                yield value


def _line_start(file: BinaryIO, at: int, source: Source) -> int:
    """Return the first line start at or after byte `at`; the end of the file counts as one."""
    if at <= 0 or at >= source.size:
        return min(max(at, 0), source.size)
    file.seek(at - 1)
    file.readline()
    return file.tell()


def _decoded(raw: bytes, tally: Tally, *, first: bool) -> str:
    """Of `first` bytes of a file a byte order mark is not text."""
    if first:
        raw = raw.removeprefix(BYTE_ORDER_MARK)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        tally.replaced += 1
        return raw.decode("utf-8", "replace")


def _valid(text: str, tally: Tally) -> str:
    """JSON may spell half a surrogate pair, which no encoding of Unicode has."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        tally.replaced += 1
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text


def _shown(value: Any) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.strip()[:60]
