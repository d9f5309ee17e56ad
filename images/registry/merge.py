"""Tags put on images that are in a registry by digest; images of several platforms joined under one tag.

A docker manifest list where the images are docker's, because nodes' enroot before 3.4.1 reads no OCI index
(https://github.com/NVIDIA/JAX-Toolbox/issues/310); an OCI index where they are OCI images; never a mixture, which
some readers refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from images.plan.references import Reference, parse
from images.registry.client import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Registry,
    connect,
    digest_like,
    object_of,
)
from images.registry.read import platform_of
from images.registry.refusals import NEW_TAG
from lustrain.problem import UserError, problem

_LIST_OF = {DOCKER_MANIFEST: DOCKER_LIST, OCI_MANIFEST: OCI_INDEX}


def merge(ref: str, digests: Sequence[str]) -> str:
    """Put a list of images, which are in the repository by digest, under the tag `ref`; returns the list's digest.

    A tag that names the same list already stays. UserError in one line, exit code 2, where the tag names a different image,
    a digest is missing or given twice, two images are for one platform, or one is a list itself.
    """
    reference = parse(ref)
    if not digests:
        raise UserError(problem("digests", [], "nothing to join", fix="push each platform by digest first"))
    registry = connect(reference)
    return _put(registry, reference, *joined([_entry(registry, reference, digest) for digest in digests]))


def tag(ref: str, digest: str) -> str:
    """Put the tag `ref` on the image `digest` of its repository; return the digest that the tag names.

    UserError, exit code 2, where the tag names a different image already.
    """
    reference = parse(ref)
    registry = connect(reference)
    manifest = registry.manifest(reference.at(digest))
    return _put(registry, reference, manifest.body, manifest.media_type)


def confirm(ref: str, digest: str) -> str:
    """Return the digest that the tag `ref` names, which must be the image `digest` of its manifest or its configuration.

    UserError, exit code 2, where it names a different image, as when somebody else pushed it meanwhile.
    """
    reference = parse(ref)
    return _confirmed(connect(reference), reference, digest)


def joined(entries: Sequence[Mapping[str, Any]]) -> tuple[bytes, str]:
    """Return the bytes and media type of a list of images, the same in whatever order they are given.

    UserError where they do not fit.
    """
    kinds = sorted({entry["mediaType"] for entry in entries})
    if len(kinds) > 1:
        why = "images of two forms do not go into one list"
        raise UserError(problem("media types", kinds, why, fix="build all platforms with the same options"))
    ordered = sorted(entries, key=lambda entry: platform_of(entry["platform"]))
    for first, second in pairwise(ordered):
        if (name := platform_of(first["platform"])) == platform_of(second["platform"]):
            digests = [first["digest"], second["digest"]]
            why = f"the image for {name} twice" if digests[0] == digests[1] else f"two images for {name}"
            raise UserError(problem("digests", digests, why, fix="give one a platform"))
    document = {"schemaVersion": 2, "mediaType": _LIST_OF[kinds[0]], "manifests": ordered}
    return json.dumps(document, indent=2).encode(), _LIST_OF[kinds[0]]


def _put(registry: Registry, reference: Reference, body: bytes, media_type: str) -> str:
    digest = digest_like(body)
    if registry.digest_of(reference) is not None:
        # An image whose layers another builder compressed differently has the same configuration.
        return _confirmed(registry, reference, digest, _config(reference, body))
    try:
        registry.put_manifest(reference, body, media_type)
    except UserError:
        # An ECR with immutable tags refuses a second PUT of the same manifest, as when its first answer was lost.
        if registry.digest_of(reference) != digest:
            raise
    return _confirmed(registry, reference, digest)


def _confirmed(registry: Registry, reference: Reference, *accepted: str | None) -> str:
    current = registry.manifest(reference)
    if not {current.digest, _config(reference, current.body)} & {digest for digest in accepted if digest}:
        why = f"the tag already names a different image ({current.digest}); a tag is never overwritten"
        raise UserError(problem("image", str(reference), why, fix=NEW_TAG))
    return current.digest


def _config(reference: Reference, body: bytes) -> str | None:
    """Return the digest of a manifest's configuration; None for an index."""
    config = object_of(str(reference), body).get("config")
    digest = config.get("digest") if isinstance(config, dict) else None
    return digest if isinstance(digest, str) else None


def _entry(registry: Registry, reference: Reference, digest: str) -> dict[str, Any]:
    """Return the entry for an image in a list, https://github.com/opencontainers/image-spec/blob/main/descriptor.md"""
    image = parse(f"{reference.name}@{digest}", "digests")
    manifest = registry.existing(image)
    if manifest is None:
        raise UserError(problem("digests", digest, f"not in {reference.name}", fix="push it there by digest first"))
    if manifest.media_type not in _LIST_OF:
        why = f"not one image but {manifest.media_type}"
        raise UserError(problem("digests", digest, why, fix="build each platform without attestations"))
    name = str(_config(image, manifest.body))
    config = object_of(f"{image} configuration", registry.blob(image, name))
    platform = {key: str(config[key]) for key in ("os", "architecture", "variant") if config.get(key)}
    if len(platform) < 2:
        raise UserError(problem("digests", digest, "its configuration names no platform", fix="build it again"))
    return {"mediaType": manifest.media_type, "size": len(manifest.body), "digest": digest, "platform": platform}
