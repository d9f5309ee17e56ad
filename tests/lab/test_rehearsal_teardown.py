"""Ctrl-C while the rehearsal takes down what it made: nothing stays, and the user hears what is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

JOURNEY = """
import os, signal, sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from rehearsal import journey, tasks

def press():
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])

@contextmanager
def ends(what, *_):
    try:
        yield SimpleNamespace(environment={})
    finally:
        # Twice: an impatient user.
        press(), press()
        print("gone:", what, flush=True)

def bring_up(journey):
    with journey.stage("first", real="", emulated=""):
        press()

def fail(journey):
    raise RuntimeError("a stage failed")

journey.LocalAws = lambda: ends("aws")
journey.LocalMetadata = lambda: ends("metadata")
journey.nodes.begun = lambda folder: ends("nodes")
journey.images.begun = lambda folder: ends("image")
journey.scheduled.begun = lambda of: ends("slurm")
journey.Journey.end_jobs = lambda self: (press(), print("gone: ranks", flush=True))
for stage in ("set_up_nodes", "tokenize", "reference", "prove", "plot_run", "take_down"):
    setattr(journey, stage, lambda *_: None)
journey.bring_up = {"stopped": bring_up, "failed": fail}.get(sys.argv[2], lambda journey: None)
journey.train_in_container = journey.interrupt = lambda *_: None
tasks.FOLDER = Path(sys.argv[3])
answer = tasks.rehearse.body.__wrapped__(tasks.RehearseFlags(json=True))
print("problems:", *answer.problems)
sys.exit(answer.code)
"""


@pytest.mark.parametrize(
    ("signal", "how", "gone", "problem"),
    [
        ("SIGINT", "stopped", ["ranks", "image", "nodes", "metadata", "aws"], "stage 1, first: stopped by Ctrl-C"),
        ("SIGTERM", "failed", ["ranks", "image", "nodes", "metadata", "aws"], "stage 1, start: a stage failed"),
        # One that comes while a part of the journey ends is heeded after that.
        (
            "SIGINT",
            "whole",
            ["slurm", "ranks", "image", "nodes", "metadata", "aws"],
            "stage 1, start: stopped by Ctrl-C",
        ),
    ],
)
def test_second_ctrl_c_leaves_nothing_and_says_what_is_left(
    signal: str, how: str, gone: list[str], problem: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", JOURNEY, signal, how, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line.removeprefix("gone: ") for line in lines if line.startswith("gone: ")] == gone, done.stderr
    assert [line.removeprefix("problems: ") for line in lines if line.startswith("problems: ")] == [problem]
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) is (how == "failed")
    told = [line for line in done.stderr.splitlines() if "left are: " in line]
    assert told[-1].partition("left are: ")[2].startswith("the embedded AWS, the temporary folder;")
