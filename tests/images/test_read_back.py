"""What a real engine built and pushed to a real registry, read back: secrets and forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from images.check.inspection import FAILED, WARNING, Row, verify
from images.registry.client import Registry as Client
from images.registry.read import find
from rehearsal.lab.containers.engine import Engine
from rehearsal.lab.containers.registry import Registry

pytestmark = pytest.mark.slow

# Put together here, so that scanners of repositories do not take this file for a leak.
TOKEN = "ghp" + "_" + "a1B2" * 9
DOCKERFILE = 'FROM scratch\nARG NOTE=none\nCOPY Dockerfile /\nUSER 1000:1000\nENTRYPOINT ["/x"]\n'
PUSHED = "type=image,push=true"
Build = Callable[..., str]


@pytest.fixture
def client(session_registry: Registry) -> Client:
    return Client(session_registry.host, lambda host: None)


@pytest.fixture
def build(engine: Engine, session_registry: Registry, tmp_path: Path) -> Iterator[Build]:
    """Builds in a repository of its own; returns the reference."""
    ref = f"{session_registry.host}/{uuid4().hex}:1"

    def built(*more: str, output: str = PUSHED, dockerfile: str = DOCKERFILE) -> str:
        (tmp_path / "Dockerfile").write_text(dockerfile)
        engine.docker("buildx", "build", "--output", f"{output},name={ref}", *more, tmp_path)
        return ref

    yield built
    engine.docker("image", "rm", "--force", ref, check=False)


def media_types(rows: tuple[Row, ...]) -> list[str]:
    return [row.status for row in rows if row.check == "media types"]


def test_a_secret_in_the_history_is_found_and_not_repeated(build: Build, client: Client) -> None:
    noted = DOCKERFILE + "LABEL note=$NOTE\n"
    rows = verify(client, build("--provenance=false", "--build-arg", f"NOTE={TOKEN}", dockerfile=noted)).rows
    assert any(row.check == "secrets" and row.status == FAILED for row in rows)
    assert TOKEN not in str(rows)


def test_attestations_of_real_build_are_no_images_but_a_warning(build: Build, client: Client) -> None:
    ref = build("--provenance=true")
    (found,) = find(client, ref)
    assert found.index is not None
    assert found.index.attestations == 1
    assert media_types(verify(client, ref).rows) == [WARNING]


def test_zstd_of_a_real_build_is_refused(build: Build, client: Client) -> None:
    options = f"{PUSHED},compression=zstd,force-compression=true,oci-mediatypes=true"
    assert media_types(verify(client, build("--provenance=false", output=options)).rows) == [FAILED]
