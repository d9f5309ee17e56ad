"""Immutable objects under one root, in a local folder or in S3, behind one small interface.

Everything durable in Lustrain (checkpoints, leases, metrics, token shards) goes through `ObjectStore`. It promises only
what both backends can keep: whole objects appear at once or not at all, and a conditional put is atomic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from lustrain.problem import UserError


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing or a stat knows: `size` in bytes, `modified` in Unix seconds by the server's clock.

    `archive` names the archive that the object must be restored from before it can be read; empty where it can be read.
    """

    key: str
    size: int
    etag: str
    modified: float
    crc64nvme: int | None = None
    storage_class: str = ""
    archive: str = ""


class StorageError(UserError):
    """The store cannot serve (unreachable, refused, out of space) after bounded retries; one line names the fix."""


class PassingError(StorageError):
    """The store cannot serve just now: it is busy, or its answers arrive broken. Trying again later may succeed."""


class RefusedError(StorageError):
    """The store does not serve this job: a matter of credentials, permissions, names, clock or room, for a person to settle."""


class ArchivedError(RefusedError):
    """The object lies in an archive storage class, and a person has to restore it before anything can read it."""


class ObjectMissingError(StorageError):
    """No object has this key."""


class PreconditionError(StorageError):
    """A conditional put or delete lost: the object exists already, or is no longer the one that was read."""


class CorruptObjectError(StorageError):
    """The bytes that arrived are not the bytes that were stored: too few, too many, or with a different checksum."""


class ObjectStore(ABC):
    """Objects under one root; keys are relative, `/`-separated, and never begin with `/`."""

    uri: str

    @abstractmethod
    def read(self, key: str) -> tuple[bytes, str]:
        """Return body and etag of a small object; raises ObjectMissingError."""

    @abstractmethod
    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        """Fill the whole `buffer` with the object's bytes from `offset` on, in parallel ranges where that pays.

        Raises CorruptObjectError when the object is too short, ObjectMissingError when it does not exist.
        """

    @abstractmethod
    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """Store a small object and return its etag; with a condition, atomically, or raise PreconditionError.

        When an answer is lost, the retry may meet its own earlier success as PreconditionError: `swap` compares the body.
        """

    def swap(self, key: str, body: bytes, etag: str | None) -> str:
        """Replace the small object that had `etag` (None: create it) and return its new etag; PreconditionError where another
        body was stored before."""
        try:
            return self.put(key, body, if_absent=etag is None, if_match=etag)
        except PreconditionError:
            found, found_etag = self.read(key)
            if found != body:
                raise
            return found_etag

    @abstractmethod
    def put_file(self, key: str, path: str, size: int, crc64nvme: int) -> None:
        """Store the first `size` bytes of the file at `path` (it may be `/proc/self/fd/N`) as one object, durable on return.

        The receiving end verifies `crc64nvme` where it can; raises CorruptObjectError when it disagrees.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return size, etag and stored checksum (S3 only) of one object; raises ObjectMissingError."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose key begins with `prefix`, in key order, page by page."""

    @abstractmethod
    def delete(self, key: str, *, if_match: str | None = None) -> None:
        """Remove one object, with `if_match` only the object that was read; an absent object is not an error."""

    def subfolder(self, path: str) -> ObjectStore:
        """Return the store of the objects under `path`, of a place that is there already. UserError as `open_store`."""
        return open_store(f"{self.uri.rstrip('/')}/{path}", create=False)

    @abstractmethod
    def now(self) -> float:
        """Return Unix seconds by the store's own clock, which `ObjectInfo.modified` counts by too."""


def open_store(uri: str, *, create: bool = True, name: str = "store") -> ObjectStore:
    """Open the store at `s3://bucket/prefix` or at a local folder; UserError for a wrong URI or an unusable place.

    `name` is what the user calls this URI (`run.uri`, `--out`): lines about the store as a whole begin with it.
    """
    if uri.startswith("s3://"):
        from trainer.storage.s3 import S3Store

        return S3Store(uri, name=name)
    from trainer.storage.local import LocalStore

    return LocalStore(uri, create=create, name=name)
