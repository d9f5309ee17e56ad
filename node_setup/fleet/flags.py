"""Flags that all tasks share, said once: each task's signature is its own flags and these, so that `fab --help` shows all."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fabric import Connection, task
from invoke.exceptions import Exit

from lustrain.problem import FAILED, UserError, problem
from node_setup.fleet.hosts import Route
from node_setup.fleet.inventory import Source

WHERE: Mapping[str, tuple[Any, str]] = {
    "cluster": (None, "file with a Cluster; else LUSTRAIN_CLUSTER in the environment"),
    "stack": (None, "take the Cluster from the output of the Pulumi stack of this name, like org/project/prod"),
    "nodes": (None, "machines by address: a,b,c as [user@]host[:port]; over SSM by instance id (-H does the same)"),
    "hosts_file": (None, "file with a Cluster or with lines `host [group]`"),
    "local": (False, "this machine, without SSH"),
    "group": (None, "only nodes of these groups, like train,login"),
    "node": (None, "only nodes whose name, address or instance id matches, like 'ip-10-0-*'"),
    "limit": (None, "only the first N nodes: a canary"),
    "serial": (None, "N nodes after N nodes"),
    "fail_percent": (None, "begin no further batch once more than P percent of the nodes failed"),
    "user": (None, "log in as this user, like ubuntu"),
    "key": (None, "private key to log in with, like ~/.ssh/id_ed25519"),
    "jump": (None, "go through user@host[:port]"),
    "strict_host_keys": (False, "let in only machines whose host key is recorded"),
    "known_hosts": (None, "where host keys are recorded (~/.lustrain/known_hosts)"),
    "max_parallel": (None, "nodes at once (32; over SSM 10)"),
    "timeout": (None, "seconds for one node (300)"),
    "total": (None, "seconds for all nodes (3600)"),
    "python": (None, "interpreter on the nodes, like /usr/bin/python3.11 (python3)"),
    "json": (False, "print one JSON object"),
}


@dataclass(frozen=True)
class Flags:
    """The values of `WHERE`, as given."""

    cluster: str | None = None
    stack: str | None = None
    nodes: str | None = None
    hosts_file: str | None = None
    local: bool = False
    group: str | None = None
    node: str | None = None
    limit: str | None = None
    serial: str | None = None
    fail_percent: str | None = None
    user: str | None = None
    key: str | None = None
    jump: str | None = None
    strict_host_keys: bool = False
    known_hosts: str | None = None
    max_parallel: str | None = None
    timeout: str | None = None
    total: str | None = None
    python: str | None = None
    json: bool = False
    connections: tuple[Connection, ...] = ()
    """Those of Fabric's own -H, none of them open."""

    @property
    def source(self) -> Source:
        """Where nodes are taken from. UserError names the flags that are empty."""
        self._refuse_empty()
        groups = tuple(filter(None, (word.strip() for word in (self.group or "").split(","))))
        route = Route(user=self.user, key=self.key, jump=self.jump)
        return Source(self.cluster, self.stack, self.nodes, self.hosts_file, self.local, groups, self.node, route)

    @property
    def options(self) -> dict[str, Any]:
        """Those that may be configured as well (`options`); None where they were not given."""
        names = ("known_hosts", "max_parallel", "python")
        given = {name: getattr(self, name) for name in names}
        return given | {
            "strict_host_keys": self.strict_host_keys or None,
            "timeout_s": self.timeout,
            "total_s": self.total,
        }

    def _refuse_empty(self) -> None:
        # What a shell makes of a variable that is not set must not mean "all of them".
        empty = [(name, getattr(self, name)) for name in WHERE if isinstance(getattr(self, name), str)]
        empty = [(name, text) for name, text in empty if not text.strip(" ,\t\n")]
        if empty:
            fix = "name something, or leave the flag out"
            raise UserError(
                [problem(f"--{name.replace('_', '-')}", text, "is empty", fix=fix) for name, text in empty], FAILED
            )

    def amounts(self) -> tuple[int, int, float | None]:
        """`limit` and `serial`, 0 where not given, and `fail_percent`. UserError."""
        limit = number("--limit", self.limit, 1, 100_000)
        serial = number("--serial", self.serial, 1, 100_000)
        percent = number("--fail-percent", self.fail_percent, 0, 100)
        return int(limit or 0), int(serial or 0), percent


def number(flag: str, text: str | None, least: float, most: float) -> float | None:
    """UserError where the flag's value is no number, or not in range."""
    if text is None:
        return None
    try:
        value = float(text) if flag == "--fail-percent" else int(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise UserError(problem(flag, text, "is no number in range", allowed=f"{least:g}..{most:g}"), FAILED)
    return value


def node_task(name: str, iterable: tuple[str, ...] = (), **helps: str) -> Callable[[Callable[..., None]], Any]:
    """A Fabric task whose function gets `Flags` after the context, and its own flags by name; `helps` describes those."""

    def decorate(body: Callable[..., None]) -> Any:
        gathered: list[tuple[Connection, dict[str, Any]]] = []

        # Under -H Fabric calls a task once a host, one after another, and ends with the first that fails. As one run they
        # are worked on at once, each has its outcome, and `--json` prints one object.
        def together(context: Any) -> None:
            hosts = tuple(connection for connection, _ in gathered)
            if hosts:
                given = gathered[-1][1]
                gathered.clear()
                _run(name, body, hosts[0], given, hosts)

        @functools.wraps(body)
        def call(context: Any, **given: Any) -> None:
            if isinstance(context, Connection):
                gathered.append((context, given))
            else:
                _run(name, body, context, given)

        call.__signature__ = _signature(body)  # type: ignore[attr-defined]
        described = {**helps, **{flag: text for flag, (_, text) in WHERE.items()}}
        after = [task(name=f"{name} of all -H")(together)]
        made = task(name=name, iterable=list(iterable), help=described, auto_shortflags=False, post=after)
        return made(call)

    return decorate


def _signature(body: Callable[..., None]) -> inspect.Signature:
    """The function's own, with the flags that all tasks share in place of `Flags`."""
    own = list(inspect.signature(body).parameters.values())
    common = [
        inspect.Parameter(flag, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for flag, (default, _) in WHERE.items()
    ]
    return inspect.Signature([own[0], *own[2:], *common])


def _run(
    name: str,
    body: Callable[..., None],
    context: Any,
    given: Mapping[str, Any],
    connections: tuple[Connection, ...] = (),
) -> None:
    """The task; a user's mistake and Ctrl-C end it with their lines and an exit code."""
    flags = Flags(**{flag: given[flag] for flag in WHERE if flag in given}, connections=connections)
    lines: Sequence[str]
    try:
        body(context, flags, **{flag: value for flag, value in given.items() if flag not in WHERE})
    except UserError as error:
        lines, code = error.problems, error.exit_code
    except KeyboardInterrupt:
        lines, code = ["stopped by Ctrl-C"], FAILED
    else:
        return
    if flags.json:
        print(json.dumps({"version": 1, "command": name, "exit": code, "error": list(lines)}, indent=1))
    raise Exit("\n".join(lines), code)
