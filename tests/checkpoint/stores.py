"""Folders that stand for stores in trouble."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.storage import ObjectInfo, PreconditionError, StorageError
from trainer.storage.local import LocalStore

AWAY = "does not answer; fix: wait"


class Asking(LocalStore):
    """Asks `before(request, key)` ahead of every request on an object; what that raises, the request ends with.

    A put that replaces what was read is the request `replace`.
    """

    def __init__(self, uri: str, before: Callable[[str, str], object]) -> None:
        super().__init__(uri)
        self.before = before

    def read(self, key: str) -> tuple[bytes, str]:
        self.before("read", key)
        return super().read(key)

    def stat(self, key: str) -> ObjectInfo:
        self.before("stat", key)
        return super().stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.before("list", prefix)
        return super().list(prefix)

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        self.before("replace" if if_match else "put", key)
        return super().put(key, body, if_absent=if_absent, if_match=if_match)

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self.before("delete", key)
        super().delete(key, if_match=if_match)


def away(uri: object, request: str, key: str) -> Asking:
    """A folder that does not answer one kind of request for one object."""

    def before(asked: str, of: str) -> None:
        if (asked, of) == (request, key):
            raise StorageError(f"{of}: {AWAY}")

    return Asking(str(uri), before)


class Stuttering(LocalStore):
    """Stores what it is given, and has it that the put was a repetition: the answer to the first was lost."""

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        super().put(key, body, if_absent=if_absent, if_match=if_match)
        raise PreconditionError("the retry met its own success")


class FlippedOnce(LocalStore):
    """Flips a bit of the first delivery of every object (or of these) or range, as a bad wire may; all is stored whole."""

    def __init__(self, uri: str, *keys: str) -> None:
        super().__init__(uri)
        self._keys = keys
        self._delivered: set[tuple[str, int]] = set()

    def read(self, key: str) -> tuple[bytes, str]:
        raw, etag = super().read(key)
        return (raw[:20] + bytes([raw[20] ^ 1]) + raw[21:] if self._is_first(key, -1) else raw), etag

    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        super().read_into(key, buffer, offset)
        buffer[0] ^= self._is_first(key, offset)

    def _is_first(self, key: str, offset: int) -> bool:
        before = len(self._delivered)
        self._delivered.add((key, offset))
        return len(self._delivered) > before and (not self._keys or key in self._keys)
