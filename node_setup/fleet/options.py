"""Options of all runs, from fabric.yaml or FABRIC_NODE_SETUP_* in the environment; flags override them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lustrain.problem import UserError, did_you_mean, problem
from node_setup.fleet.known_hosts import DEFAULT

SECTION = "node_setup"
OVER_SSM = 10
"""Nodes at once over SSM by default: AWS does not publish how many sessions may begin in a second."""


@dataclass(frozen=True)
class Options:
    """`max_parallel` nodes at once (0: 32, over SSM 10); `*_s` are seconds; `timeout_s` is for one node, `total_s` for all."""

    max_parallel: int = 0
    connect_s: float = 10
    login_s: float = 15
    channel_s: float = 15
    timeout_s: float = 300
    total_s: float = 3600
    retries: int = 2
    python: str = "python3"
    known_hosts: str = DEFAULT
    strict_host_keys: bool = False

    def parallel(self, *, ssm: bool) -> int:
        return self.max_parallel or (OVER_SSM if ssm else 32)


DEFAULTS: Mapping[str, Any] = {SECTION: {field.name: None for field in fields(Options)}}
"""For `Collection.configure`: Fabric reads only variables of the environment whose keys are there, and casts what has a
type by itself, with a traceback where it cannot; None leaves both to us."""


def options(configured: Mapping[str, Any], flags: Mapping[str, Any]) -> Options:
    """Return flags that were given, else what is configured, else the defaults. UserError lists every wrong value."""
    problems, values = [], {}
    known = {field.name: field for field in fields(Options)}
    for name in configured:
        if name not in known:
            fix = did_you_mean(str(name), known) or f"remove it; known here: {', '.join(known)}"
            problems.append(problem(f"{SECTION}.{name}", configured[name], "unknown key", fix=fix))
    for name in known:
        given = flags.get(name)
        path, value = (f"--{name.removesuffix('_s').replace('_', '-')}", given)
        if given is None:
            path, value = f"{SECTION}.{name}", configured.get(name)
        if value is None:
            continue
        read, allowed = _KINDS[name]
        try:
            values[name] = read(value)
        except (TypeError, ValueError):
            problems.append(problem(path, value, "wrong value", allowed=allowed))
    if problems:
        raise UserError(problems)
    return Options(**values)


def whole(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not least <= int(str(value)) <= most:
            raise ValueError
        return int(str(value))

    return read


def _seconds(value: Any) -> float:
    seconds = float(str(value))
    if not 0 < seconds <= 86400:
        raise ValueError
    return seconds


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _switch(value: Any) -> bool:
    word = str(value).lower()
    if word not in ("true", "yes", "1", "false", "no", "0", ""):
        raise ValueError
    return word in ("true", "yes", "1")


_SECONDS = (_seconds, "seconds, more than 0, at most 86400")
_KINDS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "max_parallel": (whole(0, 1000), "0..1000; 0 is 32, or 10 over SSM"),
    "connect_s": _SECONDS,
    "login_s": _SECONDS,
    "channel_s": _SECONDS,
    "timeout_s": _SECONDS,
    "total_s": _SECONDS,
    "retries": (whole(0, 20), "0..20"),
    "python": (_text, "a program's name or path"),
    "known_hosts": (_text, "a file's path"),
    "strict_host_keys": (_switch, "true, false"),
}
