"""Platforms are joined under one reference, each checked against what the registry holds."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.registry.client import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST, connect
from images.registry.merge import joined, merge, tag
from lustrain.problem import UserError
from rehearsal.lab.containers import registry as lab
from tests.images.scripted import Asked, Said, scripted
from tests.images.seeds import put_image
from tests.images.shelf import digest_of

ARM = {"os": "linux", "architecture": "arm64", "variant": "v8"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "joint"), [(DOCKER_MANIFEST, DOCKER_LIST), (OCI_MANIFEST, OCI_INDEX)])
def test_two_platforms_become_one_list_once_in_whatever_order(registry: lab.Registry, kind: str, joint: str) -> None:
    first, second = (put_image(registry, "a", None, config=config, media_type=kind) for config in ({}, ARM))
    ref = f"{registry.host}/a:1"
    digest = merge(ref, [second, first])
    held = connect(ref).manifest(ref)
    assert (held.digest, held.media_type) == (digest, joint)
    entries = json.loads(held.body)["manifests"]
    assert [one["digest"] for one in entries] == [first, second]
    assert entries[1]["platform"] == ARM
    assert entries[0]["size"] == len(connect(ref).manifest(f"{registry.host}/a@{first}").body)
    before = [one for one in registry.requests() if one[0] == "PUT"]
    assert merge(ref, [first, second]) == digest
    assert [one for one in registry.requests() if one[0] == "PUT"] == before


@pytest.mark.slow
def test_a_tag_of_another_image_is_never_overwritten(registry: lab.Registry) -> None:
    first, second = put_image(registry, "a", "1"), put_image(registry, "a", None, config=ARM)
    with pytest.raises(UserError, match="never overwritten") as caught:
        merge(f"{registry.host}/a:1", [first, second])
    assert caught.value.exit_code == 2
    assert connect(f"{registry.host}/a:1").digest_of(f"{registry.host}/a:1") == first


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_put(registry: lab.Registry) -> None:
    amd, arm = put_image(registry, "a", None), put_image(registry, "a", None, config=ARM)
    twin = put_image(registry, "a", None, b"other layer")
    oci = put_image(registry, "a", None, config=ARM | {"author": "x"}, media_type=OCI_MANIFEST)
    bare = put_image(registry, "a", None, config={"architecture": ""})
    inner = merge(f"{registry.host}/a:inner", [amd, arm])
    for digests, why in (
        ([], "nothing to join"),
        (["sha256:12"], "not a digest"),
        (["sha256:" + "0" * 64], "not in"),
        ([amd, amd], "the image for linux/amd64 twice"),
        ([amd, arm, twin], "two images for linux/amd64"),
        ([amd, oci], "two forms"),
        ([inner], "not one image"),
        ([bare], "names no platform"),
    ):
        with pytest.raises(UserError, match=why) as caught:
            merge(f"{registry.host}/a:1", digests)
        assert (len(caught.value.problems), caught.value.exit_code) == (1, 2)
    assert connect(f"{registry.host}/a:1").digest_of(f"{registry.host}/a:1") is None


def test_a_list_that_the_registry_changed_is_refused() -> None:
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


@given(st.sets(st.sampled_from(("amd64", "arm64", "riscv64", "s390x")), min_size=1))
def test_the_same_images_make_the_same_bytes_in_any_order(platforms: set[str]) -> None:
    entries = [
        {"mediaType": DOCKER_MANIFEST, "digest": name, "platform": {"os": "linux", "architecture": name}}
        for name in platforms
    ]
    assert len({joined(order) for order in permutations(entries)}) == 1
