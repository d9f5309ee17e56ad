"""What the tasks do, from a wish to a record: stage the context, plan, build, push, write down. All raise UserError."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from images import builder, content, context, engine, git_state, merge, plan, registry, remote, versions, why
from images.push import push
from images.records import Built, Context, Image, Output, Plan
from images.versions import Versions
from images.watch import Watch
from lustrain import deployed, image_file
from lustrain.image_file import GitState, Record
from lustrain.problem import UserError, problem

ROOT = Path(__file__).parents[1]
LOCAL = "lustrain/trainer"
"""What an image is called that goes nowhere."""
NOWHERE = (
    "there is nowhere to push to; fix: give --repository registry/name, or --cluster FILE or --stack NAME of a cluster that "
    "has an image repository"
)


@dataclass(frozen=True)
class Wish:
    """What a user asks for; `repository` None is an image that goes nowhere."""

    target: str = "cpu"
    platform: str = "linux/amd64"
    repository: str | None = None
    base: str | None = None
    tools: str | None = None
    unpinned: bool = False
    suffix: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    cache_from: Sequence[str] = ()
    cache_to: str | None = None
    no_cache: bool = False
    verify: bool = True
    attestations: bool = False
    ca: Path | None = None
    netrc: Path | None = None
    root: Path = ROOT
    """The checkout that code, versions, locks and git state come from."""


@dataclass(frozen=True)
class Planned:
    """A plan, where its code comes from, and what differs from the image that was pushed last."""

    plan: Plan
    git: GitState
    versions: Versions
    context: Context
    rebuilds: tuple[why.Rebuild, ...]

    @property
    def ref(self) -> str:
        return self.plan.tags[0]


@dataclass(frozen=True)
class Made:
    """What came of a wish; `record` is there once the image has its tag in a registry."""

    planned: Planned
    built: Built
    record: Record | None = None


def repository(given: str | None, cluster: str | None, stack: str | None) -> str | None:
    """Where to push: what was given, else what the Cluster names, else nowhere. UserError."""
    if given is not None:
        return given
    try:
        found = deployed.cluster(cluster, stack)
    except UserError as error:
        raise UserError(error.problems) from None
    if found is None:
        return None
    if found.image_repository is None:
        fix = "give the stack one and `pulumi up`, or --repository registry/name"
        raise UserError(problem("cluster.image_repository", None, f"{found.name} has none", fix=fix))
    return found.image_repository


@contextmanager
def planned(wish: Wish, file: Path, *, pushing: bool = False) -> Iterator[Planned]:
    """The plan of a wish; its staged context lives as long as the block."""
    found = versions.load(wish.root / context.VERSIONS)
    last = image_file.read(file) if file.exists() else None
    if pushing and last and last.target != wish.target:
        fix = f"--image-file image-{wish.target}.json, or move it away"
        raise UserError(problem(str(file), last.target, f"records an image for {last.target}", fix=fix))
    # A folder of its own for each build: BuildKit takes a file for unchanged that has the path, size and time of the last one.
    with tempfile.TemporaryDirectory(prefix="lustrain-image-") as folder:
        staged = context.stage(
            wish.root, wish.target, found, Path(folder), base=wish.base, tools=wish.tools, arguments=wish.arguments
        )
        git = git_state.read(wish.root, context.sources(wish.root, wish.target), context.enters)
        made = plan.make(
            wish.target,
            found,
            git,
            staged.inputs,
            repository=LOCAL if wish.repository is None else wish.repository,
            platform=wish.platform,
            base=wish.base,
            tools=wish.tools,
            unpinned=wish.unpinned,
            suffix=wish.suffix,
            cache_from=wish.cache_from,
            cache_to=wish.cache_to,
            secrets=_secrets(wish),
            attestations=wish.attestations,
            no_cache=wish.no_cache,
            arguments=wish.arguments,
        )
        same = last if last and last.target == wish.target else None
        yield Planned(made, git, found, staged, tuple(why.reasons(same, staged.inputs)))


def build(wish: Wish, file: Path, watch: Watch, output: Output, environment: Mapping[str, str] | None = None) -> Made:
    """Build and check. Output.PUSH puts the image under a tag that no other image has and writes the record to `file`;
    PUSH_BY_DIGEST leaves tag and record to `joined`. `environment` (else this process's) names the engine;
    who we are to a registry is read from this process's."""
    pushing = output in (Output.PUSH, Output.PUSH_BY_DIGEST)
    if pushing and wish.repository is None:
        raise UserError(NOWHERE)
    if pushing and not file.parent.is_dir():
        raise UserError(problem("--image-file", str(file), "there is no such folder", fix="make it, or name another"))
    bake = builder.connect(environment)
    with planned(wish, file, pushing=pushing) as one:
        built = builder.build(
            one.plan, one.context, bake, output=output, verify=wish.verify, watch=watch, environment=environment
        )
        if output is not Output.PUSH or built.digest is None:
            return Made(one, built)
        return Made(one, built, _recorded(one, built.digest, (one.plan.platform,), file))


def push_built(wish: Wish, file: Path, watch: Watch) -> Record:
    """Push what `build` left in the engine, and write the record."""
    if wish.repository is None:
        raise UserError(NOWHERE)
    with planned(wish, file, pushing=True) as one:
        _, client = engine.connect()
        with closing(client):
            digest = push(one.ref, client, watch)
        return _recorded(one, digest, (one.plan.platform,), file)


def joined(wish: Wish, digests: Sequence[str], file: Path) -> Record:
    """Join what was pushed by digest, one a platform, under the wish's tag, and write the record."""
    if wish.repository is None:
        raise UserError(NOWHERE)
    with planned(wish, file, pushing=True) as one:
        digest = merge.merge(one.ref, digests)
        platforms = tuple(found.image.platform for found in remote.find(registry.connect(one.ref), one.ref))
        return _recorded(one, digest, platforms, file)


def _secrets(wish: Wish) -> dict[str, Path]:
    ca = wish.ca or (Path(os.environ["SSL_CERT_FILE"]) if os.environ.get("SSL_CERT_FILE") else None)
    return {name: path for name, path in (("ca", ca), ("netrc", wish.netrc)) if path}


def _made_from(one: Planned, image: Image) -> None:
    """UserError where what was pushed was built from something else than what is recorded with it."""
    inner = image.config.get("config")
    labels = (inner.get("Labels") if isinstance(inner, dict) else None) or {}
    wanted = {name: value for name, value in one.plan.labels.items() if name.startswith(plan.INPUTS)}
    if other := sorted(name.removeprefix(plan.INPUTS) for name, value in wanted.items() if labels.get(name) != value):
        why = f"was built from another {', '.join(other)} than is here now"
        raise UserError(problem("image", one.ref, why, fix="the flags that it was built with, or build it again"))


def _recorded(one: Planned, digest: str, platforms: Sequence[str], file: Path) -> Record:
    source = registry.connect(one.ref)
    image = remote.image(source, f"{one.plan.repository}@{digest}", one.plan.platform)
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
