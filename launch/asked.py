"""What was asked for, made of flags, configuration and Cluster: pure data, from which every backend makes its plan."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from launch import places
from launch.places import KubernetesWish, SlurmWish
from launch.supervise.decision import Rules
from launch.wish import TrainWish
from lustrain.cluster import Cluster
from lustrain.flags import number
from lustrain.problem import Problem, UserError, problem
from trainer.config import Config, parse_time, to_toml
from trainer.launch.journal import CONFIG, STOP

BACKENDS = ("local", "slurm", "kubernetes")
MOST_NODES = 10_000
LEAVE = timedelta(minutes=30)
"""Instances of a capacity block are ended so long before its end:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-using.html"""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


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
    stop_uri: str
    """The object that ends the run when it appears."""
    grace_s: float
    """What the trainer may need to save after a signal."""
    python: str | None
    slurm: SlurmWish | None
    kubernetes: KubernetesWish | None

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
            "stop_uri": self.stop_uri,
            "give_up_s": self.give_up_s,
        }


def ask(
    wish: TrainWish,
    config: Config,
    cluster: Cluster | None,
    devices: int,
    here: Path,
    image: tuple[str, str] = ("", ""),
) -> Asked:
    """Return what the flags ask for; UserError with everything that is wrong with them.

    `devices` of this machine count for `--on local`; a folder that is not absolute begins at `here`.
    `image` is its reference by digest and what it is built for.
    """
    problems: list[Problem] = []
    on = _backend(wish, cluster, problems)
    for flag, place in places.FLAGS.items():
        if on in BACKENDS and on != place and getattr(wish, flag) is not None:
            problems.append(problem(f"--{flag}", getattr(wish, flag), f"means something with --on {place} only"))
    least, most = _nodes(wish, problems)
    spare = int(_number("--spare", wish.spare, 0, MOST_NODES, problems))
    if on == "local" and most + spare > 1:
        problems.append(problem("--nodes", wish.nodes, "is more than this machine", fix="--nproc sets its ranks"))
    group = places.group_of(wish, cluster, problems) if on in ("slurm", "kubernetes") and cluster else None
    ranks = _ranks(wish, cluster, devices if on == "local" else group.gpus if group else 0, on, problems)
    if on == "kubernetes" and cluster is None:
        problems.append(problem("--on", on, "needs a Cluster", fix="give --cluster or --stack"))
    shares, odd = divmod(config.train.global_batch, config.train.micro_batch)
    rules = Rules(least, most, ranks, 0 if odd else shares, wish.keep_nodes or on == "local", others=on == "slurm")
    if not problems and (odd or not rules.size(most)):
        problems.append(_no_world(wish, config, rules))
    give_up = _number("--give-up", wish.give_up, 0, 8760, problems, whole=False)
    if on == "local" and wish.python is not None and shutil.which(wish.python) is None:
        problems.append(problem("--python", wish.python, "is no program on this machine", fix="see its path"))
    run = _run(wish, config, cluster, here, problems)
    slurm = places.slurm(wish, cluster, group, run, problems) if on == "slurm" else None
    pods = places.kubernetes(wish, cluster, group, run, image, problems) if on == "kubernetes" else None
    if problems:
        raise UserError(problems)
    filled = _filled(config, run, cluster)
    interrupt = filled.interrupt
    if interrupt.deadline:
        rules = replace(rules, until=parse_time(interrupt.deadline) - interrupt.deadline_margin_s)
    stop_uri, grace_s = str(interrupt.stop_uri), interrupt.signal_grace_s
    return Asked(
        run, on, to_toml(filled), rules, most + spare, give_up * 3600, stop_uri, grace_s, wish.python, slurm, pods
    )


def _ranks(wish: TrainWish, cluster: Cluster | None, devices: int, on: str, problems: list[Problem]) -> int:
    """Return how many ranks a node has: as asked, else one for each GPU, without GPUs one."""
    if wish.nproc is not None:
        return int(_number("--nproc", wish.nproc, 1, 1024, problems)) or 1
    if on == "slurm" and cluster is None:
        why = "without a Cluster the GPUs of a node are not known"
        problems.append(problem("--nproc", None, why, fix="give the ranks of a node, or --cluster"))
    return devices or 1


def uri_of(run: str, cluster: Cluster | None, here: Path) -> str:
    """Return the run that a user names: by its place, or by its name under the Cluster's runs_uri."""
    if cluster and re.fullmatch(_NAME, run):
        return f"{cluster.runs_uri.rstrip('/')}/{run}"
    return run.rstrip("/") if "://" in run else str(here / Path(run).expanduser())


def _backend(wish: TrainWish, cluster: Cluster | None, problems: list[Problem]) -> str:
    on = wish.on or ("local" if cluster is None else places.of(cluster))
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


def _number(path: str, text: str, least: float, most: float, problems: list[Problem], *, whole: bool = True) -> float:
    try:
        return number(path, text, least, most, whole=whole)
    except UserError as error:
        problems += error.problems
        return 0


def _no_world(wish: TrainWish, config: Config, rules: Rules) -> Problem:
    batch, micro = config.train.global_batch, config.train.micro_batch
    why = f"no number of nodes with {rules.ranks} ranks each divides {batch} samples into micro-batches of {micro}"
    fix = "change train.global_batch, train.micro_batch, --nodes or --nproc"
    return problem("--nodes", wish.nodes, why, fix=fix)


def _run(wish: TrainWish, config: Config, cluster: Cluster | None, here: Path, problems: list[Problem]) -> str:
    if re.fullmatch(r"[a-z0-9]+:/*", config.run.uri) and (wish.name is None or cluster is None):
        problems.append(problem("run.uri", config.run.uri, "names no run", allowed="s3://bucket/name, or a folder"))
        return ""
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
