"""The journal of a run's launches: their launcher, nodes and results; kept in the run itself, under `launch/`.

`python -m trainer.run.journal take|begin|over|finish URI` is for launchers that have no more than the standard library: JSON on
standard input and output.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lustrain.capacity_events import NODE_SOURCES
from lustrain.problem import UserError, problem
from trainer.checkpoint.lineage.lease import committed
from trainer.errors import EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE, LostRunError, job_exit_code
from trainer.metrics.reader import parts_of, read_each, read_part
from trainer.metrics.records import EVENTS, STEPS
from trainer.metrics.timeline import BEGAN
from trainer.storage import ObjectMissingError, ObjectStore, PreconditionError, open_store

FOLDER = "launch/"
REQUEST, CONFIG, STOP = f"{FOLDER}asked.json", f"{FOLDER}config.toml", f"{FOLDER}stop"
ENDS = "ends/"
"""Apart from the launches: a thousand nodes write a thousand of these."""
REQUESTED_AT, ERROR = "asked", "said"
"""Keys of records, named before the words of today: when the run was requested, in Unix seconds; the line of a failed rank."""
VERSION = 1
_ATTEMPT = re.compile(rf"{FOLDER}(\d{{6,}})\.json")


def attempt_key(number: int) -> str:
    return f"{FOLDER}{number:06d}.json"


def end_key(number: int, node: int) -> str:
    """Return the key of a node's report on the end of a launch."""
    return f"{ENDS}{number:06d}/node-{node}.json"


@dataclass(frozen=True)
class Journal:
    """The launches of a run, and what else one listing of their folder tells."""

    records: list[dict[str, Any]]
    """One of every launch, oldest first; one without `ended` runs, or its launcher is gone."""
    requested: bool
    """Whether a start has registered the run."""
    stopped: bool
    """Whether `fab stop` has requested its end."""


def read(store: ObjectStore) -> list[dict[str, Any]]:
    """Return the records of a Journal."""
    return read_journal(store).records


def read_journal(store: ObjectStore, run: str = "", pool: Executor | None = None) -> Journal:
    """Read the journal of the run in this store, or of the one in its folder `run`, named with its slash.

    `pool` as in `read_each`.
    """
    keys = {info.key.removeprefix(run) for info in store.list(f"{run}{FOLDER}")}
    numbers = _numbers(keys)
    records = read_each(lambda number: _record(store, run + attempt_key(number))[0], numbers, pool)
    return Journal(records, REQUEST in keys, STOP in keys)


def first_started(store: ObjectStore) -> float | None:
    """Return when the first launch began, in Unix seconds; None where no supervisor of ours has started the run."""
    numbers = _numbers(info.key for info in store.list(FOLDER))
    return float(_record(store, attempt_key(numbers[0]))[0]["started"]) if numbers else None


def _numbers(keys: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for key in keys if (match := _ATTEMPT.fullmatch(key)))


def load_and_close_stale(store: ObjectStore) -> list[dict[str, Any]]:
    """Return the launches since the run was last requested; each without an end is closed, as its launcher is gone."""
    try:
        after = _record(store, REQUEST)[0].get("after", 0)
    except ObjectMissingError:
        after = 0
    records = [record if "ended" in record else finish(store, record["attempt"], None) for record in read(store)]
    return [record for record in records if record["attempt"] > after]


def stopped(store: ObjectStore) -> bool:
    """Whether `fab stop` has requested the run's end."""
    try:
        store.stat(STOP)
    except ObjectMissingError:
        return False
    return True


def begin(store: ObjectStore, nodes: Sequence[str], by: str, idle: Sequence[str] = ()) -> int:
    """Record a launch and return its number. `by`: its launcher, for people; `idle`: nodes that are held and not used.

    LostRunError where another launcher begins one at the same moment.
    """
    records = read(store)
    number = records[-1]["attempt"] + 1 if records else 1
    body = {"version": VERSION, "attempt": number, "nodes": list(nodes), "by": by, "started": time.time()}
    body |= {"idle": list(idle)} if idle else {}
    try:
        store.swap(attempt_key(number), encode_record(body), None)
    except PreconditionError:
        why = "another launcher has begun it at the same moment"
        raise LostRunError(problem("attempt", number, why, fix="let that one go on")) from None
    return number


