"""Launchers of a job send node 0's launcher a heartbeat every second, and it answers: lines of JSON over TCP.

What a lost machine leaves behind is silence, on which a collective waits for minutes. Here it is noticed within `silent_s`, on
every node: by node 0 that a node is silent, by the others that node 0 is. No torch, so that it is up before ranks load it.
The network is trusted as it is by torch's own store: a program that reaches its port can end the job.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lustrain.background import BackgroundThread
from trainer.errors import EXIT_DONE, EXIT_REQUEUE, job_exit_code

BEAT_S = 1.0
SILENT_S = 5.0
LONGEST_LINE = 4096
_CHUNK = 4096


@dataclass
class JobStatus:
    """What a launcher knows of the other nodes; the thread that hears them replaces it whole."""

    all_here: bool = False
    """Every node has connected."""
    silent: str = ""
    """Nodes that were silent for too long; empty while all are heard."""
    failed: bool = False
    """The ranks of some node have ended, and not with what a whole job ends with."""
    code: int | None = None
    """The job's exit code, once the ranks of all nodes have ended."""


@dataclass
class Connection:
    """A connection that carries lines, and the received part of the next one."""

    socket: socket.socket
    held: bytes = b""
    node: int | None = None
    """The node at the other end, once it has sent its number."""

    def read(self) -> list[dict[str, Any]] | None:
        """Return the received objects; None where the other side is gone or does not speak this protocol."""
        try:
            data = self.socket.recv(_CHUNK)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        *whole, self.held = (self.held + data).split(b"\n")
        if not data or len(self.held) > LONGEST_LINE:
            return None
        try:
            read = [json.loads(line) for line in whole]
        except (ValueError, RecursionError):
            return None
        return read if all(isinstance(message, dict) for message in read) else None

    def write(self, message: dict[str, Any]) -> bool:
        """Send an object; False where the other side is gone or takes nothing more."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True


class Heartbeat:
    """One node among `nodes`; `job` names the launch and its nodes, and heartbeats of another job are ignored."""

    def __init__(
        self,
        job: str,
        node: int,
        nodes: int,
        *,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job, self.node, self.nodes = job, node, nodes
        self.beat_s, self.silent_s, self.clock = beat_s, silent_s, clock
        self.status = JobStatus(all_here=nodes == 1)
        self.mine: int | None = None
        """Exit code of this node's ranks, once they have ended."""
        self._life = secrets.token_hex(8)
        """Distinguishes this launcher from one that replaces it: their ranks do not know each other."""
        self._closing = threading.Event()
        self._thread = BackgroundThread(self._run, "heartbeat")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(self.silent_s)

    def check(self) -> JobStatus:
        """Return what is known of the others; raises what ended the thread, if anything did."""
        self._thread.check()
        return self.status

    def missing_nodes(self) -> str:
        """Return the nodes that have not connected, as far as this one knows: `node 1, node 3`."""
        return ""

    def ended(self, code: int) -> None:
        """Send the others the exit code of this node's ranks."""
        self.mine = code

    def _run(self) -> None:
        raise NotImplementedError


class NoPeers(Heartbeat):
    """The only node of a job: there are no others to hear."""

    def __init__(self) -> None:
        super().__init__("", 0, 1)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def ended(self, code: int) -> None:
        self.status = JobStatus(all_here=True, code=code)


@dataclass
class _Node:
    life: str
    heard: float
    code: int | None = None


