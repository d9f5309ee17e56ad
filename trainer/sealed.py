"""JSON objects that carry the checksum of their own canonical form, so that a flipped bit in them is found. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from awscrt.checksums import crc64nvme

_CHECKSUM = "record_crc64nvme"


class DamagedRecordError(Exception):
    """The bytes are not a Lustrain record: not JSON, not whole, or not matching their own checksum."""


def canonical(body: Mapping[str, Any]) -> bytes:
    """Return the JSON that checksums are computed of; ValueError for NaN and infinities."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def with_checksum(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `body` and, as its last key, the CRC-64/NVME of its canonical JSON: 16 hex digits."""
    return {**body, _CHECKSUM: f"{crc64nvme(canonical(body)):016x}"}


def seal(body: Mapping[str, Any]) -> bytes:
    """Return canonical JSON of `body` with its checksum."""
    return canonical(with_checksum(body))


def hexed(value: Any) -> Any:
    """Return the same tree with each checksum as 16 hex digits: many JSON readers round integers beyond 2^53."""
    return _sums_turned(value, int, "{:016x}".format)


def unhexed(value: Any) -> Any:
    """Return the tree of which `hexed` made this one; ValueError where the text of a checksum is none, or it is too deep."""
    try:
        return _sums_turned(value, str, lambda text: int(text, 16))
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _sums_turned(value: Any, kind: type, turn: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {
            key: turn(each) if key.endswith("crc64nvme") and isinstance(each, kind) else _sums_turned(each, kind, turn)
            for key, each in value.items()
        }
    return [_sums_turned(each, kind, turn) for each in value] if isinstance(value, (list, tuple)) else value


def unseal(raw: bytes) -> dict[str, Any]:
    """Return the body that was sealed, in whatever layout its JSON is; DamagedRecordError when these are not its bytes."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"not JSON: {error}") from error
    if not isinstance(body, dict) or _CHECKSUM not in body:
        raise DamagedRecordError(f"not a record: it has no {_CHECKSUM}")
    claimed = body.pop(_CHECKSUM)
    try:
        actual = with_checksum(body)[_CHECKSUM]
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"holds a value that JSON cannot hold: {error}") from error
    if claimed != actual:
        raise DamagedRecordError(f"checksum {actual}, but the record says {claimed}")
    return body
