"""Records as lines of JSON that give back the same numbers.

Floats are printed as Python's repr, the shortest digits that read back to the same bits. JSON has no NaN or
infinities, so they are the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON
(https://protobuf.dev/programming-guides/json/); a text that is exactly one of these three reads back as the number.
Every line has `time`, UTC by this machine's clock, with milliseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NotRequired, TypedDict

STEPS = "metrics/"
EVENTS = "events/"

_PART = re.compile(r"(?:metrics|events)/(\d{6,})-(\d{5,})\.jsonl")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class StepRecord(TypedDict):
    """The fields of one step; times are seconds, a record may carry more fields of the Task's own."""

    step: int
    """Global step, from 1, over all attempts."""
    loss: float
    """Mean over the tokens (or items) of the global batch."""
    lr: float
    grad_norm: float
    """Global norm before clipping."""
    tokens: int
    """Trained on since the run began."""
    tokens_per_second: float
    """Of this step, over all ranks."""
    step_seconds: float
    data_seconds: float
    """Of step_seconds: waiting for and making batches."""
    blocked_seconds: float
    """Beside step_seconds: the loop stood still for a save."""
    world_size: int
    attempt: int
    """The lease generation that computed this step."""
    skipped: NotRequired[bool]
    """Nothing of the step was applied: the gradients overflowed in fp16, or `bad_loss.action` is `skip`."""
    why_skipped: NotRequired[str]
    batch_digest: NotRequired[int]
    eval_loss: NotRequired[float]
    eval_seconds: NotRequired[float]
    """Beside step_seconds: the evaluation after this step."""


@dataclass(frozen=True, order=True)
class PartName:
    """Which part of which attempt's log: S3 cannot append, so a log is a sequence of immutable objects."""

    generation: int
    part: int

    def key(self, prefix: str) -> str:
        return f"{prefix}{self.generation:06d}-{self.part:05d}.jsonl"

    @classmethod
    def of_key(cls, key: str) -> PartName | None:
        """Return the name in a key, or None for a foreign object."""
        match = _PART.fullmatch(key)
        return cls(int(match[1]), int(match[2])) if match else None


class DamagedLineError(ValueError):
    """A line that is not a record."""


def utc_now() -> str:
    """Return this machine's time as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode(record: Mapping[str, Any]) -> bytes:
    """One line, with its line break; TypeError for a value that is not JSON (a tensor, say)."""
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the record in one line; DamagedLineError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedLineError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DamagedLineError(f"a {type(record).__name__}, not a record")
    return {name: _restored(value) for name, value in record.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
