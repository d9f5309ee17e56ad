"""Fixtures that hand a test a real container engine, a real registry and an image to start from; all end with the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rehearsal.lab.containers.base import push_base
from rehearsal.lab.containers.engine import Engine, why_not
from rehearsal.lab.containers.registry import Registry


def _must_be_possible() -> None:
    from tests.conftest import require

    require(why_not() is None, str(why_not()))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A dockerd that all tests of this process share: count on nothing that it holds, and leave its cache alone."""
    _must_be_possible()
    with Engine(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """An empty registry on 127.0.0.1, plain http, open to all."""
    _must_be_possible()
    with Registry(tmp_path / "registry") as running:
        yield running


@pytest.fixture(scope="session")
def session_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that all tests of this process share; the base image and the cpu image lie in it."""
    _must_be_possible()
    with Registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="session")
def base_image(engine: Engine, session_registry: Registry) -> str:
    """A minimal Debian as registry/name@sha256:…, also in the shared engine."""
    return push_base(engine.environment, session_registry.host)
