"""`fab image-plan`, `image-build`, `image-push`, `image-merge`, `image-verify`, `image-diff`, `image-scan`, `image-lock`.

Imports of what a task does stand in it: every `fab` loads this file.
"""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from invoke.context import Context as Invocation
from invoke.exceptions import Exit
from invoke.tasks import task

from lustrain.problem import UserError, plain, problem

if TYPE_CHECKING:
    from images.making import Wish

Answer = TypeVar("Answer")

HELP: Mapping[str, str] = {
    "target": "cpu, cuda or gaudi (cpu)",
    "repository": "registry/repository to push to; else the Cluster's",
    "cluster": "file with a Cluster; else LUSTRAIN_CLUSTER in the environment",
    "stack": "take the Cluster from the output of the Pulumi stack of this name, like org/project/prod",
    "base": "image by digest to run on, in place of the one in images/versions.toml",
    "tools": "image by digest to build in, likewise",
    "arg": "NAME=VALUE for the Dockerfile, like EFA_VERSION= to leave EFA out; may be given again",
    "unpinned": "take --base and --tools without a digest",
    "suffix": "end of the tag, like r2: the same commit once more, with newer packages of the system",
    "image_file": "where the image that was pushed is recorded (image.json)",
    "json": "print one JSON object",
    "platform": "linux/amd64 or linux/arm64 (linux/amd64)",
    "push": "push it as well, and write image.json",
    "by_digest": "push it without a tag, for `fab image-merge`",
    "cache_from": "registry/name:tag with layers of earlier builds, for a builder that has none; may be given again",
    "cache_to": "registry/name:tag to keep all layers of this build in",
    "no_cache": "run every step again",
    "no_verify": "do not run images/verify.py in the image before it leaves the builder",
    "attest": "push provenance and SBOM with it; enroot and pyxis read no such image",
    "ca": "certificates of a proxy before the package index, a file; else SSL_CERT_FILE in the environment",
    "netrc": "file with the credentials of a package index; it is in no layer and no history",
}


def _helps(*names: str) -> dict[str, str]:
    return {name: HELP[name] for name in names}


ONE = ("target", "repository", "cluster", "stack", "base", "tools", "arg", "unpinned", "suffix", "image_file", "json")


@task(help=_helps(*ONE), iterable=["arg"], auto_shortflags=False)
def image_plan(
    _context: Invocation,
    target: str = "cpu",
    repository: str | None = None,
    cluster: str | None = None,
    stack: str | None = None,
    base: str | None = None,
    tools: str | None = None,
    arg: Sequence[str] | None = None,
    unpinned: bool = False,
    suffix: str = "",
    image_file: str = "image.json",
    json: bool = False,
) -> None:
    """Tell what would be built, which layers are new since image.json, and why. No engine is asked."""
    from images import making, telling

    def plan() -> None:
        wish = _wish(
            target,
            repository,
            cluster,
            stack,
            base=base,
            tools=tools,
            arguments=_table(arg or ()),
            unpinned=unpinned,
            suffix=suffix,
        )
        with making.planned(wish, Path(image_file)) as planned:
            _say(telling.plan(planned), telling.plan_lines(planned), json)

    _or_exit(plan, json)


HOW = (
    "platform",
    "push",
    "by_digest",
    "cache_from",
    "cache_to",
    "no_cache",
    "no_verify",
    "attest",
    "ca",
    "netrc",
)


@task(help=_helps(*ONE, *HOW), iterable=["arg", "cache_from"], auto_shortflags=False)
def image_build(
    _context: Invocation,
    target: str = "cpu",
    repository: str | None = None,
    cluster: str | None = None,
    stack: str | None = None,
    platform: str = "linux/amd64",
    push: bool = False,
    by_digest: bool = False,
    base: str | None = None,
    tools: str | None = None,
    arg: Sequence[str] | None = None,
    unpinned: bool = False,
    suffix: str = "",
    cache_from: Sequence[str] | None = None,
    cache_to: str | None = None,
    no_cache: bool = False,
    no_verify: bool = False,
    attest: bool = False,
    ca: str | None = None,
    netrc: str | None = None,
    image_file: str = "image.json",
    json: bool = False,
) -> None:
    """Build the trainer's image, check it, and leave it in the engine or in a registry. Exit code: 2 a mistake, 1 a failure."""
    from images import making, telling
    from images.progress import Live
    from images.records import Output

    def build() -> None:
        wish = _wish(
            target,
            repository,
            cluster,
            stack,
            platform=platform,
            base=base,
            tools=tools,
            arguments=_table(arg or ()),
            unpinned=unpinned,
            suffix=suffix,
            cache_from=tuple(cache_from or ()),
            cache_to=cache_to,
            no_cache=no_cache,
            verify=not no_verify,
            attestations=attest,
            ca=Path(ca) if ca else None,
            netrc=Path(netrc) if netrc else None,
        )
        output = Output.PUSH_BY_DIGEST if by_digest else Output.PUSH if push else Output.LOAD
        with Live(f"image {target}") as watch:
            made = making.build(wish, Path(image_file), watch, output)
        _say(telling.build(made), telling.build_lines(made, image_file), json)

    _or_exit(build, json)


