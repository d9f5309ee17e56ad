"""What happens to a run in a noisy world, drawn from a seed, and what must hold of its history afterwards. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from trainer.errors import EXIT_DONE

SPANS: Mapping[str, tuple[float, float]] = {
    "crash": (20, 35),
    "reboot": (0, 0),
    "link": (3, 35),
    "stop a rank": (3, 20),
    "stop a launcher": (3, 30),
    "stop slurmd": (3, 25),
    "requeue": (0, 0),
    "drain": (5, 20),
    "slurmctld": (0, 0),
    "notice": (8, 20),
    "store": (3, 12),
    "busy": (5, 10),
}
"""Kinds of faults, and how many seconds one lasts: at least and at most."""
LOSES_A_NODE = frozenset({"crash", "reboot", "link", "stop a rank", "stop a launcher", "stop slurmd", "notice"})
"""Faults after which the launchers of other nodes may blame the node that had it."""
PAUSE_S = 6.0
LATE_S = 60.0
"""So long after its end a fault of a node may still be acted on: Slurm asks a node again only now and then."""


@dataclass(frozen=True)
class Fault:
    kind: str
    after_progress: bool
    """Whether it waits until the run has come on since the last one; the others also strike starts and ends."""
    pause_s: float
    span_s: float
    pick: float
    """Which of the possible nodes or forms it takes, 0 to 1."""


@dataclass
class Struck:
    """A fault as it happened; times are Unix seconds."""

    kind: str
    node: str
    began: float
    ended: float | None = None


def draw(random: Random, count: int) -> list[Fault]:
    """Draw faults: each kind once before any comes again."""
    return [
        Fault(
            kind,
            after_progress=random.random() < 0.6,
            pause_s=random.uniform(0, PAUSE_S),
            span_s=random.uniform(*SPANS[kind]),
            pick=random.random(),
        )
        for kind, _ in zip(_kinds(random), range(count), strict=False)
    ]


def _kinds(random: Random) -> Iterator[str]:
    while True:
        yield from random.sample(sorted(SPANS), len(SPANS))


def complaints(records: Sequence[Mapping[str, Any]], struck: Sequence[Struck], steps: int) -> list[str]:
    """Return what does not add up in the journal of a run that has ended by itself, a line each."""
    lines = []
    if [record["attempt"] for record in records] != list(range(1, len(records) + 1)):
        lines.append(f"launches are {[record['attempt'] for record in records]}")
    lines += [f"launch {record['attempt']} has no end" for record in records if "ended" not in record]
    done = [record["attempt"] for record in records if record.get("code") == EXIT_DONE]
    if done != [record["attempt"] for record in records[-1:]]:
        lines.append(f"done are launches {done} of {len(records)}")
    for before, after in pairwise(records):
        if after["started"] < before.get("ended", after["started"]):
            lines.append(f"launch {after['attempt']} began before launch {before['attempt']} had ended")
    trained = [record for record in records if "generation" in record]
    for before, after in pairwise(trained):
        if after["generation"] <= before["generation"]:
            lines.append(f"launch {after['attempt']} has generation {after['generation']} after {before['generation']}")
        if after["from_step"] != before["from_step"] + before["gained"]:
            had = before["from_step"] + before["gained"]
            lines.append(f"launch {after['attempt']} began at step {after['from_step']}; committed were {had}")
    if not trained or trained[-1]["from_step"] + trained[-1]["gained"] != steps:
        lines.append(f"the last launch did not commit step {steps}")
    for record in records:
        lines += [
            f"launch {record['attempt']} blames {node}, which had no fault"
            for node in record.get("blamed", ())
            if not any(_explains(one, node, record) for one in struck)
        ]
    return lines


def _explains(fault: Struck, node: str, record: Mapping[str, Any]) -> bool:
    if fault.node != node or fault.kind not in LOSES_A_NODE:
        return False
    ended = record.get("ended", fault.began)
    return fault.began <= ended and (fault.ended is None or fault.ended + LATE_S >= record["started"])
