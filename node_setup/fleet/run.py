"""One run of a task: its nodes, connections and concurrency; every mistake is reported before a node is contacted."""

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
from node_setup.fleet.pool import Concurrency, Outcome
from node_setup.fleet.protocol import Agent
from node_setup.fleet.transport import Connections, Limits
from node_setup.request import Tuning, check_tuning, request_for


@dataclass(frozen=True)
class FleetRun:
    """This is what `prepare` resolved; `notes` are lines for the reader that concern no single node."""

    options: Options
    inventory: Inventory
    tuning: Tuning
    connections: Connections
    concurrency: Concurrency
    agent: Agent
    notes: tuple[str, ...] = ()

    def call_agents(self, command: str) -> list[Outcome]:
        """Call every node's agent with one command."""
        return self.run_on_nodes(f"node {command}", self.agent_call(command))

    def agent_call(self, command: str) -> AgentCall:
        """Return the call of one command by one node's agent."""
        cluster = self.inventory.cluster

        def request(node: Node) -> Mapping[str, Any]:
            return request_for(node.group, self.tuning, cluster)

        # This machine's own facts and plan are anybody's to read; only what changes it takes root.
        privileged = command == "tune" or not all(node.local for node in self.inventory.nodes)
        return AgentCall(self.connections, self.agent, command, request, self.options.python, privileged)

    def run_on_nodes(self, label: str, work: pool.Work) -> list[Outcome]:
        nodes = self.inventory.nodes
        names, bad = [node.name for node in nodes], 0
        with Progress(label, len(names), "nodes", waiting=names, brief=True) as progress:

            def count(one: Outcome) -> None:
                nonlocal bad
                bad += not one.good
                progress.advance(note=f"{bad} not well" if bad else None, name=one.node.name)

            return pool.run(nodes, work, self.connections, self.concurrency, count, progress.tick)

    def close(self) -> None:
        self.connections.stop()


def prepare(
    context: Any,
    flags: Flags,
    tuning: Tuning,
    hosts: Hosts = (),
    list_nodes: Callable[[Source], Inventory] = inventory,
) -> FleetRun:
    """Resolve flags into a run. UserError with every line that keeps the task from beginning; no node is contacted by then."""
    try:
        return _prepare(context, flags, tuning, hosts, list_nodes)
    except KeyboardInterrupt:
        raise UserError("stopped by Ctrl-C before any node was contacted", FAILED) from None


def _prepare(
    context: Any, flags: Flags, tuning: Tuning, hosts: Hosts, list_nodes: Callable[[Source], Inventory]
) -> FleetRun:
    config = context.config if isinstance(context.config, Config) else Config()
    chosen = options(dict(config.get(SECTION) or {}), {**flags.options(), **_fabric_timeouts(config, flags)})
    limit, serial, percent = flags.amounts()
    selection = list_nodes(_source(flags, hosts))
    notes = list(selection.notes)
    if limit and limit < len(selection.nodes):
        notes.append(f"--limit: {limit} of {len(selection.nodes)} nodes")
        selection = replace(selection, nodes=selection.nodes[:limit])
    over_ssm = any(node.route.proxy for node in selection.nodes)
    concurrency = Concurrency(chosen.parallel(ssm=over_ssm), serial, percent, chosen.timeout_s, chosen.total_s)
    limits = Limits(chosen.connect_s, chosen.login_s, chosen.channel_s, chosen.retries)
    known = KnownHosts(chosen.known_hosts, strict=chosen.strict_host_keys)
    wanted = check_tuning(tuning, selection.cluster)
    agent = packed_agent(here=any(node.local for node in selection.nodes))
    return FleetRun(chosen, selection, wanted, Connections(known, limits, config), concurrency, agent, tuple(notes))


def packed_agent(*, here: bool = False) -> Agent:
    """Return the agent of this checkout; with `here` it runs from where it was packed, so that reading takes no root.

    UserError where its settings are wrong, OSError.
    """
    path = _packed_path() if here else None
    content = path.read_bytes() if path else pack.archive()
    return Agent(content, hashlib.sha256(content).hexdigest(), str(path or AGENT))


def _packed_path() -> Path:
    """Return the packed agent's path; where the checkout is not ours to write, in a temporary folder that goes with us."""
    try:
        return pack.pack_checkout()
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
    named = [_user_and_port(host) for host in given]
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


def _user_and_port(connection: Connection) -> tuple[str | None, int | None]:
    """Return user and port as -H names them. What Fabric fills in where it names none must not overrule the Cluster."""
    config = connection.config
    user = None if connection.user == config.user else str(connection.user)
    return user, None if connection.port == config.port else int(connection.port)


def _address(host: str, user: str | None, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host and port else host
    return (f"{user}@" if user else "") + shown + (f":{port}" if port else "")


def _fabric_timeouts(config: Config, flags: Flags) -> dict[str, Any]:
    """Return Fabric's own -t and -T, where no flag of ours says more."""
    connect = config.connect_kwargs.get("timeout") or config.timeouts.get("connect")
    command = config.timeouts.get("command")
    return {"connect_s": connect, "timeout_s": flags.timeout or command}
