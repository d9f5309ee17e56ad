"""A builder that has lost everything builds a code change from the registry's cache, and fetches no layer of the image."""

from __future__ import annotations

from pathlib import Path

import pytest

from rehearsal.lab.containers.buildkit import BuildKit
from rehearsal.lab.containers.engine import Engine
from tests.images.workshop import TORCH, Made, Workshop, change_code

pytestmark = pytest.mark.slow

SHELL = 2_000_000
"""Bytes, with the descriptions of image and cache."""


def test_wiped_builder_makes_code_change_without_pulling_a_layer(
    workshop: Workshop, cpu_image: Made, tmp_path: Path
) -> None:
    cache = f"{workshop.repository}:cache-main"
    # Everything is in the builder already; only the cache goes out.
    cached = workshop.make(cpu_image.root, cache_to=cache)
    assert cached.image.digest == cpu_image.image.digest
    root = workshop.checkout()
    change_code(root)
    seen = len(workshop.registry.answers())
    with Engine(tmp_path) as wiped, BuildKit(wiped) as builder:
        changed = workshop.make(root, environment=builder.environment, cache_from=(cache,))
    asked = [one for one in workshop.registry.answers()[seen:] if "/blobs/" in one[1]]
    fetched = {path.rpartition("/")[2]: size for method, path, _, size in asked if method == "GET"}
    sent = [path for method, path, status, _ in asked if method in ("PUT", "PATCH") and status < 300]
    assert changed.diff_ids(*TORCH) == cpu_image.diff_ids(*TORCH)
    # A shell is enough to build an edit with: neither base nor any other layer is fetched.
    assert not set(fetched) & {layer.digest for layer in cpu_image.image.layers}
    assert 0 < sum(fetched.values()) < SHELL
    assert "code" in changed.ran
    assert not changed.ran & {"torch-cpu", "app", "system"}
    # The new layer and the new configuration.
    assert len({path.partition("digest=")[2] for path in sent if "digest=" in path}) <= 2
