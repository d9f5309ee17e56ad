"""What registering, reading and stopping a run do with its request record."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from invoke.context import Context

from launch import runs, tasks
from launch.flags import TrainFlags
from lustrain.problem import UserError, problem
from tests.checkpoint.stores import Asking
from tests.launch.test_request import config, resolve
from tests.processes import command_line, wait_until
from trainer.run.journal import CONFIG, REQUEST
from trainer.storage import PreconditionError
from trainer.storage.local import LocalStore

EARLIER = json.loads((Path(__file__).parent / "earlier_request.json").read_text())
"""The request record of a run on its machine as commit 0720df85 stored it, in /home/me/runs."""


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("host", "words", "taken"),
    [
        (platform.node(), "train", False),
        (platform.node(), "sweep", False),
        (platform.node(), "other", True),
        ("another", "train", True),
    ],
)
def test_resume_waits_for_a_launcher_that_lives(
    tmp_path: Path, host: str, words: str, taken: bool, earlier: bool
) -> None:
    request = resolve(TrainFlags("config.toml", name="first"), config(tmp_path), None, tmp_path)
    store = runs.register_run(request, resume=False, files={}).store
    record = {**EARLIER, "run": request.run} if earlier else runs.read_record(store, REQUEST) or {}
    # What has the words of `fab train` and lives.
    with subprocess.Popen([sys.executable, "-c", "input()", words], stdin=subprocess.PIPE) as launcher:
        # Linux knows a program's words a moment after it has started it.
        wait_until(lambda: command_line(launcher.pid))
        record |= {"host": host, "pid": launcher.pid}
        store.put(REQUEST, json.dumps(record).encode())
        if taken:
            runs.register_run(request, resume=True, files={})
        else:
            with pytest.raises(UserError) as error:
                runs.register_run(request, resume=True, files={})
            assert error.value.problems[0].path == "--resume"  # type: ignore[attr-defined]
        launcher.communicate(b"\n")
    assert runs.supervisor_is_gone(record) == (host == platform.node())
    runs.register_run(request, resume=True, files={})


@pytest.mark.parametrize("command", ["status", "stop", "resume"])
def test_request_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    request = resolve(TrainFlags("config.toml", name="first"), config(tmp_path), None, tmp_path)
    runs.register_run(request, resume=False, files={})
    requests: list[tuple[str, str]] = []
    counting = Asking(request.run, lambda verb, key: requests.append((verb, key)))
    monkeypatch.setattr(runs, "open_store", lambda *args, **kwargs: counting)
    if command == "resume":
        runs.register_run(request, resume=True, files={})
        assert ("stat", REQUEST) not in requests
    else:
        arguments = {"now": True} if command == "stop" else {}
        getattr(tasks, command)(Context(), run=request.run, **arguments)
    assert requests.count(("read", REQUEST)) == 1


def test_start_that_another_start_overtakes_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = resolve(TrainFlags("config.toml", name="first"), config(tmp_path), None, tmp_path)
    store = runs.register_run(request, resume=False, files={}).store
    other = dataclasses.replace(request, config=f"{request.config}\n# of the other start\n")
    overtakes = iter([True])

    def before(verb: str, key: str) -> None:
        if (verb, key) == ("replace", REQUEST) and next(overtakes, False):
            runs.register_run(other, resume=True, files={})

    asking = Asking(request.run, before)
    monkeypatch.setattr(runs, "open_store", lambda *args, **kwargs: asking)
    with pytest.raises(UserError) as error:
        runs.register_run(request, resume=True, files={"plan": "of the refused start"})
    assert error.value.problems[0].path == "run.uri"  # type: ignore[attr-defined]
    assert store.read(CONFIG)[0].decode() == other.config
    assert {one.key for one in store.list()} == {CONFIG, REQUEST}


def test_start_is_put_back_unless_another_has_taken_the_run(tmp_path: Path) -> None:
    request = resolve(TrainFlags("config.toml", name="first"), config(tmp_path), None, tmp_path)
    began, refused, later = (runs.register_run(request, resume=again, files={}) for again in (False, True, True))
    refused.put_back()
    assert began.store.read(REQUEST)[0] == later.request
    later.put_back()
    assert began.store.read(REQUEST)[0] == refused.request


@pytest.mark.parametrize(("taker", "left"), [("this start", "1"), ("the start before", "2")])
def test_start_is_put_back_with_its_own_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taker: str, left: str
) -> None:
    request = resolve(TrainFlags("config.toml", name="first"), config(tmp_path), None, tmp_path)
    store = runs.register_run(request, resume=False, files={}).store
    runs.save_job(store, "slurm", {"job": "1"})
    refused = runs.register_run(request, resume=True, files={})
    with monkeypatch.context() as patch:
        if taker == "the start before":
            patch.setattr(os, "getpid", lambda: 0)
        runs.save_job(store, "slurm", {"job": "2"})
    refused.put_back()
    assert runs.read_jobs(store)["slurm"] == {"job": left}


class LosesAnswers(LocalStore):
    """Of a put with a condition the first answer is lost, and the next try meets what the first has stored."""

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        etag = super().put(key, body, if_absent=if_absent, if_match=if_match)
        if if_absent or if_match:
            raise PreconditionError(problem("object", key, "exists already"))
        return etag


def test_start_whose_answer_is_lost_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = resolve(TrainFlags("config.toml", name="first"), config(tmp_path), None, tmp_path)
    monkeypatch.setattr(runs, "open_store", lambda *args, **kwargs: LosesAnswers(request.run))
    for resume in (False, True):
        registered = runs.register_run(request, resume=resume, files={})
        assert registered.store.read(REQUEST)[0] == registered.request
