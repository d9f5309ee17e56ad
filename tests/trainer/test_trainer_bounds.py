"""Every number of a config has a range that the machine can carry out, and what lies outside of it is one line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lustrain.schema import TOML, problems_of
from trainer.checkpoint.lineage.fence import Fence
from trainer.checkpoint.lineage.lease import Lease
from trainer.config import Config, InterruptConfig
from trainer.interrupt import NoticeWatcher
from trainer.metrics import RunLog
from trainer.storage import open_store
from trainer.tasks import problems_in
from trainer.tasks.image_classification import ImageClassificationOptions
from trainer.tasks.language_model import LanguageModelOptions, ModelOptions
from trainer.tasks.models.llama import PRESETS, LlamaShape
from trainer.tasks.models.patchnet import PatchNetShape

NEEDED: dict[str, Any] = {
    "run": {"uri": "run"},
    "task": {"name": "language_model", "data": "tokens", "seq_len": 8},
    "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
}


@dataclasses.dataclass(frozen=True)
class Number:
    """One number of a config: where it stands, and the smallest and largest value that it may have."""

    path: tuple[str, ...]
    least: float
    most: float


def numbers(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[Number]:
    """Every number that `model` takes, at any depth; a bound that is not there is infinite."""
    schema = model.model_json_schema()

    def below(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[Number]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for inner in node.get("anyOf", []):
            yield from below(inner, path)
        for name, inner in node.get("properties", {}).items():
            yield from below(inner, (*path, name))
        if "items" in node:
            yield from below(node["items"], (*path, "[]"))
        if node.get("type") in ("integer", "number"):
            step = 1 if node["type"] == "integer" else None
            least = node.get("minimum", _next(node.get("exclusiveMinimum", -math.inf), step or math.inf))
            most = node.get("maximum", _next(node.get("exclusiveMaximum", math.inf), -(step or math.inf)))
            yield Number(path, least, most)

    return list(below(schema, prefix))


def _next(bound: float, step: float) -> float:
    """The value beside an excluded bound."""
    return bound if math.isinf(bound) else math.nextafter(bound, step) if math.isinf(step) else bound + step


NUMBERS = numbers(Config)
LANGUAGE, IMAGES = numbers(LanguageModelOptions, ("task",)), numbers(ImageClassificationOptions, ("task",))


def table(path: tuple[str, ...], value: object, task: dict[str, Any]) -> dict[str, Any]:
    """A whole config in which the key at `path` has `value`."""
    whole = {name: dict(section) for name, section in (NEEDED | {"task": task}).items()}
    at = whole
    for key in path[:-1]:
        at = at.setdefault(key, {})
    at[path[-1]] = value
    return whole


def told(path: tuple[str, ...], value: object, task: dict[str, Any]) -> list[str]:
    """The problem lines about the key at `path` with this value in an otherwise right config."""
    whole = table(path, value, task)
    try:
        Config.model_validate(whole)
        lines = problems_in(whole)
    except ValueError as error:
        lines = problems_of(error, Config, words=TOML)  # type: ignore[arg-type]
    return [line for line in lines if line.startswith(".".join(path) + " = ")]


@pytest.mark.parametrize(
    ("found", "task"),
    [(NUMBERS, NEEDED["task"]), (LANGUAGE, NEEDED["task"]), (IMAGES, {"name": "image_classification"})],
    ids=["config", "language_model", "image_classification"],
)
def test_every_number_has_a_range_and_is_one_line_outside_of_it(found: list[Number], task: dict[str, Any]) -> None:
    assert len(found) >= 6
    assert not [number for number in found if math.isinf(number.least) or math.isinf(number.most)]
    for number in found:
        whole = isinstance(number.most, int) and isinstance(number.least, int)
        beyond = [number.least - 1, number.most + 1] if whole else [math.inf, -math.inf, math.nan]
        beyond += [-math.inf, math.nan, 10**400]
        for value in [*beyond, number.most * 2 + 1]:
            assert len(told(number.path, value, task)) == 1, (number, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.timeout_s", 1e-6),
        ("parallel.timeout_s", 1e12),
        ("checkpoint.copy_threads", 10**5),
        ("checkpoint.lease_poll_s", 1e12),
        ("metrics.flush_s", 1e12),
        ("interrupt.poll_s", 1e12),
        ("train.global_batch", 10**12),
        ("task.model.width", 10**9),
        ("task.model.hidden", 10**9),
        ("task.model.layers", 10**9),
        ("task.model.heads", 10**9),
        ("task.model.vocab_size", 2**40),
        ("task.seq_len", 10**9),
        ("train.steps", 10**13),
        ("optimizer.lr", 1e-39),
    ],
)
def test_numbers_that_end_threads_or_silence_output_are_refused(key: str, value: float) -> None:
    assert len(told(tuple(key.split(".")), value, NEEDED["task"] | {"model": {}})) == 1


@given(st.sampled_from(NUMBERS), st.booleans())
def test_the_bounds_themselves_are_accepted(number: Number, upper: bool) -> None:
    assert not told(number.path, number.most if upper else number.least, NEEDED["task"]), number


def test_a_models_shape_is_made_of_options_that_have_a_range() -> None:
    shape = {field.name for field in dataclasses.fields(LlamaShape)}
    assert shape <= set(ModelOptions.model_fields)
    for preset in PRESETS.values():
        ModelOptions.model_validate({k: v for k, v in dataclasses.asdict(preset).items() if k != "vocab_size"})
    # The side of an image is a constant, and the classes are as many as there are characters.
    options = set(ImageClassificationOptions.model_fields) | {"image", "classes"}
    assert {field.name for field in dataclasses.fields(PatchNetShape)} <= options


@pytest.mark.parametrize("upper", [False, True])
def test_threads_wait_at_the_bounds_and_end_at_once(tmp_path: Path, upper: bool) -> None:
    at = {".".join(number.path): number.most if upper else number.least for number in NUMBERS}
    store = open_store(str(tmp_path))
    log = RunLog(store, 1, at["metrics.flush_s"])
    log.event("started", {})
    fence = Fence(Lease.acquire(store, "me"), at["checkpoint.lease_poll_s"], log.event)
    with NoticeWatcher(InterruptConfig(poll_s=at["interrupt.poll_s"])) as watch:
        assert watch.notice() is None
    fence.close()
    log.close()
    assert fence.lost is None
    assert list(store.list("events/"))
