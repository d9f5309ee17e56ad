"""How nodes use the file system: layouts of its folders, EFA interfaces, and module options that Lustre needs as it loads.

All other settings of clients are the node agent's (`node_setup/settings/`), which runs once the file system is mounted.
"""

from __future__ import annotations

from typing import Any

from infra.catalog.fsx import EFA_CONNECTIONS
from infra.catalog.instances import Instance
from infra.config import ClusterSpec, Group
from infra.plan.storage.lustre import efa_wanted, takes_lustre_efa
from lustrain.cluster import Stripe
from node_setup.agent.model import Request, Write
from node_setup.agent.owned import MODPROBE
from node_setup.agent.run.plan import plan
from node_setup.agent.settings import catalog

MODULE_OPTION = "module-option"
"""The kind of setting that a kernel module takes as it is loaded."""
LUSTRE_EFA = {
    "p6-b300.48xlarge": 16,
    "p6e-gb200.36xlarge": 8,
    "p6-b200.48xlarge": 8,
    "p5en.48xlarge": 8,
    "p5e.48xlarge": 8,
    "p5.48xlarge": 8,
}
"""EFA interfaces that AWS gives to Lustre by default; 2 on other types with several cards, 1 with one
(https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html)."""


def module_options(spec: ClusterSpec, group: Group, document: dict[str, Any]) -> str:
    """Return what the node agent would write to its file of module options on a node of `group`; empty where nothing.

    On EC2 the modules are loaded and the file system is mounted before the agent is there, so that the first boot writes
    the file: the same bytes, by the agent's own plan for a node of this type that has no such file yet.
    """
    kind = spec.node_of(group)
    if kind is None or spec.storage.lustre is None:
        return ""
    settings = tuple(one for one in catalog.load() if one.kind == MODULE_OPTION)
    about_them = {one.id: value for one in settings if (value := spec.tuning.settings.get(one.id)) is not None}
    narrowed = {**document, "tuning": {**document["tuning"], "settings": about_them}}
    planned = plan(settings, expected(kind, group.threads_per_core), Request(narrowed, group.name))
    actions = [action for step in planned.steps for action in step.actions]
    return next((one.content for one in actions if isinstance(one, Write) and one.path == MODPROBE), "")


def expected(kind: Instance, threads_per_core: int) -> dict[str, Any]:
    """Return what the agent will find on a node of this type with `threads_per_core` of its threads on, before Lustre is
    loaded."""
    cores = kind.vcpus // kind.threads_per_core
    return {
        "cpu": {"count": cores * min(threads_per_core, kind.threads_per_core)},
        "memory": {"gib": kind.memory_mib / 1024},
        "instance": {"type": kind.name},
        "modules": {"supported": True, "loaded": [], "parameters": {}, "files": [], "aws_lustre_block": False},
        "files": {MODPROBE: None},
    }


def stripes(spec: ClusterSpec) -> tuple[Stripe, ...]:
    """Layouts of folders, to be set while they are empty; empty without a file system.

    The file system's own default, which widens with a file's size, stays for all other folders. Imported files follow
    the association's chunk size, whatever their folder says. -1 is all storage targets: how many there are, only `lfs df`
    knows. Large files gain from many targets; one below 10 MB on many pays a round trip for each
    (https://docs.aws.amazon.com/fsx/latest/LustreGuide/performance.html#striping-data).
    """
    lustre = spec.storage.lustre
    if lustre is None:
        return ()
    root = lustre.mount_path
    progressive = "-E 100M -c 1 -E 10G -c 8 -E -1 -c -1 -S 16M"
    wide = "-c -1 -S 16M"
    return (
        Stripe(
            path=f"{root}/checkpoints",
            options=tuple(progressive.split()),
            why="shards over all targets, the small files beside them on one",
        ),
        Stripe(path=f"{root}/containers", options=tuple(wide.split()), why="one large image that every node reads"),
        Stripe(path=f"{root}/logs", options=("-c", "1"), why="small files that grow line by line"),
    )


def lustre_interfaces(spec: ClusterSpec, group: Group) -> int:
    """AWS's number for the type of `group`, fewer where all the cluster's nodes would open more connections than a file system
    takes; 0 where Lustre is reached over TCP: the file system or the group has no EFA, there is no connection left, or the
    group lies in another zone, which EFA does not reach
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits)."""
    if not efa_wanted(spec):
        return 0
    nodes = sum(other.count for other in spec.workers if _wanted(spec, other))
    return min(_wanted(spec, group), EFA_CONNECTIONS // max(nodes, 1))


def _wanted(spec: ClusterSpec, group: Group) -> int:
    return by_default(spec.node_of(group)) if spec.zone_of(group) == spec.zone_id else 0


def by_default(kind: Instance | None) -> int:
    """AWS's number for a type; 0 for one whose EFA Lustre does not take."""
    if kind is None or not takes_lustre_efa(kind):
        return 0
    return LUSTRE_EFA.get(kind.name, 2 if len(kind.cards) > 1 else 1)
