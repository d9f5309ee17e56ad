"""Training in a container as on a node: read-only, without root, ended by SIGTERM to PID 1."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE_S = 60
"""This is more than a save takes, and less than the two minutes of a spot notice; after it comes SIGKILL."""


class Container:
    """One attempt; it can be looked at until `remove`. `environment` is that of the docker client."""

    def __init__(
        self,
        image: str,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        inside: Mapping[str, str],
        files: Mapping[Path, str],
    ) -> None:
        self._environment = dict(environment)
        # Servers of the rehearsal are on this machine's loopback, and a test must reach nothing else by them.
        options = ["--detach", "--network", "host", "--read-only", "--tmpfs", "/tmp:mode=1777", "--shm-size", "256m"]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        for name, value in {"LUSTRAIN_CACHE": "/tmp/cache", "HOME": "/tmp", **inside}.items():
            options += ["--env", f"{name}={value}"]
        for file, at in files.items():
            options += ["--volume", f"{file}:{at}:ro"]
        self.id = self._docker("run", *options, image, *words).strip()

    def running(self) -> bool:
        return self._docker("inspect", "--format", "{{.State.Running}}", self.id).strip() == "true"

    def stop(self) -> int:
        """Stop as `docker stop` and schedulers do; return the exit code, 137 where it had to be killed."""
        self._docker("stop", "--time", str(GRACE_S), self.id)
        return self.wait()

    def wait(self) -> int:
        return int(self._docker("wait", self.id).strip())

    def output(self) -> str:
        done = subprocess.run(
            ["docker", "logs", self.id],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    def remove(self) -> None:
        self._docker("rm", "--force", self.id)

    def _docker(self, *words: str) -> str:
        return docker(self._environment, *words)


def docker(environment: Mapping[str, str], *words: str) -> str:
    """Return the docker client's output; RuntimeError with its error."""
    done = subprocess.run(["docker", *words], env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {words[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
