"""Security-group rules as a table: nothing comes in from outside the cluster but SSH from where the spec says, and EFA has
the pair of rules it needs."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Literal

from infra.catalog.efs import EFS_PORT
from infra.catalog.fsx import LUSTRE_PORTS, NFS_PORTS
from infra.config import ClusterSpec
from infra.plan.network.endpoints import interface_services
from infra.plan.place import PRIVATE_RANGES
from infra.plan.storage.lustre import efa_wanted
from infra.plan.watch.machine import scraped_ports

Direction = Literal["ingress", "egress"]
PeerKind = Literal["group", "group-id", "cidr", "prefix-list", "prefix-list-id"]

EVERYWHERE = "0.0.0.0/0"
WORLD = {4: 8, 6: 16}
"""By IP version: public ranges with a shorter prefix are the world, whole or in pieces; ours: no company owns as much."""
EFA = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html"


def ipv4_block(text: str, *, strict: bool = True) -> IPv4Network | None:
    """Return the range that the text names; None where it names none, or with `strict` begins inside its range."""
    try:
        return IPv4Network(text, strict=strict) if "/" in text else None
    except ValueError:
        return None


def too_wide(block: IPv4Network) -> bool:
    """Whether the range is more of the internet than anybody owns."""
    return block.prefixlen < WORLD[4]


@dataclass(frozen=True)
class Peer:
    """The other end: one of our groups by key, a foreign one by id, a block, the prefix list of a service, or one by id."""

    kind: PeerKind
    value: str


@dataclass(frozen=True)
class Rule:
    """One rule of the group with that key. `protocol` is tcp, udp, or -1 for all, which has no ports."""

    group: str
    direction: Direction
    protocol: Literal["tcp", "udp", "-1"]
    ports: tuple[int, int] | None
    peer: Peer
    why: str

    @property
    def key(self) -> str:
        """Names the rule within the cluster, whatever order it comes in."""
        what = "all" if self.ports is None else f"{self.protocol}-{self.ports[0]}"
        other = self.peer.value.replace("/", "-")
        return f"{self.group}-{self.direction}-{what}-{other}"


DESCRIPTIONS = {
    "cluster": "All nodes, and what they reach over EFA",
    "lustre": "FSx for Lustre without EFA",
    "home": "FSx for OpenZFS",
    "efs": "EFS for home folders",
    "endpoints": "Interface endpoints",
    "monitor": "Prometheus and Grafana: nothing comes in",
}
"""By group key; a description cannot be changed without replacing the group, and then what it is attached to."""


def rules(spec: ClusterSpec) -> tuple[Rule, ...]:
    """All rules of all groups: `cluster` always, and one for each kind of thing that nodes talk to by fewer ports."""
    return (*_cluster(spec), *_lustre(spec), *_home(spec), *_monitor(spec), *_endpoints(spec))


def _cluster(spec: ClusterSpec) -> tuple[Rule, ...]:
    own = Peer("group", "cluster")
    why = f"EFA needs all traffic of the group to itself, in a rule of its own for each direction: {EFA}"
    return (
        Rule("cluster", "ingress", "-1", None, own, why),
        Rule("cluster", "egress", "-1", None, own, why),
        *_way_out(spec, "cluster"),
        *_existing_lustre(spec),
        *_ssh(spec),
    )


def _ssh(spec: ClusterSpec) -> tuple[Rule, ...]:
    sources = dict.fromkeys(spec.network.allow_from)
    peers = (Peer("prefix-list-id" if source.startswith("pl-") else "cidr", source) for source in sources)
    return tuple(Rule("cluster", "ingress", "tcp", (22, 22), peer, "SSH") for peer in peers)


def _way_out(spec: ClusterSpec, group: str) -> tuple[Rule, ...]:
    """Where machines of a group may connect to; answers come back without a rule."""
    if not spec.network.closed:
        return (Rule(group, "egress", "-1", None, Peer("cidr", EVERYWHERE), "S3, images, packages, SSM"),)
    inside = PRIVATE_RANGES if spec.network.existing else (spec.network.cidr,)
    return (
        *(Rule(group, "egress", "-1", None, Peer("cidr", item), "inside of the closed network") for item in inside),
        Rule(group, "egress", "tcp", (443, 443), Peer("prefix-list", "s3"), "S3 through the gateway endpoint"),
    )


def _existing_lustre(spec: ClusterSpec) -> tuple[Rule, ...]:
    """Servers of a file system that is there already connect to clients too; its own group stays as it is."""
    config = spec.storage.lustre
    if config is None or config.existing is None:
        return ()
    peer = Peer("group-id", config.existing.security_group_id)
    if config.existing.efa:
        why = "EFA between the nodes and an EFA-enabled file system"
        return (
            Rule("cluster", "ingress", "-1", None, peer, why),
            Rule("cluster", "egress", "-1", None, peer, why),
        )
    return tuple(Rule("cluster", "ingress", "tcp", ports, peer, "Lustre servers call back") for ports in LUSTRE_PORTS)


def _lustre(spec: ClusterSpec) -> tuple[Rule, ...]:
    """Return the rules of Lustre's own group.

    An EFA-enabled file system is in the cluster's group instead: FSx refuses it unless all traffic is open both ways
    (https://docs.aws.amazon.com/fsx/latest/LustreGuide/cannot-create-fs.html)."""
    config = spec.storage.lustre
    if config is None or config.existing is not None or efa_wanted(spec):
        return ()
    directions: tuple[Direction, ...] = ("ingress", "egress")
    servers = tuple(
        Rule("lustre", direction, "tcp", ports, Peer("group", peer), "Lustre LNET")
        for direction in directions
        for ports in LUSTRE_PORTS
        for peer in ("cluster", "lustre")
    )
    back = tuple(
        Rule("cluster", "ingress", "tcp", ports, Peer("group", "lustre"), "Lustre servers call back")
        for ports in LUSTRE_PORTS
    )
    return (*servers, *back)


def _home(spec: ClusterSpec) -> tuple[Rule, ...]:
    config = spec.storage.home
    if config is None or config.existing is not None:
        return ()
    if config.type == "efs":
        return (Rule("efs", "ingress", "tcp", (EFS_PORT, EFS_PORT), Peer("group", "cluster"), "NFS"),)
    protocols: tuple[Literal["tcp", "udp"], ...] = ("tcp", "udp")
    return tuple(
        Rule("home", "ingress", protocol, ports, Peer("group", "cluster"), "NFS")
        for protocol in protocols
        for ports in NFS_PORTS
    )


def _monitor(spec: ClusterSpec) -> tuple[Rule, ...]:
    """Return the rules by which the monitor reaches what nodes measure, and nothing reaches the monitor: Session Manager
    comes by a connection that the machine opens."""
    if spec.monitor is None:
        return ()
    scraped = tuple(
        Rule("cluster", "ingress", "tcp", ports, Peer("group", "monitor"), "metrics for Prometheus")
        for ports in scraped_ports(spec)
    )
    return (*scraped, *_way_out(spec, "monitor"))


def _endpoints(spec: ClusterSpec) -> tuple[Rule, ...]:
    if not interface_services(spec):
        return ()
    return tuple(
        Rule("endpoints", "ingress", "tcp", (443, 443), Peer("group", group), "HTTPS to services of AWS")
        for group in ("cluster", *(["monitor"] if spec.monitor else []))
    )
