"""The run that is interrupted, by the stack's own Slurm: one `fab train`, then a notice and a lost node, without manual steps.

Real here: Slurm and munge, the instances' user data, the lifecycle bundle and its agent, `fab`, the supervisor in the job, the
ranks on nodes of their own, the interruption queue's and the metadata's protocols. Emulated: the AWS behind the endpoints, and
the machines, nodes of the lab (`lab.instance` says what of them).
"""

from __future__ import annotations

import base64
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3

from infra.local.engine import engine_missing
from lustrain.cluster import to_json
from rehearsal import proof
from rehearsal.lab import nodes, slurm
from rehearsal.lab.instance import BOOT_LOG, attach_volume, boot_by, bring_image, route, take_address
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab
from rehearsal.lab.slurm import SHARED, Slurm
from rehearsal.provision import instances_in_service
from rehearsal.stages import CONFIG, EVALUATED_EVERY, EVERY_STEPS, INTERRUPTED, NOTICE_S, RANKS, Journey, newest_step
from trainer.checkpoint.lineage.lease import committed
from trainer.environment import SILENT
from trainer.errors import EXIT_DONE
from trainer.metrics.reader import read_events, read_generations, read_steps
from trainer.run import journal

ROOT = Path(__file__).parents[1]
KIND = "cpu"
REPLACEMENTS = 2
"""Machines that are off until another one is gone."""
PATIENCE_S = 900.0
POLL_S = 0.3
GO = "go"
"""The file in the shared folder without which a launch waits in its evaluation (`rehearsal.hold`)."""
LAST_LINES = 2000
"""Characters of a log that an error shows."""
JOB_ENDED = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT")
REAL = "Slurm, munge, user data, lifecycle bundle, agent"
EMULATED = "EC2 (nodes of the lab), AWS's CLI, Secrets Manager, systemd"


def why_not() -> str | None:
    """Return why no stack's Slurm can run here, in one line; None where one can."""
    return engine_missing() or nodes.why_not() or slurm.why_not()


@contextmanager
def begun(journey: Journey) -> Iterator[StackSlurm | None]:
    """Begin to boot the stack's Slurm in the background, where the journey trains by it: on a lab with a controller, a node for
    each rank, and their replacements, all off until they are instances."""
    if not journey.slurm:
        yield None
        return
    journey.at = "machines for the stack's Slurm"
    count = 1 + RANKS + REPLACEMENTS
    folders = [str(ROOT), sys.prefix, sys.base_prefix]
    with Lab(count, KIND, folders=folders, metadata=True, off=count) as lab, ThreadPoolExecutor(1 + RANKS) as pool:
        yield StackSlurm(journey, lab, pool)


