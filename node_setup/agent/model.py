"""The plain data that facts, plan, apply and report exchange; it goes through JSON unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from lustrain.status import Status

Facts = Mapping[str, Any]
"""This is what a node shows of itself; the keys are listed in `node_setup.agent.facts.schema`."""

EXIT_IN_SYNC, EXIT_FAILED, EXIT_DRIFT, EXIT_REFUSED, EXIT_OTHER_AGENT = 0, 1, 2, 4, 96
"""These are the agent's exit codes. 96: the node holds no agent or another version of it; the caller sends its own and calls
again."""

RUNTIME, PERSISTED = "runtime", "persisted"


@dataclass(frozen=True)
class Setting:
    """This is one value of `settings/*.toml`. `when` are the conditions on facts that all must hold, as written there.

    `severity` is `must` where a node without it may not take jobs (a boot then fails) and `should` otherwise. `default` is
    False for what is only done when the cluster's tuning or a flag names it. `options` is what the kind wants besides.
    `value_per` is the path of a fact and what it is multiplied with, in place of a value; `allowed` is what an override may be.
    """

    id: str
    kind: str
    profiles: tuple[str, ...]
    reason: str
    source: str
    key: str = ""
    value: str = ""
    value_per: tuple[str, float] | None = None
    compare: str = "exact"
    allowed: str = "text"
    when: tuple[str, ...] = ()
    severity: str = "should"
    default: bool = True
    needs: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Write:
    """Put a whole file in place atomically."""

    path: str
    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class Remove:
    """Take away a file that is ours."""

    path: str


@dataclass(frozen=True)
class Put:
    """Write a value into a file of /proc or /sys."""

    path: str
    value: str


@dataclass(frozen=True)
class Run:
    """Run a program; its result counts only after facts were read again.

    `busy` is what it complains of when another program has the lock that it needs: it is then run again for a while.
    One that fails is run `tries` times in all, with a pause before each further one.
    """

    command: tuple[str, ...]
    timeout_s: float = 60.0
    busy: str = ""
    tries: int = 1


@dataclass(frozen=True)
class Copy:
    """Put a copy of the file `source` in place atomically, byte by byte; `source` is a path of the running agent, not of the
    host's root."""

    source: str
    path: str
    mode: int = 0o644


Action = Union[Write, Remove, Put, Run, Copy]


@dataclass(frozen=True)
class Step:
    """This is one thing that `apply` does, for one setting's runtime state or persisted artefact.

    `needs` is empty, or what must follow before the change is in effect: `reboot`, `remount`, `restart of slurmd`.
    """

    setting: str
    part: str
    target: str
    current: str | None
    wanted: str
    actions: tuple[Action, ...]
    needs: str = ""


@dataclass(frozen=True)
class Remark:
    """This is what a plan reports of a setting that it does not change."""

    setting: str
    status: Status
    why: str
    current: str | None = None
    wanted: str | None = None


@dataclass(frozen=True)
class Request:
    """This is what the caller wants: the cluster's node document, and what flags add to it for this once.

    `document` has the form of `lustrain.cluster.node_document`; `overrides` maps a setting's id to a value, or to `on` or
    `off`. `expect` is what only the operator's side knows and `verify` compares with, e.g. `lustre_source`.
    """

    document: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    profile: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    force: bool = False
    allow_reboot: bool = False
    expect: Mapping[str, Any] = field(default_factory=dict)


def look_up(tree: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Return whether there is a value at a dotted path, and the value; of keys that hold dots the longest that is there is
    taken."""
    if path in tree:
        return True, tree[path]
    end = path.rfind(".")
    while end > 0:
        inner = tree.get(path[:end])
        if isinstance(inner, Mapping):
            exists, value = look_up(inner, path[end + 1 :])
            if exists:
                return True, value
        end = path.rfind(".", 0, end)
    return False, None


def format_value(value: Any) -> str:
    """Write a fact as a person reads it and as conditions and settings write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value)
