"""Inside an allocation of Slurm: start the ranks on its healthy nodes, again and again, and requeue the job where they are too
few. Standard library and Python 3.9 only: this file is the end of the batch script that `fab train --on slurm` submits."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from launch.container import (
    DOCKER,
    HOST_ONLY,
    NO_ENGINE,
    PODMAN,
    Container,
    Engine,
    kind_of,
    prepared,
    pyxis_options,
    pyxis_words,
    replacing,
    run_words,
)
from launch.supervisor.executor import Superseded, TemporarilyUnavailable, launch_port
from launch.supervisor.loop import supervise
from launch.supervisor.policy import (
    LOST_RUN,
    PEERS,
    REQUEUE,
    USAGE,
    ExtraNodes,
    Launch,
    Requeue,
    RestartPolicy,
    launch_of,
)

UNUSABLE = ("down", "drain", "fail", "unk", "boot", "power", "maint", "inval", *"*~#!%")
"""Parts of the state of a node that takes no new step, or will soon be powered down: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES"""
JOURNAL_CALL_S = 300
POLL_S = 5.0
LOOK_S = 1.0
"""Seconds between two looks at the launcher of this host, which cost no program."""
KILL_S = 2.0
"""For srun to kill what still runs on nodes that are lost to the others only; for one that is gone it would wait on."""
WATCHERS = 3
WATCH = """lost() {
    job=$(scontrol --oneliner show job "$2") || return 1
    case "$job" in
        *" JobState=RUNNING "*"Restarts=$3 "*" NodeList="[!" ("]*) ;;
        *" Reason=JobLaunchFailure "*"Restarts=$3 "*" NodeList="[!" ("]*) ;;
        *) return 1 ;;
    esac
    nodes=${job##* NodeList=}
    nodes=$(scontrol show hostnames "${nodes%% *}") || return 1
    for node in $nodes; do
        [ "$node" != "$1" ] || return 1
    done
}
trap 'lost "$@" && scontrol requeue "$2"; exit' TERM
while sleep 10; do
    lost "$@" && scontrol requeue "$2" && exit
done"""
"""Requeues start $3 of job $2 once Slurm has taken host $1 out of it, also where that host is back: then Slurm kills the script
there and ends the job, of which this learns by SIGTERM. Whatever else ends a job, as scancel, gives it another reason. Its list
of nodes says nothing then: it loses each node that is done."""


STEP_NAMES = ("LUSTRAIN_ATTEMPT", "SLURMD_NODENAME", "SLURM_NNODES", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
"""Variables of a step that the launcher of a node reads, or the trial."""
PREPARE_MIN = 30
"""How long nodes may take to have the image, and to start a container of it."""
AGAIN_S = (10.0, 50.0)
"""Pauses before another try: a registry that restarts, or limits its calls, answers within a minute; so does slurmctld."""
EXCLUDE_AGAIN_S = (1.0, 2.0, 4.0, 8.0)
"""Pauses before a requeued job is changed again, which Slurm refuses for a moment; after KillWait (30 s) it kills this one."""
FAILED_SOON_S = 300.0
"""What takes longer to fail is not tried again: the other nodes of the job wait meanwhile."""
CONTAINERS = "lustrain-job-"
"""Nodes are in one job at a time: what begins so on a node of this job, and is not its own, is of one that has ended."""
TRIAL = "import os, trainer.node.launcher; print(os.environ['SLURMD_NODENAME'])"
JOB_LOGS = "/var/log/lustrain-jobs"
"""Made where the stack carries logs (`infra/plan/nodes/logs.sh`)."""
MOST_COPIED = 200 << 20
"""Bytes of one job, as of one launch over SSH."""
COPY_S = 2.0
ROOM = 4 << 30
"""Bytes that are left for others on the folder's disk: a full root volume stops a node."""
ANSWER_S = 60.0
"""For a program that says what is on this host, and for the end of what is left on nodes."""


