"""A server of this machine, at an address in a node's own network.

What listens there is a socket of this process, which hands each connection on to the server.
"""

from __future__ import annotations

import socket
import threading

from rehearsal.lab.network import listen_within

_CHUNK = 65536


class Forward:
    """Until it is closed, what connects to `address` in the network of process `pid` talks to `target` of this machine."""

    def __init__(self, pid: int, address: tuple[str, int], target: tuple[str, int]) -> None:
        self._target = target
        self._listener = listen_within(pid, address)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Let go of the node's network, which the kernel keeps as long as a socket is in it."""
        # close() alone does not wake the thread that waits in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                # The server is gone: to the node it is one that refuses connections.
                near.close()
                continue
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
