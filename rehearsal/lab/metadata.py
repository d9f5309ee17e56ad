"""Instance metadata of one node, at the address where an instance looks for it.

The server runs in this process (`infra.local.metadata`); what listens in the node's network is a socket of ours that hands
each connection on to it, so tests drive it by calling its methods.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from infra.local.metadata import LocalMetadata
from rehearsal.lab.network import listen_within

ADDRESS = ("169.254.169.254", 80)
_CHUNK = 65536


class NodeMetadata:
    """This serves metadata for the node whose PID 1 is `pid`; it stays the same server when the node boots again."""

    def __init__(self, pid: int, identity: Mapping[str, str]) -> None:
        self.server = LocalMetadata(identity).start()
        self._listener: socket.socket | None = None
        self.move(pid)

    def move(self, pid: int) -> None:
        """Listen in the network of the node that has just booted."""
        self.unplug()
        listener = listen_within(pid, ADDRESS)
        self._listener = listener
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def unplug(self) -> None:
        """Let go of the node's network, which the kernel keeps as long as a socket is in it."""
        if self._listener is not None:
            # close() alone does not wake the thread that waits in accept().
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def stop(self) -> None:
        self.unplug()
        self.server.stop()

    def _serve(self, listener: socket.socket) -> None:
        target = urlsplit(self.server.endpoint)
        assert target.hostname is not None
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection((target.hostname, target.port or 80))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        sink.close()
