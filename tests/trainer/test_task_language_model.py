"""The language model Task: options checked at once, windows as batches, token-summed loss, and an identity for resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lustrain.problem import UserError
from planner.strategy import Strategy
from planner.work import Work
from tests.planner.fake_training import peak_bytes
from tests.trainer.token_sets import write_token_set
from trainer.config import Config, PrecisionConfig, TaskConfig
from trainer.data.shards import TokenSet
from trainer.data.verified import ALONE, Ranks
from trainer.run.start import open_data
from trainer.tasks import language_model, make_task
from trainer.tasks.language_model import LOGIT_BYTES, LanguageModel
from trainer.tasks.models import llama

TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


def task_for(data: Path, seed: int = 1, **options: Any) -> LanguageModel:
    config = {"name": "language_model", "data": str(data), "seq_len": 32, **options}
    task = make_task(TaskConfig.model_validate(config), seed=seed)
    assert isinstance(task, LanguageModel)
    return task


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_token_set(tmp_path / "set", {"train": TEXT, "val": TEXT[:200]})


@pytest.fixture
def task(data: Path, tmp_path: Path) -> LanguageModel:
    task = task_for(data)
    task.open(tmp_path / "cache")
    return task


def test_batches_are_the_windows_of_the_text_in_the_stored_type(task: LanguageModel) -> None:
    assert task.train_samples == (len(TEXT) - 1) // 32
    assert task.eval_samples == 199 // 32
    tokens = task.train_batch(np.array([3, 0]))["tokens"]
    assert tokens.dtype == torch.uint16
    assert [bytes(row) for row in tokens.tolist()] == [TEXT[96:129], TEXT[:33]]
    assert bytes(task.eval_batch(np.array([1]))["tokens"][0].tolist()) == TEXT[32:65]


def test_a_flipped_bit_in_a_local_shard_is_found_before_training(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUSTRAIN_CACHE", str(tmp_path / "cache"))
    task = {"name": "language_model", "data": str(data), "seq_len": 32}
    train = {"steps": 1, "global_batch": 1, "micro_batch": 1}
    config = Config.model_validate({"run": {"uri": "run"}, "task": task, "train": train})
    open_data(config, task_for(data), ALONE)
    shard = data / "val-00000.tok"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    with pytest.raises(UserError, match=rf"^shard = '{shard}': has checksum"):
        open_data(config, task_for(data), ALONE)


@pytest.mark.parametrize(("wish", "waits"), [("start", [60.0, 15.0]), ("background", [0.0, 0.0]), ("off", [])])
def test_a_start_waits_as_long_as_wished_for_all_splits_together(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str, waits: list[float]
) -> None:
    now, found = [1000.0], []

    def verify(self: TokenSet, cache_dir: Path, wait_s: float, ranks: Ranks) -> None:
        found.append(wait_s)
        now[0] += 45.0

    monkeypatch.setattr(TokenSet, "verify", verify)
    monkeypatch.setattr(language_model.time, "monotonic", lambda: now[0])
    task = task_for(data, verify=wish)
    task.open(tmp_path / "cache")
    task.verify(tmp_path / "cache", ALONE)
    assert found == waits


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [257, 100_000])
def test_the_loss_is_summed_over_predicted_tokens(tmp_path: Path, vocab_size: int) -> None:
    task = task_for(
        write_token_set(tmp_path / "set", {"train": TEXT}, vocab_size=vocab_size), model={"width": 32, "layers": 1}
    )
    task.open(tmp_path / "cache")
    model = task.build_model()
    whole = task.loss(model, task.train_batch(np.arange(6)))
    parts = [task.loss(model, task.train_batch(np.arange(i, i + 2))) for i in (0, 2, 4)]
    assert whole.count == sum(part.count for part in parts) == 6 * task.tokens_per_sample()
    assert float(whole.total.detach()) == pytest.approx(sum(float(part.total.detach()) for part in parts), rel=1e-5)
    assert float(whole.total.detach()) / whole.count == pytest.approx(math.log(vocab_size), rel=0.05)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_loss_holds_what_the_footprint_says(mode: Literal["fp32", "bf16"]) -> None:
    """On fake tensors, so that a vocabulary which dwarfs all else costs nothing."""
    shape = llama.LlamaShape(64, 1, 2, 2, 64, 100_000, tied=True)
    work = Work(shape, 1024, 1, 1, 0, PrecisionConfig(mode=mode))
    beside = 16 * work.parameters
    assert peak_bytes(work, Strategy(1, 1)) - beside == pytest.approx(LOGIT_BYTES * 1024 * shape.vocab_size, rel=0.05)


@pytest.mark.parametrize(("chunk", "tokens"), [(0, 96), (64, 64), (1000, 96)])
def test_chunks_bound_the_logits_of_the_footprint(data: Path, tmp_path: Path, chunk: int, tokens: int) -> None:
    task = task_for(data, loss_chunk=chunk, model={"vocab_size": 10**9, "layers": 1, "width": 64})
    task.open(tmp_path / "cache")
    assert task.footprint(3).activations == 96 * 64 * 2 + tokens * 10**9 * LOGIT_BYTES


def test_a_set_without_held_out_text_has_nothing_to_evaluate(tmp_path: Path) -> None:
    task = task_for(write_token_set(tmp_path / "set", {"train": TEXT}))
    task.open(tmp_path / "cache")
    assert task.eval_samples == 0


def test_the_fingerprint_changes_with_model_and_data_not_memory(data: Path, tmp_path: Path) -> None:
    def fingerprint(uri: Path, **options: Any) -> dict[str, Any]:
        task = task_for(uri, **options)
        task.open(tmp_path / "cache")
        return task.fingerprint()

    first = fingerprint(data)
    assert fingerprint(data, loss_chunk=64, cache_bytes=1) == first
    assert fingerprint(data, model={"layers": 3}) != first
    assert fingerprint(data, seq_len=16) != first
    other = write_token_set(tmp_path / "other", {"train": TEXT[:-1], "val": TEXT[:200]})
    assert fingerprint(other)["data"] != first["data"]


def test_all_problems_of_the_options_are_named_at_once(data: Path) -> None:
    with pytest.raises(UserError) as caught:
        task_for(data, seq_len=0, model={"preset": "huge", "colour": 3}, extra=1)
    paths = sorted(line.split(" = ")[0] for line in caught.value.problems)
    assert paths == ["task.extra", "task.model.colour", "task.model.preset", "task.seq_len"]
    with pytest.raises(UserError) as caught:
        task_for(data, model={"width": 100, "heads": 7, "kv_heads": 3})
    assert [line.split(" = ")[0] for line in caught.value.problems] == ["task.model.heads", "task.model.kv_heads"]
    assert all("fix: " in line for line in caught.value.problems)


def test_data_that_does_not_fit_the_options_is_refused(data: Path, tmp_path: Path) -> None:
    task = task_for(data, seq_len=10_000, model={"vocab_size": 100})
    with pytest.raises(UserError) as caught:
        task.open(tmp_path)
    assert [line.split(" = ")[0] for line in caught.value.problems] == ["task.model.vocab_size", "task.seq_len"]
    with pytest.raises(UserError, match="no token set"):
        task_for(tmp_path).open(tmp_path)


def test_the_vocabulary_may_be_wider_than_the_tokenizers(data: Path, tmp_path: Path) -> None:
    weights = []
    for seed in (1, 2):
        task = task_for(data, seed, model={"vocab_size": 320})
        task.open(tmp_path)
        weights.append(task.build_model().embed.weight)
    assert weights[0].shape[0] == 320
    assert not torch.equal(*weights)


def test_blocks_names_and_cost_belong_to_the_model(task: LanguageModel) -> None:
    model = task.build_model()
    assert task.blocks(model) == list(model.blocks)
    assert task.export_names(model)["embed.weight"] == "model.embed_tokens.weight"
    assert task.export_config(model)["vocab_size"] == 257
    parameters = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    assert task.flops_per_token(model) == 6 * parameters + 12 * 4 * 128 * 32


def test_preset_is_read_under_its_former_name(data: Path) -> None:
    def shape(preset: str) -> Any:
        options = {"name": "language_model", "data": str(data), "seq_len": 8, "model": {"preset": preset}}
        task = make_task(TaskConfig.model_validate(options), seed=0)
        assert isinstance(task, LanguageModel)
        return task.options.model.shape()

    assert shape("gpt2-124m") == shape("llama-124m")
    with pytest.raises(UserError) as caught:
        shape("gpt2")
    (line,) = caught.value.problems
    assert line.startswith("task.model.preset = 'gpt2'")
    assert "'gpt2-124m'" not in line
