"""The content hash of an image, independent of date, commit and builder.

It is over the configuration and the layers' diff-ids: our layers are the same to the last bit wherever they are made. Not over
the flattened tree: nodes pull, keep and share layers, so the same tree in other layers is another image to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from images.model import Image

RULES = "1"
"""Raise it when the same image gets another hash; hashes of different rules cannot be compared."""
_KEPT = (
    *("Env", "Entrypoint", "Cmd", "User", "WorkingDir"),
    *("StopSignal", "Healthcheck", "ExposedPorts", "Volumes", "OnBuild"),
)
_PASSING = (
    *(f"org.opencontainers.image.{name}" for name in ("created", "revision", "version", "ref.name", "base.name")),
    "dev.lustrain.git.dirty",
)
"""These labels hold the date, the commit and the names: several of them may give the same files."""


def content_of(image: Image) -> str:
    """Return `sha256:…`, from the image's description alone."""
    text = json.dumps([RULES, settings_of(image.config), [layer.diff_id for layer in image.layers]], sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide how the image runs: no dates, commit, history or keys of the builder's own."""
    inner = config.get("config") or {}
    labels = {key: value for key, value in (inner.get("Labels") or {}).items() if key not in _PASSING}
    kept = {key: inner[key] for key in _KEPT if inner.get(key)}
    if "Env" in kept:
        kept["Env"] = sorted(kept["Env"])
    machine = {key: config[key] for key in ("architecture", "os", "variant") if config.get(key)}
    return {**machine, **kept, **({"Labels": labels} if labels else {})}
