"""The order in which a run sees its samples: a keyed permutation of each epoch, computed, never stored.

Which sample stands at position p of the run is a function of (seed, p, size) alone. So every rank, any number of
loader threads, and a job that resumes with another world size agree on it without talking, the state to save is one
integer, and a set of 10^12 samples needs no memory (a stored `torch.randperm` of as many would need 8 TB).

Construction: an alternating Feistel network over mixed radices (FE2 in Bellare, Ristenpart, Rogaway and Stegers,
"Format-Preserving Encryption", SAC 2009, https://eprint.iacr.org/2009/251). A number x < a*b is the pair (x // b, x %
b); rounds add to one half, modulo its radix, a keyed hash of the other half, which can always be subtracted again: a
bijection of [0, a*b). With a = ceil(sqrt(size)) and b = ceil(size / a) the domain is larger than the set by less than
a, and the few values past the end walk on along their cycle until they fall inside (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002), which keeps it a bijection of [0, size). The hash is the finalizer of
SplitMix64 (Steele, Lea, Flood, OOPSLA 2014); the round keys are BLAKE2b-512("lustrain order <seed> <epoch>"). This
spreads samples evenly; it is not meant to withstand an attacker.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

MAX_SIZE = 1 << 40
"""Both radices stay below 2^20, so that the bias of `hash % radix` is under 2^-44."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""What SplitMix64 adds to its state for each number."""
_ROUNDS = 8
"""One 64-bit word of the BLAKE2b digest per round; FE2 mixes fully after 6, the rest is margin for tiny sets."""


def sample_ids(seed: int, start: int, count: int, size: int) -> npt.NDArray[np.int64]:
    """Sample ids (int64, each in [0, size)) of the run's positions [start, start + count); epoch = position // size.

    ValueError for a size outside [1, 2^40] or a negative start or count.
    """
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size must be in [1, 2^40], not {size}")
    if start < 0 or count < 0:
        raise ValueError(f"start and count must not be negative: {start}, {count}")
    ids = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, place = divmod(start + done, size)
        take = min(count - done, size - place)
        ids[done : done + take] = _permuted(_round_keys(seed, epoch), place, take, size)
        done += take
    return ids


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"lustrain order {seed} {epoch}".encode()).digest()
    return np.frombuffer(digest, dtype="<u8")


def _permuted(keys: npt.NDArray[np.uint64], place: int, count: int, size: int) -> npt.NDArray[np.uint64]:
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    ids = _feistel(keys, np.arange(place, place + count, dtype=np.uint64), rows, columns)
    outside = np.flatnonzero(ids >= size)
    while outside.size:
        ids[outside] = _feistel(keys, ids[outside], rows, columns)
        outside = outside[ids[outside] >= size]
    return ids


def _feistel(
    keys: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64], rows: int, columns: int
) -> npt.NDArray[np.uint64]:
    a, b = np.uint64(rows), np.uint64(columns)
    left, right = numbers // b, numbers % b
    for turn in range(0, _ROUNDS, 2):
        left = (left + _hash(right ^ keys[turn])) % a
        right = (right + _hash(left ^ keys[turn + 1])) % b
    return left * b + right


def _hash(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash each word, shifted down by one bit so that the sum with a half cannot overflow."""
    return mixed(words + GOLDEN) >> np.uint64(1)


def mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's finalizer of each word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
