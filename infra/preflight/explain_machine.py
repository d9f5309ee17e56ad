"""The effects of an update that Slurm's controller on EC2 and the monitor have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from infra.config import ClusterSpec, Group
from infra.preflight.change import Change, Effect, shown
from lustrain.problem import UserError

T = TypeVar("T")


def machine(old: ClusterSpec, new: ClusterSpec, before: Group, after: Group, anew: Change) -> Iterator[Change]:
    """Yield what another type or image does; `anew` has the machine's path, and what it means that it is made anew."""
    types = f"{before.instance_type} becomes {after.instance_type}"
    architectures = {kind and kind.architecture for kind in (old.node_of(before), new.node_of(after))}
    if before.instance_type != after.instance_type and not after.image_id and len(architectures) > 1:
        message = f"{types} of another architecture, and the image stays as it is"
        fix = f"keep the architecture, or name {anew.path}.image_id too"
        yield Change(f"{anew.path}.type", Effect.IMPOSSIBLE, message, "", fix)
    elif before.instance_type != after.instance_type:
        yield made_anew(anew, types, ".type")
    if after.image_id is None and before.image_id:
        message = f"without it {before.image_id} stays: a default is looked up only when there is no {after.name} yet"
        yield Change(f"{anew.path}.image_id", Effect.IMPOSSIBLE, message, "", "name the image that you want")
    elif before.image_id != after.image_id:
        yield made_anew(anew, f"{shown(before.image_id)} becomes {shown(after.image_id)}", ".image_id")


def made_anew(anew: Change, why: str, key: str = "") -> Change:
    return replace(anew, path=f"{anew.path}{key}", message=f"{why}. {anew.message}")


def volume(path: str, before: int, after: int, growth: str, then: str = "") -> Iterator[Change]:
    """Yield what another size of a machine's volume does; `then` is what is left to do once it has grown."""
    message = f"{before} GiB become {after}"
    if after < before:
        yield Change(path, Effect.IMPOSSIBLE, f"{message}: EBS shrinks no volume", "", f"keep {before}")
    elif after > before:
        yield Change(path, Effect.IN_PLACE, f"{message}: the volume grows{growth}", "", then)


def boot(facts: Callable[[], T]) -> T | None:
    """Return what a machine boots with; None where no machine can boot with the spec, as preflight says."""
    try:
        return facts()
    except (UserError, ValueError):
        return None
