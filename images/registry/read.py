"""Images read from a registry without pulling a layer: manifest, configuration and layers.

Manifests: https://github.com/opencontainers/image-spec/blob/main/manifest.md and
https://distribution.github.io/distribution/spec/manifest-v2-2/ . Every byte read is checked against the digest it is named by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from images.model import Image, Layer
from images.plan.references import Reference, parse
from images.registry.client import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST, Registry, object_of
from lustrain.problem import FAILED, UserError, problem

MANIFESTS, INDEXES = (DOCKER_MANIFEST, OCI_MANIFEST), (DOCKER_LIST, OCI_INDEX)
_CONFIGS = ("application/vnd.docker.container.image.v1+json", "application/vnd.oci.image.config.v1+json")
_LAYERS = re.compile(
    r"application/vnd\.(docker\.image\.rootfs\.diff\.tar(\.gzip|\.zstd)?|oci\.image\.layer\.v1\.tar(\+gzip|\+zstd)?)"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BUILT_HERE = "build it with `fab image-build --push`"


@dataclass(frozen=True)
class Index:
    """The list through which an image was found."""

    digest: str
    media_type: str
    platforms: tuple[str, ...]
    attestations: int
    """How many of its entries are provenance or SBOM and no image."""


@dataclass(frozen=True)
class Found:
    """An image with what its records leave out: how the registry words it."""

    image: Image
    media_type: str
    layer_types: tuple[str, ...]
    index: Index | None
    created: str
    """As the configuration says it, ISO 8601; empty where it does not."""


def image(registry: Registry, ref: str, platform: str | None = None) -> Image:
    """Return the image behind a reference; `platform` (linux/amd64) chooses where there are several. UserError in one line."""
    found = find(registry, ref, platform)
    if len(found) > 1:
        named = [one.image.platform for one in found]
        why = "the reference stands for several platforms"
        raise UserError(problem(ref, named, why, allowed="one of them", fix=f"add --platform {named[0]}"))
    return found[0].image


def find(registry: Registry, ref: str, platform: str | None = None) -> tuple[Found, ...]:
    """Every image behind a reference, one a platform, or that of one platform; attestations are none. Raises like `image`."""
    asked = parse(ref)
    digest, media_type, parsed = _manifest(registry, asked)
    if media_type not in INDEXES:
        found = _found(registry, asked, digest, media_type, parsed, None)
        if platform and found.image.platform != platform:
            raise _no_platform(ref, platform, [found.image.platform])
        return (found,)
    entries = [_described(ref, one) for one in parsed.get("manifests") or ()]
    images = [one for one in entries if not _attests(one)]
    named = tuple(_platform(one.get("platform") or {}) for one in images)
    index = Index(digest, media_type, named, len(entries) - len(images))
    chosen = [one for one, of in zip(images, named, strict=True) if platform in (None, of)]
    if not chosen:
        raise _no_platform(ref, platform, named)
    result = []
    for one in chosen:
        own = asked.at(one["digest"])
        result.append(_found(registry, own, *_manifest(registry, own), index))
    return tuple(result)


def _manifest(registry: Registry, ref: Reference) -> tuple[str, str, Mapping[str, Any]]:
    """Digest, media type and document."""
    digest, media_type, body = registry.manifest(ref)
    if media_type not in (*MANIFESTS, *INDEXES):
        old = "of Docker's first form, which has no digests to deploy by" if ".v1+" in media_type else "no image"
        allowed = "a docker schema 2 or OCI manifest or index"
        raise UserError(problem(f"{ref} media type", media_type, old, allowed=allowed, fix=_BUILT_HERE), FAILED)
    return digest, media_type, object_of(str(ref), body)


def _found(
    registry: Registry, asked: Reference, digest: str, media_type: str, manifest: Mapping[str, Any], index: Index | None
) -> Found:
    ref = str(asked)
    described = _described(ref, manifest.get("config"))
    if described.get("mediaType") not in _CONFIGS or manifest.get("artifactType"):
        kind = manifest.get("artifactType") or described.get("mediaType")
        raise UserError(
            problem(f"{ref} artifact", kind, "an artifact, not an image that runs", fix=_BUILT_HERE), FAILED
        )
    config = object_of(f"{ref} configuration", registry.blob(asked, described["digest"]))
    layers = [_described(ref, one) for one in manifest.get("layers") or ()]
    for one in layers:
        if not _LAYERS.fullmatch(str(one.get("mediaType"))):
            why = "a layer that is not in the registry or not a tar: nodes cannot pull it from here"
            raise UserError(problem(f"{ref} layer type", one.get("mediaType"), why, fix=_BUILT_HERE), FAILED)
    diff_ids = [str(one) for one in _of(config, "rootfs").get("diff_ids") or ()]
    if len(diff_ids) != len(layers) or not config.get("architecture") or not config.get("os"):
        why = f"the configuration does not fit: {len(layers)} layers, {len(diff_ids)} diff-ids, or no platform"
        raise UserError(problem(f"{ref} configuration", described["digest"], why, fix=_BUILT_HERE), FAILED)
    steps = [
        str(one.get("created_by") or one.get("comment") or "")
        for one in config.get("history") or ()
        if not one.get("empty_layer")
    ]
    # A history is optional, and of no use where it does not tell the layers apart.
    steps = steps if len(steps) == len(layers) else [""] * len(layers)
    told = zip(layers, diff_ids, steps, strict=True)
    return Found(
        image=Image(
            ref=ref,
            digest=digest,
            platform=_platform(config),
            layers=tuple(Layer(one["digest"], one["size"], diff_id, step) for one, diff_id, step in told),
            config=config,
        ),
        media_type=media_type,
        layer_types=tuple(str(one["mediaType"]) for one in layers),
        index=index,
        created=str(config.get("created") or ""),
    )


def _described(ref: str, descriptor: Any) -> Mapping[str, Any]:
    """https://github.com/opencontainers/image-spec/blob/main/descriptor.md"""
    if (
        not isinstance(descriptor, dict)
        or not _DIGEST.fullmatch(str(descriptor.get("digest")))
        or not isinstance(descriptor.get("size"), int)
    ):
        allowed = "mediaType, a sha256 digest and a size"
        raise UserError(
            problem(f"{ref} descriptor", descriptor, "incomplete", allowed=allowed, fix=_BUILT_HERE), FAILED
        )
    return descriptor


def _attests(entry: Mapping[str, Any]) -> bool:
    """https://docs.docker.com/build/metadata/attestations/attestation-storage/"""
    marked = (entry.get("annotations") or {}).get("vnd.docker.reference.type") == "attestation-manifest"
    return marked or _platform(entry.get("platform") or {}) == "unknown/unknown"


def _platform(of: Mapping[str, Any]) -> str:
    return "/".join(str(of[key]) for key in ("os", "architecture", "variant") if of.get(key))


def _of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def _no_platform(ref: str, platform: str | None, there: Sequence[str]) -> UserError:
    allowed = ", ".join(there) or "none"
    fix = "ask for one of these, or build and push that platform"
    return UserError(problem(f"{ref} platform", platform, "not in the registry", allowed=allowed, fix=fix))
