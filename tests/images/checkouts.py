"""A checkout to plan images from: this repository's own files, in a folder that a test may change."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from images.flags import BuildFlags
from images.model import Context
from images.plan import context, versions
from images.plan.plan import arguments_of

VERSIONS = versions.load()
ROOT = Path(__file__).parents[2]
_IGNORED = shutil.ignore_patterns("__pycache__", "site")


def checkout(folder: Path) -> Path:
    """`folder` with what images are made of; nothing of a site, no repository."""
    for name in ("images", "lustrain", "trainer"):
        shutil.copytree(ROOT / name, folder / name, ignore=_IGNORED)
    return folder


def staged(root: Path, into: Path, **flags: Any) -> Context:
    """What a build with these flags would send to the builder, in the folder `into`."""
    flags = BuildFlags(**flags)
    return context.stage(root, flags.target, arguments_of(flags, VERSIONS), into)


def committed(folder: Path) -> Path:
    """The same as a repository with one commit."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def git(folder: Path, *words: str) -> str:
    """What git prints, with no configuration of the machine or the user."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = alone | who | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", *words],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()
