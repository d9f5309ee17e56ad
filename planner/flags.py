"""Flags of `fab plan-training`, `run-cost` and `spot-advice`."""

from __future__ import annotations

from dataclasses import dataclass

from lustrain.flags import CLUSTER, JSON, STACK, flag


@dataclass(frozen=True)
class PlanFlags:
    config: str = flag(help="the run's settings, a TOML file")
    tokens: str = flag(help="tokens to train on, like 15T, 300B or 2e9")
    set: tuple[str, ...] = flag((), "KEY=VALUE: another value for one setting; may be given again")
    instance_type: str | None = flag(None, "type of the nodes, like p5.48xlarge; else the Cluster's workers'")
    nodes: str | None = flag(None, "number of nodes; else as many as the Cluster has (1)")
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    group: str | None = flag(None, "the Cluster's group of workers; else its only one")
    mfu: str | None = flag(None, "share of a GPU's peak while nothing waits for the network, like 0.45 (0.4, assumed)")
    run: str | None = flag(None, "take that share from the records of a run of the same model on such nodes")
    mtbf_hours: str | None = flag(None, "hours between interruptions of the job; else by nodes, spot by the settings")
    restart_s: str | None = flag(None, "seconds from an interruption to the new start's first read (300, assumed)")
    store_gb_s: str | None = flag(None, "GB/s between a node and its checkpoints' store (2, assumed)")
    price: tuple[str, ...] = flag((), "MODE=USD: what a node costs an hour as on-demand, spot, …; may be given again")
    region: str | None = flag(None, "region whose prices count; else the Cluster's (us-east-1)")
    online: bool = flag(False, "ask AWS what nodes cost today on demand and on spot (read-only)")
    lustre_gib: str = flag("0", "size of the FSx for Lustre file system that is there meanwhile (0)")
    lustre_rate: str = flag("250", "its MB/s per TiB (250)")
    plot: str | None = flag(None, "picture to draw the plan into: a name that ends with .png, .svg or .pdf")
    json: bool = flag(False, JSON)


@dataclass(frozen=True)
class RunCostFlags:
    run: str = flag(help="the run: a folder, s3://bucket/prefix, or with a Cluster its name")
    instance_type: str | None = flag(None, "type of its nodes, like p5.48xlarge; else the Cluster's workers'")
    paid: str | None = flag(
        None, "on-demand, spot, capacity-block or training-plan; else as --price or the Cluster says (on-demand)"
    )
    price: tuple[str, ...] = flag((), "MODE=USD: what a node costs an hour, paid so; may be given again")
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    group: str | None = flag(None, "the Cluster's group of workers; else its only one")
    region: str | None = flag(None, "region whose prices count; else the Cluster's (us-east-1)")
    online: bool = flag(False, "ask AWS what such a node costs today, on demand or on spot (read-only)")
    json: bool = flag(False, JSON)


@dataclass(frozen=True)
class SpotAdviceFlags:
    history: str = flag(
        help="file with the answer of aws ec2 describe-spot-price-history; with --online types, as p5.48xlarge,p5en.48xlarge"
    )
    online: bool = flag(False, "ask AWS for the history (read-only)")
    region: str | None = flag(None, "with --online: region whose history counts (us-east-1)")
    days: str | None = flag(None, "with --online: days of the history, up to 90 (30)")
    json: bool = flag(False, JSON)
