"""The journey as one script: cluster → nodes → tokens in S3 → training → image → notice → node lost → resume → proof → end.

Real here: the Pulumi engine and its AWS provider where there is a CLI, the trainer, its ranks and writer processes, signals,
gloo between the ranks, the protocols of AWS over HTTP and of the instance metadata. Emulated: the AWS behind the endpoints
(infra.local), and the nodes: namespaces of this machine while they are set up (rehearsal.nodes), processes of it in training.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from infra.local.aws import LocalAws
from infra.local.metadata import LocalMetadata
from infra.preflight.offline import OFFLINE
from lustrain.cluster import Cluster
from rehearsal import images, nodes, proof
from rehearsal.channel import notice_arrived, role_credentials
from rehearsal.clock import clock
from rehearsal.corpus import standard_library_sources
from rehearsal.proof import Promise
from rehearsal.provision import Provisioned, first_node, preflight, provision, tear_down, what_is_real
from rehearsal.watch import ALERT, TIME_SCALE, Watch, watch, why_not
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.lease import committed
from trainer.checkpoint.load.export import export
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.environment import SILENT
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.metrics.alerts import Firing
from trainer.metrics.goodput import useful_seconds
from trainer.metrics.reader import merge_steps, read_events, read_generations, read_steps
from trainer.node.launcher import LocalJob
from trainer.storage import ObjectStore, open_store

CONFIG = Path(__file__).with_name("config.toml")
EVERY_STEPS = int(tomllib.loads(CONFIG.read_text())["checkpoint"]["every_steps"])
RANKS, OTHER_RANKS = 2, 1
INTERRUPTIONS = 2
"""A notice and a lost node."""
NOTICE_S = 120.0
"""A spot notice comes this long before the end:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
TOLERANCE = 1e-4
"""Allowed relative difference of a loss after another order of summation in fp32, compounded over the steps."""


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
    provisioned: Provisioned | None = None
    stages: list[Stage] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
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

    @contextmanager
    def stage(self, name: str, *, real: str, emulated: str) -> Iterator[dict[str, str]]:
        """Announce a stage, time it, and keep its line; the body fills in `outcome`."""
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
        return {"run.uri": self.run_uri(name), "task.data": self.data_uri, "train.steps": str(self.steps)}

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


def run_journey(steps: int, seed: int, picture: Path) -> Journey:
    """Run all stages; every promise is in `promises`, kept or not."""
    with (
        tempfile.TemporaryDirectory(prefix="lustrain-rehearsal-") as name,
        LocalAws() as aws,
        LocalMetadata() as metadata,
        images.prefetch_image_parts(),
    ):
        endpoints = {**aws.environment, **metadata.environment}
        # One thread a rank, also where there is one rank: two ranks share two cores, and sums should be taken alike.
        threads = {"OMP_NUM_THREADS": "1"}
        # All ranks share this machine: one that it does not let run for some seconds is not lost.
        patience = {SILENT: "60"}
        environment: dict[str, str] = {
            **os.environ, **endpoints, **threads, **patience, "LUSTRAIN_CACHE": f"{name}/cache"
        }  # fmt: skip
        os.environ.update(endpoints)
        journey = Journey(steps, random.Random(seed), Path(name), environment, aws, metadata)
        try:
            bring_up(journey)
            set_up_nodes(journey)
            tokenize(journey)
            reference(journey)
            train_in_container(journey)
            with watch(journey.folder / "watch", "interrupted", RANKS) as journey.watch:
                notice_at = interrupt_by_notice(journey)
                kill_all_ranks(journey, notice_at)
                copy_run(journey, "interrupted", "other-world")
                resume_run(journey)
                resume_with_other_ranks(journey)
                look_back(journey)
            prove(journey)
            plot_run(journey, picture)
            take_down(journey)
        finally:
            journey.end_jobs()
        return journey


def bring_up(journey: Journey) -> None:
    """Bring up the cluster that every later stage uses, and take the credentials of its nodes."""
    real, emulated = what_is_real()
    with journey.stage("pulumi up of the rehearsal stack", real=real, emulated=emulated) as stage:
        errors = preflight()
        journey.promise(
            "preflight finds no error", not errors, errors[0] if errors else f"{len(OFFLINE)} offline rules"
        )
        provisioned = provision(journey.folder / "pulumi", journey.environment)
        stage["outcome"] = provisioned.outcome
        journey.provisioned = provisioned
        journey.environment.update(role_credentials(provisioned.cluster))
        if provisioned.engine:
            journey.promise("a second preview changes nothing", provisioned.stable, provisioned.outcome)