@task(help=_helps(*ONE), iterable=["arg"], auto_shortflags=False)
def image_push(
    _context: Invocation,
    target: str = "cpu",
    repository: str | None = None,
    cluster: str | None = None,
    stack: str | None = None,
    base: str | None = None,
    tools: str | None = None,
    arg: Sequence[str] | None = None,
    unpinned: bool = False,
    suffix: str = "",
    image_file: str = "image.json",
    json: bool = False,
) -> None:
    """Push what image-build left in the engine, by digest, and write image.json. A tag never moves to another image."""
    from images import making, telling
    from images.progress import Live
    from lustrain import image_file as files

    def push() -> None:
        wish = _wish(
            target,
            repository,
            cluster,
            stack,
            base=base,
            tools=tools,
            arguments=_table(arg or ()),
            unpinned=unpinned,
            suffix=suffix,
        )
        with Live(f"image {target}") as watch:
            record = making.push_built(wish, Path(image_file), watch)
        _say(files.as_json(record), telling.record_lines(record, image_file), json)

    _or_exit(push, json)


@task(
    positional=[],
    iterable=["digest", "arg"],
    help=_helps(*ONE) | {"digest": "sha256:… of an image that was pushed --by-digest; once for each platform"},
    auto_shortflags=False,
)
def image_merge(
    _context: Invocation,
    digest: Sequence[str] | None = None,
    target: str = "cpu",
    repository: str | None = None,
    cluster: str | None = None,
    stack: str | None = None,
    base: str | None = None,
    tools: str | None = None,
    arg: Sequence[str] | None = None,
    unpinned: bool = False,
    suffix: str = "",
    image_file: str = "image.json",
    json: bool = False,
) -> None:
    """Join the images of several platforms under one tag, and write image.json."""
    from images import making, telling
    from lustrain import image_file as files

    def join() -> None:
        wish = _wish(
            target,
            repository,
            cluster,
            stack,
            base=base,
            tools=tools,
            arguments=_table(arg or ()),
            unpinned=unpinned,
            suffix=suffix,
        )
        record = making.joined(wish, digest or (), Path(image_file))
        _say(files.as_json(record), telling.record_lines(record, image_file), json)

    _or_exit(join, json)


@task(
    positional=[],
    help={
        "ref": "an image in a registry; else that of image.json",
        "max_age": "warn about an image older than this many days (90)",
    }
    | _helps("image_file", "json"),
    auto_shortflags=False,
)
def image_verify(
    _context: Invocation,
    ref: str | None = None,
    max_age: str = "90",
    image_file: str = "image.json",
    json: bool = False,
) -> None:
    """Look at an image where it is, without pulling it: manifest, layers, labels, age, size. Exit code: 1 not in order."""
    from images import inspection, registry, versions
    from lustrain import image_file as files

    def look() -> inspection.Report:
        days = _days(max_age)
        record = files.read(Path(image_file)) if ref is None else None
        limits = inspection.Limits(oldest_days=days, budget_mb=versions.load().budgets)
        # By its tag, so that one that stands for another image by now is noticed.
        asked = record.ref if record else str(ref)
        return inspection.verify(registry.connect(asked), asked, record=record, limits=limits)

    found = _or_exit(look, json)
    _say(inspection.as_json(found), inspection.lines(found), json)
    if found.exit_code:
        raise Exit(code=found.exit_code)


