"""Flags of `fab train`, `sweep`, `sweep-status`, `status`, `report`, `logs` and `stop`."""

from __future__ import annotations

from dataclasses import dataclass

from lustrain.flags import CLUSTER, JSON, STACK, flag

RUN = "the run: a folder, s3://bucket/prefix, or with a Cluster its name"


@dataclass(frozen=True)
class TrainFlags:
    config: str = flag(help="the run's settings, a TOML file")
    on: str | None = flag(None, "local, slurm, kubernetes or ssh; else what the Cluster has, without one local")
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    name: str | None = flag(None, "name of the run: its place under the Cluster's runs_uri, else beside run.uri")
    nodes: str = flag("1", "N nodes, or N-M: at least N, up to M while they live (1)")
    spare: str = flag("0", "Slurm: nodes beside these that take the place of lost ones (0)")
    nproc: str | None = flag(None, "ranks of a node; else one for each GPU, without GPUs 1")
    set: tuple[str, ...] = flag((), "KEY=VALUE: another value for one setting; may be given again")
    group: str | None = flag(None, "the Cluster's group of workers to train on; else its only one")
    resume: bool = flag(False, "go on with a run that was stopped or has failed")
    keep_nodes: bool = flag(False, "use nodes again that were blamed twice")
    give_up: str | None = flag(
        None, "hours to wait for nodes or for the run's store; else 6, over SSH on rented nodes 1"
    )
    grow_after: str | None = flag(
        None, "with --nodes N-M: minutes that a smaller launch runs before it grows; else 10, or 20 times its start"
    )
    python: str | None = flag(None, "interpreter with the trainer on the nodes; else this one, in an image python3")
    partition: str | None = flag(None, "Slurm: partition; else that of the Cluster's only group of workers")
    account: str | None = flag(None, "Slurm: account; else the Cluster's")
    qos: str | None = flag(None, "Slurm: quality of service; else the Cluster's")
    time: str | None = flag(None, "Slurm: longest time of one stay in the queue's nodes, like 1-12:00:00")
    image: str | None = flag(
        None,
        "run ranks in containers of it: image.json, or registry/repository@sha256:…; Kubernetes: else image.json",
    )
    queue: str | None = flag(None, "Kubernetes: queue of Kueue")
    priority: str | None = flag(None, "Kubernetes: priority class")
    detach: bool = flag(False, "SSH: hand the run over to its first node, which supervises it; schedulers always do")
    dry: bool = flag(False, "print what would be run and written, and do nothing")
    json: bool = flag(False, JSON)


@dataclass(frozen=True)
class SweepFlags(TrainFlags):
    """Those of `fab train`, for every run of the sweep."""

    name: str | None = flag(None, "name of the sweep: its folder under the Cluster's runs_uri, else beside run.uri")
    resume: bool = flag(False, "start again also the points that ended before their last step")
    grid: tuple[str, ...] = flag((), "KEY=VALUE,VALUE…: the values of one setting; may be given again")
    at_once: str | None = flag(
        None, "Slurm: so many run at a time; Kubernetes: submit while fewer are unfinished; else all"
    )
    max_points: str = flag("64", "refuse a grid of more points (64)")
    search: str | None = flag(
        None, "optuna: draw values from --space by the validation losses so far, in place of --grid"
    )
    space: tuple[str, ...] = flag(
        (), "KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=VALUE,VALUE…: what a search may draw; may be given again"
    )
    trials: str | None = flag(None, "points of a search in all; the same command with more goes on")


@dataclass(frozen=True)
class SweepStatusFlags:
    sweep: str = flag(help="the sweep: its folder, s3://bucket/prefix, or with a Cluster its name")
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    json: bool = flag(False, JSON)


@dataclass(frozen=True)
class StatusFlags:
    run: str = flag(help=RUN)
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    json: bool = flag(False, JSON)


@dataclass(frozen=True)
class ReportFlags:
    run: str = flag(help=RUN)
    output: str = flag("report.md", "the page to write: .md, its plot beside it, or .html, all in one file (report.md)")
    prometheus: str | None = flag(
        None, "address of a Prometheus with the alert rules, to show which alerts fired and when"
    )
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    json: bool = flag(False, JSON)


@dataclass(frozen=True)
class LogsFlags:
    run: str = flag(help=RUN)
    follow: bool = flag(False, "go on until the run has ended; or -f")
    f: bool = flag(False, "--follow")
    rank: str | None = flag(None, "only what this rank printed")
    launch: str | None = flag(None, "only what this launch printed; fab status numbers them (not on Kubernetes)")
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    json: bool = flag(False, JSON)


@dataclass(frozen=True)
class StopFlags:
    run: str = flag(help=RUN)
    now: bool = flag(False, "also take its job from the scheduler; steps since the last checkpoint may be lost")
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    json: bool = flag(False, JSON)
