"""One private subnet a lab: who owns which, and what a killed lab left behind."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO

SUBNETS = 250
_CLONE_NEWNET = 0x40000000
_live: set[ipaddress.IPv4Network] = set()


def live() -> frozenset[ipaddress.IPv4Network]:
    """The subnets of the labs that this process runs now."""
    return frozenset(_live)


class Subnet:
    """10.77.k.0/24, ours for as long as this process holds the lock of k. RuntimeError where all are taken."""

    def __init__(self) -> None:
        for number in range(SUBNETS):
            lock = _locked(Path(tempfile.gettempdir()) / f".lustrain-lab-{number}.lock")
            if lock is not None:
                break
        else:
            raise RuntimeError(f"all {SUBNETS} lab subnets are in use; fix: end other labs")
        self._lock = lock
        self.prefix = f"10.77.{number}"
        self.network = ipaddress.IPv4Network(f"{self.prefix}.0/24")
        self.link = f"lustrain{number}"
        self.folder = Path(tempfile.gettempdir()) / f"lustrain-lab-{number}"
        # The lock was free, so whoever made these is dead; its namespaces, mounts and processes went with it.
        self._sweep()
        self.folder.mkdir(mode=0o755)
        _live.add(self.network)

    @property
    def own(self) -> str:
        """The address of this process' side."""
        return f"{self.prefix}.1"

    @property
    def bridge(self) -> str:
        """The address of the lab's bridge, the nodes' way out (which leads nowhere)."""
        return f"{self.prefix}.254"

    def address(self, index: int) -> str:
        return f"{self.prefix}.{10 + index}"

    def release(self) -> None:
        _live.discard(self.network)
        self._sweep()
        self._lock.close()

    def _sweep(self) -> None:
        if Path("/sys/class/net", self.link).exists():
            subprocess.run(["ip", "link", "del", self.link], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def listen_within(pid: int, address: tuple[str, int]) -> socket.socket:
    """A listening socket in the network of process `pid`; only the thread that makes it goes there."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            _enter_network(pid)
            made.append(socket.create_server(address, reuse_port=False))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _enter_network(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, f"setns: {os.strerror(code)}")


def _locked(path: Path) -> IO[str] | None:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
