"""A request to train a run, resolved from flags, settings and Cluster: pure data, from which every backend makes its plan."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from launch.flags import TrainFlags
from launch.supervisor.policy import RestartPolicy
from lustrain.cluster import Cluster, NodeGroup
from lustrain.flags import number
from lustrain.problem import Problem, UserError, problem
from trainer.config import CloudWatchConfig, Config, parse_time, to_toml
from trainer.run.journal import CONFIG, STOP

MAX_NODES = 10_000
MAX_RANKS = 1024
"""Ranks of one node."""
WAIT_H, RENTED_WAIT_H = 6.0, 1.0
"""Hours that a run waits for nodes or its store without --give-up. Where the caller holds rented nodes, those that live cost
money meanwhile: there it is shorter, and still long enough for a group to replace an instance."""
LEAVE = timedelta(minutes=30)
"""EC2 ends the instances of a capacity block so long before its end:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-using.html"""
SCRATCH, MEMORY = "/opt/dlami/nvme", "/dev/shm/"
"""A node's own disks, as node tuning mounts them (node_setup/settings/nvme.toml), and its shared memory."""
NODE_AGENT, EKS_AGENT = "127.0.0.1:25888", "cloudwatch-agent.amazon-cloudwatch:25888"
"""Where the CloudWatch agent of a stack takes the progress of runs: on each node, or as a service of its EKS add-on
(https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch_Embedded_Metric_Format_Generation_CloudWatch_Agent.html)."""
FILE = "file://"
SIZE_FLAGS = ("--nodes", "--spare", "--nproc", "--group", "--partition")
"""Where one of these is wrong, the number of ranks is not known."""
SUPERVISED_BY_CALLER = "supervised_by_caller"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


@dataclass(frozen=True)
class RunRequest:
    """One run, ready to be planned by its backend."""

    run: str
    backend: str
    config: str
    """The resolved settings, TOML."""
    policy: RestartPolicy
    nodes: int
    """Nodes requested from a scheduler: `policy.max_nodes` and spare ones."""
    max_wait_s: float
    """How long to wait for nodes or for the run's store."""
    stop_uri: str
    """The object that ends the run when it appears."""
    grace_s: float
    """Seconds that the trainer may need to save after a signal."""
    python: str | None
    options: Any
    """The backend's own part of the request, of its own type."""
    supervised_by_caller: bool
    """Whether the process that starts it supervises it until it has ended (`RequestBackend`)."""

    @property
    def config_uri(self) -> str:
        return f"{self.run}/{CONFIG}"

    @property
    def name(self) -> str:
        return self.run.rpartition("/")[2]

    def record(self) -> dict[str, Any]:
        """Return it as plain JSON data, without the settings, which are an object of their own."""
        policy = self.policy
        return {
            "on": self.backend,
            SUPERVISED_BY_CALLER: self.supervised_by_caller,
            "run": self.run,
            "nodes": {"least": policy.min_nodes, "most": policy.max_nodes, "asked": self.nodes},
            "ranks": policy.ranks_per_node,
            "stop_uri": self.stop_uri,
            "give_up_s": self.max_wait_s,
        }


@dataclass(frozen=True)
class Target:
    """Where a run would train: what a backend makes its options of."""

    run: str
    cluster: Cluster | None
    group: NodeGroup | None
    image: tuple[str, str]
    """Reference by digest, and what it is built for; empty where not known."""
    paths: Mapping[str, str]
    """Files and folders of the nodes that the run uses, by what names them."""
    max_nodes: int
    spare_nodes: int


class RequestBackend(Protocol):
    """A backend's part in a request; pure."""

    own_flags: tuple[str, ...]
    """Flags of `fab train` that only this backend has."""
    uses_groups: bool
    """Whether it trains on a group of the Cluster's workers, and not on this machine."""
    scheduler_can_replace_nodes: bool
    supervised_by_caller: bool
    """Whether the process that starts a run supervises it until it has ended, so that a sweep trains its points in turn."""
    supervises_ranges: bool
    """Whether it does so for a run of N to M nodes even where one of a fixed number is left to a scheduler."""

    def serves(self, cluster: Cluster) -> bool:
        """Whether runs of this Cluster start here unless --on names another backend."""
        ...

    def default_ranks(self, target: Target, problems: list[Problem]) -> int:
        """Return the ranks of a node without --nproc; 0 where it has no GPUs."""
        ...

    def options(self, flags: TrainFlags, target: Target, problems: list[Problem]) -> Any:
        """Return its own part of the request; adds what is wrong with it to `problems`."""
        ...


