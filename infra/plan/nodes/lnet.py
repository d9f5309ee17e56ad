"""The number of EFA interfaces for Lustre on a node; the agent adds them to LNet (`node_setup/agent/kinds/lnet_efa.py`)."""

from __future__ import annotations

from infra.catalog.instances import Instance, instance
from infra.config import ClusterSpec, Group
from infra.plan.storage.lustre import efa_wanted

EFA_CONNECTIONS = 1024
"""EFA interfaces of all clients that one file system takes
(https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html)."""
LUSTRE_EFA = {
    "p6-b300.48xlarge": 16,
    "p6e-gb200.36xlarge": 8,
    "p6-b200.48xlarge": 8,
    "p5en.48xlarge": 8,
    "p5e.48xlarge": 8,
    "p5.48xlarge": 8,
}
"""EFA interfaces that AWS gives to Lustre by default; 2 on other types with several cards, 1 with one (same page)."""
WITHOUT_LUSTRE_EFA = ("trn2.", "trn2u.")
"""The same page excludes this family."""


def lustre_interfaces(spec: ClusterSpec, group: Group) -> int:
    """AWS's number for the type of `group`, fewer where all the cluster's nodes would open more connections than a file system
    takes; 0 where Lustre is reached over TCP: the file system or the type has no EFA, the group lies in another zone, which EFA
    does not reach (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits), or there is no connection left."""
    if not efa_wanted(spec):
        return 0
    nodes = sum(other.count for other in spec.workers if _wanted(spec, other))
    return min(_wanted(spec, group), EFA_CONNECTIONS // max(nodes, 1))


def _wanted(spec: ClusterSpec, group: Group) -> int:
    return by_default(instance(group.ec2_type)) if spec.zone_of(group) == spec.zone_id else 0


def by_default(kind: Instance | None) -> int:
    """AWS's number for a type; 0 for one whose EFA Lustre does not take."""
    if kind is None or not kind.efa or kind.name.startswith(WITHOUT_LUSTRE_EFA):
        return 0
    return LUSTRE_EFA.get(kind.name, 2 if len(kind.cards) > 1 else 1)
