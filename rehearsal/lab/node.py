"""One node of a lab: powered on and off, inspected, and broken in the ways in which machines break."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from infra.local.metadata import LocalMetadata
from rehearsal.lab.forward import Forward
from rehearsal.lab.ground import PATH, Ground, first_child
from rehearsal.lab.hardware import KINDS
from rehearsal.lab.metadata import NodeMetadata

DISK_BYTES = 32 * 2**30
"""Of one node. It is memory, and only what is written to it takes any."""
BOOT_SECONDS = 30.0

_INIT = Path(__file__).with_name("node_init.sh")


class Node:
    """One machine of a lab. What its programs find of hardware is `kind`, a name in `hardware.KINDS`."""

    def __init__(self, ground: Ground, index: int, kind: str, metadata: bool = False) -> None:
        self._ground = ground
        self._index = index
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._pid = 0
        self._metadata: NodeMetadata | None = None
        self._wants_metadata = metadata
        self.kind = kind
        self.name = f"node{index}"
        self.address = ground.subnet.address(index)
        self.instance = f"i-{index:017x}"
        """The id that its metadata has from its first boot on."""
        self.boots = 0
        self._forwards: dict[tuple[str, int], Forward | None] = {}

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the node's PID 1 as this process sees it. RuntimeError while the node is off."""
        if not self.running:
            raise RuntimeError(f"{self.name} is off")
        return self._pid

    @property
    def key(self) -> str:
        """Return the private key that root and every user of `add_user` accept."""
        return self._ground.key

    def boot(self) -> Node:
        """Power on; returns when sshd answers and the boot sequence is over. RuntimeError with the log if it does not."""
        with self._lock:
            if self.running:
                raise RuntimeError(f"{self.name} is on")
            self._start()
            self._connect()
            if self._metadata is not None:
                self._metadata.move(self._pid)
            elif self._wants_metadata and KINDS[self.kind].type:
                self.metadata()
            self._wait_for_boot()
            for address in self._forwards:
                self._forwards[address] = Forward(self._pid, address, address)
            self.boots += 1
        return self

    def reboot(self) -> Node:
        """End every process, with the chance to end well, and boot again; connections are closed, as by a real shutdown."""
        with self._lock:
            self.exec("sh", "-c", "kill -TERM -1; sleep 0.05; kill -KILL -1", check=False)
            self._off()
            return self.boot()

    def crash(self) -> None:
        """Power off at once. The link goes first, so that no peer hears of it."""
        with self._lock:
            self.link(False)
            self._off()

    def replace(self) -> Node:
        """Put another machine in this one's place, as after a failure: a new disk, a new host key, the same name and
        address."""
        with self._lock:
            if self.running:
                self.crash()
            folder = f"{self._ground.subnet.folder}/disks/{self.name}"
            self._ground.run("umount", folder)
            self._ground.run("rmdir", folder)
            return self.boot()

    def link(self, up: bool) -> None:
        """Plug or unplug the network cable."""
        self._ground.run("ip", "link", "set", self.name, "up" if up else "down")

    def exec(
        self, *command: str, check: bool = True, stdin: str = "", timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the node as root, not through its sshd. RuntimeError where it fails and `check` is set."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-a", "--", *command],
            input=stdin,
            capture_output=True,
            text=True,
            env={"PATH": PATH, "HOME": "/root"},
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a program on the node that outlives this call; it ends with the node at the latest."""
        started = subprocess.Popen(
            ["nsenter", "-t", str(self.pid), "-a", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=self._ground.log,
            stderr=self._ground.log,
            env={"PATH": PATH, "HOME": "/root"},
        )
        self._started.append(started)
        return started

    def read(self, path: str) -> str:
        return self.exec("cat", path).stdout

    def exists(self, path: str) -> bool:
        return self.exec("test", "-e", path, check=False).returncode == 0

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1" && chmod "$2" "$1"'
        self.exec("sh", "-c", script, "write", path, f"{mode:o}", stdin=text)

    def tree(self, *folders: str) -> dict[str, tuple[str, str]]:
        """Return mode and content's SHA-256 (a link's target, nothing for a folder) of all that is in the folders, by path."""
        script = (
            'find "$@" \\( -type d -printf "%m  %p\\0" \\) -o \\( -type l -printf "%m %l %p\\0" \\) 2>/dev/null;'
            'find "$@" -type f -printf "%m %p\\0" 2>/dev/null | while IFS= read -r -d "" line; do '
            'sum=$(sha256sum <"${line#* }"); printf "%s %s %s\\0" "${line%% *}" "${sum%% *}" "${line#* }"; done'
        )
        rows = self.exec("bash", "-c", script, "tree", *folders).stdout.split("\0")[:-1]
        parts = (row.split(" ", 2) for row in rows)
        return {path: (mode, content) for mode, content, path in parts}

    def set_hardware(self, kind: str) -> None:
        """Make the node of something else. It boots again if it is on; files that its image brought stay as they are."""
        self._ground.prepare(kind)
        self.kind = kind
        if self.running:
            self.reboot()

    def fill_disk(self) -> None:
        """Leave no byte free: the disk becomes just as large as what is on it."""
        used = os.statvfs(self._disk)
        self._resize((used.f_blocks - used.f_bfree) * used.f_frsize)

    def free_disk(self) -> None:
        self._resize(DISK_BYTES)

    def add_user(self, name: str, sudo: str = "none") -> None:
        """Add a real user whom the lab's key lets in. `sudo` is none, password (which is not known) or free."""
        rules = {"none": "", "password": f"{name} ALL=(ALL) ALL\n", "free": f"{name} ALL=(ALL) NOPASSWD: ALL\n"}
        self.exec("useradd", "--create-home", "--shell", "/bin/bash", "--password", "*", name)
        home = f"/home/{name}/.ssh"
        self.write(f"{home}/authorized_keys", (self._ground.path / "key.pub").read_text(), 0o600)
        self.exec("chown", "-R", f"{name}:{name}", home)
        if rules[sudo]:
            self.write(f"/etc/sudoers.d/{name}", rules[sudo], 0o440)

    def host_key(self) -> str | None:
        """Return the public key of the node's sshd; None before its first boot."""
        public = self._disk / "upper/etc/ssh/lab_host_key.pub"
        return public.read_text().strip() if public.exists() else None

    def metadata(self) -> LocalMetadata:
        """Serve the node's own instance metadata at 169.254.169.254; without it, that address refuses connections."""
        if self._metadata is None:
            identity = {
                "instance-id": self.instance,
                "instance-type": KINDS[self.kind].type,
                "instance-life-cycle": "on-demand",
                "local-ipv4": self.address,
            }
            self._metadata = NodeMetadata(self.pid, identity)
        return self._metadata.server

    def forward(self, address: tuple[str, int]) -> None:
        """Let programs of the node reach a server on this machine's loopback at the same address, now and after each boot."""
        with self._lock:
            if self._forwards.get(address) is None:
                self._forwards[address] = Forward(self.pid, address, address)

    @property
    def _disk(self) -> Path:
        return self._ground.path / "disks" / self.name

    def _resize(self, size: int) -> None:
        self._ground.run("mount", "-o", f"remount,size={size}", f"{self._ground.subnet.folder}/disks/{self.name}")

    def _start(self) -> None:
        ground = self._ground
        if not self._disk.exists():
            folder = f"{ground.subnet.folder}/disks/{self.name}"
            self._disk.mkdir()
            ground.run("mount", "-t", "tmpfs", "-o", f"mode=755,size={DISK_BYTES}", "disk", folder)
        namespaces = ["unshare", "-numipC", "--fork", "--kill-child"]
        arguments = ["node", self.name, str(ground.subnet.folder), self.address, ground.subnet.bridge, self.kind]
        # Under nohup the signal by which a restart shows would be ignored by all that is started here.
        heard = ["env", "--default-signal=HUP"]
        self._process = subprocess.Popen(
            [*heard, *ground.enter, *namespaces, "sh", "-c", _INIT.read_text(), *arguments],
            env={"PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=ground.log,
            stderr=ground.log,
        )
        # nsenter forks to be in the lab's PID namespace, unshare to be in the node's.
        self._pid = first_child(first_child(self._process.pid))

    def _connect(self) -> None:
        mac = f"02:77:00:00:{self._index >> 8:02x}:{self._index & 255:02x}"
        peer = ["type", "veth", "peer", "name", "eth0", "address", mac, "netns", _pid_inside(self._pid)]
        self._ground.run("ip", "link", "add", "name", self.name, "up", "master", "bridge", *peer)

    def _wait_for_boot(self) -> None:
        assert self._process is not None
        end = time.monotonic() + BOOT_SECONDS
        booted = Path(f"/proc/{self._pid}/root/run/simulated/booted")
        while not (booted.exists() and _speaks_ssh(self.address)):
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self.name} did not boot: {self._ground.output()}")
            time.sleep(0.005)

    def _off(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        if self._metadata is not None:
            self._metadata.unplug()
        self._unplug_forwards()
        # The kernel takes the pair of links away with the node's network, but when it pleases.
        self._ground.run("ip", "link", "del", self.name, check=False)

    def forget(self) -> None:
        """Collect what is left of the node's processes once the lab has ended, and end its metadata."""
        for process in (*self._started, self._process):
            if process is not None:
                process.wait()
        if self._metadata is not None:
            self._metadata.stop()
            self._metadata = None
        self._unplug_forwards()

    def _unplug_forwards(self) -> None:
        for address, forward in self._forwards.items():
            if forward is not None:
                forward.close()
                self._forwards[address] = None

    def restart_if_asked(self) -> bool:
        """Boot again after the node's own reboot(2), which ends its PID 1 with SIGHUP (pid_namespaces(7))."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is None:
                return False
            hung_up = process.returncode in (-signal.SIGHUP, 128 + signal.SIGHUP)
            self._off()
            if hung_up:
                self.boot()
            return hung_up


def _speaks_ssh(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), 0.5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _pid_inside(pid: int) -> str:
    """Return the process' number in the lab's PID namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[2] for line in lines if line.startswith("NSpid:"))
