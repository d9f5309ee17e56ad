"""A registry client: manifests, blobs and tags, each byte checked against its digest.

https://distribution.github.io/distribution/spec/api/ ; credentials, redirects and second tries are in `images.registry.http`.

Not oras-py, which compares no manifest with its digest and loses the cause of an error; not `docker buildx imagetools`, which
needs a docker program and login for every read, and moves a tag without asking.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import requests
from urllib3.exceptions import HTTPError

from images.plan.references import Reference, is_digest, parse
from images.registry import credentials as known
from images.registry.credentials import Credentials
from images.registry.http import Transport, reason
from images.registry.retry import Patience
from lustrain.problem import FAILED, UserError, problem

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
ACCEPTED = ", ".join((DOCKER_MANIFEST, DOCKER_LIST, OCI_MANIFEST, OCI_INDEX))
NEW_TAG = "commit, which makes a new tag, or --suffix r2"
LONGEST_MANIFEST = 4 << 20
"""Bytes; https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pushing-manifests"""
LONGEST_CONFIG = 16 << 20


class Manifest(NamedTuple):
    """What a registry holds under a tag or digest, the bytes as they are."""

    digest: str
    """Computed from the bytes."""
    media_type: str
    body: bytes


class Registry:
    """A client of one registry. `ca` is a PEM file; credentials are asked for again when they are refused or end."""

    def __init__(
        self, host: str, credentials: Credentials | None, ca: Path | None = None, patience: Patience | None = None
    ) -> None:
        self.host = host
        self.transport = Transport(host, credentials, ca, patience)

    def manifest(self, ref: str | Reference) -> Manifest:
        """Return the manifest or index of a reference; its digest is that of the bytes, and the one that was asked for."""
        reference = self._ours(ref)
        scope = f"{reference.repository}:pull"
        path = f"/v2/{reference.repository}/manifests/{reference.wanted}"
        answer = self.transport.ask("GET", path, scope=scope, headers={"Accept": ACCEPTED})
        try:
            body = self._whole(answer, LONGEST_MANIFEST, f"{reference} manifest")
        except (HTTPError, OSError) as error:
            why = f"{reference} manifest did not come whole: {reason(error)}"
            raise UserError(problem("registry", self.host, why), FAILED) from None
        told = answer.headers.get("Docker-Content-Digest", "")
        asked = reference.digest or (told if is_digest(told) else None)
        found = digest_like(body, asked)
        for one in filter(None, (reference.digest, told)):
            if one.partition(":")[0] == found.partition(":")[0] and one != found:
                why = "the manifest that came is not the one that was asked for: the registry or a proxy changes it"
                fix = "push the image again, and see who stands between"
                raise UserError(problem(f"{reference} digest", found, why, allowed=one, fix=fix), FAILED)
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        return Manifest(found, kind, body)

    def digest_of(self, ref: str | Reference) -> str | None:
        """Return what a tag stands for now; None where there is none."""
        reference = self._ours(ref)
        scope = f"{reference.repository}:pull"
        path = f"/v2/{reference.repository}/manifests/{reference.wanted}"
        with self.transport.ask("HEAD", path, scope=scope, headers={"Accept": ACCEPTED}, good=(200, 404)) as answer:
            if answer.status_code == 404:
                return None
            told = answer.headers.get("Docker-Content-Digest", "")
        if not is_digest(told):
            return self.manifest(reference).digest
        if reference.digest and told != reference.digest:
            why = "the registry answered with a different digest than the one asked for"
            raise UserError(problem(f"{reference} digest", told, why, allowed=reference.digest), FAILED)
        return told

    def blob(self, ref: str | Reference, digest: str, longest: int = LONGEST_CONFIG) -> bytes:
        """Return a blob of a reference's repository, up to `longest` bytes. What does not come whole is asked for again."""
        if not is_digest(digest):
            raise UserError(problem("blob", digest, "not a digest", allowed="sha256: and 64 hexadecimal digits"))
        reference = self._ours(ref)
        name, kind = f"{reference.name} blob", digest.partition(":")[0]
        path, scope = f"/v2/{reference.repository}/blobs/{digest}", f"{reference.repository}:pull"
        for tried in range(1, self.transport.patience.tries + 1):
            answer = self.transport.ask("GET", path, scope=scope)
            size = answer.headers.get("Content-Length", "")
            try:
                body = self._whole(answer, longest, name)
                why = f"{len(body)} of {size} bytes came" if size.isdecimal() and len(body) < int(size) else ""
            except (HTTPError, OSError) as error:
                why = reason(error)
            if not why:
                break
            if tried < self.transport.patience.tries:
                self.transport.wait(tried, None, why)
        else:
            why = f"did not come whole in {self.transport.patience.tries} tries: {why}"
            fix = "see whether the registry's storage still has the blob; if not, push the image again"
            raise UserError(problem(name, digest, why, fix=fix), FAILED)
        if (found := digest_like(body, digest)) != digest:
            why = f"the bytes have a different {kind} sum: damaged in the registry or on the way"
            raise UserError(problem(name, found, why, allowed=digest, fix="push the image again"), FAILED)
        return body

    def config_digest(self, ref: str | Reference) -> str:
        """Return the digest of an image's configuration; UserError where the reference is an index of several images."""
        described = object_of(f"{ref} manifest", self.manifest(ref).body).get("config")
        digest = described.get("digest") if isinstance(described, dict) else None
        if not isinstance(digest, str):
            why = "has no configuration: an index of several images, or not an image"
            raise UserError(problem("image", str(ref), why, fix="name one of its images by digest"))
        return digest

    def config(self, ref: str | Reference) -> Mapping[str, Any]:
        """Return the configuration of one image, https://github.com/opencontainers/image-spec/blob/main/config.md"""
        return object_of(f"{ref} configuration", self.blob(ref, self.config_digest(ref)))

    def put_manifest(self, ref: str | Reference, body: bytes, media_type: str) -> str:
        """Put a manifest under a tag or its digest; returns the digest of the bytes, which the registry confirmed."""
        reference = self._ours(ref)
        path = f"/v2/{reference.repository}/manifests/{reference.wanted}"
        headers = {"Content-Type": media_type}
        scope = f"{reference.repository}:push"
        with self.transport.ask("PUT", path, scope=scope, headers=headers, body=body, good=(200, 201)) as answer:
            told = answer.headers.get("Docker-Content-Digest", "")
        found = digest_like(body, told if is_digest(told) else None)
        if told and told != found:
            why = "the registry stored the manifest under a different digest: the registry or a proxy changes it"
            raise UserError(problem(f"{reference} digest", told, why, allowed=found), FAILED)
        return found

    def _ours(self, ref: str | Reference) -> Reference:
        reference = parse(ref) if isinstance(ref, str) else ref
        if reference.registry != self.host:
            raise UserError(problem("image", str(ref), "belongs to a different registry", allowed=f"{self.host}/…"))
        return reference

    def _whole(self, answer: requests.Response, longest: int, name: str) -> bytes:
        with answer:
            body: bytes = answer.raw.read(longest + 1, decode_content=True)
        if len(body) > longest:
            raise UserError(problem("registry", self.host, f"{name} is longer than {longest} bytes"), FAILED)
        return body


def connect(ref: str | Reference) -> Registry:
    """Return the registry of a reference, with the credentials that this user has for it."""
    reference = parse(ref) if isinstance(ref, str) else ref
    return Registry(reference.registry, known.for_registry(reference.registry))


def taken(reference: Reference, found: str) -> UserError:
    """Return the refusal to move a tag that names the image `found`."""
    why = f"the tag already names a different image ({found}); a tag is never overwritten"
    return UserError(problem("image", str(reference), why, fix=NEW_TAG))


def digest_like(body: bytes, like: str | None = None) -> str:
    """Return the digest of these bytes, by the same algorithm as another one, else by sha256."""
    kind = like.partition(":")[0] if like else "sha256"
    return f"{kind}:{hashlib.new(kind, body).hexdigest()}"


def object_of(name: str, body: bytes) -> Mapping[str, Any]:
    """Return the JSON object in `body`; UserError where it is something else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(
            problem(
                name,
                body[:40],
                "not a JSON object: the registry or a proxy answers with something else",
                fix="push the image again",
            ),
            FAILED,
        )
    return found
