"""The node document: the nodes of a cluster as other tools read them, from the spec alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.config import ClusterSpec, Group
from infra.plan.nodes.capacity import mix
from infra.plan.nodes.clients import lustre_interfaces, stripes
from infra.plan.storage.home import mount_options
from infra.plan.storage.lustre import lustre_plan
from lustrain.cluster import Capacity, FileSystem, HomeSystem, NodeGroup, Tuning, described

METRICS = "agent.metrics"
"""The setting of node_setup/settings/agent.toml."""
NOT_YET = {"id": "", "dns_name": "", "mount_name": ""}
"""Names of a file system that is not made yet."""


def node_document(spec: ClusterSpec, only: Group | None = None) -> dict[str, Any]:
    """`lustrain.cluster.node_document` of the cluster that this spec will become; with `only`, as a node of this group needs
    it for itself."""
    paths = tuple(mount.path for mount in spec.storage.s3_mounts)
    lustre, home = file_system(spec, NOT_YET), home_system(spec, NOT_YET)
    groups = node_groups(spec) if only is None else {only.name: node_group(spec, only)}
    return described(spec.name, spec.backend, groups, lustre, tuning(spec), paths, home)


def shows_metrics(spec: ClusterSpec) -> bool:
    """Return whether nodes run exporters for the cluster's monitor; on EKS AWS's add-on has its own."""
    return spec.monitor is not None


def tuning(spec: ClusterSpec) -> Tuning:
    """Return what the spec says of tuning. Nodes write their metrics where a monitor reads them, unless it says otherwise."""
    if not shows_metrics(spec):
        return spec.tuning
    return spec.tuning.model_copy(update={"settings": {METRICS: "on", **spec.tuning.settings}})


def node_groups(spec: ClusterSpec) -> dict[str, NodeGroup]:
    """Return all groups by name, Slurm's controller among them."""
    return {group.name: node_group(spec, group) for group in spec.all_groups}


def node_group(spec: ClusterSpec, group: Group) -> NodeGroup:
    kind = spec.node_of(group)
    accelerators = kind.accelerators if kind else ()
    mixed = None if spec.hyperpod else mix(group)
    return NodeGroup(
        type=group.ec2_type,
        count=group.count,
        role=group.role,
        gpus=sum(accelerator.count for accelerator in accelerators if accelerator.kind == "gpu"),
        accelerator=accelerators[0].name if accelerators else None,
        efa=kind.efa if kind else 0,
        nvme=kind.nvme_count if kind else 0,
        lustre_efa=lustre_interfaces(spec, group),
        other_types=(mixed.types[1:] or None) if mixed else None,
        by_hand=group.ec2_type in spec.instance_types or None,
        partition=group.slurm_partition
        if (spec.backend == "hyperpod-slurm" or spec.controller) and group.role == "worker"
        else None,
        labels=group.labels,
        taints=group.taints,
        capacity=Capacity(mode=group.capacity.mode, ends_at=group.capacity.ends_at),
    )


def home_system(spec: ClusterSpec, made: Mapping[str, str]) -> HomeSystem | None:
    """Return the file system of homes as `made` calls it (`id`, `dns_name`); None without one."""
    config = spec.storage.home
    if config is None:
        return None
    return HomeSystem(id=made["id"], dns_name=made["dns_name"], path=config.mount_path, options=mount_options(spec))


def file_system(spec: ClusterSpec, made: Mapping[str, str]) -> FileSystem | None:
    """Return the file system as `made` calls it (`id`, `dns_name`, `mount_name`); None without one."""
    plan = lustre_plan(spec)
    if plan is None:
        return None
    return FileSystem(
        id=made["id"],
        dns_name=made["dns_name"],
        mount_name=made["mount_name"],
        path=plan.mount_path,
        efa=plan.efa,
        throughput_mb_s=plan.throughput_mb_s,
        stripes=stripes(spec),
    )
