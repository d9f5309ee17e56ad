"""Damage and losses that no checkpoint shows, by the run's own records: its config, metrics, events and lineage.

A manifest that was deleted leaves no trace among the manifests. The events record every commit and every pruning, and the
lineage names the checkpoint that each job began from. Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.history import History
from trainer.checkpoint.lineage.lease import live_manifests
from trainer.checkpoint.lineage.prune import Committed, plan_prune
from trainer.checkpoint.stored_config import KEY, DamagedConfigError, read_stored
from trainer.config import CheckpointConfig
from trainer.metrics.reader import READ_THREADS, parse_part
from trainer.metrics.records import EVENTS, STEPS, PartName, encode
from trainer.metrics.timeline import COMMITTED, PRUNED
from trainer.storage import CorruptObjectError, ObjectMissingError, ObjectStore

Event = Mapping[str, Any]
RESTORE = (
    "in a versioned bucket remove its delete marker and those of its attempt's objects; otherwise restore a snapshot "
    "(trainer/checkpoint/FORMAT.md, 'What a deletion leaves behind')"
)


def audit(store: ObjectStore, history: History, options: Callable[[], CheckpointConfig]) -> list[str]:
    """Check the run's config, metrics and events, and that no commit they record is lost; one line a problem.

    `options` returns what the run keeps; pruning within these options needs no event, since a job may be killed before it
    records one. Raises StorageError when the store cannot serve.
    """
    _, wrong_metrics = _read_log(store, STEPS)
    events, wrong_events = _read_log(store, EVENTS)
    wrong_config = _config_problems(store, expected=bool(events))
    lost = lost_commits(history, events, CheckpointConfig() if wrong_config else options())
    why = f"missing, though the run recorded its commit and no pruning removed it; fix: {RESTORE}"
    return [*wrong_config, *wrong_metrics, *wrong_events, *(f"{commit.key}: {why}" for commit in lost)]


def lost_commits(history: History, events: Iterable[Event], options: CheckpointConfig) -> list[ManifestId]:
    """Return the checkpoints, newest first, that events or lineage name, but that neither exist nor were pruned."""
    lease = history.lease
    present = {*history.live, *history.dead}
    named = {entry.parent for entry in lease.lineage if entry.parent is not None}
    pruned = set()
    for event in events:
        if event.get("event") == COMMITTED and isinstance(event.get("step"), int):
            named.add(ManifestId(int(event.get("attempt", 0)), event["step"]))
        elif event.get("event") == PRUNED and isinstance(event.get("removed"), list):
            pruned |= {ManifestId.of_key(str(key)) for key in event["removed"]}
    live = live_manifests(present | named, lease.lineage, lease.generation)
    prunable = set(plan_prune([Committed(commit, None, whole=True) for commit in live], options))
    accounted_for = present | pruned | prunable
    return [commit for commit in live if commit not in accounted_for]


def _config_problems(store: ObjectStore, *, expected: bool) -> Sequence[str]:
    try:
        if read_stored(store) is None and expected:
            fix = "restore it: only this file holds the run's settings"
            return [f"{KEY}: missing, though the run has trained; fix: {fix}"]
    except DamagedConfigError as error:
        return error.problems
    except CorruptObjectError as error:
        return [f"{KEY}: {error}"]
    return []


def _read_log(store: ObjectStore, prefix: str) -> tuple[list[Event], list[str]]:
    """Read the records of a log, and make a line for each damaged record and each part that is missing or another's."""
    names = sorted(name for info in store.list(prefix) if (name := PartName.of_key(info.key)) is not None)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        parts_read = list(pool.map(lambda name: _read_part(store, name.key(prefix)), names))
    numbers: dict[int, set[int]] = defaultdict(set)
    for name in names:
        numbers[name.generation].add(name.part)
    gaps = [
        f"{PartName(generation, part).key(prefix)}: missing, though later parts exist; fix: {RESTORE}"
        for generation, parts in sorted(numbers.items())
        for part in range(max(parts))
        if part not in parts
    ]
    whole = {name: records for name, (records, lines) in zip(names, parts_read, strict=True) if not lines}
    events = [event for records, _ in parts_read for event in records]
    return events, [line for _, lines in parts_read for line in lines] + gaps + _foreign_parts(prefix, whole)


def _foreign_parts(prefix: str, parts: Mapping[PartName, list[Event]]) -> list[str]:
    """Make a line for each part that is empty, or whose records show that they belong under another name.

    Every record has its attempt, an attempt's steps follow one on another, and no two of its parts are the same.
    """
    wrong: dict[PartName, str] = {}
    contents: dict[tuple[int, bytes], PartName] = {}
    for name, records in parts.items():
        before = PartName(name.generation, name.part - 1)
        attempts = {str(record.get("attempt", name.generation)) for record in records} - {str(name.generation)}
        same = contents.setdefault((name.generation, b"".join(map(encode, records))), name)
        if not records:
            wrong[name] = "is empty"
        elif attempts:
            wrong[name] = f"holds records of attempt {', '.join(sorted(attempts))}"
        elif same != name:
            wrong[name] = f"holds the records of {same.key(prefix)}"
        elif prefix == STEPS and before not in wrong and not _follow([*parts.get(before, [])[-1:], *records]):
            wrong[name] = "its steps do not follow one on another, and on those of the part before"
    fix = "restore it from the bucket's versions or a snapshot"
    return [f"{name.key(prefix)}: {why}; fix: {fix}" for name, why in wrong.items()]


def _follow(records: Sequence[Event]) -> bool:
    return all(later["step"] == earlier["step"] + 1 for earlier, later in pairwise(records))


def _read_part(store: ObjectStore, key: str) -> tuple[list[Event], list[str]]:
    """Read records and a line for each damaged one, a second time where any is: the network may have garbled it."""
    records, problems = _parsed(store, key)
    return _parsed(store, key) if problems else (records, problems)


def _parsed(store: ObjectStore, key: str) -> tuple[list[Event], list[str]]:
    problems: list[str] = []
    try:
        return [*parse_part(key, store.read(key)[0], problems.append)], problems
    except (CorruptObjectError, ObjectMissingError) as error:
        return [], [f"{key}: {error}"]
