"""The file with a run's settings, also where it is an object of S3: all nodes of a job read the same one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.run.start import proven_settings_exit_1
from trainer.storage import open_store


@contextmanager
def config_file(name: str) -> Iterator[Path]:
    """Yield the file at a path, or a copy of the object at `s3://…`. UserError; exit code 1 where S3 may answer later."""
    if not name.startswith("s3://"):
        yield Path(name)
        return
    folder, _, key = name.rpartition("/")
    with proven_settings_exit_1():
        body, _ = open_store(folder, create=False, name="CONFIG").read(key)
    with tempfile.NamedTemporaryFile(prefix="lustrain-", suffix=".toml") as copy:
        Path(copy.name).write_bytes(body)
        yield Path(copy.name)
