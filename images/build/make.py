"""From flags to image.json: stage the context, plan, build, push, record. Every function may raise UserError."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from images.build import builder
from images.build.bake import Bake
from images.check import content
from images.flags import BuildFlags, ImageFlags
from images.model import BuildObserver, Built, Context, Image, Output, Plan
from images.plan import changes, context, git_state, plan, versions
from images.plan.versions import Versions
from images.registry import read
from images.registry.client import connect
from lustrain import deployed, image_file
from lustrain.image_file import GitState, ImageRecord
from lustrain.problem import UserError, problem

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class PreparedBuild:
    """A plan with its staged context, the state of git, and what differs from the image that was pushed last."""

    plan: Plan
    git: GitState
    versions: Versions
    context: Context
    rebuilds: tuple[changes.Rebuild, ...]

    @property
    def ref(self) -> str:
        return self.plan.tags[0]


@dataclass(frozen=True)
class BuildResult:
    """A finished build; `record` is set once the image has its tag in a registry."""

    prepared: PreparedBuild
    built: Built
    record: ImageRecord | None = None


def resolve_repository(flags: ImageFlags) -> ImageFlags:
    """Return the flags with a repository: the one given, else the Cluster's, else none."""
    if flags.repository is not None:
        return flags
    cluster = deployed.cluster(flags.cluster, flags.stack)
    if cluster is None:
        return flags
    if cluster.image_repository is None:
        fix = "give the stack one and `pulumi up`, or --repository registry/name"
        raise UserError(problem("cluster.image_repository", None, f"{cluster.name} has none", fix=fix))
    return replace(flags, repository=cluster.image_repository, cluster=None, stack=None)


@contextmanager
def prepare(flags: ImageFlags, *, root: Path = ROOT, pushing: bool = False) -> Iterator[PreparedBuild]:
    """Yield the plan for the checkout at `root`; its staged context is deleted at the end of the block."""
    flags = resolve_repository(flags)
    shared = {field.name: getattr(flags, field.name) for field in fields(ImageFlags)}
    build = flags if isinstance(flags, BuildFlags) else BuildFlags(**shared)
    plan.check(build)
    if pushing and flags.repository is None:
        where = (
            "--repository registry/name, or --cluster FILE or --stack NAME of a cluster that has an image repository"
        )
        raise UserError(f"there is nowhere to push to; fix: give {where}")
    known = versions.load(root / context.VERSIONS)
    last = image_file.read(flags.file) if flags.file.exists() else None
    if pushing and last and last.target != flags.target:
        fix = f"--image-file image-{flags.target}.json, or move it away"
        raise UserError(problem(str(flags.file), last.target, f"records an image for {last.target}", fix=fix))
    # A folder of its own for each build: BuildKit takes a file for unchanged that has the path, size and time of the last one.
    with tempfile.TemporaryDirectory(prefix="lustrain-image-") as folder:
        staged = context.stage(root, flags.target, plan.arguments_of(build, known), Path(folder))
        git = git_state.read(root, context.sources(root, flags.target), context.enters)
        made = plan.make(build, known, git, staged.inputs)
        same = last if last and last.target == flags.target else None
        yield PreparedBuild(made, git, known, staged, tuple(changes.reasons(same, staged.inputs)))


def build(
    flags: BuildFlags, watch: BuildObserver, environment: Mapping[str, str] | None = None, *, root: Path = ROOT
) -> BuildResult:
    """Build and check the image. With `push` it gets a tag that no other image has, and the record is written.

    `environment` (else this process's) names the engine; registry credentials are read from this process's."""
    if flags.push and not flags.file.parent.is_dir():
        fix = "make it, or name another"
        raise UserError(problem("--image-file", str(flags.file), "there is no such folder", fix=fix))
    output, verify = Output.PUSH if flags.push else Output.LOAD, not flags.no_verify
    with prepare(flags, root=root, pushing=flags.push) as prepared:
        built = builder.build(
            prepared.plan, prepared.context, Bake(environment), output=output, verify=verify, watch=watch
        )
        record = _record_push(prepared, built.digest, flags.file) if flags.push and built.digest else None
        return BuildResult(prepared, built, record)


def _check_inputs(prepared: PreparedBuild, image: Image) -> None:
    """Refuse an image in the registry that was built from other inputs than this checkout has."""
    inner = image.config.get("config")
    labels = (inner.get("Labels") if isinstance(inner, dict) else None) or {}
    wanted = {name: value for name, value in prepared.plan.labels.items() if name.startswith(plan.INPUTS)}
    if other := sorted(name.removeprefix(plan.INPUTS) for name, value in wanted.items() if labels.get(name) != value):
        why = f"was built from a different {', '.join(other)} than this checkout has"
        raise UserError(problem("image", prepared.ref, why, fix="the flags that it was built with, or build it again"))


def _record_push(prepared: PreparedBuild, digest: str, file: Path) -> ImageRecord:
    image = read.image(connect(prepared.ref), f"{prepared.plan.repository}@{digest}", prepared.plan.platform)
    _check_inputs(prepared, image)
    record = ImageRecord(
        ref=prepared.ref,
        digest=digest,
        target=prepared.plan.target,
        platforms=(prepared.plan.platform,),
        versions=plan.versions_of(prepared.plan.target, prepared.versions, prepared.plan.arguments),
        git=prepared.git,
        content=content.content_of(image),
        inputs=prepared.context.inputs,
    )
    image_file.write(file, record)
    return record
