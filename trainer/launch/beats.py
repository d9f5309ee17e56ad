"""Launchers of a job's nodes tell node 0's every second that they live, and it answers: lines of JSON over TCP.

What a lost machine leaves behind is silence, on which a collective waits for minutes. Here it is noticed within `silent_s`, on
every node: by node 0 that a node is silent, by the others that node 0 is. No torch, so that it is up before ranks load it.
The network is trusted as that of torch's own store is: whoever reaches its port can end the job.
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
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.launch.ranks import job_exit_code

BEAT_S = 1.0
SILENT_S = 5.0
LONGEST_LINE = 4096
_CHUNK = 4096


@dataclass
class News:
    """What the launcher of a node knows of the others; the thread that hears them replaces it whole."""

    all_here: bool = False
    """Every node has come."""
    silent: str = ""
    """Who was silent for too long; empty while all are heard."""
    failed: bool = False
    """The ranks of some node have ended, and not with what a whole job ends with."""
    code: int | None = None
    """The job's exit code, once the ranks of all nodes have ended."""


@dataclass
class Line:
    """A connection that carries lines, and what of the next one has come."""

    connection: socket.socket
    held: bytes = b""
    node: int | None = None
    """Which node speaks, once it has said so."""

    def read(self) -> list[dict[str, Any]] | None:
        """Return the objects that came; None where the other side is gone or speaks something else."""
        try:
            data = self.connection.recv(_CHUNK)
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
        return read if all(isinstance(one, dict) for one in read) else None

    def write(self, message: dict[str, Any]) -> bool:
        """Send an object; False where the other side is gone or takes nothing more."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True


class Beats:
    """One node among `nodes`; `job` names the attempt and its nodes, and beats of another job are not heard."""

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
        self.news = News(all_here=nodes == 1)
        self.mine: int | None = None
        """Exit code of this node's ranks, once they have ended."""
        self._life = secrets.token_hex(8)
        """Tells this launcher from one that takes its node's place: its ranks know nothing of this one's."""
        self._closing = threading.Event()
        self._thread = BackgroundThread(self._run, "beats")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(self.silent_s)

    def check(self) -> News:
        """Return what is known of the others; raises what ended the thread, if anything did."""
        self._thread.check()
        return self.news

    def absent(self) -> str:
        """Return the nodes that have not come, as far as this one can tell: `node 1, node 3`."""
        return ""

    def ended(self, code: int) -> None:
        """Let the others know how this node's ranks ended."""
        self.mine = code

    def _run(self) -> None:
        raise NotImplementedError


@dataclass
class _Node:
    life: str
    heard: float
    code: int | None = None


