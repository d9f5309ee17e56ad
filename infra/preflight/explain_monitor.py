"""The effects of an update on the monitor and the workspace. What the monitor boots with makes its instance anew; what it keeps
moves over, and no node hears of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infra.config import ClusterSpec
from infra.plan.place import Place
from infra.plan.watch.machine import settings, user_data
from infra.preflight.change import Change, Effect, protected, shown
from lustrain.problem import UserError

HERE = "observability"
MACHINE = f"{HERE}.monitor"
ANYWHERE = Place("us-east-1", "000000000000")
"""Both specs are compared there; an update never moves a stack to another region."""
VOLUME = "the volume of metrics and dashboards"
WORKSPACE = "the workspace of Prometheus"
ANEW = "The monitor is made anew with its data: metrics of some minutes are missing"


def monitor(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    was, will_be = old.observability, new.observability
    here = f"{HERE}.prometheus"
    if was.prometheus == "amp" and will_be.prometheus != "amp":
        yield protected(here, WORKSPACE)
    if old.monitor is None and new.monitor is None:
        yield from _other_keys(old, new)
    elif old.monitor is None:
        yield Change(here, Effect.IN_PLACE, "a monitor is made, and scrapes the nodes that answer it")
    elif new.monitor is None:
        yield protected(here, VOLUME)
    else:
        yield from _machine(old, new)


def workspace_alone(new: ClusterSpec) -> Change:
    """Return what becomes of the workspace of a stack that was deployed when `prometheus` was a switch: it had no monitor, and
    was not protected."""
    here = f"{HERE}.prometheus"
    if new.observability.prometheus == "amp":
        return Change(here, Effect.IN_PLACE, f"{WORKSPACE} stays, and is protected from then on")
    instead = "set amp until you need them no more: nothing copies them"
    return Change(here, Effect.DELETES_OBJECTS, f"{WORKSPACE} is deleted", "all metrics in it", instead)


def moved_monitor(old: ClusterSpec, moved: Sequence[str]) -> Iterator[Change]:
    """Yield what another zone does to the volume: EBS has it in one."""
    if old.monitor and "zone_id" in moved:
        yield protected("zone_id", VOLUME)


def _other_keys(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield what changes without a monitor: on EKS a workspace and AWS's add-on come and go."""
    for key in ("prometheus", "grafana", "monitor"):
        was, will_be = (getattr(spec.observability, key) for spec in (old, new))
        if was != will_be:
            shown_as = (
                f"{shown(was)} becomes {shown(will_be)}" if key != "monitor" else "there is no monitor that it is for"
            )
            yield Change(f"{HERE}.{key}", Effect.IN_PLACE, shown_as)


def _machine(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    was, will_be = old.observability.monitor, new.observability.monitor
    if was.type != will_be.type and not will_be.image_id and _architecture(old) != _architecture(new):
        message = f"{was.type} becomes {will_be.type} of another architecture, and the image stays as it is"
        fix = f"keep the architecture, or name {MACHINE}.image_id too"
        yield Change(f"{MACHINE}.type", Effect.IMPOSSIBLE, message, "", fix)
    elif was.type != will_be.type:
        yield Change(f"{MACHINE}.type", Effect.IN_PLACE, f"{was.type} becomes {will_be.type}. {ANEW}")
    if will_be.image_id is None and was.image_id:
        message = f"without it {was.image_id} stays: a default is looked up only when there is no monitor yet"
        yield Change(f"{MACHINE}.image_id", Effect.IMPOSSIBLE, message, "", "name the image that you want")
    elif was.image_id != will_be.image_id:
        message = f"{shown(was.image_id)} becomes {shown(will_be.image_id)}. {ANEW}"
        yield Change(f"{MACHINE}.image_id", Effect.IN_PLACE, message)
    if was.disk_gib != will_be.disk_gib:
        yield _size(was.disk_gib, will_be.disk_gib)
    if settings(old, ANYWHERE) != settings(new, ANYWHERE) or _boot(old) != _boot(new):
        yield Change(HERE, Effect.IN_PLACE, f"what the monitor runs changes. {ANEW}")


def _architecture(spec: ClusterSpec) -> str | None:
    kind = spec.node_of(spec.monitor) if spec.monitor else None
    return kind.architecture if kind else None


def _boot(spec: ClusterSpec) -> str | None:
    """Return what the monitor boots with; None where no machine can boot with the spec, as preflight says."""
    try:
        return user_data(spec, ANYWHERE, bundle_uri="there", volume_id="there")
    except (UserError, ValueError):
        return None


def _size(before: int, after: int) -> Change:
    path, message = f"{MACHINE}.disk_gib", f"{before} GiB become {after}"
    if after < before:
        return Change(path, Effect.IMPOSSIBLE, f"{message}: EBS shrinks no volume", "", f"keep {before}")
    return Change(
        path, Effect.IN_PLACE, f"{message}: the volume grows, and the monitor is made anew, which uses it all"
    )
