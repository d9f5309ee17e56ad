"""An image read from its registry without pulling it: what is an image is described, what is none is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from images.plan.references import Reference
from images.registry.client import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from images.registry.read import find, image
from lustrain.problem import UserError
from rehearsal.lab.containers.registry import Registry
from tests.images.hand import OCI_TAR, Hand, attestation, entry
from tests.images.tars import config_of, layer, sha256

TARS = [layer({"bin/sh": b"x" * 5000}), layer({"opt/code": b"y"})]
HISTORY = [
    {"created_by": "", "comment": "Imported from -"},
    {"created_by": "ENV A=1", "empty_layer": True},
    {"created_by": "COPY /layers/code/ / # buildkit"},
]


@pytest.fixture
def hand(session_registry: Registry) -> Hand:
    """A repository of its own in a registry that lives on: starting one for each test takes longer than the tests."""
    return Hand(session_registry, f"team/{uuid4().hex}")


@pytest.mark.parametrize(
    ("media_type", "layer_type"),
    [(DOCKER_MANIFEST, "gzip"), (OCI_MANIFEST, f"{OCI_TAR}+gzip"), (OCI_MANIFEST, OCI_TAR)],
)
def test_an_image_is_told_by_layers_with_their_instructions(hand: Hand, media_type: str, layer_type: str) -> None:
    more = {} if layer_type == "gzip" else {"layer_type": layer_type}
    digest = hand.image(TARS, config_of(TARS, history=HISTORY), media_type=media_type, **more)
    found = image(hand.client, hand.ref())
    assert (found.digest, found.platform, found.ref) == (digest, "linux/amd64", hand.ref())
    assert [one.diff_id for one in found.layers] == [sha256(tar) for tar in TARS]
    assert [one.created_by for one in found.layers] == ["Imported from -", "COPY /layers/code/ / # buildkit"]
    assert found.size == sum(one.size for one in found.layers) > 0
    assert image(hand.client, f"{hand.name}@{digest}").layers == found.layers


def test_reading_an_image_pulls_no_layer(hand: Hand) -> None:
    hand.image(TARS)
    before = len(hand.lab.requests())
    found = image(hand.client, hand.ref())
    asked = [path for method, path, _ in hand.lab.requests()[before:] if method == "GET" and "/blobs/" in path]
    assert len(asked) == 1
    assert not any(one.digest in asked[0] for one in found.layers)


def test_a_history_that_does_not_fit_tells_no_instructions(hand: Hand) -> None:
    hand.image(TARS, config_of(TARS, history=HISTORY[:2]))
    assert [one.created_by for one in image(hand.client, hand.ref()).layers] == ["", ""]


def arm(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "architecture": "arm64"}


@pytest.mark.parametrize("media_type", [OCI_INDEX, DOCKER_LIST])
def test_an_index_gives_the_platform_that_is_asked_for(hand: Hand, media_type: str) -> None:
    amd = hand.image(TARS, tag="amd")
    other = hand.image(TARS[:1], arm(config_of(TARS[:1])), tag="arm")
    entries = [entry(amd, "linux/amd64"), entry(other, "linux/arm64")]
    hand.index([{**one, "mediaType": DOCKER_MANIFEST} for one in entries], media_type)
    assert image(hand.client, hand.ref(), "linux/arm64").digest == other
    assert [one.image.platform for one in find(hand.client, hand.ref())] == ["linux/amd64", "linux/arm64"]
    with pytest.raises(UserError, match=r"several platforms.*--platform linux/amd64") as caught:
        image(hand.client, hand.ref())
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match=r"linux/s390x.*allowed: linux/amd64, linux/arm64") as caught:
        image(hand.client, hand.ref(), "linux/s390x")
    assert caught.value.exit_code == 2


def test_attestations_are_no_images(hand: Hand) -> None:
    amd = hand.image(TARS, media_type=OCI_MANIFEST, layer_type=f"{OCI_TAR}+gzip", tag="amd")
    hand.image([], config={}, media_type=OCI_MANIFEST, tag="att")
    proof = sha256(hand.client.manifest(hand.ref("att")).body)
    hand.index([entry(amd, "linux/amd64"), attestation(proof)])
    (found,) = find(hand.client, hand.ref())
    assert found.image.digest == amd
    assert found.index is not None
    assert (found.index.attestations, found.index.platforms) == (1, ("linux/amd64",))
    hand.index([attestation(proof)], tag="only")
    with pytest.raises(UserError, match="allowed: none"):
        image(hand.client, hand.ref("only"))


def test_another_platform_than_the_one_image_has_is_said(hand: Hand) -> None:
    hand.image(TARS)
    assert image(hand.client, hand.ref(), "linux/amd64").platform == "linux/amd64"
    with pytest.raises(UserError, match=r"linux/arm64.*allowed: linux/amd64"):
        image(hand.client, hand.ref(), "linux/arm64")


def _artifact(hand: Hand) -> None:
    hand.image(TARS[:1], media_type=OCI_MANIFEST, config_type="application/vnd.cncf.helm.config.v1+json")


def _empty_config(hand: Hand) -> None:
    hand.image(TARS[:1], media_type=OCI_MANIFEST, config_type="application/vnd.oci.empty.v1+json", config={})


def _no_platform(hand: Hand) -> None:
    hand.image(TARS, {"rootfs": config_of(TARS)["rootfs"]})


def _too_few_diff_ids(hand: Hand) -> None:
    hand.image(TARS, config_of(TARS[:1]))


def _config_is_a_list(hand: Hand) -> None:
    document = hand.document(TARS)
    document["config"] = {**document["config"], "digest": hand.blob(b"[]"), "size": 2}
    hand.manifest(document, DOCKER_MANIFEST)


ODD: dict[str, tuple[Callable[[Hand], None], str]] = {
    "an artifact": (_artifact, "helm.*not an image that runs"),
    "an empty configuration": (_empty_config, "oci.empty.*not an image that runs"),
    "no platform": (_no_platform, "does not fit"),
    "other layers": (_too_few_diff_ids, "2 layers, 1 diff-ids"),
    "no object": (_config_is_a_list, "not a JSON object"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_image_is_one_line(hand: Hand, name: str) -> None:
    put, told = ODD[name]
    put(hand)
    with pytest.raises(UserError, match=told) as caught:
        image(hand.client, hand.ref())
    assert len(caught.value.problems) == 1
    assert "fix:" in caught.value.problems[0]
    assert "\n" not in caught.value.problems[0]


class Odd:
    """A source that answers what no registry here would store; it keeps one manifest and the blobs it is given."""

    def __init__(self, body: bytes, media_type: str = DOCKER_MANIFEST, blobs: dict[str, bytes] | None = None) -> None:
        self.body, self.media_type, self.blobs = body, media_type, blobs or {}
        self.digest = sha256(body)

    def manifest(self, ref: Reference) -> tuple[str, str, bytes]:
        return self.digest, self.media_type, self.body

    def blob(self, ref: Reference, digest: str) -> bytes:
        return self.blobs[digest]


def _manifest(**more: Any) -> bytes:
    config = json.dumps(config_of([])).encode()
    described = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 1, "digest": sha256(config)}
    return json.dumps({"config": described, "layers": [], **more}).encode()


FOREIGN = {"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "size": 1, "digest": sha256(b"")}


@pytest.mark.parametrize(
    ("body", "media_type", "told"),
    [
        (b"{}", "application/vnd.docker.distribution.manifest.v1+prettyjws", "Docker's first form"),
        (b"<html>", "text/html", "text/html.*no image"),
        (b"<html>", DOCKER_MANIFEST, "not a JSON object"),
        (b"[" * 100_000, DOCKER_MANIFEST, "not a JSON object"),
        (b"{}", DOCKER_MANIFEST, "descriptor.*incomplete"),
        (_manifest(config={"digest": "sha256:../../x", "size": 1}), DOCKER_MANIFEST, "incomplete"),
        (_manifest(artifactType="application/x"), OCI_MANIFEST, "not an image that runs"),
        (_manifest(layers=[FOREIGN]), DOCKER_MANIFEST, "not in the registry or not a tar"),
        (_manifest(layers=["x"]), DOCKER_MANIFEST, "incomplete"),
        (b'{"manifests": [{}]}', OCI_INDEX, "incomplete"),
        (b"{}", OCI_INDEX, "allowed: none"),
    ],
)
def test_an_odd_answer_is_one_line(body: bytes, media_type: str, told: str) -> None:
    blobs = {sha256(one): one for one in [json.dumps(config_of([])).encode()]}
    with pytest.raises(UserError, match=told) as caught:
        image(Odd(body, media_type, blobs), "127.0.0.1:5000/x:1")
    assert len(caught.value.problems) == 1
    assert len(caught.value.problems[0]) < 500


def test_a_missing_image_and_a_mistyped_reference_are_one_line(hand: Hand) -> None:
    for ref in (hand.ref("absent"), f"{hand.name}@{sha256(b'')}", "http://x/y", "UPPER/x"):
        with pytest.raises(UserError) as caught:
            image(hand.client, ref)
        assert len(caught.value.problems) == 1
