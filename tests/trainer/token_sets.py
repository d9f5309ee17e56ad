"""Writes small token sets of bytes, as `tokenize` would, so that their readers can be tested without tokenizing first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from awscrt.checksums import crc64nvme

from trainer.data.index import DTYPES, INDEX, Index, Shard, Split, dtype_for, encode_index, shard_name
from trainer.data.tokenizer import ByteTokenizer


def write_token_set(folder: Path, splits: dict[str, bytes], *, vocab_size: int = 257) -> Path:
    """One shard and one document per split; ids are the bytes themselves."""
    write_shards(folder, {name: [np.frombuffer(text, np.uint8)] for name, text in splits.items()}, vocab_size)
    return folder


def write_shards(folder: Path, splits: Mapping[str, Sequence[np.ndarray]], vocab_size: int = 257) -> None:
    """Each split's shards of these ids, a document each, in the stored type that `vocab_size` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype_for(vocab_size)
    written: dict[str, list[Shard]] = {split: [] for split in splits}
    for split, shards in splits.items():
        for number, ids in enumerate(shards):
            raw, ends = ids.astype(DTYPES[dtype]).tobytes(), np.array([len(ids)], "<i8").tobytes()
            shard = Shard(shard_name(split, number), len(ids), 1, crc64nvme(raw), crc64nvme(ends))
            (folder / shard.tokens_key).write_bytes(raw)
            (folder / shard.ends_key).write_bytes(ends)
            written[split].append(shard)
    whole = {split: Split(tuple(shards)) for split, shards in written.items()}
    (folder / INDEX).write_bytes(
        encode_index(Index(dtype, vocab_size, 256, "bytes", ByteTokenizer.hash, whole, "test"))
    )
