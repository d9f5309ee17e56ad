"""Images read from a registry without pulling a layer: manifest, configuration and layers.

Manifests: https://github.com/opencontainers/image-spec/blob/main/manifest.md and
https://distribution.github.io/distribution/spec/manifest-v2-2/ . All bytes are checked against their digests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from images.model import Image, Layer
from images.plan.references import Reference, is_digest, parse
from images.registry.client import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST, Manifest, Registry, object_of
from lustrain.problem import FAILED, UserError, problem

MANIFESTS, INDEXES = (DOCKER_MANIFEST, OCI_MANIFEST), (DOCKER_LIST, OCI_INDEX)
_CONFIGS = ("application/vnd.docker.container.image.v1+json", "application/vnd.oci.image.config.v1+json")
_LAYERS = re.compile(
    r"application/vnd\.(docker\.image\.rootfs\.diff\.tar(\.gzip|\.zstd)?|oci\.image\.layer\.v1\.tar(\+gzip|\+zstd)?)"
)


@dataclass(frozen=True)
class Index:
    """The list that an image is in."""

    digest: str
    attestations: int
    """How many of its entries are no image: provenance, SBOM, indexes of its files."""


@dataclass(frozen=True)
class RegistryImage:
    """An image, and how its registry describes it."""

    image: Image
    media_type: str
    layer_types: tuple[str, ...]
    index: Index | None
    created: str
    """ISO 8601, from the configuration; empty where that has no time."""


def image(registry: Registry, ref: str, platform: str | None = None) -> Image:
    """Return the image behind a reference; `platform` (linux/amd64) chooses where there are several. UserError in one line."""
    images = find(registry, ref, platform)
    if len(images) > 1:
        platforms = [each.image.platform for each in images]
        why = "the reference stands for several platforms"
        raise UserError(problem(ref, platforms, why, allowed="one of them", fix=f"add --platform {platforms[0]}"))
    return images[0].image


def find(registry: Registry, ref: str, platform: str | None = None) -> tuple[RegistryImage, ...]:
    """Return the images behind a reference, one for each platform, or only that of `platform`; artifacts are left out.

    UserError like `image`.
    """
    reference = parse(ref)
    manifest, document = _manifest(registry, reference)
    if manifest.media_type not in INDEXES:
        single = _described(registry, reference, manifest, document, None)
        if platform and single.image.platform != platform:
            raise _no_platform(ref, platform, [single.image.platform])
        return (single,)
    entries = [_descriptor(ref, entry) for entry in document.get("manifests") or ()]
    kept = [entry for entry in entries if not _attests(entry) and not _is_artifact(entry)]
    images = [(entry["digest"], platform_of(entry.get("platform") or {})) for entry in kept]
    index = Index(manifest.digest, len(entries) - len(kept))
    chosen = [reference.at(digest) for digest, name in images if platform in (None, name)]
    if not chosen:
        raise _no_platform(ref, platform, [name for _, name in images])
    return tuple(_described(registry, each, *_manifest(registry, each), index) for each in chosen)


def platform_of(config: Mapping[str, Any]) -> str:
    """Return the platform of a configuration or of an entry in an index, like linux/arm64/v8."""
    return "/".join(str(config[key]) for key in ("os", "architecture", "variant") if config.get(key))


def _manifest(registry: Registry, ref: Reference) -> tuple[Manifest, Mapping[str, Any]]:
    manifest = registry.manifest(ref)
    if manifest.media_type not in (*MANIFESTS, *INDEXES):
        old = ".v1+" in manifest.media_type
        why = "of Docker's first form, which has no digests to deploy by" if old else "not an image"
        raise _wrong(ref, "media type", manifest.media_type, why, "a docker schema 2 or OCI manifest or index")
    return manifest, object_of(str(ref), manifest.body)


def _described(
    registry: Registry, ref: Reference, manifest: Manifest, document: Mapping[str, Any], index: Index | None
) -> RegistryImage:
    described = _descriptor(ref, document.get("config"))
    kind = document.get("artifactType") or described.get("mediaType")
    if kind not in _CONFIGS:
        raise _wrong(ref, "artifact", kind, "an artifact, not an image that runs")
    layers = [_descriptor(ref, layer) for layer in document.get("layers") or ()]
    for layer in layers:
        if not _LAYERS.fullmatch(str(layer.get("mediaType"))):
            why = "a layer that is not in the registry or not a tar: nodes cannot pull it from here"
            raise _wrong(ref, "layer type", layer.get("mediaType"), why)
    config = object_of(f"{ref} configuration", registry.blob(ref, described["digest"]))
    rootfs = config.get("rootfs")
    diff_ids = [str(each) for each in (rootfs.get("diff_ids") if isinstance(rootfs, dict) else None) or ()]
    if len(diff_ids) != len(layers) or not config.get("architecture") or not config.get("os"):
        why = f"the configuration does not fit: {len(layers)} layers, {len(diff_ids)} diff-ids, or no platform"
        raise _wrong(ref, "configuration", described["digest"], why)
    history = [step for step in config.get("history") or () if not step.get("empty_layer")]
    steps = [str(step.get("created_by") or step.get("comment") or "") for step in history]
    # A history is optional, and of no use where it does not have one step for each layer.
    steps = steps if len(steps) == len(layers) else [""] * len(layers)
    return RegistryImage(
        image=Image(
            ref=str(ref),
            digest=manifest.digest,
            platform=platform_of(config),
            layers=tuple(
                Layer(layer["digest"], layer["size"], diff_id, step)
                for layer, diff_id, step in zip(layers, diff_ids, steps, strict=True)
            ),
            config=config,
        ),
        media_type=manifest.media_type,
        layer_types=tuple(str(layer["mediaType"]) for layer in layers),
        index=index,
        created=str(config.get("created") or ""),
    )


def _descriptor(ref: str | Reference, value: Any) -> Mapping[str, Any]:
    """Return a descriptor, https://github.com/opencontainers/image-spec/blob/main/descriptor.md"""
    good = isinstance(value, dict) and isinstance(value.get("size"), int) and is_digest(str(value.get("digest")))
    if not good:
        raise _wrong(ref, "descriptor", value, "incomplete", "mediaType, a sha256 digest and a size")
    return dict(value)


def _attests(entry: Mapping[str, Any]) -> bool:
    """https://docs.docker.com/build/metadata/attestations/attestation-storage/"""
    marked = (entry.get("annotations") or {}).get("vnd.docker.reference.type") == "attestation-manifest"
    return marked or platform_of(entry.get("platform") or {}) == "unknown/unknown"


def _is_artifact(entry: Mapping[str, Any]) -> bool:
    """SOCI puts one beside the image, with the image's platform.
    https://github.com/awslabs/soci-snapshotter/blob/main/docs/soci-index-manifest-v2.md"""
    return entry.get("artifactType") not in (None, "", *_CONFIGS)


def _wrong(ref: str | Reference, part: str, value: object, why: str, allowed: str = "") -> UserError:
    return UserError(problem(f"{ref} {part}", value, why, allowed, "build it with `fab image-build --push`"), FAILED)


def _no_platform(ref: str, platform: str | None, present: Sequence[str]) -> UserError:
    allowed = ", ".join(present) or "none"
    fix = "name one of these, or build and push that platform"
    return UserError(problem(f"{ref} platform", platform, "not in the registry", allowed=allowed, fix=fix))
