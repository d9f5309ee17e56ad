"""A search: the values of a point follow from values and validation losses of the points before it. Pure; optuna draws."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch.sweep.grid import parse_settings, split_values
from lustrain.problem import UserError, problem

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

OPTUNA = "optuna"
FORM = "KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=VALUE,VALUE…, like optimizer.lr=log:1e-5..1e-3"
DIGITS = 4
"""Significant digits of a drawn number: more of them change no loss, and make unreadable names of runs."""
DRAWS = 50
"""Draws for one point, after which the space counts as used up: each was drawn before, or is refused."""
_SPREAD = 10_000
"""The draws of one point and those of the next have different seeds."""
_RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^.:,\s]\S*?|\.\d\S*?)\.\.(?P<high>\S+)")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included: whole where both are written so, with `log` drawn by their logarithm."""

    low: float
    high: float
    log: bool
    whole: bool

    @property
    def examples(self) -> tuple[str, ...]:
        """Values that are checked before anything is drawn."""
        return self.text(self.low), self.text(self.high)

    def text(self, value: float) -> str:
        """Return a drawn number as a setting takes it."""
        if self.whole:
            return str(round(value))
        return repr(min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high))


@dataclass(frozen=True)
class Choices:
    """Texts, of which one is chosen."""

    examples: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """A point that has ended."""

    values: Mapping[str, str]
    loss: float | None
    """Its lowest validation loss, infinite where none was finite; None where it ended before its last step."""


def parse_space(space: Sequence[str], sets: Sequence[str]) -> dict[str, Range | Choices]:
    """Return what each searched setting may be, in the order of the flags; `sets` are those of `--set`. UserError."""
    return parse_settings("--space", space, sets, _values, FORM)


def _values(text: str) -> Range | Choices | None:
    match = _RANGE.fullmatch(text)
    if match is None:
        parts = tuple(split_values(text))
        return Choices(parts) if "" not in parts and len(set(parts)) == len(parts) > 1 else None
    try:
        low, high = float(match["low"]), float(match["high"])
    except ValueError:
        return None
    log = match["log"] is not None
    whole = all(re.fullmatch("[+-]?[0-9]+", match[end]) for end in ("low", "high"))
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        return None
    return Range(low, high, log, whole)


def examples(space: Mapping[str, Range | Choices]) -> list[dict[str, str]]:
    """Return values of points at the ends of the space, which hold each end and each choice at least once."""
    first = {key: values.examples[0] for key, values in space.items()}
    return [first, *(first | {key: value} for key, values in space.items() for value in values.examples[1:])]


def draw_values(
    space: Mapping[str, Range | Choices], seed: int, trials: Sequence[Trial], draw: int = 0
) -> dict[str, str]:
    """Return the values of the next point, text as `--set` takes it. UserError where optuna is not installed.

    They follow from the arguments alone: a search that goes on in another process draws what it would have drawn. `draw` counts
    draws for one point. The sampler is the tree-structured Parzen estimator, whose first ten points are drawn at random:
    https://optuna.readthedocs.io/en/stable/reference/samplers/generated/optuna.samplers.TPESampler.html
    """
    optuna = load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(values) for key, values in space.items()}
    sampler = optuna.samplers.TPESampler(seed=((seed * _SPREAD + len(trials)) * DRAWS + draw) % 2**32)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    for trial in trials:
        states = optuna.trial.TrialState
        study.add_trial(
            optuna.trial.create_trial(
                state=states.FAIL if trial.loss is None else states.COMPLETE,
                value=trial.loss,
                params={key: _parameter(space[key], text) for key, text in trial.values.items()},
                distributions=distributions,
            )
        )
    drawn = study.ask(distributions).params
    return {key: values.text(drawn[key]) if isinstance(values, Range) else drawn[key] for key, values in space.items()}


def load_optuna() -> Any:
    """Return the package. UserError where it is not installed."""
    try:
        import optuna
    except ImportError:
        fix = "pip install 'lustrain[search]'"
        raise UserError(problem("--search", OPTUNA, "is not installed here", fix=fix)) from None
    return optuna


def _distribution(values: Range | Choices) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, Choices):
        return CategoricalDistribution(values.examples)
    if values.whole:
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _parameter(values: Range | Choices, text: str) -> Any:
    if isinstance(values, Choices):
        return text
    return int(text) if values.whole else float(text)
