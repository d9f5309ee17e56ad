"""What a change costs: a code change one small layer, a dependency its layer, a base patch the system's; torch stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from images.check.diff import diff
from rehearsal.lab.containers.engine import Engine
from tests.images.workshop import TORCH, Made, Workshop, change_code, change_pin

pytestmark = pytest.mark.slow

LARGEST_SHARE = 1 / 800
"""Of the whole image, 298 MB on a CPU. All of the trainer's code, packed, was 201 kB on 2026-11-25 and is 301 kB on 2026-11-28:
it is what grows, and what an edit pulls."""
UNCHANGED = {"tools", "torch-cpu", "app", "system"}
"""Stages that a change of the code leaves alone."""


def test_a_code_change_is_one_small_layer(workshop: Workshop, cpu_image: Made) -> None:
    root = workshop.checkout()
    change_code(root)
    changed = workshop.make(root)
    assert diff(cpu_image.image, changed.image).pulled == (changed.layer("code"),)
    assert 0 < changed.layer("code").size <= LARGEST_SHARE * sum(layer.size for layer in changed.image.layers)
    assert len(changed.image.layers) == len(cpu_image.image.layers)
    assert "code" in changed.ran
    assert not changed.ran & UNCHANGED


def test_no_change_is_nothing_to_pull_from_another_checkout(workshop: Workshop, cpu_image: Made) -> None:
    root = workshop.checkout()
    for path in root.rglob("*.py"):
        # Neither a checkout's times nor its umask are in the image.
        path.touch()
        path.chmod(path.stat().st_mode & 0o700)
    again = workshop.make(root)
    assert again.image.digest == cpu_image.image.digest
    assert again.prepared.ref == cpu_image.prepared.ref
    assert not again.ran & {*UNCHANGED, "code"}


def test_another_pin_of_a_dependency_leaves_torch_as_it_is(workshop: Workshop, cpu_image: Made, tmp_path: Path) -> None:
    root = workshop.checkout()
    change_pin(root, "tomli-w", "1.1.0", tmp_path)
    bumped = workshop.make(root)
    assert diff(cpu_image.image, bumped.image).pulled == (bumped.layer("app"),)
    kept = (*TORCH, "code", "system")
    assert bumped.diff_ids(*kept) == cpu_image.diff_ids(*kept)
    assert "app" in bumped.ran
    assert "torch-cpu" not in bumped.ran


def test_patched_base_leaves_torch_dependencies_and_code_alone(
    workshop: Workshop, cpu_image: Made, engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {workshop.base}\nRUN echo patched >/etc/patched\n")
    tag = f"{workshop.registry.host}/base/patched:1"
    engine.docker("buildx", "build", "--quiet", "--provenance=false", "--push", "-t", tag, tmp_path)
    engine.docker("pull", "--quiet", tag)
    patched = engine.docker("image", "inspect", "--format", "{{index .RepoDigests 0}}", tag).stdout.strip()
    moved = workshop.make(cpu_image.root, base=patched)
    kept = (*TORCH, "app", "code")
    assert moved.diff_ids(*kept) == cpu_image.diff_ids(*kept)
    assert not {moved.layer(name) for name in kept} & set(diff(cpu_image.image, moved.image).pulled)
    assert "system" in moved.ran
    assert not moved.ran & {"tools", "torch-cpu", "app", "code"}
