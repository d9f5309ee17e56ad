"""Which nodes of Kubernetes have room for a pod of a run. Pure: it reads objects as the API server gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

RUN_NAME = "lustrain.dev/run-name"
"""Label of the pods of a run of N to M nodes."""
_BUILT_IN = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", "node.kubernetes.io/unschedulable")
"""Taints of what a node's status says as well:
https://kubernetes.io/docs/reference/labels-annotations-taints/#node-kubernetes-io-not-ready"""
_REPELS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class PodNeeds:
    """What a pod of the run requires of its node."""

    name: str
    """The run's."""
    namespace: str
    """The run's: another one may have a run of this name."""
    labels: Mapping[str, str]
    tolerated: frozenset[tuple[str, str]]
    """Taints: key and effect."""
    devices: Mapping[str, int]
    """Extended resources, like nvidia.com/gpu: whole numbers, and limits that are requests."""


def left_out(nodes: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]], needs: PodNeeds) -> dict[str, str]:
    """Return, for each node that has the labels, why no pod of the run can start there now; empty where one can."""
    by_node: dict[str, list[Mapping[str, Any]]] = {}
    for pod in pods:
        # One that has ended holds nothing: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-phase
        if pod["spec"].get("nodeName") and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            by_node.setdefault(pod["spec"]["nodeName"], []).append(pod)
    found: dict[str, str] = {}
    hosts: dict[str, str] = {}
    for node in nodes:
        name = node["metadata"]["name"]
        if needs.labels.items() <= node["metadata"].get("labels", {}).items():
            found[name] = _why_not(node, by_node.get(name, ()), needs)
            # Two pods of one host name would be one to the ranks that look for the first.
            other = hosts.setdefault(name.partition(".")[0], name)
            if other != name:
                found[name] = f"its name is that of {other} up to the first dot"
    return found


def is_ready(node: Mapping[str, Any]) -> bool:
    """Whether its kubelet reports, and would start pods."""
    conditions = node.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _why_not(node: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], needs: PodNeeds) -> str:
    if not is_ready(node):
        return "it is not ready"
    spec = node.get("spec", {})
    if spec.get("unschedulable"):
        return "it is cordoned"
    for taint in spec.get("taints", ()):
        tolerated = (taint["key"], taint["effect"]) in needs.tolerated
        if taint["effect"] in _REPELS and taint["key"] not in _BUILT_IN and not tolerated:
            return f"its taint {taint['key']}:{taint['effect']} is not tolerated"
    for pod in pods:
        about = pod["metadata"]
        if about["namespace"] == needs.namespace and about.get("labels", {}).get(RUN_NAME) == needs.name:
            return f"pod {pod['metadata']['name']} of the run is still there"
    for device, needed in needs.devices.items():
        total = _count(node["status"].get("allocatable", {}).get(device, "0"))
        free = total - sum(_requested(pod, device) for pod in pods)
        if free < needed:
            return f"{max(free, 0)} of its {total} {device} are free, and {needed} are needed"
    return ""


def _requested(pod: Mapping[str, Any], device: str) -> int:
    """Return what the scheduler counts: all containers together, or more for one that runs before them.

    https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers
    """

    def of(container: Mapping[str, Any]) -> int:
        return _count(container.get("resources", {}).get("requests", {}).get(device, "0"))

    spec = pod["spec"]
    sidecars = 0
    first = 0
    for container in spec.get("initContainers", ()):
        if container.get("restartPolicy") == "Always":
            sidecars += of(container)
            first = max(first, sidecars)
        else:
            first = max(first, sidecars + of(container))
    return max(first, sidecars + sum(map(of, spec.get("containers", ()))))


def _count(quantity: object) -> int:
    """Return a quantity of devices: they come in whole numbers, which may be written as 2k."""
    match = re.fullmatch(r"(\d+)(k?)", str(quantity))
    return int(match[1]) * (1000 if match[2] else 1) if match else 0
