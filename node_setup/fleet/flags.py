"""The flags that all node tasks share, and their form: under Fabric's own -H a task is one run over all hosts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fabric import Connection
from invoke.tasks import task

from lustrain.flags import CLUSTER, JSON, STACK, flag, number
from lustrain.problem import UserError, problem
from lustrain.task import TaskResult, declared, filled, flags_of, perform

if TYPE_CHECKING:
    from node_setup.fleet.inventory import Source


@dataclass(frozen=True)
class Flags:
    """These are the flags that all tasks share, as given."""

    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    nodes: str | None = flag(
        None, "machines by address: a,b,c as [user@]host[:port]; over SSM by instance id (-H does the same)"
    )
    hosts_file: str | None = flag(None, "file with a Cluster or with lines `host [group]`")
    local: bool = flag(False, "this machine, without SSH")
    group: str | None = flag(None, "only nodes of these groups, like train,login")
    node: str | None = flag(None, "only nodes whose name, address or instance id matches, like 'ip-10-0-*'")
    limit: str | None = flag(None, "only the first N nodes: a canary")
    serial: str | None = flag(None, "N nodes after N nodes")
    fail_percent: str | None = flag(None, "begin no further batch once more than P percent of the nodes failed")
    user: str | None = flag(None, "log in as this user, like ubuntu")
    key: str | None = flag(None, "private key to log in with, like ~/.ssh/id_ed25519")
    jump: str | None = flag(None, "go through user@host[:port]")
    strict_host_keys: bool = flag(False, "let in only machines whose host key is recorded")
    known_hosts: str | None = flag(None, "where host keys are recorded (~/.lustrain/known_hosts)")
    max_parallel: str | None = flag(None, "nodes at once (32; over SSM 10)")
    timeout: str | None = flag(None, "seconds for one node (300)")
    total: str | None = flag(None, "seconds for all nodes (3600)")
    python: str | None = flag(None, "interpreter on the nodes, like /usr/bin/python3.11 (python3)")
    json: bool = flag(False, JSON)

    def source(self) -> Source:
        """Return where nodes are taken from. UserError names the flags that are empty."""
        from node_setup.fleet.hosts import Route
        from node_setup.fleet.inventory import Source

        self._refuse_empty()
        groups = tuple(filter(None, (word.strip() for word in (self.group or "").split(","))))
        route = Route(user=self.user, key=self.key, jump=self.jump)
        return Source(self.cluster, self.stack, self.nodes, self.hosts_file, self.local, groups, self.node, route)

    def options(self) -> dict[str, Any]:
        """Return the flags that may be configured as well (`options`); None where they were not given."""
        names = ("known_hosts", "max_parallel", "python")
        given = {name: getattr(self, name) for name in names}
        return given | {
            "strict_host_keys": self.strict_host_keys or None,
            "timeout_s": self.timeout,
            "total_s": self.total,
        }

    def amounts(self) -> tuple[int, int, float | None]:
        """Return `limit` and `serial`, 0 where not given, and `fail_percent`. UserError."""
        limit = number("--limit", self.limit, 1, 100_000) if self.limit is not None else 0
        serial = number("--serial", self.serial, 1, 100_000) if self.serial is not None else 0
        percent = (
            None if self.fail_percent is None else number("--fail-percent", self.fail_percent, 0, 100, whole=False)
        )
        return int(limit), int(serial), percent

    def _refuse_empty(self) -> None:
        # What a shell makes of a variable that is not set must not mean "all of them".
        given = [(field.name, getattr(self, field.name)) for field in fields(Flags)]
        empty = [(name, text) for name, text in given if isinstance(text, str) and not text.strip(" ,\t\n")]
        if empty:
            fix = "name something, or leave the flag out"
            raise UserError(problem(f"--{name.replace('_', '-')}", text, "is empty", fix=fix) for name, text in empty)


Hosts = tuple[Connection, ...]
"""These are the connections of Fabric's own -H, none of them open."""


def node_task(name: str) -> Callable[[Callable[..., TaskResult]], Any]:
    """Declare a task of `fab` from a function of its flags, Invoke's context and `Hosts`."""

    def decorate(body: Callable[..., TaskResult]) -> Any:
        kind = flags_of(body)
        gathered: list[tuple[Connection, Mapping[str, Any]]] = []

        def run(context: Any, given: Mapping[str, Any], hosts: Hosts = ()) -> None:
            flags = filled(kind, given)
            perform(lambda: body(flags, context, hosts), as_json=flags.json)

        # Under -H Fabric calls a task once a host, one after another, and ends with the first that fails. As one run they
        # are worked on at once, each has its outcome, and `--json` prints one object.
        def run_on_all(context: Any) -> None:
            hosts = tuple(connection for connection, _ in gathered)
            if hosts:
                given = gathered[-1][1]
                gathered.clear()
                run(hosts[0], given, hosts)

        @functools.wraps(body)
        def call(context: Any, **given: Any) -> None:
            if isinstance(context, Connection):
                gathered.append((context, given))
            else:
                run(context, given)

        return declared(name, kind, call, post=[task(name=f"{name} of all -H")(run_on_all)])

    return decorate