class Hub(Beats):
    """Node 0's: hears all others."""

    def __init__(self, job: str, nodes: int, listener: socket.socket, **times: Any) -> None:
        super().__init__(job, 0, nodes, **times)
        self._listener = listener
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._known: dict[int, _Node] = {}
        self._lines: list[Line] = []
        self._replaced = ""
        """A node whose launcher another one has replaced while the ranks ran."""

    def absent(self) -> str:
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
                    elif not self._hear(key.data):
                        self._drop(selector, key.data)
                self.news = self._judge(self.clock())
                if self.clock() >= next_beat or self.news.code is not None:
                    next_beat = self.clock() + self.beat_s
                    for line in [line for line in self._lines if not line.write(self._said())]:
                        self._drop(selector, line)
            # The others may still have to hear how the job ended.
            for line in self._lines:
                line.write(self._said())
                line.connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._lines.append(Line(connection))
        selector.register(connection, selectors.EVENT_READ, self._lines[-1])

    def _drop(self, selector: selectors.BaseSelector, line: Line) -> None:
        """Forget a connection; its node may connect again within `silent_s`."""
        selector.unregister(line.connection)
        line.connection.close()
        self._lines.remove(line)

    def _hear(self, line: Line) -> bool:
        said = line.read()
        for message in said or []:
            node, code = message.get("node"), message.get("code")
            if message.get("job") != self.job or not isinstance(node, int) or not 0 < node < self.nodes:
                return False
            life = str(message.get("life"))
            known = self._known.get(node)
            if known is None or known.life != life:
                if known is not None and self.news.all_here:
                    self._replaced = self._replaced or f"node {node}"
                    return False
                known = self._known[node] = _Node(life, 0.0)
            known.heard, line.node = self.clock(), node
            if isinstance(code, int):
                known.code = code
        return said is not None

    def _judge(self, now: float) -> News:
        silent = [
            node for node, known in self._known.items() if known.code is None and now - known.heard > self.silent_s
        ]
        all_here = self.news.all_here or len(self._known) - len(silent) == self.nodes - 1
        while silent and not all_here:
            # It has no ranks yet, and may come again.
            del self._known[silent.pop()]
        codes = [self.mine, *(known.code for known in self._known.values())]
        ended = [code for code in codes if code is not None]
        return News(
            all_here=all_here,
            silent=self.news.silent or self._replaced or (f"node {silent[0]}" if silent else ""),
            failed=any(code not in (EXIT_DONE, EXIT_REQUEUE) for code in ended),
            code=job_exit_code(ended) if all_here and len(ended) == self.nodes else None,
        )

    def _said(self) -> dict[str, Any]:
        return {"job": self.job, "life": self._life, **vars(self.news)}


class Member(Beats):
    """Any other node's: hears node 0."""

    def __init__(self, job: str, node: int, nodes: int, hub: tuple[str, int], **times: Any) -> None:
        super().__init__(job, node, nodes, **times)
        self._hub: tuple[str, int] = hub
        self._reached: tuple[str, int] = hub
        """Its address, found once: a name service that fails later must not look like a node 0 that is silent."""
        self._hub_life = ""
        self.heard: float | None = None
        """When node 0 spoke last; None before it has come."""

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                address = self._reached if self.news.all_here else self._hub
                connection = socket.create_connection(address, timeout=self.beat_s)
                self._reached = connection.getpeername()[:2]
            except OSError:
                self._note_silence()
                self._closing.wait(self.beat_s / 4)
                continue
            with connection:
                self._talk(Line(connection))
            self._note_silence()

    def _talk(self, line: Line) -> None:
        next_beat = self.clock()
        told = self.mine
        line.connection.settimeout(self.beat_s / 4)
        while not self._closing.is_set():
            if self.clock() >= next_beat or told != self.mine:
                next_beat, told = self.clock() + self.beat_s, self.mine
                if not line.write({"job": self.job, "life": self._life, "node": self.node, "code": told}):
                    return
            said = self._read(line)
            if said is None:
                self._closing.wait(self.beat_s / 4)
                return
            for message in said:
                life = str(message.get("life"))
                if self.news.all_here and life != self._hub_life:
                    self.news = News(True, "node 0", self.news.failed)
                    return
                self._hub_life = life
                self.heard = self.clock()
                self.news = _news(message)
            if self._note_silence():
                return

    def _read(self, line: Line) -> list[dict[str, Any]] | None:
        said = line.read()
        if said is None or any(message.get("job") != self.job for message in said):
            return None
        return said

    def _note_silence(self) -> bool:
        """Whether node 0 has been silent for too long since all were there; before, it may take its time and come anew."""
        silent = self.news.all_here and self.heard is not None and self.clock() - self.heard > self.silent_s
        if silent and self.news.code is None:
            self.news = News(True, "node 0", self.news.failed)
        return silent


def _news(message: dict[str, Any]) -> News:
    code = message.get("code")
    return News(
        all_here=message.get("all_here") is True,
        silent=str(message.get("silent", ""))[:80],
        failed=message.get("failed") is True,
        code=code if isinstance(code, int) else None,
    )
