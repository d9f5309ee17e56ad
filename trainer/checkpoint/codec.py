"""The optional codec of data blocks, `planes-zstd`: byte planes of 4 bytes, then zstd. Torch-free.

Trained fp32 numbers differ wildly in their low bytes and hardly in their high ones; bringing equal positions together
lets zstd find the likeness. FORMAT.md gives the byte layout.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import numpy as np

from lustrain.problem import UserError, problem
from trainer.storage import CorruptObjectError

NONE = "none"
PLANES_ZSTD = "planes-zstd"
_PLANES = 4
_LEVEL = 1
"""zstd level 1: higher ones gain under 1 % on weights and cost several times the CPU."""


def encode_block(data: memoryview | bytes) -> bytes:
    """Stored bytes of one logical block of any length; UserError when the `zstandard` package is missing."""
    compressor = _zstandard().ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)
    flat = np.frombuffer(data, np.uint8)
    whole = len(flat) - len(flat) % _PLANES
    planes = np.empty_like(flat)
    planes[:whole].reshape(_PLANES, -1)[...] = flat[:whole].reshape(-1, _PLANES).T
    planes[whole:] = flat[whole:]
    encoded: bytes = compressor.compress(planes.data)
    return encoded


def decode_block(data: memoryview | bytes, size: int) -> bytes:
    """The `size` logical bytes of a stored block; CorruptObjectError when they do not come out."""
    zstandard = _zstandard()
    try:
        if zstandard.frame_content_size(data) != size:
            raise CorruptObjectError(f"compressed block does not say that it holds {size} logical bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise CorruptObjectError(f"compressed block cannot be read: {error}") from error
    if len(planes) != size:
        raise CorruptObjectError(f"compressed block holds {len(planes)} logical bytes instead of {size}")
    whole = size - size % _PLANES
    flat = np.empty_like(planes)
    flat[:whole].reshape(-1, _PLANES)[...] = planes[:whole].reshape(_PLANES, -1).T
    flat[whole:] = planes[whole:]
    return flat.tobytes()


@lru_cache(maxsize=1)
def _zstandard() -> ModuleType:
    """The compression package, loaded only by runs that compress."""
    try:
        import zstandard
    except ImportError as error:
        raise UserError(
            problem(
                "checkpoint.compression",
                PLANES_ZSTD,
                "needs the zstandard package",
                allowed="none, or planes-zstd with the package",
                fix="pip install 'lustrain[compression]'",
            )
        ) from error
    return zstandard
