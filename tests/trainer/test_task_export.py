"""What is exported beside a language model's weights, so that transformers ends where the model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Engine

from trainer.__main__ import main
from trainer.tasks.language_model import LanguageModel, LanguageModelOptions


def opened(folder: Path, tokenizer: str) -> LanguageModel:
    (folder / "a.txt").write_text("the same words again and again, " * 200)
    words = ["tokenize", str(folder / "a.txt"), "--out", str(folder / "set"), "--tokenizer", tokenizer]
    assert main([*words, "--val-fraction", "0", "--workers", "1"]) == 0
    task = LanguageModel(LanguageModelOptions(data=str(folder / "set"), seq_len=8), seed=0)
    task.open(folder / "cache")
    return task


@pytest.mark.slow
@pytest.mark.parametrize(("tokenizer", "end"), [("train:300", 0), ("bytes", 256)])
def test_export_names_the_end_of_text_and_brings_the_tokenizer(tmp_path: Path, tokenizer: str, end: int) -> None:
    task = opened(tmp_path, tokenizer)
    files = task.export_files()
    assert task.export_config(task.build_model())["eos_token_id"] == end
    assert json.loads(files["generation_config.json"])["eos_token_id"] == end
    assert ("tokenizer.json" in files) is (tokenizer != "bytes")
    if tokenizer != "bytes":
        named = json.loads(files["tokenizer_config.json"])["eos_token"]
        assert Engine.from_str(files["tokenizer.json"]).token_to_id(named) == end
