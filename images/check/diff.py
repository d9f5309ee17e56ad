"""The layers that a node with image A pulls to run image B. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from images.model import Image, Layer
from lustrain.problem import plain
from lustrain.progress import BYTES, amount_text

VERSION = 1
_LONGEST = 72


@dataclass(frozen=True)
class Diff:
    """Two images compared by the digests of their layers, as a node does; sizes in bytes, compressed."""

    a: Image
    b: Image
    pulled: tuple[Layer, ...]
    """Layers of B that A lacks, in B's order, each once."""
    kept: tuple[Layer, ...]
    repacked: frozenset[str] = frozenset()
    """Digests of pulled layers whose content A has under another digest: compressed again, so that nodes pull them."""

    @property
    def bytes(self) -> int:
        return sum(layer.size for layer in self.pulled)

    @property
    def same(self) -> bool:
        return self.a.digest == self.b.digest


def diff(a: Image, b: Image) -> Diff:
    """Find the layers of `b` that a node with all of `a` must pull."""
    held, contents = {layer.digest for layer in a.layers}, {layer.diff_id for layer in a.layers}
    once = tuple({layer.digest: layer for layer in b.layers}.values())
    pulled = tuple(layer for layer in once if layer.digest not in held)
    repacked = frozenset(layer.digest for layer in pulled if layer.diff_id in contents)
    return Diff(a, b, pulled, tuple(layer for layer in once if layer.digest in held), repacked)


def lines(diff: Diff) -> list[str]:
    """Return one line a layer to pull, then the sum."""
    if diff.same:
        return [f"nothing to pull: both are {diff.b.digest}"]
    if not diff.pulled:
        return [f"nothing to pull but the configuration: all {len(diff.kept)} layers are the same"]
    rows = [_line(layer, layer.digest in diff.repacked) for layer in diff.pulled]
    share = 100 * diff.bytes / diff.b.size if diff.b.size else 0
    total = f"{amount_text(diff.bytes, BYTES)} of {amount_text(diff.b.size, BYTES)} ({share:.3g} %)"
    return [*rows, f"{len(diff.pulled)} of {len(diff.pulled) + len(diff.kept)} layers to pull, {total}"]


def as_json(diff: Diff) -> dict[str, Any]:
    """Return the difference as JSON data."""
    return {
        "version": VERSION,
        "a": _image(diff.a),
        "b": _image(diff.b),
        "same": diff.same,
        "pull": [_layer(layer) | {"recompressed": layer.digest in diff.repacked} for layer in diff.pulled],
        "keep": [_layer(layer) for layer in diff.kept],
        "pull_bytes": diff.bytes,
    }


def _line(layer: Layer, repacked: bool) -> str:
    step = plain(layer.created_by.removesuffix(" # buildkit")) or "unknown step"
    step = step if len(step) <= _LONGEST else step[: _LONGEST - 1] + "…"
    note = "  (same files, compressed again)" if repacked else ""
    return f"{layer.digest[7:19]}  {amount_text(layer.size, BYTES):>8}  {step}{note}"


def _image(image: Image) -> dict[str, Any]:
    return {"ref": image.ref, "digest": image.digest, "platform": image.platform, "bytes": image.size}


def _layer(layer: Layer) -> dict[str, Any]:
    return {"digest": layer.digest, "diff_id": layer.diff_id, "bytes": layer.size, "created_by": layer.created_by}
