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
from tests.images.seeds import digest_of, put_image

ARM = {"os": "linux", "architecture": "arm64", "variant": "v8"}
_PLATFORMS = ("amd64", "arm64", "riscv64", "s390x")


@pytest.mark.slow
def test_two_platforms_become_one_docker_list(registry: lab.Registry) -> None:
    first, second = put_image(registry, "a", None), put_image(registry, "a", None, config=ARM)
    ref = f"{registry.host}/a:1"
    digest = merge(ref, [second, first])
    held = connect(ref).manifest(ref)
    assert (held.digest, held.media_type) == (digest, DOCKER_LIST)
    entries = json.loads(held.body)["manifests"]
    assert [one["digest"] for one in entries] == [first, second]
    assert entries[1]["platform"] == ARM
    assert entries[0]["size"] == len(connect(f"{registry.host}/a@{first}").manifest(f"{registry.host}/a@{first}").body)


@pytest.mark.slow
def test_oci_images_become_an_oci_index(registry: lab.Registry) -> None:
    digests = [put_image(registry, "a", None, config=one, media_type=OCI_MANIFEST) for one in ({}, ARM)]
    merge(f"{registry.host}/a:1", digests)
    assert connect(f"{registry.host}/a:1").manifest(f"{registry.host}/a:1").media_type == OCI_INDEX


@pytest.mark.slow
def test_joined_again_nothing_is_put_and_the_order_does_not_matter(registry: lab.Registry) -> None:
    digests = [put_image(registry, "a", None, config=one) for one in ({}, ARM)]
    first = merge(f"{registry.host}/a:1", digests)
    before = [one for one in registry.requests() if one[0] == "PUT"]
    assert merge(f"{registry.host}/a:1", digests[::-1]) == first
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
        assert len(caught.value.problems) == 1
        assert caught.value.exit_code == 2
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


@given(st.sets(st.sampled_from(_PLATFORMS), min_size=1))
def test_the_same_images_make_the_same_bytes_in_any_order(platforms: set[str]) -> None:
    entries = [
        {
            "mediaType": DOCKER_MANIFEST,
            "digest": f"sha256:{index:064}",
            "platform": {"os": "linux", "architecture": name},
        }
        for index, name in enumerate(sorted(platforms))
    ]
    assert len({joined(order) for order in permutations(entries)}) == 1
