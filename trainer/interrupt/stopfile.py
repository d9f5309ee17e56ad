"""The operator's way to stop a run: a file or an S3 object that appears."""

from __future__ import annotations

import os
from pathlib import Path

from lustrain.problem import UserError, problem
from trainer.interrupt.notice import Notice, OnEvent
from trainer.interrupt.outage import Outage
from trainer.storage import ObjectMissingError, ObjectStore, open_store
from trainer.storage.keys import MAX_SEGMENT_BYTES, bucket_problems

MAX_PATH_BYTES = 4095
"""PATH_MAX of Linux without its NUL: include/uapi/linux/limits.h."""
MAX_S3_KEY_BYTES = 1024
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html"""


def stop_uri_problems(uri: str) -> list[str]:
    """Check `interrupt.stop_uri`; one line for its problem, if it has one."""
    if not uri.startswith("s3://"):
        if "://" in uri:
            return [
                problem(
                    "interrupt.stop_uri", uri, "is an unknown kind of address", allowed="a path, or s3://bucket/key"
                )
            ]
        if not uri or uri.endswith("/"):
            return [problem("interrupt.stop_uri", uri, "names a folder", fix="name the file to look for")]
        return _too_long(uri, uri, MAX_PATH_BYTES)
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket or not key or key.endswith("/"):
        return [problem("interrupt.stop_uri", uri, "names no object", allowed="s3://bucket/key")]
    return bucket_problems("interrupt.stop_uri", uri, bucket) or _too_long(uri, key, MAX_S3_KEY_BYTES)


def _too_long(uri: str, path: str, most: int) -> list[str]:
    """Count the bytes in place of a look-up: an absent folder would hide the mistake, and a file system may hang."""
    if len(os.fsencode(path)) <= most and all(len(os.fsencode(name)) <= MAX_SEGMENT_BYTES for name in path.split("/")):
        return []
    allowed = f"{MAX_SEGMENT_BYTES} bytes between two '/', {most} in all"
    return [problem("interrupt.stop_uri", uri, "is too long to be looked up", allowed=allowed, fix="use a shorter one")]


class StopFile:
    """Gives notice, without a deadline, as soon as the file or object exists; its content does not matter.

    A stop file that still exists stops the next start too: the operator who made it removes it.
    """

    def __init__(self, uri: str, on_event: OnEvent) -> None:
        self._uri = uri
        self._outage = Outage("stop-file", on_event)
        self._store: ObjectStore | None = None

    def poll(self) -> Notice | None:
        try:
            exists = self._exists()
        except (UserError, OSError) as error:
            self._outage.failed(f"cannot look for {self._uri}: {error}")
            return None
        self._outage.worked()
        return Notice("stop-file", f"{self._uri} exists", None) if exists else None

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
