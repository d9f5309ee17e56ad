"""A Hugging Face tokenizer for tiktoken: the conversion, and the conditions under which both give the same ids.

tiktoken encodes byte-level BPE several times faster than `tokenizers`, but it knows only ranks of byte strings: it
joins any two neighbours whose concatenation is a token, the lowest id first, where `tokenizers` joins only the listed
pairs, the earliest listed first. The two walk through the same states when

1. the later a merge is listed, the larger is the id of what it makes, and
2. every token, taken alone, is encoded as itself by the merges.

For suppose that two neighbours x, y with x + y = t stand side by side at some moment. No merge has crossed the ends
of t so far, so inside t the merges have run exactly as they run on t alone; that run passes through only one state of
two parts, the pair from which t is made (2). So x, y is a listed pair, both engines have the same candidates, and by
(1) they take the same one, leftmost first.

The words on which this runs must be cut alike too: only the two cutting rules below are translated, the regular
expression goes over as it is, and the caller still compares both engines on a sample of the very input (see
`tokenizer.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Engine

GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel(use_regex=True)` cuts by: the pattern of https://github.com/openai/gpt-2/blob/master/src/encoder.py."""


class NotConvertibleError(Exception):
    """This tokenizer must be run by `tokenizers`; the text says why."""


@dataclass(frozen=True)
class BytePairs:
    """A byte-level BPE as tiktoken wants it: `ranks` maps each token's bytes to its id, `words` is the cutting pattern."""

    ranks: dict[bytes, int]
    words: str


def convert(body: dict[str, Any], engine: Engine) -> BytePairs:
    """Convert a parsed `tokenizer.json` and its engine to ranks; NotConvertibleError when equality is not proven."""
    if body.get("normalizer") is not None:
        raise NotConvertibleError("it normalizes the text first")
    plain = [token["content"] for token in body.get("added_tokens") or [] if not token.get("special")]
    if plain:
        raise NotConvertibleError(f"it has added tokens that are not special, e.g. {plain[0]!r}")
    model = body.get("model") or {}
    _require_plain_bpe(model)
    words = _words(body.get("pre_tokenizer"))
    special = {token["content"] for token in body.get("added_tokens") or []}
    ranks = _ranks(model, special)
    _require_self_encoding(engine, model["vocab"], ranks)
    return BytePairs(ranks, words)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: which byte each character of a byte-level token means."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _require_plain_bpe(model: dict[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise NotConvertibleError(f"its model is {model.get('type')!r}, not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise NotConvertibleError(f"its model sets {name}")


def _words(pre_tokenizer: dict[str, Any] | None) -> str:
    steps = [pre_tokenizer] if pre_tokenizer else []
    if pre_tokenizer and pre_tokenizer.get("type") == "Sequence":
        steps = list(pre_tokenizer["pretokenizers"])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        raise NotConvertibleError("its pre-tokenizer is not byte-level without a prefix space")
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return GPT2_WORDS
    if len(steps) == 2 and not steps[1].get("use_regex", True) and steps[0].get("type") == "Split":
        split = steps[0]
        pattern = split.get("pattern", {}).get("Regex")
        if pattern and split.get("behavior") == "Isolated" and not split.get("invert"):
            return str(pattern)
    raise NotConvertibleError("its pre-tokenizer has steps that tiktoken does not have")


def _ranks(model: dict[str, Any], special: set[str]) -> dict[bytes, int]:
    """Bytes to id of the 256 single bytes and of everything that a merge makes, checking condition 1 of the module."""
    vocab: dict[str, int] = model["vocab"]
    pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    made = ["".join(pair) for pair in pairs]
    ids = [vocab[token] for token in made]
    if any(later < earlier for earlier, later in itertools.pairwise(ids)):
        raise NotConvertibleError("its merges are not listed in the order of their ids")
    alphabet = byte_alphabet()
    used = {*alphabet, *made}
    if not set(alphabet) <= set(vocab):
        raise NotConvertibleError("its vocabulary lacks single bytes")
    if model.get("ignore_merges") and not set(vocab) - special <= used:
        raise NotConvertibleError("it keeps whole words that its merges do not make")
    if any(set(token) - set(alphabet) for token in made):
        raise NotConvertibleError("its tokens are not all byte strings")
    return {bytes(alphabet[char] for char in token): vocab[token] for token in used}


def _require_self_encoding(engine: Engine, vocab: dict[str, int], ranks: dict[bytes, int]) -> None:
    """Condition 2 of the module, token by token; special tokens are never looked for in text and do not count."""
    model = engine.model
    ignores, model.ignore_merges = model.ignore_merges, False
    try:
        reachable = set(ranks.values())
        for token, number in vocab.items():
            if number in reachable and [part.id for part in model.tokenize(token)] != [number]:
                raise NotConvertibleError(f"its token {token!r} is not what its merges make of its bytes")
    finally:
        model.ignore_merges = ignores
