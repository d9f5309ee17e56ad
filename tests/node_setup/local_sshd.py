"""A real sshd on loopback, run by the test with keys and settings of its own; commands run as whoever runs the tests."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from node_setup.fleet.hosts import Node, Route
from node_setup.fleet.transport import Limits
from tests.ports import own_port
from tests.processes import wait_until

PATIENT = Limits(connect_s=300, login_s=300, channel_s=300, retries=0)
"""Limits that no busy machine reaches."""
PROGRAM = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:/usr/bin")


def can_run() -> bool:
    """sshd of root wants its folder for privilege separation."""
    if PROGRAM is None or shutil.which("ssh-keygen") is None:
        return False
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.makedirs("/run/sshd", 0o755, exist_ok=True)
        return os.path.isdir("/run/sshd")
    return True


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


class Sshd:
    """Accepts the key `key`, and no other; `path` goes before PATH of what it runs."""

    def __init__(self, folder: Path, path: Path | None = None, settings: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, own_port()
        self.key = make_key(folder / "id")
        make_key(folder / "host")
        searched = f"{path}:" if path else ""
        lines = {
            "Port": str(self.port),
            "ListenAddress": "127.0.0.1",
            "HostKey": str(folder / "host"),
            "AuthorizedKeysFile": str(folder / "id.pub"),
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "MaxStartups": "100",
            "LoginGraceTime": "0",
            "SetEnv": f"PATH={searched}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **(settings or {}),
        }
        (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def node(self) -> Node:
        return Node("n1", "127.0.0.1", route=Route(getpass.getuser(), self.port, str(self.key)))

    def start(self) -> None:
        log = open(self.folder / "log", "ab")  # noqa: SIM115 (sshd's own from here on)
        with log:
            command = [str(PROGRAM), "-D", "-e", "-f", str(self.folder / "config")]
            self._process = subprocess.Popen(command, stderr=log, start_new_session=True)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 300) as one:
            return one.recv(4) == b"SSH-"
        return False

    def stop(self) -> None:
        """End the listener; sessions live on, as they do when sshd is restarted."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def sessions(self) -> list[int]:
        """Processes that serve a connection: children of the listener."""
        if self._process is None:
            return []
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def cut(self) -> None:
        """Kill what serves the connections, as a reboot would."""
        for pid in self.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def new_host_key(self) -> None:
        """What a machine shows that was made anew, or that somebody put in between."""
        self.stop()
        for name in ("host", "host.pub"):
            (self.folder / name).unlink()
        make_key(self.folder / "host")
        self.start()
