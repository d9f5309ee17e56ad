"""The container engine that the environment names: version, image store and free disk."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import requests
from docker.context import ContextAPI
from docker.errors import DockerException
from docker.utils import kwargs_from_env

from lustrain.problem import FAILED, UserError, plain, problem

DEFAULT_HOST = "unix:///var/run/docker.sock"
OLDEST = 23
"""The first whose own Dockerfile frontend knows `COPY --link`; 20.10 needs one from Docker Hub for it:
https://docs.docker.com/engine/release-notes/23.0/"""
ANSWER_S = 20.0
_CONTAINERD_ROOT = Path("/var/lib/containerd")


@dataclass(frozen=True)
class Engine:
    """What an engine says of itself."""

    host: str
    """Its address, as DOCKER_HOST has it."""
    version: str
    containerd_store: bool
    """It keeps images as they are pushed, with their media types, and can export caches."""
    root: Path
    """Where it keeps images and the build cache, on its own machine."""

    @property
    def local(self) -> bool:
        """It runs on this machine, as far as its address tells."""
        return bool(re.match(r"unix://|npipe://|(tcp|https?)://(127\.[\d.]+|localhost|\[::1\])(:|/|$)", self.host))

    def free_bytes(self) -> int | None:
        """Of the fullest disk that it keeps images on; None where that is another machine's."""
        if not self.local or not self.root.is_dir():
            return None
        # With the system's containerd the images lie with that.
        apart = self.containerd_store and not (self.root / "containerd").is_dir() and _CONTAINERD_ROOT.is_dir()
        return min(shutil.disk_usage(one).free for one in ([self.root, _CONTAINERD_ROOT] if apart else [self.root]))


def connect(
    environment: Mapping[str, str] | None = None, timeout_s: float = ANSWER_S
) -> tuple[str, docker.DockerClient]:
    """Address of the engine and a client of it; UserError in one line when it is not there or lets nobody in."""
    found = dict(os.environ if environment is None else environment)
    options: dict[str, Any] = dict(kwargs_from_env(environment=found))
    if "base_url" not in options:
        options = {**ContextAPI.kwargs_from_context(environment=found), **options}
    host = str(options.get("base_url") or DEFAULT_HOST)
    shown = _shown(found, host)
    if host.startswith("unix://"):
        _knock(host.removeprefix("unix://"), shown)
    try:
        client = docker.DockerClient(
            **{**options, "base_url": host}, version="auto", timeout=timeout_s, use_ssh_client=host.startswith("ssh://")
        )
    except (DockerException, requests.RequestException, OSError, ValueError) as error:
        raise UserError(_no_answer(shown, host, error), FAILED) from None
    return host, client


def facts(environment: Mapping[str, str] | None = None) -> Engine:
    """Ask the engine; UserError in one line, with the fix, when it is not there, is too old or has no BuildKit."""
    host, client = connect(environment)
    try:
        version, info = client.version(), client.info()
        ping = client.api.get(f"{client.api.base_url}/_ping", timeout=ANSWER_S)
    except (DockerException, requests.RequestException, OSError) as error:
        raise UserError(_no_answer(host, host, error), FAILED) from None
    finally:
        client.close()
    _suits(host, version, info, ping.headers)
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or () if len(pair) == 2}
    containerd = status.get("driver-type", "").startswith("io.containerd.snapshotter")
    return Engine(host, str(version.get("Version", "")), containerd, Path(str(info.get("DockerRootDir") or "/")))


def cached_bytes(environment: Mapping[str, str] | None = None) -> int:
    """Size of the engine's build cache; 0 where it does not tell."""
    _, client = connect(environment)
    try:
        api = client.api
        answer = api.get(f"{api.base_url}/v{api.api_version}/system/df?type=build-cache", timeout=ANSWER_S)
        return sum(int(one.get("Size", 0)) for one in answer.json().get("BuildCache") or ())
    except (requests.RequestException, ValueError, AttributeError):
        return 0
    finally:
        client.close()


def _suits(host: str, version: Mapping[str, Any], info: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    number = str(version.get("Version", ""))
    components = [str(one.get("Name", "")) for one in version.get("Components") or ()]
    if any("podman" in name.lower() for name in components) or "Libpod-API-Version" in headers:
        raise UserError(
            problem("engine", host, f"is Podman {number}, which has no BuildKit", fix="install Docker Engine"), FAILED
        )
    if (kind := str(info.get("OSType") or "linux")) != "linux":
        raise UserError(
            problem("engine", host, f"runs {kind} containers; the images are Linux's", fix="switch it over"), FAILED
        )
    major = re.match(r"\d+", number)
    if major and int(major[0]) < OLDEST:
        why = f"is version {number}, whose BuildKit does not know COPY --link"
        raise UserError(
            problem("engine", host, why, allowed=f">= {OLDEST}.0", fix="install a newer Docker Engine"), FAILED
        )
    # https://docs.docker.com/reference/api/engine/version/v1.45/#tag/System/operation/SystemPing
    if headers.get("Builder-Version") != "2":
        fix = 'set {"features": {"buildkit": true}} in its daemon.json and restart it'
        raise UserError(problem("engine", host, f"version {number} builds without BuildKit", fix=fix), FAILED)


def _knock(path: str, shown: str) -> None:
    """What keeps us from a unix socket, which a client of it tells only in prose."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_S)
        try:
            probe.connect(path)
        except PermissionError:
            fix = "sudo usermod -aG docker $USER and log in again, or use a rootless engine"
            raise UserError(f"{shown}: no permission to use the engine's socket; fix: {fix}", FAILED) from None
        except (FileNotFoundError, NotADirectoryError):
            fix = "install Docker Engine and start it (sudo systemctl start docker), or set DOCKER_HOST"
            raise UserError(f"{shown}: no engine is there; fix: {fix}", FAILED) from None
        except ConnectionRefusedError:
            fix = "start it: sudo systemctl start docker"
            raise UserError(f"{shown}: the engine does not run, only its socket is left; fix: {fix}", FAILED) from None
        except OSError as error:
            raise UserError(
                f"{shown}: no engine answers: {error}; fix: set DOCKER_HOST to where one does", FAILED
            ) from None


def _no_answer(shown: str, host: str, error: Exception) -> str:
    if not re.match(r"(unix|tcp|https?|ssh|npipe|fd)://", host):
        allowed = "unix://PATH, tcp://HOST:PORT, ssh://USER@HOST"
        return problem(
            "DOCKER_HOST", host, "is not an address of an engine", allowed=allowed, fix="unset it or mend it"
        )
    said = plain(" ".join(str(error).split()))[:300]
    return f"{shown}: no engine answers: {said}; fix: start it, or set DOCKER_HOST to where one does"


def _shown(environment: Mapping[str, str], host: str) -> str:
    if environment.get("DOCKER_HOST"):
        return f"DOCKER_HOST = {host!r}"
    return plain(f"engine {host}")
