"""What is an image in a registry is described, what is none is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from images.registry.client import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from images.registry.read import find, image
from lustrain.problem import UserError
from tests.images.shelf import OCI_TAR, Shelf, attestation, config_of, digest_of, entry

LAYERS = [b"sh", b"code"]
HISTORY = [
    {"created_by": "", "comment": "Imported from -"},
    {"created_by": "ENV A=1", "empty_layer": True},
    {"created_by": "COPY /layers/code/ / # buildkit"},
]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def refusal(shelf: Shelf, platform: str | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        image(shelf, shelf.ref, platform)
    (line,) = caught.value.problems
    assert "\n" not in line
    assert "fix: " in line
    assert len(line) < 500
    return caught.value


@pytest.mark.parametrize(
    ("media_type", "more"),
    [
        (DOCKER_MANIFEST, {}),
        (OCI_MANIFEST, {"layer_type": f"{OCI_TAR}+gzip"}),
        (OCI_MANIFEST, {"layer_type": OCI_TAR}),
    ],
)
def test_an_image_is_told_by_layers_with_their_instructions(
    shelf: Shelf, media_type: str, more: dict[str, str]
) -> None:
    digest = shelf.image(LAYERS, config_of(LAYERS, history=HISTORY), media_type=media_type, **more)
    found = image(shelf, shelf.ref)
    assert (found.digest, found.platform, found.ref, found.size) == (digest, "linux/amd64", shelf.ref, 200)
    assert [one.diff_id for one in found.layers] == [digest_of(one) for one in LAYERS]
    assert [one.created_by for one in found.layers] == ["Imported from -", "COPY /layers/code/ / # buildkit"]


def test_a_history_that_does_not_fit_tells_no_instructions(shelf: Shelf) -> None:
    shelf.image(LAYERS, config_of(LAYERS, history=HISTORY[:2]))
    assert [one.created_by for one in image(shelf, shelf.ref).layers] == ["", ""]


@pytest.mark.parametrize("media_type", [OCI_INDEX, DOCKER_LIST])
def test_an_index_gives_the_platform_that_is_asked_for(shelf: Shelf, media_type: str) -> None:
    amd, arm = shelf.image(LAYERS), shelf.image(LAYERS, config_of(LAYERS, architecture="arm64"))
    shelf.index([entry(amd, "linux/amd64"), entry(arm, "linux/arm64")], media_type)
    assert image(shelf, shelf.ref, "linux/arm64").digest == arm
    assert [one.image.platform for one in find(shelf, shelf.ref)] == ["linux/amd64", "linux/arm64"]
    for platform, told in ((None, "fix: add --platform linux/amd64"), ("linux/s390x", "allowed: linux/amd64, linux/")):
        error = refusal(shelf, platform)
        assert (error.exit_code, told in str(error)) == (2, True)


def test_attestations_are_no_images(shelf: Shelf) -> None:
    amd = shelf.image(LAYERS)
    shelf.index([entry(amd, "linux/amd64"), attestation(digest_of(b"proof"))])
    (found,) = find(shelf, shelf.ref)
    assert found.image.digest == amd
    assert found.index is not None
    assert found.index.attestations == 1
    shelf.index([attestation(digest_of(b"proof"))])
    assert "allowed: none" in str(refusal(shelf))


def test_another_platform_than_the_one_image_has_is_said(shelf: Shelf) -> None:
    shelf.image(LAYERS)
    assert image(shelf, shelf.ref, "linux/amd64").platform == "linux/amd64"
    assert "allowed: linux/amd64" in str(refusal(shelf, "linux/arm64"))


FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"


@pytest.mark.parametrize(
    ("config", "more", "told"),
    [
        ({}, {"config_type": "application/vnd.oci.empty.v1+json"}, "artifact = "),
        (config_of(LAYERS), {"layer_type": FOREIGN}, "layer type = "),
        ({"rootfs": config_of(LAYERS)["rootfs"]}, {}, "configuration = "),
        (config_of(LAYERS[:1]), {}, "configuration = "),
        ([], {}, "not a JSON object"),
    ],
)
def test_artifact_or_configuration_that_does_not_fit_is_no_image(
    shelf: Shelf, config: object, more: dict[str, str], told: str
) -> None:
    shelf.image(LAYERS, config, **more)
    error = refusal(shelf)
    assert (error.exit_code, told in str(error)) == (1, True)


@pytest.mark.parametrize(
    ("body", "media_type", "told"),
    [
        (b"{}", "application/vnd.docker.distribution.manifest.v1+prettyjws", "Docker's first form"),
        (b"<html>", "text/html", "media type = 'text/html': not an image"),
        (b"<html>", DOCKER_MANIFEST, "not a JSON object"),
        (b"[" * 100_000, DOCKER_MANIFEST, "not a JSON object"),
        (b"{}", DOCKER_MANIFEST, "descriptor = "),
        ({"config": {"digest": "sha256:../../x", "size": 1}}, DOCKER_MANIFEST, "descriptor = "),
        ({"artifactType": "application/x"}, OCI_MANIFEST, "artifact = 'application/x'"),
        ({"layers": ["x"]}, DOCKER_MANIFEST, "descriptor = 'x'"),
        (b'{"manifests": [{}]}', OCI_INDEX, "descriptor = {}"),
        (b"{}", OCI_INDEX, "allowed: none"),
    ],
)
def test_an_odd_answer_is_one_line(shelf: Shelf, body: bytes | Mapping[str, Any], media_type: str, told: str) -> None:
    """An object is a manifest that is sound but for it."""
    shelf.put(body if isinstance(body, bytes) else {**shelf.document([]), **body}, media_type)
    assert told in str(refusal(shelf))


def test_artifact_beside_the_image_is_none_whatever_its_platform(shelf: Shelf) -> None:
    """SOCI's index of an image's files says the image's own platform."""
    amd, soci = shelf.image(LAYERS), shelf.image([b"index"])
    kind = "application/vnd.amazon.soci.index.v2+json"
    config = "application/vnd.oci.image.config.v1+json"
    shelf.index([entry(amd, "linux/amd64", artifactType=config), entry(soci, "linux/amd64", artifactType=kind)])
    assert image(shelf, shelf.ref, "linux/amd64").digest == amd
    (found,) = find(shelf, shelf.ref)
    assert found.index is not None
    assert found.index.attestations == 1
