"""Backends start runs: this machine, Slurm, Kubernetes, SSH. One more is a module here and a row of MODULES."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from launch.request import RequestBackend, RunRequest
from trainer.storage import ObjectStore

MODULES: dict[str, str] = {
    "local": "launch.backends.local",
    "slurm": "launch.backends.slurm",
    "kubernetes": "launch.backends.kubernetes",
    "ssh": "launch.backends.ssh",
}
"""Module of each backend, whose BACKEND it is, by the name that --on takes."""


@dataclass(frozen=True)
class LaunchPlan:
    """What a start would write and run."""

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Text by its key in the run, beside the settings."""


@dataclass(frozen=True)
class Submission:
    """What a start has led to."""

    lines: tuple[str, ...]
    data: Mapping[str, Any]
    """The same for programs."""
    job: Mapping[str, Any] | None = None
    """What the backend needs to find its job again; None where the run has ended."""
    code: int = 0


@dataclass(frozen=True)
class HeldJob:
    """A job that goes on only once a person has acted."""

    job: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"job {self.job} is held ({self.why}); fix: {self.fix}"


@dataclass(frozen=True)
class LogLine:
    """A line that a run has printed, as `trainer.node.output` marks it."""

    text: str
    source: str = ""
    """The node or pod that printed it; empty where one log holds the lines of all."""
    launch: int | None = None
    """Where a log holds the lines of one launch."""


class Backend(RequestBackend, Protocol):
    """Plans a run, and talks to what runs it. Methods raise UserError."""

    def plan(self, request: RunRequest, folder: Path, environ: Mapping[str, str]) -> LaunchPlan:
        """Return the plan of a request that is made in `folder`; pure."""
        ...

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        """Refuse what the scheduler would refuse, and a run that a job waits or runs for already."""
        ...

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        """Start it. `output` is where ranks on this machine print; None for standard output."""
        ...

    def describe(self, job: Mapping[str, Any]) -> str:
        """Return one line about a submission's `job`."""
        ...

    def held_job(self, run: str) -> HeldJob | None:
        """Return the run's job that a person has to release, if there is one."""
        ...

    def cancel(self, run: str, job: Mapping[str, Any] | None) -> list[str]:
        """Take the run's jobs from the scheduler and return them; `job` is the submission's."""
        ...

    def read_log(
        self, run: str, job: Mapping[str, Any] | None, launch: int | None, more: Callable[[], bool]
    ) -> Iterator[LogLine]:
        """Yield what the run has printed, at least that of one launch if it is named; `job` is the submission's.

        `more` is called before each look at what was printed: it waits for a while, and returns False before the last look.
        """
        ...


@dataclass(frozen=True)
class Pod:
    """A start of one node's launcher, by a scheduler that starts them again itself."""

    name: str
    node: str | None
    state: str
    """For people: how it ended, that it runs, or why it waits."""
    launch: int | None = None
    """Of a run that has launches."""


@runtime_checkable
class PodBackend(Protocol):
    """A backend whose launchers are pods, which may be there without a supervisor."""

    def pods(self, run: str, job: Mapping[str, Any]) -> list[Pod] | None:
        """Return the pods of a submission's `job` that are still there, oldest first; None where nothing here can look.
        UserError."""
        ...


@runtime_checkable
class RecordingBackend(Protocol):
    """A backend whose scheduler knows how jobs ended."""

    def ended_job(self, run: str, job: Mapping[str, Any]) -> str | None:
        """Return how a submission's `job` ended; None where it did not, waits again, or that is not known. UserError."""
        ...


@runtime_checkable
class ArrayBackend(Protocol):
    """A backend that can start the runs of a sweep as tasks of one job. Methods raise UserError.

    A run's task has the index of its point in the sweep, which is recorded as `task` before the job is submitted.
    """

    def check_queue(self, request: RunRequest, *, resume: bool) -> None:
        """Refuse a run that a job waits or runs for already."""
        ...

    def plan_array(
        self,
        requests: Mapping[int, RunRequest],
        sweep: str,
        folder: Path,
        environ: Mapping[str, str],
        at_once: int | None,
    ) -> LaunchPlan | None:
        """Return the plan of a job with a task for each request, whose files lie in the sweep; None where they differ too much.

        At most `at_once` tasks run at the same time.
        """
        ...

    def check_array(self, request: RunRequest, plan: LaunchPlan, folder: Path) -> None:
        """Refuse what the scheduler would refuse; `request` is one of the plan's, which all request the same."""
        ...

    def held_jobs(self, sweep: str, runs: Sequence[str]) -> dict[str, HeldJob]:
        """Return the jobs that a person has to release by the run; `runs` are those of the sweep's points, in their order."""
        ...

    def submit_array(
        self, requests: Mapping[int, RunRequest], plan: LaunchPlan, sweep: str, folder: Path
    ) -> list[Submission]:
        """Start all of them and return their submissions, in the same order."""
        ...


def load(name: str) -> Backend | None:
    """Return the backend of that name; None where there is none."""
    if name not in MODULES:
        return None
    backend: Backend = import_module(MODULES[name]).BACKEND
    return backend


def load_all() -> dict[str, Backend]:
    return {name: backend for name in MODULES if (backend := load(name)) is not None}
