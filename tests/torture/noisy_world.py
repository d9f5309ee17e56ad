"""A run of `fab train` on a real Slurm, on nodes, links and a store that break; the world mends what it broke, and no more."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.local.aws import REGION, client_environment
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab
from rehearsal.lab.slurm import SHARED, Slurm
from tests.lab.faulty_proxy import Answer, Delay, FaultyProxy, Reset
from tests.lab.faulty_proxy import Fault as StoreFault
from tests.lab.training import VARIABLES
from tests.launch.test_launch_slurm import BATCH_GONE, Place
from tests.processes import wait_until
from tests.torture.noise import Fault, Struck
from trainer.checkpoint.lineage.lease import committed
from trainer.run import journal
from trainer.storage import ObjectStore, open_store

PATIENCE_S = 900.0
SILENT_S = 15
"""More than the trainer's own five seconds: a node that a busy machine does not run for a while has no fault."""
PROGRESS_STEPS = 100
"""Of PACE_S each they are worth more than a start, so that launches do not count as futile."""
PACE_S = 0.1
SUCCESSOR_S = 20.0
"""From the end of an instance to that of its successor's boot, which has its name."""
RANK, LAUNCHER = "^[^ ]+ -m trainer train ", "^[^ ]+ -m trainer.node.launcher "
"""Patterns of command lines; srun's holds the launcher's words too, but not at its beginning."""
STORE_FAULTS: Sequence[tuple[StoreFault, float]] = (
    (Answer(503, "SlowDown"), 0.7),
    (Answer(500, "InternalError"), 0.7),
    (Answer(503, "ServiceUnavailable"), 1.0),
    (Reset(), 0.5),
    (Reset(after=True), 0.3),
    (Delay(2.0), 0.5),
)
BUSY_LOOPS = 4


