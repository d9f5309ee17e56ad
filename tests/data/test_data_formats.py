"""What a file holds is read as what it is, or somebody is asked: packed files, JSON by another name, byte order marks."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from lustrain.problem import UserError
from trainer.data.tokenize.documents import Reading, Tally, read_documents
from trainer.data.tokenize.inputs import LARGEST_PACKED, Format, find_sources, plan_chunks
from trainer.data.tokenizer import HuggingFaceTokenizer

LINES = b'{"text": "a"}\n{"text": "b"}\n'
MARK = b"\xef\xbb\xbf"
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def texts(*inputs: Path, format: Format | None = None) -> list[str]:
    chunks = plan_chunks(find_sources([str(one) for one in inputs], format).sources)
    return [text for spans in chunks for span in spans for text in read_documents(span, Reading(), Tally())]


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_give_what_they_hold(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    prose = "".join(f"line {number}\n" for number in range(400_000))
    lines = written(tmp_path, f"a.jsonl{suffix}", pack(MARK + LINES))
    short = written(tmp_path, f"b.txt{suffix}", pack(b"one\ntwo\n"))
    long = written(tmp_path, f"c.txt{suffix}", pack(prose.encode()))
    assert texts(lines, short) == ["a", "b", "one\ntwo\n"]
    pieces = texts(long)
    assert "".join(pieces) == prose
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_packed_file_that_is_damaged_is_one_line(tmp_path: Path, suffix: str, name: str) -> None:
    whole = PACKERS[suffix](b"".join(json.dumps({"text": str(n)}).encode() + b"\n" for n in range(99_999)))
    for content in (whole[: len(whole) // 2], b"no such thing at all"):
        with pytest.raises(UserError) as error:
            texts(written(tmp_path, name + suffix, content), format="jsonl")
        assert error.value.problems[0].startswith("INPUT = ")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c4.json", LINES),
        # The time of packing would be in the test's name, and pytest's workers would collect other tests.
        ("c4.json.gz", gzip.compress(LINES, mtime=0)),
        ("array.json", b"[1]"),
        ("table.csv", b"a,b\n"),
        ("page.html", b"<p>"),
        ("c4", LINES),
        ("c4.txt", MARK + b"\n" + LINES),
        ("c4.txt.gz", gzip.compress(LINES, mtime=0)),
        ("many.zip", b"PK"),
        ("long", b'{"text": "' + b"a" * 9000 + b'"}\n'),
        ("folder/c4.json", LINES),
    ],
)
def test_what_is_not_plain_text_is_asked_about(tmp_path: Path, name: str, content: bytes) -> None:
    written(tmp_path, name, content)
    with pytest.raises(UserError) as error:
        texts(tmp_path / name.partition("/")[0])
    assert "--format" in error.value.problems[0]


def test_a_format_that_is_given_is_taken(tmp_path: Path) -> None:
    file = written(tmp_path, "c4.json", LINES)
    assert texts(file, format="jsonl") == ["a", "b"]
    assert texts(file, format="text") == [LINES.decode()]


@pytest.mark.parametrize("beginning", [b"{ is a brace\n{ too\n", b'{"a": 1}\nand prose\n', b"plain\n" + LINES])
def test_prose_with_braces_stays_prose(tmp_path: Path, beginning: bytes) -> None:
    assert texts(written(tmp_path, "a.txt", beginning)) == [beginning.decode()]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    lines = written(tmp_path, "a.jsonl", MARK + LINES)
    prose = written(tmp_path, "b.txt", MARK + "é".encode() + MARK)
    assert texts(lines, prose) == ["a", "b", "é\ufeff"]


def test_a_folder_says_how_many_files_it_passed_over(tmp_path: Path) -> None:
    written(tmp_path, "a.txt", b"a")
    written(tmp_path, "b.jsonl.gz", gzip.compress(LINES))
    written(tmp_path, "c.zip", b"PK")
    written(tmp_path, "d.bin", b"\0")
    written(tmp_path, "e.tar.gz", gzip.compress(b"text"))
    written(tmp_path, "f.gz", gzip.compress(b"\0"))
    found = find_sources([str(tmp_path)], None)
    assert (len(found.sources), found.binary) == (2, 4)


def test_packed_file_too_large_for_one_process_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl.gz").open("wb") as file:
        file.truncate(LARGEST_PACKED + 1)
    with pytest.raises(UserError) as error:
        find_sources([str(tmp_path / "a.jsonl.gz")], None)
    assert "tokenize -" in error.value.problems[0]


def tokenizer(model: str, special: bool, *, piece: str = "</s>") -> HuggingFaceTokenizer:
    """A tokenizer of single letters, with an end-of-text token that the model may have as an ordinary piece as well."""
    letters = {letter: number for number, letter in enumerate(" </>abs")}
    engine = Engine(
        models.BPE(letters, []) if model == "bpe" else models.WordLevel({**letters, piece: 9, "?": 10}, "?")
    )
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    end = AddedToken(piece, special=special)
    engine.add_special_tokens([end]) if special else engine.add_tokens([end])
    return HuggingFaceTokenizer(engine.to_str(), engine.token_to_id(piece))


@pytest.mark.parametrize("special", [True, False])
def test_text_that_spells_the_end_of_text_gets_its_letters_ids(special: bool) -> None:
    made = tokenizer("bpe", special)
    assert made.eos_id not in made.encode("a </s> b")
    assert made.eos_id not in made.encode("a</s>")
    assert len(made.encode("a</s>")) == 5


def test_tokenizer_that_spells_the_end_of_text_is_refused() -> None:
    made = tokenizer("words", True)
    assert made.encode("a b") == [4, 5]
    with pytest.raises(UserError) as error:
        made.encode("a </s> b")
    assert error.value.problems[0].path == "--eos"  # type: ignore[attr-defined]
