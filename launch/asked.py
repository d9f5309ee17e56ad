"""What was asked for, made of flags, configuration and Cluster: pure data, from which every backend makes its plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from launch.supervise.decision import Rules
from launch.wish import TrainWish
from lustrain.cluster import Cluster, NodeGroup
from lustrain.flags import number
from lustrain.problem import Problem, UserError, problem
from trainer.config import Config, to_toml
from trainer.launch.journal import CONFIG, STOP

BACKENDS = ("local", "slurm")
MOST_NODES = 10_000
LEAVE = timedelta(minutes=30)
"""Instances of a capacity block are ended so long before its end:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-using.html"""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]+(:[0-9]+)?|[0-9]+-[0-9]+(:[0-9]+){0,2}")
"""Of sbatch: https://slurm.schedmd.com/sbatch.html#OPT_time"""


@dataclass(frozen=True)
class SlurmWish:
    """What is asked of Slurm; None and 0 ask for nothing."""

    partition: str | None
    account: str | None
    qos: str | None
    time: str | None
    gpus: int
    """Of a node."""


@dataclass(frozen=True)
class Asked:
    """One run, ready to be planned."""

    run: str
    on: str
    config: str
    """The settings as resolved, TOML."""
    rules: Rules
    nodes: int
    """That are asked of a scheduler: `rules.most` and spare ones."""
    give_up_s: float
    grace_s: float
    """What the trainer may need to save after a signal."""
    python: str | None
    slurm: SlurmWish

    @property
    def config_uri(self) -> str:
        return f"{self.run}/{CONFIG}"

    @property
    def name(self) -> str:
        return self.run.rpartition("/")[2]

    def record(self) -> dict[str, Any]:
        """Return it as plain JSON data, without the settings, which are an object of their own."""
        rules = self.rules
        return {
            "on": self.on,
            "run": self.run,
            "nodes": {"least": rules.least, "most": rules.most, "asked": self.nodes},
            "ranks": rules.ranks,
            "give_up_s": self.give_up_s,
        }


def ask(wish: TrainWish, config: Config, cluster: Cluster | None, devices: int, here: Path) -> Asked:
    """Return what the flags ask for; UserError with everything that is wrong with them.

    `devices` of this machine count for `--on local`; a folder that is not absolute begins at `here`.
    """
    problems: list[Problem] = []
    on = _backend(wish, cluster, problems)
    least, most = _nodes(wish, problems)
    spare = _number("--spare", wish.spare, 0, MOST_NODES, problems)
    if on == "local" and most + spare > 1:
        problems.append(problem("--nodes", wish.nodes, "is more than this machine", fix="--nproc sets its ranks"))
    group = _group(wish, cluster, problems) if on == "slurm" and cluster else None
    gpus = group.gpus if group else 0
    ranks = _number("--nproc", wish.nproc, 1, 1024, problems) if wish.nproc is not None else 0
    if on == "slurm" and cluster is None and wish.nproc is None:
        why = "without a Cluster the GPUs of a node are not known"
        problems.append(problem("--nproc", None, why, fix="give the ranks of a node, or --cluster"))
    ranks = ranks or (devices if on == "local" else gpus or 1)
    shares, odd = divmod(config.train.global_batch, config.train.micro_batch)
    rules = Rules(least, most, ranks, 0 if odd else shares, wish.keep_nodes or on == "local", others=on == "slurm")
    if not problems and (odd or not rules.size(most)):
        problems.append(_no_world(wish, config, rules))
    if wish.time is not None and not _TIME.fullmatch(wish.time):
        problems.append(problem("--time", wish.time, "is not a time of Slurm", allowed="minutes, or like 1-12:00:00"))
    slurm = cluster.slurm if cluster else None
    named = SlurmWish(
        wish.partition or (group.partition if group else None),
        wish.account or (slurm.account if slurm else None),
        wish.qos or (slurm.qos if slurm else None),
        wish.time,
        gpus,
    )
    for path, word in (("--partition", named.partition), ("--account", named.account), ("--qos", named.qos)):
        if word is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", word):
            problems.append(problem(path, word, "is not a name of Slurm", allowed="letters, digits, _ . , -"))
    give_up = _number("--give-up", wish.give_up, 0, 8760, problems, whole=False)
    run = _run(wish, config, cluster, here, problems)
    if on == "slurm" and (odd_sign := re.search(r"[^!-~]|[\"'#%\\]", run)):
        problems.append(problem("run.uri", run, f"holds {odd_sign[0]!r}, which an option of sbatch cannot"))
    if problems:
        raise UserError(problems)
    settings = to_toml(_filled(config, run, cluster))
    return Asked(
        run, on, settings, rules, most + int(spare), give_up * 3600, config.interrupt.signal_grace_s, wish.python, named
    )


