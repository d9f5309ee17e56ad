"""This machine as a backend: `fab train` supervises the ranks itself until the run has ended."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from launch import runs
from launch.backends import HeldJob, LaunchPlan, LogLine, Submission
from launch.backends.log_file import log_file, read_log_file
from launch.backends.signals import CaughtSignal
from launch.flags import TrainFlags
from launch.request import RunRequest, Target
from launch.supervisor.executor import Superseded, TemporarilyUnavailable
from launch.supervisor.loop import supervise
from launch.supervisor.policy import ExtraNodes, Launch, Stop, launch_of
from lustrain.cluster import Cluster
from lustrain.problem import Problem, UserError, problem
from lustrain.progress import print_line
from trainer.environment import ATTEMPT
from trainer.errors import LostRunError
from trainer.node.launcher import devices
from trainer.node.ranks import FORWARDED
from trainer.run import journal
from trainer.storage import ObjectStore, StorageError

NODE = "localhost"


class LocalBackend:
    own_flags = ()
    uses_groups = False
    scheduler_can_replace_nodes = False
    supervised_by_caller = True
    supervises_ranges = False

    def serves(self, cluster: Cluster) -> bool:
        return False

    def default_ranks(self, target: Target, problems: list[Problem]) -> int:
        return devices()

    def options(self, flags: TrainFlags, target: Target, problems: list[Problem]) -> None:
        if target.max_nodes + target.spare_nodes > 1:
            problems.append(problem("--nodes", flags.nodes, "is more than this machine", fix="--nproc sets its ranks"))
        if flags.detach:
            fix = "start fab under tmux or systemd-run"
            problems.append(problem("--detach", True, "a run on this machine ends with its fab train", fix=fix))
        if flags.python is not None and shutil.which(flags.python) is None:
            problems.append(problem("--python", flags.python, "is not a program on this machine", fix="see its path"))

    def plan(self, request: RunRequest, folder: Path, environ: Mapping[str, str]) -> LaunchPlan:
        python = request.python or sys.executable
        # It may stand in an allocation of Slurm, whose nodes are not the run's.
        ranks = ["--nproc", str(request.policy.ranks_per_node), "--nnodes", "1", "--run", request.run]
        ranks += ["--log", log_file(request, folder)]
        return LaunchPlan((python, "-m", "trainer.node.launcher", *ranks, "--", "train", request.config_uri))

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        """Nothing to check: the record of the run names the process that supervises it (`launch.runs`)."""

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        kept = None if (output or sys.stdout).isatty() else Path(log_file(request, folder))
        if kept is not None:
            runs.save_job(store, request.backend, {"log": str(kept)})

        executor, log = LocalExecutor(plan.command, output), SupervisorLog(kept)
        end = supervise(executor, RunJournal(store), request.policy, log.add, max_wait_s=request.max_wait_s)
        assert isinstance(end, Stop), "this machine has no queue"
        data = {"run": request.run, "exit_code": end.code, "why": end.why}
        return Submission((f"{request.run}: {end.why}",), data, code=end.code)

    def describe(self, job: Mapping[str, Any]) -> str:
        return f"log: {job.get('log')}"

    def held_job(self, run: str) -> HeldJob | None:
        return None

    def cancel(self, run: str, job: Mapping[str, Any] | None) -> list[str]:
        """Nothing to cancel: its process ends once the ranks have saved."""
        return []

    def read_log(
        self, run: str, job: Mapping[str, Any] | None, launch: int | None, more: Callable[[], bool]
    ) -> Iterator[LogLine]:
        """Read the file into which ranks print. On a terminal they show a bar there, and there is no file."""
        if job is None:
            why = "its ranks printed on a terminal, where no log is kept"
            raise UserError(problem("RUN", run, why, fix=f"fab status {run}; to keep one, fab train … | cat"))
        return read_log_file(run, job, more)


class SupervisorLog:
    """Prints the supervisor's lines, and appends them to the log that the ranks have begun, as long as it can be written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, line: str) -> None:
        print_line(line)
        try:
            if self._path is not None and self._path.exists():
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(f"lustrain: {line}\n")
        except OSError as error:
            print_line(f"{self._path}: the supervisor's lines end here: {error.strerror}")
            self._path = None