def set_up_nodes(journey: Journey) -> None:
    """Tune nodes over SSH, replace one, verify all; without root only read this machine."""
    with nodes.scenarios(journey.folder / "nodes") as scenarios:
        run_scenarios(journey, scenarios)


def run_scenarios(journey: Journey, scenarios: Iterable[nodes.Scenario]) -> None:
    for scenario in scenarios:
        with journey.stage(scenario.name, real=scenario.real, emulated=scenario.emulated) as stage:
            stage["outcome"], promises = scenario.run()
            journey.promises += promises


def tokenize(journey: Journey) -> None:
    with journey.stage("text to token shards in S3", real="tokenizer, S3 protocol", emulated="S3") as stage:
        listing = journey.folder / "sources.txt"
        sources = standard_library_sources()
        listing.write_text("\n".join(map(str, sources)))
        words = ["tokenize", *map(str, sources), "--out", journey.data_uri]
        words += ["--tokenizer", "train:2048", "--val-fraction", "0.05", "--shard-mib", "4"]
        code = LocalJob(words, 1, journey.environment).wait()
        megabytes = sum(path.stat().st_size for path in sources) / 1e6
        stage["outcome"] = f"{len(sources)} files, {megabytes:.1f} MB of Python sources, exit {code}"
        journey.promise("tokenize exits 0", code == EXIT_DONE, f"exit {code}")


def reference(journey: Journey) -> None:
    with journey.stage(
        f"reference: {RANKS} ranks, never interrupted", real="ranks, gloo, S3 protocol", emulated="S3"
    ) as stage:
        code = journey.train("reference", RANKS).wait()
        seen = read_steps(journey.store("reference"))
        stage["outcome"] = f"exit {code}, {len(seen)} steps, loss {seen[0]['loss']:.3f} → {seen[-1]['loss']:.3f}"
        journey.promise(
            "the reference exits 0 with all steps", code == EXIT_DONE and len(seen) == journey.steps, f"exit {code}"
        )


def train_in_container(journey: Journey) -> None:
    """Build and push the image, and train the reference's first steps in it; without an engine, plan it."""
    run = images.Run(
        config=CONFIG,
        settings=journey.settings("container"),
        ranks=RANKS,
        environment={
            name: value for name, value in journey.environment.items() if name.startswith(("AWS_", "OMP_", SILENT))
        },
        store=journey.store("container"),
        reference=read_steps(journey.store("reference")),
        tolerance=TOLERANCE,
        notice_s=NOTICE_S,
    )
    with images.scenarios(journey.folder / "images", run) as scenarios:
        run_scenarios(journey, scenarios)


