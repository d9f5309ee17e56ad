"""One private subnet for each lab, its owner, and what a killed lab left behind."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

from lustrain.file_lock import try_lock

NUMBERS = range(250)
LOCKS = Path("/run/lustrain")
"""It is the same for every process of this machine, whatever its TMPDIR; a lab needs root anyway."""
_CLONE_NEWNET = 0x40000000
_live: set[ipaddress.IPv4Network] = set()


def live() -> frozenset[ipaddress.IPv4Network]:
    """Return the subnets of the labs that this process runs now."""
    return frozenset(_live)


class Subnet:
    """10.77.k.0/24, ours for as long as this process holds the lock of k. RuntimeError where all are taken.

    Links belong to the machine, so the locks do as well: a lab with another TMPDIR takes another number. A link of that name
    without a lock belongs to a lab whose locks are not visible here, and its number is left alone.
    """

    def __init__(self) -> None:
        LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in NUMBERS:
            lock = (LOCKS / f"{number}.lock").open("a+")
            if not try_lock(lock.fileno()):
                lock.close()
                continue
            lock.seek(0)
            # The lock was free, so its writer is dead; its namespaces, mounts and processes went with it.
            left = lock.read()
            self.link = f"lustrain{number}"
            if left or not self._linked:
                break
            lock.close()
        else:
            raise RuntimeError(f"all {len(NUMBERS)} lab subnets are in use; fix: end other labs")
        self._lock = lock
        self.prefix = f"10.77.{number}"
        self.network = ipaddress.IPv4Network(f"{self.prefix}.0/24")
        self._sweep(left)
        self.folder = Path(tempfile.mkdtemp(prefix=f"lustrain-lab-{number}-"))
        self.folder.chmod(0o755)
        self._note(str(self.folder))
        _live.add(self.network)

    @property
    def host_address(self) -> str:
        """Return the address of this process' side."""
        return f"{self.prefix}.1"

    @property
    def bridge(self) -> str:
        """Return the address of the lab's bridge, the nodes' way out (which leads nowhere)."""
        return f"{self.prefix}.254"

    def address(self, index: int) -> str:
        return f"{self.prefix}.{10 + index}"

    def release(self) -> None:
        _live.discard(self.network)
        self._sweep(str(self.folder))
        self._note("")
        self._lock.close()

    @property
    def _linked(self) -> bool:
        return Path("/sys/class/net", self.link).exists()

    def _sweep(self, folder: str) -> None:
        if self._linked:
            subprocess.run(["ip", "link", "del", self.link], capture_output=True, check=False)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)

    def _note(self, folder: str) -> None:
        """Record what the next holder of the lock has to remove."""
        self._lock.truncate(0)
        self._lock.write(folder)
        self._lock.flush()


def listen_within(pid: int, address: tuple[str, int]) -> socket.socket:
    """Open a listening socket in the network of process `pid`; only the thread that makes it goes there."""
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
