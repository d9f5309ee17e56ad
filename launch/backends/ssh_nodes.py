"""Scripts on many nodes at once, over sessions that stay open."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fabric import Config

from launch.backends.ssh_unit import Inspection, SshPlan, inspect_script, parse_inspection, with_engine
from launch.container import trial_script
from lustrain.cluster import Cluster
from lustrain.from_json import from_json
from lustrain.problem import UserError, problem
from node_setup.fleet.faults import SUDO, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.inventory import cluster_nodes, ended_instances
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.options import SECTION, options
from node_setup.fleet.session import Completed, Session
from node_setup.fleet.transport import Connections, Deadline, Limits

T = TypeVar("T")
CALL_S = 60.0
"""For one script on one node, with its connection."""
IMAGE_S = 1200.0
"""For a node to fetch the image, and to start a container of it."""
IMAGE_AGAIN_S = 60.0
"""After which a node that has refused an image is tried again: registries count requests."""
IMAGE_FIX = "mend that, or give another --image; docs/launch.md says what a node needs"
REFUSED = "refused"


class Nodes:
    """The nodes of a run. Every script is a word of `sh -c`; what must not stand on a command line is its input."""

    def __init__(self) -> None:
        config = Config()
        chosen = options(dict(config.get(SECTION) or {}), {})
        # What does not answer is looked at again anyway.
        limits = Limits(chosen.connect_s, chosen.login_s, chosen.channel_s, retries=0)
        known = KnownHosts(chosen.known_hosts, strict=chosen.strict_host_keys)
        self._connections = Connections(known, limits, config)
        self._sessions: dict[Node, Session] = {}
        self._refusals: dict[Node, tuple[float, Fault]] = {}
        """Of an image: when, and why."""
        self._options = chosen

    def close(self) -> None:
        self._connections.stop()

    def run(self, node: Node, script: str, stdin: str = "", *, root: bool = False, seconds: float = CALL_S) -> str:
        """Return the output of a script that ends with 0. Fault; of kind REFUSED where the script ended otherwise."""
        return self.read(node, script, stdin, root=root, seconds=seconds).decode(errors="replace")

    def read(self, node: Node, script: str, stdin: str = "", *, root: bool = False, seconds: float = CALL_S) -> bytes:
        """Return the same as bytes."""
        try:
            session = self._session(node, seconds)
            done = session.execute(_command(session, script, root=root), stdin.encode(), seconds)
        except Fault:
            if (broken := self._sessions.pop(node, None)) is not None:
                self._connections.close(broken)
            raise
        if done.status:
            raise _refusal(session, done)
        return done.out

    def each(self, nodes: Iterable[Node], work: Callable[[Node], T]) -> dict[Node, T | Fault]:
        """Do the work with all nodes at once."""

        def safely(node: Node) -> T | Fault:
            try:
                return work(node)
            except Fault as fault:
                return fault

        listed = list(nodes)
        at_once = self._options.parallel(ssm=any(node.route.proxy for node in listed))
        with ThreadPoolExecutor(max(1, min(at_once, len(listed)))) as pool:
            try:
                return dict(zip(listed, pool.map(safely, listed), strict=True))
            except KeyboardInterrupt:
                self.stop()
                raise

    def stop(self) -> None:
        """Wait for no node any longer: all calls end with a Fault. What runs on nodes goes on."""
        self._connections.stopped.set()

    def inspect(
        self, nodes: Iterable[Node], plan: SshPlan, *, seconds: float = CALL_S, try_image: bool = True
    ) -> dict[Node, Inspection]:
        """Return whether nodes are ready for a launch. Nothing is changed on them but that they have the image.

        `seconds` are for one node, without its image. Without `try_image` that is not fetched, and may not start.
        """
        given = "".join(f"{name}={value}\n" for name, value in plan.variables.items())
        script = inspect_script(None if plan.container else plan.python)

        def inspect(node: Node) -> Inspection:
            answer = self.run(node, script, given, seconds=seconds)
            inspection = parse_inspection(answer, plan.python, node.route.user or "")
            if inspection.why or plan.container is None or not try_image:
                return inspection
            trial = trial_script(plan.container, tuple(plan.variables), inspection.ids, inspection.groups, plan.python)
            try:
                return with_engine(inspection, self._try_image(node, trial))
            except Fault as fault:
                why = f"no container of {plan.container.image} starts there: {fault.why}"
                return replace(inspection, why=why, fix=IMAGE_FIX)

        return {
            node: Inspection("", {}, f"{answer.kind}: {answer.why}", answer.fix)
            if isinstance(answer, Fault)
            else answer
            for node, answer in self.each(nodes, inspect).items()
        }

    def _try_image(self, node: Node, trial: str) -> str:
        """Return what the trial says. Fault."""
        at, refusal = self._refusals.pop(node, (0.0, None))
        if refusal is None or time.monotonic() - at > IMAGE_AGAIN_S:
            try:
                return self.run(node, trial, root=True, seconds=IMAGE_S)
            except Fault as fault:
                at, refusal = time.monotonic(), fault
        if refusal.kind == REFUSED:
            self._refusals[node] = at, refusal
        raise refusal

    def _session(self, node: Node, seconds: float) -> Session:
        session = self._sessions.get(node)
        if session is None:
            session = self._connections.connect(node, Deadline(seconds))
            self._sessions[node] = session
        return session


def _command(session: Session, script: str, *, root: bool) -> str:
    words = ["sh", "-c", script]
    return shlex.join(["env", "LC_ALL=C", "sudo", "-n", *words] if root and not session.root else words)


def _refusal(session: Session, done: Completed) -> Fault:
    answer = done.err.decode(errors="replace").strip().splitlines() or [f"exit code {done.status}"]
    if answer[-1].startswith("sudo:"):
        return Fault(SUDO, answer[-1], session.root_fix)
    return Fault(REFUSED, answer[-1])


def nodes_of_group(cluster: Cluster, group: str) -> list[Node]:
    """Return the nodes that a group has now. UserError."""
    return cluster_nodes(cluster, (group,))


def all_nodes(cluster: Cluster) -> list[Node]:
    """Return the nodes of all groups. UserError."""
    return cluster_nodes(cluster, ())


def ended_nodes(cluster: Cluster, nodes: Iterable[Node]) -> set[Node]:
    """Return which nodes are instances that have ended. UserError.

    That a Cluster does not list a node is no proof: the machine may be of another group, or of a list that was changed.
    """
    if not cluster.nodes.auto_scaling_groups:
        return set()
    by_id = {node.instance_id: node for node in nodes if node.instance_id}
    return {by_id[one] for one in ended_instances(cluster, list(by_id))}


def as_record(node: Node) -> dict[str, Any]:
    """Return what another `fab` needs to reach the node; no secret, but the path of a key."""
    return asdict(node)


def from_record(record: Any, run: str) -> Node:
    """Return the node of a record. UserError where `fab train` did not write it."""
    try:
        return from_json(Node, record)
    except (KeyError, TypeError, ValueError):
        raise UserError(problem("RUN", run, "the record of its nodes is not one that fab train wrote")) from None
