"""The effects of an update on the monitor and the workspace. What the monitor boots with makes its instance anew; what it keeps
moves over, and no node hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infra.config import ClusterSpec
from infra.plan.watch.machine import boot_digits
from infra.preflight.change import Change, Effect, protected, shown
from infra.preflight.explain_machine import boot, machine, made_anew, volume

HERE = "observability"
VOLUME = "the volume of metrics and dashboards"
WORKSPACE = "the workspace of Prometheus"
ANEW = Change(
    f"{HERE}.monitor", Effect.IN_PLACE, "The monitor is made anew with its data: metrics of some minutes are missing"
)


def monitor(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    was, will_be = old.observability, new.observability
    here = f"{HERE}.prometheus"
    if was.prometheus == "amp" and will_be.prometheus != "amp":
        yield protected(here, WORKSPACE)
    yield from _managed_grafana(old, new)
    before, after = old.monitor, new.monitor
    if before is None and after is None:
        yield from _other_keys(old, new)
    elif before is None:
        yield Change(here, Effect.IN_PLACE, "a monitor is made, and scrapes the nodes that answer it")
    elif after is None:
        yield protected(here, VOLUME)
    else:
        yield from machine(old, new, before, after, ANEW)
        growth = ", and the monitor is made anew, which uses it all"
        yield from volume(f"{HERE}.monitor.disk_gib", was.monitor.disk_gib, will_be.monitor.disk_gib, growth)
        if _digits(old) != _digits(new):
            yield replace(made_anew(ANEW, "what the monitor runs changes"), path=HERE)


def newer_lustrain(old: ClusterSpec, new: ClusterSpec, booted: str | None) -> list[Change]:
    """Return what the monitor becomes where this Lustrain boots it otherwise than the one that made it, by the same spec.

    `booted` is the stack's output `monitorBoot`, empty of a stack that is older than the output; None compares nothing.
    """
    now = _digits(old)
    if None in (booted, now, new.monitor) or now == booted:
        return []
    return [replace(made_anew(ANEW, "this Lustrain boots the monitor otherwise than the one that made it"), path=HERE)]


def workspace_alone(new: ClusterSpec) -> Change:
    """Return what becomes of the workspace of a stack that was deployed when `prometheus` was a switch: it had no monitor, and
    was not protected."""
    here = f"{HERE}.prometheus"
    if new.observability.prometheus == "amp":
        return Change(here, Effect.IN_PLACE, f"{WORKSPACE} stays, and is protected from then on")
    instead = "set amp until you need them no more: nothing copies them"
    return Change(here, Effect.DELETES_OBJECTS, f"{WORKSPACE} is deleted", "all metrics in it", instead)


def _other_keys(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield what changes without a monitor: on EKS a workspace and AWS's add-on come and go."""
    for key in ("prometheus", "grafana", "monitor"):
        was, will_be = (getattr(spec.observability, key) for spec in (old, new))
        if was != will_be and "managed" not in (was, will_be):
            shown_as = (
                f"{shown(was)} becomes {shown(will_be)}" if key != "monitor" else "there is no monitor that it is for"
            )
            yield Change(f"{HERE}.{key}", Effect.IN_PLACE, shown_as)


def _managed_grafana(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    was, will_be = (spec.observability.grafana == "managed" for spec in (old, new))
    here = f"{HERE}.grafana"
    if will_be and not was:
        yield Change(here, Effect.IN_PLACE, "a workspace of Amazon Managed Grafana is made")
    elif was and not will_be:
        message, instead = "the workspace of Amazon Managed Grafana is deleted", "export what people have made in it"
        yield Change(here, Effect.DELETES_OBJECTS, message, "pages and alerts that people made in it", instead)


def _digits(spec: ClusterSpec) -> str | None:
    return boot(lambda: boot_digits(spec))
