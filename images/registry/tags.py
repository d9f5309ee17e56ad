"""Tags put on images that are in a registry by digest. A tag that names a different image is never overwritten."""

from __future__ import annotations

from images.plan.references import Reference, parse
from images.registry.client import Registry, connect, digest_like, object_of
from images.registry.refusals import NEW_TAG
from lustrain.problem import UserError, problem


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
