"""A registry in memory, and images put on it piece by piece, for the forms that no builder here writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from images.plan.references import Reference, parse
from images.registry.client import DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST, Manifest, Registry

CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_TAR = "application/vnd.oci.image.layer.v1.tar"
CONFIG: Mapping[str, Any] = {
    "architecture": "amd64",
    "os": "linux",
    "created": "2026-11-20T12:00:00.123456789Z",
    "config": {"Env": ["PATH=/usr/bin"], "User": "1000:1000", "Entrypoint": ["/usr/bin/tini", "--"]},
}


def digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def config_of(layers: Sequence[bytes], **more: Any) -> dict[str, Any]:
    """A configuration with the diff-ids of these layers."""
    return {**CONFIG, "rootfs": {"type": "layers", "diff_ids": [digest_of(one) for one in layers]}, **more}


class Shelf(Registry):
    """Keeps manifests by tag and by digest, and configurations; layers are only spoken of."""

    ref = "127.0.0.1:5000/team/x:1"

    def __init__(self) -> None:
        self.manifests: dict[str, Manifest] = {}
        self.blobs: dict[str, bytes] = {}

    def manifest(self, ref: str | Reference) -> Manifest:
        return self.manifests[parse(str(ref)).wanted]

    def blob(self, ref: str | Reference, digest: str) -> bytes:
        return self.blobs[digest]

    def put(self, document: Mapping[str, Any] | bytes, media_type: str, tag: str = "1") -> str:
        """Put a manifest as it is; returns its digest."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        made = Manifest(digest_of(body), media_type, body)
        self.manifests |= {tag: made, made.digest: made}
        return made.digest

    def document(
        self,
        layers: Sequence[bytes],
        config: object = None,
        *,
        media_type: str = DOCKER_MANIFEST,
        layer_type: str = LAYER_TYPE,
        config_type: str = "",
        size: int = 100,
    ) -> dict[str, Any]:
        """A manifest of layers of that size, whose configuration is on the shelf."""
        text = json.dumps(config_of(layers) if config is None else config).encode()
        self.blobs[digest_of(text)] = text
        kind = config_type or (OCI_CONFIG if media_type == OCI_MANIFEST else CONFIG_TYPE)
        packed = [digest_of(b"packed " + one) for one in layers]
        return {
            "mediaType": media_type,
            "config": {"mediaType": kind, "size": len(text), "digest": digest_of(text)},
            "layers": [{"mediaType": layer_type, "size": size, "digest": digest} for digest in packed],
        }

    def image(self, layers: Sequence[bytes], config: object = None, tag: str = "1", **more: Any) -> str:
        """Put an image; returns its digest."""
        document = self.document(layers, config, **more)
        return self.put(document, document["mediaType"], tag)

    def index(self, entries: Sequence[Mapping[str, Any]], media_type: str = OCI_INDEX, tag: str = "1") -> str:
        return self.put({"mediaType": media_type, "manifests": list(entries)}, media_type, tag)


def entry(digest: str, platform: str, **more: Any) -> dict[str, Any]:
    """A line of an index."""
    system, machine = platform.split("/")
    named = {"os": system, "architecture": machine}
    return {"mediaType": OCI_MANIFEST, "digest": digest, "size": 500, "platform": named, **more}


def attestation(digest: str) -> dict[str, Any]:
    """As buildx adds it to an index."""
    return entry(digest, "unknown/unknown", annotations={"vnd.docker.reference.type": "attestation-manifest"})
