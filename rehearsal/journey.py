"""The journey as one script: cluster → nodes → tokens in S3 → training → image → notice → node lost → resume → proof → end.

Real here: the Pulumi engine and its AWS provider where there is a CLI, the trainer, its ranks and writer processes, signals,
gloo between the ranks, the protocols of AWS over HTTP and of the instance metadata. Emulated: the AWS behind the endpoints
(infra.local), and the nodes: namespaces of this machine while they are set up (rehearsal.nodes), processes of it in training.
With `--slurm` the run that is interrupted trains on nodes of the lab, by the stack's own Slurm (rehearsal.scheduled).
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from infra.local.aws import LocalAws
from infra.local.metadata import LocalMetadata
from infra.preflight.offline import OFFLINE
from lustrain.problem import FAILED, Problem, UserError
from rehearsal import images, nodes, proof, scheduled, unscheduled
from rehearsal.channel import role_credentials
from rehearsal.clock import clock
from rehearsal.corpus import standard_library_sources
from rehearsal.provision import preflight, provision, tear_down, what_is_real
from rehearsal.stages import (
    CONFIG,
    EVERY_STEPS,
    INTERRUPTED,
    INTERRUPTIONS,
    NOTICE_S,
    OTHER_RANKS,
    OTHER_WORLD,
    RANKS,
    Journey,
    finish,
    newest,
    run_scenarios,
)
from rehearsal.teardown import Teardown
from rehearsal.watch import ALERT, LOOPBACK, TIME_SCALE, watch, why_not
from trainer.checkpoint.lineage.lease import committed
from trainer.checkpoint.load.export import export
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.environment import SILENT
from trainer.errors import EXIT_DONE
from trainer.metrics.goodput import useful_seconds
from trainer.metrics.reader import merge_steps, read_events, read_generations, read_steps
from trainer.node.launcher import LocalJob

TOLERANCE = 1e-4
"""Allowed relative difference of a loss after another order of summation in fp32, compounded over the steps."""


class StoppedError(Exception):
    """A stage has failed, or the journey was interrupted: `journey` is as far as it came, the cause is in `__cause__`."""

    def __init__(self, journey: Journey, cause: BaseException) -> None:
        super().__init__(journey.at)
        self.journey = journey
        self.exit_code = cause.exit_code if isinstance(cause, UserError) else FAILED
        self.expected = isinstance(cause, (UserError, KeyboardInterrupt))
        """Whether the problems say it all; else its traceback does."""
        if isinstance(cause, UserError):
            whys: Sequence[str] = cause.problems
        elif isinstance(cause, KeyboardInterrupt):
            whys = ["stopped by Ctrl-C"]
        else:
            whys = [next(iter(str(cause).splitlines()), type(cause).__name__)]
        self.problems = [Problem(f"stage {len(journey.stages) + 1}, {journey.at}: {why}") for why in whys]


def run_journey(steps: int, seed: int, picture: Path, *, slurm: bool = False) -> Journey:
    """Run all stages; every promise is in `promises`, kept or not. With `slurm`, `scheduled.why_not` has to be None.

    StoppedError where not all stages could be run to their end.
    """
    with Teardown() as down:
        name = down.enter("the temporary folder", tempfile.TemporaryDirectory(prefix="lustrain-rehearsal-"))
        aws = down.enter("the embedded AWS", LocalAws())
        metadata = down.enter("the metadata service", LocalMetadata())
        tuned = down.enter("the nodes", nodes.begun(Path(name, "nodes")))
        image = down.enter("the image's build", images.begun(Path(name, "images")))
        endpoints = {**aws.environment, **metadata.environment}
        # One thread a rank, also where there is one rank: two ranks share two cores, and sums should be taken alike.
        threads = {"OMP_NUM_THREADS": "1"}
        # All ranks share this machine: one that it does not let run for some seconds is not lost.
        patience = {SILENT: "60"}
        environment: dict[str, str] = {
            **os.environ, **endpoints, **threads, **patience, "LUSTRAIN_CACHE": f"{name}/cache"
        }  # fmt: skip
        os.environ.update(endpoints)
        journey = Journey(steps, random.Random(seed), Path(name), environment, aws, metadata, slurm)
        ranks = ExitStack()
        ranks.callback(journey.end_jobs)
        down.enter("the ranks", ranks)
        try:
            bring_up(journey)
            with down.part("the nodes of Slurm", scheduled.begun(journey)) as stack:
                set_up_nodes(journey, tuned)
                tokenize(journey)
                reference(journey)
                train_in_container(journey, image)
                interrupt(journey, stack)
            prove(journey)
            plot_run(journey, picture)
            take_down(journey)
        except BaseException as error:
            raise StoppedError(journey, error) from error
        return journey


def bring_up(journey: Journey) -> None:
    """Bring up the cluster that every later stage uses, and take the credentials of its nodes."""
    real, emulated = what_is_real()
    with journey.stage("pulumi up of the rehearsal stack", real=real, emulated=emulated) as stage:
        errors = preflight()
        journey.promise(
            "preflight finds no error", not errors, errors[0] if errors else f"{len(OFFLINE)} offline rules"
        )
        provisioned = provision(journey.folder / "pulumi", journey.environment, slurm=journey.slurm)
        stage["outcome"] = provisioned.outcome
        journey.provisioned = provisioned
        journey.environment.update(role_credentials(provisioned.cluster))
        if provisioned.engine:
            journey.promise("a second preview changes nothing", provisioned.stable, provisioned.outcome)


def set_up_nodes(journey: Journey, tuned: Future[list[nodes.Scenario]]) -> None:
    """Tell how nodes were tuned over SSH, one replaced, all verified; without root only this machine was read."""
    journey.at = "nodes"
    with clock():
        over = tuned.result()
    run_scenarios(journey, over)


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


def train_in_container(journey: Journey, image: images.Begun) -> None:
    """Have the image built and pushed, and train the reference's first steps in it; without an engine, plan it."""
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
    run_scenarios(journey, image.scenarios(run))
    image.done()


