"""The ground of a lab's nodes: namespaces that end with this process, a bridge, and shared files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rehearsal.lab.hardware import KINDS, STOCK_SYSCTLS, write_hardware
from rehearsal.lab.image import lay_out_image
from rehearsal.lab.network import Subnet

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = Path(__file__).with_name("programs")
# Its PID 1 ends when the pipe that it reads does: with this process, however that ends.
_SCRIPT = """mount -t tmpfs -o mode=755 lab "$1" && mkdir "$1/fsx" "$1/disks" "$1/hardware" && echo ready &&
exec tini -s -- cat"""


class Ground:
    """This is a lab without nodes. `folders` are shown on nodes where the machine's root file system does not hold them."""

    def __init__(self, folders: Iterable[Path | str]) -> None:
        self.subnet = Subnet()
        # The lab's processes write to it for as long as they run.
        self.log = open(self.subnet.folder / "log", "ab")  # noqa: SIM115
        self._process = subprocess.Popen(
            [
                "unshare",
                "-nmp",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                _SCRIPT,
                "lab",
                str(self.subnet.folder),
            ],
            env={"PATH": PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        self._pid = 0
        try:
            self._wait()
            self._furnish(folders)
            self._plug()
        except BaseException:
            self.clear()
            raise

    @property
    def enter(self) -> list[str]:
        """Return how a program of this machine is started inside of the lab, beside its nodes."""
        return ["nsenter", "-t", str(self._pid), "-n", "-m", "-p"]

    @property
    def path(self) -> Path:
        """Return the lab's own files, seen from this process."""
        return Path(f"/proc/{self._pid}/root{self.subnet.folder}")

    @property
    def key(self) -> str:
        return str(self.path / "key")

    def run(self, *command: str, check: bool = True) -> str:
        """Run a program of this machine inside of the lab; RuntimeError with what it complained of."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, env={"PATH": PATH}, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def prepare(self, kind: str) -> None:
        """Have what a node of this kind is made of at hand. ValueError for a kind that is not known."""
        if kind not in KINDS:
            raise ValueError(f"kind = {kind!r}: not known; allowed: {', '.join(KINDS)}")
        folder = self.path / "hardware" / kind
        if not folder.exists():
            write_hardware(KINDS[kind], folder)

    def name(self, addresses: dict[str, str]) -> None:
        """Give every node the names of all, by address."""
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        public = (self.path / "key.pub").read_text()
        lay_out_image(self.path / "image", public, f"127.0.0.1 localhost\n{hosts}")

    def output(self) -> str:
        """Return the end of what the lab's processes printed."""
        return (self.subnet.folder / "log").read_text(errors="replace")[-1500:]

    def clear(self) -> None:
        """End every process of the lab, and take away what it left on this machine."""
        if self._process.poll() is None:
            # A Ctrl-C on the terminal may have ended its first process already.
            with suppress(ProcessLookupError):
                os.kill(self._pid or self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.log.close()
        self.subnet.release()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        self._process.stdout.close()
        if ready != b"ready\n":
            raise RuntimeError(f"the lab did not start: {self.output()}")
        self._pid = first_child(self._process.pid)

    def _furnish(self, folders: Iterable[Path | str]) -> None:
        """Make what nodes share: the key, the stand-in programs with an interpreter that no node's own `python3` replaces."""
        self.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", f"{self.subnet.folder}/key")
        shown = {os.path.realpath(sys.base_prefix), *(str(folder) for folder in folders)}
        rows = (f"{key} {key.replace('/', '.')} {value}\n" for key, value in STOCK_SYSCTLS.items())
        (self.path / "folders").write_text("".join(f"{folder}\n" for folder in sorted(shown)))
        (self.path / "sysctls").write_text("".join(rows))
        programs = self.path / "programs"
        shutil.copytree(_PROGRAMS, programs / "programs", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("run", "boot"):
            script = programs / name
            script.write_text(
                f"#!{os.path.realpath(sys.executable)} -sSE\nfrom programs.start import {name}\n\n{name}()\n"
            )
            script.chmod(0o755)

    def _plug(self) -> None:
        subnet = self.subnet
        for command in (
            "link set lo up",
            "link add name bridge type bridge",
            f"addr add {subnet.bridge}/24 dev bridge",
            # A request for instance metadata on a node that has none is refused at once.
            "addr add 169.254.169.254/32 dev bridge",
            "link set bridge up",
        ):
            self.run("ip", *command.split())
        _ip("link", "add", "name", subnet.link, "type", "veth", "peer", "name", "uplink", "netns", str(self._pid))
        self.run("ip", "link", "set", "uplink", "master", "bridge", "up")
        _ip("addr", "add", f"{subnet.host_address}/24", "dev", subnet.link)
        _ip("link", "set", subnet.link, "up")


def first_child(pid: int, seconds: float = 5.0) -> int:
    """Return the first child of a process, once it has one; RuntimeError where the process ends or takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise RuntimeError(f"process {pid} ended and started no other")
        time.sleep(0.002)
    raise RuntimeError(f"process {pid} started no other within {seconds:g} s")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
