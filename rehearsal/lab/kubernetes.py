"""A real Kubernetes on this machine: nodes with kubelet and containerd, each in a network namespace of its own.

The cluster is made by a program that `LUSTRAIN_KUBE` names: `PROGRAM up|load|lose|join|down DIR …`, as its help says. It has
fixed addresses, so that a machine has one cluster at a time. Left out there: cloud controllers, device plugins, kube-proxy, so
that ClusterIP addresses do not work, and headless Services do.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import TracebackType
from typing import Any

from rehearsal.lab.ground import PATH

PROGRAM = "LUSTRAIN_KUBE"
PLUGINS = Path("/usr/lib/cni")
SCRATCH = "docker.io/lab/scratch:1"
"""This is an image without a file: pods get theirs from this machine, by volumes of kind hostPath."""
_FOLDERS = ("bin", "dev", "etc", "lib", "lib64", "proc", "tmp", "usr")


def why_not() -> str | None:
    """Return one line on what keeps this machine from running a cluster; None where nothing does."""
    if os.geteuid():
        return "a Kubernetes of the lab needs root: network namespaces and containers"
    if not os.access(os.environ.get(PROGRAM, ""), os.X_OK):
        return f"{PROGRAM} names no program that makes a Kubernetes on this machine"
    missing = [program for program in ("containerd", "runc", "ip") if not shutil.which(program, path=PATH)]
    missing += [] if PLUGINS.joinpath("bridge").exists() else ["the CNI plugins"]
    fix = "apt-get install containerd runc containernetworking-plugins iproute2"
    return f"a Kubernetes of the lab needs {', '.join(missing)}; fix: {fix}" if missing else None


class Kubernetes:
    """A cluster of `nodes` nodes n1, n2, … with its files in `folder`, a context manager. RuntimeError with `why_not`."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        if reason := why_not():
            raise RuntimeError(reason)
        self._folder, self._nodes = folder, nodes

    def __enter__(self) -> Kubernetes:
        # Where it fails, the program has taken away what it made: `down` here would end another process's cluster.
        self._make("up", "--nodes", str(self._nodes))
        try:
            image = self._folder / "scratch.tar"
            _write_scratch(image)
            self._make("load", str(image))
        except BaseException:
            self._make("down")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._make("down")

    def lose(self, node: str) -> None:
        """End all processes of a node and cut its link, as when its machine fails."""
        self._make("lose", node)

    def rejoin(self, node: str) -> None:
        """Let a lost node come back, as when its machine boots again."""
        self._make("join", node)

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Return what kubectl prints; RuntimeError with its message where it fails."""
        environment = {**os.environ, **self.environment()}
        done = subprocess.run(
            [f"{self.programs}/kubectl", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    @property
    def programs(self) -> Path:
        """Return the folder with kubectl."""
        return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "lustrain", "kube")

    def environment(self) -> dict[str, str]:
        """Return variables with which kubectl reaches the cluster; its context is `lab`."""
        return {"KUBECONFIG": str(self._folder / "cluster" / "kubeconfig")}

    def get(self, *what: str) -> dict[str, Any]:
        """Return an object, or a list of them, as `kubectl get` has it."""
        answer: dict[str, Any] = json.loads(self.kubectl("get", *what, "--output=json"))
        return answer

    def _make(self, action: str, *arguments: str) -> None:
        command = [os.environ[PROGRAM], action, str(self._folder / "cluster"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _write_scratch(path: Path) -> None:
    """Write the image as `docker save` would: one layer of empty folders, at which volumes can be mounted."""
    layer = _tar({}, _FOLDERS)
    layer_sum = hashlib.sha256(layer).hexdigest()
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{layer_sum}"]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [SCRATCH], "Layers": [f"{layer_sum}/layer.tar"]}]
    files = {config_name: config, f"{layer_sum}/layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(_tar(files))


def _tar(files: dict[str, bytes], folders: tuple[str, ...] = ()) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return written.getvalue()
