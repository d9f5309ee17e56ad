"""The folders of a node where a file system may be mounted."""

from __future__ import annotations

OF_THE_SYSTEM = "the operating system's"
OWNERS = {
    **dict.fromkeys(("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32"), OF_THE_SYSTEM),
    **dict.fromkeys(("media", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"), OF_THE_SYSTEM),
    "snap": "snapd's, from which Ubuntu runs the SSM agent",
    "scratch": "the link to the local disk that every node makes at boot",
    "opt/amazon": "where EFA and Open MPI are",
    "opt/amazon-cloudwatch-agent": "the CloudWatch agent's",
    "opt/aws": "where AWS's own programs are, Neuron's too",
    "opt/cni": "Kubernetes'",
    "opt/containerd": "containerd's",
    "opt/habanalabs": "where Gaudi's software is",
    "opt/lustrain": "where the lifecycle bundle is",
    "opt/ml": "where HyperPod keeps the node's configuration",
    "opt/nvidia": "where NVIDIA's software is",
    "opt/sagemaker": "where HyperPod mounts the group's EBS volume",
    "opt/slurm": "Slurm's",
    "mnt/k8s-disks": "where EKS' images mount the local NVMe",
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
            return f"would hide or lie in /{folder}, which is {OWNERS[folder]}"
    if parts[0] in OPEN_FOLDERS and len(parts) == 1:
        return f"would hide what lies in /{parts[0]}"
    return ""
