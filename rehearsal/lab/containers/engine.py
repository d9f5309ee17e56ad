"""A container engine of the lab's own: a dockerd that shares nothing with the machine's and ends with its owner.

It runs as a child of a process namespace that ends when this process does, however that ends: containerd, shims, containers
and mounts go with it. Its bridge has a free private subnet; firewall rules are three, and all name that bridge.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rehearsal.lab.ground import first_child
from rehearsal.lab.network import Subnet

START_SECONDS = 60.0
_SBIN = ":/usr/local/sbin:/usr/sbin:/sbin"
_PACKAGES = {
    "dockerd": "docker.io",
    "containerd": "containerd",
    "runc": "runc",
    "docker-registry": "docker-registry",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "ip": "iproute2",
    "tini": "tini",
    "unshare": "util-linux",
}
# PID 1 of the namespace reaps, and ends when the pipe that it reads does. /etc/docker is only another folder in here, so
# that what this engine trusts stays its own.
_SCRIPT = """mkdir -p /etc/docker && mount --bind "$1/etc" /etc/docker && dockerd --config-file "$1/daemon.json" &
exec tini -s -- cat"""


def client() -> str | None:
    """Return a docker client that has the buildx plugin; some machines have one without it first on PATH."""
    for program in ("/usr/bin/docker", shutil.which("docker")):
        if program and os.access(program, os.X_OK):
            done = subprocess.run([program, "buildx", "version"], capture_output=True, check=False)
            if done.returncode == 0:
                return program
    return None


def why_not() -> str | None:
    """Return one line about what keeps this machine from running an engine and a registry of its own; None where nothing
    does."""
    if os.geteuid() != 0:
        return "an engine of our own needs root; fix: run as root"
    path = os.environ.get("PATH", "") + _SBIN
    missing = {package for program, package in _PACKAGES.items() if not shutil.which(program, path=path)}
    if client() is None:
        missing |= {"docker-cli", "docker-buildx"}
    if missing:
        return f"an engine of our own needs Debian's {', '.join(sorted(missing))}; fix: .ci/engine installs them"
    return None


class Engine:
    """This is an empty dockerd with the containerd image store. `folder` keeps its log and its clients' configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._subnet: Subnet | None = None
        self._pid = 0
        self._log = folder / "dockerd.log"

    @property
    def subnet(self) -> Subnet:
        if self._subnet is None:
            raise RuntimeError("the engine does not run")
        return self._subnet

    @property
    def address(self) -> str:
        """Return the address of this machine as containers see it; unlike 127.0.0.1 the engine takes no registry there without
        TLS."""
        return self.subnet.host_address

    @property
    def socket(self) -> Path:
        return self.subnet.folder / "docker.sock"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for children: everything that is in ours, the client with its plugin first on PATH, and
        nothing of the user's."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DOCKER_", "BUILDX_", "BUILDKIT_"))
        }
        return {
            **inherited,
            "PATH": f"{self.folder / 'bin'}:{os.environ.get('PATH', '')}{_SBIN}",
            "DOCKER_HOST": f"unix://{self.socket}",
            "DOCKER_CONFIG": str(self.folder / "client"),
        }

    def docker(self, *words: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run its client; RuntimeError with what that complained of, unless `check` is off."""
        options = {"capture_output": True, "env": self.environment, **options}
        done = subprocess.run(["docker", *map(str, words)], text=True, check=False, **options)
        if check and done.returncode:
            output = (done.stderr or done.stdout or "").strip()
            raise RuntimeError(f"docker {' '.join(map(str, words))} ended with {done.returncode}: {output[-2000:]}")
        return done

    def trust(self, host: str, ca: Path) -> None:
        """Have it believe the registry `host` (name:port) that shows a certificate of this CA."""
        folder = self.folder / "etc" / "certs.d" / host
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ca, folder / "ca.crt")

    def start(self) -> Engine:
        """Wait until it answers; RuntimeError with the end of its log when it does not come up."""
        self._subnet = Subnet()
        try:
            self._furnish()
            self._plug()
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [
                        "unshare",
                        "-mp",
                        "--fork",
                        "--kill-child",
                        "--mount-proc",
                        "sh",
                        "-c",
                        _SCRIPT,
                        "engine",
                        str(self.folder),
                    ],
                    env=self.environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
            self._pid = first_child(self._process.pid)
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def kill(self) -> None:
        """End it and all that it runs at once, as a lost machine would; its images stay until `stop`."""
        if self._process is None:
            return
        if self._process.poll() is None:
            # A Ctrl-C on the terminal may have ended its first process already.
            with suppress(ProcessLookupError):
                os.kill(self._pid or self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process = None

    def stop(self) -> None:
        """End it, and take away its images, its bridge and its rules."""
        self.kill()
        if self._subnet is not None:
            _unplug(self._subnet)
            _remove_groups(self._subnet.link)
            # Half a million files after a few builds; Python would need a minute for them.
            subprocess.run(["rm", "-rf", "--one-file-system", str(self._subnet.folder)], check=False)
            self._subnet.release()
            self._subnet = None

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _furnish(self) -> None:
        home = client()
        if home is None:
            raise RuntimeError(why_not() or "no docker client with buildx")
        for name in ("bin", "client", "etc"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        link = self.folder / "bin" / "docker"
        link.unlink(missing_ok=True)
        link.symlink_to(home)
        folder = self.subnet.folder
        settings = {
            "features": {"containerd-snapshotter": True},
            "hosts": [f"unix://{self.socket}"],
            "data-root": str(folder / "data"),
            "exec-root": str(folder / "exec"),
            "pidfile": str(folder / "pid"),
            "bridge": self.subnet.link,
            "cgroup-parent": f"/{self.subnet.link}",
            "insecure-registries": ["127.0.0.0/8"],
            # A daemon that kept rules itself would rewrite those of the machine's own.
            "iptables": False,
            "ip6tables": False,
            "shutdown-timeout": 1,
        }
        (self.folder / "daemon.json").write_text(json.dumps(settings, indent=1))

    def _plug(self) -> None:
        link = self.subnet.link
        # What a killed engine left; the subnet's lock shows that it is unused.
        _unplug(self.subnet)
        for command in (
            f"link add name {link} type bridge",
            f"addr add {self.subnet.host_address}/24 dev {link}",
            f"link set {link} up",
        ):
            _run("ip", *command.split())
        for rule in _rules(self.subnet):
            _run("iptables", "-w", "60", *rule)

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process is not None and self._process.poll() is None:
            if self.socket.exists() and self.docker("version", check=False).returncode == 0:
                return
            time.sleep(0.1)
        raise RuntimeError(f"the engine did not start: {self._log.read_text(errors='replace')[-2000:]}")


def reachable() -> dict[str, str] | None:
    """Return the environment that gives children the engine this user already has; None where none answers."""
    home = client()
    if home is None:
        return None
    environment = {**os.environ, "PATH": f"{Path(home).parent}:{os.environ.get('PATH', '')}"}
    try:
        done = subprocess.run([home, "version"], env=environment, capture_output=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else environment


def _rules(subnet: Subnet) -> list[list[str]]:
    """Return the rules by which containers fetch packages: forwarding both ways, behind this machine's address."""
    return [
        ["-I", "FORWARD", "-i", subnet.link, "-j", "ACCEPT"],
        ["-I", "FORWARD", "-o", subnet.link, "-j", "ACCEPT"],
        ["-t", "nat", "-I", "POSTROUTING", "-s", str(subnet.network), "!", "-o", subnet.link, "-j", "MASQUERADE"],
    ]


def _unplug(subnet: Subnet) -> None:
    subprocess.run(["ip", "link", "del", subnet.link], capture_output=True, check=False)
    for rule in _rules(subnet):
        deleting = ["-D" if word == "-I" else word for word in rule]
        # Once for each of it; it fails when none is left.
        while not _status("iptables", "-w", "60", *deleting):
            pass


def _remove_groups(name: str) -> None:
    """Remove the empty control groups of what it ran; each hierarchy has its own folder of that name."""
    for top in [*Path("/sys/fs/cgroup").glob(f"*/{name}"), Path("/sys/fs/cgroup", name)]:
        for folder, _, _ in os.walk(top, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)


def _run(*command: str) -> None:
    path = os.environ.get("PATH", "") + _SBIN
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _status(*command: str) -> int:
    path = os.environ.get("PATH", "") + _SBIN
    return subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PATH": path}).returncode
