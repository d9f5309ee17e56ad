"""What is asked of a scheduler, from flags and Cluster: pure data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launch.wish import TrainWish
from lustrain.cluster import Cluster, NodeGroup
from lustrain.cluster import Kubernetes as KubernetesOf
from lustrain.problem import Problem, problem

_TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]+(:[0-9]+)?|[0-9]+-[0-9]+(:[0-9]+){0,2}")
"""Of sbatch: https://slurm.schedmd.com/sbatch.html#OPT_time"""
LABEL = r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?"
"""Of a Job whose pods have an index behind its name in theirs, of 63 letters at most:
https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode"""
_DIGEST = r"[\w.:\[\]-]+(/[\w.-]+)+@sha256:[0-9a-f]{64}"
FLAGS = dict.fromkeys(("partition", "account", "qos", "time"), "slurm") | dict.fromkeys(
    ("queue", "priority"), "kubernetes"
)
"""Flags that only one place knows."""
ODD_SIGN = re.compile(r"[^!-~]|[\"'#%\\]")
"""In a word of sbatch's options: white space, quotes, and the patterns of file names."""
MAKE_IMAGE = "fab image-build --push, or give REGISTRY/REPOSITORY@sha256:…"


@dataclass(frozen=True)
class SlurmWish:
    """What is asked of Slurm; None and 0 ask for nothing."""

    partition: str | None
    account: str | None
    qos: str | None
    time: str | None
    gpus: int
    """Of a node."""
    efa: bool


@dataclass(frozen=True)
class KubernetesWish:
    """What is asked of Kubernetes; None and 0 ask for nothing."""

    image: str
    """registry/repository@sha256:…"""
    context: str | None
    """None: the current one."""
    namespace: str
    service_account: str | None
    queue: str | None
    priority: str | None
    region: str | None
    gpus: int
    efa: int
    """Devices of a node."""
    labels: tuple[tuple[str, str], ...]
    """That the nodes have."""
    tolerated: tuple[tuple[str, str], ...]
    """Taints of the nodes: key and effect."""
    claims: tuple[tuple[str, str], ...]
    """Path in the pod, and the claim that is mounted there."""


def of(cluster: Cluster) -> str:
    """Return where a Cluster's runs are started; empty where no launcher knows how."""
    if cluster.backend == "hyperpod-slurm" or cluster.slurm is not None:
        return "slurm"
    return "kubernetes" if cluster.backend == "hyperpod-eks" or cluster.kubernetes is not None else ""


def group_of(wish: TrainWish, cluster: Cluster, problems: list[Problem]) -> NodeGroup | None:
    """Return the group of workers that was named, by itself or by its partition, else the only one."""
    workers = {name: group for name, group in cluster.groups.items() if group.role == "worker"}
    fitting = {
        name: group
        for name, group in workers.items()
        if wish.group in (None, name) and wish.partition in (None, group.partition)
    }
    names = ", ".join(workers)
    if wish.group is not None and wish.group not in workers:
        problems.append(problem("--group", wish.group, "is no group of workers", allowed=names))
    elif not fitting:
        partitions = ", ".join(sorted({group.partition for group in workers.values() if group.partition}))
        problems.append(problem("--partition", wish.partition, "is of no group of workers", allowed=partitions))
    elif len(fitting) > 1:
        problems.append(problem("--group", None, "the Cluster has several groups of workers", allowed=names))
    group = next(iter(fitting.values()), None)
    least = re.match("[0-9]+", wish.nodes)
    if group and least and int(least[0]) > group.count:
        why = f"the group has {group.count} nodes of type {group.type}"
        problems.append(problem("--nodes", wish.nodes, why, allowed=f"1 to {group.count}"))
    return group


def slurm(
    wish: TrainWish, cluster: Cluster | None, group: NodeGroup | None, run: str, problems: list[Problem]
) -> SlurmWish:
    """Return what is asked of Slurm: flags before the Cluster."""
    if wish.time is not None and not _TIME.fullmatch(wish.time):
        problems.append(problem("--time", wish.time, "is not a time of Slurm", allowed="minutes, or like 1-12:00:00"))
    named = cluster.slurm if cluster else None
    asked = SlurmWish(
        wish.partition or (group.partition if group else None),
        wish.account or (named.account if named else None),
        wish.qos or (named.qos if named else None),
        wish.time,
        group.gpus if group else 0,
        bool(group and group.efa),
    )
    for path, word in (("--partition", asked.partition), ("--account", asked.account), ("--qos", asked.qos)):
        if word is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", word):
            problems.append(problem(path, word, "is not a name of Slurm", allowed="letters, digits, _ . , -"))
    if sign := ODD_SIGN.search(run):
        problems.append(problem("run.uri", run, f"holds {sign[0]!r}, which an option of sbatch cannot"))
    return asked


def kubernetes(
    wish: TrainWish,
    cluster: Cluster | None,
    group: NodeGroup | None,
    run: str,
    image: tuple[str, str],
    problems: list[Problem],
) -> KubernetesWish:
    """Return what is asked of Kubernetes. `image`: reference by digest and what it is built for, empty where not known."""
    named = (cluster.kubernetes if cluster else None) or KubernetesOf()
    name = run.rpartition("/")[2]
    if not re.fullmatch(LABEL, name):
        allowed = "up to 52 small letters, digits and -"
        problems.append(problem("--name", name, "cannot be the name of a Job", allowed=allowed))
    if "-" in wish.nodes or wish.spare != "0":
        fix = "give one number: Kubernetes replaces a lost pod by itself"
        problems.append(problem("--nodes", wish.nodes, "a Job has a fixed number of pods", fix=fix))
    ref, built_for = image
    if not re.fullmatch(_DIGEST, ref):
        problems.append(problem("--image", wish.image, "names no image by its digest", fix=MAKE_IMAGE))
    gpus = group.gpus if group else 0
    if built_for and (built_for == "cpu") != (not gpus):
        has = f"nodes with {gpus} GPUs" if gpus else "nodes without GPUs"
        problems.append(problem("--image", wish.image, f"is built for {built_for}, and the group has {has}"))
    if not run.startswith("s3://") and not any(run.startswith(f"{path}/") for path in named.claims):
        paths = ", ".join(named.claims) or "none"
        problems.append(
            problem(
                "run.uri", run, "pods do not see it", allowed=f"s3://…, or below a path of kubernetes.claims ({paths})"
            )
        )
    return KubernetesWish(
        image=ref,
        context=named.context,
        namespace=named.namespace,
        service_account=named.service_account,
        queue=wish.queue,
        priority=wish.priority,
        region=cluster.region if cluster else None,
        gpus=gpus,
        efa=group.efa if group else 0,
        labels=tuple(group.labels.items()) if group else (),
        tolerated=tuple((taint.key, taint.effect) for taint in group.taints) if group else (),
        claims=tuple(named.claims.items()),
    )
