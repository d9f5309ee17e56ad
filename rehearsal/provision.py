"""The journey's first stage: the rehearsal stack, brought up by the real engine where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3

from infra.local.engine import PROGRAM, Engine, EngineError, engine_missing
from infra.preflight import stackfile
from infra.preflight.offline import run_in
from infra.preflight.rule import Context
from lustrain.cluster import Cluster, parse
from rehearsal.lab.slurm import QUICK, UNHELD

STACK = "rehearsal"
WITH_SLURM: Mapping[str, Any] = {
    "groups": [{"name": "train", "instance_type": "c7i.24xlarge", "count": 2, "capacity": {"mode": "spot"}}],
    "scheduler": {"type": "slurm", "settings": {**QUICK, **UNHELD}},
    # Nodes of the lab have no agent that carries logs, and reach no network to get it.
    "observability": {"logs": False},
}
"""What the stack has instead, where nodes of the lab boot as its instances and make its Slurm."""
STACK_FILE = PROGRAM / f"Pulumi.{STACK}.yaml"


@dataclass(frozen=True)
class Provisioned:
    cluster: Cluster
    outcome: str
    stable: bool
    """It is true where a second preview changes nothing; never without the engine."""
    engine: Engine | None


def preflight() -> list[str]:
    """Return the errors that the offline rules find in the rehearsal stack, one line each."""
    stack = stackfile.read(STACK)
    findings = run_in(Context.of_region(stack.spec, stack.region, datetime.now(UTC)))
    return [finding for finding in findings if finding.level == "error"]


def what_is_real() -> tuple[str, str]:
    """Return what of the provisioning is real on this machine, and what is emulated."""
    if engine_missing():
        return "the program, preflight", "Pulumi engine and provider (a mock monitor), AWS"
    return "Pulumi engine, AWS provider, preflight", "AWS"


def provision(folder: Path, environment: Mapping[str, str], *, slurm: bool = False) -> Provisioned:
    """Bring the stack up in the embedded AWS that `environment` points at; with an engine, `slurm` gives it a Slurm."""
    missing = engine_missing()
    return _without_engine(environment, missing) if missing else _with_engine(folder, environment, slurm=slurm)


def instances_in_service(cluster: Cluster) -> list[str]:
    """Return the ids of the nodes in service, in the order in which their groups launched them."""
    groups = list(cluster.nodes.auto_scaling_groups)
    client = boto3.client("autoscaling", region_name=cluster.region)
    described = client.describe_auto_scaling_groups(AutoScalingGroupNames=groups)["AutoScalingGroups"]
    instances = (instance for group in described for instance in group["Instances"])
    return [instance["InstanceId"] for instance in instances if instance["LifecycleState"] == "InService"]


def tear_down(engine: Engine) -> tuple[int, list[str]]:
    """Destroy the stack; return how many resources went, and the names of the protected ones, which stay."""
    before = len(engine.resources())
    engine("destroy", "--yes", "--skip-preview", "--exclude-protected")
    left = engine.resources()
    return before - len(left), sorted(
        resource["urn"].rpartition("::")[2] for resource in left if resource.get("protect")
    )


def _with_engine(folder: Path, environment: Mapping[str, str], *, slurm: bool) -> Provisioned:
    engine = Engine(folder, STACK, environment)
    if slurm:
        engine.change({**engine.spec, **WITH_SLURM})
    engine.up()
    left = engine.steps()
    return Provisioned(
        cluster=parse(engine.outputs()["cluster"]),
        outcome=f"pulumi up: {len(engine.resources())} resources; a second preview would change {len(left)}",
        stable=not left,
        engine=engine,
    )


def _without_engine(environment: Mapping[str, str], missing: str) -> Provisioned:
    command = [sys.executable, "-m", "rehearsal.mocked", str(STACK_FILE)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    cluster = parse(printed["outputs"]["cluster"])
    count = sum(kind.startswith("aws:") for kind, _ in printed["resources"])
    _make_what_the_run_needs(cluster)
    return Provisioned(
        cluster=cluster,
        outcome=f"{missing}: the program declares {count} resources; only buckets and queue were made",
        stable=False,
        engine=None,
    )


def _make_what_the_run_needs(cluster: Cluster) -> None:
    for bucket in {cluster.buckets.data, cluster.buckets.checkpoints} - {None}:
        boto3.client("s3").create_bucket(Bucket=str(bucket))
    if cluster.interruption_queue:
        name = urlsplit(cluster.interruption_queue).path.rpartition("/")[2]
        boto3.client("sqs").create_queue(QueueName=name)
