"""The journal of a run's starts: who began an attempt, where, and what it brought; kept in the run itself, under `launch/`.

`python -m trainer.launch.journal take|begin|finish URI` is for launchers that have no more than the standard library: JSON on
standard input and output.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from lustrain.problem import UserError, problem
from trainer.checkpoint.lineage.lease import committed
from trainer.errors import EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE, LostRunError
from trainer.launch.ranks import job_exit_code
from trainer.metrics.reader import READ_THREADS, parts_of, read_part
from trainer.metrics.records import EVENTS, STEPS
from trainer.storage import ObjectMissingError, ObjectStore, PreconditionError, open_store

FOLDER = "launch/"
REQUEST, CONFIG, STOP = f"{FOLDER}asked.json", f"{FOLDER}config.toml", f"{FOLDER}stop"
ENDS = "ends/"
"""Apart from the attempts: with a thousand nodes these are many."""
VERSION = 1
_ATTEMPT = re.compile(rf"{FOLDER}(\d{{6,}})\.json")
_FROM_AWS = ("spot", "rebalance", "autoscaling")


def attempt_key(number: int) -> str:
    return f"{FOLDER}{number:06d}.json"


def end_key(number: int, node: int) -> str:
    """Key of what the launcher of a node says of an attempt's end."""
    return f"{ENDS}{number:06d}/node-{node}.json"


def read(store: ObjectStore) -> list[dict[str, Any]]:
    """Return the record of every attempt, oldest first; one without `ended` is alive, or its launcher is gone."""
    numbers = sorted(int(match[1]) for info in store.list(FOLDER) if (match := _ATTEMPT.fullmatch(info.key)))
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return list(pool.map(lambda number: _record(store, attempt_key(number))[0], numbers))


def take(store: ObjectStore) -> list[dict[str, Any]]:
    """Return the attempts since the run was asked for last, for whoever starts them; each without an end ends here."""
    try:
        after = _record(store, REQUEST)[0].get("after", 0)
    except ObjectMissingError:
        after = 0
    records = [record if "ended" in record else finish(store, record["attempt"], None) for record in read(store)]
    return [record for record in records if record["attempt"] > after]


def stopped(store: ObjectStore) -> bool:
    """Whether somebody has asked for the run's end (`fab stop`)."""
    try:
        store.stat(STOP)
    except ObjectMissingError:
        return False
    return True


def begin(store: ObjectStore, nodes: Sequence[str], by: str, idle: Sequence[str] = ()) -> int:
    """Record an attempt and return its number. `by`: who starts it, for people; `idle`: nodes that are held and not used.

    LostRunError where another launcher begins one at the same moment.
    """
    records = read(store)
    number = records[-1]["attempt"] + 1 if records else 1
    body = {"version": VERSION, "attempt": number, "nodes": list(nodes), "by": by, "started": time.time()}
    body |= {"idle": list(idle)} if idle else {}
    encoded = _encode(body)
    try:
        store.put(attempt_key(number), encoded, if_absent=True)
    except PreconditionError:
        # When an answer is lost, the store's retry meets its own success.
        if store.read(attempt_key(number))[0] != encoded:
            why = "another launcher has begun it at the same moment"
            raise LostRunError(problem("attempt", number, why, fix="let that one go on")) from None
    return number


def finish(store: ObjectStore, number: int, code: int | None) -> dict[str, Any]:
    """Add to an attempt's record how it ended and what it brought; `code` None: nobody waited for its end.

    The word of the nodes' launchers goes before `code`: a scheduler has a code of its own for a job that lost a node.
    """
    record, etag = _record(store, attempt_key(number))
    if "ended" in record:
        return record
    record |= {"ended": time.time(), "code": code} | _brought(store, record) | _told(store, record)
    try:
        store.put(attempt_key(number), _encode(record), if_match=etag)
    except PreconditionError:
        # A successor that took this launcher for dead has recorded it already.
        return _record(store, attempt_key(number))[0]
    return record


def put_end(uri: str, attempt: int, node: int, code: int, own: int, silent: str, said: str) -> None:
    """Leave a launcher's word on how an attempt ended: the job's code, its own ranks' code, who was silent."""
    store = open_store(uri, name="run.uri")
    body = {"version": VERSION, "node": node, "code": code, "own": own, "silent": silent, "said": said}
    store.put(end_key(attempt, node), _encode(body))