class RunJournal:
    """The journal in a run's store, for launchers that have all of Lustrain."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.launcher_id = f"fab train on {platform.node()}"

    def read(self) -> tuple[list[Launch], str]:
        try:
            records = journal.load_and_close_stale(self.store)
            stop = "fab stop ended it" if journal.stopped(self.store) else ""
        except StorageError as error:
            raise TemporarilyUnavailable(str(error)) from None
        return [launch_of(record) for record in records], stop

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        try:
            return journal.begin(self.store, nodes, self.launcher_id, idle)
        except LostRunError as error:
            raise Superseded(str(error)) from None
        except StorageError as error:
            raise TemporarilyUnavailable(str(error)) from None

    def finish(self, number: int, code: int, grows_to: int) -> None:
        try:
            journal.finish(self.store, number, code, grows_to)
        except StorageError as error:
            raise TemporarilyUnavailable(str(error)) from None


class OwnedJournal(RunJournal):
    """The journal of a run that this process has requested. Once another one has, on any machine, the run is that one's."""

    def __init__(self, store: ObjectStore, save_nodes: Callable[[Sequence[str]], None]) -> None:
        """`save_nodes` records where a launch will run, before it begins. UserError."""
        super().__init__(store)
        self._save_nodes = save_nodes
        # In two containers, processes of one number may have hosts of one name.
        self._requested = self._request().get(journal.REQUESTED_AT)

    def read(self) -> tuple[list[Launch], str]:
        self._check_owner()
        return super().read()

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        self._check_owner()
        try:
            self._save_nodes(nodes)
        except UserError as error:
            raise TemporarilyUnavailable(f"the nodes of the next launch are not recorded: {error}") from None
        number = super().begin(nodes, idle)
        # Who requested the run in between may not have seen this launch, and begins its own.
        self._check_owner()
        return number

    def _request(self) -> dict[str, Any]:
        return runs.read_record(self.store, journal.REQUEST) or {}

    def _check_owner(self) -> None:
        try:
            request = self._request()
        except StorageError as error:
            raise TemporarilyUnavailable(str(error)) from None
        owner = (request.get("host"), request.get("pid"), request.get(journal.REQUESTED_AT))
        if owner != (platform.node(), os.getpid(), self._requested):
            raise Superseded(f"{request.get('by')} has requested the run since")


class LocalExecutor:
    """Starts all ranks on this machine, and passes its own signals on to them."""

    def __init__(self, command: Sequence[str], output: IO[Any] | None = None) -> None:
        """`output` is where the ranks print; None for standard output."""
        self._command, self._output = list(command), output
        self._job: subprocess.Popen[bytes] | None = None
        self._caught = CaughtSignal(self._pass_on)

    def healthy_nodes(self) -> list[str]:
        return [NODE]

    def extra_nodes(self, running: Sequence[str]) -> ExtraNodes:
        return ExtraNodes()

    def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
        environment = {**os.environ, ATTEMPT: str(number)}
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            # A terminal's Ctrl-C reaches the ranks once, through us.
            self._job = subprocess.Popen(self._command, env=environment, stdout=self._output, process_group=0)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if self._caught.number:
            # The signal came before there were ranks to pass it on to.
            self._job.send_signal(self._caught.number)
        code = self._job.wait()
        return code if code >= 0 else 1

    def sleep(self, seconds: float) -> None:
        self._caught.sleep(seconds)

    def stop_reason(self) -> str:
        return self._caught.stop_reason()

    def _pass_on(self, number: int) -> None:
        if self._job is not None and self._job.poll() is None:
            self._job.send_signal(number)


BACKEND = LocalBackend()
