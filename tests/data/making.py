"""Runs `tokenize` as a user does, and reads what it made without our own reader."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.storage import open_store

WORDS = (
    *("the", "of", "and", "to", "in", "is", "for", "that"),
    *("was", "on", "with", "as", "at", "by", "from", "not", "which"),
)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "trainer", "tokenize", *map(str, words)]


def run_tokenize(
    *words: object, stdin: bytes | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The finished call, with text output, whatever its exit code."""
    done = subprocess.run(
        command(*words), input=stdin, capture_output=True, env={**os.environ, **(env or {})}, timeout=300, check=False
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def made(*words: object, stdin: bytes | None = None) -> dict[str, Any]:
    """The result of a call that must succeed, as its --json."""
    done = run_tokenize(*words, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def refused(*words: object, stdin: bytes | None = None) -> list[str]:
    """The lines of a call that must be refused for a user's mistake."""
    done = run_tokenize(*words, stdin=stdin)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if " = " in line]


def stream(uri: str | Path, split: str) -> np.ndarray:
    """All ids of a split, straight from its files."""
    store = open_store(str(uri), create=False)
    index = json.loads(store.read("index.json")[0])
    parts = [store.read(shard["name"] + ".tok")[0] for shard in index["splits"][split]["shards"]]
    return np.frombuffer(b"".join(parts), dtype=np.dtype(index["dtype"]).newbyteorder("<"))


def document_ends(uri: str | Path, split: str) -> np.ndarray:
    """One past the end-of-text id of each document, counted from the split's start, straight from its files."""
    store = open_store(str(uri), create=False)
    ends, start = [], 0
    for shard in json.loads(store.read("index.json")[0])["splits"][split]["shards"]:
        ends.append(np.frombuffer(store.read(shard["name"] + ".doc")[0], "<i8") + start)
        start += shard["tokens"]
    return np.concatenate(ends)


def documents(uri: str | Path, split: str) -> list[bytes]:
    """The documents of a split that was made with the bytes tokenizer, without their end-of-text ids."""
    text = stream(uri, split)
    ends = np.flatnonzero(text == 256)
    assert ends.size == 0 or ends[-1] == text.size - 1
    begins = [0, *(ends[:-1] + 1).tolist()]
    return [text[begin:end].astype(np.uint8).tobytes() for begin, end in zip(begins, ends.tolist(), strict=True)]


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a local token set, except the store's own lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".lustrain" not in path.parts
    }


def prose(seed: int, size: int) -> str:
    """About `size` characters of made-up sentences with line ends, the same for the same seed."""
    chooser = random.Random(seed)
    lines: list[str] = []
    left = size
    while left > 0:
        line = " ".join(chooser.choices(WORDS, k=chooser.randint(3, 14))) + f" {chooser.randint(0, 9999)}."
        lines.append(line)
        left -= len(line) + 1
    return "\n".join(lines) + "\n"


def write_lines(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path
