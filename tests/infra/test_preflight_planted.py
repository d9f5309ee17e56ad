"""The mistakes that a user makes with clusters, planted one by one: each is caught before `pulumi up`, in one line with a fix.

They are those that engine, provider and emulated service caught late or not at all, and the list of bad input of the
requirements: misspelled and unknown keys by the config's form, the others by a rule with a code.
"""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import parse
from infra.preflight.offline import run_offline
from lustrain.problem import UserError
from tests.infra.edits import GONE, edited, place, spec_of
from tests.infra.mistakes import BLOCK, EKS, NOW, RESERVED, SLURM, SPOT

FORM = [
    ("unknown key", SPOT, {"bugdet": {}}, "did you mean budget?"),
    ("unknown key inside a table", SPOT, {"storage.lustre.throughput": 1}, "did you mean throughput_gb_s?"),
    ("list as a tag's value", SPOT, {"tags": {"a": ["b"]}}, "tags.a"),
    ("a wrong word for a DRA event", SPOT, {"storage.lustre.associations.0.import_events": ["REMOVED"]}, "'NEW'"),
    ("a DRA path without its slash", SPOT, {"storage.lustre.associations.0.path": "data"}, "absolute path"),
    (
        "a VPC's id for a subnet",
        SPOT,
        {"network.existing": {"vpc_id": "vpc-01234567", "compute_subnet_id": "vpc-01234567"}},
        "subnet-",
    ),
    (
        "a subnet's id for a VPC",
        SPOT,
        {"network.existing": {"vpc_id": "subnet-01234567", "compute_subnet_id": "subnet-01234567"}},
        "vpc-",
    ),
    ("a zone's name for its id", SPOT, {"zone_id": "us-east-1a"}, "use1-az4"),
    ("no group at all", SPOT, {"groups": []}, "one or more"),
    ("a backend that there is not", SPOT, {"backend": "slurm"}, "hyperpod-slurm"),
    ("a name with a capital and an underline", SPOT, {"name": "My_Cluster"}, "small letters"),
    ("a name too long", SPOT, {"name": "a" * 41}, "40"),
    ("a group's name that HyperPod refuses", SLURM, {"groups.2.name": "train_1"}, "small letters"),
    ("a truth for a number", SPOT, {"groups.0.count": True}, "true/false"),
    (
        "a mount name of nine characters",
        SPOT,
        {
            "storage.lustre": {
                "existing": {
                    "id": "fs-01234567",
                    "dns_name": "x",
                    "mount_name": "a" * 9,
                    "security_group_id": "sg-01234567",
                }
            }
        },
        "mount name",
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

RULES: list[tuple[str, str, dict[str, Any], str]] = [
    ("a zone of another region", SPOT, {"zone_id": "usw2-az1"}, "NET-001"),
    (
        "two groups of one name",
        SPOT,
        {"groups.1": {"name": "train", "instance_type": "g6e.48xlarge", "count": 1}},
        "CFG-001",
    ),
    ("FSx capacity 5000", SPOT, {"storage.lustre": {"capacity_gib": 5000, "per_tib_mb_s": 125}}, "FSX-001"),
    (
        "FSx throughput that is not sold",
        SPOT,
        {"storage.lustre": {"capacity_gib": 2400, "per_tib_mb_s": 200}},
        "FSX-003",
    ),
    (
        "a file system too small for EFA",
        SPOT,
        {"storage.lustre": {"capacity_gib": 4800, "per_tib_mb_s": 250, "efa": True}},
        "FSX-002",
    ),
    (
        "EFA of Lustre and nodes without",
        SPOT,
        {"groups.0.instance_type": "g6e.4xlarge", "storage.lustre.efa": True},
        "FSX-011",
    ),
    ("metadata IOPS off the ladder", BLOCK, {"storage.lustre.metadata_iops": 4500}, "FSX-004"),
    (
        "Intelligent-Tiering with an association",
        RESERVED,
        {"storage.lustre.associations": [{"path": "/data", "bucket": "data"}]},
        "FSX-006",
    ),
    ("one DRA inside another", SPOT, {"storage.lustre.associations.1": {"path": "/data/x", "bucket": "b"}}, "DRA-002"),
    (
        "nine DRAs",
        SPOT,
        {"storage.lustre.associations": [{"path": f"/{i}", "bucket": f"bucket-{i}"} for i in range(9)]},
        "DRA-001",
    ),
    (
        "runs inside an auto-export DRA",
        BLOCK,
        {"runs_uri": "s3://block-p5en-checkpoints-123456789012-us-east-2/results/a/"},
        "DRA-004",
    ),
    ("an instance type misspelled", SPOT, {"groups.0.instance_type": "g6e.48xlareg"}, "EC2-001"),
    ("a type that HyperPod does not take", SLURM, {"groups.2.instance_type": "g5g.16xlarge"}, "HYP-004"),
    (
        "a capacity block with HyperPod",
        SLURM,
        {"groups.2.capacity": {"mode": "capacity-block", "reservation": "cr-01234567"}},
        "CAP-001",
    ),
    ("a training plan with EC2", SPOT, {"groups.0.capacity": {"mode": "training-plan"}}, "CAP-001"),
    ("a capacity block without its id", SPOT, {"groups.0.capacity": {"mode": "capacity-block"}}, "CAP-002"),
    ("a placement group with a capacity block", BLOCK, {"groups.0.capacity.placement_group": "pg"}, "CAP-003"),
    ("a reservation in another zone", BLOCK, {"groups.0.capacity.zone_id": "use2-az3"}, "CAP-004"),
    ("a training plan in another zone", SLURM, {"groups.2.capacity.zone_id": "usw2-az4"}, "CAP-004"),
    ("a reservation that is too small", BLOCK, {"groups.0.capacity.size": 8}, "CAP-005"),
    ("spot of a type without", SPOT, {"groups.0.instance_type": "trn2u.48xlarge"}, "CAP-007"),
    ("a block that ends before the job", BLOCK, {"job_ends_at": "2027-02-14T11:20:00Z"}, "CAP-009"),
    (
        "a CIDR too small for nodes and their addresses",
        SPOT,
        {"network.compute_prefix": 28, "groups.0.count": 20},
        "NET-005",
    ),
    ("a VPC smaller than its subnet", SPOT, {"network.cidr": "10.0.0.0/20"}, "NET-004"),
    ("nodes that reach nothing", SPOT, {"network.nat": False}, "NET-007"),
    ("EKS with one zone", EKS, {"network.second_zone_id": GONE}, "EKS-001"),
    ("Slurm without a controller", SLURM, {"groups.0": GONE}, "HYP-001"),
    ("two Slurm controllers", SLURM, {"groups.0.count": 2}, "HYP-001"),
    ("a controller with EC2", SPOT, {"groups.0.role": "controller"}, "HYP-003"),
    ("more at least than at most", SLURM, {"groups.2.min_count": 9}, "CFG-004"),
    ("a bucket's name that S3 refuses", SPOT, {"buckets.data": "My_Data"}, "S3-001"),
    ("a lifecycle bucket that HyperPod may not read", SLURM, {"buckets.lifecycle": "scripts"}, "S3-002"),
    ("homes inside Lustre's mount", SPOT, {"storage.home.mount_path": "/fsx/home"}, "FSX-010"),
    ("backups of a linked file system", SPOT, {"storage.lustre.backup_days": 3}, "FSX-007"),
    ("fifty-one tags", SPOT, {"tags": {f"t{i}": "x" for i in range(51)}}, "CFG-008"),
    ("a tag of AWS's own", SPOT, {"tags": {"aws:owner": "x"}}, "CFG-008"),
    (
        "a key of another region",
        BLOCK,
        {"buckets.kms_key": "arn:aws:kms:us-east-1:123456789012:key/01234567-89ab-cdef-0123-456789abcdef"},
        "IAM-002",
    ),
]


@pytest.mark.parametrize(("what", "stack", "edits", "word"), FORM, ids=[row[0] for row in FORM])
def test_a_wrong_form_is_one_line_that_says_what_is_allowed(
    what: str, stack: str, edits: dict[str, Any], word: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse(edited(stack, edits))
    assert any(word in line for line in caught.value.problems), (what, caught.value.problems)
    assert all(line.startswith("lustrain:cluster.") for line in caught.value.problems)


@pytest.mark.parametrize(("what", "stack", "edits", "code"), RULES, ids=[row[0] for row in RULES])
def test_a_planted_mistake_is_an_error_with_code_and_fix(
    what: str, stack: str, edits: dict[str, Any], code: str
) -> None:
    found = run_offline(spec_of(stack, edits), place(stack), NOW)
    errors = {finding.code: finding for finding in found if finding.level == "error"}
    assert code in errors, (what, list(found))
    assert errors[code].fix
