"""The hash of an image: the same wherever and whenever it was made, another for whatever a node would run otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from images.check.content import content_of
from images.model import Image, Layer
from tests.images.shelf import CONFIG


def holding(config: Mapping[str, Any], diff_ids: Sequence[str], packed: str = "x") -> Image:
    """An image of these layers, compressed in some way."""
    layers = tuple(Layer(f"{packed}-{one}", len(packed), one, packed) for one in diff_ids)
    return Image("r/x:1", f"sha256:{packed}", "linux/amd64", layers, config)


def _with(**settings: Any) -> dict[str, Any]:
    return {**CONFIG, "config": {**CONFIG["config"], **settings}}


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "created": "2001-01-01T00:00:00Z", "history": [{"created_by": "RUN x"}], "docker_version": "20.10"},
        _with(ArgsEscaped=True, Cmd=None, OnBuild=[], Labels={}),
        _with(Labels={"org.opencontainers.image.revision": "f00", "org.opencontainers.image.created": "today"}),
    ],
)
def test_dates_commits_and_builders_do_not_count(config: dict[str, Any]) -> None:
    assert content_of(holding(config, ["a"])) == content_of(holding(CONFIG, ["a"]))


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "architecture": "arm64"},
        _with(Env=["PATH=/bin"]),
        _with(User="0"),
        _with(Entrypoint=["/bin/sh"]),
        _with(Cmd=["x"]),
        _with(WorkingDir="/x"),
        _with(Labels={"dev.lustrain.versions.torch": "2"}),
        _with(Healthcheck={"Test": ["CMD", "true"]}),
    ],
)
def test_every_setting_that_decides_how_it_runs_counts(config: dict[str, Any]) -> None:
    assert content_of(holding(config, ["a"])) != content_of(holding(CONFIG, ["a"]))


def test_layers_and_their_order_count_and_not_their_compression() -> None:
    assert len({content_of(holding(CONFIG, layers)) for layers in (["a"], ["b"], ["a", "b"], ["b", "a"])}) == 4
    assert content_of(holding(CONFIG, ["a"], "gzip -6")) == content_of(holding(CONFIG, ["a"], "gzip -9"))
    one, other = _with(Env=["B=1", "A=2"]), _with(Env=["A=2", "B=1"])
    assert content_of(holding(one, ["a"])) == content_of(holding(other, ["a"]))