def resolve_request(
    flags: TrainFlags,
    config: Config,
    cluster: Cluster | None,
    backends: Mapping[str, RequestBackend],
    folder: Path,
    image: tuple[str, str] = ("", ""),
) -> RunRequest:
    """Return the request that the flags make; UserError with everything that is wrong with them.

    A run's folder that is not absolute is relative to `folder`; `image` is as in Target.
    """
    problems: list[Problem] = []
    name = _backend_name(flags, cluster, backends, problems)
    backend = backends.get(name)
    if backend is not None:
        others = {flag for its in backends.values() for flag in its.own_flags} - set(backend.own_flags)
        for flag in sorted(flag for flag in others if getattr(flags, flag) is not None):
            where = " or ".join(other for other, its in backends.items() if flag in its.own_flags)
            path = f"--{flag.replace('_', '-')}"
            problems.append(problem(path, getattr(flags, flag), f"only valid with --on {where}"))
    min_nodes, max_nodes = _nodes(flags, problems)
    spare = int(_number("--spare", flags.spare, 0, MAX_NODES, problems))
    group = _group(flags, cluster, problems) if backend and backend.uses_groups and cluster else None
    run = run_uri(flags, config, cluster, folder, problems)
    paths = node_paths(config, run, cluster)
    problems += _on_buckets(paths, cluster)
    target = Target(run, cluster, group, image, paths, max_nodes, spare)
    nproc = _nproc(flags, problems)
    if backend is None:
        raise UserError(problems)
    ranks = nproc or backend.default_ranks(target, problems) or 1
    options = backend.options(flags, target, problems)
    indivisible = config.train.division_problems()
    problems += indivisible
    problems += config.parallel.unused()
    rented = backend.uses_groups and cluster is not None and cluster.capacity.mode != "owned"
    max_wait_h = RENTED_WAIT_H if rented and not backend.scheduler_can_replace_nodes else WAIT_H
    if flags.give_up is not None:
        max_wait_h = _number("--give-up", flags.give_up, 0, 8760, problems, whole=False)
    grow_after_s = None
    if flags.grow_after is not None:
        grow_after_s = 60 * _number("--grow-after", flags.grow_after, 0, 525_600, problems, whole=False)
        if min_nodes == max_nodes:
            fix = "give a range of nodes, or leave it out"
            problems.append(problem("--grow-after", flags.grow_after, "only valid with --nodes N-M", fix=fix))
    policy = RestartPolicy(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        ranks_per_node=ranks,
        micro_batches_per_step=config.train.micro_batches,
        ranks_per_micro_batch=config.parallel.tensor,
        ranks_per_replica=(config.parallel.shard or 1) * config.parallel.tensor,
        allow_blamed_nodes=flags.keep_nodes or not backend.uses_groups,
        scheduler_can_replace_nodes=backend.scheduler_can_replace_nodes,
        nodes_are_rented=rented,
        grow_after_s=grow_after_s,
    )
    known_size = not indivisible and not any(line.path in SIZE_FLAGS for line in problems)
    if known_size and not policy.usable_nodes(max_nodes):
        problems.append(_unusable_ranks(flags, config, policy, one_machine=not backend.uses_groups))
    if problems:
        raise UserError(problems)
    settings = _settings(config, target.run, cluster, on_nodes=backend.uses_groups)
    interrupt = settings.interrupt
    if interrupt.deadline:
        policy = replace(policy, deadline=parse_time(interrupt.deadline) - interrupt.deadline_margin_s)
    return RunRequest(
        run=target.run,
        backend=name,
        config=to_toml(settings),
        policy=policy,
        nodes=max_nodes + spare,
        max_wait_s=max_wait_h * 3600,
        stop_uri=str(interrupt.stop_uri),
        grace_s=interrupt.signal_grace_s,
        python=flags.python,
        options=options,
        supervised_by_caller=backend.supervised_by_caller or (backend.supervises_ranges and min_nodes < max_nodes),
    )


def uri_of(run: str, cluster: Cluster | None, folder: Path) -> str:
    """Return the run that a user names by its place, or by its name under the Cluster's runs_uri."""
    if cluster and re.fullmatch(_NAME, run):
        return f"{cluster.runs_uri.rstrip('/')}/{run}"
    return run.rstrip("/") if "://" in run else os.path.normpath(folder / Path(run).expanduser())


