"""The journey's image: built by BuildKit, pushed to a registry, and trained in by its digest until `docker stop`.

Real here, where there is a container engine or this process may start one: the builder, the engine, the registry's protocol,
the packages, the container. Emulated: the registry's owner, and the base image, which is made of Debian's packages instead of
being pulled. Elsewhere the plan is printed: what would be built, from what.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

from images.build import answers, make
from images.build.engine import facts
from images.build.progress import Live
from images.flags import BuildFlags
from images.model import Image
from images.plan import changes
from images.registry import read
from images.registry.client import connect
from lustrain.problem import UserError
from lustrain.progress import BYTES, amount_text
from rehearsal.lab.containers.base import checkout, push_base
from rehearsal.lab.containers.container import Container, docker
from rehearsal.lab.containers.engine import Engine, reachable, why_not
from rehearsal.lab.containers.registry import Registry
from rehearsal.nodes import Scenario, at_end
from rehearsal.proof import Promise, Records, close_losses
from trainer.checkpoint.lineage.lease import committed
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.errors import EXIT_REQUEUE
from trainer.metrics.reader import read_steps
from trainer.storage import ObjectStore

TARGET = "cpu"
REPOSITORY = "rehearsal/trainer"
STOP_AT = 12
"""Enough steps to compare, one checkpoint among them; the rest of the run is trained outside."""
PATIENCE_S = 180.0
BUILT = "BuildKit, builder, verify.py, Debian's and Python's packages, registry protocol"
RAN = "container engine, read-only, no root; ranks, gloo; SIGTERM to process 1, exit code"


@dataclass(frozen=True)
class Run:
    """This is the run that is trained in the container, and the reference whose losses it must repeat."""

    config: Path
    settings: Mapping[str, str]
    ranks: int
    environment: Mapping[str, str]
    """Of its S3 clients."""
    store: ObjectStore
    reference: Records
    tolerance: float
    """Allowed relative difference of a loss."""
    notice_s: float


@dataclass
class ImageLab:
    """This is what a build needs: the environment of the engine's clients, a registry, a base image, a copy of the code."""

    environment: dict[str, str]
    registry: Registry
    base: str
    folder: Path
    image: Image | None = None


class Begun:
    """This is the build under way in the background, or `reason` why this machine cannot build."""

    def __init__(self, folder: Path, *, own: bool, reason: str | None) -> None:
        self._folder, self._own, self.reason = folder, own, reason
        self._running = ExitStack()
        self._stopped = Event()
        self._pool = ThreadPoolExecutor(1, "image")
        self._ended: Future[None] | None = None
        self.lab: ImageLab | None = None
        self._work = None if reason else self._pool.submit(self._build)

    def scenarios(self, run: Run) -> list[Scenario]:
        """Return the stages that this machine can run."""
        if self._work is None:
            reason = str(self.reason)
            plan = partial(show_plan, self._folder, reason)
            return [
                Scenario(
                    "the plan of the trainer's image", "versions, locks, plan", "no engine to build with", at_end(plan)
                )
            ]
        where = "engine of its own" if self._own else "this user's engine"
        emulated = f"registry on loopback, base by mmdebstrap ({where})"
        built = "the trainer's image: built beside the stages above, checked, pushed"
        trained = f"{run.ranks} ranks in a container of that digest, until docker stop"
        return [
            Scenario(built, BUILT, emulated, at_end(self._work.result)),
            Scenario(trained, RAN, "S3", at_end(lambda: train(self.lab, run))),
        ]

    def done(self) -> None:
        """Begin to end what runs for the build: an engine of our own has half a million files to take away."""
        self._ended = self._pool.submit(self._running.close)

    def end(self, *, at_once: bool = False) -> None:
        """End what runs for the build, once that is over or `at_once`: it then fails, as its engine is gone. Raises what failed
        in that, also since `done`."""
        try:
            if at_once:
                self._stopped.set()
                self._running.close()
        finally:
            self._pool.shutdown()
            self._running.close()
        if self._ended:
            self._ended.result()

    def _build(self) -> tuple[str, list[Promise]]:
        self.lab = self._running.enter_context(_image_lab(self._folder, self._own))
        # While the engine came up, there was nothing yet that `end` could take from a build.
        if self._stopped.is_set():
            raise RuntimeError("the journey has stopped")
        return build(self.lab)


@contextmanager
def begun(folder: Path) -> Iterator[Begun]:
    """Begin to build in the background, where this machine can: a builder that waits for packages leaves time to other stages,
    and they to it. An engine of our own ends with the context."""
    folder.mkdir()
    own = reachable() is None
    work = Begun(folder, own=own, reason=_why_not(own))
    try:
        yield work
    except BaseException:
        try:
            work.end(at_once=True)
        except (OSError, RuntimeError) as error:
            # Why the journey has stopped is what its user has to know first; an engine that Ctrl-C reached does not answer.
            print(f"   after the image's build: {error}", file=sys.stderr, flush=True)
        raise
    work.end()


