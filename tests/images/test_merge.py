"""Platforms are joined under one reference, each checked against what the registry holds."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.registry.client import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST, Registry
from images.registry.merge import Child, joined, merge
from images.registry.retry import Patience
from lustrain.problem import UserError
from rehearsal.lab.containers import registry as lab
from tests.images.seeds import put_image

ARM = {"os": "linux", "architecture": "arm64", "variant": "v8"}
_PLATFORMS = ("amd64", "arm64", "riscv64", "s390x")


def client(registry: lab.Registry) -> Registry:
    return Registry(registry.host, None, patience=Patience(2, 0.01, 0.02))


@pytest.mark.slow
def test_two_platforms_become_one_docker_list(registry: lab.Registry) -> None:
    first, second = put_image(registry, "a", None), put_image(registry, "a", None, config=ARM)
    ref = f"{registry.host}/a:1"
    digest = merge(ref, [second, first], to=client(registry))
    held = client(registry).manifest(ref)
    assert (held.digest, held.media_type) == (digest, DOCKER_LIST)
    entries = json.loads(held.body)["manifests"]
    assert [one["digest"] for one in entries] == [first, second]
    assert entries[1]["platform"] == ARM
    assert entries[0]["size"] == len(client(registry).manifest(f"{registry.host}/a@{first}").body)


@pytest.mark.slow
def test_oci_images_become_an_oci_index(registry: lab.Registry) -> None:
    digests = [put_image(registry, "a", None, config=one, media_type=OCI_MANIFEST) for one in ({}, ARM)]
    merge(f"{registry.host}/a:1", digests, to=client(registry))
    assert client(registry).manifest(f"{registry.host}/a:1").media_type == OCI_INDEX


@pytest.mark.slow
def test_joined_again_nothing_is_put_and_the_order_does_not_matter(registry: lab.Registry) -> None:
    digests = [put_image(registry, "a", None, config=one) for one in ({}, ARM)]
    first = merge(f"{registry.host}/a:1", digests, to=client(registry))
    before = [one for one in registry.requests() if one[0] == "PUT"]
    assert merge(f"{registry.host}/a:1", digests[::-1], to=client(registry)) == first
    assert [one for one in registry.requests() if one[0] == "PUT"] == before


@pytest.mark.slow
def test_a_tag_of_another_image_is_never_overwritten(registry: lab.Registry) -> None:
    first, second = put_image(registry, "a", "1"), put_image(registry, "a", None, config=ARM)
    with pytest.raises(UserError, match="never overwritten") as caught:
        merge(f"{registry.host}/a:1", [first, second], to=client(registry))
    assert caught.value.exit_code == 2
    assert client(registry).digest_of(f"{registry.host}/a:1") == first


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_put(registry: lab.Registry) -> None:
    amd, arm = put_image(registry, "a", None), put_image(registry, "a", None, config=ARM)
    twin = put_image(registry, "a", None, b"other layer")
    oci = put_image(registry, "a", None, config=ARM | {"author": "x"}, media_type=OCI_MANIFEST)
    bare = put_image(registry, "a", None, config={"architecture": ""})
    inner = merge(f"{registry.host}/a:inner", [amd, arm], to=client(registry))
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
            merge(f"{registry.host}/a:1", digests, to=client(registry))
        assert len(caught.value.problems) == 1
        assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="has no tag"):
        merge(f"{registry.host}/a@{amd}", [amd], to=client(registry))
    assert client(registry).digest_of(f"{registry.host}/a:1") is None


@given(st.sets(st.sampled_from(_PLATFORMS), min_size=1))
def test_the_same_images_make_the_same_bytes_in_any_order(platforms: set[str]) -> None:
    children = [
        Child(f"sha256:{index:064}", DOCKER_MANIFEST, 10, {"os": "linux", "architecture": one})
        for index, one in enumerate(sorted(platforms))
    ]
    assert len({joined(order) for order in permutations(children)}) == 1
