"""The promises of the rehearsal, decided from the runs' own records by pure functions."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from planner.goodput import Losses, goodput
from trainer.metrics.alerts import Firing
from trainer.metrics.goodput import seconds_of

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
    """Check that two histories resumed from the same bytes of one checkpoint, in different worlds: the other's last one."""
    second = _last(others, "resumed")
    same_step = (event for event in events if second and event.get("step") == second["step"])
    first = _last(same_step, "resumed")
    text = "another world size: bit-identical weights at load"
    if first is None or second is None:
        return Promise(text, False, "one of the runs did not resume there")
    same = first["weights_crc64nvme"] == second["weights_crc64nvme"]
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


def alert_came_and_went(alert: str, firings: Sequence[Firing], noticed: float, *, fired: bool, went: bool) -> Promise:
    """Check that an alert fired after the notice and no longer did once the run was done; times, of the figure only, are in
    Unix seconds."""
    text = f"an alert ({alert}) comes with the notice and goes with the resume"
    if not fired:
        return Promise(text, False, "it did not fire")
    if not went:
        return Promise(text, False, "it still fired once the run was done")
    first = next((one for one in firings if one.alert == alert and one.ended >= noticed), None)
    if first is None:
        return Promise(text, True, "fired, and ended")
    after, lasted = max(0.0, first.began - noticed), first.ended - first.began
    return Promise(text, True, f"fired {after:.0f} s after the notice, for {lasted:.0f} s")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an undisturbed run: to its first step, of a step, of the loop's stall by a save, and of a save up to its
    commit."""

    start_s: float
    step_s: float
    stall_s: float
    commit_s: float


def pace(steps: Records, events: Iterable[Mapping[str, Any]], started: float) -> StepTimes:
    """Return the pace of a run that was started at a Unix time and never interrupted."""
    seconds = [seconds_of(record) for record in steps]
    stalls = [record["blocked_seconds"] for record in steps if record["blocked_seconds"]]
    commits = [event["seconds"] for event in events if event["event"] == "checkpoint_committed"]
    start_s = datetime.fromisoformat(steps[0]["time"]).timestamp() - seconds[0] - started
    return StepTimes(start_s, _mean(seconds), _mean(stalls), _mean(commits))


def planned_goodput(pace: StepTimes, steps: int, interval: int, mtbf_s: float) -> float:
    """Return the goodput that the planner expects of a run with a save each `interval` steps: its first start, then training
    with interruptions without notice every `mtbf_s` seconds on average."""
    losses = Losses(mtbf_s, pace.start_s, pace.stall_s, pace.commit_s)
    share = goodput(interval * pace.step_s, losses)
    return 1 / (1 / share + pace.start_s / (steps * pace.step_s)) if share else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _by_step(records: Records) -> dict[int, Mapping[str, Any]]:
    return {int(record["step"]): record for record in records}


def _bits(record: Mapping[str, Any]) -> bytes | None:
    return struct.pack("<dd", record["loss"], record["grad_norm"]) if record else None


def _last(events: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return next((event for event in reversed(list(events)) if event["event"] == kind), None)