class HeartbeatServer(Heartbeat):
    """Node 0's side: receives from all others."""

    def __init__(self, job: str, nodes: int, listener: socket.socket, **times: Any) -> None:
        super().__init__(job, 0, nodes, **times)
        self._listener = listener
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._known: dict[int, _Node] = {}
        self._connections: list[Connection] = []
        self._replaced = ""
        """A node whose launcher was replaced while the ranks ran."""

    def missing_nodes(self) -> str:
        return ", ".join(f"node {node}" for node in range(1, self.nodes) if node not in self._known)

    def _run(self) -> None:
        self._listener.setblocking(False)
        next_beat = self.clock()
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(self.beat_s / 4):
                    if key.data is None:
                        self._accept(selector)
                    elif not self._receive(key.data):
                        self._drop(selector, key.data)
                self.status = self._evaluate(self.clock())
                if self.clock() >= next_beat or self.status.code is not None:
                    next_beat = self.clock() + self.beat_s
                    for connection in [c for c in self._connections if not c.write(self._message())]:
                        self._drop(selector, connection)
            # The others may not know yet how the job ended.
            for connection in self._connections:
                connection.write(self._message())
                connection.socket.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        accepted.setblocking(False)
        self._connections.append(Connection(accepted))
        selector.register(accepted, selectors.EVENT_READ, self._connections[-1])

    def _drop(self, selector: selectors.BaseSelector, connection: Connection) -> None:
        """Forget a connection; its node may connect again within `silent_s`."""
        selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)

    def _receive(self, connection: Connection) -> bool:
        messages = connection.read()
        for message in messages or []:
            node, code = message.get("node"), message.get("code")
            if message.get("job") != self.job or not isinstance(node, int) or not 0 < node < self.nodes:
                return False
            life = str(message.get("life"))
            known = self._known.get(node)
            if known is None or known.life != life:
                if known is not None and self.status.all_here:
                    self._replaced = self._replaced or f"node {node}"
                    return False
                known = self._known[node] = _Node(life, 0.0)
            known.heard, connection.node = self.clock(), node
            if isinstance(code, int):
                known.code = code
        return messages is not None

    def _evaluate(self, now: float) -> JobStatus:
        silent = [
            node for node, known in self._known.items() if known.code is None and now - known.heard > self.silent_s
        ]
        all_here = self.status.all_here or len(self._known) - len(silent) == self.nodes - 1
        while silent and not all_here:
            # It has no ranks yet, and may come again.
            del self._known[silent.pop()]
        codes = [self.mine, *(known.code for known in self._known.values())]
        ended = [code for code in codes if code is not None]
        return JobStatus(
            all_here=all_here,
            silent=self.status.silent or self._replaced or (f"node {silent[0]}" if silent else ""),
            failed=any(code not in (EXIT_DONE, EXIT_REQUEUE) for code in ended),
            code=job_exit_code(ended) if all_here and len(ended) == self.nodes else None,
        )

    def _message(self) -> dict[str, Any]:
        return {"job": self.job, "life": self._life, **vars(self.status)}


class HeartbeatClient(Heartbeat):
    """Any other node's side: receives from node 0."""

    def __init__(self, job: str, node: int, nodes: int, hub: tuple[str, int], **times: Any) -> None:
        super().__init__(job, node, nodes, **times)
        self._hub: tuple[str, int] = hub
        self._reached: tuple[str, int] = hub
        """Its resolved address: a name service that fails later must not look like a silent node 0."""
        self._hub_life = ""
        self.heard: float | None = None
        """When node 0 was last heard; None before its first message."""

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                address = self._reached if self.status.all_here else self._hub
                stream = socket.create_connection(address, timeout=self.beat_s)
                self._reached = stream.getpeername()[:2]
            except OSError:
                self._note_silence()
                self._closing.wait(self.beat_s / 4)
                continue
            with stream:
                self._talk(Connection(stream))
            self._note_silence()

    def _talk(self, connection: Connection) -> None:
        next_beat = self.clock()
        sent = self.mine
        connection.socket.settimeout(self.beat_s / 4)
        while not self._closing.is_set():
            if self.clock() >= next_beat or sent != self.mine:
                next_beat, sent = self.clock() + self.beat_s, self.mine
                if not connection.write({"job": self.job, "life": self._life, "node": self.node, "code": sent}):
                    return
            messages = self._read(connection)
            if messages is None:
                self._closing.wait(self.beat_s / 4)
                return
            for message in messages:
                life = str(message.get("life"))
                if self.status.all_here and life != self._hub_life:
                    self.status = JobStatus(True, "node 0", self.status.failed)
                    return
                self._hub_life = life
                self.heard = self.clock()
                self.status = _status(message)
            if self._note_silence():
                return

    def _read(self, connection: Connection) -> list[dict[str, Any]] | None:
        messages = connection.read()
        if messages is None or any(message.get("job") != self.job for message in messages):
            return None
        return messages

    def _note_silence(self) -> bool:
        """Whether node 0 has been silent for too long since all were connected; before that it may still start."""
        silent = self.status.all_here and self.heard is not None and self.clock() - self.heard > self.silent_s
        if silent and self.status.code is None:
            self.status = JobStatus(True, "node 0", self.status.failed)
        return silent


def _status(message: dict[str, Any]) -> JobStatus:
    code = message.get("code")
    return JobStatus(
        all_here=message.get("all_here") is True,
        silent=str(message.get("silent", ""))[:80],
        failed=message.get("failed") is True,
        code=code if isinstance(code, int) else None,
    )
