"""What a real engine built and pushed to a real registry, read back: differences, secrets, forms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from images.check.diff import diff
from images.check.inspection import FAIL, WARN, verify
from images.model import Image
from images.registry.client import Registry as Client
from images.registry.read import find, image
from rehearsal.lab.containers.engine import Engine
from rehearsal.lab.containers.registry import Registry

pytestmark = pytest.mark.slow

# Put together here, so that scanners of repositories do not take this file for a leak.
TOKEN = "ghp" + "_" + "a1B2" * 9
DOCKERFILE = """FROM scratch
ARG NOTE=none
COPY tree /
COPY code /code
USER 1000:1000
ENTRYPOINT ["/bin/x"]
"""
# As the builder writes images for nodes: docker's types, gzip, no attestations.
PLAIN = "type=image,push=true,oci-mediatypes=false,compression=gzip,force-compression=true"


class Yard:
    """A small context, and a repository of its own to push to."""

    def __init__(self, engine: Engine, registry: Registry, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.name = f"{registry.host}/{uuid4().hex}"
        self.client = Client(registry.host, None)
        tree = folder / "tree"
        (tree / "bin").mkdir(parents=True)
        (tree / "bin" / "x").write_bytes(os.urandom(64) + b"\x7fELF" * 20_000)
        os.link(tree / "bin" / "x", tree / "bin" / "y")
        (tree / "sh").symlink_to("bin/x")
        (folder / "code").write_text("print(1)\n")

    def build(self, tag: str, *more: str, output: str = PLAIN, dockerfile: str = DOCKERFILE) -> str:
        (self.folder / "Dockerfile").write_text(dockerfile)
        words = ["buildx", "build", "--provenance=false", "--output", f"{output},name={self.name}:{tag}"]
        self.engine.docker(*words, *more, self.folder)
        return f"{self.name}:{tag}"

    def image(self, tag: str) -> Image:
        return image(self.client, f"{self.name}:{tag}")


@pytest.fixture
def yard(engine: Engine, session_registry: Registry, tmp_path: Path) -> Iterator[Yard]:
    made = Yard(engine, session_registry, tmp_path)
    yield made
    found = engine.docker("image", "ls", "--quiet", made.name).stdout.split()
    if found:
        engine.docker("image", "rm", "--force", *found)


def test_a_code_change_pulls_the_codes_layer_alone(yard: Yard) -> None:
    yard.build("1")
    (yard.folder / "code").write_text("print(2)\n")
    yard.build("2")
    found = diff(yard.image("1"), yard.image("2"))
    assert [one.created_by for one in found.pulled] == ["COPY code /code # buildkit"]
    assert found.bytes < 500
    assert len(found.kept) == 1


def test_a_secret_in_the_history_is_found_and_not_repeated(yard: Yard) -> None:
    yard.build("1", "--build-arg", f"NOTE={TOKEN}", dockerfile=DOCKERFILE + "LABEL note=$NOTE\n")
    rows = verify(yard.client, f"{yard.name}:1").rows
    assert any(row.check == "secrets" and row.state == FAIL for row in rows)
    assert TOKEN not in str(rows)


def test_attestations_of_a_real_build_are_no_images_and_are_warned_of(yard: Yard) -> None:
    ref = yard.build("1", "--provenance=true", output="type=image,push=true")
    (found,) = find(yard.client, ref)
    assert found.index is not None
    assert found.index.attestations == 1
    rows = verify(yard.client, ref).rows
    assert [row.state for row in rows if row.check == "media types"] == [WARN]


def test_zstd_of_a_real_build_is_refused_in_one_line(yard: Yard) -> None:
    ref = yard.build("1", output="type=image,push=true,compression=zstd,force-compression=true,oci-mediatypes=true")
    rows = verify(yard.client, ref).rows
    assert [row.state for row in rows if row.check == "media types"] == [FAIL]
