"""Slurm's files where nodes come and go: slurm.conf names groups and no node, so that it follows from the stack alone. Pure.

Dynamic nodes: https://slurm.schedmd.com/dynamic_nodes.html
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lustrain.cluster import NodeGroup
from node_setup.agent.slurm import gres, paths
from node_setup.slurm import accounting
from node_setup.slurm.conf import (
    HEALTH_CHECK,
    HEALTH_SCRIPT,
    HELD,
    cluster_name,
    partition_lines,
    replaced,
    shared_settings,
)

MOST_NODES = 4096
"""Of MaxNodeCount. It does not follow from the groups' counts, which may change without another slurm.conf."""
NO_FANOUT = 65533
"""Of TreeWidth: nodes do not pass messages on to dynamic nodes, of which they know no address (dynamic_nodes.html)."""


class Records(NamedTuple):
    """How long slurmdbd keeps records, and a database that is not on the controller."""

    keep_months: int
    database: accounting.Database | None = None


def document(
    name: str,
    groups: Mapping[str, NodeGroup],
    settings: Mapping[str, str],
    *,
    to_zero: Mapping[str, int] = MappingProxyType({}),
    idle_minutes: float = 0,
    records: Records | None = None,
) -> dict[str, Any]:
    """Return what `slurm-boot` of the node agent reads: the files of /etc/slurm but for the controller's name and address,
    and cgroup.conf by the control groups that a node has. Machines of the groups `to_zero`, with the processors of their
    smallest machine, end after `idle_minutes` without a job. With `records` there is a slurmdbd."""
    workers = {key: group for key, group in groups.items() if group.role == "worker"}
    partitions = {key: workers[key].partition or key for key in to_zero}
    scaling = {"idle_minutes": idle_minutes, "partitions": partitions, "cpus": dict(to_zero)}
    return {
        "version": 1,
        "files": {
            "slurm.conf": _slurm_conf(name, workers, settings, accounts=records is not None),
            HEALTH_CHECK: HEALTH_SCRIPT.replace(paths.HEADER, paths.STACK_HEADER),
        },
        "cgroup": {
            **{kind: _cgroup_conf(f"CgroupPlugin=cgroup/{kind}", *HELD) for kind in ("v1", "v2")},
            # Slurm looks for a plugin at its start, whatever uses it.
            "none": _cgroup_conf("CgroupPlugin=cgroup/v1"),
        },
        "gpus": {key: group.gpus for key, group in workers.items()},
        **({"accounting": accounting.document(cluster_name(name), *records)} if records else {}),
        **({"scaling": scaling} if to_zero else {}),
    }


def _slurm_conf(name: str, workers: Mapping[str, NodeGroup], settings: Mapping[str, str], *, accounts: bool) -> str:
    gpus = any(group.gpus for group in workers.values())
    own = {
        "ClusterName": cluster_name(name),
        **shared_settings(by_cgroups=True, gpus=gpus),
        **(accounting.settings(by_cgroups=True, gpus=gpus) if accounts else {}),
        "MaxNodeCount": str(MOST_NODES),
        "TreeWidth": str(NO_FANOUT),
    }
    lines = [f"{key}={value}" for key, value in replaced(own, settings).items()]
    sets = {key: "".join(gres.features([key])) for key in workers}
    lines += ["", *(f"NodeSet={word} Feature={word}" for word in sets.values()), ""]
    partitions: dict[str, list[str]] = {}
    for key, group in workers.items():
        partitions.setdefault(group.partition or key, []).append(sets[key])
    return paths.STACK_HEADER + "\n".join([*lines, *partition_lines(partitions)]) + "\n"


def _cgroup_conf(*lines: str) -> str:
    return paths.STACK_HEADER + "".join(f"{line}\n" for line in lines)
