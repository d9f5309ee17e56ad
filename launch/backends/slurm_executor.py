"""Inside an allocation of Slurm: start the ranks on its healthy nodes, again and again, and requeue the job where they are too
few. Standard library and Python 3.9 only: this file is the end of the batch script that `fab train --on slurm` submits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from launch.supervisor.executor import Superseded, TemporarilyUnavailable
from launch.supervisor.loop import supervise
from launch.supervisor.policy import LOST_RUN, PEERS, REQUEUE, Launch, Requeue, RestartPolicy, launch_of

UNUSABLE = ("down", "drain", "fail", "unk", "boot", "power", "maint", "inval", *"*~#!%")
"""Parts of the state of a node that takes no new step, or will soon be powered down: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES"""
JOURNAL_CALL_S = 300
POLL_S = 5.0
PORTS = 1000
"""A launch uses a port and the next one, and neither of the launch before, which a late process may still hold."""
WATCHERS = 3
WATCH = """while sleep 10; do
    state=$(sinfo --noheader --nodes="$1" --format=%T) || continue
    case "$state" in
        "" | *down* | *drained*) scontrol requeue "$2" && exit ;;
    esac
done"""


class CommandJournal:
    """The run's journal, by a command of the trainer's environment: this script has no more than the standard library."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._command = [plan["python"], "-m", "trainer.launch.journal"]
        self._run = plan["run"]
        start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
        self.launcher_id = f"job {os.environ['SLURM_JOB_ID']} of Slurm, start {start}, on {socket.gethostname()}"

    def read(self) -> tuple[list[Launch], str]:
        answer = self._call("take", {})
        stop = "fab stop asked for its end" if answer["stop"] else ""
        return [launch_of(record) for record in answer["attempts"]], stop

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        record = {"nodes": list(nodes), "by": self.launcher_id, "idle": list(idle)}
        return int(self._call("begin", record)["attempt"])

    def finish(self, number: int, code: int) -> None:
        self._call("finish", {"attempt": number, "code": code})

    def _call(self, action: str, argument: Mapping[str, Any]) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*self._command, action, self._run],
                input=json.dumps(argument),
                stdout=subprocess.PIPE,
                text=True,
                timeout=JOURNAL_CALL_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TemporarilyUnavailable(f"the run's journal: {action} took more than {JOURNAL_CALL_S} s") from None
        if done.returncode == LOST_RUN:
            raise Superseded
        if done.returncode:
            raise TemporarilyUnavailable(
                f"the run's journal: {action} ended with {done.returncode}, see the line above"
            )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


