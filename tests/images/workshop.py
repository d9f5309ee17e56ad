"""Makes cpu images with the real builder, for the proofs: from a copy of the code that may be changed, on an engine of ours."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from images.build import make
from images.build.make import PreparedBuild
from images.flags import BuildFlags
from images.model import Built, Image, Layer
from images.registry import read
from images.registry.client import connect
from rehearsal.lab.containers.base import checkout
from rehearsal.lab.containers.engine import Engine
from rehearsal.lab.containers.registry import Registry
from tests.images.builds import Silent

TARGET = "cpu"
TORCH = ("lib", "torch", "rest")
"""Layers of torch and what it needs."""
CANARY = "sunk-u-boat-U512-torpedo"
"""The password in the build secret of every image made here; see test_proof_secrets.py."""


@dataclass(frozen=True)
class Made:
    """An image in a registry and how it came about."""

    image: Image
    built: Built
    prepared: PreparedBuild
    root: Path

    @property
    def ref(self) -> str:
        """repository@sha256:…"""
        return f"{self.prepared.plan.repository}@{self.image.digest}"

    def layer(self, name: str) -> Layer:
        """That of code, app, torch, lib (torch's libraries) or rest (what torch needs), by the folder that its history names,
        or of system, which the first RUN on the base made."""
        want = "/scripts/packages.sh" if name == "system" else f"/layers/{name}/"
        (found,) = [one for one in self.image.layers if want in one.created_by]
        return found

    def diff_ids(self, *names: str) -> dict[str, str]:
        return {name: self.layer(name).diff_id for name in names}

    @property
    def ran(self) -> set[str]:
        """Stages of which an instruction was carried out; FROM only looks an image up."""
        steps = self.built.steps
        return {step.stage for step in steps if not step.cached and "] FROM " not in step.name} - {"internal"}


@dataclass
class Workshop:
    """`base` serves as base image and for the build stages."""

    engine: Engine
    registry: Registry
    base: str
    folder: Path

    @property
    def repository(self) -> str:
        return f"{self.registry.host}/proof/trainer"

    def checkout(self) -> Path:
        """A copy of the code, in no repository; each is the same, also where someone edits the code meanwhile."""
        first = self.folder / "code"
        if not first.exists():
            checkout(first)
        return shutil.copytree(first, Path(tempfile.mkdtemp(dir=self.folder)) / "code", copy_function=_linked_or_copied)

    def make(
        self,
        root: Path,
        *,
        environment: Mapping[str, str] | None = None,
        base: str | None = None,
        verify: bool = False,
        cache_from: Sequence[str] = (),
        cache_to: str | None = None,
    ) -> Made:
        """Build and push, from this workshop's engine or the builder that `environment` names; verified only where asked for,
        which starts containers."""
        # Credentials of an index that nothing comes from, to be found nowhere afterwards.
        netrc = self.folder / "netrc"
        netrc.write_text(f"machine index.invalid login nobody password {CANARY}\n")
        flags = BuildFlags(
            TARGET,
            repository=self.repository,
            base=base or self.base,
            tools=self.base,
            # Nothing but the wheel in the checkout is a source of torch.
            arg=("TORCH_CPU_LINKS=",),
            push=True,
            cache_from=tuple(cache_from),
            cache_to=cache_to,
            no_verify=not verify,
            netrc=str(netrc),
            image_file=str(Path(tempfile.mkdtemp(dir=self.folder)) / "image.json"),
        )
        made = make.build(flags, Silent(), environment or self.engine.environment, root=root)
        ref = made.prepared.ref
        return Made(read.image(connect(ref), ref), made.built, made.prepared, root)


def _linked_or_copied(source: str, target: str) -> str:
    """Wheels are large, and no test changes one."""
    if source.endswith(".whl"):
        os.link(source, target)
        return target
    return shutil.copy2(source, target)


def change_code(root: Path) -> None:
    """What a developer does most often: one line in one module."""
    with (root / "trainer" / "schedule.py").open("a") as file:
        # Another one each time: what is already built or pushed proves nothing.
        file.write(f"\nANOTHER_LINE = {root.parent.name!r}\n")


def change_pin(root: Path, name: str, version: str, folder: Path) -> None:
    """Pin another version in the app's lock, with the hash of its wheel, as a run of the lock's own command would."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", "3.11", "--dest", str(folder), f"{name}=={version}"]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    total = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock = root / "images" / "locks" / "app.lock"
    pinned = re.compile(rf"^{re.escape(name)}==\S+( \\\n    --hash=\S+)+", re.MULTILINE)
    text, count = pinned.subn(f"{name}=={version} \\\n    --hash=sha256:{total}", lock.read_text())
    assert count == 1
    lock.write_text(text)
