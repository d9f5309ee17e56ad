"""Images put into a real registry piece by piece, for the forms that no builder here writes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

import requests

from images.plan.references import parse
from images.registry.client import DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from images.registry.client import Registry as Client
from rehearsal.lab.containers.registry import Registry
from tests.images.tars import config_of, sha256

DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
DOCKER_GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OCI_TAR = "application/vnd.oci.image.layer.v1.tar"


class Hand:
    """One repository of a lab's registry, through its own client."""

    def __init__(self, lab: Registry, repository: str = "team/x") -> None:
        self.lab = lab
        self.name = f"{lab.host}/{repository}"
        self.client = Client(lab.host, lambda host: None)

    def ref(self, tag: str = "1") -> str:
        return f"{self.name}:{tag}"

    def blob(self, data: bytes) -> str:
        path = parse(self.name).repository
        begun = requests.post(f"{self.lab.url}/v2/{path}/blobs/uploads/", timeout=300)
        place = begun.headers["Location"]
        joined = "&" if "?" in place else "?"
        requests.put(f"{place}{joined}digest={sha256(data)}", data=data, timeout=300).raise_for_status()
        return sha256(data)

    def manifest(self, document: Mapping[str, Any], media_type: str, tag: str = "1") -> str:
        """Put it as it is; returns its digest. A manifest without a tag goes under its digest."""
        body = json.dumps(document).encode()
        ref = f"{self.name}:{tag}" if tag else f"{self.name}@{sha256(body)}"
        self.client.put_manifest(ref, body, media_type)
        return sha256(body)

    def document(
        self,
        tars: Sequence[bytes],
        config: Mapping[str, Any] | None = None,
        *,
        layer_type: str = DOCKER_GZIP,
        media_type: str = DOCKER_MANIFEST,
        config_type: str | None = None,
    ) -> dict[str, Any]:
        """A manifest whose configuration and layers lie in the registry."""
        text = json.dumps(config if config is not None else config_of(tars)).encode()
        packed = {one: gzip.compress(one, mtime=0) if layer_type.endswith("gzip") else one for one in tars}
        digests = {one: self.blob(blob) for one, blob in packed.items()}
        kind = config_type or (OCI_CONFIG if media_type == OCI_MANIFEST else DOCKER_CONFIG)
        return {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": {"mediaType": kind, "size": len(text), "digest": self.blob(text)},
            "layers": [{"mediaType": layer_type, "size": len(packed[one]), "digest": digests[one]} for one in tars],
        }

    def image(self, tars: Sequence[bytes], config: Mapping[str, Any] | None = None, tag: str = "1", **more: Any) -> str:
        """Put an image; returns its digest."""
        document = self.document(tars, config, **more)
        return self.manifest(document, document["mediaType"], tag)

    def index(self, entries: Sequence[Mapping[str, Any]], media_type: str = OCI_INDEX, tag: str = "1") -> str:
        return self.manifest({"schemaVersion": 2, "mediaType": media_type, "manifests": list(entries)}, media_type, tag)


def entry(digest: str, platform: str, size: int = 500, **more: Any) -> dict[str, Any]:
    """A line of an index."""
    system, machine, *variant = platform.split("/")
    told = {"os": system, "architecture": machine} | ({"variant": variant[0]} if variant else {})
    return {"mediaType": OCI_MANIFEST, "digest": digest, "size": size, "platform": told, **more}


def attestation(digest: str) -> dict[str, Any]:
    """As buildx adds it to an index."""
    return entry(digest, "unknown/unknown", annotations={"vnd.docker.reference.type": "attestation-manifest"})
