"""Nothing that building was told in confidence, and nothing that lay beside the context, is in the image."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import requests

from images.plan import references
from rehearsal.lab.containers.base import ROOT
from rehearsal.lab.containers.engine import Engine
from tests.images.workshop import CANARY, Made, Workshop, change_code

pytestmark = pytest.mark.slow

BESIDE = "canary-that-lay-beside-8341"
CHUNK = 1 << 20
NOT_SHIPPED = [
    "infra",
    "images",
    "node_setup",
    "launch",
    "rehearsal",
    "pulumi",
    "moto",
    "fabric",
    "invoke",
    "docker",
    "pytest",
]


def contains(made: Made, *texts: str, beyond: Made | None = None) -> set[tuple[str, str]]:
    """Which texts are in which layers: over the whole tar, so names and file contents alike. Layers that are those of an
    image made before the text was anywhere are not read."""
    found: set[tuple[str, str]] = set()
    reference = references.parse(made.ref)
    before_it = {layer.digest for layer in beyond.image.layers} if beyond else set()
    for layer in made.image.layers:
        if layer.digest in before_it:
            continue
        unpack, before = zlib.decompressobj(wbits=31), b""
        url = f"http://{reference.registry}/v2/{reference.repository}/blobs/{layer.digest}"
        with requests.get(url, stream=True, timeout=300) as packed:
            packed.raise_for_status()
            for chunk in packed.iter_content(CHUNK):
                data = before + unpack.decompress(chunk)
                found |= {(layer.created_by, text) for text in texts if text.encode() in data}
                before = data[-200:]
        # Read to the end: a second gzip member would have gone unseen.
        assert unpack.eof
        assert not unpack.unused_data
    return found


@pytest.fixture(scope="module")
def planted(workshop: Workshop) -> Made:
    root = workshop.checkout()
    change_code(root)
    for path in ("secret.txt", "images/secret.txt", "images/site/secret.txt", "launch/slurm.py", "infra/keys.py"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(f"key = '{BESIDE}'\n")
    return workshop.make(root)


def test_a_build_secret_is_in_no_layer_and_not_in_the_history(workshop: Workshop, cpu_image: Made) -> None:
    assert CANARY in cpu_image.prepared.plan.secrets["netrc"].read_text()
    # Were the search blind, it would find nothing whatever there is.
    there = "def hold_notices"
    assert {text for _, text in contains(cpu_image, CANARY, there)} == {there}
    assert CANARY not in json.dumps(cpu_image.image.config)


def test_a_file_beside_the_context_is_in_no_layer(cpu_image: Made, planted: Made) -> None:
    assert not contains(planted, BESIDE, "secret.txt", beyond=cpu_image)
    assert BESIDE not in json.dumps(planted.image.config)


def test_only_the_trainer_is_in_the_image(engine: Engine, cpu_image: Made) -> None:
    script = (
        "import importlib.util, json, os, pkgutil, trainer\n"
        "names = {one.name for one in pkgutil.walk_packages(trainer.__path__, 'trainer.')}\n"
        f"there = [one for one in {NOT_SHIPPED!r} if importlib.util.find_spec(one)]\n"
        "torch = importlib.util.find_spec('torch').submodule_search_locations[0]\n"
        "unread = sorted({'include', 'test'} & set(os.listdir(torch)))\n"
        "print(json.dumps([sorted(names), there, unread]))"
    )
    said = engine.docker("run", "--rm", "--network", "none", "--read-only", cpu_image.ref, "python3", "-c", script)
    names, there, unread = json.loads(said.stdout)
    files = [path.relative_to(ROOT).with_suffix("") for path in Path(ROOT / "trainer").rglob("*.py")]
    assert set(names) == {".".join(file.parts).removesuffix(".__init__") for file in files} - {"trainer"}
    # C++ headers, for which this target has no compiler, and torch's own tests.
    assert (there, unread) == ([], [])
