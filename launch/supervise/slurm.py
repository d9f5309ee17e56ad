"""Inside an allocation of Slurm: start the ranks on its living nodes, again and again, and give the job back where they are too
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

from launch.supervise.decision import LOST_RUN, PEERS, REQUEUE, Attempt, Requeue, Rules, attempt
from launch.supervise.loop import NotNow, Overtaken, supervise

UNUSABLE = ("down", "drain", "fail", "unk", "boot", "power", "maint", "inval", *"*~#!%")
"""In the state of a node that takes no new step, or is about to be powered down: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES"""
CALL_S = 300
POLL_S = 5.0
PORTS = 1000
"""An attempt does not use the port of the one before, which a process that is late may still hold."""
WATCHERS = 3
WATCH = """while sleep 10; do
    state=$(sinfo --noheader --nodes="$1" --format=%T) || continue
    case "$state" in
        "" | *down* | *drained*) scontrol requeue "$2" && exit ;;
    esac
done"""


class CommandJournal:
    """The run's journal, by a command of the trainer's own environment: this script has no more than the standard library."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._command = [plan["python"], "-m", "trainer.launch.journal"]
        self._run = plan["run"]
        start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
        self.by = f"job {os.environ['SLURM_JOB_ID']} of Slurm, start {start}, on {socket.gethostname()}"

    def read(self) -> tuple[list[Attempt], str]:
        answer = self._call("take", {})
        return [attempt(record) for record in answer["attempts"]], "fab stop asked for its end" if answer[
            "stop"
        ] else ""

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        given = {"nodes": list(nodes), "by": self.by, "idle": list(idle)}
        return int(self._call("begin", given)["attempt"])

    def finish(self, number: int, code: int) -> None:
        self._call("finish", {"attempt": number, "code": code})

    def _call(self, do: str, given: Mapping[str, Any]) -> dict[str, Any]:
        command = [*self._command, do, self._run]
        try:
            done = subprocess.run(
                command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, timeout=CALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotNow(f"the run's journal: {do} took more than {CALL_S} s") from None
        if done.returncode == LOST_RUN:
            raise Overtaken
        if done.returncode:
            raise NotNow(f"the run's journal: {do} ended with {done.returncode}, see the line above")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


class Allocation:
    """The nodes that Slurm has given to this job."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self._step: subprocess.Popen[bytes] | None = None
        self._signal = 0
        self._address: dict[str, str] = {}
        self._heard = threading.Event()
        self._watch: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._hear)

    @property
    def out_of_time(self) -> bool:
        """Whether Slurm ends this job soon for its time limit, as `--signal=B:USR1@…` has it tell."""
        return self._signal == signal.SIGUSR1

    def living(self) -> list[str]:
        # Not SLURM_JOB_NODELIST: nodes that Slurm has taken out of the job since then may be idle, and another's.
        held = _output("squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%N").strip()
        nodes = _output("scontrol", "show", "hostnames", held).split()
        rows = _output("sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format=%N %T %o").splitlines()
        found = [row.split() for row in rows if len(row.split()) == 3]
        # What Slurm calls a node may resolve nowhere; this is where it is reached.
        self._address.update((name, address) for name, _, address in found)
        usable = {name for name, state, _ in found if not any(word in state for word in UNUSABLE)}
        return [node for node in nodes if node in usable]

    def run(self, number: int, nodes: Sequence[str]) -> int:
        plan, count = self._plan, str(len(nodes))
        step = ["--nodes", count, "--ntasks", count, "--ntasks-per-node=1", "--nodelist", ",".join(nodes)]
        # The launcher of a node has all of its cores; how ranks are bound to them is theirs. A step that lost a node holds
        # its resources until Slurm has heard of that node again: the next one would wait for them for ever.
        ends = ["--kill-on-bad-exit=0", f"--wait={plan['late_s']}", "--cpu-bind=none", "--overlap", "--export=ALL"]
        meet = [
            "--master",
            f"{self._meeting_place(nodes[0])}:{plan['port'] + number % PORTS}",
            "--roster",
            ",".join(nodes),
            "--nproc",
            str(plan["ranks"]),
        ]
        launcher = [plan["python"], "-m", "trainer.launch.node", *meet, "--run", plan["run"]]
        environment = {**os.environ, "LUSTRAIN_ATTEMPT": str(number)}
        self._step = subprocess.Popen(
            ["srun", *step, *ends, *launcher, "--", "train", plan["config"]], env=environment, stdin=subprocess.DEVNULL
        )
        if self.out_of_time:
            # The signal came before there was anyone to pass it on to.
            self._step.send_signal(signal.SIGUSR1)
        while self._step.poll() is None:
            self._watch_over_this_host()
            with suppress(subprocess.TimeoutExpired):
                self._step.wait(POLL_S)
        return self._step.returncode if self._step.returncode >= 0 else 1

    def _meeting_place(self, node: str) -> str:
        """Return the address of the node where ranks meet; say so where it cannot be looked up, for which ranks would wait."""
        address = self._address.get(node, node)
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            say(
                f"{node}: its address {address} cannot be looked up ({error}); fix: NodeAddr of it in slurm.conf, or DNS"
            )
        return address

    def _watch_over_this_host(self) -> None:
        """Have other nodes requeue the job when this one is lost: under --no-kill Slurm would let it stand for ever, without
        this script."""
        if self._watch is not None and self._watch.poll() is None:
            return
        host = os.environ["SLURMD_NODENAME"]
        try:
            others = [node for node in self.living() if node != host][:WATCHERS]
        except NotNow:
            return
        if not others:
            return
        if self._watch is not None:
            _, said = self._watch.communicate()
            say(f"nobody watched over {host} for a while: {' '.join(said.decode(errors='replace').split()[:40])}")
        count = str(len(others))
        step = ["--nodes", count, "--ntasks", count, "--ntasks-per-node=1", "--nodelist", ",".join(others)]
        command = ["/bin/sh", "-c", WATCH, "lustrain-watch", host, os.environ["SLURM_JOB_ID"]]
        watch = ["srun", *step, "--overlap", "--gres=none", "--kill-on-bad-exit=0", "--export=ALL", *command]
        # Its end with the job is no error, though Slurm prints it as one.
        self._watch = subprocess.Popen(watch, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def rest(self, seconds: float) -> None:
        self._heard.wait(seconds)

    def close(self) -> None:
        """End the watch over this host: it must not requeue a job that is over."""
        if self._watch is not None and self._watch.poll() is None:
            self._watch.terminate()

    def told(self) -> str:
        if not self._signal:
            return ""
        return "its time is over" if self.out_of_time else "Slurm ends the job"

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or number
        self._heard.set()
        # On SIGTERM Slurm has told the ranks itself.
        if number == signal.SIGUSR1 and self._step is not None and self._step.poll() is None:
            self._step.send_signal(number)


def give_back(without: Sequence[str]) -> int:
    """Requeue this job, to be started without some nodes; returns the exit code of the script, which has to end at once."""
    job = os.environ["SLURM_JOB_ID"]
    done = subprocess.run(["scontrol", "requeue", job], check=False)
    if done.returncode:
        say("Slurm does not requeue the job; fix: start it again with `fab train --resume`")
        return PEERS
    # Also where it is empty: a node of an earlier list may be another one by now.
    subprocess.run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(without)}"], check=False)
    return 0


def say(line: str) -> None:
    print(f"lustrain: {line}", flush=True)


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise NotNow(f"{command[0]} ended with {done.returncode}: Slurm does not answer")
    return done.stdout


def main(plan: Mapping[str, Any]) -> int:
    """Supervise the run that the plan describes; returns the exit code of the batch script."""
    os.environ.update(plan["environment"])
    allocation = Allocation(plan)
    rules = Rules(**plan["rules"])
    try:
        move = supervise(allocation, CommandJournal(plan), rules, say, give_up_s=plan["give_up_s"])
    finally:
        allocation.close()
    say(move.why)
    if isinstance(move, Requeue):
        return give_back(move.without)
    if allocation.out_of_time and move.code in (PEERS, REQUEUE):
        return give_back(())
    return move.code
