"""What a start leaves in the run: the wish and the settings; a name that is taken is refused."""

from __future__ import annotations

import getpass
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.asked import Asked
from lustrain.problem import UserError, problem
from trainer.launch.journal import ASKED, CONFIG, STOP, VERSION, read
from trainer.storage import ObjectMissingError, ObjectStore, PreconditionError, open_store

SUBMITTED = "launch/submitted.json"
"""What a scheduler made of it: its job."""


def claim(asked: Asked, *, resume: bool, plan: Mapping[str, str]) -> ObjectStore:
    """Record what is asked in its run, with the files of the plan by key. UserError where the run is taken, or where `resume`
    finds none."""
    store = open_store(asked.run, name="run.uri")
    taken = _exists(store, ASKED)
    if resume and taken:
        _refuse_beside_another(store, asked)
    if taken and not resume:
        fix = "choose another --name or run.uri; or go on with this run: --resume"
        raise UserError(problem("run.uri", asked.run, "there is a run of this name already", fix=fix))
    if resume and not taken and not any(True for _ in store.list("manifests/")):
        raise UserError(problem("--resume", asked.run, "there is no such run", fix="leave --resume out to begin it"))
    # What was decided of earlier attempts does not bind this start.
    after = max((record["attempt"] for record in read(store)), default=0)
    by = f"{getpass.getuser()}@{platform.node()}"
    body = {
        "version": VERSION,
        "by": by,
        "host": platform.node(),
        "pid": os.getpid(),
        "asked": time.time(),
        "after": after,
        **asked.record(),
    }
    try:
        store.put(ASKED, json.dumps(body, indent=1).encode() + b"\n", if_absent=not taken)
    except PreconditionError:
        fix = "choose another --name or run.uri"
        raise UserError(problem("run.uri", asked.run, "another start took this name just now", fix=fix)) from None
    for key, text in {CONFIG: asked.config, **plan}.items():
        store.put(key, text.encode())
    store.delete(STOP)
    return store


def _refuse_beside_another(store: ObjectStore, asked: Asked) -> None:
    """UserError where the process that supervises the run on this machine still lives; a scheduler is asked for its jobs."""
    record = recorded(store, ASKED) or {}
    pid = record.get("pid")
    if record.get("on") != "local" or record.get("host") != platform.node() or pid == os.getpid():
        return
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return
    # The number may be another process's by now.
    if b"train" in words:
        why = f"process {pid} of this machine still trains it"
        raise UserError(problem("--resume", asked.run, why, fix=f"fab stop {asked.run}, or let it go on"))


def release(store: ObjectStore, plan: Mapping[str, str]) -> None:
    """Take back what `claim` recorded, of a run that no attempt was ever made at."""
    if not read(store):
        for key in (*plan, CONFIG, ASKED):
            store.delete(key)


def submitted(store: ObjectStore, job: Mapping[str, Any]) -> None:
    """Record what the scheduler made of it, under the scheduler's name."""
    body = {"version": VERSION, "host": platform.node(), **job}
    store.put(SUBMITTED, json.dumps(body, indent=1).encode() + b"\n")


def look(uri: str) -> ObjectStore:
    """Open a run that is there. UserError where none is."""
    store = open_store(uri, create=False, name="RUN")
    if not _exists(store, ASKED) and next(iter(store.list("events/")), None) is None:
        raise UserError(problem("RUN", uri, "there is no run", fix="give the run's uri, or its name with --cluster"))
    return store


def recorded(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """Return a record of a launcher; None without one."""
    try:
        found = json.loads(store.read(key)[0])
    except ObjectMissingError:
        return None
    except ValueError:
        raise UserError(problem("object", f"{store.uri.rstrip('/')}/{key}", "is not JSON")) from None
    return found if isinstance(found, dict) else None


def _exists(store: ObjectStore, key: str) -> bool:
    try:
        store.stat(key)
    except ObjectMissingError:
        return False
    return True
