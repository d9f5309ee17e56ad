"""The git commit of an image's code, and the files of the image that differ from it. Read-only."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from lustrain.image_file import GitState
from lustrain.problem import FAILED, UserError, plain, problem

TIMEOUT_S = 60.0
_KEPT = ("GIT_CONFIG_", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH")
"""Of the variables named GIT_*: they say how git reads, not which repository a process around us is at work on."""
_ALONE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-pager", "--literal-pathspecs")
"""With these options git runs no program of the repository."""


def read(root: Path, paths: Sequence[str], enters: Callable[[str], bool] = lambda path: True) -> GitState:
    """Return where the files below `root` come from; `paths`, relative to it, are what goes into an image.

    Untracked and git-ignored files count as changes, for they go in too; `enters` says of a path whether it does at all.
    The commit is None where git is not installed, `root` is in no repository, or the repository knows nothing of `paths`.
    UserError, exit code 2, where git refuses to answer.
    """
    prefix = _git(root, "rev-parse", "--show-prefix")
    if prefix is None or not _git(root, "ls-files", "-z", "--", *paths):
        return GitState(None, dirty=False)
    head = (_git(root, "rev-parse", "--quiet", "--verify", "HEAD") or "").strip()
    with tempfile.TemporaryDirectory(prefix="lustrain-git-") as folder:
        # The user's index may mark files that git is not to look at (assume-unchanged, skip-worktree).
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        _git(root, "read-tree", head or "--empty", **index)
        status = ["status", "--porcelain=v2", "-z", "--no-renames", "--ignore-submodules=none"]
        answer = _git(root, *status, "--untracked-files=all", "--ignored=traditional", "--", *paths, **index)
    changed = (path.removeprefix(prefix.removesuffix("\n")) for path in _changed((answer or "").split("\0")))
    ours = tuple(sorted(plain(path) for path in _with_files(root, changed) if enters(path)))
    time = (_git(root, "rev-list", "--max-count=1", "--timestamp", head) or "0").split()[0] if head else 0
    return GitState(head or None, dirty=bool(ours), changed=ours, time=int(time))


def _changed(records: Iterable[str]) -> set[str]:
    """https://git-scm.com/docs/git-status#_porcelain_format_version_2"""
    fields = {"1": 8, "u": 10, "?": 1, "!": 1}
    return {record.split(" ", fields[record[0]])[-1] for record in records if record[:1] in fields}


def _with_files(root: Path, paths: Iterable[str]) -> Iterator[str]:
    """Yield files: git names a submodule, and a folder with nothing tracked in it, by itself."""
    for path in paths:
        if (root / path).is_dir() and not (root / path).is_symlink():
            for folder, _, names in os.walk(root / path):
                yield from ((Path(folder) / name).relative_to(root).as_posix() for name in names)
        else:
            yield path


def _git(root: Path, *arguments: str, **variables: str) -> str | None:
    """Return what git prints; None where there is no git or no repository."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(_KEPT)
    }
    outside.pop("GIT_CONFIG_PARAMETERS", None)
    # Without optional locks the index is not refreshed on disk, so that no hook is called for it and a read-only clone will do.
    environment = outside | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"} | variables
    command = ["git", "-C", str(root), *_ALONE, *arguments]
    try:
        answer = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"does not answer: {error}"
        raise UserError(problem("git", str(root), why, fix="run `git status` there"), FAILED) from None
    errors = answer.stderr.decode("utf-8", "replace").strip()
    # rev-parse --quiet says nothing where there is no commit yet.
    if answer.returncode == 0 or not errors:
        return answer.stdout.decode("utf-8", "surrogateescape")
    if "not a git repository" in errors:
        return None
    if "dubious ownership" in errors:
        # The folder to trust is git's to name: with a worktree or a subfolder it is not `root`.
        named = (line.split()[-1] for line in errors.splitlines() if "--add safe.directory" in line)
        fix = f"git config --global --add safe.directory {next(named, root.absolute())}"
        raise UserError(problem("git", str(root), "this repository belongs to another user", fix=fix))
    why = f"git cannot read this repository: {errors.splitlines()[-1]}"
    raise UserError(problem("git", str(root), why, fix="run `git status` there"))