class Runtime:
    """How programs of the trainer start: on the nodes themselves, or in containers there."""

    def __init__(self, container: Container | None, engine: Engine | None, names: Sequence[str]) -> None:
        """`names`: variables that a container gets. Without an engine it is Pyxis that starts containers."""
        self.container, self._engine, self._names = container, engine, [*names, *STEP_NAMES]
        # One of an earlier start of this job may be half made.
        self._name = f"{CONTAINERS}{os.environ['SLURM_JOB_ID']}-{restarts()}"

    def options(self) -> list[str]:
        """Return options of srun."""
        if self.container is None or self._engine is not None:
            return []
        return pyxis_options(self.container, self._name)

    def launch_words(self, words: Sequence[str]) -> list[str]:
        """Return what a step of a launch runs."""
        if self.container is None or self._engine is None:
            return [*(pyxis_words() if self.container else []), *words]
        run = run_words(self._engine, self.container, self._names, self._name)
        return replacing(self._engine, CONTAINERS, [*run, *words])

    def trial_words(self, words: Sequence[str]) -> list[str]:
        """Return what a step runs that has the image on its nodes, and tries it."""
        if self.container is None or self._engine is None:
            return self.launch_words(words)
        run = run_words(self._engine, self.container, self._names)
        return prepared(self._engine, self.container, [*run, *words])

    def host_words(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on this host, with its standard input."""
        if self.container is None:
            return list(words)
        if self._engine is not None:
            plain = replace(self.container, gpus=False, efa=False)
            # One that was given up may still be there, and must not write later.
            name = f"{self._name}-records"
            return replacing(
                self._engine, name, [*run_words(self._engine, plain, self._names, name, interactive=True), *words]
            )
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={os.environ['SLURMD_NODENAME']}"]
        return [*step, "--overlap", "--export=ALL", *self.options(), *self.launch_words(words)]

    def remove_words(self) -> list[str]:
        """Return what a step runs to remove the container of a launch whose client was killed; empty where there is none."""
        if self._engine is None:
            return []
        return replacing(self._engine, CONTAINERS, ["true"])


def runtime_of(plan: Mapping[str, Any]) -> Runtime | None:
    """Return how programs start, by what is on this host; None where an image is to be run and nothing here can."""
    container = Container(**plan["container"]) if plan["container"] else None
    names = [name for name in plan["environment"] if name not in HOST_ONLY]
    if container is None or "--container-image" in _said("srun", "--help"):
        return Runtime(container, None, names)
    for program in (DOCKER, PODMAN):
        # Docker's prints its daemon's version too, and fails where that does not answer this user.
        if _said(program, "version"):
            kind = kind_of(program, _said(program, "--version"))
            user, groups = f"{os.getuid()}:{os.getgid()}", tuple(str(group) for group in sorted(os.getgroups()))
            return Runtime(container, Engine(kind, program, user, groups, kind == PODMAN and os.getuid() != 0), names)
    return None


def _said(*command: str) -> str:
    """Return what a program prints; empty where it is not here, does not answer, or fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


class CommandJournal:
    """The run's journal, by a command of the trainer's environment: this script has no more than the standard library."""

    def __init__(self, plan: Mapping[str, Any], runtime: Runtime) -> None:
        self._command = runtime.host_words([plan["python"], "-m", "trainer.run.journal"])
        self._run = plan["run"]
        start = restarts() + 1
        self.launcher_id = f"job {job_id()} of Slurm, start {start}, on {socket.gethostname()}"

    def read(self) -> tuple[list[Launch], str]:
        answer = self._call("take", {})
        stop = "fab stop ended it" if answer["stop"] else ""
        return [launch_of(record) for record in answer["attempts"]], stop

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        record = {"nodes": list(nodes), "by": self.launcher_id, "idle": list(idle)}
        return int(self._call("begin", record)["attempt"])

    def is_over(self, number: int) -> bool:
        return bool(self._call("over", {"attempt": number})["over"])

    def finish(self, number: int, code: int, grows_to: int) -> None:
        self._call("finish", {"attempt": number, "code": code, "grows_to": grows_to})

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


class LostStep:
    """Tells when nothing of a launch is left but lost nodes, for which srun waits until Slurm counts them down.

    The launchers report it in the run. To read that costs a program: it is run once the launcher of this host has ended.
    """

    def __init__(self, journal: CommandJournal, number: int, launcher: Sequence[str]) -> None:
        """`launcher`: the words with which its command begins, also in a container of this host."""
        self._journal, self._number = journal, number
        self._begins = b"".join(os.fsencode(word) + b"\0" for word in launcher)
        self._process = ""
        self._next_read = 0.0

    def find(self) -> None:
        """Look for the launcher of this host among its processes, until it was seen."""
        if not self._process:
            numbers = (name for name in os.listdir("/proc") if name.isdecimal())
            self._process = next((name for name in numbers if self._is_launcher(name)), "")

    def is_over(self) -> bool:
        if not self._process or time.monotonic() < self._next_read or self._is_launcher(self._process):
            return False
        self._next_read = time.monotonic() + POLL_S
        try:
            return self._journal.is_over(self._number)
        except TemporarilyUnavailable as error:
            # A Lustrain of before, on the nodes or in an image, would print its usage again and again.
            log(f"{error}; lost nodes of this launch, if any, are waited for until Slurm counts them down")
            self._next_read = math.inf
            return False

    def _is_launcher(self, process: str) -> bool:
        try:
            with open(f"/proc/{process}/cmdline", "rb") as file:
                return file.read(len(self._begins)) == self._begins
        except OSError:
            return False


class Allocation:
    """The nodes that Slurm has given to this job."""

    def __init__(self, plan: Mapping[str, Any], runtime: Runtime) -> None:
        self._plan, self._runtime = plan, runtime
        self._tried: dict[str, bool] = {}
        """Whether a container started on a node, by its name."""
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
        nodes = self._usable_nodes()
        if self._runtime.container is None:
            return nodes
        self._try(nodes)
        return [node for node in nodes if self._tried.get(node)]

    def wait_for_nodes(self) -> list[str]:
        """Return the same once Slurm answers; none where this process has to end."""
        while not self._signal:
            try:
                return self.healthy_nodes()
            except TemporarilyUnavailable as error:
                log(str(error))
                self.sleep(POLL_S)
        return []

    @property
    def unfit_nodes(self) -> list[str]:
        """Nodes on which no container starts."""
        return sorted(node for node, started in self._tried.items() if not started)

    def _try(self, nodes: Sequence[str]) -> None:
        """Have the image on the nodes that were not tried yet, and start a container there."""
        untried, until = [node for node in nodes if node not in self._tried], time.monotonic() + FAILED_SOON_S
        for pause_s in (0.0, *AGAIN_S):
            if not untried or time.monotonic() > until:
                break
            if pause_s:
                log(f"no container started on {', '.join(untried)}, see above: trying again in {pause_s:.0f} s")
                self.sleep(pause_s)
            started = set() if self._signal else self._started(untried)
            if self._signal:
                # It was ended, which says nothing of the nodes.
                return
            self._tried.update(dict.fromkeys(started, True))
            untried = [node for node in untried if node not in started]
        for node in untried:
            self._tried[node] = False
            log(
                f"{node} is left out: no container of {self._plan['container']['image']} starts there, see above; "
                "fix: mend that, or give another --image"
            )

    def _started(self, nodes: Sequence[str]) -> set[str]:
        """Have the image on these nodes, and return those on which a container of it started."""
        log(f"looking for the image on {', '.join(nodes)}")
        limit = ["--kill-on-bad-exit=0", "--wait=0", f"--time={PREPARE_MIN}"]
        trial = self._runtime.trial_words([self._plan["python"], "-c", TRIAL])
        command = [*self._step_words(nodes), *limit, *self._runtime.options(), *trial]
        self._step = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        out, _ = self._step.communicate()
        return set(out.decode(errors="replace").split()) & {*nodes}

    def _step_words(self, nodes: Sequence[str]) -> list[str]:
        """Return the words of a step with one task on each of the nodes, beside the steps that run there."""
        count = str(len(nodes))
        step = ["srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node=1", "--nodelist", ",".join(nodes)]
        return [*step, "--overlap", "--export=ALL"]

    def _usable_nodes(self) -> list[str]:
        # Not SLURM_JOB_NODELIST: nodes that Slurm has since taken out of the job may be idle, or in another job.
        held = _output("squeue", "--noheader", f"--jobs={job_id()}", "--format=%N").strip()
        nodes = _output("scontrol", "show", "hostnames", held).split()
        lines = _output("sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format=%N %T %o").splitlines()
        rows = [line.split() for line in lines if len(line.split()) == 3]
        # A node's name in Slurm may not resolve; this is its address.
        self._addresses.update((name, address) for name, _, address in rows)
        usable = {name for name, state, _ in rows if not any(part in state for part in UNUSABLE)}
        return [node for node in nodes if node in usable]

    def extra_nodes(self, running: Sequence[str]) -> ExtraNodes:
        usable = [node for node in self._usable_nodes() if node not in running]
        if self._runtime.container is not None:
            # Another one is tried when the next launch begins: that takes minutes.
            usable = [node for node in usable if self._tried.get(node)]
        return ExtraNodes(tuple(usable), tuple(node for node in self._free_nodes() if node not in self.unfit_nodes))

    def excludable(self, nodes: Sequence[str], min_nodes: int) -> Sequence[str]:
        """Return these nodes, none of them where their partition has too few others for the job to start.

        A job that waits learns from nothing that an excluded node was replaced by one of the same name.
        """
        with suppress(TemporarilyUnavailable):
            partition = f"--partition={os.environ['SLURM_JOB_PARTITION']}"
            known = {*_output("sinfo", "--noheader", "--Node", partition, "--format=%N").split()}
            return nodes if len(known - {*nodes, *self.unfit_nodes}) >= min_nodes else ()
        return nodes

    def _free_nodes(self) -> list[str]:
        """Return the nodes of the partition that are idle and on; none while another job waits there for its turn.

        That may be a task of this job's array, also one that waits for the array's limit: it would start in this one's place.
        """
        partition = f"--partition={os.environ['SLURM_JOB_PARTITION']}"
        if _output("squeue", "--noheader", "--states=PENDING", partition, "--format=%A").strip():
            return []
        lines = _output("sinfo", "--noheader", "--Node", partition, "--states=idle", "--format=%N %T").splitlines()
        rows = [line.split() for line in lines if len(line.split()) == 2]
        return [name for name, state in rows if not any(part in state for part in UNUSABLE)]

    def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
        plan = self._plan
        # The launcher of a node has all of its cores, and binds ranks to them itself. A step that lost a node holds its
        # resources until Slurm hears of that node again: without --overlap the next step would wait for them forever.
        ends = ["--kill-on-bad-exit=0", f"--wait={plan['late_s']}", "--cpu-bind=none"]
        rendezvous = [
            "--master",
            f"{self._master_address(nodes[0])}:{launch_port(plan['port'], number)}",
            "--roster",
            ",".join(nodes),
            "--nproc",
            str(plan["ranks"]),
        ]
        launcher = [plan["python"], "-m", "trainer.node.launcher", *rendezvous, "--run", plan["run"]]
        words = self._runtime.launch_words([*launcher, "--", "train", plan["config"]])
        command = [*self._step_words(nodes), *ends, *self._runtime.options(), *words]
        environment = {**os.environ, "LUSTRAIN_ATTEMPT": str(number)}
        self._step = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        if self.time_limit_reached:
            # The signal came before there was a step to pass it on to.
            self._step.send_signal(signal.SIGUSR1)
        ending, lost = False, LostStep(CommandJournal(plan, self._runtime), number, launcher[:5])
        while self._step.poll() is None:
            self._watch_over_this_host()
            if not ending and not self._signal and should_end():
                ending = True
                self._step.send_signal(signal.SIGUSR1)
            if os.environ["SLURMD_NODENAME"] in nodes:
                lost.find()
            until = time.monotonic() + POLL_S
            while self._step.poll() is None and time.monotonic() < until:
                if lost.is_over():
                    log(f"launch {number} has ended on all nodes that are not lost")
                    self._end_step()
                with suppress(subprocess.TimeoutExpired):
                    self._step.wait(LOOK_S)
        return self._step.returncode if self._step.returncode >= 0 else 1

    def _end_step(self) -> None:
        """Kill what is left of the step, also on a node whose launcher only froze: its ranks would keep memory of the GPUs."""
        assert self._step is not None
        self._step.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._step.wait(KILL_S)
        self._step.kill()

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
            others = [node for node in self._usable_nodes() if node != host][:WATCHERS]
        except TemporarilyUnavailable:
            return
        if not others:
            return
        if self._watch is not None:
            _, errors = self._watch.communicate()
            log(f"no node watched over {host} for a while: {' '.join(errors.decode(errors='replace').split()[:40])}")
        command = ["/bin/sh", "-c", WATCH, "lustrain-watch", host, job_id(), str(restarts())]
        watch = [*self._step_words(others), "--gres=none", "--kill-on-bad-exit=0", *command]
        # It ends with the job, which Slurm prints as an error.
        self._watch = subprocess.Popen(watch, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def sleep(self, seconds: float) -> None:
        self._signalled.wait(seconds)

    def close(self) -> None:
        """End the watch over this host: it must not requeue a job that has ended. Remove containers whose client was killed."""
        if self._watch is not None and self._watch.poll() is None:
            self._watch.terminate()
        remove = self._runtime.remove_words()
        with suppress(TemporarilyUnavailable, subprocess.TimeoutExpired):
            nodes = [node for node in self._usable_nodes() if self._tried.get(node)] if remove else []
            if nodes:
                step = [*self._step_words(nodes), "--gres=none", "--kill-on-bad-exit=0"]
                subprocess.run([*step, *remove], stdin=subprocess.DEVNULL, timeout=ANSWER_S, check=False)

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


def job_id() -> str:
    """Return what names this job alone. One task of an array has the number of the whole array, which as a job is all of it:
    https://slurm.schedmd.com/job_array.html"""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def restarts() -> int:
    """Return how often Slurm has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def requeue(without: Sequence[str], unfit: Sequence[str] = ()) -> int:
    """Requeue this job, to start without some nodes; return the exit code of the script, which has to end at once.

    Slurm takes an `unfit` node for a good one, so those of earlier starts stay left out too.
    """
    job, names = job_id(), [*without, *unfit]
    with suppress(TemporarilyUnavailable):
        before = _output("squeue", "--noheader", f"--jobs={job}", "--format=%x").strip() if unfit else ""
        names += [before] if before else []
    # Slurm ends this script as soon as the job is requeued, and which nodes it is to do without can be set only then.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for pause_s in (0.0, *AGAIN_S):
        time.sleep(pause_s)
        done = subprocess.run(["scontrol", "requeue", job], check=False)
        if done.returncode == 0:
            break
    else:
        log("Slurm does not requeue the job; fix: start it again with `fab train --resume`")
        return PEERS
    # Also where it is empty: a name in an earlier list may be that of another node by now.
    exclude = ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(names)}"]
    for pause_s in (0.0, *EXCLUDE_AGAIN_S):
        time.sleep(pause_s)
        if subprocess.run(exclude, check=False).returncode == 0:
            return 0
    log(f"Slurm does not take the nodes that the job is to do without: {', '.join(names) or 'none'}")
    return 0


def log(line: str) -> None:
    print(f"lustrain: {line}", flush=True)


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise TemporarilyUnavailable(f"{command[0]} ended with {done.returncode}: Slurm does not answer")
    return done.stdout


class OutputCopy:
    """Copies what this job prints, up to a limit, to where the CloudWatch agent of this node carries it from.

    Slurm writes the output where the submitter reads it: on a shared file system, where no agent of a node should look. Nothing
    is copied on nodes without the folder, and what cannot be read or written ends the copy alone.
    """

    def __init__(self, source: str, folder: str = JOB_LOGS) -> None:
        self._source, self._begin = source, 0
        # The output of earlier jobs of the run is in the same file.
        with suppress(OSError):
            self._begin = os.path.getsize(source)
        self._target = os.path.join(folder, f"{os.environ['SLURM_JOB_ID']}.log")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output-copy", daemon=True)
        with suppress(OSError):
            if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > ROOM + MOST_COPIED:
                self._thread.start()

    def close(self) -> None:
        """Copy what is left."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_S)

    def _run(self) -> None:
        with (
            suppress(OSError),
            open(self._source, "rb") as source,
            open(self._target, "ab", opener=_for_owner) as target,
        ):
            if os.fstat(target.fileno()).st_uid != os.getuid():
                # Every user may make files there, also one of this name for others to read.
                return
            source.seek(self._begin)
            left, is_last = MOST_COPIED, False
            while left > 0 and not is_last:
                is_last = self._closing.wait(COPY_S)
                while left > 0 and (data := source.read(min(1 << 20, left))):
                    target.write(data)
                    left -= len(data)
                target.flush()


def _for_owner(path: str, flags: int) -> int:
    """Open a file that its owner and root alone may read, and follow no link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def main(plan: Mapping[str, Any]) -> int:
    """Supervise the run that the plan describes; return the exit code of the batch script."""
    copy = OutputCopy(_output_file(plan["log"]))
    try:
        return supervise_job(plan)
    finally:
        copy.close()


def _output_file(pattern: str) -> str:
    """Return the file that this job prints into, where `pattern` is that of an array
    (https://slurm.schedmd.com/sbatch.html#SECTION_FILENAME-PATTERN)."""
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID", "")
    return pattern.replace("%A", job).replace("%a", task)


def supervise_job(plan: Mapping[str, Any]) -> int:
    os.environ.update(plan["environment"])
    runtime = runtime_of(plan)
    if runtime is None:
        log(
            f"nothing on {socket.gethostname()} starts containers; allowed: Pyxis for srun, {NO_ENGINE}; fix: leave --image out"
        )
        # This job has been on a host where something did.
        return requeue((), [os.environ["SLURMD_NODENAME"]]) if restarts() else USAGE
    allocation = Allocation(plan, runtime)
    policy = RestartPolicy(**plan["policy"])
    try:
        if runtime.container is not None:
            nodes = allocation.wait_for_nodes()
            if allocation.stop_reason():
                return requeue(()) if allocation.time_limit_reached else REQUEUE
            # The journal is in a container of this host.
            if os.environ["SLURMD_NODENAME"] in allocation.unfit_nodes:
                # The image of a job that was requeued has run before: its registry is away.
                return requeue((), allocation.unfit_nodes) if nodes else PEERS if restarts() else USAGE
        journal = CommandJournal(plan, runtime)
        decision = supervise(allocation, journal, policy, log, max_wait_s=plan["max_wait_s"])
    finally:
        allocation.close()
    log(decision.why)
    if isinstance(decision, Requeue):
        return requeue(allocation.excludable(decision.without, policy.min_nodes), allocation.unfit_nodes)
    if allocation.time_limit_reached and decision.code in (PEERS, REQUEUE):
        return requeue(())
    return decision.code
