"""Names of the objects in a run: pure string functions, both ways."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

LEASE = "lease.json"
MANIFESTS = "manifests/"
ATTEMPTS = "attempts/"

_MANIFEST = re.compile(r"manifests/(\d{6,})-(\d{10,})\.json")
_ATTEMPT = re.compile(r"(\d{6,})-(\d{10,})-([0-9a-f]{8})")


@dataclass(frozen=True, order=True)
class ManifestId:
    """A commit: the lease generation that made it, then the step. Orders from oldest to newest."""

    generation: int
    step: int

    @property
    def key(self) -> str:
        return f"{MANIFESTS}{self.generation:06d}-{self.step:010d}.json"

    @classmethod
    def of_key(cls, key: str) -> ManifestId | None:
        """Return the id in a key, or None for a foreign object among the manifests."""
        match = _MANIFEST.fullmatch(key)
        return cls(int(match[1]), int(match[2])) if match else None


def attempt_name(generation: int, step: int, nonce: str) -> str:
    """Return a name that no other try at a save ever has; `nonce` is 8 hex digits."""
    return f"{generation:06d}-{step:010d}-{nonce}"


def attempt_commit(name: str) -> ManifestId | None:
    """Return the commit that an attempt was for, or None for a foreign folder."""
    match = _ATTEMPT.fullmatch(name)
    return ManifestId(int(match[1]), int(match[2])) if match else None


def data_key(attempt: str, rank: int) -> str:
    return f"{ATTEMPTS}{attempt}/rank-{rank:05d}.bin"


def index_key(attempt: str, rank: int) -> str:
    return f"{ATTEMPTS}{attempt}/rank-{rank:05d}.json"


def tier_root(path: str, run_uri: str) -> str:
    """Return the folder of one run's fast copies below a tier's `path`; objects in it have the same keys as in the run.

    Several runs may share a tier, and a run's URI is not a file name, so the folder is a hash of it.
    """
    return f"{path.rstrip('/')}/{hashlib.sha256(run_uri.rstrip('/').encode()).hexdigest()[:16]}"
