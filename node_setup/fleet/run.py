"""One run of a task: its nodes, connections and pace; every mistake is found before a node is reached."""

from __future__ import annotations

import atexit
import errno
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fabric import Config, Connection

from lustrain.problem import FAILED, UserError
from lustrain.progress import Progress
from node_setup import pack
from node_setup.agent.owned import AGENT
from node_setup.fleet import pool
from node_setup.fleet.agent_call import AgentCall
from node_setup.fleet.flags import Flags, Hosts
from node_setup.fleet.hosts import Node
from node_setup.fleet.inventory import Inventory, Source, inventory
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.options import SECTION, Options, options
from node_setup.fleet.pool import Outcome, Pace
from node_setup.fleet.protocol import Agent
from node_setup.fleet.transport import Limits, Ways
from node_setup.request import Tuning, checked, request_for


@dataclass(frozen=True)
class FleetRun:
    """What `prepare` found; `notes` are lines for the reader that concern no single node."""

    options: Options
    inventory: Inventory
    tuning: Tuning
    ways: Ways
    pace: Pace
    agent: Agent
    notes: tuple[str, ...] = ()

    def ask(self, command: str) -> list[Outcome]:
        """Call every node's agent with one command."""
        return self.each(f"node {command}", self.asker(command))

    def asker(self, command: str) -> AgentCall:
        """Asks one node's agent one command."""
        cluster = self.inventory.cluster

        def request(node: Node) -> Mapping[str, Any]:
            return request_for(node.group, self.tuning, cluster)

        # This machine's own facts and plan are anybody's to read; only what changes it takes root.
        privileged = command == "tune" or not all(node.local for node in self.inventory.nodes)
        return AgentCall(self.ways, self.agent, command, request, self.options.python, privileged)

    def each(self, label: str, work: pool.Work) -> list[Outcome]:
        nodes = self.inventory.nodes
        names, bad = [node.name for node in nodes], 0
        with Progress(label, len(names), "nodes", waiting=names, brief=True) as progress:

            def count(one: Outcome) -> None:
                nonlocal bad
                bad += not one.good
                progress.advance(note=f"{bad} not well" if bad else None, name=one.node.name)

            return pool.run(nodes, work, self.ways, self.pace, count, progress.beat)

    def close(self) -> None:
        self.ways.stop()


def prepare(
    context: Any,
    flags: Flags,
    tuning: Tuning,
    hosts: Hosts = (),
    look: Callable[[Source], Inventory] = inventory,
) -> FleetRun:
    """UserError with every line that keeps the task from beginning; no node was reached by then."""
    try:
        return _prepare(context, flags, tuning, hosts, look)
    except KeyboardInterrupt:
        raise UserError("stopped by Ctrl-C before any node was contacted", FAILED) from None


def _prepare(context: Any, flags: Flags, tuning: Tuning, hosts: Hosts, look: Callable[[Source], Inventory]) -> FleetRun:
    config = context.config if isinstance(context.config, Config) else Config()
    chosen = options(dict(config.get(SECTION) or {}), {**flags.options(), **_core(config, flags)})
    limit, serial, percent = flags.amounts()
    found = look(_source(flags, hosts))
    notes = list(found.notes)
    if limit and limit < len(found.nodes):
        notes.append(f"--limit: {limit} of {len(found.nodes)} nodes")
        found = replace(found, nodes=found.nodes[:limit])
    over_ssm = any(node.route.proxy for node in found.nodes)
    pace = Pace(chosen.parallel(ssm=over_ssm), serial, percent, chosen.timeout_s, chosen.total_s)
    limits = Limits(chosen.connect_s, chosen.login_s, chosen.channel_s, chosen.retries)
    known = KnownHosts(chosen.known_hosts, strict=chosen.strict_host_keys)
    wanted = checked(tuning, found.cluster)
    agent = packed(here=any(node.local for node in found.nodes))
    return FleetRun(chosen, found, wanted, Ways(known, limits, config), pace, agent, tuple(notes))


def packed(*, here: bool = False) -> Agent:
    """Return the agent of this checkout; `here` it is run from where it was packed, so that looking takes no root.

    UserError where its settings are wrong, OSError.
    """
    path = _here() if here else None
    content = path.read_bytes() if path else pack.archive()
    return Agent(content, hashlib.sha256(content).hexdigest(), str(path or AGENT))


def _here() -> Path:
    """Return the packed agent's path; where the checkout is not ours to write, in a temporary folder that goes with us."""
    try:
        return pack.packed()
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    folder = Path(tempfile.mkdtemp(prefix="lustrain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pack.pack(folder / pack.NAME)
    return folder / pack.NAME


def _source(flags: Flags, given: Hosts) -> Source:
    """Join the flags and the hosts of Fabric's own -H."""
    source = flags.source()
    if not given:
        return source
    if source.nodes or source.hosts_file or source.local:
        raise UserError("-H and --nodes, --hosts-file or --local name different nodes; fix: give one of them")
    named = [_named(host) for host in given]
    hosts = [host.original_host for host in given]
    if len(set(named)) == 1:
        user, port = named[0]
        return replace(
            source, nodes=",".join(hosts), route=replace(source.route, user=source.route.user or user, port=port)
        )
    addresses = [
        _address(host, source.route.user or user, port) for host, (user, port) in zip(hosts, named, strict=True)
    ]
    return replace(source, nodes=",".join(addresses))


def _named(connection: Connection) -> tuple[str | None, int | None]:
    """User and port as -H names them. What Fabric fills in where it names none must not overrule the Cluster."""
    config = connection.config
    user = None if connection.user == config.user else str(connection.user)
    return user, None if connection.port == config.port else int(connection.port)


def _address(host: str, user: str | None, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host and port else host
    return (f"{user}@" if user else "") + shown + (f":{port}" if port else "")


def _core(config: Config, flags: Flags) -> dict[str, Any]:
    """Fabric's own -t and -T, where no flag of ours says more."""
    connect = config.connect_kwargs.get("timeout") or config.timeouts.get("connect")
    command = config.timeouts.get("command")
    return {"connect_s": connect, "timeout_s": flags.timeout or command}
