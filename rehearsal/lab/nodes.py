"""`Lab`: machines made of namespaces, reached over SSH at addresses of a subnet that only this process uses.

Needs root, and a kernel that grants namespaces and overlay mounts (`why_not` says which is missing). A lab ends with the
process that made it, also when that is killed.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from rehearsal.lab.ground import PATH, Ground
from rehearsal.lab.node import Node

PROGRAMS = ("ip", "unshare", "nsenter", "pivot_root", "sshd", "ssh-keygen", "tini", "sysctl", "sudo", "useradd")
BOOTS_AT_ONCE = 4
_PROBE = """mount -t tmpfs probe /mnt && cd /mnt && mkdir upper work merged &&
mount -t overlay probe -o lowerdir=/,upperdir=upper,workdir=work merged && mount -t proc proc merged/proc &&
ip link add name left type veth peer name right && ip link add name middle type bridge"""


@functools.cache
def why_not() -> str | None:
    """Return one line on what keeps this machine from running a lab; None where nothing does."""
    if os.geteuid():
        return "a lab of nodes needs root: namespaces and overlay mounts"
    missing = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    if missing:
        packages = "openssh-server tini iproute2 procps sudo"
        return f"a lab of nodes needs {', '.join(missing)}; fix: apt-get install {packages}"
    tried = subprocess.run(
        ["unshare", "-nmpf", "sh", "-c", _PROBE], capture_output=True, text=True, env={"PATH": PATH}, check=False
    )
    return f"this machine refuses a lab of nodes: {tried.stderr.strip()[-160:]}" if tried.returncode else None


class Lab:
    """`count` nodes on a bridge of their own, a context manager. `kind` names what they are made of (`hardware.KINDS`).

    `folders` are shown on every node where the machine's root file system does not hold them: interpreters to test with.
    `metadata`: every node has instance metadata from its first boot on. The last `off` nodes stay off until `Node.boot`.
    RuntimeError with `why_not`.
    """

    def __init__(
        self, count: int, kind: str = "cpu", folders: Iterable[Path | str] = (), metadata: bool = False, off: int = 0
    ) -> None:
        reason = why_not()
        if reason:
            raise RuntimeError(reason)
        self._on = count - off
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        self._ground = Ground(folders)
        self.subnet = self._ground.subnet
        self.nodes = [Node(self._ground, index, kind, metadata) for index in range(1, count + 1)]
        try:
            self._ground.name({node.name: node.address for node in self.nodes})
            self._ground.prepare(kind)
        except BaseException:
            self.down()
            raise

    def __enter__(self) -> Lab:
        try:
            return self.up()
        except BaseException:
            self.down()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def __getitem__(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def key(self) -> str:
        """Return the private key that root and every user of `Node.add_user` accept."""
        return self._ground.key

    @property
    def shared(self) -> Path:
        """Return the folder on this machine that every node has at /run/simulated/fsx."""
        return self._ground.path / "fsx"

    @property
    def known_hosts(self) -> str:
        """Return a file with the key of every node that has booted, by address and by name."""
        file = self._ground.path / "known_hosts"
        keys = ((node, node.host_key()) for node in self.nodes)
        file.write_text("".join(f"{node.address},{node.name} {key}\n" for node, key in keys if key))
        return str(file)

    def up(self) -> Lab:
        """Boot the nodes that are off, but for those that stay so."""
        first = self.nodes[: self._on]
        with ThreadPoolExecutor(BOOTS_AT_ONCE) as pool:
            for booted in [pool.submit(node.boot) for node in first if not node.running]:
                booted.result()
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def down(self) -> None:
        """End every process of the lab and take away what it left on this machine. A second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._ground.clear()
        if self._watcher is not None:
            self._watcher.join()
        for node in self.nodes:
            node.forget()

    def output(self) -> str:
        """Return the end of what the lab's processes printed."""
        return self._ground.output()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            for node in self.nodes:
                try:
                    node.restart_if_asked()
                except (RuntimeError, OSError):
                    if not self._ended.is_set():
                        raise