def uri_of(run: str, cluster: Cluster | None, here: Path) -> str:
    """Return the run that a user names: by its place, or by its name under the Cluster's runs_uri."""
    if cluster and re.fullmatch(_NAME, run):
        return f"{cluster.runs_uri.rstrip('/')}/{run}"
    return run.rstrip("/") if "://" in run else str(here / Path(run).expanduser())


def _backend(wish: TrainWish, cluster: Cluster | None, problems: list[Problem]) -> str:
    slurm = cluster is not None and (cluster.backend == "hyperpod-slurm" or cluster.slurm is not None)
    on = wish.on or ("slurm" if slurm else "local" if cluster is None else "")
    if not on:
        assert cluster is not None
        why = f"the Cluster's backend {cluster.backend} has no launcher yet"
        problems.append(
            problem("--on", None, why, allowed=", ".join(BACKENDS), fix="docs/train.md says how to start by hand")
        )
    elif on not in BACKENDS:
        problems.append(problem("--on", on, "is not a place to train at", allowed=", ".join(BACKENDS)))
    return on


def _nodes(wish: TrainWish, problems: list[Problem]) -> tuple[int, int]:
    match = _RANGE.fullmatch(wish.nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= MOST_NODES:
        allowed = f"N or N-M with N from 1 and M up to {MOST_NODES}"
        problems.append(problem("--nodes", wish.nodes, "is not a number of nodes", allowed=allowed))
        return 1, 1
    return least, most


def _number(path: str, text: str, least: float, most: float, problems: list[Problem], *, whole: bool = True) -> int:
    try:
        return int(number(path, text, least, most)) if whole else number(path, text, least, most, whole=False)  # type: ignore[return-value]
    except UserError as error:
        problems += error.problems
        return 0


def _group(wish: TrainWish, cluster: Cluster, problems: list[Problem]) -> NodeGroup | None:
    """Return the group whose nodes train: the only one of workers, or that of the partition."""
    workers = {name: group for name, group in cluster.groups.items() if group.role == "worker"}
    fitting = {
        name: group for name, group in workers.items() if wish.partition is None or group.partition == wish.partition
    }
    partitions = sorted({group.partition for group in workers.values() if group.partition})
    if wish.partition is not None and partitions and not fitting:
        allowed = ", ".join(partitions)
        problems.append(problem("--partition", wish.partition, "is of no group of workers", allowed=allowed))
        return None
    if len(fitting) > 1 and wish.partition is None:
        why = f"the Cluster has several groups of workers: {', '.join(fitting)}"
        problems.append(problem("--partition", None, why, allowed=", ".join(partitions) or "a partition of Slurm"))
        return None
    group = next(iter(fitting.values()), None)
    match = _RANGE.fullmatch(wish.nodes)
    if group and match and int(match[1]) > group.count:
        why = f"the group has {group.count} nodes of type {group.type}"
        problems.append(problem("--nodes", wish.nodes, why, allowed=f"1 to {group.count}"))
    return group


def _no_world(wish: TrainWish, config: Config, rules: Rules) -> Problem:
    batch, micro = config.train.global_batch, config.train.micro_batch
    why = f"no number of nodes with {rules.ranks} ranks each divides {batch} samples into micro-batches of {micro}"
    fix = "change train.global_batch, train.micro_batch, --nodes or --nproc"
    return problem("--nodes", wish.nodes, why, fix=fix)


def _run(wish: TrainWish, config: Config, cluster: Cluster | None, here: Path, problems: list[Problem]) -> str:
    if wish.name is None:
        return uri_of(config.run.uri, None, here)
    if not re.fullmatch(_NAME, wish.name):
        problems.append(problem("--name", wish.name, "is not a plain name", allowed="letters, digits, . _ -"))
        return ""
    beside = cluster.runs_uri if cluster else uri_of(config.run.uri, None, here).rpartition("/")[0]
    return uri_of(f"{beside.rstrip('/')}/{wish.name}", None, here)


def _filled(config: Config, run: str, cluster: Cluster | None) -> Config:
    """Fill in what the run's place and the Cluster say, where the settings say nothing."""
    interrupt, said = config.interrupt, config.interrupt.model_fields_set
    filled: dict[str, Any] = {} if interrupt.stop_uri else {"stop_uri": f"{run}/{STOP}"}
    if cluster and cluster.backend != "machines" and "metadata" not in said:
        filled["metadata"] = True
    if cluster and cluster.capacity.ends_at and interrupt.deadline is None:
        filled["deadline"] = (cluster.capacity.ends_at - LEAVE).isoformat()
    updates: Mapping[str, Any] = {
        "run": config.run.model_copy(update={"uri": run}),
        "interrupt": interrupt.model_copy(update=filled),
    }
    return config.model_copy(update=updates)