def build(lab: ImageLab) -> tuple[str, list[Promise]]:
    """Build as `fab image-build --push` does, and check that the registry then holds what the builder reported."""
    root = checkout(lab.folder / "code")
    flags = build_flags(f"{lab.registry.host}/{REPOSITORY}", lab.base, lab.folder, push=True)
    try:
        # Lines that others' lines may come between; a bar would move them.
        with Live(f"image {TARGET}", terminal=False) as watch:
            result = make.build(flags, watch, lab.environment, root=root)
        lab.image = read.image(connect(result.prepared.ref), result.prepared.ref)
    except UserError as error:
        return f"failed: {error.problems[0]}", [Promise("the trainer's image can be built", False, error.problems[0])]
    image = lab.image
    size = f"{amount_text(image.size, BYTES)} in {len(image.layers)} layers"
    checked = any(step.stage == f"{TARGET}-verify" and not step.error for step in result.built.steps)
    promise = "the registry holds the image that was built and checked, by its digest"
    return f"{image.digest[:19]}…, {size}, in {result.built.seconds:.0f} s", [
        Promise(promise, checked and result.built.digest == image.digest, f"{image.digest[:19]}…, {size}")
    ]


def train(lab: ImageLab | None, run: Run) -> tuple[str, list[Promise]]:
    """Stop the run in a container as a scheduler does, and compare its losses with the reference's."""
    promise = "training in the container gives the losses it gives outside"
    if lab is None or lab.image is None:
        return "there is no image", [Promise(promise, False, "there is no image")]
    words = ["python3", "-m", "trainer.node.launcher", "--nproc", str(run.ranks), "--", "train", "/config.toml"]
    words += [word for key, value in run.settings.items() for word in ("--set", f"{key}={value}")]
    ref = f"{lab.registry.host}/{REPOSITORY}@{lab.image.digest}"
    container = Container(
        ref, words, environment=lab.environment, inside=run.environment, files={run.config: "/config.toml"}
    )
    try:
        _wait_for_step(container, run.store, STOP_AT)
        began = time.monotonic()
        code = container.stop()
        took = time.monotonic() - began
        if code != EXIT_REQUEUE:
            print(container.output()[-2000:], flush=True)
    finally:
        container.remove()
    seen, saved = read_steps(run.store), committed(run.store)
    trained = {record["step"] for record in seen}
    reference = [record for record in run.reference if record["step"] in trained]
    whole = bool(saved) and verify_checkpoint(run.store, saved[-1]).ok
    figure = f"exit {code} after {took:.1f} of {run.notice_s:.0f} s, {len(saved)} checkpoints"
    stopped = "docker stop ends in a committed checkpoint and exit 85, in time"
    kept = code == EXIT_REQUEUE and whole and took < run.notice_s
    at = f"step {saved[-1].step} committed" if saved else "nothing committed"
    return f"exit {code} {took:.1f} s after docker stop at step {len(seen)}, {at}", [
        close_losses(promise, reference, seen, run.tolerance),
        Promise(stopped, kept, figure),
    ]


def show_plan(folder: Path, reason: str) -> tuple[str, list[Promise]]:
    """Print what a machine with an engine would build."""
    with make.prepare(build_flags(f"localhost/{REPOSITORY}", None, folder)) as prepared:
        print("   would build " + "\n   ".join(answers.plan_lines(prepared)), flush=True)
        for layer, inputs in prepared.context.inputs.items():
            print(f"   layer {layer}: from {len(inputs)} files and arguments", flush=True)
        layers, tag = len(set(prepared.context.inputs) - set(changes.NEVER_PULLED)), prepared.ref.rpartition(":")[2]
    promises = []
    if os.environ.get("LUSTRAIN_REQUIRE") == "all":
        promises.append(Promise("an image can be built here (LUSTRAIN_REQUIRE=all)", False, reason))
    return f"{reason}; planned: {layers} layers of {tag}", promises


def build_flags(repository: str, base: str | None, folder: Path, *, push: bool = False) -> BuildFlags:
    """Return flags that build the image, recorded in `folder`; with `base`, no image is pulled and no torch index is used."""
    own = ("TORCH_CPU_LINKS=",) if base else ()
    file = str(folder / "image.json")
    return BuildFlags(TARGET, repository=repository, base=base, tools=base, arg=own, push=push, image_file=file)


@contextmanager
def _image_lab(folder: Path, own: bool) -> Iterator[ImageLab]:
    with ExitStack() as running:
        for name in ("engine", "registry"):
            (folder / name).mkdir()
        environment = reachable() or {}
        if own:
            environment = running.enter_context(Engine(folder / "engine")).environment
        registry = running.enter_context(Registry(folder / "registry"))
        base = push_base(environment, registry.host)
        running.callback(docker, environment, "image", "rm", "--force", base)
        yield ImageLab(environment, registry, base, folder)


def _why_not(own: bool) -> str | None:
    """Return the reason why this machine cannot build, in one line, or None."""
    if own:
        return why_not()
    missing = [name for name in ("docker-registry", "mmdebstrap") if not shutil.which(name)]
    if missing:
        return f"this user's engine answers, but there is no {' and no '.join(missing)}; fix: apt-get install them"
    try:
        engine = facts(reachable())
    except UserError as error:
        return error.problems[0]
    return None if engine.local else f"this user's engine at {engine.host} is not on this machine"


def _wait_for_step(container: Container, store: ObjectStore, step: int) -> None:
    """Wait until the run has logged `step`, the container has ended, or PATIENCE_S have passed; promises then show which."""
    end = time.monotonic() + PATIENCE_S
    while container.running() and time.monotonic() < end:
        seen = read_steps(store)
        if seen and seen[-1]["step"] >= step:
            return
        time.sleep(0.3)
