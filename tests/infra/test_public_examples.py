"""Public HyperPod configurations, said as ClusterSpecs: those that work pass preflight and give a state that the schema
allows, those that are known to fail are told why.

tests/infra/public/hyperpod.json holds their facts in CreateCluster's words (`wrong`: a word that the finding must hold).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.config import ClusterSpec, parse
from infra.plan.nodes.hyperpod import TYPE, Mount, Refs, desired_state
from infra.plan.place import Place
from infra.preflight.offline import run_offline
from tests.infra.cloudformation import complaints

EXAMPLES: list[dict[str, Any]] = json.loads((Path(__file__).with_name("public") / "hyperpod.json").read_text("utf-8"))
RIGHT = [example for example in EXAMPLES if "wrong" not in example]
WRONG = [example for example in EXAMPLES if "wrong" in example]


def place_of(example: dict[str, Any]) -> Place:
    return Place(example["region"], "123456789012")


def group_of(example: dict[str, Any], public: dict[str, Any]) -> dict[str, Any]:
    """One group of CreateCluster in our words."""
    slurm, name = example.get("slurm", {}), public["InstanceGroupName"]
    role = next((role for role in ("controller", "login") if slurm.get(role) == name), "worker")
    found = {
        "name": name,
        "role": role,
        "instance_type": public["InstanceType"],
        "count": public["InstanceCount"],
        "threads_per_core": public["ThreadsPerCore"],
        "root_volume_gib": public.get("EbsGB", 500),
        "deep_health_checks": public.get("OnStartDeepHealthChecks", []),
    }
    if partition := slurm.get("partitions", {}).get(name):
        found["partition"] = partition
    if plan := public.get("TrainingPlanArn"):
        zone = example.get("plan_zone_id", example["zone_id"])
        found["capacity"] = {
            "mode": "training-plan",
            "training_plan": plan,
            "zone_id": zone,
            "size": public["InstanceCount"],
            "ends_at": "2099-01-01T11:30:00Z",
        }
    return found


def spec_of(example: dict[str, Any]) -> ClusterSpec:
    """The example as it would stand in Pulumi.<stack>.yaml: VpcConfig is a network that is there already."""
    cluster, region = example["cluster"], example["region"]
    existing = {
        "vpc_id": "vpc-0123456789012345a",
        "compute_subnet_id": "subnet-0123456789abcdef0",
        "control_subnet_ids": ["subnet-0123456789abcdef1", "subnet-0123456789abcdef2"],
        "compute_cidr": example.get("compute_cidr", "10.1.0.0/16"),
    }
    spec: dict[str, Any] = {
        "name": cluster["ClusterName"],
        "backend": "hyperpod-eks" if cluster.get("Orchestrator") == "Eks" else "hyperpod-slurm",
        "zone_id": example["zone_id"],
        "groups": [group_of(example, public) for public in cluster["InstanceGroups"]],
        "network": {"existing": existing},
    }
    if spec["backend"] == "hyperpod-slurm":
        del existing["control_subnet_ids"]
    if lustre := example.get("lustre"):
        spec["storage"] = {"lustre": lustre}
        if there := lustre.get("existing"):
            dns = f"{there['id']}.fsx.{region}.amazonaws.com"
            full = {**there, "dns_name": dns, "security_group_id": "sg-0123456789abcdef0"}
            spec["storage"] = {"lustre": {"existing": full}}
    return parse(spec)


def schema_errors(example: dict[str, Any]) -> list[str]:
    spec, place = spec_of(example), place_of(example)
    refs = Refs(
        role_arn=place.arn("iam", "role/AmazonSagemakerExecutionRole", region=""),
        subnet_id="subnet-0123456789abcdef0",
        security_group_ids=["sg-0123456789abcdef0"],
        lifecycle_uri="s3://sagemaker-lifecycle-0123456789/lifecycle/0123456789ab",
        lustre=Mount(f"fs-12345678a90b01cde.fsx.{place.region}.amazonaws.com", "1abcdefg", "/fsx"),
        eks_cluster_arn=place.arn("eks", "cluster/ml-cluster"),
    )
    return complaints(TYPE, desired_state(spec, refs), place.region)


@pytest.mark.slow
@pytest.mark.parametrize("example", RIGHT, ids=lambda example: example["about"])
def test_what_is_right_passes_and_gives_a_legal_state(example: dict[str, Any]) -> None:
    findings = run_offline(spec_of(example), place_of(example))
    assert [finding for finding in findings if finding.level == "error"] == []
    assert schema_errors(example) == []


@pytest.mark.parametrize("example", WRONG, ids=lambda example: example["about"])
def test_what_is_known_to_fail_is_told(example: dict[str, Any]) -> None:
    lines = list(run_offline(spec_of(example), place_of(example)))
    assert [line for line in lines if example["wrong"] in line and not line.startswith("CFG-09")]
