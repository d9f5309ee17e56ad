"""Sampling from a run that was really trained: it knows its text, obeys the seed, and refuses in single lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.trainer.token_sets import write_token_set
from trainer.__main__ import main
from trainer.checkpoint.format.layout import ATTEMPTS, LEASE, MANIFESTS
from trainer.checkpoint.stored_config import KEY as CONFIG
from trainer.data.tokenizer import TokenizerSpec, build
from trainer.run.sample import chooser, continuation, decoded
from trainer.storage.local import LocalStore
from trainer.tasks.models import llama

VERSE = "Pack my box with jugs. "
BYTES = build(TokenizerSpec("bytes"))


@pytest.fixture(scope="module")
def run(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, trained by the real command until it knows the verse."""
    folder = tmp_path_factory.mktemp("sample")
    tokens = write_token_set(folder / "tokens", {"train": VERSE.encode() * 200, "val": VERSE.encode() * 10})
    config = folder / "config.toml"
    config.write_text(
        f"""
[run]
uri = "{folder}/run"
[task]
name = "language_model"
data = "{tokens}"
seq_len = 32
model = {{width = 32, layers = 2, heads = 2, kv_heads = 1, hidden = 64}}
[train]
steps = 150
global_batch = 8
micro_batch = 8
[optimizer]
lr = 1e-2
[schedule]
warmup_steps = 10
[checkpoint]
every_steps = 75
"""
    )
    job = fork_server.start(["train", str(config)], 1, {"LUSTRAIN_CACHE": str(folder / "cache")})
    assert job.wait(300) == [0], job.said()
    return folder / "run"


def sample(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    assert main(["sample", str(run), *words]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> list[str]:
    assert main(["sample", str(run), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.slow
def test_the_model_continues_the_text_it_was_trained_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, rest = 2 * VERSE + "Pack my", " box with jugs. Pack"
    said = sample(capsys, run, "--prompt", prompt, "--tokens", str(len(rest)), "--temperature", "0")
    assert said == prompt + rest + "\n"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_and_another_another(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--prompt", "q", "--tokens", "40", "--temperature", "3", "--top-k", "0", "--seed")
    first, again, other = (sample(capsys, run, *words, seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert first.startswith("q")


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over_aloud(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy = LocalStore(str(run)), LocalStore(str(tmp_path / "copy"))
    for info in source.list():
        copy.put(info.key, source.read(info.key)[0])
    newest = max(info.key for info in copy.list(f"{ATTEMPTS}") if info.key.endswith(".bin"))
    damaged = bytearray(copy.read(newest)[0])
    damaged[1000] ^= 1
    copy.put(newest, bytes(damaged))
    assert main(["sample", copy.uri, "--prompt", "One", "--tokens", "3"]) == 0
    said = capsys.readouterr().err
    assert "checkpoint skipped" in said
    assert "step 75 of" in said


@pytest.mark.slow
def test_what_a_run_lacks_is_named_in_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (line,) = refusal(capsys, tmp_path / "empty", "--prompt", "x")
    assert "holds no run" in line
    (line,) = refusal(capsys, tmp_path / "absent", "--prompt", "x")
    assert "absent" in line
    store, without = LocalStore(str(run)), LocalStore(str(tmp_path / "without"))
    without.put(CONFIG, store.read(CONFIG)[0])
    without.put(LEASE, store.read(LEASE)[0])
    assert not list(without.list(MANIFESTS))
    (line,) = refusal(capsys, tmp_path / "without", "--prompt", "x")
    assert "holds no committed checkpoint" in line
    lines = store.read(CONFIG)[0].replace(b'"language_model"', b'"image_classification"').splitlines(keepends=True)
    # As a person does who edits it.
    without.put(CONFIG, b"".join(line for line in lines if b"record_crc64nvme" not in line))
    (line,) = refusal(capsys, tmp_path / "without", "--prompt", "x")
    assert line.startswith("task.name = 'image_classification': does not generate text")


def test_all_impossible_arguments_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "", "--tokens", "0", "--temperature", "nan", "--top-k", "-1", "--seed", "-1"]
    lines = refusal(capsys, tmp_path, *words)
    assert [line.split(" = ")[0] for line in lines] == ["--prompt", "--tokens", "--temperature", "--top-k", "--seed"]
    (line,) = refusal(capsys, tmp_path, "--prompt", "\udcff")
    assert line.startswith("--prompt = ")


def test_top_k_never_draws_below_the_k_likeliest_or_padding() -> None:
    logits = torch.tensor([1.0, 5.0, 4.0, 3.0, 9.0, 9.0])
    draw = chooser(temperature=10.0, top_k=2, seed=3, vocab_size=4)
    assert {draw(logits) for _ in range(200)} == {1, 2}
    everything = chooser(temperature=10.0, top_k=0, seed=3, vocab_size=4)
    assert {everything(logits) for _ in range(200)} == {0, 1, 2, 3}
    assert chooser(temperature=0.0, top_k=0, seed=3, vocab_size=4)(logits) == 1


def test_temperature_draws_as_often_as_the_softmax_says() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    draw = chooser(temperature=2.0, top_k=0, seed=5, vocab_size=3)
    drawn = torch.bincount(torch.tensor([draw(logits) for _ in range(4000)]), minlength=3) / 4000
    assert torch.allclose(drawn, (logits / 2.0).softmax(0), atol=0.03)


def test_a_model_that_has_diverged_is_one_line() -> None:
    with pytest.raises(UserError, match="not finite"):
        chooser(1.0, 0, 1, 3)(torch.tensor([0.0, float("nan"), 1.0]))


def test_the_continuation_stops_at_the_end_of_the_text() -> None:
    shape = llama.LlamaShape(width=8, layers=1, heads=1, kv_heads=1, hidden=8, vocab_size=10)
    model = llama.build(shape, length=4, seed=0).eval()
    wanted = iter([3, 4, 5, 6, 7, 9, 1])
    assert list(continuation(model, [1, 2], 100, lambda logits: next(wanted), end=9)) == [3, 4, 5, 6, 7]
    assert len(list(continuation(model, [1], 6, lambda logits: 2, end=9))) == 6


def test_character_over_several_ids_is_written_when_whole() -> None:
    def ids(text: bytes) -> Iterator[int]:
        yield from text

    pieces = list(decoded([0x41], ids("é→!".encode()), BYTES))
    assert pieces == ["é", "→", "!", ""]
    assert "".join(decoded([], ids(b"ok\xe2\x86"), BYTES)).startswith("ok")
