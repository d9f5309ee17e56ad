"""From a wish to image.json: stage the context, plan, build, push, record. Everything here raises UserError."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from images.build import builder
from images.build.bake import Bake
from images.check import content
from images.model import Built, Context, Image, Output, Plan, Watch
from images.plan import changes, context, git_state, plan, versions
from images.plan.versions import Versions
from images.registry import merge, read
from images.registry.client import connect
from images.wish import BuildWish, MergeWish, Wish
from lustrain import deployed, image_file
from lustrain.image_file import GitState, Record
from lustrain.problem import UserError, problem

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Planned:
    """A plan, where its code comes from, and what differs from the image that was pushed last."""

    plan: Plan
    git: GitState
    versions: Versions
    context: Context
    rebuilds: tuple[changes.Rebuild, ...]

    @property
    def ref(self) -> str:
        return self.plan.tags[0]


@dataclass(frozen=True)
class Made:
    """What came of a wish; `record` is there once the image has its tag in a registry."""

    planned: Planned
    built: Built
    record: Record | None = None


def placed(wish: Wish) -> Wish:
    """Return the wish with its repository: the one given, else the Cluster's, else none. UserError."""
    if wish.repository is not None:
        return wish
    found = deployed.cluster(wish.cluster, wish.stack)
    if found is None:
        return wish
    if found.image_repository is None:
        fix = "give the stack one and `pulumi up`, or --repository registry/name"
        raise UserError(problem("cluster.image_repository", None, f"{found.name} has none", fix=fix))
    return replace(wish, repository=found.image_repository, cluster=None, stack=None)


@contextmanager
def planned(wish: Wish, *, root: Path = ROOT, pushing: bool = False) -> Iterator[Planned]:
    """Yield the plan of a wish for the checkout at `root`; its staged context lives as long as the block."""
    wish = placed(wish)
    shared = {field.name: getattr(wish, field.name) for field in fields(Wish)}
    build = wish if isinstance(wish, BuildWish) else BuildWish(**shared)
    plan.check(build)
    if pushing and wish.repository is None:
        where = (
            "--repository registry/name, or --cluster FILE or --stack NAME of a cluster that has an image repository"
        )
        raise UserError(f"there is nowhere to push to; fix: give {where}")
    known = versions.load(root / context.VERSIONS)
    last = image_file.read(wish.file) if wish.file.exists() else None
    if pushing and last and last.target != wish.target:
        fix = f"--image-file image-{wish.target}.json, or move it away"
        raise UserError(problem(str(wish.file), last.target, f"records an image for {last.target}", fix=fix))
    # A folder of its own for each build: BuildKit takes a file for unchanged that has the path, size and time of the last one.
    with tempfile.TemporaryDirectory(prefix="lustrain-image-") as folder:
        staged = context.stage(root, wish.target, plan.arguments_of(build, known), Path(folder))
        git = git_state.read(root, context.sources(root, wish.target), context.enters)
        made = plan.make(build, known, git, staged.inputs)
        same = last if last and last.target == wish.target else None
        yield Planned(made, git, known, staged, tuple(changes.reasons(same, staged.inputs)))


def build(wish: BuildWish, watch: Watch, environment: Mapping[str, str] | None = None, *, root: Path = ROOT) -> Made:
    """Build and check. With `push` the image gets a tag that no other image has, and the record is written; with `by_digest`
    tag and record are left to `joined`. `environment` (else this process's) names the engine; registry credentials are read
    from this process's."""
    output = Output.PUSH_BY_DIGEST if wish.by_digest else Output.PUSH if wish.push else Output.LOAD
    pushing, verify = output is not Output.LOAD, not wish.no_verify
    if pushing and not wish.file.parent.is_dir():
        fix = "make it, or name another"
        raise UserError(problem("--image-file", str(wish.file), "there is no such folder", fix=fix))
    with planned(wish, root=root, pushing=pushing) as one:
        built = builder.build(one.plan, one.context, Bake(environment), output=output, verify=verify, watch=watch)
        if output is not Output.PUSH or built.digest is None:
            return Made(one, built)
        return Made(one, built, _recorded(one, built.digest, (one.plan.platform,), wish.file))


def joined(wish: MergeWish, *, root: Path = ROOT) -> Record:
    """Join what was pushed by digest, one a platform, under the wish's tag, and write the record."""
    with planned(wish, root=root, pushing=True) as one:
        digest = merge.merge(one.ref, wish.digest)
        platforms = tuple(found.image.platform for found in read.find(connect(one.ref), one.ref))
        return _recorded(one, digest, platforms, wish.file)


def _made_from(one: Planned, image: Image) -> None:
    """UserError where what was pushed was built from something else than what is recorded with it."""
    inner = image.config.get("config")
    labels = (inner.get("Labels") if isinstance(inner, dict) else None) or {}
    wanted = {name: value for name, value in one.plan.labels.items() if name.startswith(plan.INPUTS)}
    if other := sorted(name.removeprefix(plan.INPUTS) for name, value in wanted.items() if labels.get(name) != value):
        why = f"was built from a different {', '.join(other)} than this checkout has"
        raise UserError(problem("image", one.ref, why, fix="the flags that it was built with, or build it again"))


def _recorded(one: Planned, digest: str, platforms: Sequence[str], file: Path) -> Record:
    image = read.image(connect(one.ref), f"{one.plan.repository}@{digest}", one.plan.platform)
    _made_from(one, image)
    record = Record(
        ref=one.ref,
        digest=digest,
        target=one.plan.target,
        platforms=tuple(platforms),
        versions=plan.versions_of(one.plan.target, one.versions, one.plan.arguments),
        git=one.git,
        content=content.content_of(image),
        inputs=one.context.inputs,
    )
    image_file.write(file, record)
    return record
