"""Instance metadata of one node, at the address where an instance looks for it.

The server runs in this process (`infra.local.metadata`), so tests drive it by calling its methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from infra.local.metadata import LocalMetadata
from rehearsal.lab.forward import Forward

ADDRESS = ("169.254.169.254", 80)


class NodeMetadata:
    """This serves metadata for the node whose PID 1 is `pid`; it stays the same server when the node boots again."""

    def __init__(self, pid: int, identity: Mapping[str, str]) -> None:
        self.server = LocalMetadata(identity).start()
        self._forward: Forward | None = None
        self.move(pid)

    def move(self, pid: int) -> None:
        """Listen in the network of the node that has just booted."""
        self.unplug()
        target = urlsplit(self.server.endpoint)
        assert target.hostname is not None
        self._forward = Forward(pid, ADDRESS, (target.hostname, target.port or 80))

    def unplug(self) -> None:
        """Let go of the node's network."""
        if self._forward is not None:
            self._forward.close()
            self._forward = None

    def stop(self) -> None:
        self.unplug()
        self.server.stop()