def interrupt(journey: Journey, stack: scheduled.StackSlurm | None) -> None:
    """Train the run that is interrupted twice, and look back at it."""
    hosts, ranks = (stack.hosts, 1) if stack else ([LOOPBACK], RANKS)
    with watch(journey.folder / "watch", INTERRUPTED, hosts, ranks) as journey.watch:
        other: LocalJob | None = None

        def at_rest() -> None:
            nonlocal other
            copy_run(journey, INTERRUPTED, OTHER_WORLD)
            # Slurm and new machines leave the cores time, the ranks of this machine none.
            if stack:
                other = journey.train(OTHER_WORLD, OTHER_RANKS)

        if stack:
            stack.train(at_rest)
        else:
            unscheduled.train(journey, at_rest)
        resume_with_other_ranks(journey, other)
        look_back(journey)


def resume_with_other_ranks(journey: Journey, begun: LocalJob | None) -> None:
    beside = "; begun before a node was lost" if begun else ""
    title = f"resume from a copy of the run, with {OTHER_RANKS} rank instead of {RANKS}{beside}"
    with journey.stage(title, real="verified load, resharding", emulated="S3") as stage:
        job = begun or journey.train(OTHER_WORLD, OTHER_RANKS)
        stage["outcome"] = finish(journey, OTHER_WORLD, job)


def look_back(journey: Journey) -> None:
    """Compare the goodput of the run that was interrupted with the planner's, and take its alerts from Prometheus."""
    missing = why_not()
    real = "records, planner" if missing else "records, planner, Prometheus with the alert rules, their times shorter"
    with journey.stage("goodput and alerts of the run", real=real, emulated="–") as stage:
        store, reference = journey.store(INTERRUPTED), journey.store("reference")
        generations = read_generations(store)
        steps = merge_steps(generations)
        pace = proof.pace(read_steps(reference), read_events(reference), journey.started["reference"])
        began = journey.started[INTERRUPTED]
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
        names = ("reference", INTERRUPTED, OTHER_WORLD)
        stores = {name: journey.store(name) for name in names}
        steps = {name: read_steps(store) for name, store in stores.items()}
        events = {name: read_events(store) for name, store in stores.items()}
        expected = steps["reference"]
        close = f"another world size: the same losses up to the order of summation (allowed {TOLERANCE:.0e})"
        journey.promises += [
            proof.same_losses(expected, steps[INTERRUPTED]),
            proof.same_batches(expected, steps[INTERRUPTED], "interrupted twice: identical batches"),
            proof.same_batches(expected, steps[OTHER_WORLD], "another world size: identical batches"),
            proof.same_weights_at_load(events[INTERRUPTED], events[OTHER_WORLD]),
            proof.close_losses(close, expected, steps[OTHER_WORLD], TOLERANCE),
        ]
        expected_weights, weights = (final_weights(journey, name) for name in ("reference", INTERRUPTED))
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
        began = journey.started[INTERRUPTED]
        draw_run(journey.store(INTERRUPTED), picture, began=began, alerts=journey.firings)
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
        before = {name: committed(journey.store(name)) for name in ("reference", INTERRUPTED)}
        gone, stays = tear_down(provisioned.engine)
        stage["outcome"] = f"{gone} resources gone; protected: {', '.join(stays)}"
        after = {name: committed(journey.store(name)) for name in before}
        count = sum(map(len, after.values()))
        journey.promise("the teardown leaves every checkpoint", before == after and count > 0, f"{count} still there")


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