class StackSlurm:
    """The first node of the lab is the controller; the others become instances of the stack's group, in order."""

    def __init__(self, journey: Journey, lab: Lab, pool: ThreadPoolExecutor) -> None:
        self._journey, self._lab = journey, lab
        self._slurm = Slurm(lab)
        self._store = journey.store(INTERRUPTED)
        self._job = 0
        self._ec2 = boto3.client("ec2", region_name=journey.cluster.region)
        self._go = lab.shared / GO
        # The first evaluation after the latest step of a notice.
        self._hold_evaluation = -(-(journey.steps // 3) // EVALUATED_EVERY)
        instances = [self._output("controller"), *instances_in_service(journey.cluster)]
        pairs = zip(lab.nodes[: 1 + RANKS], instances, strict=True)
        self._booted = [pool.submit(self._boot, *pair) for pair in pairs]

    @property
    def hosts(self) -> list[str]:
        """Return the addresses of all machines that ranks may run on."""
        return [node.address for node in self._lab.nodes[1:]]

    def train(self, at_rest: Callable[[], None]) -> None:
        """Train on it through a notice and the loss of a node; `at_rest` is called when nothing trains or writes the run."""
        self.register()
        notice_at = self.train_until_notice()
        at_rest()
        self.lose_a_node(notice_at)
        self.report()

    def register(self) -> None:
        """Wait for the controller and the nodes of the group, which boot by the user data that the stack gave them."""
        title = f"the stack's Slurm: a controller and {RANKS} nodes booted by their user data, beside the stages above"
        with self._journey.stage(title, real=REAL, emulated=EMULATED) as stage:
            for booted in self._booted:
                booted.result()
            first = self._lab.nodes[1 : 1 + RANKS]
            states = self._slurm.wait({node.name: "idle" for node in first}, PATIENCE_S)
            figure = ", ".join(f"{name} {state}" for name, state in states.items())
            stage["outcome"] = figure
            self._journey.promise(
                "nodes boot by the stack's user data and register with its Slurm, without manual steps",
                set(states) == {node.name for node in first},
                figure,
            )

    def train_until_notice(self) -> int:
        """Start the run; at a random step one of its nodes gets a notice. Returns the step that was saved."""
        journey = self._journey
        at = journey.draw_notice()
        title = f"fab train on Slurm; spot notice around step {at}, by the event bus and to the node"
        real = "fab, sbatch, ranks on two nodes, EventBridge rule to SQS, IMDSv2 protocol, save, commit, drain"
        with journey.stage(title, real=real, emulated="EC2, metadata service, S3, SQS") as stage:
            self._submit()
            self._expect(f"step {at} of the run", lambda: newest_step(journey) >= at)
            if journey.watch:
                journey.watch.before_notice(lambda: self._runs() and newest_step(journey) < journey.steps // 2)
            number = len(self._records()) - 1
            doomed = self._lab[journey.rng.choice(self._records()[number]["nodes"])]
            journey.noticed = time.time()
            journey.aws.events.spot(doomed.instance, in_s=NOTICE_S)
            # The node's own metadata has no notice yet: one that reaches the run now came through the queue.
            by_queue = self._wait(lambda: self._noticed(doomed.instance))
            self._go.touch()
            doomed.metadata().spot_notice(in_s=max(0.0, journey.noticed + NOTICE_S - time.time()))
            self._expect("the end of the launch after its notice", lambda: "ended" in self._records()[number])
            launch = self._records()[number]
            drained = self._wait(lambda: self._slurm.states().get(doomed.name, "").startswith("drain"))
            self._expect("the job in the queue again", lambda: self._state() == "PENDING")
            self._go.unlink()
            saved = committed(self._store)[-1].step
            took = launch["ended"] - journey.noticed
            if journey.watch:
                journey.watch.after_notice()
            self._end(doomed)
            stage["outcome"] = (
                f"exit {launch['code']} {took:.1f} s after the notice, step {saved} committed; "
                f"{doomed.name} drained, the job back in the queue"
            )
            journey.promise(
                "a notice reaches the run by the interruption queue, and drains its node by the metadata",
                by_queue and drained,
                f"spot interruption of {doomed.instance}",
            )
            journey.promise_notice_saved(launch["code"], took, saved, at)
            return saved

    def lose_a_node(self, notice_at: int) -> None:
        """Boot what Auto Scaling launched in the doomed node's place; then a node of the run loses its power."""
        journey = self._journey
        held_at = (notice_at // EVALUATED_EVERY + self._hold_evaluation) * EVALUATED_EVERY
        at = min(journey.draw_loss(notice_at), held_at - 1)
        title = f"the node is replaced; another one is lost around step {at}, without notice, and replaced"
        with journey.stage(title, real=f"{REAL}; requeue, resume", emulated=EMULATED) as stage:
            second, third = self._lab.nodes[1 + RANKS :]
            known = {node.instance for node in self._lab.nodes}
            self._boot_replacement(second, known)
            self._expect(f"step {at} of the run", lambda: newest_step(journey) >= at)
            lost = self._lab[journey.rng.choice(self._records()[-1]["nodes"])]
            self._end(lost)
            self._go.touch()
            print(f"   {lost.name} has lost its power", flush=True)
            self._boot_replacement(third, {*known, second.instance})
            self._wait(lambda: not self._runs())
            state, records = self._state(), self._records()
            last = read_steps(self._store)[-1]
            places = " → ".join("+".join(record["nodes"]) for record in records)
            stage["outcome"] = f"{state}, step {last['step']}, loss {last['loss']:.3f}; nodes {places}"
            done = state == "COMPLETED" and records[-1]["code"] == EXIT_DONE
            journey.promise(
                "a lost node is replaced by the stack, and the job goes on by itself to its end",
                done and last["step"] == journey.steps and third.name in records[-1]["nodes"],
                f"{len(records)} launches of one job, on {places}",
            )
            generations = read_generations(self._store)
            resumed = [event for event in read_events(self._store) if event["event"] == "resumed"][-1]
            before = max(
                int(rows[-1]["step"]) for number, rows in generations.items() if rows and number < resumed["attempt"]
            )
            journey.promises.append(proof.lost_at_most(EVERY_STEPS, before, resumed["step"]))
            if journey.watch:
                journey.watch.at_end()

    def report(self) -> None:
        """Write the page of the run, as its user does on the controller."""
        with self._journey.stage("fab report of the run", real="fab, records", emulated="S3") as stage:
            data = self._fab("report", self._journey.run_uri(INTERRUPTED), "--output", "report.md")
            page = (self._lab.shared / "report.md").read_text(encoding="utf-8")
            print("\n".join(f"   {line}" for line in page.splitlines() if line.startswith(("- ", "| "))), flush=True)
            shown, known = [launch["attempt"] for launch in data["attempts"]], self._records()
            figure = f"{len(shown)} launches, state {data['state']}, goodput {data['goodput']:.0%}"
            stage["outcome"] = figure
            self._journey.promise(
                "fab report shows every launch of the run, and that it is done",
                shown == [record["attempt"] for record in known] and data["state"] == "done",
                figure,
            )

    def _boot(self, node: Node, instance: str) -> None:
        """Boot a machine as an instance of the stack, by its user data. RuntimeError with the log where that fails."""
        node.instance = instance
        node.boot()
        bring_image(node, self._journey.environment)
        if node is self._slurm.controller:
            take_address(node, self._controller_address)
            attach_volume(node, self._output("slurmState"))
        else:
            route(node, self._controller_address, self._slurm.controller)
        done = boot_by(node, self._user_data(instance))
        if done.returncode:
            log = node.read(BOOT_LOG)[-LAST_LINES:]
            raise RuntimeError(f"{node.name}, {instance}: its user data ended with {done.returncode}\n{log}")

    def _end(self, node: Node) -> None:
        """Cut a machine from power and end its instance, so that Auto Scaling launches another one now."""
        node.crash()
        self._ec2.terminate_instances(InstanceIds=[node.instance])

    def _boot_replacement(self, node: Node, known: set[str]) -> None:
        """Boot a machine as the instance that the group has launched in place of one that is gone."""
        fresh: list[str] = []

        def launched() -> bool:
            fresh[:] = [one for one in instances_in_service(self._journey.cluster) if one not in known]
            return bool(fresh)

        self._expect("an instance in place of the one that is gone", launched)
        print(f"   {node.name} boots as {fresh[0]}", flush=True)
        self._boot(node, fresh[0])

    def _user_data(self, instance: str) -> str:
        answer = self._ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
        return base64.b64decode(answer["UserData"]["Value"]).decode()

    @property
    def _controller_address(self) -> str:
        slurm_of_stack = self._journey.cluster.slurm
        assert slurm_of_stack is not None
        return str(slurm_of_stack.controller)

    def _output(self, name: str) -> str:
        provisioned = self._journey.provisioned
        assert provisioned is not None
        assert provisioned.engine is not None
        return str(provisioned.engine.outputs()[name])

    def _submit(self) -> None:
        journey = self._journey
        shared = self._lab.shared
        (shared / "config.toml").write_bytes(CONFIG.read_bytes())
        (shared / "cluster.json").write_text(json.dumps(to_json(journey.cluster)), encoding="utf-8")
        settings = {**journey.settings(INTERRUPTED), **(journey.watch.settings if journey.watch else {})}
        settings |= {"task.hold": f"{SHARED}/{GO}", "task.hold_evaluation": str(self._hold_evaluation)}
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        journey.started[INTERRUPTED] = time.time()
        flags = ["--cluster", "cluster.json", "--nodes", str(RANKS), "--nproc", "1"]
        self._job = int(self._fab("train", "config.toml", *flags, *sets)["job"])

    def _fab(self, *words: str) -> Mapping[str, Any]:
        """Run a task on the controller, in the folder that all nodes share. RuntimeError."""
        variables = {
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
            "HOME": "/root",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "eth0",
            # As the reference's, for the same sums, and patience with ranks that this machine does not let run.
            **{name: self._journey.environment[name] for name in ("OMP_NUM_THREADS", SILENT)},
        }
        given = [f"{name}={value}" for name, value in variables.items()]
        command = shlex.join(["env", "-i", *given, "fab", "-r", str(ROOT), *words, "--json"])
        done = self._slurm.controller.exec(
            "sh", "-c", f"cd {SHARED} && exec {command}", check=False, timeout=PATIENCE_S
        )
        if done.returncode:
            raise RuntimeError(f"fab {words[0]} ended with {done.returncode}: {done.stdout}{done.stderr[-LAST_LINES:]}")
        answer: Mapping[str, Any] = json.loads(done.stdout)
        return answer

    def _records(self) -> list[dict[str, Any]]:
        return journal.read(self._store)

    def _noticed(self, instance: str) -> bool:
        events = read_events(self._store)
        return any(event["event"] == "notice" and event.get("instance_id") == instance for event in events)

    def _state(self) -> str:
        """Return the job's state; empty while the controller, on a busy machine, answers too late."""
        try:
            return self._slurm.job(self._job)["JobState"]
        except RuntimeError:
            return ""

    def _runs(self) -> bool:
        return self._state() not in JOB_ENDED

    def _expect(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for what the next step needs. RuntimeError where the job ends, or patience does, before it comes."""
        if not self._wait(condition):
            raise RuntimeError(f"waited in vain for {what}; job {self._job} is {self._state()}")

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition holds, while the job waits or runs; return whether it does."""
        ends = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > ends or (self._job and not self._runs()):
                return condition()
            time.sleep(POLL_S)
        return True
