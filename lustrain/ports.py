"""Ports that stay free for who is to listen there."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def hold_port(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a socket that keeps a free port, this one or any: until it is closed Linux gives it to nobody else.

    A port that is looked up and let go may be taken before the server listens, by a connection or by another server; who waits
    for the one would meet the other. A socket that is bound and does not listen leaves its port to a server that sets
    SO_REUSEADDR as well, as torch's store, sshd and programs in Go do (https://man7.org/linux/man-pages/man7/socket.7.html).
    OSError where the port is taken.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, port))
    except BaseException:
        held.close()
        raise
    return held


def ports_in_a_row(count: int, among: range) -> list[int]:
    """Return ports of loopback that are free now, one after the other; `among` lies below those that Linux gives away by itself
    (net.ipv4.ip_local_port_range), so that they stay free. RuntimeError where there are none."""
    for first in among[::count]:
        wanted = range(first, first + count)
        with ExitStack() as held:
            try:
                for port in wanted:
                    held.enter_context(hold_port(port=port))
            except OSError:
                continue
        return [*wanted]
    raise RuntimeError(f"no {count} free ports from {among.start} to {among.stop}")