def finish(store: ObjectStore, number: int, code: int | None, grows_to: int = 0) -> dict[str, Any]:
    """Add end and result to a launch's record; `code` is None where its launcher is gone, and `grows_to` the number of nodes
    that the launch has made way for.

    Reports of the nodes come before `code`: a scheduler has its own code for a job that lost a node.
    """
    record, etag = _record(store, attempt_key(number))
    if "ended" in record:
        return record
    record |= {"ended": time.time(), "code": code} | launch_result(store, record) | node_reports(store, record)
    # Who stops a run while it makes way gives its nodes back.
    record |= {"grows_to": grows_to} if grows_to and not stopped(store) else {}
    try:
        store.put(attempt_key(number), encode_record(record), if_match=etag)
    except PreconditionError:
        # The next launcher took this one for dead, and has recorded the end already.
        return _record(store, attempt_key(number))[0]
    return record


def put_node_exit(uri: str, attempt: int, node: int, code: int, local_code: int, lost_nodes: str, error: str) -> None:
    """Write a node's report on the end of a launch; the values are those of NodeExit."""
    store = open_store(uri, name="run.uri")
    ended = {"code": code, "own": local_code, "silent": lost_nodes, ERROR: error}
    body = {"version": VERSION, "node": node, **ended}
    store.put(end_key(attempt, node), encode_record(body))


