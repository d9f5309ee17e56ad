"""The operator's way to stop a run: a file or an S3 object that appears."""

from __future__ import annotations

import errno
from pathlib import Path

from trainer.errors import UserError, problem
from trainer.interrupt.notice import Notice, OnEvent
from trainer.interrupt.outage import Outage
from trainer.storage import ObjectMissingError, ObjectStore, open_store


def stop_uri_problems(uri: str) -> list[str]:
    """The config problem with `interrupt.stop_uri`, if there is one."""
    if not uri.startswith("s3://"):
        if "://" in uri:
            return [problem("interrupt.stop_uri", uri, "unknown kind of place", allowed="a path, or s3://bucket/key")]
        if not uri or uri.endswith("/"):
            return [problem("interrupt.stop_uri", uri, "names a folder", fix="name the file that shall appear")]
        return _never_there(uri)
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket or not key or key.endswith("/"):
        return [problem("interrupt.stop_uri", uri, "names no object", allowed="s3://bucket/key")]
    return []


def _never_there(path: str) -> list[str]:
    """A problem with a path that no file can ever have; one that is only absent now is none."""
    try:
        Path(path).exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return [problem("interrupt.stop_uri", path, "is too long for a path", fix="use a shorter one")]
    return []


class StopFile:
    """Gives notice, without a deadline, as soon as the file or object exists; its content does not matter.

    A stop file that still lies there stops the next start too: whoever put it there takes it away.
    """

    def __init__(self, uri: str, on_event: OnEvent) -> None:
        self._uri = uri
        self._outage = Outage("stop-file", on_event)
        self._store: ObjectStore | None = None

    def poll(self) -> Notice | None:
        try:
            there = self._exists()
        except (UserError, OSError) as error:
            self._outage.failed(f"cannot look for {self._uri}: {error}")
            return None
        self._outage.worked()
        return Notice("stop-file", f"{self._uri} exists", None) if there else None

    def _exists(self) -> bool:
        if not self._uri.startswith("s3://"):
            try:
                Path(self._uri).stat()
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True
        root, _, key = self._uri.rpartition("/")
        if self._store is None:
            self._store = open_store(root)
        try:
            self._store.stat(key)
        except ObjectMissingError:
            return False
        return True
