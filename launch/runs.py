"""A run on the operator's side: registered before it starts, opened afterwards; a name that is taken is refused."""

from __future__ import annotations

import getpass
import json
import os
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.request import SUPERVISED_BY_CALLER, RunRequest
from lustrain.problem import UserError, problem
from trainer.run.journal import CONFIG, REQUEST, REQUESTED_AT, STOP, VERSION, encode_record, read
from trainer.storage import ObjectMissingError, ObjectStore, PreconditionError, open_store

SUBMITTED = "launch/submitted.json"
"""The scheduler's job."""
EARLIER_SUPERVISED = ("local", "ssh")
"""Backends whose caller supervises, for records from before that was recorded."""


@dataclass(frozen=True)
class Registration:
    """A start of a run as it is recorded in the run, and the records that this replaced: by key, None where none was."""

    store: ObjectStore
    request: bytes
    replaced: Mapping[str, bytes | None]

    def put_back(self) -> None:
        """Have the records as they were, unless a launch has begun since or another start has taken the run."""
        if _content(self.store, REQUEST) != self.request:
            return
        after = json.loads(self.request)["after"]
        if any(record["attempt"] > after for record in read(self.store)):
            return
        job = read_record(self.store, SUBMITTED) or {}
        replaced = dict(self.replaced)
        if (job.get("host"), job.get("pid")) != (platform.node(), os.getpid()):
            # The start before this one may have got its job only now.
            del replaced[SUBMITTED]
        restore(self.store, replaced)

    def earlier_job(self, backend: str) -> dict[str, Any]:
        """Return the scheduler's job that the run had before, as `save_job` recorded it; empty without one."""
        return (_parsed(self.store, SUBMITTED, self.replaced[SUBMITTED]) or {}).get(backend) or {}


def register_run(request: RunRequest, *, resume: bool, files: Mapping[str, str]) -> Registration:
    """Record the request in its run, with the plan's files by key. UserError where the run exists, where `resume` finds none,
    or where another start takes it at the same time."""
    store = open_store(request.run, name="run.uri")
    before, etag = _content_and_etag(store, REQUEST)
    record = _parsed(store, REQUEST, before)
    if resume and record is not None:
        _refuse_other_address(record, request)
        _refuse_beside_another(record, request)
    if record is not None and not resume:
        fix = "choose another --name or run.uri; or go on with this run: --resume"
        raise UserError(problem("run.uri", request.run, "there is a run of this name already", fix=fix))
    if resume and record is None and not any(True for _ in store.list("manifests/")):
        raise UserError(problem("--resume", request.run, "there is no such run", fix="leave --resume out to begin it"))
    # Decisions about earlier launches do not bind this start.
    after = max((record["attempt"] for record in read(store)), default=0)
    by = f"{getpass.getuser()}@{platform.node()}"
    body = {
        "version": VERSION,
        "by": by,
        "host": platform.node(),
        "pid": os.getpid(),
        REQUESTED_AT: time.time(),
        "after": after,
        **request.record(),
    }
    written = {CONFIG: request.config, **files}
    others = (*written, SUBMITTED, STOP)
    # A run that is not registered has none of them.
    replaced = {REQUEST: before, **(dict.fromkeys(others) if before is None else read_objects(store, others))}
    taken = encode_record(body)
    try:
        store.swap(REQUEST, taken, etag)
    except (PreconditionError, ObjectMissingError):
        fix = f"look at it: fab status {request.run}; or choose another --name or run.uri"
        raise UserError(problem("run.uri", request.run, "another start took it just now", fix=fix)) from None
    for key, text in written.items():
        store.put(key, text.encode())
    store.delete(STOP)
    return Registration(store, taken, replaced)


def _refuse_other_address(record: Mapping[str, Any], request: RunRequest) -> None:
    """Refuse a run that was registered under another address, as through a link: a scheduler's jobs go by the first one."""
    first = record.get("run", request.run)
    if first != request.run:
        raise UserError(problem("run.uri", request.run, f"is the run {first}", fix=f"go on with it under {first}"))


