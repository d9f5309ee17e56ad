"""A tag is put on an image by digest, and never taken from another image."""

from __future__ import annotations

import json

import pytest

from images.registry.client import OCI_MANIFEST, connect
from images.registry.tags import tag
from lustrain.problem import UserError
from rehearsal.lab.containers import registry as lab
from tests.images.scripted import Asked, Said, scripted
from tests.images.seeds import put_image
from tests.images.shelf import digest_of

ARM = {"os": "linux", "architecture": "arm64", "variant": "v8"}


@pytest.mark.slow
def test_a_tag_of_another_image_is_never_overwritten(registry: lab.Registry) -> None:
    first, second = put_image(registry, "a", "1"), put_image(registry, "a", None, config=ARM)
    with pytest.raises(UserError, match="never overwritten") as caught:
        tag(f"{registry.host}/a:1", second)
    assert caught.value.exit_code == 2
    assert connect(f"{registry.host}/a:1").digest_of(f"{registry.host}/a:1") == first


@pytest.mark.slow
def test_tagging_the_same_image_again_puts_nothing(registry: lab.Registry) -> None:
    digest = put_image(registry, "a", None)
    assert tag(f"{registry.host}/a:1", digest) == digest
    puts = [request for request in registry.requests() if request[0] == "PUT"]
    assert tag(f"{registry.host}/a:1", digest) == digest
    assert [request for request in registry.requests() if request[0] == "PUT"] == puts


def test_a_manifest_that_the_registry_changed_is_refused() -> None:
    manifest = json.dumps({"config": {"digest": digest_of(b"{}")}}).encode()
    stored: list[bytes] = []

    def changing(asked: Asked) -> Said:
        if asked.method == "PUT":
            stored.append(asked.body + b" ")
            return Said(201)
        body = stored[0] if stored else manifest
        return (
            Said(404) if asked.path.endswith("/1") and not stored else Said(200, body, {"Content-Type": OCI_MANIFEST})
        )

    with scripted(changing) as fake, pytest.raises(UserError, match="already names a different image"):
        tag(f"{fake.host}/a:1", digest_of(manifest))
