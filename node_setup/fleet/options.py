"""Options of all runs, from fabric.yaml or FABRIC_NODE_SETUP_* in the environment; flags override them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from lustrain.problem import Problem, UserError
from lustrain.schema import Section, problems_of
from node_setup.fleet.known_hosts import DEFAULT

SECTION = "node_setup"
OVER_SSM = 10
"""By default so many nodes at once are called over SSM: AWS does not publish how many sessions may begin in a second."""

Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


class Options(Section):
    """These options are checked: `max_parallel` nodes at once (0: 32, over SSM 10); `*_s` are seconds; `timeout_s` is for one
    node, `total_s` for all."""

    max_parallel: Annotated[int, Field(ge=0, le=1000)] = 0
    connect_s: Seconds = 10
    login_s: Seconds = 15
    channel_s: Seconds = 15
    timeout_s: Seconds = 300
    total_s: Seconds = 3600
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    python: Text = "python3"
    known_hosts: Text = DEFAULT
    strict_host_keys: bool = False

    def parallel(self, *, ssm: bool) -> int:
        return self.max_parallel or (OVER_SSM if ssm else 32)


DEFAULTS: Mapping[str, Any] = {SECTION: dict.fromkeys(Options.model_fields)}
"""This is for `Collection.configure`: Fabric reads only variables of the environment whose keys are there, and casts what has a
type by itself, with a traceback where it cannot; None leaves both to us."""


def options(configured: Mapping[str, Any], flags: Mapping[str, Any]) -> Options:
    """Return flags that were given, else what is configured, else the defaults. UserError lists all
    that are wrong; a configured value under a flag is not looked at."""
    written, given = (
        {name: value for name, value in values.items() if value is not None} for values in (configured, flags)
    )
    written = {name: value for name, value in written.items() if name not in given}
    problems = _problems(written, f"{SECTION}.{{}}".format)
    problems += _problems(given, lambda name: f"--{name.removesuffix('_s').replace('_', '-')}")
    if problems:
        raise UserError(problems)
    return Options(**{**written, **given})


def _problems(values: Mapping[str, Any], path: Callable[[str], str]) -> list[Problem]:
    try:
        Options(**values)
    except ValidationError as error:
        return [Problem(line.replace(line.path, path(line.path), 1)) for line in problems_of(error, Options)]
    return []
