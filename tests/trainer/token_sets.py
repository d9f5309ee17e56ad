"""Writes a small token set of bytes, as `tokenize` would, so that Tasks can be tested without tokenizing first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from awscrt.checksums import crc64nvme

from trainer.data.index import DTYPES, INDEX, Index, Shard, Split, dtype_for, encode_index, shard_name
from trainer.data.tokenizer import TokenizerSpec, build


def write_token_set(folder: Path, splits: dict[str, bytes], *, vocab_size: int = 257) -> Path:
    """One shard and one document per split; ids are the bytes themselves, in the stored type that `vocab_size` needs."""
    folder.mkdir(parents=True)
    dtype = dtype_for(vocab_size)
    written = {}
    for split, text in splits.items():
        ids = np.frombuffer(text, dtype=np.uint8).astype(DTYPES[dtype]).tobytes()
        ends = np.array([len(text)], dtype="<i8").tobytes()
        shard = Shard(shard_name(split, 0), len(text), 1, crc64nvme(ids), crc64nvme(ends))
        (folder / shard.tokens_key).write_bytes(ids)
        (folder / shard.ends_key).write_bytes(ends)
        written[split] = Split((shard,))
    hashed = build(TokenizerSpec("bytes")).hash
    (folder / INDEX).write_bytes(encode_index(Index(dtype, vocab_size, 256, "bytes", hashed, written, "test")))
    return folder
