"""`python -m trainer tokenize`: its options, their checks, and its report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from multiprocessing import active_children
from pathlib import Path
from types import FrameType

from lustrain.problem import UserError, problem
from trainer.data.tokenize.documents import Reading
from trainer.data.tokenize.inputs import FORMATS, STDIN
from trainer.data.tokenize.make import Request, Result, tokenize
from trainer.data.tokenizer import TokenizerSpec, named_tokenizer

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
MAX_WORKERS = 1024
MAX_SHARD_MIB = 4096
"""S3 stores larger objects too, but a cache or a map of a shard should stay a small part of a machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tokenize`."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, folders or glob patterns; .jsonl, .ndjson and .parquet by suffix, anything else is plain text; "
        ".gz, .bz2, .xz and .zst are unpacked; - reads standard input",
    )
    parser.add_argument("--out", required=True, metavar="URI", help="folder or s3://bucket/prefix for the token set")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="path of a Hugging Face tokenizer.json, train:N to train byte pairs with N ids on the input, or bytes",
    )
    parser.add_argument(
        "--eos", metavar="TOKEN", help="end-of-text token of the tokenizer.json, where it is not one of the usual"
    )
    parser.add_argument("--format", choices=FORMATS, help="format of all inputs, whatever their suffix")
    parser.add_argument("--field", default="text", help="JSONL field or parquet column with the text (default: text)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out, and count, lines and rows without text")
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.01,
        metavar="F",
        help="share of the documents held out as split val, by a hash of their text (default: 0.01)",
    )
    parser.add_argument("--seed", type=int, default=0, help="decides which documents are held out (default: 0)")
    parser.add_argument("--shard-mib", type=int, default=64, metavar="N", help="size of a shard in MiB (default: 64)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="where to keep unfinished state (default: in a local set's folder, else ~/.cache)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Make the token set and print what it is; 130 after Ctrl-C or SIGTERM, with everything ready to go on."""
    request = _request(args)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        result = tokenize(request, sys.stdin.buffer, _report)
    except KeyboardInterrupt:
        _report("stopped; what is finished is kept: run the same command again to go on")
        for worker in active_children():
            worker.kill()
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    if request.val_fraction > 0 and "val" not in result.index.splits:
        _report(
            f"no document was held out: raise --val-fraction (it is {request.val_fraction}) if you want a split val"
        )
    print(json.dumps(_as_json(request, result)) if args.json else _summary(request, result))
    return 0


def _request(args: argparse.Namespace) -> Request:
    """Check the options and return them; UserError for all that are impossible."""
    workers = args.workers if args.workers is not None else len(os.sched_getaffinity(0))
    problems = []
    if STDIN in args.inputs and len(args.inputs) > 1:
        problems.append(problem("INPUT", " ".join(args.inputs), "standard input must be the only input"))
    if not 0 <= args.val_fraction < 1:
        problems.append(problem("--val-fraction", args.val_fraction, "is out of range", allowed="0 <= F < 1"))
    if not 1 <= args.shard_mib <= MAX_SHARD_MIB:
        problems.append(problem("--shard-mib", args.shard_mib, "is out of range", allowed=f"1 to {MAX_SHARD_MIB}"))
    if not 1 <= workers <= MAX_WORKERS:
        problems.append(problem("--workers", workers, "is out of range", allowed=f"1 to {MAX_WORKERS}"))
    tokenizer: TokenizerSpec | int = 0
    try:
        tokenizer = named_tokenizer(args.tokenizer, args.eos)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(problems)
    return Request(
        inputs=tuple(args.inputs),
        out=args.out,
        tokenizer=tokenizer,
        eos=args.eos,
        format=args.format,
        reading=Reading(args.field, args.skip_bad),
        val_fraction=args.val_fraction,
        seed=args.seed,
        shard_bytes=args.shard_mib << 20,
        workers=workers,
        work=args.work,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _summary(request: Request, result: Result) -> str:
    lines = [
        f"{request.out}: {result.index.vocab_size:,} ids as {result.index.dtype}, checksum {result.index.checksum[:16]}"
    ]
    for name, split in result.index.splits.items():
        shards = f"{len(split.shards)} shard{'' if len(split.shards) == 1 else 's'}"
        lines.append(f"  {name}: {split.tokens:,} tokens in {split.documents:,} documents, {shards}")
    if result.replaced:
        lines.append(f"  {result.replaced:,} documents had undecodable bytes, which became U+FFFD")
    if result.skipped:
        lines.append(f"  {result.skipped:,} lines or rows without text were left out")
    if result.binary:
        lines.append(f"  {result.binary:,} binary files and archives in folders were passed over")
    return "\n".join(lines)


def _as_json(request: Request, result: Result) -> dict[str, object]:
    return {
        "out": request.out,
        "dtype": result.index.dtype,
        "vocab_size": result.index.vocab_size,
        "tokenizer_hash": result.index.tokenizer_hash,
        "engine": result.engine,
        "checksum": result.index.checksum,
        "splits": {
            name: {"tokens": split.tokens, "documents": split.documents, "shards": len(split.shards)}
            for name, split in result.index.splits.items()
        },
        "chunks": result.chunks,
        "resumed_chunks": result.resumed,
        "binary_files": result.binary,
        "replaced_documents": result.replaced,
        "skipped": result.skipped,
    }