def _refuse_beside_another(record: Mapping[str, Any], request: RunRequest) -> None:
    """Refuse a run whose supervising process on this machine still lives; a scheduler's jobs are its backend's to check."""
    pid = record.get("pid")
    if _is_supervised_here(record) and pid != os.getpid() and _supervises(pid):
        why = f"process {pid} of this machine still trains it"
        raise UserError(problem("--resume", request.run, why, fix=f"fab stop {request.run}, or let it go on"))


def supervisor_is_gone(request: Mapping[str, Any]) -> bool:
    """Whether the run was supervised by a process of this machine that has ended; of other machines that is not known."""
    return _is_supervised_here(request) and "pid" in request and not _supervises(request["pid"])


def supervising_host(request: Mapping[str, Any]) -> str:
    """Return the other machine of which a process supervises the run; empty where it is this one, or a scheduler's job does."""
    host = str(request.get("host") or "")
    return host if _supervised_by_caller(request) and host != platform.node() else ""


def _is_supervised_here(request: Mapping[str, Any]) -> bool:
    return request.get("host") == platform.node() and _supervised_by_caller(request)


def _supervised_by_caller(request: Mapping[str, Any]) -> bool:
    return bool(request.get(SUPERVISED_BY_CALLER, request.get("on") in EARLIER_SUPERVISED))


def _supervises(pid: object) -> bool:
    """Whether this process is a `fab train` or `fab sweep`: the number may be another process's by now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return not {b"train", b"sweep"}.isdisjoint(words)


def read_objects(store: ObjectStore, keys: Collection[str]) -> dict[str, bytes | None]:
    """Return the objects by key, for `restore`; None for one that is not there."""
    return {key: _content(store, key) for key in keys}


def restore(store: ObjectStore, before: Mapping[str, bytes | None]) -> None:
    """Have the objects as `read_objects` found them."""
    for key, content in before.items():
        if content is None:
            store.delete(key)
        else:
            store.put(key, content)


def _content(store: ObjectStore, key: str) -> bytes | None:
    return _content_and_etag(store, key)[0]


def _content_and_etag(store: ObjectStore, key: str) -> tuple[bytes, str] | tuple[None, None]:
    try:
        return store.read(key)
    except ObjectMissingError:
        return None, None


def save_job(store: ObjectStore, backend: str, job: Mapping[str, Any]) -> None:
    """Record the scheduler's job under the backend's name."""
    body = {"version": VERSION, "host": platform.node(), "pid": os.getpid(), backend: dict(job)}
    store.put(SUBMITTED, encode_record(body))


def read_jobs(store: ObjectStore) -> dict[str, Any]:
    """Return the scheduler's job by the name of its backend, as `save_job` recorded it; empty without one.

    The first versions had Slurm alone, whose job was the whole record.
    """
    record = read_record(store, SUBMITTED) or {}
    if "job" not in record:
        return record
    return {"version": record["version"], "host": record["host"], "slurm": {"job": record["job"], "log": record["log"]}}


def open_existing_run(uri: str) -> ObjectStore:
    """Open a run. UserError where there is none."""
    store = open_store(uri, create=False, name="RUN")
    if not _exists(store, REQUEST) and next(iter(store.list("events/")), None) is None:
        raise UserError(problem("RUN", uri, "there is no run", fix="give the run's uri, or its name with --cluster"))
    return store


def read_record(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """Return a launcher's record; None without one."""
    return _parsed(store, key, _content(store, key))


def _parsed(store: ObjectStore, key: str, content: bytes | None) -> dict[str, Any] | None:
    if content is None:
        return None
    try:
        record = json.loads(content)
    except ValueError:
        raise UserError(problem("object", f"{store.uri.rstrip('/')}/{key}", "is not JSON")) from None
    return record if isinstance(record, dict) else None


def registered_uri(request: Mapping[str, Any] | None, store: ObjectStore) -> str:
    """Return the address in the run's request record, by which a scheduler's jobs go; a link may lead to the store too."""
    return str((request or {}).get("run") or store.uri)


def _exists(store: ObjectStore, key: str) -> bool:
    try:
        store.stat(key)
    except ObjectMissingError:
        return False
    return True