def run_uri(flags: TrainFlags, config: Config, cluster: Cluster | None, folder: Path, problems: list[Problem]) -> str:
    """Return the run that flags and settings name; adds what is wrong with that to `problems`."""
    if re.fullmatch(r"[a-z0-9]+:/*", config.run.uri) and (flags.name is None or cluster is None):
        problems.append(problem("run.uri", config.run.uri, "names no run", allowed="s3://bucket/name, or a folder"))
        return ""
    if flags.name is None:
        return uri_of(config.run.uri, None, folder)
    if not re.fullmatch(_NAME, flags.name):
        problems.append(problem("--name", flags.name, "is not a plain name", allowed="letters, digits, . _ -"))
        return ""
    parent = cluster.runs_uri if cluster else uri_of(config.run.uri, None, folder).rpartition("/")[0]
    return uri_of(f"{parent.rstrip('/')}/{flags.name}", None, folder)


def node_paths(config: Config, run: str, cluster: Cluster | None) -> dict[str, str]:
    """Return the files and folders of the nodes that a run uses, by what names them."""
    named: dict[str, object] = {"run.uri": run}
    named |= {f"task.{key}": value for key, value in config.task.options.items() if _is_path(key, value)}
    if config.interrupt.stop_uri:
        # It is not there before somebody requests it.
        named["interrupt.stop_uri"] = config.interrupt.stop_uri.rpartition("/")[0]
    for index, tier in enumerate(config.checkpoint.tiers):
        # The trainer makes the folder itself.
        named[f"checkpoint.tiers.{index}.path"] = SCRATCH if tier.path.startswith(f"{SCRATCH}/") else tier.path
    if config.metrics.tensorboard:
        named["metrics.tensorboard"] = config.metrics.tensorboard
    if cluster and cluster.lustre:
        named["lustre.path"] = cluster.lustre.path
    paths = {name: value.removeprefix(FILE) for name, value in named.items() if isinstance(value, str) and value}
    return {name: path for name, path in paths.items() if "://" not in path and not path.startswith(MEMORY)}


def _on_buckets(paths: Mapping[str, str], cluster: Cluster | None) -> list[Problem]:
    """Report what a run writes below a mounted bucket: there nothing can be renamed or appended to."""
    problems: list[Problem] = []
    written = {name: path for name, path in paths.items() if name.startswith(("run.", "checkpoint.", "metrics."))}
    for name, path in written.items():
        for mount in cluster.s3_mounts if cluster else ():
            if f"{path}/".startswith(f"{mount.path}/"):
                why = f"lies on the bucket mounted at {mount.path}, where files cannot be renamed or appended to"
                below = f"{mount.prefix}{path[len(mount.path) :].strip('/')}"
                fix = f"write s3://{mount.bucket}/{below}" if name == "run.uri" else "choose another folder"
                problems.append(problem(name, path, why, fix=fix))
    return problems


def _is_path(key: str, value: object) -> bool:
    """Whether an option of a Task names something on the node: it is absolute, or its folder of data."""
    return isinstance(value, str) and (value.startswith(("/", FILE)) or key == "data")


def _backend_name(
    flags: TrainFlags, cluster: Cluster | None, backends: Mapping[str, RequestBackend], problems: list[Problem]
) -> str:
    allowed = ", ".join(backends)
    if flags.on is not None:
        if flags.on not in backends:
            problems.append(problem("--on", flags.on, "is not a place to train at", allowed=allowed))
        return flags.on
    if cluster is None:
        return "local"
    name = next((name for name, backend in backends.items() if backend.serves(cluster)), "")
    if not name:
        why = f"the Cluster's backend {cluster.backend} has no launcher yet"
        problems.append(problem("--on", None, why, allowed=allowed, fix="docs/train.md says how to start by hand"))
    return name


def _nodes(flags: TrainFlags, problems: list[Problem]) -> tuple[int, int]:
    match = _RANGE.fullmatch(flags.nodes)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= MAX_NODES:
        allowed = f"N or N-M with N from 1 and M up to {MAX_NODES}"
        problems.append(problem("--nodes", flags.nodes, "is not a number of nodes", allowed=allowed))
        return 1, 1
    return low, high


def _number(path: str, text: str, low: float, high: float, problems: list[Problem], *, whole: bool = True) -> float:
    try:
        return number(path, text, low, high, whole=whole)
    except UserError as error:
        problems += error.problems
        return 0


