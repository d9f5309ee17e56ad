"""The config file: what is wrong is said all at once, in lines, and what is right survives the way to TOML and back."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lustrain.problem import UserError
from trainer import config as configuration
from trainer.config import Config, Section

GOOD = """
[run]
uri = "runs/demo"
[task]
name = "language_model"
data = "tokens"
[train]
steps = 10
global_batch = 8
micro_batch = 2
"""


def load(tmp_path: Path, text: str, sets: list[str] | None = None) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return configuration.load(path, sets or [])


def problems(tmp_path: Path, text: str, sets: list[str] | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, sets)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_every_problem_is_reported_at_once_with_its_path(tmp_path: Path) -> None:
    text = GOOD.replace("steps = 10", 'steps = "ten"\nsteeps = 3').replace('uri = "runs/demo"', "seed = -1")
    text += '[train.more]\n[precision]\nmode = "fp8"\n[interrupt]\ndeadline = "2026-12-01T10:00:00"\n'
    lines = problems(tmp_path, text)
    starts = {line.split(" ", 1)[0] for line in lines}
    assert starts == {
        "run.uri",
        "run.seed",
        "train.steps",
        "train.steeps",
        "train.more",
        "precision.mode",
        "interrupt.deadline",
    }
    assert all("\n" not in line for line in lines)
    assert any("allowed: 'fp32', 'bf16' or 'fp16'" in line for line in lines)
    assert any("append Z for UTC" in line for line in lines)


@pytest.mark.parametrize(
    ("sets", "start"),
    [
        (["train.steps"], "--set = 'train.steps'"),
        (["train.steps.deeper=1"], "--set = 'train.steps.deeper=1'"),
        (["=3"], "--set = '=3'"),
        (["train.steps=many"], "train.steps = 'many'"),
    ],
)
def test_a_bad_set_is_one_line(tmp_path: Path, sets: list[str], start: str) -> None:
    lines = problems(tmp_path, GOOD, sets)
    assert len(lines) == 1
    assert lines[0].startswith(start)


def test_a_config_that_only_names_what_was_removed_still_loads(tmp_path: Path) -> None:
    named = ["parallel.powersgd_rank=1", "parallel.powersgd_start_step=1000", "checkpoint.compression=none"]
    assert load(tmp_path, GOOD, named) == load(tmp_path, GOOD)


@pytest.mark.parametrize(("key", "asks"), [(key, asks) for key, (asks, _) in configuration.REMOVED.items() if asks])
def test_a_config_that_asks_for_what_was_removed_is_one_line_with_why(
    tmp_path: Path, key: tuple[str, str], asks: str
) -> None:
    (line,) = problems(tmp_path, GOOD, [f"{'.'.join(key)}={asks}"])
    assert line.startswith(f"{'.'.join(key)} = '{asks}': was removed")
    assert line.endswith("fix: remove the key")


@pytest.mark.parametrize(("key", "value"), [("train.steps", '"20"'), ("optimizer.lr", '"1e-3"'), ("run.uri", "7")])
def test_no_value_is_taken_for_one_of_another_type(tmp_path: Path, key: str, value: str) -> None:
    (line,) = problems(tmp_path, GOOD, [f"{key}={value}"])
    assert line.startswith(f"{key} = ")
    assert "wrong type" in line


def test_a_text_of_a_task_may_have_lines() -> None:
    class Options(Section):
        separator: str

    assert Options.model_validate({"separator": "\n\n\t"}).separator == "\n\n\t"
    with pytest.raises(ValidationError, match="not printable"):
        Options.model_validate({"separator": "\0"})


def test_set_beats_the_file_and_takes_toml_values_or_plain_words(tmp_path: Path) -> None:
    config = load(
        tmp_path, GOOD, ["train.steps=20", "precision.mode=bf16", 'checkpoint.tiers=[{kind="memory",path="/x"}]']
    )
    assert config.train.steps == 20
    assert config.precision.mode == "bf16"
    assert config.checkpoint.tiers[0].path == "/x"


@pytest.mark.parametrize("content", ["[run", "\xff\xfe", "a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="is not TOML"):
        configuration.load(tmp_path / "bad.toml")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        configuration.load(tmp_path / "nowhere.toml")


def test_the_resolved_config_reads_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, ["interrupt.deadline=2026-12-01T11:30:00Z", "train.grad_clip=0.25"])
    (tmp_path / "resolved.toml").write_text(configuration.to_toml(config, {"format": 1, "fingerprint": {"a": [1, 2]}}))
    assert configuration.load(tmp_path / "resolved.toml") == config


TOML_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from([*Config.model_fields, "recorded", "other"]) | st.text(max_size=5)


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(KEYS, TOML_VALUES | st.dictionaries(st.text(max_size=8), TOML_VALUES, max_size=4), max_size=5))
def test_no_table_whatever_gives_anything_but_lines(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]
) -> None:
    import tomli_w

    def without_null(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_null(v) for k, v in value.items() if v is not None}
        if isinstance(value, list):
            return [without_null(v) for v in value if v is not None]
        return value

    path = tmp_path_factory.mktemp("fuzz") / "config.toml"
    path.write_text(tomli_w.dumps(without_null(table)), encoding="utf-8", newline="")
    with pytest.raises(UserError) as caught:
        configuration.load(path)
    assert caught.value.problems
    assert all("\n" not in line for line in caught.value.problems)


@given(st.lists(st.text(max_size=20), max_size=4))
def test_no_set_whatever_gives_anything_but_lines(tmp_path_factory: pytest.TempPathFactory, sets: list[str]) -> None:
    path = tmp_path_factory.mktemp("sets") / "config.toml"
    path.write_text(GOOD)
    with suppress(UserError):
        assert configuration.load(path, sets).task.name
