"""Names that AWS limits, with the longest names that a cluster and its groups can have."""

from __future__ import annotations

import pytest

from infra.components.stack import build
from infra.config import ClusterSpec
from infra.local.mocks import Recorder
from infra.plan.stack import Plan
from tests.infra.edits import place, spec_of
from tests.infra.registered import Registered, run_on

LONGEST = "a" * 40
AUTOMATIC = len("-1234567")
"""What Pulumi adds to a name that the program does not set."""
LIMITS = {
    "aws:iam/role:Role": 64,
    "aws:iam/rolePolicy:RolePolicy": 128,
    "aws:iam/instanceProfile:InstanceProfile": 128,
    "aws:cloudwatch/eventRule:EventRule": 64,
    "aws:sqs/queue:Queue": 80,
    "aws:ec2/launchTemplate:LaunchTemplate": 128,
    "aws:autoscaling/group:Group": 255,
    "aws:eks/cluster:Cluster": 100,
    "aws:budgets/budget:Budget": 100,
}
"""https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html, the API references of the others."""


def test_the_longest_names_of_the_form_are_longest_here() -> None:
    (field,) = [one for one in ClusterSpec.model_fields["name"].metadata if hasattr(one, "max_length")]
    assert field.max_length == len(LONGEST)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["ec2-spot-g6e", "hyperpod-slurm-p5", "hyperpod-eks-g6e-spot"])
def test_no_name_of_a_cluster_with_the_longest_legal_name_is_too_long_for_aws(stack: str) -> None:
    edits = {"name": LONGEST, "groups.0.name": LONGEST, "network.flow_logs": True}
    # S3-001 refuses buckets named after so long a name; the user then names them.
    buckets = {f"buckets.{key}": f"sagemaker-{key}" for key in ("data", "checkpoints", "lifecycle")}
    spec = spec_of(stack, {**edits, **buckets})
    recorder = Recorder(place(stack).region)
    run_on(Registered(recorder), recorder, lambda: {"all": build(Plan(spec, place(stack)))["cluster"]})
    lengths = {
        (kind, name): len(inputs["name"]) if "name" in inputs else len(name) + AUTOMATIC
        for kind, name, inputs in recorder.resources
        if kind in LIMITS
    }
    assert "aws:iam/role:Role" in {kind for kind, _ in lengths}
    assert {one: length for one, length in lengths.items() if length > LIMITS[one[0]]} == {}
