"""`image.json`: written whole or not at all, and read strictly, for what a cluster runs hangs on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from lustrain.files import write_whole
from lustrain.from_json import from_json
from lustrain.problem import FAILED, UserError, plain, problem
from lustrain.schema import UNPRINTABLE, Section, like, problems_of

VERSION = 1
MAKE = "fab image-build --push"
_DIGEST = "sha256:[0-9a-f]{64}"


# The grammar is https://github.com/distribution/reference/blob/main/reference.go, with a tag and no digest.
_HOST = r"(\[[a-fA-F0-9:]+\]|[a-zA-Z0-9][a-zA-Z0-9.-]*)(:[0-9]{1,5})?"
_PATH = r"(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)+"
_TAG = r":[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}"

Digest = Annotated[str, like(_DIGEST, "a digest", "sha256:… with 64 hexadecimal digits")]
Ref = Annotated[str, like(_HOST + _PATH + _TAG, "a reference with a tag and no digest", "registry/repository:tag")]
Platform = Annotated[str, like("[a-z0-9]+/[a-z0-9_]+(/[a-z0-9]+)?", "a platform", "linux/amd64")]
Printable = Annotated[str, like(rf"[^{UNPRINTABLE.pattern[1:]}*", "printable text", "trainer/loop.py")]
Commit = Annotated[str, like("[0-9a-f]{40}([0-9a-f]{24})?", "a commit", "40 hexadecimal digits")]


@dataclass(frozen=True)
class GitState:
    """Where the code of an image comes from; `commit` is None outside a repository."""

    commit: str | None
    dirty: bool
    """Something that goes into the image differs from the commit."""
    changed: tuple[str, ...] = ()
    """Paths, for the message that says so."""
    time: int = field(default=0, compare=False)
    """Of the commit, in seconds since 1970; 0 without one."""


@dataclass(frozen=True)
class ImageRecord:
    """`image.json`: what was built and pushed; the launcher deploys `ref` by `digest` and nothing else."""

    ref: str
    digest: str
    target: str
    platforms: tuple[str, ...]
    versions: Mapping[str, str]
    git: GitState
    content: str
    """sha256 over configuration and layers, blind to dates, commit and compression: equal images have equal sums on every
    builder."""
    inputs: Mapping[str, Mapping[str, str]]
    """As in Context; `fab image-plan` compares with it."""

    @property
    def deployable(self) -> str:
        """registry/repository@sha256:…"""
        name = self.ref.rpartition(":")[0] if ":" in self.ref.rpartition("/")[2] else self.ref
        return f"{name}@{self.digest}"


class _Git(Section):
    model_config = ConfigDict(strict=True)

    commit: Commit | None
    dirty: bool
    changed: list[Printable] = Field(default_factory=list)


class _File(Section):
    model_config = ConfigDict(strict=True)

    version: Literal[1]
    ref: Ref
    digest: Digest
    target: Literal["cpu", "cuda", "gaudi"]
    platforms: Annotated[list[Platform], Field(min_length=1)]
    versions: dict[Printable, Printable]
    git: _Git
    content: Annotated[str, like("(sha256:)?[0-9a-f]{64}", "a content hash", "sha256:… with 64 hexadecimal digits")]
    inputs: dict[Printable, dict[Printable, Printable]]


def read(path: Path) -> ImageRecord:
    """Return the record in `path`; UserError with one line a problem, exit code 2."""
    try:
        table = json.loads(path.read_bytes(), object_pairs_hook=_once, parse_constant=_no_number)
    except FileNotFoundError:
        raise UserError(problem(path.name, str(path), "no image was built here yet", fix=MAKE)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(plain(f"{path}: cannot be read: {error}; fix: {MAKE}")) from None
    if not isinstance(table, dict):
        raise UserError(problem(path.name, table, "not an object", allowed="what `fab image-build` writes", fix=MAKE))
    if table.get("version") != VERSION or isinstance(table.get("version"), bool):
        why = "a version of this file that is not known here"
        fix = f"{MAKE}, or the Lustrain that wrote it"
        raise UserError(problem(f"{path.name}: version", table.get("version"), why, allowed=str(VERSION), fix=fix))
    return from_json(ImageRecord, _checked(table, path.name).model_dump())


def write(path: Path, record: ImageRecord) -> None:
    """Put `record` in `path`: after a crash there is the old file or the new one.

    UserError, exit code 2, for a record that `read` would refuse; exit code 1 where the disk does not take it.
    """
    text = json.dumps(_checked(as_json(record), path.name).model_dump(), indent=2, ensure_ascii=True) + "\n"
    try:
        write_whole(path, text.encode("ascii"))
    except OSError as error:
        raise UserError(
            problem(path.name, str(path), f"cannot be written: {error.strerror}", fix="make room there"), FAILED
        ) from None


def as_json(record: ImageRecord) -> dict[str, Any]:
    """Return the content of the file."""
    git = {"commit": record.git.commit, "dirty": record.git.dirty, "changed": list(record.git.changed)}
    return {
        "version": VERSION,
        "ref": record.ref,
        "digest": record.digest,
        "target": record.target,
        "platforms": list(record.platforms),
        "versions": dict(record.versions),
        "git": git,
        "content": record.content,
        "inputs": {layer: dict(inputs) for layer, inputs in record.inputs.items()},
    }


def _checked(table: Mapping[str, Any], name: str) -> _File:
    try:
        return _File.model_validate(table)
    except ValidationError as error:
        raise UserError([f"{name}: {line}" for line in problems_of(error, _File)]) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r} is given twice")
    return table


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
