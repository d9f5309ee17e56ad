"""What of a cluster goes to CloudWatch Logs: the log groups, and the configuration of the agents that fill them. Pure.

On EC2 and HyperPod with Slurm the CloudWatch agent of each node reads files, and takes a run's progress on a port of the node.
On EKS an add-on does both for pods. None of this has run against AWS.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from infra.config import ClusterSpec
from infra.plan.documents import Document, allow, document
from infra.plan.place import Place

ADDON = "amazon-cloudwatch-observability"
"""https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/install-CloudWatch-Observability-EKS-addon.html"""
ADDON_NAMESPACE, ADDON_ACCOUNT = "amazon-cloudwatch", "cloudwatch-agent"
"""Its pods' namespace and service account, which Fluent Bit has too (that page, and the chart
https://github.com/aws-observability/helm-charts)."""
ADDON_UNUSED = (
    "containerInsights",
    "otelContainerInsights",
    "applicationSignals",
    "kubeStateMetrics",
    "nodeExporter",
    "dcgmExporter",
    "neuronMonitor",
)
"""What the add-on brings by default beside logs, in version 6: what is billed by the observation, what changes the pods of
services, and exporters that the node agent has already
(https://github.com/aws-observability/helm-charts/blob/main/RELEASE_NOTES)."""
CONTAINER_STREAMS = ("application", "dataplane", "host")
"""Groups that Fluent Bit writes to, under `/aws/containerinsights/<cluster>/` (that chart)."""
PORT = 25888
"""Where an agent takes lines of the embedded metric format
(https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch_Embedded_Metric_Format_Generation_CloudWatch_Agent.html)."""
LAUNCH_LOGS = "/var/log/lustrain/lustrain-*.log"
"""What launchers that are started over SSH write, and supervisors of detached runs (`launch.backends.ssh_unit`)."""
JOB_LOGS = "/var/log/lustrain-jobs"
"""Where a job of Slurm leaves a copy of what it prints (`launch.backends.slurm_executor`)."""
KERNEL = r"Xid|NVRM|nvidia|\befa\b|Lustre|LNet|nvme|Out of memory|oom-kill|Machine [Cc]heck|Hardware Error|I/O error"
"""What the kernel says that is about hardware, memory or file systems; NVIDIA's driver logs `NVRM: Xid`. As RE2 has it."""
WRITE = ("logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams")


@dataclass(frozen=True)
class LogGroupPlan:
    """`key` ends the name of its resource."""

    key: str
    name: str


def carries_logs(spec: ClusterSpec) -> bool:
    """Whether something of this stack fills its log groups: to an existing EKS cluster it adds no more than what is named."""
    existing = spec.eks.existing if spec.backend == "hyperpod-eks" else None
    return spec.observability.logs and (existing is None or ADDON in existing.addons)


def train_group(spec: ClusterSpec) -> str:
    """Return the name of the group for what launchers and ranks print, and for the progress of runs."""
    return f"/lustrain/{spec.name}/train"


def log_groups(spec: ClusterSpec) -> tuple[LogGroupPlan, ...]:
    """Return the groups that the stack makes; HyperPod makes one of its own for lifecycle scripts."""
    if not carries_logs(spec):
        return ()
    train = LogGroupPlan("train", train_group(spec))
    if spec.backend == "hyperpod-eks":
        names = ((stream, f"/aws/containerinsights/{spec.eks_name}/{stream}") for stream in CONTAINER_STREAMS)
        return (train, *(LogGroupPlan(f"containers-{stream}", name) for stream, name in names))
    return (train, LogGroupPlan("node", f"/lustrain/{spec.name}/node"))


def agent_configuration(spec: ClusterSpec) -> dict[str, Any]:
    """Return what the agent of a node carries, in its own form. A file that a node does not have is none of its business.

    It is added to what the agent carries already, as on HyperPod, so that it sets nothing that could contradict
    (https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch-Agent-Configuration-File-Details.html).
    """
    files = [_entry(f"/lustrain/{spec.name}/node", *entry) for entry in _node_files(spec)]
    # All files that match, not the newest alone: launches of several runs may follow each other.
    files += [
        {**_entry(train_group(spec), path, stream), "publish_multi_logs": True}
        for path, stream in ((LAUNCH_LOGS, "launches"), (f"{JOB_LOGS}/*.log", "jobs"))
    ]
    return {"logs": {"logs_collected": {"files": {"collect_list": files}}, "metrics_collected": {"emf": {}}}}


def _node_files(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    if spec.backend == "ec2":
        # HyperPod carries its provisioning.log by itself.
        yield "/var/log/lustrain-boot.log", "boot"
    yield "/var/log/kern.log", "kernel"
    if spec.backend == "hyperpod-slurm" or spec.controller:
        yield "/var/log/slurm/slurmctld.log", "slurmctld"
        yield "/var/log/slurm/slurmd.log", "slurmd"
    yield "/opt/aws/amazon-cloudwatch-agent/logs/amazon-cloudwatch-agent.log", "cloudwatch-agent"


def _entry(group: str, path: str, stream: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"file_path": path, "log_group_name": group, "log_stream_name": f"{{instance_id}}/{stream}"}
    return {**entry, "filters": [{"type": "include", "expression": KERNEL}]} if stream == "kernel" else entry


def addon_configuration() -> dict[str, Any]:
    """Return the values of the EKS add-on: logs of containers, and progress of runs."""
    return {
        "agent": {"config": {"logs": {"metrics_collected": {"emf": {}}}}},
        "containerLogs": {"enabled": True},
        "manager": {"applicationSignals": {"autoMonitor": {"monitorAllServices": False}}},
        **{part: {"enabled": False} for part in ADDON_UNUSED},
    }


def write_policy(spec: ClusterSpec, place: Place) -> Document:
    """Return the rights of the add-on's pods; they need none to make a group, because the groups are there."""
    return document([allow("Logs", WRITE, group_arns(spec, place))])


def group_arns(spec: ClusterSpec, place: Place, *, without: Collection[str] = ()) -> list[str]:
    """Return the ARNs of the groups and of what is in them, as a policy names them, but those with a key of `without`."""
    arns = [place.arn("logs", f"log-group:{group.name}") for group in log_groups(spec) if group.key not in without]
    return [form for arn in arns for form in (arn, f"{arn}:*")]
