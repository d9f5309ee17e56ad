"""Small images put into a real registry by hand, without an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import urljoin

import requests

from images.registry.client import DOCKER_MANIFEST
from rehearsal.lab.containers.registry import Registry
from tests.images.shelf import CONFIG_TYPE, LAYER_TYPE, digest_of


def put_blob(registry: Registry, repository: str, body: bytes) -> str:
    """The blob's digest."""
    options = _options(registry)
    begun = requests.post(f"{registry.url}/v2/{repository}/blobs/uploads/", **options)
    place = urljoin(registry.url, begun.headers["Location"])
    digest = digest_of(body)
    requests.put(f"{place}&digest={digest}", data=body, **options).raise_for_status()
    return digest


def put_image(
    registry: Registry,
    repository: str,
    tag: str | None = "1",
    layer: bytes = b"no tar, but nobody unpacks it",
    config: Mapping[str, object] | None = None,
    media_type: str = DOCKER_MANIFEST,
) -> str:
    """One image with one layer, for linux/amd64 unless told; returns its digest."""
    described = json.dumps(
        {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": []}} | dict(config or {})
    ).encode()
    entries = [(CONFIG_TYPE, described), (LAYER_TYPE, layer)]
    first, second = (
        {"mediaType": kind, "size": len(body), "digest": put_blob(registry, repository, body)} for kind, body in entries
    )
    body = json.dumps({"schemaVersion": 2, "mediaType": media_type, "config": first, "layers": [second]}).encode()
    url = f"{registry.url}/v2/{repository}/manifests/{tag or digest_of(body)}"
    requests.put(url, data=body, headers={"Content-Type": media_type}, **_options(registry)).raise_for_status()
    return digest_of(body)


def _options(registry: Registry) -> dict[str, object]:
    user = next(iter(registry.users.items()), None)
    return {"auth": user, "verify": str(registry.ca) if registry.tls else True, "timeout": 30}
