"""Layers and configurations made by hand, for what no engine here would write."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "created": "2026-11-20T12:00:00.123456789Z",
    "config": {"Env": ["PATH=/usr/bin"], "User": "1000:1000", "Entrypoint": ["/usr/bin/tini", "--"]},
}


def layer(files: Mapping[str, bytes]) -> bytes:
    """A tar, not compressed."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config_of(layers: Sequence[bytes], **more: Any) -> dict[str, Any]:
    """A configuration with the diff-ids of these tars."""
    return {**CONFIG, "rootfs": {"type": "layers", "diff_ids": [sha256(one) for one in layers]}, **more}