def _group(flags: TrainFlags, cluster: Cluster, problems: list[Problem]) -> NodeGroup | None:
    """Return the worker group that the flags name, by itself or by its partition, else the only one."""
    workers = {name: group for name, group in cluster.groups.items() if group.role == "worker"}
    matching = {
        name: group
        for name, group in workers.items()
        if flags.group in (None, name) and flags.partition in (None, group.partition)
    }
    names = ", ".join(workers)
    if flags.group is not None and flags.group not in workers:
        problems.append(problem("--group", flags.group, "is not a worker group", allowed=names))
    elif not matching:
        partitions = ", ".join(sorted({group.partition for group in workers.values() if group.partition}))
        problems.append(
            problem("--partition", flags.partition, "is not a worker group's partition", allowed=partitions)
        )
    elif len(matching) > 1:
        problems.append(problem("--group", None, "the Cluster has several worker groups", allowed=names))
    group = next(iter(matching.values()), None)
    low = re.match("[0-9]+", flags.nodes)
    # Nodes of a group without any come when pods wait for them.
    made_for_pods = group is not None and group.count == 0 and cluster.backend == "hyperpod-eks"
    if group and low and int(low[0]) > group.count and not made_for_pods:
        why = f"the group has {group.count} nodes of type {group.type}"
        problems.append(problem("--nodes", flags.nodes, why, allowed=f"1 to {group.count}"))
    return group


def _nproc(flags: TrainFlags, problems: list[Problem]) -> int | None:
    """Return the ranks per node that --nproc sets; None without it, 1 where its value is wrong."""
    if flags.nproc is None:
        return None
    return int(_number("--nproc", flags.nproc, 1, MAX_RANKS, problems)) or 1


def _unusable_ranks(flags: TrainFlags, config: Config, policy: RestartPolicy, *, one_machine: bool) -> Problem:
    """Return the problem where no number of nodes makes up whole replicas and has micro-batches for all ranks."""
    ranks, most, replica = policy.ranks_per_node, policy.max_ranks, policy.ranks_per_replica
    shard, tensor = config.parallel.shard, config.parallel.tensor
    if policy.min_nodes * ranks <= most:
        name = f"parallel.shard = {shard}"
        if tensor > 1:
            name = f"parallel.tensor = {tensor}" if shard < 2 else f"{name} x parallel.tensor = {tensor}"
        fix = "parallel.shard = 0 (over all ranks), or another value"
        if tensor > 1:
            whole = " or ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
            product = "parallel.tensor" if shard < 2 else "parallel.shard x parallel.tensor"
            fix = f"{product} = {whole}"
        if one_machine:
            allowed = f"multiples of {replica} up to {most}" if replica <= most else ""
            return problem("--nproc", ranks, f"is no multiple of {name}", allowed=allowed, fix=fix)
        why = f"these nodes, with {ranks} ranks each, make no multiple of {name}"
        step = replica // math.gcd(replica, ranks)
        allowed = f"multiples of {step} up to {most // ranks}" if step <= most // ranks else ""
        return problem("--nodes", flags.nodes, why, allowed=allowed, fix=fix)
    why = f"{policy.min_nodes * ranks} ranks are more than the {policy.micro_batches_per_step} micro-batches of a step"
    if tensor > 1:
        why += f" for parallel.tensor = {tensor}"
    fix = "fewer ranks, or a smaller train.micro_batch"
    if ranks > most:
        return problem("--nproc", flags.nproc or ranks, why, allowed=f"1 to {most}", fix=fix)
    return problem("--nodes", flags.nodes, why, allowed=f"1 to {most // ranks}", fix=fix)


def _settings(config: Config, run: str, cluster: Cluster | None, *, on_nodes: bool) -> Config:
    """Fill in what follows from the run's place and the Cluster, where the settings leave it open."""
    interrupt = config.interrupt
    filled: dict[str, Any] = {} if interrupt.stop_uri else {"stop_uri": f"{run}/{STOP}"}
    if cluster and cluster.backend != "machines" and "metadata" not in interrupt.model_fields_set:
        filled["metadata"] = True
    if cluster and cluster.interruption_queue and "queue" not in interrupt.model_fields_set:
        filled["queue"] = cluster.interruption_queue
    if cluster and cluster.capacity.ends_at and interrupt.deadline is None:
        filled["deadline"] = (cluster.capacity.ends_at - LEAVE).isoformat()
    metrics = config.metrics
    shown: dict[str, Any] = {}
    if cluster and cluster.prometheus_port and on_nodes and "prometheus_port" not in metrics.model_fields_set:
        shown["prometheus_port"] = cluster.prometheus_port
    if cluster and cluster.log_group and on_nodes and "agent" not in metrics.cloudwatch.model_fields_set:
        agent = EKS_AGENT if cluster.kubernetes else NODE_AGENT
        shown["cloudwatch"] = CloudWatchConfig(agent=agent, log_group=cluster.log_group, cluster=cluster.name)
    updates: Mapping[str, Any] = {
        "run": config.run.model_copy(update={"uri": run}),
        "interrupt": interrupt.model_copy(update=filled),
        "metrics": metrics.model_copy(update=shown),
    }
    return config.model_copy(update=updates)
