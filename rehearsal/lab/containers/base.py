"""The base of the lab's builds where nothing can be pulled: a Debian made from packages, and torch's wheel, kept for a day."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from lustrain.file_lock import hold_lock
from rehearsal.lab.containers.container import docker

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".build"
SUITE = "bookworm"
DAY_S = 24 * 3600
# Any constant: the same packages then give the same bytes.
_EPOCH = "1700000000"


def base_tar(cache: Path = CACHE) -> Path:
    """Return a minimal Debian root as a tar; make it again where it is over a day old or was changed."""
    cache.mkdir(parents=True, exist_ok=True)
    tar, seal = cache / f"{SUITE}.tar", cache / f"{SUITE}.tar.sha256"
    with hold_lock(cache / ".base.lock"):
        if not _fresh(tar) or not seal.exists() or seal.read_text() != _sha256(tar):
            new = tar.with_suffix(".new")
            environment = {**os.environ, "SOURCE_DATE_EPOCH": _EPOCH}
            command = ["mmdebstrap", "--quiet", "--format=tar", "--variant=minbase", SUITE, str(new)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                new.unlink(missing_ok=True)
                raise RuntimeError(f"mmdebstrap ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
            seal.unlink(missing_ok=True)
            new.replace(tar)
            seal.write_text(_sha256(tar))
    return tar


def push_base(environment: Mapping[str, str], host: str, cache: Path = CACHE) -> str:
    """Have an engine's clients push the minimal Debian to a registry; returns host/name@sha256:…, the same for the same tar,
    so that what was built on it before is still in the builder's cache."""
    tag = f"{host}/base/{SUITE}:minbase"
    tar = base_tar(cache)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        os.link(tar, folder / "base.tar")
        (folder / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["bash"]\n')
        words = ["--quiet", "--provenance=false", "--build-arg", "SOURCE_DATE_EPOCH=0", "--push", "--tag", tag]
        docker(environment, "buildx", "build", *words, name)
    return docker(environment, "image", "inspect", "--format", "{{index .RepoDigests 0}}", tag).strip()


def wheels(cache: Path = CACHE) -> Path:
    """Return a folder with the CPU build of torch that the image's lock names, from pip's own index or LUSTRAIN_TORCH_INDEX."""
    folder = cache / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    pin = torch_pin()
    with hold_lock(cache / ".wheels.lock"):
        if not list(folder.glob(f"torch-{pin}+cpu-cp311-*.whl")):
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            command += ["--only-binary", ":all:", "--python-version", "3.11", "--dest", str(folder)]
            command += ["--platform", "manylinux_2_28_x86_64", f"torch=={pin}+cpu"]
            index = os.environ.get("LUSTRAIN_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
            errors = ""
            for extra in ([], ["--extra-index-url", index]):
                done = subprocess.run([*command, *extra], capture_output=True, text=True, check=False)
                if not done.returncode:
                    break
                errors += done.stderr
            else:
                raise RuntimeError(f"pip has no torch=={pin}+cpu: {errors.strip()[-2000:]}")
    return folder


def checkout(into: Path, cache: Path = CACHE) -> Path:
    """Copy what images are built from, with torch's wheel, so that no index is needed."""
    skipped = shutil.ignore_patterns("__pycache__", "wheels", "ca.crt", "dist")
    for room in ("images", "lustrain", "trainer"):
        shutil.copytree(ROOT / room, into / room, ignore=skipped)
    site = into / "images" / "site" / "wheels"
    site.mkdir(parents=True)
    for wheel in wheels(cache).glob(f"torch-{torch_pin()}+cpu-*.whl"):
        try:
            os.link(wheel, site / wheel.name)
        except OSError:
            shutil.copy(wheel, site)
    return into


def torch_pin() -> str:
    """Return the version of torch in the image, without `+cpu`."""
    lock = (ROOT / "images" / "locks" / "torch-cpu.lock").read_text()
    match = re.search(r"^torch==([0-9.]+)", lock, re.MULTILINE)
    if match is None:
        raise RuntimeError("images/locks/torch-cpu.lock names no torch")
    return match[1]


def _fresh(file: Path) -> bool:
    return file.exists() and time.time() - file.stat().st_mtime < DAY_S


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
