"""An image read from a real registry: no layer is pulled."""

from __future__ import annotations

from uuid import uuid4

import pytest

from images.registry.client import Registry as Client
from images.registry.read import image
from lustrain.problem import UserError
from rehearsal.lab.containers.registry import Registry
from tests.images.seeds import put_image
from tests.images.shelf import digest_of


def test_reading_an_image_pulls_no_layer(session_registry: Registry) -> None:
    repository = f"team/{uuid4().hex}"
    ref = f"{session_registry.host}/{repository}:1"
    digest = put_image(session_registry, repository, config={"rootfs": {"diff_ids": [digest_of(b"a tar")]}})
    before = len(session_registry.requests())
    found = image(Client(session_registry.host, lambda host: None), ref)
    assert (found.digest, found.ref) == (digest, ref)
    asked = [path for method, path, _ in session_registry.requests()[before:] if method == "GET" and "/blobs/" in path]
    assert len(asked) == 1
    assert found.layers[0].digest not in asked[0]


def test_a_missing_image_and_a_mistyped_reference_are_one_line(session_registry: Registry) -> None:
    client, name = Client(session_registry.host, lambda host: None), f"{session_registry.host}/team/absent"
    for ref in (f"{name}:1", f"{name}@{digest_of(b'')}", "http://x/y", "UPPER/x"):
        with pytest.raises(UserError) as caught:
            image(client, ref)
        assert len(caught.value.problems) == 1
