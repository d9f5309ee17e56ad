"""A run that is handed over to one of its nodes, where a unit of systemd supervises it (`fab train --detach`)."""

from __future__ import annotations

import base64
import json
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launch import runs
from launch.backends import Submission
from launch.backends.ssh_nodes import IMAGE_S, REFUSED, Nodes
from launch.backends.ssh_unit import (
    RUNNING,
    Inspection,
    SshPlan,
    environment_text,
    parse_states,
    state_script,
    supervisor_log,
    supervisor_script,
    supervisor_unit,
)
from launch.container import Container
from launch.request import RunRequest
from lustrain import cluster as contract
from lustrain.cluster import Cluster
from lustrain.from_json import from_json
from lustrain.problem import FAILED, UNREACHABLE, UserError, problem
from node_setup.fleet.faults import NOT_REACHED, SUDO, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.inventory import with_route
from trainer import __version__
from trainer.run import journal
from trainer.storage import ObjectStore, StorageError

MODULE = "launch.backends.ssh_supervisor"
VARIABLE = "LUSTRAIN_HANDOVER"
CHECK_S = 300.0
"""For one node to look at all others; with an image, `IMAGE_S` more."""
TAKEN_OVER_S = 120.0
"""For the unit to load Lustrain and to read the run's record."""
POLL_S = 1.0
REACH_FIX = (
    "nodes have to log in to each other, and to themselves, as the Cluster's user by a key without passphrase in its "
    "~/.ssh, or by cluster.reach.key where that file is there too; or leave --detach out"
)


def encode(request: RunRequest, variables: Mapping[str, str], node: Node, requested: float | None) -> str:
    """Return all that the supervisor on `node` has to know, as one word. `requested`: when the run was registered, in Unix
    seconds; None where it is not yet."""
    options = request.options
    cluster = contract.to_json(options.cluster)
    if key := options.cluster.reach.key:
        cluster["reach"]["key"] = str(Path(key).expanduser())
    body = {
        "lustrain": __version__,
        "request": asdict(replace(request, options=None)),
        "cluster": cluster,
        "group": options.group,
        "efa": options.efa,
        "container": asdict(options.container) if options.container else None,
        "variables": dict(variables),
        "node": node.name,
        "requested": requested,
    }
    return base64.b64encode(zlib.compress(json.dumps(body).encode())).decode()


def decode(text: str) -> dict[str, Any]:
    """Return what `encode` was given, as plain JSON data. UserError where another Lustrain has written it."""
    body: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    if body["lustrain"] != __version__:
        fix = f"pip install 'lustrain[nodes]=={body['lustrain']}' there, or the node's version here"
        why = f"has lustrain {__version__}, which cannot take over from {body['lustrain']}"
        raise UserError(problem("--detach", body["node"], why, fix=fix))
    return body


def request_of(body: Mapping[str, Any], options: Callable[[Cluster, str, bool, Container | None], Any]) -> RunRequest:
    """Return the request of what `decode` returned; `options` makes the backend's own part."""
    container = from_json(Container, body["container"]) if body["container"] else None
    made = options(contract.parse(body["cluster"]), body["group"], body["efa"], container)
    return from_json(RunRequest, {**body["request"], "options": made})


def seen_from_node(cluster: Cluster, is_file: Callable[[str], bool] = lambda path: Path(path).is_file()) -> Cluster:
    """Return the Cluster as one of its nodes reaches the others: directly, by the same key where it is there too, else by the
    keys of the user who logs in."""
    key = cluster.reach.key if cluster.reach.key and is_file(cluster.reach.key) else None
    reach = cluster.reach.model_copy(update={"via": "ssh", "key": key, "jump": None, "ssm_target": None})
    return cluster.model_copy(update={"reach": reach})


def seen_from_outside(node: Node, cluster: Cluster) -> Node:
    """Return a node, which another node has reached, as the Cluster says to reach it."""
    route = replace(node.route, key=cluster.reach.key, jump=cluster.reach.jump)
    return with_route(node, cluster, route)


def supervisor_node(inspections: Mapping[Node, Inspection]) -> Node:
    """Return the first node that is ready. UserError where none is any more."""
    ready = [node for node, inspection in inspections.items() if not inspection.why]
    if not ready:
        raise UserError("no node is ready any more; fix: the same command again", FAILED)
    return ready[0]


def supervisor_python(request: RunRequest) -> str:
    """Return the interpreter on the node. That of an image is none: the supervisor runs on the node itself."""
    return sys.executable if request.options.container else request.python or sys.executable


