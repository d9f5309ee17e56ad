"""The second Task: images are pure functions of their id, whoever asks and in whatever company, and can be learned."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lustrain.problem import UserError
from tests.conftest import require
from trainer.config import OptimizerConfig, TaskConfig
from trainer.step.optim import clip_, make_optimizer
from trainer.tasks.models import patchnet


@pytest.fixture(scope="module", autouse=True)
def pillow() -> None:
    require(importlib.util.find_spec("PIL"), "Pillow is not installed (extra `images`)")


def task_for(seed: int = 1, **options: Any) -> Any:
    from trainer.tasks import make_task

    task = make_task(TaskConfig.model_validate({"name": "image_classification", **options}), seed=seed)
    task.open(Path())
    return task


@pytest.fixture(scope="module")
def digits(pillow: None) -> Any:
    return task_for(characters="0123456789", variants=16, max_fonts=12)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_image_does_not_depend_on_its_batch(digits: Any, data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, digits.train_samples - 1), min_size=1, max_size=12)))
    batch = digits.train_batch(ids)
    for row, sample in enumerate(ids):
        alone = digits.train_batch(np.array([sample]))
        assert torch.equal(alone["images"][0], batch["images"][row])
        assert alone["labels"][0] == batch["labels"][row]


def test_variants_of_a_character_differ_and_other_seeds_move_it(digits: Any) -> None:
    glyphs = digits.train_samples // 16
    ids = np.array([3, 3 + glyphs, 3 + 2 * glyphs])
    batch = digits.train_batch(ids)
    assert batch["labels"].tolist() == [3, 3, 3]
    assert len({image.numpy().tobytes() for image in batch["images"]}) == 3
    other = task_for(seed=2, characters="0123456789", variants=16, max_fonts=12)
    assert not torch.equal(other.train_batch(ids)["images"], batch["images"])


def test_every_image_shows_ink_inside_its_frame(digits: Any) -> None:
    images = digits.train_batch(np.arange(0, digits.train_samples, 7))["images"]
    assert images.dtype == torch.uint8
    assert bool((images.amax(dim=(1, 2, 3)) > 100).all())
    border = torch.cat([images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]], dim=-1)
    assert float((border.amax(dim=(1, 2)) > 128).float().mean()) < 0.05


def test_jitter_is_uniform_and_counter_based() -> None:
    from trainer.tasks.glyphs import uniform

    drawn = uniform(np.arange(100_000), 7)
    assert 0 <= drawn.min() < 1e-3 < 1 - 1e-3 < drawn.max() < 1
    assert np.histogram(drawn, 10)[0] == pytest.approx(np.full(10, 10_000), rel=0.05)
    assert np.array_equal(uniform(np.array([42]), 7), drawn[42:43])


def test_a_font_that_lacks_or_confuses_characters_is_not_used() -> None:
    from trainer.tasks.glyphs import draw_glyphs

    assert draw_glyphs(None, "abc") is not None
    assert draw_glyphs(None, "a\u4e2d") is None
    with pytest.raises(UserError, match=r"^task\.fonts = "):
        task_for(characters="\U0010fffc\U0010fffb")


def test_equal_fonts_count_once_and_their_order_is_by_name(tmp_path: Path) -> None:
    from trainer.tasks.glyphs import font_files

    for folder, name, content in [
        ("b", "a.ttf", b"1"),
        ("a", "b.ttf", b"2"),
        ("c", "c.otf", b"1"),
        ("a", "d.txt", b"3"),
    ]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(content)
    found = font_files([tmp_path])
    assert [file.name for file in found] == ["a.ttf", "b.ttf"]


def test_option_problems_are_named_together() -> None:
    with pytest.raises(UserError) as caught:
        task_for(characters="aa", patch=5, kernel=4)
    assert [line.split(" = ")[0] for line in caught.value.problems] == ["task.characters", "task.patch", "task.kernel"]
    with pytest.raises(UserError, match=r"^task\.fonts = '/nowhere': does not exist"):
        task_for(fonts=["/nowhere"])


def test_cost_is_what_torch_counts(digits: Any) -> None:
    model = digits.build_model()
    images = digits.train_batch(np.arange(4))["images"].float()
    with FlopCounterMode(display=False) as counter:
        model(images)
    # Backward costs twice the forward; torch itself counts grouped convolutions' backward as if they were not grouped.
    assert digits.flops_per_token(model) == 3 * counter.get_total_flops() / 4
    assert digits.blocks(model) == list(model.blocks)


def test_the_fingerprint_names_what_is_drawn(digits: Any) -> None:
    assert task_for(characters="0123456789", variants=16, max_fonts=12).fingerprint() == digits.fingerprint()
    assert task_for(characters="0123456789", variants=16, max_fonts=1).fingerprint() != digits.fingerprint()


def test_the_classifier_starts_from_its_seed_alone() -> None:
    shape = patchnet.PatchNetShape(image=32, patch=4, width=8, layers=1, kernel=3, classes=5)
    first, same, other = (patchnet.build(shape, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)


@pytest.mark.slow
def test_unseen_fonts_are_recognised_far_above_chance(digits: Any) -> None:
    model = digits.build_model()
    optimizer = make_optimizer(model, OptimizerConfig(lr=3e-3))
    rng = np.random.default_rng(0)
    for _ in range(60):
        loss = digits.loss(model, digits.train_batch(rng.integers(0, digits.train_samples, 48)))
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        clip_(list(model.parameters()), 1.0, scale=1.0)
        optimizer.step()
    with torch.no_grad():
        batch = digits.eval_batch(np.arange(digits.eval_samples))
        right = model(batch["images"].float() / 255).argmax(1) == batch["labels"]
    assert float(right.float().mean()) > 0.4, "chance is 0.1"
