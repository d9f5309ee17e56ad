"""Ports of loopback that are this process' own until it ends."""

from __future__ import annotations

import socket

from lustrain.ports import hold_port

_HELD: list[socket.socket] = []


def own_port(count: int = 1) -> int:
    """The first of `count` free ports in a row. Nobody listens there but a server of the test that sets SO_REUSEADDR."""
    while True:
        held = [hold_port()]
        first = int(held[0].getsockname()[1])
        try:
            held += [hold_port(port=first + at) for at in range(1, count)]
        except OSError:
            held[0].close()
            continue
        _HELD.extend(held)
        return first
