"""The same code gives the same image, whoever builds it and however often."""

from __future__ import annotations

from pathlib import Path

import pytest

from rehearsal.lab.containers.buildkit import BuildKit
from rehearsal.lab.containers.engine import Engine
from tests.images.workshop import Made, Workshop

pytestmark = pytest.mark.slow


def test_another_builder_gives_the_same_digest_for_one_tag(workshop: Workshop, cpu_image: Made, tmp_path: Path) -> None:
    with Engine(tmp_path) as other, BuildKit(other) as builder:
        again = workshop.make(cpu_image.root, environment=builder.environment)
    assert {"tools", "torch-cpu", "app", "code", "system"} <= again.ran
    assert again.image.digest == cpu_image.image.digest
