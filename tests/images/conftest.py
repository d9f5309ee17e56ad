"""One cold build of the real cpu image, which all proofs of this process share."""

from __future__ import annotations

import pytest

from rehearsal.lab.containers.engine import Engine
from rehearsal.lab.containers.registry import Registry
from tests.images.workshop import Made, Workshop


@pytest.fixture(scope="session")
def workshop(
    engine: Engine, session_registry: Registry, base_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Workshop:
    return Workshop(engine, session_registry, base_image, tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="session")
def cpu_image(workshop: Workshop) -> Made:
    """The trainer's image for CPUs, built cold, verified and pushed to the session's registry."""
    return workshop.make(workshop.checkout(), verify=True)
