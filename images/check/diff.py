"""The layers that a node with image A pulls to run image B. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from images.model import Image, Layer
from lustrain.problem import plain

VERSION = 1
_LONGEST = 72


@dataclass(frozen=True)
class Diff:
    """Two images by what a node goes by, the digests of their layers; sizes in bytes, compressed."""

    a: Image
    b: Image
    pulled: tuple[Layer, ...]
    """Layers of B that A has not, in B's order, each once."""
    kept: tuple[Layer, ...]
    repacked: frozenset[str] = frozenset()
    """Digests of pulled layers whose content A has under another digest: only compressed anew, and pulled nevertheless."""

    @property
    def bytes(self) -> int:
        return sum(layer.size for layer in self.pulled)

    @property
    def same(self) -> bool:
        return self.a.digest == self.b.digest


def diff(a: Image, b: Image) -> Diff:
    """Which layers of `b` a node must pull that has all of `a`."""
    held, contents = {layer.digest for layer in a.layers}, {layer.diff_id for layer in a.layers}
    once = tuple({layer.digest: layer for layer in b.layers}.values())
    pulled = tuple(layer for layer in once if layer.digest not in held)
    repacked = frozenset(layer.digest for layer in pulled if layer.diff_id in contents)
    return Diff(a, b, pulled, tuple(layer for layer in once if layer.digest in held), repacked)


def lines(found: Diff) -> list[str]:
    """For people: a line a layer to pull, then the sum."""
    if found.same:
        return [f"nothing to pull: both are {found.b.digest}"]
    if not found.pulled:
        return [f"nothing to pull but the configuration: all {len(found.kept)} layers are the same"]
    rows = [_line(layer, layer.digest in found.repacked) for layer in found.pulled]
    share = 100 * found.bytes / found.b.size if found.b.size else 0
    total = f"{amount(found.bytes)} of {amount(found.b.size)} ({share:.3g} %)"
    return [*rows, f"{len(found.pulled)} of {len(found.pulled) + len(found.kept)} layers to pull, {total}"]


def as_json(found: Diff) -> dict[str, Any]:
    """One object for a program."""
    return {
        "version": VERSION,
        "a": {"ref": found.a.ref, "digest": found.a.digest, "platform": found.a.platform, "bytes": found.a.size},
        "b": {"ref": found.b.ref, "digest": found.b.digest, "platform": found.b.platform, "bytes": found.b.size},
        "same": found.same,
        "pull": [_layer(layer) | {"recompressed": layer.digest in found.repacked} for layer in found.pulled],
        "keep": [_layer(layer) for layer in found.kept],
        "pull_bytes": found.bytes,
    }


def amount(size: float) -> str:
    """Bytes as people read them, in the SI steps that registries use."""
    step = next((step for step in range(3) if size < 1000 ** (step + 1)), 3)
    size /= 1000**step
    return f"{size:.{int(step > 0 and size < 100)}f} {('B', 'kB', 'MB', 'GB')[step]}"


def _line(layer: Layer, repacked: bool) -> str:
    step = plain(layer.created_by.removesuffix(" # buildkit")) or "unknown step"
    step = step if len(step) <= _LONGEST else step[: _LONGEST - 1] + "…"
    return f"{layer.digest[7:19]}  {amount(layer.size):>8}  {step}" + (
        "  (same files, compressed anew)" if repacked else ""
    )


def _layer(layer: Layer) -> dict[str, Any]:
    return {
        "digest": layer.digest,
        "diff_id": layer.diff_id,
        "bytes": layer.size,
        "created_by": layer.created_by,
    }
