"""Images of several platforms joined under one tag.

A docker manifest list where the images are docker's, because nodes' enroot before 3.4.1 reads no OCI index
(https://github.com/NVIDIA/JAX-Toolbox/issues/310); an OCI index where they are OCI images; never a mixture, which
some readers refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from images.plan.references import Reference, is_digest, parse
from images.registry.client import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Registry,
    connect,
    digest_like,
    taken,
)
from lustrain.problem import FAILED, UserError, problem

_LIST_OF = {DOCKER_MANIFEST: DOCKER_LIST, OCI_MANIFEST: OCI_INDEX}


@dataclass(frozen=True)
class Child:
    """One platform's image, as its registry describes it."""

    digest: str
    media_type: str
    size: int
    """Bytes of its manifest."""
    platform: Mapping[str, str]
    """os, architecture and, where there is one, variant."""

    @property
    def named(self) -> str:
        return "/".join(self.platform.values())


def merge(
    ref: str,
    digests: Sequence[str],
    *,
    to: Registry | None = None,
) -> str:
    """Put a list of images, which are in the repository by digest, under the tag `ref`; returns the list's digest.

    The same list under the tag already is well. UserError in one line, exit code 2, where the tag is another image's, a
    digest is not there or twice, two are for one platform, or one is a list itself.
    """
    reference = _tagged(ref)
    if not digests:
        raise UserError(problem("digests", [], "nothing to join", fix="push each platform by digest first"))
    there = to or connect(reference)
    return _put(there, reference, *joined([_child(there, reference, digest) for digest in digests]))


def name(ref: str, digest: str, *, to: Registry | None = None) -> str:
    """Put the tag `ref` on what is in its repository under `digest`; a tag is never taken from another image (exit code 2)."""
    reference = _tagged(ref)
    there = to or connect(reference)
    found = there.manifest(reference.at(digest))
    return _put(there, reference, found.body, found.media_type)


def digest_under(ref: str, *, to: Registry | None = None) -> str | None:
    """Return the digest that a tag names in its registry; None where the tag is free."""
    reference = _tagged(ref)
    return (to or connect(reference)).digest_of(reference)


def confirm(ref: str, digest: str, *, to: Registry | None = None) -> str:
    """Return the digest that the tag `ref` names, which must be the image `digest` of its manifest or its configuration.

    UserError, exit code 2, where the tag names a different image, as when somebody else pushed it meanwhile.
    """
    reference = _tagged(ref)
    registry = to or connect(reference)
    held = registry.manifest(reference).digest
    if digest not in (held, _config(registry, reference.at(held))):
        raise taken(reference, held)
    return held


def _tagged(ref: str) -> Reference:
    reference = parse(ref)
    if reference.digest or not reference.tag:
        raise UserError(problem("image", ref, "has no tag", allowed="registry/repository:tag"))
    return reference


def _put(there: Registry, reference: Reference, body: bytes, media_type: str) -> str:
    wanted = digest_like(body)
    found = there.digest_of(reference)
    if found == wanted:
        return wanted
    if found is not None and _config(there, reference.at(found)) == json.loads(body).get("config", {}).get(
        "digest", ""
    ):
        # The same image, whose layers another builder has compressed in another way.
        return found
    if found is not None:
        raise taken(reference, found)
    try:
        there.put_manifest(reference, body, media_type)
    except UserError:
        # An ECR whose tags are immutable refuses to be told twice what it has taken, as when its first answer was lost.
        if there.digest_of(reference) != wanted:
            raise
    held = there.manifest(reference).digest
    if held != wanted:
        why = "the registry holds a different digest than was pushed: the tag was pushed meanwhile, or a proxy lies"
        raise UserError(problem(f"{reference} digest", held, why, allowed=wanted, fix="choose another tag"), FAILED)
    return held


def _config(there: Registry, reference: Reference) -> str | None:
    try:
        return there.config_digest(reference)
    except UserError:
        return None


def joined(children: Sequence[Child]) -> tuple[bytes, str]:
    """Return the list's bytes and media type, the same for the same images in whatever order. UserError where they do not
    fit."""
    kinds = sorted({child.media_type for child in children})
    if len(kinds) > 1:
        why = "images of two forms do not go into one list"
        raise UserError(problem("media types", kinds, why, fix="build all platforms with the same options"))
    ordered = sorted(children, key=lambda child: child.named)
    for one, other in pairwise(ordered):
        if one.named == other.named:
            why = f"two images for {one.named}" if one.digest != other.digest else f"the image for {one.named} twice"
            raise UserError(problem("digests", [one.digest, other.digest], why, fix="give one a platform"))
    media_type = _LIST_OF[kinds[0]]
    entries = [
        {"mediaType": one.media_type, "size": one.size, "digest": one.digest, "platform": dict(one.platform)}
        for one in ordered
    ]
    document = {"schemaVersion": 2, "mediaType": media_type, "manifests": entries}
    return json.dumps(document, indent=2).encode(), media_type


def _child(there: Registry, reference: Reference, digest: str) -> Child:
    if not is_digest(digest):
        raise UserError(problem("digests", digest, "not a digest", allowed="sha256: and 64 hexadecimal digits"))
    image = reference.at(digest)
    if there.digest_of(image) is None:
        why = f"not in {reference.name}"
        raise UserError(problem("digests", digest, why, fix="push it there by digest first"))
    manifest = there.manifest(image)
    if manifest.media_type not in _LIST_OF:
        why = f"not one image but {manifest.media_type}"
        raise UserError(problem("digests", digest, why, fix="build each platform without attestations"))
    config = there.config(image)
    platform = {key: str(config[key]) for key in ("os", "architecture", "variant") if config.get(key)}
    if len(platform) < 2:
        raise UserError(problem("digests", digest, "its configuration names no platform", fix="build it again"))
    return Child(digest, manifest.media_type, len(manifest.body), platform)