def check_from_node(nodes: Nodes, node: Node, request: RunRequest, plan: SshPlan, *, resume: bool) -> None:
    """Have the node look at all others as it would to supervise the run; nothing is written. UserError."""
    unit = supervisor_unit(request.run)
    python = supervisor_python(request)
    variables = "".join(f"{name}={value}\n" for name, value in plan.variables.items())
    # A forwarded agent ends with this connection.
    script = 'unset SSH_AUTH_SOCK; while IFS= read -r line && [ -n "$line" ]; do export "$line"; done; cd /; '
    script += f"exec {shlex.join([python, '-m', MODULE, 'check', *(['--resume'] if resume else [])])}"
    seconds = CHECK_S + (IMAGE_S if plan.container else 0)
    try:
        if parse_states(nodes.run(node, state_script(unit))).get(unit) == RUNNING:
            fix = f"fab stop {request.run}, or let it go on"
            raise UserError(problem("--resume", request.run, f"unit {unit} on {node.name} supervises it", fix=fix))
        text = f"{variables}\n{encode(request, plan.variables, node, None)}"
        answer = json.loads(nodes.run(node, script, text, seconds=seconds).splitlines()[-1])
    except Fault as fault:
        fix = f"pip install 'lustrain[nodes]=={__version__}' there, for {python}; or leave --detach out"
        reached = fault.kind not in NOT_REACHED
        why = f"cannot supervise: {fault.why}"
        raise UserError(problem("--detach", node.name, why, fix=fix if reached else fault.fix), UNREACHABLE) from None
    except (ValueError, IndexError):
        raise UserError(problem("--detach", node.name, f"{python} -m {MODULE} printed no answer there")) from None
    if answer["error"]:
        raise UserError(answer["error"], answer["exit_code"])


def hand_over(
    nodes: Nodes,
    node: Node,
    request: RunRequest,
    plan: SshPlan,
    store: ObjectStore,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Submission:
    """Start the unit that supervises the registered run, and wait until it has taken the run over. UserError."""
    unit, ours = supervisor_unit(request.run), _owner(store)
    handover = encode(request, plan.variables, node, ours[2])

    def is_taken() -> bool:
        # A store that does not answer just now is no reason to end: the run would be unregistered under a living supervisor.
        with suppress(StorageError):
            return _owner(store) != ours
        return False

    words = [supervisor_python(request), "-m", MODULE, "train"]
    script = supervisor_script(unit, words, str(node.route.user or request.options.cluster.reach.user), plan.stop_s)
    started = True
    try:
        nodes.run(node, script, environment_text({**plan.variables, VARIABLE: handover}, 0), root=True)
    except Fault as fault:
        if fault.kind in (*NOT_REACHED, REFUSED, SUDO):
            raise UserError(f"{node.name}: the supervisor was not started: {fault.why}", FAILED) from None
        # A lost connection is no refusal: the unit may be there, or come.
        started = False
    until = clock() + TAKEN_OVER_S
    while not is_taken():
        if started and not _may_run(nodes, node, unit) and not is_taken():
            why = _last_line(nodes, node, request.run)
            raise UserError(f"{node.name}: the supervisor ended before it took the run over: {why}", FAILED)
        if clock() > until:
            fix = f"fab logs {request.run}; once it answers: fab train … --resume"
            why = "whether the supervisor has taken the run over is not known"
            raise UserError(f"{node.name}: {why}; fix: {fix}", UNREACHABLE)
        sleep(POLL_S)
    lines = (f"{request.run}: supervised on {node.name} by unit {unit}", f"next: fab status {request.run}")
    return Submission(lines, {"run": request.run, "supervisor": {"node": node.name, "unit": unit}})


def _owner(store: ObjectStore) -> tuple[Any, Any, Any]:
    record = runs.read_record(store, journal.REQUEST) or {}
    return record.get("host"), record.get("pid"), record.get(journal.REQUESTED_AT)


def _may_run(nodes: Nodes, node: Node, unit: str) -> bool:
    try:
        return parse_states(nodes.run(node, state_script(unit))).get(unit) == RUNNING
    except Fault:
        return True


def _last_line(nodes: Nodes, node: Node, run: str) -> str:
    try:
        lines = nodes.run(node, f"tail -n 1 {supervisor_log(run)}", root=True).splitlines()
    except Fault as fault:
        return fault.why
    return lines[-1] if lines else "it has printed nothing"
