"""JSON objects that carry the checksum of their own canonical form, so that a flipped bit in them is found. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