@task(
    positional=["a", "b"],
    help={
        "a": "the image that nodes have",
        "b": "the image that they shall run",
        "platform": "like linux/amd64, where an image has several",
    }
    | _helps("json"),
    auto_shortflags=False,
)
def image_diff(_context: Invocation, a: str, b: str, platform: str | None = None, json: bool = False) -> None:
    """Tell which layers a node that has A pulls to run B."""
    from images import diff, registry, remote
    from images.references import parse

    def compare() -> diff.Diff:
        named = [parse(ref) for ref in (a, b)]
        return diff.diff(*(remote.image(registry.connect(ref), str(ref), platform) for ref in named))

    found = _or_exit(compare, json)
    _say(diff.as_json(found), diff.lines(found), json)


@task(
    positional=[],
    help={
        "ref": "an image in ECR by digest; else that of image.json",
        "threshold": "the mildest severity that fails: CRITICAL, HIGH, MEDIUM, LOW or INFORMATIONAL (HIGH)",
        "allow": "file with findings that are allowed, each with a reason and a last day (images/scan-allow.toml)",
    }
    | _helps("image_file", "json"),
    auto_shortflags=False,
)
def image_scan(
    _context: Invocation,
    ref: str | None = None,
    threshold: str = "HIGH",
    allow: str | None = None,
    image_file: str = "image.json",
    json: bool = False,
) -> None:
    """Wait for ECR's scan of an image and weigh what it found. Exit code: 1 not passed, also where nobody scanned."""
    from images import scan
    from lustrain import image_file as files

    def weigh() -> scan.Verdict:
        allowed = scan.read_allowed(Path(allow) if allow else scan.ALLOWED)
        place = scan.Place.of(ref or files.read(Path(image_file)).deployable)
        return scan.gate(place, scan.client_for(place), allowed, threshold=threshold, say=_aside)

    verdict = _or_exit(weigh, json)
    _say(scan.as_json(verdict), scan.lines(verdict), json)
    if verdict.exit_code:
        raise Exit(code=verdict.exit_code)


@task(
    help={
        "check": "change nothing; say which lock is stale and why, exit code 1",
        "upgrade": "take the newest versions that the constraints allow",
        "links": "page or folder with the CPU build of torch, in place of the one in images/versions.toml",
    }
    | _helps("json"),
    auto_shortflags=False,
)
def image_lock(
    _context: Invocation, check: bool = False, upgrade: bool = False, links: str | None = None, json: bool = False
) -> None:
    """Write the hashed locks of what is installed in images, from pyproject.toml, images/versions.toml and constraints."""
    from images import lock

    if check:
        stale = _or_exit(lock.check, json)
        _say({"stale": stale}, stale or ["every lock is in order"], json)
        if stale:
            raise Exit(code=1)
        return
    changed = _or_exit(lambda: lock.write_all(links=links, upgrade=upgrade, say=_aside), json)
    _say({"changed": changed}, [f"written: {', '.join(changed)}" if changed else "nothing changed"], json)


def _wish(target: str, repository: str | None, cluster: str | None, stack: str | None, **more: Any) -> Wish:
    from images import making

    return making.Wish(target, repository=making.repository(repository, cluster, stack), **more)


def _table(words: Sequence[str]) -> dict[str, str]:
    if wrong := [word for word in words if "=" not in word]:
        raise UserError([problem("--arg", word, "has no value", allowed="NAME=VALUE") for word in wrong])
    return dict(word.split("=", 1) for word in words)


def _days(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise UserError(problem("--max-age", text, "is no number of days", allowed="0, 1, 2, …"))
    return int(text)


def _aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say(value: Mapping[str, Any], lines: Sequence[str], json: bool) -> None:
    print(jsons.dumps(value, indent=1) if json else "\n".join(lines))


def _or_exit(do: Callable[[], Answer], json: bool = False) -> Answer:
    """What was asked for; a user's mistake and Ctrl-C end the task with their lines."""
    try:
        return do()
    except UserError as error:
        _end(error.problems, error.exit_code, json)
    except OSError as error:
        _end([plain(f"{error.filename or 'this machine'}: {error.strerror or error}")], 1, json)
    except KeyboardInterrupt:
        _end(["stopped by Ctrl-C"], 1, json)


def _end(lines: Sequence[str], code: int, json: bool) -> NoReturn:
    if json:
        print(jsons.dumps({"error": list(lines), "exit_code": code}, indent=1))
    raise Exit("\n".join(lines), code)


TASKS = (image_plan, image_build, image_push, image_merge, image_verify, image_diff, image_scan, image_lock)
