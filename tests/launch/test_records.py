"""A run that something on this machine still trains is not gone on with beside it."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from launch import records
from launch.asked import Asked, ask
from launch.wish import TrainWish
from lustrain.problem import UserError
from tests.launch.test_asked import config
from trainer.launch.journal import ASKED


def asked(folder: Path) -> Asked:
    wish = dataclasses.replace(TrainWish("config.toml"), name="first")
    return ask(wish, config(folder), None, 1, folder)


@pytest.mark.parametrize(
    ("host", "words", "taken"),
    [(platform.node(), "train", False), (platform.node(), "other", True), ("another", "train", True)],
)
def test_resume_waits_for_a_launcher_that_lives(tmp_path: Path, host: str, words: str, taken: bool) -> None:
    run = asked(tmp_path)
    store = records.claim(run, resume=False, plan={})
    # What has the words of `fab train` and lives.
    with subprocess.Popen([sys.executable, "-c", "input()", words], stdin=subprocess.PIPE) as launcher:
        store.put(
            ASKED, json.dumps({**(records.recorded(store, ASKED) or {}), "host": host, "pid": launcher.pid}).encode()
        )
        if taken:
            records.claim(run, resume=True, plan={})
        else:
            with pytest.raises(UserError) as error:
                records.claim(run, resume=True, plan={})
            assert error.value.problems[0].path == "--resume"  # type: ignore[attr-defined]
        launcher.communicate(b"\n")
    records.claim(run, resume=True, plan={})
