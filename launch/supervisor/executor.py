"""What the supervisor needs: something that starts ranks, and a journal of the run's launches. Standard library and Python 3.9
only: Slurm's batch script carries this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from launch.supervisor.policy import ExtraNodes, Launch

PORTS = 1000
"""From a run's first one on. A launch uses a port and the next, and neither of the launch before, which a late process may
still hold."""


class TemporarilyUnavailable(Exception):
    """The run's journal or the scheduler does not answer just now; the text says why."""


class Superseded(Exception):
    """Another launcher has begun a launch of this run at the same moment."""


def launch_port(first: int, number: int) -> int:
    """Return the port where the ranks of a launch meet, of a run that counts from `first`; launchers use the next one."""
    return first + 2 * number % PORTS


class Journal(Protocol):
    """The launches of a run, kept in the run. Every method raises TemporarilyUnavailable."""

    launcher_id: str
    """Recorded with each launch that begins here."""

    def read(self) -> tuple[list[Launch], str]:
        """Return the launches since the run was last requested, and why it should end (empty: it should not).

        A launch without an end is closed, because its launcher is gone.
        """
        ...

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        """Record that a launch begins, with the nodes that stay idle, and return its number. Superseded."""
        ...

    def finish(self, number: int, code: int, grows_to: int) -> None:
        """Record how it ended; `grows_to` is the number of nodes that it has made way for, 0 where that was not why."""
        ...


class Executor(Protocol):
    """Starts ranks on nodes."""

    def healthy_nodes(self) -> list[str]:
        """Return the nodes that can be used, in the order of preference. TemporarilyUnavailable."""
        ...

    def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
        """Start the ranks, wait for all of them, and return the job's exit code.

        Once `should_end`, which is called every few seconds, is true, they get a signal: they save, and end with 85.
        """
        ...

    def extra_nodes(self, running: Sequence[str]) -> ExtraNodes:
        """Return what a launch beside this running one could have; touches nothing there. TemporarilyUnavailable."""
        ...

    def sleep(self, seconds: float) -> None:
        """Sleep until a signal comes, at most so long."""
        ...

    def stop_reason(self) -> str:
        """Return why this process has to end; empty while it has not."""
        ...
