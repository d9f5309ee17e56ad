"""Tokenizers: text comes back, no text can forge a special token, and the fast engine is used only where it is the same."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lustrain.problem import UserError
from tests.data.making import prose
from trainer.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    HuggingFaceTokenizer,
    TokenizerSpec,
    build,
    fastest,
    read_spec,
    train,
)

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in Llama 3's published tokenizer.json."""

texts = st.text(max_size=80) | st.text("ab \n\t'sé中1🙂<|endoftext|>", max_size=80)


@functools.cache
def trained() -> TokenizerSpec:
    return train(700, [prose(n, 4000) for n in range(40)] + ["naïve café 中文 don't we'll \r\n\t 123,456"] * 20)


@functools.cache
def engines() -> tuple[HuggingFaceTokenizer, HuggingFaceTokenizer]:
    spec = trained()
    return HuggingFaceTokenizer(spec.text, spec.eos_id, fast=True), HuggingFaceTokenizer(spec.text, spec.eos_id)


@given(text=texts)
def test_text_comes_back_from_its_ids(text: str) -> None:
    for tokenizer in (ByteTokenizer(), *engines()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= number < tokenizer.vocab_size for number in ids)


@pytest.mark.slow
@settings(max_examples=400)
@given(batch=st.lists(texts, max_size=4))
def test_both_engines_give_the_same_ids(batch: list[str]) -> None:
    fast, slow = engines()
    for ours, theirs in zip(fast.encode_batch(batch), slow.encode_batch(batch), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.slow
def test_both_engines_cut_words_alike_at_every_code_point() -> None:
    """Their tables of letters, digits and spaces could be of different Unicode versions; here they are compared whole.

    Planes 4 to 13 are unassigned and 15 and 16 are private; they have no letters to differ in.
    """
    fast, slow = engines()
    for begin in (*range(0, 0x40000, 256), 0xE0000, 0xE0100):
        points = [chr(point) for point in range(begin, begin + 256) if not 0xD800 <= point < 0xE000]
        text = "".join(f"a{point}b 1{point}2 .{point}! {point} {point}{point}\n" for point in points)
        assert fast.encode(text) == slow.encode(text), f"U+{begin:04X}…"


@given(before=texts, after=texts)
def test_no_text_can_forge_the_end_of_a_document(before: str, after: str) -> None:
    for tokenizer in (ByteTokenizer(), *engines()):
        assert tokenizer.eos_id not in tokenizer.encode(before + END_OF_TEXT + after)


@pytest.mark.slow
def test_training_gives_the_same_tokenizer_for_any_thread_count() -> None:
    code = (
        "import hashlib; from tests.data.making import prose; from trainer.data.tokenizer import train;"
        "print(hashlib.sha256(train(900, [prose(n, 3000) for n in range(200)]).text.encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "4")
    }
    assert len(found) == 1


def test_the_fast_engine_is_taken_when_it_is_proven_equal() -> None:
    spec, why = fastest(trained(), [prose(5, 1000)])
    assert spec.fast
    assert build(spec).engine == "tiktoken"
    assert "same ids as tokenizers on 1 documents" in why


def test_llama_style_words_take_fast_engine_with_the_same_ids() -> None:
    body = _changed(pre_tokenizer=_split(LLAMA3_WORDS))
    spec, _ = fastest(TokenizerSpec("huggingface", body, 0), [])
    assert spec.fast
    fast, slow = build(spec), HuggingFaceTokenizer(body, 0)
    text = prose(3, 5000) + "\r\n\n  12345 WE'LL don't\t\tx" * 3
    assert fast.encode(text) == slow.encode(text)


def _split(pattern: str) -> dict[str, Any]:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])
    return dict(json.loads(engine.to_str())["pre_tokenizer"])


def _changed(**parts: Any) -> str:
    return json.dumps({**json.loads(trained().text), **parts})


def _unlisted_pair() -> str:
    """Tokens ab, bc, abc where abc is listed as ab + c, but bc is joined before ab: `abc` alone is not one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([END_OF_TEXT, *alphabet, "bc", "ab", "abc"])}
    merges = [["b", "c"], ["a", "b"], ["ab", "c"]]
    return _changed(model={**json.loads(trained().text)["model"], "vocab": vocab, "merges": merges})


def _swapped_ids() -> str:
    body = json.loads(trained().text)
    last, previous = sorted(body["model"]["vocab"], key=body["model"]["vocab"].get)[-2:]
    vocab = body["model"]["vocab"]
    vocab[last], vocab[previous] = vocab[previous], vocab[last]
    return json.dumps(body)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _changed(normalizer={"type": "NFC"}), "it normalizes the text first"),
        (_unlisted_pair, "is not what its merges make of its bytes"),
        (_swapped_ids, "not listed in the order of their ids"),
        (
            lambda: _changed(model={**json.loads(trained().text)["model"], "byte_fallback": True}),
            "its model sets byte_fallback",
        ),
        (lambda: _changed(pre_tokenizer={"type": "Whitespace"}), "not byte-level"),
    ],
)
def test_a_tokenizer_that_might_differ_is_left_to_its_own_engine(make: Any, reason: str) -> None:
    spec, why = fastest(TokenizerSpec("huggingface", make(), 0), ["abc abc"])
    assert not spec.fast
    assert reason in why
    assert build(spec).engine == "tokenizers"


def test_published_style_tokenizer_has_its_end_of_text(tmp_path: Path) -> None:
    engine = Tokenizer(models.BPE(unk_token="<unk>"))
    engine.normalizer = normalizers.NFC()
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    engine.train_from_iterator([prose(1, 3000)], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"]))
    engine.enable_truncation(4)
    engine.enable_padding(length=9)
    engine.save(str(tmp_path / "tokenizer.json"))
    spec = read_spec(str(tmp_path))
    assert spec.eos_id == engine.token_to_id("</s>")
    tokenizer = build(spec)
    assert tokenizer.decode(tokenizer.encode("the of and to in is for")) == "the of and to in is for"
    assert read_spec(str(tmp_path), "<unk>").eos_id == 0


def test_formatting_does_not_change_identity_but_content_does() -> None:
    pretty = json.dumps(json.loads(trained().text), indent=4)
    other = train(650, [prose(1, 4000)])
    hashes = [HuggingFaceTokenizer(text, 0).hash for text in (trained().text, pretty, other.text)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("name", "eos", "expected"),
    [
        ("none.json", None, "cannot be read"),
        ("bad.json", None, "not a tokenizer.json"),
        ("no_end.json", None, "no known end-of-text token"),
        ("no_end.json", "<end>", "is not a token of"),
        ("bytes", "<end>", "has its own end-of-text id"),
    ],
)
def test_wrong_wishes_say_what_is_allowed(tmp_path: Path, name: str, eos: str | None, expected: str) -> None:
    (tmp_path / "bad.json").write_text("{}")
    engine = Tokenizer(models.BPE())
    engine.train_from_iterator(["abc abc"], trainers.BpeTrainer(vocab_size=20, show_progress=False))
    (tmp_path / "no_end.json").write_text(engine.to_str())
    with pytest.raises(UserError, match=expected):
        read_spec(name if name == "bytes" else f"{tmp_path}/{name}", eos)
