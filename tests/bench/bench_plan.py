"""The pure plan of a cluster: what `pulumi up` computes before it asks AWS for anything, from 1 to 1,000 nodes and 50 groups.

No cloud SDK runs here. The time of `pulumi preview` is engine, provider and interpreter, and is measured with them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.catalog.instances import snapshot
from infra.clock import now
from infra.config import Backend, ClusterSpec, parse
from infra.plan.deployer_policy import deployer_policy
from infra.plan.network.endpoints import endpoints
from infra.plan.network.security import rules
from infra.plan.network.vpc import addresses_needed, cidr_problems, network
from infra.plan.nodes.auto_scaling import node_groups
from infra.plan.nodes.bundle import bundle
from infra.plan.nodes.capacity import capacity_problems, reservations
from infra.plan.nodes.eks import eks_plan, helm_commands
from infra.plan.nodes.hyperpod import Mount, Refs, desired_state
from infra.plan.nodes.user_data import user_data
from infra.plan.outputs import DeployedIds, cluster
from infra.plan.place import Place
from infra.plan.roles import roles
from infra.plan.stack import Plan
from infra.plan.storage.associations import associations, overlaps
from infra.plan.storage.buckets import buckets
from infra.plan.storage.home import home
from infra.plan.storage.lustre import lustre_plan
from infra.plan.storage.repository import repository
from infra.plan.teardown import teardown
from infra.plan.watch.budget import budget
from infra.plan.watch.interruptions import channel
from infra.plan.watch.observability import dashboard, observability
from node_setup.fleet.hosts import Node
from node_setup.slurm import conf
from node_setup.slurm.machines import Report
from tests.bench.harness import Row, interleaved, median, run_bench, timed
from tests.node_setup import slurm_machines

PLACE = Place("us-west-2", "123456789012")
NODES, GROUPS = 1000, 50
BUDGET_SECONDS = 1.0
LOOPS = 10
"""One plan takes some milliseconds. How it grows is told from processor time: a busy machine keeps one waiting as long."""
FLAT = 1.5
"""A plan is made of groups: more nodes in one may cost what a longer number costs."""
LINEAR = 2.2
"""Twice the groups at no more than twice the cost; a quadratic part would show as up to four times."""
LUSTRE_DNS = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com"


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    half = GROUPS // 2
    sizes = {"one": (1, 1), "nodes": (NODES, 1), "half": (half, half), "groups": (GROUPS, GROUPS)}
    backends: tuple[Backend, ...] = ("ec2", "hyperpod-slurm", "hyperpod-eks")
    specs = {f"{backend} {name}": spec(backend, *size) for backend in backends for name, size in sizes.items()}
    for wanted in specs.values():
        plan(wanted)
    cases: dict[str, Callable[[], float]] = {
        name: lambda wanted=wanted: cpu_seconds(lambda: [plan(wanted) for _ in range(LOOPS)]) / LOOPS
        for name, wanted in specs.items()
    }
    largest = spec("ec2", NODES, GROUPS)
    cases["cold"] = lambda: timed(lambda: plan_cold(largest))
    cases["warm"] = lambda: timed(lambda: plan(largest))
    reports, there = _slurm_reports(), slurm_machines.cluster({"train": {**slurm_machines.GROUP, "gpus": 8}})
    cases["slurm"] = lambda: timed(lambda: conf.files(there, slurm_machines.machines(there, reports)))
    took = {name: median(values) for name, values in interleaved(cases, repetitions).items()}
    grown = [row for backend in backends for row in _grows(backend, took)]
    return [row.as_dict() for row in (_cold(took), _slurm(took), *grown)]


def _slurm_reports() -> list[Report]:
    """Facts of as many machines as there are nodes, all of them a p5."""
    with tempfile.TemporaryDirectory() as folder:
        facts = slurm_machines.report("node1", slurm_machines.plant(Path(folder), 2, 48, 2, gpus=8)).facts
    return [
        Report(Node(f"node{at}", f"10.0.{at // 256}.{at % 256}"), {**facts, "host": f"node{at}"})
        for at in range(1, NODES + 1)
    ]


def _slurm(took: dict[str, float]) -> Row:
    return _within_a_second(f"slurm.conf and gres.conf of {NODES} nodes with 8 GPUs, from their facts", took["slurm"])


def _cold(took: dict[str, float]) -> Row:
    figure = f"pure plan of {NODES} nodes in {GROUPS} groups on EC2, instance facts read anew"
    return _within_a_second(figure, took["cold"], f"{took['warm'] * 1e3:.0f} ms when the facts are there")


def _within_a_second(figure: str, seconds: float, note: str = "") -> Row:
    return Row(
        figure=figure,
        ours=seconds * 1e3,
        baseline=BUDGET_SECONDS * 1e3,
        ratio=seconds / BUDGET_SECONDS,
        bar=1.0,
        limit=None,
        unit="ms",
        baseline_name="a second",
        at_most=True,
        note=note,
    )


def _grows(backend: str, took: dict[str, float]) -> list[Row]:
    one, half, whole = (took[f"{backend} {name}"] for name in ("one", "half", "groups"))
    nodes = took[f"{backend} nodes"]
    return [
        Row(
            figure=f"{backend}: {NODES} nodes in one group",
            ours=nodes * 1e3,
            baseline=one * 1e3,
            ratio=nodes / one,
            bar=FLAT,
            limit=None,
            unit="ms",
            baseline_name="1 node",
            at_most=True,
        ),
        Row(
            figure=f"{backend}: {GROUPS} groups",
            ours=whole * 1e3,
            baseline=half * 1e3,
            ratio=whole / half,
            bar=LINEAR,
            limit=None,
            unit="ms",
            baseline_name=f"{GROUPS // 2} groups",
            at_most=True,
            note=f"{whole / one:.1f}x one group",
        ),
    ]


def cpu_seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def spec(backend: Backend, nodes: int, groups: int) -> ClusterSpec:
    """A cluster with everything on, its workers in `groups` groups."""
    workers = [
        {
            "name": f"train-{number}",
            "instance_type": "p5.48xlarge",
            "count": nodes // groups,
            "capacity": {"mode": "spot" if backend == "ec2" else "on-demand"},
        }
        for number in range(groups)
    ]
    controller = {"name": "controller", "role": "controller", "instance_type": "c5.2xlarge", "count": 1}
    return parse(
        {
            "name": "bench",
            "backend": backend,
            "zone_id": "usw2-az2",
            "groups": [*workers, *([controller] if backend == "hyperpod-slurm" else [])],
            "network": {"closed": True, "second_zone_id": "usw2-az1", "flow_logs": True},
            "storage": {
                "lustre": {
                    "throughput_gb_s": 38.4,
                    "associations": [{"path": f"/data{number}", "bucket": f"data-{number}"} for number in range(8)],
                },
                "home": {},
            },
            "budget": {"monthly_usd": 100000, "emails": ["ops@example.com"]},
            "alarms": {"emails": ["ops@example.com"]},
        }
    )


def plan_cold(wanted: ClusterSpec) -> None:
    snapshot.cache_clear()
    plan(wanted)


def plan(wanted: ClusterSpec) -> list[object]:
    """All that is decided for `wanted` without AWS; the list keeps any of it from being left out."""
    mirrors = associations(wanted, PLACE)
    watch = observability(wanted, PLACE)
    return [
        network(wanted, PLACE),
        endpoints(wanted, PLACE),
        addresses_needed(wanted),
        cidr_problems(wanted),
        rules(wanted),
        roles(wanted, PLACE),
        deployer_policy(wanted, PLACE),
        lustre_plan(wanted),
        home(wanted),
        mirrors,
        overlaps(mirrors),
        buckets(wanted, PLACE),
        bundle(wanted),
        channel(wanted, PLACE),
        watch,
        dashboard(watch, {}),
        budget(wanted, PLACE),
        repository(wanted),
        [capacity_problems(group, wanted.type_of(group), wanted.backend) for group in wanted.groups],
        nodes_of(wanted),
        cluster(Plan(wanted, PLACE), MADE),
        teardown(Plan(wanted, PLACE)),
    ]


MADE = DeployedIds(
    auto_scaling_groups=("train",), lustre={"id": "fs-1", "dns_name": LUSTRE_DNS, "mount_name": "abcd1234"}
)


def nodes_of(wanted: ClusterSpec) -> list[object]:
    if wanted.backend == "ec2":
        scripts = [
            user_data(
                wanted,
                PLACE,
                group,
                lustre_dns=LUSTRE_DNS,
                lustre_mount_name="abcd1234",
            )
            for group in wanted.workers
        ]
        return [reservations(wanted), node_groups(wanted, PLACE, now()), scripts]
    mount = Mount(LUSTRE_DNS, "abcd1234", "/fsx")
    refs = Refs("role", "subnet", ["sg"], "s3://bucket/lifecycle", lustre=mount, eks_cluster_arn="eks")
    kubernetes = [eks_plan(wanted, PLACE), helm_commands(wanted, PLACE)] if wanted.backend == "hyperpod-eks" else []
    return [desired_state(wanted, refs), *kubernetes]


if __name__ == "__main__":
    sys.exit(run_bench(measure))
