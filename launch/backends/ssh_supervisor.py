"""The supervisor of a run on one of its nodes: `python -m launch.backends.ssh_supervisor check|train`, as `fab train --detach`
calls it there."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import runs
from launch.backends import LaunchPlan
from launch.backends.ssh import BACKEND, SshOptions, recorded_nodes, save_nodes, submission_of, supervise_run
from launch.backends.ssh_handover import REACH_FIX, VARIABLE, decode, request_of, seen_from_node, seen_from_outside
from launch.backends.ssh_nodes import nodes_of_group
from launch.request import RunRequest
from lustrain.cluster import Cluster
from lustrain.problem import UserError, problem
from lustrain.progress import print_line
from node_setup.fleet.hosts import Node
from trainer.run import journal
from trainer.storage import ObjectMissingError, ObjectStore, open_store


def check(body: dict[str, Any], *, resume: bool) -> None:
    """Refuse to supervise where this node lacks a way to the others or to the run's store; nothing is written. UserError."""
    request = _request(body, seen=True)
    if "://" in request.run or resume:
        # A folder is made when all is well.
        runs.read_record(open_store(request.run, create=False, name="run.uri"), journal.REQUEST)
    try:
        BACKEND.check(request, LaunchPlan(()), Path("/"), resume=resume)
    except UserError as error:
        line = problem("--detach", body["node"], "does not reach enough nodes to supervise the run", fix=REACH_FIX)
        raise UserError([*error.problems, line], error.exit_code) from None


def train(body: dict[str, Any]) -> int:
    """Take the registered run over, supervise it to its end, and return its exit code. UserError."""
    outside: Cluster = _request(body, seen=False).options.cluster
    request = _request(body, seen=True)
    store = open_store(request.run, create=False, name="run.uri")
    # Who waits for this process hears of no fault after it has taken the run over.
    listed = nodes_of_group(request.options.cluster, request.options.group)
    adopt(store, request.run, body["requested"])
    record_supervisor(store, request.run, outside, body["node"], listed)
    end = supervise_run(
        request,
        store,
        request.options.cluster,
        supervisor=body["node"],
        seen_from_outside=lambda node: seen_from_outside(node, outside),
    )
    submission = submission_of(request, end)
    for line in submission.lines:
        print_line(line)
    return submission.code


def adopt(store: ObjectStore, run: str, requested: float) -> None:
    """Become the process that supervises the run, which was registered at `requested`. UserError where it was again since."""
    try:
        data, etag = store.read(journal.REQUEST)
    except ObjectMissingError:
        why = "its request is not seen from this node"
        raise UserError(
            problem("run.uri", run, why, fix="put the run in S3 or on a file system of all nodes")
        ) from None
    record = json.loads(data)
    if record.get(journal.REQUESTED_AT) != requested:
        raise UserError(problem("run.uri", run, f"{record.get('by')} has requested it since", fix=f"fab status {run}"))
    store.swap(journal.REQUEST, journal.encode_record(record | {"host": platform.node(), "pid": os.getpid()}), etag)


def record_supervisor(store: ObjectStore, run: str, outside: Cluster, name: str, listed: Sequence[Node]) -> None:
    """Record this node at once, so that what its supervisor prints is seen before the first launch."""
    before = runs.read_record(store, runs.SUBMITTED)
    recorded = recorded_nodes(before, run)
    current = ((before or {}).get("ssh") or {}).get("current", ())
    used = [node for node in recorded if node.name in current]
    is_recorded = any(node.name == name for node in recorded)
    here = [] if is_recorded else [seen_from_outside(node, outside) for node in listed if node.name == name]
    save_nodes(store, run, outside, [*used, *here], name)


def _request(body: dict[str, Any], *, seen: bool) -> RunRequest:
    """Return the request, with `seen` the nodes as this one reaches them."""
    return request_of(
        body,
        lambda cluster, group, efa, container: SshOptions(
            seen_from_node(cluster) if seen else cluster, group, efa, container
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.backends.ssh_supervisor", description=__doc__)
    parser.add_argument("action", choices=("check", "train"))
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)
    if given.action == "check":
        answer: dict[str, Any] = {"error": [], "exit_code": 0}
        try:
            check(decode(sys.stdin.read()), resume=given.resume)
        except UserError as error:
            answer = {"error": list(error.problems), "exit_code": error.exit_code}
        print(json.dumps(answer))
        return 0
    try:
        return train(decode(os.environ.pop(VARIABLE)))
    except UserError as error:
        for line in error.problems:
            print_line(line)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