class Allocation:
    """The nodes that Slurm has given to this job."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self._step: subprocess.Popen[bytes] | None = None
        self._signal = 0
        self._addresses: dict[str, str] = {}
        self._signalled = threading.Event()
        self._watch: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._handle_signal)

    @property
    def time_limit_reached(self) -> bool:
        """Whether Slurm ends this job soon for its time limit: it then sends SIGUSR1 (`--signal=B:USR1@…`)."""
        return self._signal == signal.SIGUSR1

    def healthy_nodes(self) -> list[str]:
        # Not SLURM_JOB_NODELIST: nodes that Slurm has since taken out of the job may be idle, or in another job.
        held = _output("squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%N").strip()
        nodes = _output("scontrol", "show", "hostnames", held).split()
        lines = _output("sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format=%N %T %o").splitlines()
        rows = [line.split() for line in lines if len(line.split()) == 3]
        # A node's name in Slurm may not resolve; this is its address.
        self._addresses.update((name, address) for name, _, address in rows)
        usable = {name for name, state, _ in rows if not any(part in state for part in UNUSABLE)}
        return [node for node in nodes if node in usable]

    def run_launch(self, number: int, nodes: Sequence[str]) -> int:
        plan, count = self._plan, str(len(nodes))
        step = ["--nodes", count, "--ntasks", count, "--ntasks-per-node=1", "--nodelist", ",".join(nodes)]
        # The launcher of a node has all of its cores, and binds ranks to them itself. A step that lost a node holds its
        # resources until Slurm hears of that node again: without --overlap the next step would wait for them forever.
        ends = ["--kill-on-bad-exit=0", f"--wait={plan['late_s']}", "--cpu-bind=none", "--overlap", "--export=ALL"]
        rendezvous = [
            "--master",
            f"{self._master_address(nodes[0])}:{plan['port'] + 2 * number % PORTS}",
            "--roster",
            ",".join(nodes),
            "--nproc",
            str(plan["ranks"]),
        ]
        launcher = [plan["python"], "-m", "trainer.launch.node", *rendezvous, "--run", plan["run"]]
        environment = {**os.environ, "LUSTRAIN_ATTEMPT": str(number)}
        self._step = subprocess.Popen(
            ["srun", *step, *ends, *launcher, "--", "train", plan["config"]], env=environment, stdin=subprocess.DEVNULL
        )
        if self.time_limit_reached:
            # The signal came before there was a step to pass it on to.
            self._step.send_signal(signal.SIGUSR1)
        while self._step.poll() is None:
            self._watch_over_this_host()
            with suppress(subprocess.TimeoutExpired):
                self._step.wait(POLL_S)
        return self._step.returncode if self._step.returncode >= 0 else 1

    def _master_address(self, node: str) -> str:
        """Return the address where ranks meet; log it where it does not resolve, because ranks would wait for it."""
        address = self._addresses.get(node, node)
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            log(
                f"{node}: its address {address} cannot be looked up ({error}); fix: NodeAddr of it in slurm.conf, or DNS"
            )
        return address

    def _watch_over_this_host(self) -> None:
        """Have other nodes requeue the job when this host is lost: under --no-kill Slurm would keep it forever, without this
        script."""
        if self._watch is not None and self._watch.poll() is None:
            return
        host = os.environ["SLURMD_NODENAME"]
        try:
            others = [node for node in self.healthy_nodes() if node != host][:WATCHERS]
        except TemporarilyUnavailable:
            return
        if not others:
            return
        if self._watch is not None:
            _, errors = self._watch.communicate()
            log(f"no node watched over {host} for a while: {' '.join(errors.decode(errors='replace').split()[:40])}")
        count = str(len(others))
        step = ["--nodes", count, "--ntasks", count, "--ntasks-per-node=1", "--nodelist", ",".join(others)]
        command = ["/bin/sh", "-c", WATCH, "lustrain-watch", host, os.environ["SLURM_JOB_ID"]]
        watch = ["srun", *step, "--overlap", "--gres=none", "--kill-on-bad-exit=0", "--export=ALL", *command]
        # It ends with the job, which Slurm prints as an error.
        self._watch = subprocess.Popen(watch, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def sleep(self, seconds: float) -> None:
        self._signalled.wait(seconds)

    def close(self) -> None:
        """End the watch over this host: it must not requeue a job that has ended."""
        if self._watch is not None and self._watch.poll() is None:
            self._watch.terminate()

    def stop_reason(self) -> str:
        if not self._signal:
            return ""
        return "its time is over" if self.time_limit_reached else "Slurm ends the job"

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or number
        self._signalled.set()
        # SIGTERM Slurm sends to the ranks itself.
        if number == signal.SIGUSR1 and self._step is not None and self._step.poll() is None:
            self._step.send_signal(number)


def requeue(without: Sequence[str]) -> int:
    """Requeue this job, to start without some nodes; return the exit code of the script, which has to end at once."""
    job = os.environ["SLURM_JOB_ID"]
    done = subprocess.run(["scontrol", "requeue", job], check=False)
    if done.returncode:
        log("Slurm does not requeue the job; fix: start it again with `fab train --resume`")
        return PEERS
    # Also where it is empty: a name in an earlier list may be that of another node by now.
    subprocess.run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(without)}"], check=False)
    return 0


def log(line: str) -> None:
    print(f"lustrain: {line}", flush=True)


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise TemporarilyUnavailable(f"{command[0]} ended with {done.returncode}: Slurm does not answer")
    return done.stdout


def main(plan: Mapping[str, Any]) -> int:
    """Supervise the run that the plan describes; return the exit code of the batch script."""
    os.environ.update(plan["environment"])
    allocation = Allocation(plan)
    policy = RestartPolicy(**plan["policy"])
    try:
        decision = supervise(allocation, CommandJournal(plan), policy, log, max_wait_s=plan["max_wait_s"])
    finally:
        allocation.close()
    log(decision.why)
    if isinstance(decision, Requeue):
        return requeue(decision.without)
    if allocation.time_limit_reached and decision.code in (PEERS, REQUEUE):
        return requeue(())
    return decision.code
