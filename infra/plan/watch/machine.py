"""The monitor: the machine that scrapes a cluster's nodes, on EC2 and beside HyperPod's Slurm.

Nothing connects to it but Session Manager, so that it needs no fixed address. Whatever it boots with makes its instance anew;
what Prometheus and Grafana keep lies on a volume that moves over.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.config import CONTROLLER, MONITOR, ClusterSpec
from infra.plan import nodes
from infra.plan.nodes.bundle import SHA_DIGITS, Bundle, BundleFile, bundle_of
from infra.plan.nodes.machine import MachinePlan, machine_image
from infra.plan.nodes.proxy import environment, files
from infra.plan.nodes.user_data import first_boot
from infra.plan.place import ANYWHERE, Place, tags
from infra.plan.watch.interruptions import topic_name
from infra.plan.watch.monitor import (
    GPU_PORT,
    GRAFANA_PORT,
    NODE_PORT,
    PROMETHEUS_PORT,
    MonitorSettings,
    monitor_files,
)

WORKSPACE_URL = "https://{workspace}/"
"""Stands in the monitor's files for the base of the AMP workspace, which is known after the deployment only."""
SCRIPTS = tuple(Path(nodes.__file__).with_name(name) for name in ("monitor.sh", "packages.sh"))
BODY = Path(__file__).with_name("monitor_boot.sh")
FILES = "root"
"""Folder of the bundle whose files go to the same paths under the machine's root."""
PAGES = {"grafana": GRAFANA_PORT, "prometheus": PROMETHEUS_PORT}
"""Ports of what people open in a browser, by the key under `observability`."""


@dataclass(frozen=True)
class MonitorPlan(MachinePlan):
    """The machine, and the files that it boots with."""

    settings: MonitorSettings
    proxy_files: Mapping[str, bytes]
    """As on nodes: what apt, snapd and the monitor's own units go by, by the path under the machine's root."""

    @property
    def bundle(self) -> Bundle:
        """The boot script and, under `root/`, its files. It is not the nodes' bundle: a new dashboard is no reason to boot them
        otherwise."""
        texts = {path.lstrip("/"): text.encode("utf-8") for path, text in monitor_files(self.settings).items()}
        generated = [BundleFile(f"{FILES}/{path}", text) for path, text in {**texts, **self.proxy_files}.items()]
        return bundle_of([*(BundleFile(script.name, script.read_bytes(), script) for script in SCRIPTS), *generated])

    @property
    def pages(self) -> dict[str, int]:
        """Ports that answer on the machine, by what answers. An agent that writes to AMP answers no queries."""
        there = {"grafana": self.settings.grafana == "self", "prometheus": self.settings.prometheus == "self"}
        return {page: port for page, port in PAGES.items() if there[page]}


def monitor(spec: ClusterSpec, place: Place) -> MonitorPlan | None:
    """Return the plan of the monitor, None without one; UserError for a type that is not known or runs no Linux."""
    group = spec.monitor
    if group is None:
        return None
    name = host(spec)
    return MonitorPlan(
        name=name,
        group=group,
        zone_id=spec.zone_id,
        image=machine_image(spec, group),
        root_gib=group.root_volume_gib,
        data_gib=spec.observability.monitor.disk_gib,
        # No port of it is open, SSH's neither, and another key would make it anew.
        key_name=None,
        tags={**tags(spec), "Name": name, "lustrain:group": group.name},
        settings=settings(spec, place),
        proxy_files=files(spec, place.region),
    )


def host(spec: ClusterSpec) -> str:
    return f"{spec.name}-{MONITOR}"


def settings(spec: ClusterSpec, place: Place) -> MonitorSettings:
    """Return what the monitor's files are made from."""
    watch = spec.observability
    return MonitorSettings(
        cluster=spec.name,
        region=place.region,
        nodes="hyperpod" if spec.hyperpod else "ec2",
        prometheus=watch.prometheus,
        grafana="self" if watch.grafana == "self" else "none",
        retention_days=watch.monitor.retention_days,
        disk_gib=watch.monitor.disk_gib,
        topic_arn=place.arn("sns", topic_name(spec)),
        workspace_url=WORKSPACE_URL if watch.prometheus == "amp" else "",
        hyperpod_cluster=spec.name if spec.hyperpod else "",
        gpus_per_node=ranks_per_node(spec),
        proxied=spec.network.proxy is not None,
        rankless=tuple(sorted({CONTROLLER, MONITOR, *(group.name for group in spec.groups if group.role != "worker")})),
    )


def ranks_per_node(spec: ClusterSpec) -> int:
    """Return the most ranks that a node has: one for each accelerator, one on a node without any."""
    kinds = (spec.node_of(group) for group in spec.workers)
    return max((kind.accelerator_count for kind in kinds if kind), default=1) or 1


def scraped_ports(spec: ClusterSpec) -> tuple[tuple[int, int], ...]:
    """Return the ranges of ports on which nodes answer the monitor."""
    first = MonitorSettings.trainer_port
    return ((NODE_PORT, NODE_PORT), (GPU_PORT, GPU_PORT), (first, first + ranks_per_node(spec) - 1))


def user_data(spec: ClusterSpec, place: Place, *, bundle_uri: str, volume_id: str) -> str:
    """Return the script of the machine's first boot, which fetches the bundle and has it run at each boot."""
    head = {"cluster": spec.name, "region": place.region, "bundle_uri": bundle_uri, "volume_id": volume_id}
    head |= {name: value for name, value in environment(spec, place.region).items() if name.islower()}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in head.items()]
    first = [
        "#!/bin/bash",
        f"# First boot of the monitor of cluster {spec.name}; written by Lustrain.",
        "set -euo pipefail",
    ]
    return first_boot([*first, *lines], BODY)


def boot_digits(spec: ClusterSpec) -> str | None:
    """Return the first digits of the SHA-256 over all that the monitor boots with; None without one. UserError as `monitor`.

    Region and account are left out: where the digits of one spec differ, another Lustrain made them.
    """
    plan = monitor(spec, ANYWHERE)
    if plan is None:
        return None
    script = user_data(spec, ANYWHERE, bundle_uri=plan.bundle.sha, volume_id="")
    return hashlib.sha256(script.encode()).hexdigest()[:SHA_DIGITS]


def forwarding(instance_id: str, port: int, region: str) -> str:
    """Return the command that brings a page of the monitor to localhost
    (https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-sessions-start.html)."""
    ports = f"portNumber={port},localPortNumber={port}"
    return (
        f"aws ssm start-session --region {region} --target {instance_id} "
        f"--document-name AWS-StartPortForwardingSession --parameters {ports}"
    )
