"""The lifecycle bundle: the files that a node runs at boot, named by what is in them.

HyperPod reads the bundle again whenever it replaces a node, weeks after the deployment; a prefix that never changes and
is never deleted keeps that node like its neighbours. Nothing of a cluster is in the bundle, so equal files have equal names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.problems import InfraError, problem

FOLDER = Path(__file__).parents[1] / "lifecycle"
ON_INIT = "on_init.sh"
"""HyperPod with Slurm: runs after the service's own set-up (`OnInitComplete`)."""
ON_CREATE = "on_create.sh"
"""HyperPod on EKS: runs when a node comes up (`OnCreate`)."""
MAX_BYTES = 64 * 1024 * 1024
"""Ours: all nodes of a cluster read the bundle at once, in the minutes that are paid for and compute nothing."""
SHA_DIGITS = 12
BINARY = frozenset({".pyz"})
"""Suffixes that are not text and are not checked as such."""

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BundleFile:
    """`path` is relative to the bundle, with slashes; `sha256` is that of the content, in hex."""

    path: str
    source: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Bundle:
    """Files by path, and the first digits of the SHA-256 over their paths and contents."""

    files: tuple[BundleFile, ...]
    sha: str

    @property
    def prefix(self) -> str:
        """Where the bundle lies in its bucket, without a slash at the end."""
        return f"lifecycle/{self.sha}"

    def key(self, file: BundleFile) -> str:
        return f"{self.prefix}/{file.path}"


def bundle(folder: Path = FOLDER, entries: Iterable[str] = (ON_INIT, ON_CREATE)) -> Bundle:
    """The bundle in `folder`; InfraError lists what would fail on a node: a missing entry, Windows line ends, a byte order
    mark, a script without `#!`, a link, too much in all. Hidden files and `__pycache__` are left out."""
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _members(folder)}
    problems = [
        problem(f"lifecycle/{name}", "", "is missing: a node would fail at boot", fix="put it back")
        for name in entries
        if name not in contents
    ]
    for name, content in contents.items():
        problems += _wrong(name, content)
    if (size := sum(map(len, contents.values()))) > MAX_BYTES:
        fix = "let the image carry what is large"
        problems.append(problem("lifecycle/", size, "bytes in all are too many", allowed=f"<= {MAX_BYTES}", fix=fix))
    if problems:
        raise InfraError(problems)
    files = tuple(
        BundleFile(name, folder / name, len(content), hashlib.sha256(content).hexdigest())
        for name, content in sorted(contents.items())
    )
    return Bundle(files, _sha(files))


def _members(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if not _left_out(path.relative_to(folder))]
    if links := sorted(path.relative_to(folder).as_posix() for path in found if path.is_symlink()):
        fix = "put the file itself there"
        raise InfraError([problem(f"lifecycle/{name}", "link", "S3 holds no links", fix=fix) for name in links])
    return [path for path in found if path.is_file()]


def _left_out(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _wrong(name: str, content: bytes) -> list[str]:
    if Path(name).suffix in BINARY:
        return []
    path = f"lifecycle/{name}"
    found = []
    if content.startswith(BOM):
        found.append(
            problem(path, "BOM", "begins with a byte order mark, so that the kernel finds no `#!`", fix="save without")
        )
    if b"\r" in content:
        found.append(
            problem(path, "CRLF", "has Windows line ends, which bash takes as part of words", fix="save with LF")
        )
    if name.endswith(".sh") and not content.removeprefix(BOM).startswith(b"#!/"):
        first = content.split(b"\n", 1)[0].decode("utf-8", "replace")
        found.append(problem(path, first, "is no first line of a script", allowed="#!/bin/bash"))
    return found


def _sha(files: Iterable[BundleFile]) -> str:
    """Paths and contents both count; a path holds no NUL, so that no two bundles write the same bytes."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.path}\0{file.sha256}\n".encode())
    return total.hexdigest()[:SHA_DIGITS]
