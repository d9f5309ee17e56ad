"""Connections to nodes: over SSH, through a jump host or a program, with time limits and checked host keys."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fabric import Config, Connection
from paramiko import Transport
from paramiko.ssh_exception import SSHException

from lustrain.backoff import pause_s
from node_setup.fleet.faults import STOPPED, UNREACHABLE, Fault, of_connecting
from node_setup.fleet.hosts import Node, parse_host
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.proxy import Proxy, fix_of
from node_setup.fleet.session import KEEPALIVE_S, LocalSession, Session, SshSession
from node_setup.fleet.tcp import dial

# Otherwise Python prints paramiko's traceback of every connection that fails: we tell it in one line.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Limits:
    """These are the seconds to connect, for banner and login, and to open a channel; and how often to connect again."""

    connect_s: float = 10
    login_s: float = 15
    channel_s: float = 15
    retries: int = 2
    first_pause_s: float = 1.0
    longest_pause_s: float = 15.0


class Deadline:
    """This is the moment until which something must be done."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining(self) -> float:
        return max(0.0, self._end - self._clock())


class Connections:
    """This is what the connections of one run share: limits, host keys, jump hosts, and that all of them can be closed at
    once."""

    def __init__(self, known_hosts: KnownHosts, limits: Limits | None = None, config: Config | None = None) -> None:
        self.limits = limits or Limits()
        self.known_hosts = known_hosts
        self.stopped = threading.Event()
        self._config = Config() if config is None else config
        self._open: set[Session] = set()
        self._jumps: dict[str, tuple[threading.Lock, list[Connection]]] = {}
        self._lock = threading.Lock()

    def connect(self, node: Node, deadline: Deadline) -> Session:
        """Open a session; where connecting fails for a passing reason it is tried again after a while. Fault."""
        for tried in range(1, self.limits.retries + 2):
            wait = pause_s(tried, self.limits.first_pause_s, self.limits.longest_pause_s)
            try:
                return LocalSession(self.stopped) if node.local else self._connect_once(node, deadline)
            except Fault as fault:
                if not fault.passing or tried > self.limits.retries or wait >= deadline.remaining():
                    raise
            if self.stopped.wait(wait):
                break
        raise Fault(STOPPED, "stopped before it was reached")

    def close(self, session: Session) -> None:
        session.close()
        with self._lock:
            self._open.discard(session)

    def stop(self) -> None:
        """Close everything; what waits for a node ends with a Fault."""
        self.stopped.set()
        with self._lock:
            sessions = list(self._open)
            jumps = [connection for _, opened in self._jumps.values() for connection in opened]
        for session in sessions:
            session.close()
        for jump in jumps:
            jump.client.close()

    def _connect_once(self, node: Node, deadline: Deadline) -> Session:
        if deadline.remaining() <= 0:
            raise Fault(UNREACHABLE, "no time was left to reach it", "give it more --timeout")
        seconds = min(deadline.remaining(), self.limits.connect_s)
        route = node.route
        connection = self._connection(node.address, route.user, route.port, seconds)
        session: SshSession | None = None
        proxy, began = None, time.monotonic()
        try:
            proxy = self._proxy(node, connection)
            session = SshSession(connection, proxy, self.stopped)
            with self._lock:
                self._open.add(session)
            # Not before it is one of those that stop() closes.
            if self.stopped.is_set():
                raise Fault(STOPPED, "stopped before it was reached")
            self._configure(connection, route.key, node.key_name)
            if proxy is not None:
                connection.connect_kwargs["sock"] = proxy.socket
            else:
                jump = route.jump or connection.ssh_config.get("proxyjump") or ""
                connection.connect_kwargs["sock"] = self._wire(connection, jump, route.key, seconds)
            session.open(min(seconds, self.limits.channel_s))
        except BaseException as error:
            fault = self._fault(error, proxy, connection, node, self._elapsed_if_late(began, seconds))
            if session is not None:
                self.close(session)
            if fault is None:
                raise
            raise fault from None
        return session

    def _connection(self, host: str, user: str | None, port: int | None, seconds: float) -> Connection:
        # A connection writes into its Config while it is made, and a reader at this moment sees it half empty.
        config = self._config.clone()
        # gateway=False: Fabric's own would accept every host key, and leave programs behind.
        made = Connection(host, user, port, config=config, gateway=False, connect_timeout=max(1, round(seconds)))
        made.connect_kwargs = {name: value for name, value in made.connect_kwargs.items() if name != "timeout"}
        return made

    def _configure(self, connection: Connection, key: str | None, recorded_as: str) -> None:
        """Give a connection that is not open yet its limits, its key, and the host keys that it may meet."""
        options = connection.connect_kwargs
        options |= {"banner_timeout": self.limits.login_s, "auth_timeout": self.limits.login_s}
        options |= {"channel_timeout": self.limits.channel_s, "transport_factory": self._transport}
        if key is not None:
            options |= {"key_filename": [key], "look_for_keys": False, "allow_agent": False}
        shown_as = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
        self.known_hosts.trust(connection.client, shown_as, recorded_as)

    def _transport(self, *arguments: Any, **options: Any) -> Transport:
        """Make the transport that paramiko would make; the exchange of keys has the time of the login, not paramiko's own 15
        s."""
        made = Transport(*arguments, **options)
        made.handshake_timeout = self.limits.login_s
        return made

    @staticmethod
    def _proxy(node: Node, connection: Connection) -> Proxy | None:
        if node.route.proxy:
            return Proxy(node.route.proxy)
        # The user's own words, which ssh gives to a shell as well.
        own = None if node.route.jump else connection.ssh_config.get("proxycommand")
        return Proxy(("sh", "-c", f"exec {own}")) if own else None

    def _wire(self, connection: Connection, jump: str, key: str | None, seconds: float) -> Any:
        """Return what carries a connection: TCP, or a channel from a jump host."""
        host, port = str(connection.host), int(connection.port)
        return self._open_through_jump(jump, key, (host, port), seconds) if jump else dial(host, port, seconds)

    def _open_through_jump(self, jump: str, key: str | None, address: tuple[str, int], seconds: float) -> Any:
        """Open a channel to `address` from a jump host, whose one connection is shared by all nodes behind it.

        `jump` may name several, separated by commas, in the order in which they are passed.
        """
        with self._lock:
            lock, opened = self._jumps.setdefault(jump, (threading.Lock(), []))
        with lock:
            if not opened or not opened[-1].is_connected:
                opened.append(self._jump(jump, key, seconds))
            transport = opened[-1].transport
        return transport.open_channel("direct-tcpip", address, ("", 0), timeout=seconds)

    def _jump(self, jump: str, key: str | None, seconds: float) -> Connection:
        before, _, last = jump.rpartition(",")
        host = parse_host(last.strip(), "reach.jump")
        connection = self._connection(host.address, host.route.user, host.route.port, seconds)
        self._configure(connection, key, host.key_name)
        began = time.monotonic()
        try:
            connection.connect_kwargs["sock"] = self._wire(connection, before, key, seconds)
            connection.open()
        except (OSError, SSHException, EOFError, ValueError) as error:
            connection.client.close()
            late_s, path = self._elapsed_if_late(began, seconds), str(self.known_hosts.path)
            fault = of_connecting(error, str(connection.user), late_s, path, host.key_name)
            raise Fault(fault.kind, f"jump host {last}: {fault.why}", fault.fix, passing=fault.passing) from None
        connection.transport.set_keepalive(KEEPALIVE_S)
        return connection

    def _elapsed_if_late(self, began: float, seconds: float) -> float | None:
        spent = time.monotonic() - began
        return spent if spent >= min(seconds, self.limits.login_s, self.limits.channel_s) - 0.2 else None

    def _fault(
        self, error: BaseException, proxy: Proxy | None, connection: Connection, node: Node, late_s: float | None
    ) -> Fault | None:
        """Return the fault behind what went wrong while connecting; None where it is not a node's fault."""
        if self.stopped.is_set():
            return Fault(STOPPED, "stopped before it was reached")
        if isinstance(error, Fault):
            return error
        if not isinstance(error, (OSError, SSHException, EOFError, ValueError)):
            return None
        if proxy is None and node.route.proxy and isinstance(error, FileNotFoundError):
            program = node.route.proxy[0]
            return Fault(UNREACHABLE, f"{program} is not on PATH", f"install {program}: nodes are reached through it")
        fault = of_connecting(error, str(connection.user), late_s, str(self.known_hosts.path), node.key_name)
        complaint = proxy.complaint() if proxy and fault.kind == UNREACHABLE else ""
        if proxy and complaint:
            return Fault(UNREACHABLE, f"{proxy.command[0]}: {complaint}", fix_of(proxy.command), passing=True)
        return fault
