"""A node on the operator's side, and nodes named on the command line or in a file of lines."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lustrain.problem import UNREACHABLE, UserError, problem

SPELLING = "like 10.0.0.5, node1.example.com, ubuntu@node1:2222 or [fd00::5]:2222"
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9._-]+)@)?"
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.%a-z]+)\]|(?P<v6>[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*)|(?P<host>[A-Za-z0-9._-]+))"
    r"(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True)
class Route:
    """This is how to log in; None leaves it to the user's SSH configuration.

    `key` is the path of a private key, `jump` a `user@host:port` to go through, `proxy` the words of a program whose
    standard input and output are the connection.
    """

    user: str | None = None
    port: int | None = None
    key: str | None = None
    jump: str | None = None
    proxy: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """This is one machine. `name` is unique in a run and what reports show; `local` is this machine, without SSH."""

    name: str
    address: str
    group: str | None = None
    instance_id: str | None = None
    instance_type: str | None = None
    route: Route = field(default_factory=Route)
    local: bool = False

    @property
    def key_name(self) -> str:
        """Return the name under which its host key is recorded: the instance where one is known, since addresses come back on
        others."""
        if self.instance_id:
            return self.instance_id
        return f"[{self.address}]:{self.route.port}" if self.route.port not in (None, 22) else self.address


THIS_MACHINE = Node("localhost", "localhost", local=True)


def parse_host(text: str, path: str, route: Route | None = None, group: str | None = None) -> Node:
    """Read a node from `[user@]host[:port]`; what the text leaves open is as `route` says. UserError."""
    route = route or Route()
    match = _HOST.fullmatch(text)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or text.startswith("-") or (port is not None and not 0 < port < 65536):
        raise UserError(problem(path, text, "is not an address of a machine", allowed=SPELLING))
    address = match["bracketed"] or match["v6"] or match["host"]
    own = Route(match["user"] or route.user, port or route.port, route.key, route.jump)
    shown = address if port is None else text.rpartition("@")[2]
    return Node(shown, address, group, route=own)


def parse_hosts(text: str, path: str, route: Route | None = None) -> list[Node]:
    """Read the nodes of a comma-separated list. UserError."""
    words = [word.strip() for word in text.split(",")]
    return unique([parse_host(word, path, route) for word in words if word], path)


def parse_lines(text: str, path: str, route: Route | None = None) -> list[Node]:
    """Read the nodes of a file of lines `host [group]`; `#` begins a comment. UserError names the line."""
    nodes = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) > 2 or (words[1:] and not _GROUP.fullmatch(words[1])):
            raise UserError(problem(f"{path}:{number}", line.strip(), "is not a line `host [group]`", allowed=SPELLING))
        if words:
            nodes.append(parse_host(words[0], f"{path}:{number}", route, words[1] if words[1:] else None))
    return unique(nodes, path)


def unique(nodes: Iterable[Node], path: str) -> list[Node]:
    """Return the nodes as they are; UserError where one is named twice, which would tune it from two sides at once."""
    by_place: dict[tuple[str, int], Node] = {}
    for node in nodes:
        first = by_place.setdefault(_place(node), node)
        if first is not node:
            also = "" if first.name == node.name else f", before as {first.name}"
            raise UserError(problem(path, node.name, f"is named twice{also}", fix="name it once"))
    return list(by_place.values())


def _place(node: Node) -> tuple[str, int]:
    """Return where a node listens, however its address is spelled; names that only a name server knows to be one stay two."""
    address = node.address.lower().rstrip(".")
    with suppress(ValueError):
        address = str(ipaddress.ip_address(address))
    return address, node.route.port or 22


def select(nodes: Sequence[Node], groups: Sequence[str] = (), pattern: str | None = None) -> list[Node]:
    """Select nodes of these groups whose name, address or instance id the glob matches; UserError (3) where none is left."""
    known = sorted({node.group for node in nodes if node.group})
    for group in groups:
        if group not in known:
            why = "no node is known to belong to this group"
            raise UserError(
                problem("--group", group, why, allowed=", ".join(known) or "none is known here"), UNREACHABLE
            )
    left = [node for node in nodes if not groups or node.group in groups]
    if pattern is not None:
        left = [node for node in left if _matches(node, pattern)]
        if not left:
            names = [node.name for node in nodes]
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")
            raise UserError(
                problem("--node", pattern, "matches no node", allowed=f"a glob over {shown or 'none'}"), UNREACHABLE
            )
    return left


def _matches(node: Node, pattern: str) -> bool:
    return any(name and fnmatchcase(name, pattern) for name in (node.name, node.address, node.instance_id))
