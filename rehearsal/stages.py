"""What the journey's stages share: the report's lines, promises, the cluster and the runs."""

from __future__ import annotations

import random
import signal
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from infra.local.aws import LocalAws
from infra.local.metadata import LocalMetadata
from lustrain.cluster import Cluster
from rehearsal import hold
from rehearsal.clock import clock
from rehearsal.nodes import Scenario, collect
from rehearsal.proof import Promise
from rehearsal.provision import Provisioned
from rehearsal.watch import Watch
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.lease import committed
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.metrics.alerts import Firing
from trainer.metrics.reader import read_steps
from trainer.node.launcher import LocalJob
from trainer.storage import ObjectStore, open_store

CONFIG = Path(__file__).with_name("config.toml")
_SETTINGS = tomllib.loads(CONFIG.read_text())
EVERY_STEPS, EVALUATED_EVERY = int(_SETTINGS["checkpoint"]["every_steps"]), int(_SETTINGS["eval"]["every"])
RANKS, OTHER_RANKS = 2, 1
INTERRUPTIONS = 2
"""A notice and a lost node."""
NOTICE_S = 120.0
"""A spot notice comes this long before the end:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
INTERRUPTED = "interrupted"
"""The run that gets a notice and loses a node."""
OTHER_WORLD = "other-world"
"""A copy of it, which goes on with OTHER_RANKS."""


@dataclass(frozen=True)
class Stage:
    """One line of the report."""

    name: str
    real: str
    emulated: str
    seconds: float
    outcome: str


@dataclass
class Journey:
    """State that the stages share."""

    steps: int
    rng: random.Random
    folder: Path
    environment: dict[str, str]
    aws: LocalAws
    metadata: LocalMetadata
    slurm: bool = False
    """Whether the run that is interrupted trains by the stack's Slurm, on nodes of the lab."""
    provisioned: Provisioned | None = None
    stages: list[Stage] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    at: str = "start"
    """The stage that is under way or was the last one."""
    jobs: list[LocalJob] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    """When each run was first started, in Unix seconds."""
    noticed: float = 0.0
    """When the notice came, in Unix seconds."""
    watch: Watch | None = None
    """The Prometheus that scrapes the run that is interrupted."""
    firings: list[Firing] | None = None
    """Alerts about that run, once the journey is over; None without a Prometheus that saw it."""

    @property
    def cluster(self) -> Cluster:
        """Return the Cluster that the first stage brought up; every later stage starts from it."""
        if self.provisioned is None:
            raise RuntimeError("the cluster is not there yet")
        return self.provisioned.cluster

    @property
    def data_uri(self) -> str:
        return f"s3://{self.cluster.buckets.data}/stdlib"

    def run_uri(self, name: str) -> str:
        return f"{self.cluster.runs_uri}{name}"

    def store(self, name: str) -> ObjectStore:
        return open_store(self.run_uri(name))

    def promise(self, text: str, kept: bool, figure: str) -> None:
        self.promises.append(Promise(text, kept, figure))

    def draw_notice(self) -> int:
        """Return the step around which the notice comes."""
        return self.rng.randrange(self.steps // 6, self.steps // 3)

    def draw_loss(self, notice_at: int) -> int:
        """Return the step around which a node is lost: after the first save since the notice."""
        first_save = (notice_at // EVERY_STEPS + 1) * EVERY_STEPS
        return self.rng.randrange(first_save + 3, max(first_save + 4, self.steps * 3 // 4))

    def promise_notice_saved(self, code: int, took_s: float, saved: int, at: int) -> None:
        """Promise what a notice ends in: the launch ended with `code` after `took_s`, with step `saved` committed."""
        self.promise(
            "a notice ends in a committed checkpoint and exit 85, in time",
            code == EXIT_REQUEUE and saved >= at and took_s < NOTICE_S,
            f"exit {code} after {took_s:.1f} of {NOTICE_S:.0f} s",
        )

    @contextmanager
    def stage(self, name: str, *, real: str, emulated: str) -> Iterator[dict[str, str]]:
        """Announce a stage, time it, and keep its line; the body fills in `outcome`."""
        self.at = name
        print(f"\n── {len(self.stages) + 1}. {name}", flush=True)
        stage: dict[str, str] = {}
        began = time.monotonic()
        with clock():
            yield stage
        seconds = time.monotonic() - began
        print(f"   {stage['outcome']}  ({seconds:.0f} s)", flush=True)
        self.stages.append(Stage(name, real, emulated, seconds, stage["outcome"]))

    def settings(self, name: str) -> dict[str, str]:
        """Return what the run of that name adds to the config."""
        task = {"task.name": hold.NAME} if self.slurm and name in (INTERRUPTED, OTHER_WORLD) else {}
        return {"run.uri": self.run_uri(name), "task.data": self.data_uri, "train.steps": str(self.steps), **task}

    def train(self, name: str, ranks: int) -> LocalJob:
        watched = self.watch.settings if self.watch and self.watch.run == name else {}
        settings = {**self.settings(name), **watched}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self.started.setdefault(name, time.time())
        job = LocalJob(["train", str(CONFIG), *words], ranks, self.environment)
        self.jobs.append(job)
        return job

    def end_jobs(self) -> None:
        """Kill what still trains, before its store goes away: the rehearsal was stopped, or a stage has failed."""
        for job in self.jobs:
            job.send(signal.SIGKILL)
            job.wait()


def newest_step(journey: Journey) -> int:
    """Return the last step that the run has logged which is interrupted; 0 for none."""
    seen = read_steps(journey.store(INTERRUPTED))
    return int(seen[-1]["step"]) if seen else 0


def run_scenarios(journey: Journey, scenarios: Iterable[Scenario]) -> None:
    for scenario in scenarios:
        with journey.stage(scenario.name, real=scenario.real, emulated=scenario.emulated) as stage:
            stage["outcome"] = collect(scenario.run(), journey.promises)


def finish(journey: Journey, name: str, job: LocalJob) -> str:
    """Wait for the end of a job that trains the run of that name, and promise that the run is done; returns the outcome."""
    code = job.wait()
    last = read_steps(journey.store(name))[-1]
    journey.promise(
        f"{name}: resumed and finished",
        code == EXIT_DONE and last["step"] == journey.steps,
        f"exit {code}, step {last['step']}",
    )
    return f"exit {code}, step {last['step']}, loss {last['loss']:.3f}"


def newest(store: ObjectStore) -> ManifestId:
    return committed(store)[-1]
