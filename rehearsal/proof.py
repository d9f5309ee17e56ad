"""The promises of the rehearsal, decided from the runs' own records by pure functions."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Promise:
    """This is one promise, whether it was kept, and the figure that shows it."""

    text: str
    kept: bool
    figure: str


def same_losses(reference: Records, other: Records) -> Promise:
    """Compare every step's loss and gradient norm, to the last bit."""
    expected, actual = _by_step(reference), _by_step(other)
    wrong = [step for step in sorted(expected) if _bits(expected[step]) != _bits(actual.get(step, {}))]
    kept = not wrong and expected.keys() == actual.keys() and bool(expected)
    figure = f"{len(expected) - len(wrong)} of {len(expected)} steps bit-identical" + (
        f"; first other: {wrong[0]}" if wrong else ""
    )
    return Promise("interrupted twice, same world size: the same losses to the last bit", kept, figure)


def same_batches(reference: Records, other: Records, text: str) -> Promise:
    """Compare every step's checksum over the samples of its global batch."""
    expected = {step: record["batch_digest"] for step, record in _by_step(reference).items()}
    actual = {step: record["batch_digest"] for step, record in _by_step(other).items()}
    equal = sum(actual.get(step) == digest for step, digest in expected.items())
    return Promise(text, bool(expected) and expected == actual, f"{equal} of {len(expected)} global batches identical")


def close_losses(text: str, reference: Records, other: Records, tolerance: float) -> Promise:
    """Check that each step has a loss close to the reference's; `tolerance` is the allowed relative difference."""
    expected, losses = (
        {step: float(row["loss"]) for step, row in _by_step(rows).items()} for rows in (reference, other)
    )
    # A loss that the reference lacks is NaN, which fails every comparison.
    pairs = [(loss, expected.get(step, float("nan"))) for step, loss in losses.items()]
    differences = [abs(loss / wanted - 1) for loss, wanted in pairs]
    kept = bool(pairs) and expected.keys() == losses.keys() and all(part <= tolerance for part in differences)
    equal = sum(loss == wanted for loss, wanted in pairs)
    largest = max(differences, default=float("inf"))
    figure = f"{equal} of {len(pairs)} steps bit-identical, largest relative difference {largest:.1e}"
    return Promise(text, kept, figure)


def same_weights_at_load(events: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> Promise:
    """Check that the last resume in each of two histories began from the same bytes of one checkpoint, in different worlds."""
    first, second = _last(events, "resumed"), _last(others, "resumed")
    text = "another world size: bit-identical weights at load"
    if first is None or second is None:
        return Promise(text, False, "one of the runs did not resume")
    same = (first["step"], first["weights_crc64nvme"]) == (second["step"], second["weights_crc64nvme"])
    worlds = f"{first['world_size']} and {second['world_size']} ranks"
    kept = same and first["world_size"] != second["world_size"]
    return Promise(
        text,
        kept,
        f"step {second['step']} on {worlds}: CRC-64 {first['weights_crc64nvme']} and {second['weights_crc64nvme']}",
    )


def lost_at_most(interval: int, last_step_seen: int, resumed_from: int) -> Promise:
    """Check what a node's sudden death cost: up to two intervals, as a save may be in flight when the next one is due."""
    lost = last_step_seen - resumed_from
    text = "a node killed without notice: at most one interval of work is repeated, plus the save in flight"
    return Promise(text, 0 <= lost <= 2 * interval, f"{lost} steps repeated (interval {interval})")


def _by_step(records: Records) -> dict[int, Mapping[str, Any]]:
    return {int(record["step"]): record for record in records}


def _bits(record: Mapping[str, Any]) -> bytes | None:
    return struct.pack("<dd", record["loss"], record["grad_norm"]) if record else None


def _last(events: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return next((event for event in reversed(list(events)) if event["event"] == kind), None)