def _told(store: ObjectStore, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the nodes' launchers said: the job's code, which node is to blame, the line of a rank that failed."""
    keys = [info.key for info in store.list(f"{ENDS}{record['attempt']:06d}/")]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        ends = list(pool.map(lambda key: _record(store, key)[0], keys))
    nodes: list[str] = record["nodes"]
    innocent = (EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE)
    # Of an attempt that has saved, a node may leave before the others.
    silent = silent_nodes({end["node"]: end["silent"] for end in ends if end["code"] not in (EXIT_DONE, EXIT_REQUEUE)})
    failed = {end["node"] for end in ends if end["own"] not in innocent}
    # What fails on most nodes is a fault of the run or of its store, not of the nodes.
    blamed = [nodes[index] for index in sorted(failed or silent) if index < len(nodes)]
    blamed = blamed if len(blamed) * 2 <= len(nodes) else []
    said = next((end["said"] for end in ends if end["said"] and end["own"] not in innocent), "")
    if not said and silent and not blamed and len(nodes) == 2:
        said = f"{nodes[0]} and {nodes[1]} did not hear each other: the link between them"
    codes = {"code": job_exit_code([end["code"] for end in ends])} if ends else {}
    return codes | {"blamed": blamed, "said": said}


def silent_nodes(words: Mapping[int, str]) -> set[int]:
    """Return which nodes were silent, by the word of each node's launcher on whom it did not hear.

    Launchers hear node 0, and node 0 hears all. One whose own link is cut calls node 0 silent, too: that is believed where
    most of those say so that left a word, and then the word of node 0 is of a cut link, unless there are only two.
    """
    called = {by: {int(node) for node in re.findall(r"node (\d+)", word)} for by, word in words.items()}
    others = called.keys() - {0}
    lost = 2 * sum(0 in called[by] for by in others) > len(others)
    heard = [named for by, named in called.items() if not (lost and by == 0 and len(others) > 1)]
    return {node for named in heard for node in named if node or lost}


def _brought(store: ObjectStore, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run itself shows of an attempt: its generation, its first and last steps, and notices of AWS."""
    generation, events = _events(store, record["attempt"])
    noticed = sorted(
        {str(one["host"]) for one in events if one["event"] == "notice" and one.get("source") in _FROM_AWS}
    )
    found: dict[str, Any] = {"noticed": [node for node in record["nodes"] if node.partition(".")[0] in _short(noticed)]}
    began = next((one["step"] for one in events if one["event"] in ("started", "resumed")), None)
    if generation is None or began is None:
        return found
    saved = [one.step for one in committed(store) if one.generation == generation]
    found |= {"generation": generation, "from_step": began, "gained": max(saved, default=began) - began}
    first, last = _ends(store, STEPS, generation)
    if first:
        found["start_s"] = max(0.0, unix(first[0]["time"]) - record["started"])
        found["last_step"] = last[-1]["step"]
        found["step_s"] = statistics.median(one["step_seconds"] for one in last)
    return found


def _short(hosts: Sequence[str]) -> set[str]:
    return {host.partition(".")[0] for host in hosts}


def _events(store: ObjectStore, attempt: int) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the generation of a launcher's attempt and its events; the newest generations are looked at first."""
    parts = parts_of(store, EVENTS)
    for generation in sorted(parts, reverse=True):
        events = [record for key in parts[generation] for record in read_part(store, key)]
        number = next((one["launch_attempt"] for one in events if one.get("launch_attempt")), None)
        if number == attempt:
            return generation, events
        if number is not None and number < attempt:
            break
    return None, []


def _ends(store: ObjectStore, prefix: str, generation: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records of a generation's first part and of its last."""
    keys = parts_of(store, prefix).get(generation, [])
    if not keys:
        return [], []
    first, last = read_part(store, keys[0]), read_part(store, keys[-1])
    return (first, last) if first and last else ([], [])


def unix(text: str) -> float:
    """Return Unix seconds of a record's `time`."""
    return datetime.fromisoformat(text).timestamp()


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


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode() + b"\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.launch.journal", description=__doc__)
    parser.add_argument("do", choices=("take", "begin", "finish"))
    parser.add_argument("uri", metavar="URI", help="the run")
    args = parser.parse_args(argv)
    store = open_store(args.uri, name="URI")
    answer: dict[str, Any] = {}
    if args.do == "begin":
        given = json.load(sys.stdin)
        answer = {"attempt": begin(store, given["nodes"], given["by"], given.get("idle", ()))}
    elif args.do == "finish":
        given = json.load(sys.stdin)
        answer = finish(store, given["attempt"], given["code"])
    else:
        answer = {"attempts": take(store), "stop": stopped(store)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