class World(Place):
    """One controller, which stays up, and workers with instance metadata; the run is in S3, behind a proxy."""

    def __init__(self, lab: Lab, slurm: Slurm, proxy: FaultyProxy, uri: str, folder: Path) -> None:
        super().__init__(lab, slurm)
        self.uri, self._proxy, self._folder = uri, proxy, folder
        self.variables = {
            **VARIABLES,
            "LUSTRAIN_SILENT_S": str(SILENT_S),
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL_S3": proxy.endpoint,
        }
        self.struck: list[Struck] = []
        self.job = 0
        self._undo: list[tuple[float, Struck, Callable[[], None]]] = []
        self._began = time.monotonic()
        for node in lab.nodes:
            write_credentials(node)
        # It gives back a node on which an old script of the job still ran, and requeues a job that lost all its watchers.
        self.watch()

    @property
    def store(self) -> ObjectStore:
        return open_store(self.uri)

    def write_config(self, steps: int, pace_s: float = PACE_S) -> None:
        (self.lab.shared / "config.toml").write_text(noisy_config(self.uri, steps, pace_s, f"{SHARED}/go"))

    def records(self) -> list[dict[str, Any]]:
        return journal.read(self.store)

    def log(self) -> str:
        return "".join(log.read_text(errors="replace") for log in sorted(self.lab.shared.glob("lustrain-*.log")))

    def newest_step(self) -> int:
        return max((one.step for one in committed(self.store)), default=0)

    def strike_all(self, faults: Sequence[Fault]) -> None:
        """Let all of it happen, and mend it; the run then goes on at full speed."""
        step = 0
        for fault in faults:
            if fault.after_progress:
                self._wait_until(lambda mark=step: self.newest_step() >= mark + PROGRESS_STEPS or self.has_ended())
            until = time.monotonic() + fault.pause_s
            self._wait_until(lambda until=until: time.monotonic() >= until)
            if self.has_ended():
                self._note("the run has ended before the other faults")
                break
            step = self.newest_step()
            self._strike(fault)
        self._wait_until(lambda: not self._undo)
        self._note("all is mended")
        self.go()

    def has_ended(self) -> bool:
        """Whether the job has ended, and is not about to be queued again."""
        if self._state() not in BATCH_GONE:
            return False
        return self._queued() == "" and self._state() in BATCH_GONE

    def wait_for_end(self) -> str:
        """Return the state in which the job ended."""
        wait_until(self.has_ended, PATIENCE_S)
        return self._state()

    def keep(self) -> None:
        """Leave what a reader needs where the files of the test are."""
        (self._folder / "job.log").write_text(self.log())
        shutil.copyfile(self.lab.subnet.folder / "log", self._folder / "nodes.log")
        (self._folder / "launches.json").write_text(json.dumps(self.records(), indent=1))
        queue = self.slurm.call("scontrol", "show", "job", str(self.job), check=False).stdout
        nodes = self.slurm.call("scontrol", "show", "nodes", check=False).stdout
        (self._folder / "slurm").write_text(queue + nodes)

    def _state(self) -> str:
        """Empty while slurmctld does not answer."""
        shown = self.slurm.call("scontrol", "--oneliner", "show", "job", str(self.job), check=False).stdout
        words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return words.get("JobState", "")

    def _queued(self) -> str | None:
        done = self.slurm.call("squeue", "--noheader", f"--jobs={self.job}", "--format=%T", check=False)
        return None if done.returncode else done.stdout.strip()

    def _wait_until(self, holds: Callable[[], object]) -> None:
        """Meanwhile faults end when their time is over."""

        def look() -> object:
            for due in sorted((one for one in self._undo if one[0] <= time.monotonic()), key=lambda one: one[0]):
                self._undo.remove(due)
                self._end(due[1], due[2])
            held = holds()
            if not held:
                time.sleep(0.2)
            return held

        wait_until(look, PATIENCE_S)

    def _strike(self, fault: Fault) -> None:
        actions: Mapping[str, Callable[[Fault], None]] = {
            "crash": self._crash,
            "reboot": self._reboot,
            "link": self._cut,
            "stop a rank": lambda fault: self._freeze(fault, ["-f", RANK]),
            "stop a launcher": lambda fault: self._freeze(fault, ["-f", LAUNCHER]),
            "stop slurmd": lambda fault: self._freeze(fault, ["-x", "slurmd"]),
            "requeue": self._requeue,
            "drain": self._drain,
            "slurmctld": self._restart_controller,
            "notice": self._notice,
            "store": self._break_store,
            "busy": self._load,
        }
        actions[fault.kind](fault)

    def _crash(self, fault: Fault) -> None:
        node = self._pick(fault)
        if node:
            self._begin(fault, node.name, node.boot)
            node.crash()

    def _reboot(self, fault: Fault) -> None:
        node = self._pick(fault)
        if node:
            one = self._begin(fault, node.name)
            node.reboot()
            self._end(one)

    def _cut(self, fault: Fault) -> None:
        node = self._pick(fault)
        if node:
            self._begin(fault, node.name, lambda: node.link(True))
            node.link(False)

    def _freeze(self, fault: Fault, pattern: Sequence[str]) -> None:
        def runs_it(node: Node) -> bool:
            return node.exec("pgrep", *pattern, check=False).returncode == 0

        self._wait_until(lambda: self._sound(runs_it) or self.has_ended())
        node = self._pick(fault, runs_it)
        if node:
            self._begin(fault, node.name, lambda: _signal(node, "CONT", pattern))
            _signal(node, "STOP", pattern)

    def _requeue(self, fault: Fault) -> None:
        one = self._begin(fault, "")
        done = self.slurm.call("scontrol", "requeue", str(self.job), check=False)
        self._end(one, note=done.stderr.strip())

    def _drain(self, fault: Fault) -> None:
        node = self._pick(fault)
        if node:
            self._begin(fault, node.name, lambda: self._set_state(node, "RESUME"))
            self._set_state(node, "DRAIN")

    def _set_state(self, node: Node, state: str) -> None:
        words = ["scontrol", "update", f"NodeName={node.name}", f"State={state}", "Reason=noise"]
        # A node that is back to service by itself has nothing to be resumed from.
        wait_until(
            lambda: (
                self.slurm.call(*words, check=False).returncode == 0
                or (state == "RESUME" and "drain" not in self.slurm.states().get(node.name, "drain"))
            )
        )

    def _restart_controller(self, fault: Fault) -> None:
        one = self._begin(fault, self.slurm.controller.name)
        self.slurm.controller.exec("systemctl", "restart", "slurmctld.service")
        self._end(one)

    def _notice(self, fault: Fault) -> None:
        node = self._pick(fault)
        if not node:
            return

        def take_away() -> None:
            node.crash()
            node.metadata().clear()
            one.ended = None
            self._undo.append((time.monotonic() + SUCCESSOR_S, one, node.boot))

        one = self._begin(fault, node.name, take_away)
        node.metadata().spot_notice()

    def _break_store(self, fault: Fault) -> None:
        form, probability = STORE_FAULTS[int(fault.pick * len(STORE_FAULTS))]
        self._begin(fault, "", self._proxy.heal, note=f"{form} with probability {probability:g}")
        self._proxy.inject(form, probability=probability)

    def _load(self, fault: Fault) -> None:
        seconds = f"{fault.span_s:.0f}"
        self._begin(fault, "", lambda: None)
        for _ in range(BUSY_LOOPS):
            self.slurm.controller.start("timeout", seconds, "sh", "-c", "while :; do :; done")

    def _pick(self, fault: Fault, suits: Callable[[Node], bool] = lambda node: True) -> Node | None:
        """Choose a worker; None where none suits."""
        nodes = self._sound(suits)
        if not nodes:
            self._note(f"{fault.kind}: no node for it")
            return None
        return nodes[int(fault.pick * len(nodes))]

    def _sound(self, suits: Callable[[Node], bool]) -> list[Node]:
        """The workers that have no fault and suit."""
        broken = {one.node for one in self.struck if one.ended is None}
        return [node for node in self.slurm.workers if node.name not in broken and node.running and suits(node)]

    def _begin(self, fault: Fault, node: str, undo: Callable[[], None] | None = None, note: str = "") -> Struck:
        one = Struck(fault.kind, node, time.time())
        self.struck.append(one)
        if undo:
            self._undo.append((time.monotonic() + fault.span_s, one, undo))
        self._note(f"{fault.kind} {node} for {fault.span_s:.1f} s {note}", step=self.newest_step())
        return one

    def _end(self, one: Struck, undo: Callable[[], None] = lambda: None, note: str = "") -> None:
        one.ended = time.time()
        undo()
        if one.ended is not None:
            one.ended = time.time()
        self._note(f"end of {one.kind} {one.node} {note}")

    def _note(self, what: str, **more: object) -> None:
        line = {"at": round(time.monotonic() - self._began, 1), "unix": time.time(), "what": what.strip(), **more}
        with (self._folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _signal(node: Node, name: str, pattern: Sequence[str]) -> None:
    # What was stopped may have ended meanwhile, and its node too.
    if node.running:
        node.exec("pkill", f"-{name}", *pattern, check=False)


def write_credentials(node: Node) -> None:
    """A node's role stands in for this file on EC2."""
    given = client_environment()
    keys = {"aws_access_key_id": given["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": given["AWS_SECRET_ACCESS_KEY"]}
    lines = [f"{name} = {value}" for name, value in keys.items()]
    node.write("/root/.aws/credentials", "\n".join(["[default]", *lines, ""]), 0o600)


def noisy_config(uri: str, steps: int, pace_s: float, until: str) -> str:
    return f"""
[run]
uri = "{uri}"
[task]
name = "tests.torture.paced_task:Paced"
pace_s = {pace_s}
until = "{until}"
[train]
steps = {steps}
global_batch = 4
micro_batch = 2
[optimizer]
lr = 0.01
[checkpoint]
every_steps = 25
[interrupt]
signal_grace_s = 20
[parallel]
device = "cpu"
"""


def kinds(struck: Sequence[Struck]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(Counter(one.kind for one in struck).items()))