def interrupt_by_notice(journey: Journey) -> int:
    """Attempt 1: a spot notice at a random step; returns the step that was saved."""
    at = journey.rng.randrange(journey.steps // 6, journey.steps // 3)
    title = f"attempt 1: spot notice around step {at}, to the node and to the event bus"
    real = "IMDSv2 protocol, save, commit, exit code; EventBridge rule to SQS where the stack is up"
    with journey.stage(title, real=real, emulated="EC2, metadata service, S3") as stage:
        job = journey.train("interrupted", RANKS)
        wait_for_step(journey, job, at)
        if journey.watch:
            journey.watch.before_notice(lambda: job.running() and newest_step(journey) < journey.steps // 2)
        journey.noticed, noticed = time.time(), time.monotonic()
        node = take_by_spot(journey)
        code = job.wait()
        took = time.monotonic() - noticed
        if journey.watch:
            journey.watch.after_notice()
        journey.metadata.clear()
        saved = newest(journey.store("interrupted")).step
        if journey.provisioned and journey.provisioned.engine:
            arrived = bool(node) and notice_arrived(journey.cluster, node)
            figure = f"spot interruption of {node}" if node else "the cluster has no node in service"
            journey.promise("the notice is in the interruption queue", arrived, figure)
        stage["outcome"] = f"exit {code} {took:.1f} s after the notice, step {saved} committed"
        kept = code == EXIT_REQUEUE and saved >= at and took < NOTICE_S
        journey.promise(
            "a notice ends in a committed checkpoint and exit 85, in time",
            kept,
            f"exit {code} after {took:.1f} of {NOTICE_S:.0f} s",
        )
        return saved


def take_by_spot(journey: Journey) -> str:
    """Announce the end of one of the cluster's nodes as EC2 does: to the node and to the event bus; returns its id, empty
    where the cluster is on a mock monitor and has no nodes."""
    node = first_node(journey.cluster)
    if node:
        journey.aws.events.spot(node, in_s=NOTICE_S, metadata=journey.metadata.control)
    else:
        journey.metadata.spot_notice(in_s=NOTICE_S)
    return node


def kill_all_ranks(journey: Journey, notice_at: int) -> None:
    """Attempt 2: resumes, then every process of the job dies at once, without any notice."""
    first_save = (notice_at // EVERY_STEPS + 1) * EVERY_STEPS
    at = journey.rng.randrange(first_save + 3, max(first_save + 4, journey.steps * 3 // 4))
    title = f"attempt 2: node lost around step {at} (SIGKILL, no notice)"
    with journey.stage(title, real="resume, SIGKILL", emulated="S3") as stage:
        job = journey.train("interrupted", RANKS)
        wait_for_step(journey, job, at)
        job.send(signal.SIGKILL)
        code = job.wait()
        store = journey.store("interrupted")
        last_seen, left = read_steps(store)[-1]["step"], newest(store)
        stage["outcome"] = (
            f"all ranks dead (job exit {code}) after step {last_seen}; newest checkpoint: step {left.step}"
        )
        journey.promises.append(proof.lost_at_most(EVERY_STEPS, last_seen, left.step))


def resume_run(journey: Journey) -> None:
    title = f"attempt 3: resume on new capacity, {RANKS} ranks, to the end"
    with journey.stage(title, real="verified load, resume", emulated="S3") as stage:
        stage["outcome"] = finish(journey, "interrupted", RANKS)
        if journey.watch:
            journey.watch.at_end()


def resume_with_other_ranks(journey: Journey) -> None:
    title = f"attempt 3 again, from a copy of the run, with {OTHER_RANKS} rank instead of {RANKS}"
    with journey.stage(title, real="verified load, resharding", emulated="S3") as stage:
        stage["outcome"] = finish(journey, "other-world", OTHER_RANKS)


def finish(journey: Journey, name: str, ranks: int) -> str:
    code = journey.train(name, ranks).wait()
    last = read_steps(journey.store(name))[-1]
    journey.promise(
        f"{name}: resumed and finished",
        code == EXIT_DONE and last["step"] == journey.steps,
        f"exit {code}, step {last['step']}",
    )
    return f"exit {code}, step {last['step']}, loss {last['loss']:.3f}"


def look_back(journey: Journey) -> None:
    """Compare the goodput of the run that was interrupted with the planner's, and take its alerts from Prometheus."""
    missing = why_not()
    real = "records, planner" if missing else "records, planner, Prometheus with the alert rules, their times shorter"
    with journey.stage("goodput and alerts of the run", real=real, emulated="–") as stage:
        store, reference = journey.store("interrupted"), journey.store("reference")
        generations = read_generations(store)
        steps = merge_steps(generations)
        pace = proof.pace(read_steps(reference), read_events(reference), journey.started["reference"])
        began = journey.started["interrupted"]
        seconds = datetime.fromisoformat(steps[-1]["time"]).timestamp() - began
        useful_s = useful_seconds(generations[number] for number in sorted(generations))
        planned = proof.planned_goodput(pace, journey.steps, EVERY_STEPS, seconds / INTERRUPTIONS)
        parts = [
            f"goodput {useful_s / seconds:.0%} measured, {planned:.0%} planned for {INTERRUPTIONS} losses without notice"
        ]
        watched = journey.watch
        missing = watched.why_blind() if watched else missing
        if watched and missing is None:
            journey.firings = watched.firings(began)
            came = proof.alert_came_and_went(
                ALERT, journey.firings, journey.noticed, fired=watched.fired, went=watched.went
            )
            journey.promises.append(came)
            parts.append(f"{ALERT} (times x {TIME_SCALE:.4f}) {came.figure}")
        else:
            parts.append(f"no alerts: {missing}")
        stage["outcome"] = "; ".join(parts)


def prove(journey: Journey) -> None:
    """Compare the histories and the final weights, and verify every byte of every checkpoint that is left."""
    with journey.stage("proof", real="every byte read back and verified", emulated="S3") as stage:
        names = ("reference", "interrupted", "other-world")
        stores = {name: journey.store(name) for name in names}
        steps = {name: read_steps(store) for name, store in stores.items()}
        events = {name: read_events(store) for name, store in stores.items()}
        expected = steps["reference"]
        close = f"another world size: the same losses up to the order of summation (allowed {TOLERANCE:.0e})"
        journey.promises += [
            proof.same_losses(expected, steps["interrupted"]),
            proof.same_batches(expected, steps["interrupted"], "interrupted twice: identical batches"),
            proof.same_batches(expected, steps["other-world"], "another world size: identical batches"),
            proof.same_weights_at_load(events["interrupted"], events["other-world"]),
            proof.close_losses(close, expected, steps["other-world"], TOLERANCE),
        ]
        expected_weights, weights = (final_weights(journey, name) for name in ("reference", "interrupted"))
        size = f"{len(weights)} tensors, {sum(map(len, weights.values())):,} bytes compared"
        journey.promise("interrupted twice: the same final weights to the last bit", weights == expected_weights, size)
        checked = [verify_checkpoint(store, item) for store in stores.values() for item in committed(store)]
        whole = sum(report.ok for report in checked)
        journey.promise(
            "every checkpoint in S3 verifies", whole == len(checked) > 0, f"{whole} of {len(checked)} whole"
        )
        broken = [promise.text for promise in journey.promises if not promise.kept]
        stage["outcome"] = f"{len(journey.promises) - len(broken)} of {len(journey.promises)} promises kept"


def final_weights(journey: Journey, name: str) -> dict[str, bytes]:
    """Return every tensor of the safetensors export of a run's newest checkpoint."""
    store, folder = journey.store(name), journey.folder / f"export-{name}"
    export(store, newest(store), folder, {})
    files = sorted(folder.glob("*.safetensors"))
    return {tensor: array.tobytes() for path in files for tensor, array in load_file(path).items()}


def plot_run(journey: Journey, picture: Path) -> None:
    from trainer.metrics.plot import draw_run

    with journey.stage("plot", real="matplotlib", emulated="–") as stage:
        began = journey.started["interrupted"]
        draw_run(journey.store("interrupted"), picture, began=began, alerts=journey.firings)
        stage["outcome"] = f"{picture.stat().st_size:,} bytes"


def take_down(journey: Journey) -> None:
    """Destroy, with an engine, what costs by the hour, and keep what holds the run."""
    provisioned = journey.provisioned
    if provisioned is None or provisioned.engine is None:
        print("\nno teardown: without an engine there is no stack to take down", flush=True)
        return
    with journey.stage(
        "pulumi destroy --exclude-protected", real="Pulumi engine, AWS provider", emulated="AWS"
    ) as stage:
        before = {name: committed(journey.store(name)) for name in ("reference", "interrupted")}
        gone, stays = tear_down(provisioned.engine)
        stage["outcome"] = f"{gone} resources gone; protected: {', '.join(stays)}"
        after = {name: committed(journey.store(name)) for name in before}
        count = sum(map(len, after.values()))
        journey.promise("the teardown leaves every checkpoint", before == after and count > 0, f"{count} still there")


def wait_for_step(journey: Journey, job: LocalJob, step: int) -> None:
    """Wait until the run has logged `step` or the job has ended before it, which the promises then show."""
    while job.running():
        seen = read_steps(journey.store("interrupted"))
        attempt = max((int(record["attempt"]) for record in seen), default=0)
        if seen and seen[-1]["step"] >= step and attempt:
            return
        time.sleep(0.3)


def newest_step(journey: Journey) -> int:
    seen = read_steps(journey.store("interrupted"))
    return int(seen[-1]["step"]) if seen else 0


def newest(store: ObjectStore) -> ManifestId:
    return committed(store)[-1]


def copy_run(journey: Journey, source: str, target: str) -> None:
    """Copy every object of a run under another name, so that both can go on from the same state."""
    origin, copy = journey.store(source), journey.store(target)
    for info in origin.list():
        copy.put(info.key, origin.read(info.key)[0])


def as_dict(journey: Journey) -> dict[str, Any]:
    """Return the outcome for programs."""
    return {
        "kept": all(promise.kept for promise in journey.promises),
        "promises": [
            {"claim": promise.text, "kept": promise.kept, "figure": promise.figure} for promise in journey.promises
        ],
        "stages": [vars(stage) for stage in journey.stages],
    }
