"""A run's log read back: parts merged into one history, with damaged lines reported and left out."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.metrics.records import EVENTS, STEPS, DamagedLineError, PartName, decode
from trainer.storage import ObjectMissingError, ObjectStore

log = logging.getLogger(__name__)

READ_THREADS = 8
"""Parts are small; several requests at once hide the latency of each."""
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """What one lease generation computed: its steps, including those that a later attempt did over."""

    generation: int
    first_step: int
    last_step: int
    world_size: int
    """Ranks, 0 where the records do not say."""
    started: str
    ended: str
    """Times of its first and last step record."""


def read_steps(store: ObjectStore) -> list[dict[str, Any]]:
    """Read the step records of the run's history, by step: for each step the record of the attempt that counts."""
    return read_history(store)[0]


def last_steps(store: ObjectStore) -> list[dict[str, Any]]:
    """Read the newest attempt's last step records alone, at most one part of its log; empty where none is durable yet."""
    parts = parts_of(store, STEPS)
    for generation in sorted(parts, reverse=True):
        if records := read_part(store, parts[generation][-1]):
            return records
    return []


def read_history(store: ObjectStore) -> tuple[list[dict[str, Any]], list[Attempt]]:
    """Read the step records as `read_steps` does, and every attempt that logged a step, oldest first."""
    by_generation = read_generations(store)
    attempts = [_attempt(generation, by_generation[generation]) for generation in sorted(by_generation)]
    return merge_steps(by_generation), attempts


def read_generations(store: ObjectStore, pool: Executor | None = None) -> dict[int, list[dict[str, Any]]]:
    """Read all step records, by the lease generation that computed them, also those that were done over.

    `pool` as in `read_each`.
    """
    return _by_generation(store, STEPS, pool)


def iterate_generations(store: ObjectStore, *, before: int) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
    """Yield each generation older than `before`, oldest first, with its step records, of which few are in memory at a time."""
    for generation, keys in sorted(parts_of(store, STEPS).items()):
        if generation < before:
            yield generation, _iterate_parts(store, keys)


def _iterate_parts(store: ObjectStore, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for first in range(0, len(keys), READ_THREADS):
            for records in pool.map(lambda key: read_part(store, key), keys[first : first + READ_THREADS]):
                yield from records


def read_each(read: Callable[[K], T], keys: Sequence[K], pool: Executor | None = None) -> list[T]:
    """Return what `read` finds for each key, with several requests at once.

    Who reads many runs brings the `pool` for all their requests: threads of its own for each run cost more than its requests.
    """
    if len(keys) < 2:
        return [read(key) for key in keys]
    if pool is not None:
        return list(pool.map(read, keys))
    with ThreadPoolExecutor(READ_THREADS) as own:
        return list(own.map(read, keys))


def read_events(store: ObjectStore) -> list[dict[str, Any]]:
    """All events, by attempt and in the order in which each attempt logged them (clocks may disagree between attempts)."""
    by_generation = _by_generation(store, EVENTS)
    return [record for generation in sorted(by_generation) for record in by_generation[generation]]


def merge_steps(by_generation: Mapping[int, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One record per step, in order: an attempt replaces everything older from the first step that it computed on.

    So for each step the newest attempt's record counts, and steps that an interrupted attempt had computed beyond the
    checkpoint from which the next one started do not count, even before that one has reached them again.
    """
    history: dict[int, dict[str, Any]] = {}
    for generation in sorted(by_generation):
        own = {int(record["step"]): dict(record) for record in by_generation[generation]}
        if own:
            first = min(own)
            history = {step: record for step, record in history.items() if step < first} | own
    return [history[step] for step in sorted(history)]


def parse_part(key: str, body: bytes, on_problem: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the records of one part; a damaged line (half-written, flipped bits) is reported by number and left out."""
    records = []
    for number, line in enumerate(body.splitlines(), start=1):
        try:
            record = decode(line)
            if key.startswith(STEPS) and not isinstance(record.get("step"), int):
                raise DamagedLineError("has no step number")
        except DamagedLineError as error:
            on_problem(f"{key} line {number}: left out: {error}")
            continue
        records.append(record)
    return records


def parts_of(store: ObjectStore, prefix: str) -> dict[int, list[str]]:
    """List the keys of a log's parts (`STEPS` or `EVENTS`) by generation, in the order in which they were written."""
    named = ((PartName.of_key(info.key), info.key) for info in store.list(prefix))
    parts: dict[int, list[str]] = defaultdict(list)
    for name, key in sorted((name, key) for name, key in named if name is not None):
        parts[name.generation].append(key)
    return parts


def read_part(store: ObjectStore, key: str) -> list[dict[str, Any]]:
    """Read the records of one part; none where it is gone."""
    try:
        return parse_part(key, store.read(key)[0], log.warning)
    except ObjectMissingError:
        log.warning("%s: listed, but gone when it was read", key)
        return []


def _by_generation(store: ObjectStore, prefix: str, pool: Executor | None = None) -> dict[int, list[dict[str, Any]]]:
    parts = [(generation, key) for generation, keys in parts_of(store, prefix).items() for key in keys]
    by_generation: dict[int, list[dict[str, Any]]] = defaultdict(list)
    read = read_each(lambda part: read_part(store, part[1]), parts, pool)
    for (generation, _), records in zip(parts, read, strict=True):
        by_generation[generation] += records
    return {generation: records for generation, records in by_generation.items() if records}


def _attempt(generation: int, records: list[dict[str, Any]]) -> Attempt:
    steps = [int(record["step"]) for record in records]
    world_size = records[-1].get("world_size")
    return Attempt(
        generation=generation,
        first_step=min(steps),
        last_step=max(steps),
        world_size=world_size if isinstance(world_size, int) else 0,
        started=str(records[0].get("time", "")),
        ended=str(records[-1].get("time", "")),
    )
