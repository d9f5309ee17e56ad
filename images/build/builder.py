"""The build of an image: its check first, and second tries where they help."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from images.build import engine
from images.build.bake import Bake
from images.build.failure import BuildError
from images.model import BuildObserver, Built, Context, Output, Plan, Step
from images.plan import versions
from lustrain.backoff import pause_s
from lustrain.problem import FAILED, UserError
from lustrain.progress import BYTES, amount_text

LEAST_FREE = 1 << 30
"""Even a build with everything cached may take so many bytes."""
_COPIES = 3
"""A layer lies in its build stage, in the image, and compressed beside that."""
_TRIES = 3
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 15.0


def build(
    plan: Plan, context: Context, bake: Bake, *, output: Output, verify: bool = True, watch: BuildObserver
) -> Built:
    """Build the plan's target, unless its `-verify` stage fails; the answer has the steps of both.

    UserError, before anything is built, where there is no engine that can build it, buildx cannot do what the plan asks, or
    the engine's disk is too full.
    """
    bake.check(plan)
    check_room(plan.target, engine.facts(bake.environment), bake.environment)
    if not verify:
        return _built(bake, plan, context, plan.target, output, watch)
    checked = _built(bake, plan, context, f"{plan.target}-verify", Output.CHECK, watch)
    # What was just checked is what leaves, and is not made a second time.
    from_cache = replace(plan, no_cache=False, cache_from=() if plan.no_cache else plan.cache_from)
    built = _built(bake, from_cache, context, plan.target, output, watch)
    return replace(built, steps=_joined(checked.steps, built.steps), seconds=round(checked.seconds + built.seconds, 3))


def check_room(target: str, facts: engine.Engine, environment: Mapping[str, str] | None = None) -> None:
    """Check that the engine's disk has as much free as building `target` takes; what is cached is not taken again."""
    free, budget = facts.free_bytes(), versions.load().budgets.get(target, 0) * _COPIES << 20
    if free is None or free >= max(budget, LEAST_FREE):
        return
    needed = max(budget - engine.cached_bytes(environment), LEAST_FREE)
    if free < needed:
        amounts = f"{amount_text(free, BYTES)} free, and building {target} takes about {amount_text(needed, BYTES)}"
        fix = "docker image prune -a and docker builder prune, or another data-root in daemon.json"
        raise UserError(f"the engine's disk at {facts.root} has {amounts}; fix: {fix}", FAILED)


def _built(bake: Bake, plan: Plan, context: Context, target: str, output: Output, watch: BuildObserver) -> Built:
    """Build one target; the answer has the steps of every try.

    Build it again where that may help, as after a push that broke off: what the registry has got is not sent twice.
    """
    began, before, tried = time.monotonic(), list[Step](), 0
    while True:
        tried += 1
        try:
            built = bake.build(plan, context, target, output, watch)
            break
        except BuildError as error:
            if tried == _TRIES or not error.again:
                raise
            before += [step for step in error.steps if not step.error]
            name = f"{target}: {error.again} again ({tried} of {_TRIES - 1})"
            watch.ended(Step(name, time.monotonic() - began, False, error.problems[0]))
            time.sleep(pause_s(tried, _PAUSE_S, _LONGEST_PAUSE_S))
    if tried == 1:
        return built
    return replace(built, steps=_joined(before, built.steps), seconds=round(time.monotonic() - began, 3))


def _joined(checked: Sequence[Step], built: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps of the check, then those that only the image needed or that ran again."""
    seen = {step.name for step in checked}
    again = (step for step in built if step.name not in seen or not (step.cached or step.stage == "internal"))
    return (*checked, *again)
