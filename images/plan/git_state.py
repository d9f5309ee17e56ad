"""The git commit of an image's code, and the files of the image that differ from it. Read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lustrain.image_file import GitState
from lustrain.problem import FAILED, UserError, plain, problem

TIMEOUT_S = 60.0
_KEPT = ("GIT_CONFIG_", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH")
"""Of the variables named GIT_*: they say how git reads, not which repository a process around us is at work on."""
_NOTHING_OF_ITS_OWN = (
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "--no-pager",
    "--literal-pathspecs",
)


def read(root: Path, paths: Sequence[str], enters: Callable[[str], bool] = lambda path: True) -> GitState:
    """Where the files below `root` come from; `paths` (files or folders, relative to it) are what goes into an image.

    Untracked and git-ignored files count as changes, for they go in too; `enters` says of a path whether it does at all.
    The commit is None where git is not installed, `root` is in no repository, or the repository knows nothing of `paths`.
    UserError, exit code 2, where git refuses to answer.
    """
    prefix = _git(root, "rev-parse", "--show-prefix")
    if prefix is None or not _git(root, "ls-files", "-z", "--", *paths):
        return GitState(None, dirty=False)
    status = ["status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--ignore-submodules=none"]
    answer = _git(root, *status, "--untracked-files=all", "--ignored=traditional", "--", *paths)
    commit, changed = _read_status((answer or "").split("\0"))
    below = prefix.removesuffix("\n")
    found = {path.removeprefix(below) for path in changed} | set(_hidden(root, paths))
    ours = tuple(sorted(plain(path) for path in _with_files(root, found) if enters(path)))
    time = (_git(root, "rev-list", "--max-count=1", "--timestamp", commit) or "0").split()[0] if commit else 0
    return GitState(commit, dirty=bool(ours), changed=ours, time=int(time))


def _read_status(records: Sequence[str]) -> tuple[str | None, set[str]]:
    """https://git-scm.com/docs/git-status#_porcelain_format_version_2"""
    fields = {"1": 8, "u": 10, "?": 1, "!": 1}
    commit, changed = None, set()
    for record in records:
        if record.startswith("# branch.oid "):
            oid = record.removeprefix("# branch.oid ")
            commit = None if oid == "(initial)" else oid
        elif record[:1] in fields:
            changed.add(record.split(" ", fields[record[0]])[-1])
    return commit, changed


def _with_files(root: Path, paths: set[str]) -> Iterator[str]:
    """git names a submodule, and a folder with nothing tracked in it, by itself: the files in it are what enters."""
    for path in paths:
        if (root / path).is_dir() and not (root / path).is_symlink():
            for folder, _, names in os.walk(root / path):
                yield from ((Path(folder) / name).relative_to(root).as_posix() for name in names)
        else:
            yield path


def _hidden(root: Path, paths: Sequence[str]) -> Iterator[str]:
    """Yield changed files that git was told not to look at: assume-unchanged and skip-worktree."""
    marked = {}
    for record in (_git(root, "ls-files", "-v", "-s", "-z", "--", *paths) or "").split("\0"):
        head, _, path = record.partition("\t")
        if path and (head[0].islower() or head[0] == "S"):
            marked[path] = head.split()[2]
    there = [path for path in marked if (root / path).is_file()]
    yield from set(marked) - set(there)
    for path in there:
        if (_git(root, "hash-object", "--", path) or "").strip() != marked[path]:
            yield path


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git prints; None where there is no git or no repository."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(_KEPT)
    }
    outside.pop("GIT_CONFIG_PARAMETERS", None)
    # Without optional locks the index is not refreshed on disk, so that no hook is called for it and a read-only clone will do.
    environment = outside | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-C", str(root), *_NOTHING_OF_ITS_OWN, *arguments]
    try:
        answer = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            problem("git", str(root), f"does not answer: {error}", fix="run `git status` there"), FAILED
        ) from None
    if answer.returncode == 0:
        return answer.stdout.decode("utf-8", "surrogateescape")
    said = answer.stderr.decode("utf-8", "replace").strip()
    if "not a git repository" in said:
        return None
    if "dubious ownership" in said:
        fix = f"git config --global --add safe.directory {_named(said) or root.absolute()}"
        raise UserError(problem("git", str(root), "this repository belongs to another user", fix=fix))
    why = said.splitlines()[-1] if said else f"exit code {answer.returncode}"
    raise UserError(problem("git", str(root), f"git cannot read this repository: {why}", fix="run `git status` there"))


def _named(said: str) -> str:
    """git knows best which folder it wants to be trusted: with a worktree or a subfolder that is not ours to guess."""
    return next((line.split()[-1] for line in said.splitlines() if "--add safe.directory" in line), "")
