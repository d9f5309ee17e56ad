"""One function that builds an image; unless told otherwise, nothing leaves unchecked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from images.build import engine
from images.build.bake import Bake
from images.build.failure import passing
from images.model import Built, Context, Noting, Output, Plan, Step, Watch
from images.plan import versions
from lustrain.backoff import pause_s
from lustrain.problem import FAILED, UserError

LEAST_FREE = 1 << 30
"""Bytes that even a build with everything cached may take."""
_COPIES = 3
"""A layer lies in its build stage, in the image, and compressed beside that."""
_LOST = ("parent snapshot", "does not exist")
_TRIES = 3
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 15.0


def connect(environment: Mapping[str, str] | None = None) -> Bake:
    """buildx with the engine that `environment` names. UserError in one line for an engine that is absent, too old, without
    BuildKit or not ours to use."""
    engine.facts(environment)
    return Bake(environment)


def build(
    plan: Plan,
    context: Context,
    bake: Bake,
    *,
    output: Output,
    verify: bool = True,
    watch: Watch,
    environment: Mapping[str, str] | None = None,
) -> Built:
    """Build the plan's target, after its `-verify` stage went through; the answer has the steps of both.

    UserError, before anything is built, where buildx cannot do what the plan asks or the engine's disk is too full.
    """
    if why := bake.cannot(plan, output):
        raise UserError(why)
    if why := no_room(plan.target, engine.facts(environment), environment):
        raise UserError(why, FAILED)
    if not verify:
        return _built(bake, plan, context, plan.target, output, watch)
    checked = _built(bake, plan, context, f"{plan.target}-verify", Output.CHECK, watch)
    # What was just checked is what leaves, and is not made a second time.
    from_cache = replace(plan, no_cache=False, cache_from=() if plan.no_cache else plan.cache_from)
    built = _built(bake, from_cache, context, plan.target, output, watch)
    return replace(built, steps=_joined(checked.steps, built.steps), seconds=round(checked.seconds + built.seconds, 3))


def no_room(target: str, found: engine.Engine, environment: Mapping[str, str] | None = None) -> str | None:
    """One line when the engine's disk has less free than building `target` takes; what its cache holds is not taken again."""
    free = found.free_bytes()
    if free is None:
        return None
    budget = versions.load().budgets.get(target, 0) * _COPIES << 20
    if free >= max(budget, LEAST_FREE):
        return None
    needed = max(budget - engine.cached_bytes(environment), LEAST_FREE)
    if free >= needed:
        return None
    why = f"the engine's disk at {found.root} has {_gib(free)} free, and building {target} takes about {_gib(needed)}"
    return f"{why}; fix: docker image prune -a and docker builder prune, or another data-root in daemon.json"


def _built(bake: Bake, plan: Plan, context: Context, target: str, output: Output, watch: Watch) -> Built:
    """Build one target, again where a push broke off: what the registry has got is not sent twice. Again also where the engine
    lost a snapshot while it unpacked what was built, a race in engines with containerd's store:
    https://github.com/moby/buildkit/issues/6521. The answer has the steps of every try."""
    began, before, tried = time.monotonic(), list[Step](), 0
    while True:
        tried += 1
        noting = Noting(watch)
        try:
            built = bake.build(plan, context, target, output, noting)
        except UserError as error:
            lost = all(sign in error.problems[0] for sign in _LOST)
            if tried == _TRIES or not (lost or passing(error)):
                raise
            before += [step for step in noting.ended_steps if not step.error]
            why = (
                "the engine lost a snapshot that it was unpacking on; building"
                if lost
                else "the push broke off; pushing"
            )
            watch.ended(
                Step(
                    f"{target}: {why} again ({tried} of {_TRIES - 1})",
                    time.monotonic() - began,
                    False,
                    error.problems[0],
                )
            )
            if not lost:
                time.sleep(pause_s(tried, _PAUSE_S, _LONGEST_PAUSE_S))
        else:
            if tried == 1:
                return built
            steps, seconds = _joined(tuple(before), built.steps), round(time.monotonic() - began, 3)
            return replace(built, steps=steps, seconds=seconds)


def _joined(checked: tuple[Step, ...], built: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return what the check ran, then what only the image needed or had to do again."""
    seen = {step.name for step in checked}
    again = (step for step in built if step.name not in seen or not (step.cached or step.stage == "internal"))
    return (*checked, *again)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
