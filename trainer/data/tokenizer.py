"""Text to token ids and back: a Hugging Face `tokenizer.json`, one trained on the input, or plain bytes. Nothing is downloaded.

Text is always ordinary text: a document that spells a special token (`<|endoftext|>`) gets the ids of those
characters, never the special id, so that no document can end another one. Only `tokenize` itself puts the end-of-text
id, after each document.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tiktoken
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from lustrain.problem import UserError, problem
from trainer.data.byte_pairs import NotConvertibleError, convert

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>")
"""How published tokenizers spell it: GPT-2 and GPT-NeoX, Llama 3, Llama 2 and Mistral, Gemma, Qwen, DeepSeek."""
SMALLEST_TRAINED = 257
LARGEST_TRAINED = 1 << 20

Ids = npt.NDArray[np.uint32]
Kind = Literal["bytes", "huggingface"]


@dataclass(frozen=True)
class TokenizerSpec:
    """Everything that another process needs to build the same tokenizer; `text` is the content of its tokenizer.json."""

    kind: Kind
    text: str = ""
    eos_id: int = 256
    fast: bool = False


class Tokenizer(ABC):
    """`encode` and `decode` never add or drop special tokens; ids are below `vocab_size`."""

    kind: Kind
    vocab_size: int
    eos_id: int
    hash: str
    """Identity of the mapping from text to ids (hex); equal for equal tokenizers whatever their file's formatting."""
    engine: str
    """What runs it, for people: `bytes`, `tokenizers` or `tiktoken`."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; bytes that are not UTF-8 become U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text as a plain list."""
        return [int(number) for number in self.encode_batch([text])[0]]


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, and 256 for the end of a text."""

    kind: Kind = "bytes"
    vocab_size = 257
    eos_id = 256
    hash = hashlib.sha256(b"lustrain bytes 1").hexdigest()
    engine = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(number for number in ids if number < 256).decode("utf-8", "replace")


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; with `fast` it is run by tiktoken (NotConvertibleError when that is not proven equal)."""

    kind: Kind = "huggingface"

    def __init__(self, text: str, eos_id: int, *, fast: bool = False) -> None:
        body = json.loads(text)
        self._engine = _plain_engine(text)
        ends = [token for token in body.get("added_tokens") or () if token["id"] == eos_id and not token.get("special")]
        self.hash = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        if ends:
            # Only of special tokens does the engine leave the spelling alone.
            for token in ends:
                token["special"] = True
            self._engine = _plain_engine(json.dumps(body))
        self.text = text
        self.eos_id = eos_id
        self.vocab_size = max(self._engine.get_vocab(with_added_tokens=True).values()) + 1
        self.engine = "tiktoken" if fast else "tokenizers"
        self._fast = _tiktoken(body, self._engine) if fast else None

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self._fast is not None:
            documents = [_packed(self._fast.encode_ordinary(text)) for text in texts]
        else:
            documents = self.encode_batch_by_tokenizers(texts)
        if any(bool((ids == self.eos_id).any()) for ids in documents):
            token = self._engine.id_to_token(self.eos_id)
            why = "this tokenizer gives the end-of-text id to text that spells it, which would end a document"
            raise UserError(problem("--eos", token, why, fix="name another token with --eos, or use another tokenizer"))
        return documents

    def encode_batch_by_tokenizers(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text by the engine that defines what is right, whichever engine this tokenizer uses."""
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [_packed(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._engine.decode([int(number) for number in ids], skip_special_tokens=False))


@lru_cache(maxsize=2)
def build(spec: TokenizerSpec) -> Tokenizer:
    """Build the tokenizer that a spec describes; tokenizers never change, so an equal spec may give the same object."""
    return ByteTokenizer() if spec.kind == "bytes" else HuggingFaceTokenizer(spec.text, spec.eos_id, fast=spec.fast)


def named_tokenizer(text: str, eos: str | None = None) -> TokenizerSpec | int:
    """Return what `--tokenizer` and `--eos` name: a spec, or 8192 for `train:8192`; UserError for a bad value."""
    match = re.fullmatch(r"train:(.*)", text)
    if match is None:
        return read_spec(text, eos)
    if not match[1].isdecimal() or not SMALLEST_TRAINED <= int(match[1]) <= LARGEST_TRAINED:
        allowed = f"train:N with N from {SMALLEST_TRAINED} to {LARGEST_TRAINED}"
        raise UserError(
            problem("--tokenizer", text, "is not a vocabulary size", allowed=allowed, fix="e.g. train:8192")
        )
    return int(match[1])


def read_spec(named: str, eos: str | None = None) -> TokenizerSpec:
    """Return the spec for `bytes` or the path of a tokenizer.json.

    `eos` names its end-of-text token, otherwise a known one is looked for; UserError when there is none.
    """
    if named == "bytes":
        if eos is not None:
            raise UserError(
                problem("--eos", eos, "the bytes tokenizer has its own end-of-text id 256", fix="drop --eos")
            )
        return TokenizerSpec("bytes")
    path = Path(named)
    if path.is_dir():
        path = path / "tokenizer.json"
    allowed = "train:N, bytes, or the path of a tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})"
        raise UserError(problem("--tokenizer", named, why, allowed=allowed, fix="check the path")) from error
    return TokenizerSpec("huggingface", text, _eos_id(_checked_engine(named, text), named, eos))


def train(vocab_size: int, documents: Iterable[str]) -> TokenizerSpec:
    """Train a byte-level BPE (GPT-2's words, all 256 bytes, end of text = id 0) on `documents`.

    The same documents give the same tokenizer, whatever the number of threads; a small input may give fewer ids.
    """
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(documents, trainer)
    return TokenizerSpec("huggingface", engine.to_str(), _eos_id(engine, "train", END_OF_TEXT))


def fastest(spec: TokenizerSpec, sample: Sequence[str]) -> tuple[TokenizerSpec, str]:
    """Return the spec with the fastest engine that gives the same ids on `sample`, and a line that says which and why."""
    if spec.kind == "bytes":
        return spec, "bytes"
    chosen = TokenizerSpec(spec.kind, spec.text, spec.eos_id, fast=True)
    try:
        fast = build(chosen)
    except NotConvertibleError as reason:
        return spec, f"run by tokenizers ({reason})"
    assert isinstance(fast, HuggingFaceTokenizer)
    size = sum(map(len, sample))
    for ours, theirs in zip(fast.encode_batch(sample), fast.encode_batch_by_tokenizers(sample), strict=True):
        if not np.array_equal(ours, theirs):
            return spec, "run by tokenizers (tiktoken gave other ids on a sample of the input)"
    return (
        chosen,
        f"run by tiktoken (same ids as tokenizers on {len(sample)} documents, {size:,} characters of the input)",
    )


def _packed(ids: list[int]) -> Ids:
    # array takes a list of small integers three times faster than numpy does (4 against 13 ns each).
    return np.frombuffer(array("I", ids), dtype=np.uint32)


def _plain_engine(text: str) -> Engine:
    engine = Engine.from_str(text)
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True
    return engine


def _checked_engine(named: str, text: str) -> Engine:
    try:
        return _plain_engine(text)
    except Exception as error:  # tokenizers raises no narrower class for what it cannot read
        why = f"is not a tokenizer.json ({str(error)[:100]})"
        raise UserError(problem("--tokenizer", named, why, fix="use the file that Tokenizer.save() writes")) from error


def _eos_id(engine: Engine, named: str, eos: str | None) -> int:
    special = [token.content for token in engine.get_added_tokens_decoder().values() if token.special]
    if eos is not None:
        number = engine.token_to_id(eos)
        if number is None:
            raise UserError(
                problem("--eos", eos, f"is not a token of {named}", allowed=", ".join(special[:12]) or "none")
            )
        return number
    for token in KNOWN_ENDS:
        number = engine.token_to_id(token)
        if number is not None:
            return number
    why = "has no known end-of-text token among its special tokens"
    raise UserError(problem("--tokenizer", named, why, allowed=", ".join(special[:12]), fix="name it with --eos"))


def _tiktoken(body: dict[str, Any], engine: Engine) -> tiktoken.Encoding:
    pairs = convert(body, engine)
    return tiktoken.Encoding("lustrain", pat_str=pairs.words, mergeable_ranks=pairs.ranks, special_tokens={})
