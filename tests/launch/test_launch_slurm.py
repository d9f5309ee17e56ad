"""`fab train --on slurm` on a real Slurm: a lost node costs time, and nothing else; nobody is at the keyboard."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from node_setup.agent.facts.instance import NODE
from node_setup.agent.slurm.watch import GONE_VARIABLE
from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import SHARED, Slurm
from tests.conftest import require
from tests.fork_server import PATIENT
from tests.lab.training import ROOT, VARIABLES, assert_equals_an_undisturbed_run, config, losses, mesh_sets, undisturbed
from tests.launch import planted_engine
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_REQUEUE
from trainer.metrics.reader import read_events
from trainer.run import journal
from trainer.storage import open_store

pytestmark = pytest.mark.slow
BATCH_GONE = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


class Place:
    """A Slurm with a controller and three workers, and `fab` on its controller, or as another user on another node."""

    # Here a silent node is to be missed before Slurm counts it down.
    variables: Mapping[str, str] = {name: value for name, value in VARIABLES.items() if name not in PATIENT}
    """What `fab` gets beside the path of its programs."""

    def __init__(self, lab: Lab, slurm: Slurm, login: Node | None = None, user: str = "root") -> None:
        self.lab, self.slurm = lab, slurm
        self.login, self.user = login or slurm.controller, user
        self.run = lab.shared / "run"

    def write(self, **train: object) -> None:
        (self.lab.shared / "config.toml").write_text(config("run", hold=f"{SHARED}/go", **train))

    def fab(self, *words: str, check: bool = True) -> Any:
        """What fab prints as JSON, called in the shared folder."""
        home = "/root" if self.user == "root" else SHARED
        variables = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": home, **self.variables}
        given = " ".join(f"{name}={value}" for name, value in variables.items())
        line = f"cd {SHARED} && exec env -i {given} fab -r {ROOT} {shlex.join(words)} --json"
        done = self.login.exec("runuser", "-u", self.user, "--", "sh", "-c", line, check=False)
        answer = json.loads(done.stdout) if done.stdout else None
        assert not check or done.returncode == 0, (answer, done.stderr)
        return answer

    def train(self, *words: str) -> int:
        return int(self.fab("train", "config.toml", "--on", "slurm", "--nproc", "1", *words)["job"])

    def records(self) -> list[dict[str, Any]]:
        return journal.read(open_store(str(self.run))) if self.run.exists() else []

    def log(self) -> str:
        log = self.run / "launch/log"
        return log.read_text() if log.exists() else "no log"

    def committed(self) -> None:
        wait_until(lambda: self.run.exists() and committed(open_store(str(self.run))))

    def watch(self, **variables: str) -> None:
        """Start what watches the Slurm of a stack on its controller."""
        controller, given = self.slurm.controller, [f"{name}={value}" for name, value in variables.items()]
        controller.write(NODE, json.dumps({"slurm": {"duty": "controller"}}))
        controller.start("env", f"--chdir={ROOT}", *given, sys.executable, "-m", "node_setup.agent", "slurm-watch")

    def go(self) -> None:
        """Let the run go on to its end."""
        (self.lab.shared / "go").touch()

    def noticed(self) -> None:
        wait_until(lambda: any(event["event"] == "notice" for event in read_events(open_store(str(self.run)))))

    def assert_goes_on_without(self, victim: str, why: str, shard: int = 1) -> None:
        """The run ends done, its records name the node as the cause, and no later attempt had it."""
        records = self.records()
        assert records[-1]["code"] == EXIT_DONE, records
        at = next((number for number, record in enumerate(records) if victim in record.get(why, [])), None)
        assert at is not None, records
        assert not any(victim in record["nodes"] for record in records[at + 1 :]), records
        assert_equals_an_undisturbed_run(self.run, shard)

    def ended(self, job: int) -> str:
        wait_until(lambda: self.slurm.job(job)["JobState"] in BATCH_GONE, 480)
        return self.slurm.job(job)["JobState"]


def places(metadata: bool = False, timing: Mapping[str, str] = lab_slurm.QUICK) -> Iterator[Place]:
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(4, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix], metadata=metadata) as lab:
        place = Place(lab, Slurm(lab, timing).start())
        place.write()
        yield place


@pytest.fixture
def place() -> Iterator[Place]:
    yield from places()


@pytest.fixture
def metadata_place() -> Iterator[Place]:
    """Where each node has instance metadata of its own."""
    yield from places(metadata=True)


@pytest.fixture
def patient_place() -> Iterator[Place]:
    """Where Slurm counts no lost node down while a test runs."""
    yield from places(timing={**lab_slurm.QUICK, "SlurmdTimeout": "3600"})


SHARDS = pytest.mark.parametrize("shard", [1, 2], ids=["ddp", "fsdp"])
"""With two, each node holds half of the model."""


@SHARDS
def test_lost_node_is_replaced_by_a_spare_within_the_allocation(place: Place, shard: int) -> None:
    job = place.train("--nodes", "2", "--spare", "1", *mesh_sets(shard))
    place.committed()
    victim = place.records()[0]["nodes"][1]
    place.lab[victim].crash()
    place.go()
    assert place.ended(job) == "COMPLETED", place.log()
    place.assert_goes_on_without(victim, "blamed", shard)


def test_run_goes_on_before_slurm_counts_a_lost_node_down(patient_place: Place) -> None:
    patient_place.train("--nodes", "2", "--spare", "1")
    patient_place.committed()
    victim = patient_place.records()[0]["nodes"][1]
    patient_place.lab[victim].crash()
    patient_place.go()
    # The job itself stays in Slurm: the lost node does not tell of its end.
    wait_until(lambda: patient_place.records()[-1].get("code") == EXIT_DONE, 480)
    assert "down" not in patient_place.slurm.states()[victim]
    patient_place.assert_goes_on_without(victim, "blamed")


def test_run_in_containers_ends_as_one_on_the_nodes(place: Place) -> None:
    for node in place.slurm.workers:
        planted_engine.plant(node)
    # It is mounted, so it has to be there.
    place.go()
    planted_engine.record(place.lab.shared / "image.json", planted_engine.IMAGE)
    job = place.train("--nodes", "2", "--image", "image.json")
    assert place.ended(job) == "COMPLETED", place.log()
    assert_equals_an_undisturbed_run(place.run)
    used = [place.lab[name] for name in place.records()[0]["nodes"]]
    for node in used:
        words = [call.split() for call in planted_engine.calls(node)]
        assert any(f"--name=lustrain-job-{job}-0" in call for call in words)
        assert words[-1] == ["ps", "--all", "--quiet", "--filter", "name=^lustrain-job-"]


def test_image_that_no_node_fetches_ends_the_job(place: Place) -> None:
    for node in place.slurm.workers:
        planted_engine.plant(node)
    place.go()
    planted_engine.record(place.lab.shared / "image.json", planted_engine.DENIED)
    job = place.train("--nodes", "2", "--image", "image.json")
    assert place.ended(job) == "FAILED"
    assert place.records() == []
    assert "pull access denied" in place.log()
    assert f"no container of {planted_engine.DENIED} starts there" in place.log()


def test_a_job_that_loses_its_batch_host_is_requeued_and_goes_on(place: Place) -> None:
    job = place.train("--nodes", "2")
    place.committed()
    victim = place.slurm.job(job)["BatchHost"]
    place.lab[victim].crash()
    place.go()
    assert place.ended(job) == "COMPLETED", place.log()
    place.assert_goes_on_without(victim, "blamed")


def test_a_job_that_loses_its_watchers_too_is_requeued_by_the_controller(place: Place) -> None:
    job = place.train("--nodes", "2", "--spare", "1")
    place.committed()
    victim = place.slurm.job(job)["BatchHost"]
    place.lab[victim].crash()
    for node in place.slurm.workers:
        if node.name != victim:
            node.exec("pkill", "-KILL", "-f", "lustrain-watch")
    wait_until(lambda: place.fab("status", "run")["held"], 480)
    assert f"scontrol requeue {job}" in place.fab("status", "run")["held"]["fix"]
    place.watch(**{GONE_VARIABLE: "4"})
    place.go()
    assert place.ended(job) == "COMPLETED", place.log()
    place.assert_goes_on_without(victim, "blamed")


def test_stopped_job_commits_ends_and_goes_on_at_resume(place: Place) -> None:
    job = place.train("--nodes", "2", "--set", "train.steps=1000000")
    place.committed()
    assert place.fab("status", "run")["state"] == "running"
    alive = place.fab("train", "config.toml", "--on", "slurm", "--nproc", "1", "--resume", check=False)
    assert alive["error"][0].startswith(f"--resume = '{SHARED}/run': job {job} of Slurm still waits or runs for it")
    place.fab("stop", "run")
    place.go()
    assert place.ended(job) == "FAILED"
    stopped = place.fab("status", "run")
    assert stopped["committed_step"]
    if place.records()[-1]["code"] == EXIT_REQUEUE:
        # A rank that is told once more while it leaves ends otherwise, though it has committed.
        assert (stopped["state"], stopped["step"]) == ("stopped", stopped["committed_step"])
    train = ["train", "config.toml", "--on", "slurm", "--nproc", "1", "--nodes", "2"]
    refused = place.fab(*train, check=False)
    assert "there is a run of this name already" in refused["error"][0]
    steps = stopped["committed_step"] + 10
    assert place.ended(place.train("--nodes", "2", "--resume", "--set", f"train.steps={steps}")) == "COMPLETED"
    assert place.fab("status", "run")["step"] == steps


def test_job_that_a_person_cancels_is_not_requeued(place: Place) -> None:
    """Not by the node that watches its batch host either, which lives a little longer."""
    job = place.train("--nodes", "2", "--set", "train.steps=1000000")
    place.committed()
    place.slurm.call("scancel", str(job))
    assert place.ended(job) in ("CANCELLED", "FAILED")
    assert place.slurm.job(job)["Restarts"] == "0"
    assert place.slurm.call("squeue", "--noheader").stdout == ""


def test_job_out_of_time_commits_and_queues_stop_now_cancels_it(place: Place) -> None:
    endless = ["--set", "train.steps=1000000", "--set", "interrupt.signal_grace_s=20"]
    job = place.train("--nodes", "2", "--time", "1", *endless)
    place.go()
    wait_until(lambda: len(place.records()) >= 2 and "ended" not in place.records()[-1])
    first = place.records()[0]
    assert first["gained"]
    assert int(place.slurm.job(job)["Restarts"]) >= 1
    wait_until(lambda: committed(open_store(str(place.run)))[-1].generation >= 2)
    place.fab("stop", "run", "--now")
    assert place.ended(job) in ("CANCELLED", "FAILED")
    found = place.fab("status", "run")
    assert found["committed_step"] > first["gained"], (found, place.log()[-2000:])
    if place.records()[-1].get("code") == EXIT_REQUEUE:
        # A rank that is told once more while it leaves ends otherwise, though it has committed.
        assert (found["state"], found["step"]) == ("stopped", found["committed_step"]), (found, place.log()[-2000:])


def test_a_wrong_setting_is_one_attempt_and_its_line(place: Place) -> None:
    job = place.train("--nodes", "2", "--set", "task.nothing=1")
    assert place.ended(job) == "FAILED"
    (record,) = place.records()
    assert record["code"] == EXIT_CONFIG
    assert "task.nothing" in record["said"]
    assert record["said"] in place.log()
    (line, *_) = place.fab("logs", "run", "--rank", "0", "--launch", "1")["lines"]
    assert line["text"] == record["said"]


@SHARDS
def test_job_comes_back_from_a_spot_notice_without_doomed_node(metadata_place: Place, shard: int) -> None:
    place = metadata_place
    job = place.train("--nodes", "2", "--set", "interrupt.metadata=true", *mesh_sets(shard))
    place.committed()
    doomed = place.records()[0]["nodes"][0]
    place.lab[doomed].metadata().spot_notice()
    place.noticed()
    place.go()
    assert place.ended(job) == "COMPLETED", place.log()
    place.assert_goes_on_without(doomed, "noticed", shard)


def test_smaller_world_goes_on_and_outlives_slurmctld(place: Place) -> None:
    job = place.train("--nodes", "1-2")
    place.committed()
    first = place.records()[0]["nodes"]
    place.lab[first[1]].crash()
    place.slurm.controller.exec("systemctl", "restart", "slurmctld.service")
    place.go()
    assert place.ended(job) == "COMPLETED", place.log()
    records = place.records()
    assert (len(records[0]["nodes"]), len(records[-1]["nodes"]), records[-1]["code"]) == (2, 1, EXIT_DONE), records
    assert any(first[1] in record["blamed"] for record in records), records
    assert place.fab("status", "run")["world_size"] == 1


def test_a_job_that_slurm_requeues_by_itself_goes_on(place: Place) -> None:
    job = place.train("--nodes", "2")
    place.committed()
    place.slurm.call("scontrol", "requeue", str(job))
    place.noticed()
    place.go()
    assert place.ended(job) == "COMPLETED", place.log()
    records = place.records()
    assert (len(records) >= 2, records[-1]["code"]) == (True, EXIT_DONE), place.log()
    assert_equals_an_undisturbed_run(place.run)


def test_sweep_is_one_array_whose_tasks_are_runs(place: Place) -> None:
    place.write(steps=60)
    sweep = ["sweep", "config.toml", "--on", "slurm", "--nproc", "1", "--grid", "run.seed=1,2,3", "--at-once", "1"]
    first, second, third = (point["name"] for point in place.fab(*sweep)["points"])
    jobs = {name: place.fab("status", f"run/{name}")["submitted"]["slurm"]["job"] for name in (first, second, third)}
    array = jobs[first].partition("_")[0]
    assert list(jobs.values()) == [f"{array}_{task}" for task in range(3)]
    wait_until(lambda: committed(open_store(str(place.run / first))))
    running = place.slurm.call("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%F_%K").stdout.split()
    assert running == [f"{array}_0"]
    alive = place.fab("train", "config.toml", *sweep[2:6], "--set", f"run.uri={SHARED}/run/{second}", check=False)
    assert f"job {array}_1 of Slurm still waits or runs for it" in alive["error"][0]
    assert place.fab("stop", f"run/{third}", "--now")["cancelled"] == [f"job {array}_2 of Slurm"]
    # A requeue is of this task alone.
    place.slurm.call("scontrol", "requeue", f"{array}_0")
    wait_until(lambda: len(journal.read(open_store(str(place.run / first)))) >= 2)
    place.go()
    wait_until(lambda: place.slurm.call("squeue", "--noheader").stdout == "", 480)
    outcomes = {point["name"]: point["outcome"] for point in place.fab("sweep-status", "run")["points"]}
    assert outcomes == {first: "done", second: "done", third: "unfinished"}
    assert place.fab(*sweep)["ended_early"] == []
    again = place.fab(*sweep, "--resume")
    assert again["waiting"] == 0
    wait_until(lambda: {point["outcome"] for point in place.fab("sweep-status", "run")["points"]} == {"done"}, 480)
    (line, *_) = place.fab("logs", f"run/{second}", "--rank", "0")["lines"]
    assert line["text"].startswith("started: ")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--partition", "nope"], "sbatch: invalid partition specified: nope"),
        (["--nodes", "4", "--set", "train.global_batch=8"], "sbatch: Requested node configuration is not available"),
    ],
)
def test_what_slurm_does_not_have_is_one_line_and_leaves_nothing(place: Place, flags: list[str], line: str) -> None:
    refused = place.fab("train", "config.toml", "--on", "slurm", "--nproc", "1", *flags, check=False)
    assert refused["exit_code"] == EXIT_CONFIG
    assert refused["error"][0].startswith(line)
    assert not place.run.exists()


def test_run_grows_back_through_the_queue_when_its_node_returns(place: Place) -> None:
    job = place.train("--nodes", "1-2", "--grow-after", "0")
    place.committed()
    (first,) = place.records()
    victim = next(node for node in first["nodes"] if node != place.slurm.job(job)["BatchHost"])
    others = [node.name for node in place.slurm.workers if node.name not in first["nodes"]]
    for name in others:
        place.slurm.call("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")
    place.lab[victim].crash()
    wait_until(lambda: len(place.records()) == 2)
    place.slurm.wait({victim: "down"})
    place.lab[victim].boot()
    wait_until(lambda: "back to the queue for 2 nodes instead of 1" in place.log())
    place.go()
    assert place.ended(job) == "COMPLETED", place.log()
    records = place.records()
    assert [len(record["nodes"]) for record in records] == [2, 1, 2], (records, place.log())
    assert [record["code"] for record in records[1:]] == [EXIT_REQUEUE, EXIT_DONE]
    assert [record.get("grows_to") for record in records] == [None, 2, None]
    assert losses(place.run) == pytest.approx(undisturbed(shard=1), rel=1e-4)
