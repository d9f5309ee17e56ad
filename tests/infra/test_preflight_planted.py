"""Mistakes in the form of a cluster's description, planted one by one: each is a line that names what is allowed.

What a rule with a code finds is planted in `tests/infra/mistakes.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import parse
from lustrain.problem import UserError
from tests.infra.edits import edited
from tests.infra.mistakes import BLOCK, EKS, EXISTING, SLURM, SPOT, THERE

LONG_NAME = {**THERE, "mount_name": "a" * 9}
FORM = [
    ("unknown key", SPOT, {"bugdet": {}}, "did you mean budget?"),
    ("unknown key inside a table", SPOT, {"storage.lustre.throughput": 1}, "did you mean throughput_gb_s?"),
    ("list as a tag's value", SPOT, {"tags": {"a": ["b"]}}, "tags.a"),
    ("a wrong word for a DRA event", SPOT, {"storage.lustre.associations.0.import_events": ["REMOVED"]}, "'NEW'"),
    ("a DRA path without its slash", SPOT, {"storage.lustre.associations.0.path": "data"}, "absolute path"),
    (
        "a VPC's id for a subnet",
        SPOT,
        {"network.existing": {**EXISTING, "compute_subnet_id": "vpc-01234567"}},
        "subnet-",
    ),
    ("a subnet's id for a VPC", SPOT, {"network.existing": {**EXISTING, "vpc_id": "subnet-01234567"}}, "vpc-"),
    ("a zone's name for its id", SPOT, {"zone_id": "us-east-1a"}, "use1-az4"),
    ("no group at all", SPOT, {"groups": []}, "one or more"),
    ("a backend that there is not", SPOT, {"backend": "slurm"}, "hyperpod-slurm"),
    ("a name with a capital and an underline", SPOT, {"name": "My_Cluster"}, "small letters"),
    ("a name too long", SPOT, {"name": "a" * 41}, "40"),
    ("a group's name that HyperPod refuses", SLURM, {"groups.2.name": "train_1"}, "small letters"),
    ("the switch that Prometheus was", SPOT, {"observability.prometheus": True}, "fix: amp"),
    ("a truth for a number", SPOT, {"groups.0.count": True}, "true/false"),
    ("a mount name of nine characters", SPOT, {"storage.lustre": {"existing": LONG_NAME}}, "mount name"),
    (
        "an ARN for the name of an EKS cluster",
        EKS,
        {"eks.existing": {"name": "arn:aws:eks:x"}},
        "name of an EKS cluster",
    ),
    ("a profile's name for a role's ARN", EKS, {"access.admin_roles": ["platform"]}, "arn:aws:iam"),
    ("a training plan's name for its ARN", SLURM, {"groups.2.capacity.training_plan": "llm-p5"}, "training-plan/"),
    ("a key pair's name on two lines", SPOT, {"access.ssh_key": "mine\n"}, "not printable"),
    ("a key pair's name that is not ASCII", SPOT, {"access.ssh_key": "clé"}, "name of a key pair"),
    ("a key pair's name with a null", SPOT, {"access.ssh_key": "a\0"}, "not printable"),
    ("a repository with a null", SPOT, {"repository.existing": "ghcr.io/me\0"}, "not printable"),
    ("a repository that is not ASCII", SPOT, {"repository.existing": "ghcr.io/é"}, "repository's address"),
    ("a repository with its scheme", SPOT, {"repository.existing": "https://ghcr.io/a"}, "without https://"),
    ("half a surrogate pair", SPOT, {"storage.lustre.associations.0.prefix": "a\ud800"}, "associations.0.prefix"),
    ("a line end in a list", SPOT, {"alarms.emails": ["a@example.com", "b\n@example.com"]}, "not printable"),
    ("half a surrogate pair in a tag", SPOT, {"tags": {"a": "\udfff"}}, "not printable"),
    ("half a surrogate pair in a tag's key", SPOT, {"tags": {"a\udfff": "b"}}, "not printable"),
    ("digits of another script", EKS, {"eks.version": "1.٣٤"}, "a Kubernetes version"),
    ("a profile that there is not", SPOT, {"tuning.profiles": {"train": "gpu"}}, "'efa-gpu'"),
    ("a list as a setting's value", SPOT, {"tuning.settings": {"clock.chrony": ["on"]}}, "tuning.settings"),
    ("a time without its zone", BLOCK, {"job_ends_at": "2027-01-01T00:00:00"}, "job_ends_at"),
]


@pytest.mark.parametrize(("what", "stack", "edits", "word"), FORM, ids=[row[0] for row in FORM])
def test_a_wrong_form_is_one_line_that_says_what_is_allowed(
    what: str, stack: str, edits: dict[str, Any], word: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse(edited(stack, edits))
    assert any(word in line for line in caught.value.problems), (what, caught.value.problems)
    assert all(line.startswith("lustrain:cluster.") for line in caught.value.problems)
