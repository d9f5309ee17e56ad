"""Where a file system may be mounted on a node."""

from __future__ import annotations

OF_THE_SYSTEM = "the operating system"
OWNERS = {
    **dict.fromkeys(
        (
            "bin",
            "boot",
            "dev",
            "etc",
            "home",
            "lib",
            "lib32",
            "lib64",
            "libx32",
            "media",
            "proc",
            "root",
            "run",
            "sbin",
        ),
        OF_THE_SYSTEM,
    ),
    **dict.fromkeys(("sys", "tmp", "usr", "var"), OF_THE_SYSTEM),
    "snap": "snapd, which runs the SSM agent on Ubuntu",
    "scratch": "a link to the local disk, which every node makes at boot",
    "opt/amazon": "EFA and Open MPI",
    "opt/amazon-cloudwatch-agent": "the CloudWatch agent",
    "opt/aws": "AWS's own programs, Neuron's too",
    "opt/cni": "Kubernetes",
    "opt/containerd": "containerd",
    "opt/habanalabs": "Gaudi's software",
    "opt/ml": "HyperPod, which keeps the node's configuration there",
    "opt/nvidia": "NVIDIA's software",
    "opt/sagemaker": "HyperPod, which mounts the group's EBS volume there",
    "opt/slurm": "Slurm",
    "mnt/k8s-disks": "the local NVMe of EKS' images",
}
"""Folders that belong to somebody else: a mount on or in one hides what a node needs to run. Those of AWS's images:
https://docs.aws.amazon.com/dlami/latest/devguide/ and
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-ref.html; of HyperPod's lifecycle scripts
https://github.com/awslabs/awsome-distributed-ai/tree/main/1.architectures/5.sagemaker-hyperpod."""
OPEN_FOLDERS = frozenset({"mnt", "opt", "srv"})
"""Whose other subfolders are free; only a mount on the folder itself hides something."""


def mount_problem(path: str) -> str:
    """Why nothing should be mounted at `path`; empty where it may."""
    parts = path.strip("/").split("/")
    if "." in parts or ".." in parts:
        return "goes through . or .."
    for folder in (parts[0], "/".join(parts[:2])):
        if folder in OWNERS:
            return f"would hide or lie in /{folder}, which belongs to {OWNERS[folder]}"
    if parts[0] in OPEN_FOLDERS and len(parts) == 1:
        return f"would hide what lies in /{parts[0]}"
    return ""
