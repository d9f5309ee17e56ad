"""The config file: what is wrong is said all at once, in lines, and what is right survives the way to TOML and back."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from lustrain.problem import UserError
from lustrain.schema import problems_of
from trainer import config as configuration
from trainer.config import Config, Section
from trainer.tasks import problems_in

GOOD = """
[run]
uri = "runs/demo"
[task]
name = "language_model"
data = "tokens"
seq_len = 8
[train]
steps = 10
global_batch = 8
micro_batch = 2
"""


def load(tmp_path: Path, text: str, sets: list[str] | None = None) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return configuration.load(path, sets or [], also=problems_in)


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
    ("given", "line"),
    [
        ("train.steps", "--set = 'train.steps': is not of the form"),
        ("train.steps.deeper=1", "--set = 'train.steps.deeper=1': "),
        ("=3", "--set = '=3': "),
        ("run.seed=" + "[" * 3000, "run.seed = '[[["),
        (".".join("a" * 3000) + "=1", "--set = 'a.a.a"),
        ("run.uri=3", "run.uri = 3: wrong type; allowed: text in quotes"),
        ("train.steps=1.5", "train.steps = 1.5: wrong type; allowed: a whole number"),
        ("train.steps=many", "train.steps = 'many': wrong type; allowed: a whole number"),
        ('train.steps="20"', "train.steps = '20': wrong type; allowed: a whole number"),
        ('optimizer.lr="1e-3"', "optimizer.lr = '1e-3': wrong type; allowed: a number"),
        ('interrupt.metadata="maybe"', "interrupt.metadata = 'maybe': wrong type; allowed: true or false"),
        ("metrics=3", "metrics = 3: wrong type; allowed: a table of keys"),
        ('run.uri=""', "run.uri = '': not allowed; allowed: 1 character or more"),
        ("optimizer.lr=nan", "optimizer.lr = nan: not allowed; allowed: a number that is not infinite"),
        ("run.uri=/tmp/\udcff", "run.uri = '/tmp/\\udcff': holds '\\udcff', which is not printable; fix: remove it"),
        ("task.data=/tmp/\udcff", "task.data = '/tmp/\\udcff': holds '\\udcff', which is not printable"),
    ],
)  # fmt: skip
def test_a_bad_set_is_one_line(tmp_path: Path, given: str, line: str) -> None:
    (found,) = problems(tmp_path, GOOD, [given])
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (GOOD + '[interrupt]\nstop_uri = "a\\u0000b"', "interrupt.stop_uri = 'a\\x00b': holds '\\x00'"),
        (GOOD.replace('"tokens"', '"s3://b/\\u0000"'), "task.data = 's3://b/\\x00': holds '\\x00'"),
        ("deep = " + "[" * 3000 + "]" * 3000 + GOOD, "CONFIG = "),
        (GOOD + "[" + ".".join("a" * 3000) + "]", "CONFIG = "),
        ("long = 0x" + "f" * 5000 + GOOD, "long = a value of type int, too large to show: unknown key"),
        ("long = 1" + "0" * 5000 + GOOD, "CONFIG = "),
    ],
    ids=["nul", "nul-in-a-task", "deep-list", "deep-table", "long-hex", "long-decimal"],
)
def test_what_ends_a_parser_or_a_system_call_is_one_line(tmp_path: Path, text: str, start: str) -> None:
    (line,) = problems(tmp_path, text)
    assert line.startswith(start)
    assert len(line) < 400


def test_needs_of_a_foreign_task_are_in_plain_words() -> None:
    class Options(BaseModel):
        word: Annotated[str, Field(pattern="^a+$")]
        count: Annotated[int, Field(multiple_of=4)]
        table: Mapping[str, int]

    with pytest.raises(ValidationError) as caught:
        Options.model_validate({"word": "b", "count": 3, "table": 1})
    assert problems_of(caught.value, Options, "task") == [
        "task.word = 'b': not allowed; allowed: pattern ^a+$",
        "task.count = 3: not allowed; allowed: multiple of 4",
        "task.table = 1: wrong type; allowed: a table of keys",
    ]


def test_a_config_that_only_names_what_was_removed_still_loads(tmp_path: Path) -> None:
    named = ["parallel.powersgd_rank=1", "parallel.powersgd_start_step=1000", "checkpoint.compression=none"]
    assert load(tmp_path, GOOD, named) == load(tmp_path, GOOD)


@pytest.mark.parametrize(("key", "asks"), [(key, asks) for key, (asks, _) in configuration.REMOVED.items() if asks])
def test_what_asks_for_what_was_removed_is_one_line_with_why(tmp_path: Path, key: tuple[str, str], asks: str) -> None:
    (line,) = problems(tmp_path, GOOD, [f"{'.'.join(key)}={asks}"])
    assert line.startswith(f"{'.'.join(key)} = '{asks}': was removed")
    assert line.endswith("fix: remove the key")


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
def test_no_table_gives_anything_but_lines(tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]) -> None:
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
