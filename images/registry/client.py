"""A registry client: manifests, blobs and tags, each byte checked against its digest.

https://distribution.github.io/distribution/spec/api/ ; credentials, redirects and retries are in `images.registry.http`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from images.plan.references import Reference, is_digest, parse
from images.registry.credentials import Credentials, for_registry
from images.registry.http import Response, Transport
from lustrain.problem import FAILED, UserError, problem

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
ACCEPTED = ", ".join((DOCKER_MANIFEST, DOCKER_LIST, OCI_MANIFEST, OCI_INDEX))


class Manifest(NamedTuple):
    """A manifest or index as a registry holds it."""

    digest: str
    """Computed from the bytes."""
    media_type: str
    body: bytes


class Registry:
    """A client of one registry. `find` gives the credentials for its host; it is called again where they are refused."""

    def __init__(self, host: str, find: Callable[[str], Credentials | None] = for_registry) -> None:
        self.transport = Transport(host, find)

    def manifest(self, ref: str | Reference) -> Manifest:
        """Return the manifest or index of a reference, its bytes checked against the digest."""
        reference = _reference(ref)
        return _checked(reference, self._get_manifest(reference))

    def existing(self, ref: str | Reference) -> Manifest | None:
        """Return the manifest of a reference; None where the registry has none."""
        reference = _reference(ref)
        answer = self._get_manifest(reference, good=(200, 404))
        return None if answer.status == 404 else _checked(reference, answer)

    def digest_of(self, ref: str | Reference) -> str | None:
        """Return the digest that a tag names now; None where the tag is free."""
        manifest = self.existing(ref)
        return manifest.digest if manifest else None

    def blob(self, ref: str | Reference, digest: str) -> bytes:
        """Return a small blob of a reference's repository, like a configuration."""
        if not is_digest(digest):
            raise UserError(problem("blob", digest, "not a digest", allowed="sha256: and 64 hexadecimal digits"))
        reference = _reference(ref)
        body = self.transport.request("GET", reference, f"blobs/{digest}").body
        if (actual := digest_like(body, digest)) != digest:
            why = f"the bytes have a different {digest.partition(':')[0]} sum: damaged in the registry or on the way"
            raise UserError(problem(f"{reference.name} blob", actual, why, digest, "push the image again"), FAILED)
        return body

    def put_manifest(self, ref: str | Reference, body: bytes, media_type: str) -> None:
        """Put a manifest under a tag or its digest. What the registry has then, `manifest` tells."""
        reference = _reference(ref)
        path, headers = f"manifests/{reference.wanted}", {"Content-Type": media_type}
        self.transport.request("PUT", reference, path, headers=headers, body=body, good=(200, 201))

    def _get_manifest(self, reference: Reference, good: tuple[int, ...] = (200,)) -> Response:
        path, headers = f"manifests/{reference.wanted}", {"Accept": ACCEPTED}
        return self.transport.request("GET", reference, path, headers=headers, good=good)


def connect(ref: str | Reference) -> Registry:
    """Return the registry of a reference, with the credentials that this user has for it."""
    return Registry(_reference(ref).registry)


def digest_like(body: bytes, like: str = "") -> str:
    """Return the digest of these bytes, by the algorithm of another digest, else by sha256."""
    algorithm = like.partition(":")[0] if is_digest(like) else "sha256"
    return f"{algorithm}:{hashlib.new(algorithm, body).hexdigest()}"


def object_of(name: str, body: bytes) -> Mapping[str, Any]:
    """Return the JSON object in `body`; UserError where it is something else."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        why = "not a JSON object: the registry or a proxy answers with something else"
        raise UserError(problem(name, body[:40], why, fix="push the image again"), FAILED)
    return document


def _reference(ref: str | Reference) -> Reference:
    return parse(ref) if isinstance(ref, str) else ref


def _checked(reference: Reference, answer: Response) -> Manifest:
    expected = reference.digest or answer.headers.get("Docker-Content-Digest", "")
    digest = digest_like(answer.body, expected)
    if is_digest(expected) and expected != digest:
        why = "the manifest does not have the requested digest: the registry or a proxy changes it"
        fix = "push the image again, and see which proxy is in between"
        raise UserError(problem(f"{reference} digest", digest, why, allowed=expected, fix=fix), FAILED)
    return Manifest(digest, answer.headers.get("Content-Type", "").partition(";")[0].strip(), answer.body)
