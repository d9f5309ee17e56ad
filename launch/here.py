"""This machine as the place to train at, and the journal of a run for launchers that have all of Lustrain."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import IO, Any

from launch.asked import Asked
from launch.supervise.decision import Attempt, attempt
from launch.supervise.loop import NotNow, Overtaken
from trainer.errors import LostRunError
from trainer.launch import journal
from trainer.launch.attempt import ATTEMPT
from trainer.launch.ranks import FORWARDED
from trainer.storage import ObjectStore, StorageError

NODE = "localhost"


def command(asked: Asked) -> list[str]:
    """Return the words that start the ranks of an attempt."""
    python = asked.python or sys.executable
    ranks = ["--nproc", str(asked.rules.ranks), "--run", asked.run]
    return [python, "-m", "trainer.launch.local", *ranks, "--", "train", asked.config_uri]


class RunJournal:
    """The journal in a run's store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.by = f"fab train on {platform.node()}"

    def read(self) -> tuple[list[Attempt], str]:
        try:
            records = journal.take(self._store)
            stop = "fab stop asked for its end" if journal.stopped(self._store) else ""
        except StorageError as error:
            raise NotNow(str(error)) from None
        return [attempt(record) for record in records], stop

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        try:
            return journal.begin(self._store, nodes, self.by, idle)
        except LostRunError as error:
            raise Overtaken(str(error)) from None
        except StorageError as error:
            raise NotNow(str(error)) from None

    def finish(self, number: int, code: int) -> None:
        try:
            journal.finish(self._store, number, code)
        except StorageError as error:
            raise NotNow(str(error)) from None


class Here:
    """Starts all ranks on this machine; signals for this process are for them, and for what would follow."""

    def __init__(self, asked: Asked, output: IO[Any] | None = None) -> None:
        """`output`: what the ranks print goes there; None for standard output."""
        self._output = output
        self._command = command(asked)
        self._job: subprocess.Popen[bytes] | None = None
        self._told = threading.Event()
        self._number = 0
        for number in FORWARDED:
            signal.signal(number, self._hear)

    def living(self) -> list[str]:
        return [NODE]

    def run(self, number: int, nodes: Sequence[str]) -> int:
        environment = {**os.environ, ATTEMPT: str(number)}
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            # A terminal's Ctrl-C reaches the ranks once, through us.
            self._job = subprocess.Popen(self._command, env=environment, stdout=self._output, process_group=0)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if self._number:
            # It came before there was anyone to pass it on to.
            self._job.send_signal(self._number)
        code = self._job.wait()
        return code if code >= 0 else 1

    def rest(self, seconds: float) -> None:
        self._told.wait(seconds)

    def told(self) -> str:
        return f"{signal.Signals(self._number).name} asked for its end" if self._number else ""

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._number = number
        self._told.set()
        if self._job is not None and self._job.poll() is None:
            self._job.send_signal(number)
