"""`fab image-plan`, `image-build`, `image-push`, `image-verify`, `image-diff`, `image-scan`, `image-lock`.

Imports of what a task does stand in it: every `fab` loads this file.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from images.flags import IMAGE_FILE, BuildFlags, ImageFlags
from lustrain.flags import JSON, flag, number
from lustrain.problem import DIFFERS
from lustrain.task import TaskResult, task


@task("image-plan")
def image_plan(flags: ImageFlags) -> TaskResult:
    """Print what would be built, which layers are new since image.json, and why. Needs no engine."""
    from images.build import answers, make

    with make.prepare(flags) as prepared:
        return TaskResult(answers.plan_lines(prepared), answers.plan(prepared))


@task("image-build")
def image_build(flags: BuildFlags) -> TaskResult:
    """Build the trainer's image, check it, and leave it in the engine or in a registry. Exit code: 1 where it failed."""
    from images.build import answers, make
    from images.build.progress import Live

    with Live(f"image {flags.target}") as watch:
        result = make.build(flags, watch)
    return TaskResult(answers.build_lines(result, flags.image_file), answers.build(result))


@task("image-push")
def image_push(flags: BuildFlags) -> TaskResult:
    """Push what image-build made, by digest, and write image.json. Every step comes from the builder's cache."""
    from images.build import answers, make
    from images.build.progress import Live
    from lustrain import image_file

    with Live(f"image {flags.target}") as watch:
        record = make.build(replace(flags, push=True), watch).record
    assert record is not None
    return TaskResult(answers.record_lines(record, flags.image_file), image_file.as_json(record))


@dataclass(frozen=True)
class VerifyFlags:
    ref: str | None = flag(None, "an image in a registry; else that of image.json")
    max_age: str = flag("90", "warn about an image older than this many days (90)")
    image_file: str = flag("image.json", IMAGE_FILE)
    json: bool = flag(False, JSON)


@task("image-verify")
def image_verify(flags: VerifyFlags) -> TaskResult:
    """Look at an image where it is, without pulling it: manifest, layers, labels, age, size. Exit code: 1 not in order."""
    from images.check import inspection
    from images.plan import versions
    from images.registry.client import connect
    from lustrain import image_file

    days = int(number("--max-age", flags.max_age, 0, 99_999))
    record = image_file.read(Path(flags.image_file)) if flags.ref is None else None
    # By its tag, so that one that stands for another image by now is noticed.
    ref = record.ref if record else str(flags.ref)
    report = inspection.verify(connect(ref), ref, record=record, oldest_days=days, budgets=versions.load().budgets)
    return TaskResult(inspection.lines(report), inspection.as_json(report), report.exit_code)


@dataclass(frozen=True)
class DiffFlags:
    a: str = flag(help="the image that nodes have")
    b: str = flag(help="the image that they shall run")
    platform: str | None = flag(None, "like linux/amd64, where an image has several")
    json: bool = flag(False, JSON)


@task("image-diff")
def image_diff(flags: DiffFlags) -> TaskResult:
    """List the layers that a node with image A pulls to run image B."""
    from images.check import diff
    from images.plan.references import parse
    from images.registry import read
    from images.registry.client import connect

    named = [parse(ref) for ref in (flags.a, flags.b)]
    difference = diff.diff(*(read.image(connect(ref), str(ref), flags.platform) for ref in named))
    return TaskResult(diff.lines(difference), diff.as_json(difference))


@dataclass(frozen=True)
class ScanFlags:
    ref: str | None = flag(None, "an image in ECR by digest; else that of image.json")
    threshold: str = flag(
        "HIGH", "the mildest severity that fails: CRITICAL, HIGH, MEDIUM, LOW or INFORMATIONAL (HIGH)"
    )
    allow: str | None = flag(
        None, "file with findings that are allowed, each with a reason and a last day (images/scan-allow.toml)"
    )
    image_file: str = flag("image.json", IMAGE_FILE)
    json: bool = flag(False, JSON)


@task("image-scan")
def image_scan(flags: ScanFlags) -> TaskResult:
    """Wait for ECR's scan of an image and judge its findings. Exit code: 1 not passed, also where there is no scan."""
    from images.check import scan
    from images.registry import ecr
    from lustrain import image_file

    scan.check_threshold(flags.threshold)
    allowed = scan.read_allowed(Path(flags.allow) if flags.allow else scan.ALLOWED)
    place = scan.EcrImage.of(flags.ref or image_file.read(Path(flags.image_file)).deployable)
    verdict = scan.gate(place, ecr.client(place.region), allowed, threshold=flags.threshold, say=_aside)
    return TaskResult(scan.lines(verdict), scan.as_json(verdict), verdict.exit_code)


@dataclass(frozen=True)
class LockFlags:
    check: bool = flag(False, "change nothing; say which lock is stale and why, exit code 4")
    upgrade: bool = flag(False, "take the newest versions that the constraints allow")
    links: str | None = flag(
        None, "page or folder with the CPU build of torch, in place of the one in images/versions.toml"
    )
    json: bool = flag(False, JSON)


@task("image-lock")
def image_lock(flags: LockFlags) -> TaskResult:
    """Write the hashed locks of what is installed in images, from pyproject.toml, images/versions.toml and constraints."""
    from images.plan import lock

    if flags.check:
        stale = lock.check()
        return TaskResult(stale or ["every lock is in order"], {"stale": stale}, DIFFERS if stale else 0)
    changed = lock.write_all(links=flags.links, upgrade=flags.upgrade, say=_aside)
    return TaskResult([f"written: {', '.join(changed)}" if changed else "nothing changed"], {"changed": changed})


def _aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


TASKS = (image_plan, image_build, image_push, image_verify, image_diff, image_scan, image_lock)