def node_reports(store: ObjectStore, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the nodes reported: the job's code, the blamed nodes, the line of a rank that failed."""
    ends = _reports(store, record["attempt"])
    nodes: list[str] = record["nodes"]
    innocent = (EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE)
    silent = _silent(ends)
    failed = {end["node"] for end in ends if end["own"] not in innocent}
    # What fails on most nodes is a fault of the run or of its store, not of the nodes.
    blamed = [nodes[index] for index in sorted(failed or silent) if index < len(nodes)]
    blamed = blamed if len(blamed) * 2 <= len(nodes) else []
    error = next((end[ERROR] for end in ends if end[ERROR] and end["own"] not in innocent), "")
    if not error and silent and not blamed and len(nodes) == 2:
        error = f"{nodes[0]} and {nodes[1]} did not hear each other: the link between them"
    codes = {"code": job_exit_code([end["code"] for end in ends])} if ends else {}
    return codes | {"blamed": blamed, ERROR: error}


def ranks_met(store: ObjectStore, number: int) -> bool:
    """Return whether all ranks of a launch are known to have met, so that no launcher of it is still to start."""
    return any(one["event"] in BEGAN for one in _events(store, number)[1])


def is_over(store: ObjectStore, number: int) -> bool:
    """Return whether only lost nodes are left of a launch: all that have not reported its end are silent by others' reports.

    One whose nodes have all reported ends by itself, once its launchers have printed their last lines.
    """
    record, ends = _record(store, attempt_key(number))[0], _reports(store, number)
    missing = {*range(len(record["nodes"]))} - {end["node"] for end in ends}
    return bool(missing) and missing <= _silent(ends)


def _reports(store: ObjectStore, number: int) -> list[dict[str, Any]]:
    keys = [info.key for info in store.list(f"{ENDS}{number:06d}/")]
    return read_each(lambda key: _record(store, key)[0], keys)


def _silent(reports: Iterable[Mapping[str, Any]]) -> set[int]:
    # A node may leave before the others once the launch has saved.
    return silent_nodes({one["node"]: one["silent"] for one in reports if one["code"] not in (EXIT_DONE, EXIT_REQUEUE)})


def silent_nodes(reports: Mapping[int, str]) -> set[int]:
    """Return which nodes were silent, by each node's report on the nodes that it did not hear.

    Launchers hear node 0, and node 0 hears all. A node whose own link is cut reports node 0, too: that is believed where most
    reports say so, and then the report of node 0 is about a cut link, unless there are only two nodes.
    """
    named = {by: {int(node) for node in re.findall(r"node (\d+)", text)} for by, text in reports.items()}
    others = named.keys() - {0}
    lost = 2 * sum(0 in named[by] for by in others) > len(others)
    believed = [nodes for by, nodes in named.items() if not (lost and by == 0 and len(others) > 1)]
    return {node for nodes in believed for node in nodes if node or lost}


def launch_result(store: ObjectStore, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run itself shows of a launch: its newest generation, its first and last steps, and notices of AWS.

    A launch that rolled the run back had several generations; the steps that it undid are not gained.
    """
    generations, events = _events(store, record["attempt"])
    noticed = sorted(
        {str(one["host"]) for one in events if one["event"] == "notice" and one.get("source") in NODE_SOURCES}
    )
    result: dict[str, Any] = {
        "noticed": [node for node in record["nodes"] if node.partition(".")[0] in _short(noticed)]
    }
    began = next((one["step"] for one in events if one["event"] in BEGAN), None)
    if not generations or began is None:
        return result
    saved = [one.step for one in committed(store) if one.generation == generations[-1]]
    gained = max(saved, default=began) - began
    result |= {"generation": generations[-1], "from_step": began, "gained": max(0, gained)}
    first, last = _ends(store, STEPS, generations)
    if first:
        result["start_s"] = max(0.0, unix(first[0]["time"]) - record["started"])
        result["last_step"] = last[-1]["step"]
        result["step_s"] = statistics.median(one["step_seconds"] for one in last)
    return result


def _short(hosts: Sequence[str]) -> set[str]:
    return {host.partition(".")[0] for host in hosts}


def _events(store: ObjectStore, attempt: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the generations of a launch and their events, oldest first; the newest generations are read first."""
    parts = parts_of(store, EVENTS)
    generations: list[int] = []
    collected: list[dict[str, Any]] = []
    for generation in sorted(parts, reverse=True):
        events = [record for key in parts[generation] for record in read_part(store, key)]
        number = next((one["launch_attempt"] for one in events if one.get("launch_attempt")), None)
        if number == attempt:
            generations, collected = [generation, *generations], [*events, *collected]
        elif number is not None and number < attempt:
            break
    return generations, collected


def _ends(
    store: ObjectStore, prefix: str, generations: Sequence[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records of the first part of these generations and of the last one."""
    parts = parts_of(store, prefix)
    keys = [key for generation in generations for key in parts.get(generation, [])]
    if not keys:
        return [], []
    first, last = read_part(store, keys[0]), read_part(store, keys[-1])
    return (first, last) if first and last else ([], [])


def unix(text: str) -> float:
    """Return Unix seconds of a record's `time`."""
    return datetime.fromisoformat(text).timestamp()


def encode_record(body: Mapping[str, Any]) -> bytes:
    """Return a launcher's record as it is stored, for people to read as well."""
    return json.dumps(body, indent=1).encode() + b"\n"


def _record(store: ObjectStore, key: str) -> tuple[dict[str, Any], str]:
    body, etag = store.read(key)
    try:
        record = json.loads(body)
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        why = "is not a record of a launcher that this version knows"
        raise UserError(problem("object", f"{store.uri.rstrip('/')}/{key}", why, fix="use the Lustrain that wrote it"))
    return record, etag


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.run.journal", description=__doc__)
    parser.add_argument("do", choices=("take", "begin", "over", "finish"))
    parser.add_argument("uri", metavar="URI", help="the run")
    args = parser.parse_args(argv)
    store = open_store(args.uri, name="URI")
    answer: dict[str, Any] = {}
    if args.do == "begin":
        given = json.load(sys.stdin)
        answer = {"attempt": begin(store, given["nodes"], given["by"], given.get("idle", ()))}
    elif args.do == "over":
        answer = {"over": is_over(store, json.load(sys.stdin)["attempt"])}
    elif args.do == "finish":
        given = json.load(sys.stdin)
        answer = finish(store, given["attempt"], given["code"], given.get("grows_to", 0))
    else:
        answer = {"attempts": load_and_close_stale(store), "stop": stopped(store)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
