"""What registering, reading and stopping a run do with its request record."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from invoke.context import Context

from launch import runs, tasks
from launch.backends import is_supervised_by_caller
from launch.flags import TrainFlags
from lustrain.problem import UserError
from tests.checkpoint.stores import Asking
from tests.launch.test_request import config, resolve
from trainer.run.journal import REQUEST


@pytest.mark.parametrize(
    ("host", "words", "taken"),
    [
        (platform.node(), "train", False),
        (platform.node(), "sweep", False),
        (platform.node(), "other", True),
        ("another", "train", True),
    ],
)
def test_resume_waits_for_a_launcher_that_lives(tmp_path: Path, host: str, words: str, taken: bool) -> None:
    request = resolve(TrainFlags("config.toml", name="first"), config(tmp_path), None, tmp_path)
    store = runs.register_run(request, is_supervised_by_caller, resume=False, files={})
    # What has the words of `fab train` and lives.
    with subprocess.Popen([sys.executable, "-c", "input()", words], stdin=subprocess.PIPE) as launcher:
        store.put(
            REQUEST,
            json.dumps({**(runs.read_record(store, REQUEST) or {}), "host": host, "pid": launcher.pid}).encode(),
        )
        if taken:
            runs.register_run(request, is_supervised_by_caller, resume=True, files={})
        else:
            with pytest.raises(UserError) as error:
                runs.register_run(request, is_supervised_by_caller, resume=True, files={})
            assert error.value.problems[0].path == "--resume"  # type: ignore[attr-defined]
        launcher.communicate(b"\n")
    runs.register_run(request, is_supervised_by_caller, resume=True, files={})


@pytest.mark.parametrize("command", ["status", "stop", "resume"])
def test_request_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    request = resolve(TrainFlags("config.toml", name="first"), config(tmp_path), None, tmp_path)
    runs.register_run(request, is_supervised_by_caller, resume=False, files={})
    requests: list[tuple[str, str]] = []
    counting = Asking(request.run, lambda verb, key: requests.append((verb, key)))
    monkeypatch.setattr(runs, "open_store", lambda *args, **kwargs: counting)
    if command == "resume":
        runs.register_run(request, is_supervised_by_caller, resume=True, files={})
        assert ("stat", REQUEST) not in requests
    else:
        arguments = {"now": True} if command == "stop" else {}
        getattr(tasks, command)(Context(), run=request.run, **arguments)
    assert requests.count(("read", REQUEST)) == 1
