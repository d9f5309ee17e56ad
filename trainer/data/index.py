"""The record that makes a token set: what its shards hold, down to the last bit. Pure data and its JSON.

`index.json` is sealed, as the records of a checkpoint are. The set's `checksum` covers ids, boundaries and tokenizer but
not where they came from: equal sets have equal checksums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lustrain.from_json import from_json
from lustrain.problem import UserError, problem
from trainer.sealed import DamagedRecordError, canonical, hexed, unhexed, unseal, with_checksum
from trainer.storage import ObjectMissingError, ObjectStore

FORMAT = 1
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_KIND = "token-set"


@dataclass(frozen=True)
class Shard:
    """One stretch of a split: `<name>.tok` holds `tokens` ids, `<name>.doc` `documents` int64 ends; checksums of both."""

    name: str
    tokens: int
    documents: int
    crc64nvme: int
    doc_crc64nvme: int

    @property
    def tokens_key(self) -> str:
        return f"{self.name}.tok"

    @property
    def ends_key(self) -> str:
        return f"{self.name}.doc"


@dataclass(frozen=True)
class Split:
    """The shards of one split, in order."""

    shards: tuple[Shard, ...]

    @cached_property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)


@dataclass(frozen=True)
class Index:
    """A whole token set; `dtype` is `uint16` or `uint32`, little-endian; `made_from` identifies input and options."""

    dtype: str
    vocab_size: int
    eos_id: int
    tokenizer_kind: str
    tokenizer_hash: str
    splits: Mapping[str, Split]
    made_from: str

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @cached_property
    def checksum(self) -> str:
        """SHA-256 (hex) of everything that a reader of the ids can notice."""
        return hashlib.sha256(canonical(_content(self))).hexdigest()


def dtype_for(vocab_size: int) -> str:
    """Return the smallest stored type that holds every id below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}"


def encode_index(index: Index) -> bytes:
    body = {
        "format": FORMAT,
        "kind": _KIND,
        **_content(index),
        "checksum": index.checksum,
        "made_from": index.made_from,
    }
    return json.dumps(with_checksum(body), indent=1).encode() + b"\n"


def decode_index(raw: bytes, uri: str) -> Index:
    """Return the index in `raw`; UserError if it is damaged, foreign, or of a newer Lustrain. `uri` is for the message."""
    try:
        body = unseal(raw)
    except DamagedRecordError as error:
        raise UserError(_damaged(uri, str(error))) from error
    if body.get("kind") != _KIND:
        raise UserError(_damaged(uri, "not the index of a token set"))
    version = body.get("format")
    if not isinstance(version, int) or version > FORMAT:
        why = f"its index has format {version}, written by a newer Lustrain"
        raise UserError(problem("token set", uri, why, allowed=f"<= {FORMAT}", fix="upgrade lustrain"))
    try:
        return _index(body)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(_damaged(uri, f"a field is missing or wrong: {error!r}")) from error


def read_index(store: ObjectStore) -> Index:
    """Return the index of the token set at `store`; UserError when there is none."""
    try:
        raw, _ = store.read(INDEX)
    except ObjectMissingError as error:
        why = f"no token set here: there is no {INDEX}, which `tokenize` writes last"
        fix = f"make or finish it with `python -m trainer tokenize INPUT --out {store.uri}`"
        raise UserError(problem("token set", store.uri, why, fix=fix)) from error
    return decode_index(raw, store.uri)


def _index(body: dict[str, Any]) -> Index:
    if body["dtype"] not in DTYPES:
        raise ValueError(f"dtype {body['dtype']!r}")
    if not 0 < int(body["vocab_size"]) <= 1 << 32:
        raise ValueError(f"vocab_size {body['vocab_size']!r}")
    splits = {str(name): from_json(Split, unhexed(split)) for name, split in body["splits"].items()}
    return Index(
        dtype=str(body["dtype"]),
        vocab_size=int(body["vocab_size"]),
        eos_id=int(body["eos_id"]),
        tokenizer_kind=str(body["tokenizer"]["kind"]),
        tokenizer_hash=str(body["tokenizer"]["hash"]),
        splits=splits,
        made_from=str(body["made_from"]),
    )


def _content(index: Index) -> dict[str, Any]:
    splits = {
        name: {"tokens": split.tokens, "documents": split.documents, **hexed(asdict(split))}
        for name, split in index.splits.items()
    }
    return {
        "dtype": index.dtype,
        "vocab_size": index.vocab_size,
        "eos_id": index.eos_id,
        "tokenizer": {"kind": index.tokenizer_kind, "hash": index.tokenizer_hash},
        "splits": splits,
    }


def _damaged(uri: str, why: str) -> str:
    return problem("token set", uri, f"its {INDEX} is damaged: {why}", fix="restore it, or tokenize the input again")
