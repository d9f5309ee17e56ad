"""Changes between the last build's inputs and the next one's: layers to rebuild, why, and what a node would pull. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lustrain.image_file import ImageRecord

LAYERS = ("base", "tools", "system", "init", "torch", "linker", "app", "shell", "code", "image")
"""They stand in the order of the Dockerfile; `image` is settings (user, entry point) and the check, no layer."""
ON = "on "
"""An input that is a layer below has this prefix. Layers joined by `COPY --link` are not inputs of each other."""
DIFFERS = "system"
"""The system layer depends on the base; every other layer is the same on any base."""
NEVER_PULLED = ("tools", "shell", "image")
_SHOWN = 5


@dataclass(frozen=True)
class Rebuild:
    """One layer that is made again."""

    layer: str
    why: tuple[str, ...]
    pulled: bool
    """A node that has the last image pulls this layer."""
    if_different: bool = False
    """It is unpacked again in the same way: pulled only where something else comes out."""


def reasons(old: ImageRecord | None, inputs: Mapping[str, Mapping[str, str]]) -> list[Rebuild]:
    """Return the layers to be made again, in the Dockerfile's order; none where nothing changed, all without an `old` image."""
    rebuilds = []
    for layer in sorted(inputs, key=lambda layer: (LAYERS.index(layer) if layer in LAYERS else len(LAYERS), layer)):
        pulled = layer not in NEVER_PULLED
        if old is None:
            rebuilds.append(Rebuild(layer, ("no image was built before",), pulled))
        elif own := _changes(old.inputs.get(layer), inputs[layer]):
            rebuilds.append(Rebuild(layer, own, pulled))
        elif below := _changes_below(old.inputs[layer], inputs[layer]):
            rebuilds.append(Rebuild(layer, below, pulled, if_different=pulled and layer != DIFFERS))
    return rebuilds


def lines(rebuilds: Sequence[Rebuild]) -> list[str]:
    """Return a line for each reason, and at the end what a node would pull."""
    if not rebuilds:
        return ["nothing changed: every step comes from the cache"]
    pulled, perhaps = _pulled(rebuilds)
    what = f"a node would pull: {', '.join(pulled) or 'no layer'}"
    reasons = [f"{rebuild.layer}: {why}" for rebuild in rebuilds for why in rebuild.why]
    return [*reasons, what + (f"; and only if they come out different: {', '.join(perhaps)}" if perhaps else "")]


def as_json(rebuilds: Sequence[Rebuild]) -> dict[str, object]:
    """Return the changes as JSON data."""
    pulled, perhaps = _pulled(rebuilds)
    layers = [{"layer": rebuild.layer, "why": list(rebuild.why)} for rebuild in rebuilds]
    return {"rebuild": layers, "pull": pulled, "pull_if_different": perhaps}


def _pulled(rebuilds: Sequence[Rebuild]) -> tuple[list[str], list[str]]:
    """Return the layers that a node pulls, and those that it pulls only if they come out different."""
    pulled = [rebuild for rebuild in rebuilds if rebuild.pulled]
    return [one.layer for one in pulled if not one.if_different], [one.layer for one in pulled if one.if_different]


def _changes(old: Mapping[str, str] | None, new: Mapping[str, str]) -> tuple[str, ...]:
    if old is None:
        return ("the last image had no such layer",)
    names = [name for name in _different(old, new) if not name.startswith(ON)]
    files = [name for name in names if "/" in name and " [" not in name]
    why = [_change(name, old.get(name), new.get(name)) for name in names if name not in files]
    if len(files) == 1:
        why.append(_change(files[0], old.get(files[0]), new.get(files[0])))
    elif files:
        more = ", …" if len(files) > _SHOWN else ""
        why.append(f"{len(files)} files changed: {', '.join(files[:_SHOWN])}{more}")
    return tuple(why)


def _changes_below(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"it is made on {name.removeprefix(ON)}" for name in _different(old, new) if name.startswith(ON))


def _different(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def _change(name: str, old: str | None, new: str | None) -> str:
    if "/" in name:
        return f"{name} {'is new' if old is None else 'is gone' if new is None else 'changed'}"
    return f"{name} was {old or 'not given'} and is {new or 'not given'}"
