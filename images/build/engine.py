"""The container engine that the environment names: version, image store and free disk, read through the docker command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lustrain.problem import FAILED, UNREACHABLE, UserError, plain, problem

OLDEST = 23
"""This is the first engine whose own Dockerfile frontend knows `COPY --link`; 20.10 needs one from Docker Hub for it:
https://docs.docker.com/engine/release-notes/23.0/"""
ANSWER_S = 60.0
_CONTAINERD_ROOT = Path("/var/lib/containerd")
_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
"""`docker system df` prints sizes with these units: https://docs.docker.com/reference/cli/docker/system/df/"""


@dataclass(frozen=True)
class Engine:
    """This is what an engine reports of itself."""

    host: str
    """Its address, as DOCKER_HOST has it."""
    version: str
    containerd_store: bool
    """It keeps images as they are pushed, with their media types, and can export caches."""
    root: Path
    """Where it keeps images and the build cache, on its own machine."""

    @property
    def local(self) -> bool:
        """Check whether it runs on this machine, as far as its address tells."""
        return bool(re.match(r"unix://|npipe://|(tcp|https?)://(127\.[\d.]+|localhost|\[::1\])(:|/|$)", self.host))

    def free_bytes(self) -> int | None:
        """Return the bytes free on the fullest disk that it keeps images on; None where that is another machine's."""
        if not self.local or not self.root.is_dir():
            return None
        # With the system's containerd the images lie with that.
        apart = self.containerd_store and not (self.root / "containerd").is_dir() and _CONTAINERD_ROOT.is_dir()
        return min(shutil.disk_usage(disk).free for disk in ([self.root, _CONTAINERD_ROOT] if apart else [self.root]))


def docker(environment: Mapping[str, str] | None, *words: str) -> tuple[int, str, str]:
    """Run the docker command; return its exit code, output and errors. UserError where it is missing or hangs."""
    run = os.environ if environment is None else environment
    try:
        done = subprocess.run(
            ["docker", *words], env=run, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S
        )
    except OSError:
        raise UserError("docker with the buildx plugin is not on PATH; fix: install docker-buildx", FAILED) from None
    except subprocess.TimeoutExpired:
        why = f"docker {words[0]} did not answer in {ANSWER_S:.0f} s"
        raise UserError(f"{why}; fix: see whether the engine hangs", UNREACHABLE) from None
    return done.returncode, done.stdout, done.stderr


def facts(environment: Mapping[str, str] | None = None) -> Engine:
    """Ask the engine; UserError in one line, with the fix, when it does not answer, is too old or has no BuildKit."""
    host = docker(environment, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")[1].strip()
    version = _query(environment, host, "version").get("Server") or {}
    info = _query(environment, host, "info")
    _must_suit(host, version, str(info.get("OSType") or "linux"))
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or () if len(pair) == 2}
    containerd = status.get("driver-type", "").startswith("io.containerd.snapshotter")
    return Engine(host, str(version.get("Version", "")), containerd, Path(str(info.get("DockerRootDir") or "/")))


def cached_bytes(environment: Mapping[str, str] | None = None) -> int:
    """Return the size of the engine's build cache; 0 where it does not tell."""
    rows = docker(environment, "system", "df", "--format", "{{.Type}} {{.Size}}")[1]
    size = re.search(r"^Build Cache ([\d.]+)([kMGT]?B)$", rows, re.MULTILINE)
    return int(float(size[1]) * _UNITS[size[2]]) if size else 0


def _query(environment: Mapping[str, str] | None, host: str, what: str) -> dict[str, Any]:
    code, output, errors = docker(environment, what, "--format", "{{json .}}")
    if "permission denied" in errors.lower():
        fix = "sudo usermod -aG docker $USER and log in again, or use a rootless engine"
        raise UserError(plain(f"engine {host}: no permission to use the engine's socket; fix: {fix}"), FAILED)
    try:
        answer = json.loads(output)
    except ValueError:
        answer = None
    if code or not isinstance(answer, dict):
        why = plain(" ".join(errors.split()))[:300] or f"exit code {code}"
        fix = "install Docker Engine and start it (sudo systemctl start docker), or set DOCKER_HOST to one that runs"
        raise UserError(f"no engine answers: {why}; fix: {fix}", UNREACHABLE)
    return answer


def _must_suit(host: str, version: Mapping[str, Any], kind: str) -> None:
    number = str(version.get("Version", ""))
    components = [str(component.get("Name", "")) for component in version.get("Components") or ()]
    major = re.match(r"\d+", number)
    if any("podman" in name.lower() for name in components):
        why, allowed, fix = f"is Podman {number}, which has no BuildKit", "", "install Docker Engine"
    elif kind != "linux":
        why, allowed, fix = f"runs {kind} containers; the images are Linux's", "", "switch it over"
    elif major and int(major[0]) < OLDEST:
        why = f"is version {number}, whose BuildKit does not know COPY --link"
        allowed, fix = f">= {OLDEST}.0", "install a newer Docker Engine"
    else:
        return
    raise UserError(problem("engine", host, why, allowed=allowed, fix=fix), FAILED)
