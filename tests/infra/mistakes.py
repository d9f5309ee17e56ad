"""Mistakes planted in the example stacks, at least one for each offline rule."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from infra.plan.place import Place
from tests.infra.edits import GONE

SPOT, BLOCK, RESERVED = "ec2-spot-g6e", "ec2-capacity-block-p5en", "ec2-p6-b300-reservation"
WITH_SLURM, KEY_OF_IT = "ec2-slurm-g6e", "scheduler.controller.image_id"
SLURM, EKS = "hyperpod-slurm-p5", "hyperpod-eks-g6e-spot"
PROXY: dict[str, Any] = {"http": "http://proxy.example.com:3128", "no_proxy": [".example.com"]}
FURTHER = "network.security_group_ids"
CIDRS, LINKS = "eks.public_access_cidrs", "storage.lustre.associations"
S3_MOUNTS, MOUNT = "storage.s3_mounts", {"bucket": "data", "path": "/s3/data"}
THEIRS = {"bucket": "theirs", "path": "/s3/theirs", "region": "us-west-2"}
NOW = datetime(2026, 11, 21, tzinfo=UTC)
SUBNET = "subnet-0123456789abcdef0"
EXISTING = {"vpc_id": "vpc-0123456789abcdef0", "compute_subnet_id": SUBNET}
LUSTRE = {"id": "fs-0123456789abcdef0", "mount_name": "fsx", "security_group_id": "sg-0123456789abcdef0"}
US_EAST_1_DNS = "fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com"
KEY = "arn:aws:kms:us-east-1:123456789012:key/01234567-89ab-cdef-0123-456789abcdef"
ALIAS = "arn:aws:kms:us-west-2:123456789012:alias/mine"
BOUNDARY = "arn:aws{}:iam::{}:policy/boundary"
NODE_ROLE = "arn:aws:iam::123456789012:role/team/nodes"
PROFILE = "arn:aws:iam::123456789012:instance-profile/team/nodes"
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:slurm-AbCdEf"
ELSEWHERE = SECRET.replace("us-east-1", "eu-west-1")
DATABASE = {"endpoint": "db.example.com", "secret_arn": SECRET}
RECORDS = {**DATABASE, "security_group_id": "sg-0123456789abcdef0"}
SMALL = {**EXISTING, "compute_cidr": "10.0.0.0/28"}
THERE = {**LUSTRE, "dns_name": US_EAST_1_DNS}
HOMES = {key: value for key, value in THERE.items() if key != "mount_name"}
PLANS = "arn:aws:sagemaker:{}:training-plan/a"
SERVICE_ROLE = "arn:aws:iam::123456789012:role/aws-service-role/x.amazonaws.com/A"
RUNS_IN_DATA = "s3://spot-g6e-data-123456789012-us-east-1/datasets/runs/"
BOUGHT = {"mode": "reservation", "reservation": "cr-0a1b2c3d4e5f60718"}
CHINA = Place("cn-north-1", "123456789012", "aws-cn")
STOCKHOLM = Place("eu-north-1", "123456789012", "aws")
GOVERNMENT = Place("us-gov-west-1", "123456789012", "aws-us-gov")
P9 = {
    "architecture": "x86_64",
    "vcpus": 192,
    "memory_gib": 4096,
    "threads_per_core": 2,
    "accelerators": {"name": "NVIDIA R900", "count": 8, "memory_gib": 512},
    "nvme": 4,
    "efa": 16,
    "network_cards": [{"interfaces": 4}, {"count": 16, "types": ["interface", "efa", "efa-only"]}],
}
"""A type that no catalogue knows."""
OTHERS = "groups.0.other_types"
TWO_TYPES: dict[str, Any] = {
    "groups.0.instance_type": "g6.12xlarge",
    OTHERS: ["g5.12xlarge"],
    "groups.0.efa": False,
    "groups.0.placement": "none",
}
UNLIKE = ("g5.48xlarge", "g6e.12xlarge", "inf2.24xlarge", "g5g.16xlarge", "g4dn.metal", "mac1.metal")
"""Types that differ from a g6.12xlarge: in accelerators, their memory, their maker, the architecture, and Linux."""
GB200 = {
    "architecture": "arm64",
    "vcpus": 144,
    "memory_gib": 960,
    "accelerators": {"name": "NVIDIA GB200", "count": 4, "memory_gib": 185},
    "efa": 8,
    "network_cards": [{}, *[{"interfaces": 1, "types": ["efa-only"]}, {}] * 8],
}
"""A p6e-gb200.36xlarge, by hand."""
TRN3 = {**P9, "accelerators": {"name": "AWS Trainium3", "count": 16, "memory_gib": 144, "kind": "neuron"}}
"""Of Trainium3 only the devices are known."""
ULTRASERVER: dict[str, Any] = {
    "instance_types": {"p6e-gb200.36xlarge": GB200},
    "groups.0.instance_type": "p6e-gb200.36xlarge",
    "groups.0.count": 18,
    "groups.0.capacity.size": 18,
}
JOINED: dict[str, Any] = {
    "network": {"existing": EXISTING},
    "access": {},
    "eks": {"existing": {"name": "platform"}, "tiered_memory_percent": 20},
}
"""Of the EKS example: nodes for an EKS cluster that is there already."""
LINK = {"path": "/text", "bucket": "data", "prefix": "text"}


@dataclass(frozen=True)
class Mistake:
    """An edit of an example stack; its rule must name the last key that is edited, with `path` behind it, or `path` itself."""

    code: str
    stack: str
    edits: dict[str, Any]
    path: str = ""
    place: Place | None = None

    @property
    def key(self) -> str:
        last = list(self.edits)[-1] if self.edits else ""
        return self.path if self.path[:1] not in ("", ".") else last + self.path

    def __str__(self) -> str:
        return f"{self.code} {'+'.join(self.edits)}"


def group(**keys: Any) -> dict[str, Any]:
    return {"name": "more", "instance_type": "g6e.48xlarge", "count": 1, **keys}


MISTAKES = [
    Mistake("CFG-001", SPOT, {"groups.1": group(name="train")}, "groups.0.name"),
    Mistake("CFG-002", SLURM, {"groups.2": GONE}, "groups"),
    Mistake("CFG-003", SPOT, {"groups.0.count": 0}),
    Mistake("CFG-004", SLURM, {"groups.2.min_count": 5}),
    Mistake("CFG-005", SPOT, {"groups.0.min_count": 4}),
    Mistake("CFG-005", SPOT, {"groups.0.min_count": 0}),
    Mistake("CFG-005", WITH_SLURM, {"groups.0.min_count": 2}),
    Mistake("CFG-006", SPOT, {"groups.0.partition": "p"}),
    Mistake("CFG-006", SLURM, {"groups.2.labels": {"a": "b"}}),
    Mistake("CFG-006", SLURM, {"groups.2.taints": [{"key": "a"}]}),
    Mistake("CFG-006", SPOT, {"groups.0.auto_patch": "WhenIdle"}),
    Mistake("CFG-006", SPOT, {"groups.0.deep_health_checks": ["InstanceStress"]}),
    Mistake("CFG-006", SLURM, {"groups.2.efa": False}),
    Mistake("CFG-006", EKS, {"groups.1.placement": "none"}),
    Mistake("CFG-007", SPOT, {"slurm.config_strategy": "Merge"}, "slurm"),
    Mistake("CFG-007", SLURM, {"access.ssh_key": "mine"}),
    Mistake("CFG-007", SPOT, {"network.second_zone_id": "use1-az5"}),
    Mistake("CFG-008", SPOT, {"tags": {f"t{i}": "x" for i in range(49)}}),
    Mistake("CFG-008", SPOT, {"tags": {"aws:x": "y"}}, ".aws:x"),
    Mistake("CFG-008", SPOT, {"tags": {"k" * 129: "y"}}, f"tags.{'k' * 129}"),
    Mistake("CFG-008", SPOT, {"tags": {"k": "v" * 257}}, ".k"),
    Mistake("CFG-008", SPOT, {"tags": {"k": "a;b"}}, ".k"),
    Mistake("CFG-012", SPOT, {}, "aws:region", Place("moon-west-1", "123456789012")),
    Mistake("CFG-012", SPOT, {}, "aws:region", Place("us-esat-1", "123456789012")),
    Mistake("CFG-009", SPOT, {"tags": {"lustrain:cluster": "other"}}, ".lustrain:cluster"),
    Mistake("CFG-010", SPOT, {"job_ends_at": "2026-01-01T00:00:00Z"}),
    Mistake("CFG-011", SPOT, {"tags": {"cost centre": "42"}}, ".cost centre"),
    Mistake("CFG-014", SPOT, {"boot.on_configured": "scripts/nowhere.sh"}),
    Mistake("CFG-014", SPOT, {"boot.on_configured": "Pulumi.yaml"}),
    Mistake("OBS-001", SPOT, {"observability": {"grafana": "self"}}, "observability.grafana"),
    Mistake("OBS-002", SPOT, {"observability.grafana": "managed"}),
    Mistake("OBS-002", EKS, {"observability": {"grafana": "managed"}}, "observability.grafana"),
    Mistake("OBS-003", EKS, {"observability": {"prometheus": "self"}}, "observability.prometheus"),
    Mistake("OBS-003", EKS, {"observability": {"prometheus": "amp", "grafana": "self"}}, "observability.grafana"),
    Mistake("OBS-004", SPOT, {"observability.monitor": {"type": "mac1.metal"}}, "observability.monitor.type"),
    Mistake("OBS-005", SPOT, {"observability.monitor": {"type": "g6e.xlarge"}}, "observability.monitor.type"),
    Mistake("OBS-006", SPOT, {"network.closed": True}, "observability.monitor.image_id"),
    Mistake("OBS-007", SPOT, {"groups.0.name": "monitor"}),
    Mistake("OBS-008", EKS, {"observability": {"monitor": {"disk_gib": 100}}}, "observability.monitor"),
    Mistake("OBS-009", SPOT, {"observability": {"prometheus": "amp"}}, "observability.prometheus", CHINA),
    Mistake("OBS-010", SPOT, {"access.node_role": NODE_ROLE, "access.instance_profile": PROFILE}, "access.node_role"),
    Mistake(
        "OBS-011",
        SPOT,
        {"observability": {"prometheus": "amp", "grafana": "managed"}},
        "observability.grafana",
        STOCKHOLM,
    ),
    Mistake("NET-001", SPOT, {"zone_id": "usw2-az1"}),
    Mistake("NET-002", EKS, {"network.second_zone_id": "use1-az2"}),
    Mistake("NET-003", SPOT, {"network.cidr": "10.0.0.0/8"}),
    Mistake("NET-003", SPOT, {"network.cidr": "10.0.0.1/16"}),
    Mistake("NET-004", SPOT, {"network.cidr": "10.0.0.0/20"}, "network.compute_prefix"),
    Mistake("NET-005", SPOT, {"network.compute_prefix": 28, "groups.0.count": 12}, "network.compute_prefix"),
    Mistake("NET-005", SPOT, {"network.existing": SMALL, "groups.0.count": 12}, "network.existing.compute_cidr"),
    Mistake("NET-006", SPOT, {"network.cidr": "8.8.0.0/16"}),
    Mistake("NET-006", SPOT, {"network.cidr": "172.17.0.0/16"}),
    Mistake("NET-007", SPOT, {"network.nat": False}),
    Mistake("NET-008", BLOCK, {"network.nat": True}),
    Mistake("NET-009", SPOT, {"network.existing": EXISTING, "network.cidr": "10.1.0.0/16"}),
    Mistake("NET-001", SLURM, {"groups.2.zone_id": "use1-az2"}),
    Mistake("NET-015", SPOT, {"network.existing": EXISTING, "groups.0.zone_id": "use1-az2"}),
    Mistake(
        "NET-016",
        SLURM,
        {"groups.3": group(instance_type="p5.48xlarge", partition="train", zone_id="usw2-az3")},
        ".zone_id",
    ),
    Mistake("NET-016", SPOT, {"groups.1": group(zone_id="use1-az2")}, ".zone_id"),
    Mistake("NET-017", SPOT, {"groups.0.zone_id": "use1-az2"}),
    Mistake("NET-018", SPOT, {"network.existing": EXISTING, FURTHER: [f"sg-0123456{i}" for i in range(5)]}),
    Mistake("NET-018", SPOT, {"network.existing": EXISTING, FURTHER: ["sg-01234567"] * 2}, ".1"),
    Mistake("NET-019", SPOT, {FURTHER: ["sg-01234567"]}),
    Mistake("NET-021", SPOT, {"network.allow_from": ["pl-01234567", "10.1.2.3/16"]}, ".1"),
    Mistake("NET-021", SPOT, {"network.allow_from": ["10.1.2.999/32"]}, ".0"),
    Mistake("NET-022", SPOT, {"network.allow_from": ["0.0.0.0/0"]}, ".0"),
    Mistake("NET-023", SPOT, {"network.proxy": {"http": "http://me:secret@proxy.example.com:3128"}}, ".http"),
    Mistake("NET-024", BLOCK, {"network.proxy": PROXY}),
    Mistake("NET-025", SPOT, {"network.proxy": PROXY}),
    Mistake("NET-025", SLURM, {"network.allow_from": ["10.20.0.0/16"]}),
    Mistake("NET-026", SPOT, {"network.proxy": {"http": "https://proxy.example.com:3128"}}, ".http"),
    Mistake("NET-027", SPOT, {"network.allow_from": ["10.20.0.0/16"]}, "access.ssh_key"),
    Mistake("NET-010", SPOT, {"network.existing": EXISTING, "network.closed": True}),
    Mistake(
        "NET-011",
        EKS,
        {"network.existing": {**EXISTING, "control_subnet_ids": ["subnet-01234567"] * 2}},
        ".control_subnet_ids.1",
    ),
    Mistake("NET-012", BLOCK, {"repository.existing": "docker.io/me/train"}),
    Mistake("NET-012", BLOCK, {"repository.existing": "123456789012.dkr.ecr.us-west-2.amazonaws.com/train"}),
    Mistake("NET-013", EKS, {"network.closed": True}),
    Mistake("NET-014", SPOT, {"network.compute_prefix": 27}),
    Mistake("NET-028", BLOCK, {"groups.0.instance_type": "g5g.16xlarge"}, "network.closed"),
    Mistake("NET-020", SLURM, {"groups.2.zone_id": "usw2-az9"}),
    Mistake("EC2-020", SPOT, {"groups.0.zone_id": "use1-az3"}, "groups.0.instance_type"),
    Mistake("NET-020", SPOT, {"zone_id": "use1-az9"}),
    Mistake("NET-020", EKS, {"network.second_zone_id": "use2-az4"}),
    Mistake("NET-020", BLOCK, {"groups.0.capacity.zone_id": "use2-az7"}),
    Mistake("CAP-001", SLURM, {"groups.2.capacity": {"mode": "capacity-block", "reservation": "cr-01234567"}}, ".mode"),
    Mistake("CAP-001", SPOT, {"groups.0.capacity": {"mode": "training-plan"}}, ".mode"),
    Mistake("CAP-002", SPOT, {"groups.0.capacity": {"mode": "reservation"}}),
    Mistake(
        "CAP-002", SPOT, {"groups.0.capacity": {"mode": "reservation", "create": True, "reservation": "cr-01234567"}}
    ),
    Mistake("CAP-003", SPOT, {"groups.0.capacity.reservation": "cr-01234567"}),
    Mistake("CAP-003", BLOCK, {"groups.0.capacity.placement_group": "pg"}),
    Mistake("CAP-004", BLOCK, {"groups.0.capacity.zone_id": "use2-az1"}),
    Mistake("CAP-004", SLURM, {"groups.2.capacity.zone_id": "usw2-az1"}),
    Mistake("CAP-005", BLOCK, {"groups.0.count": 17}, "groups.0.capacity.size"),
    Mistake("CAP-006", BLOCK, {"groups.1": group(capacity=BOUGHT)}, ".capacity.reservation"),
    Mistake("CAP-007", SPOT, {"groups.0.instance_type": "hpc7a.96xlarge"}, "groups.0.capacity.mode"),
    Mistake("CAP-007", BLOCK, {"groups.0.instance_type": "trn1n.32xlarge"}, "groups.0.capacity.mode"),
    Mistake("CAP-008", SLURM, {"groups.2.capacity.training_plan": PLANS.format("us-east-1:123456789012")}),
    Mistake("CAP-008", SLURM, {"groups.2.capacity.training_plan": PLANS.format("us-west-2:210987654321")}),
    Mistake("CAP-009", BLOCK, {"job_ends_at": "2027-02-14T11:10:00Z"}, "groups.0.capacity.ends_at"),
    Mistake("CAP-010", BLOCK, {"groups.0.capacity.ends_at": GONE}),
    Mistake("CAP-011", BLOCK, {"groups.0.capacity.ends_at": "2026-11-20T00:00:00Z"}),
    Mistake("CAP-012", BLOCK, {"groups.0.capacity.size": GONE}, "groups.0.capacity"),
    Mistake("CAP-014", SLURM, {"groups.0.capacity": {"mode": "spot"}}, ".mode"),
    Mistake("CAP-015", SLURM, {"groups.2.capacity": {"mode": "spot"}}, ".mode"),
    Mistake("CAP-016", SPOT, {"groups.0.instance_type": "t3.large"}),
    Mistake("CAP-017", SPOT, {"groups.0.instance_type": "p5.48xlarge"}, "groups.0.count"),
    Mistake("CAP-019", RESERVED, {"groups.0.capacity.ends_at": GONE}),
    Mistake("CAP-020", RESERVED, {"groups.0.placement": "cluster"}),
    Mistake("CAP-018", RESERVED, {"groups.0.count": 0}),
    *(Mistake("EC2-024", SPOT, {**TWO_TYPES, OTHERS: [kind]}, f"{OTHERS}.0") for kind in UNLIKE),
    Mistake("EC2-024", SPOT, {**TWO_TYPES, "groups.0.efa": True}, f"{OTHERS}.0"),
    Mistake("EC2-001", SPOT, {**TWO_TYPES, OTHERS: ["g5.12xlrage"]}, f"{OTHERS}.0"),
    Mistake("CFG-006", SLURM, {"groups.2.other_types": ["p5en.48xlarge"]}),
    Mistake("CAP-022", SPOT, {**TWO_TYPES, "groups.0.capacity": {"mode": "on-demand"}}, OTHERS),
    Mistake("CAP-022", SPOT, {**TWO_TYPES, OTHERS: ["g5.12xlarge", "g6.12xlarge"]}, f"{OTHERS}.1"),
    Mistake("CAP-022", SPOT, {"groups.0.capacity.on_demand_base": 8}),
    Mistake("CAP-022", EKS, {"groups.1.capacity.on_demand_base": 1}),
    Mistake("CAP-024", BLOCK, {**ULTRASERVER, "groups.0.capacity.size": 16}),
    Mistake("CAP-024", SPOT, {**ULTRASERVER, "groups.0.capacity": {"mode": "spot"}}, ".mode"),
    Mistake(
        "CAP-024",
        SLURM,
        {
            "instance_types": ULTRASERVER["instance_types"],
            "groups.2.instance_type": "p6e-gb200.36xlarge",
            "groups.2.capacity": {"mode": "on-demand"},
        },
        ".mode",
    ),
    Mistake("CAP-023", SPOT, {**TWO_TYPES, "groups.0.placement": "cluster"}),
    Mistake("EC2-020", SPOT, {**TWO_TYPES, "zone_id": "use1-az3"}, f"{OTHERS}.0"),
    Mistake("EC2-001", SPOT, {"groups.0.instance_type": "g6e.48xlrage"}),
    Mistake("EC2-002", SPOT, {"groups.0.instance_type": "g6e.4xlarge"}),
    Mistake("EC2-003", SPOT, {"groups.1": group(instance_type="g6e.4xlarge")}, ".instance_type"),
    Mistake("EC2-003", SPOT, {"groups.1": group(efa=False)}, ".efa"),
    Mistake("EC2-004", SPOT, {"groups.1": group(instance_type="g6e.24xlarge")}, "groups"),
    Mistake("EC2-005", SPOT, {"groups.1": group(instance_type="p5.48xlarge")}, "groups"),
    Mistake("EC2-006", SPOT, {"groups.1": group(instance_type="c7g.16xlarge")}, "groups"),
    Mistake("EC2-007", SPOT, {"groups.0.instance_type": "hpc7a.96xlarge", "groups.0.threads_per_core": 2}),
    Mistake("EC2-008", SPOT, {"groups.0.instance_type": "c5.18xlarge"}, "groups"),
    Mistake("EC2-009", "rehearsal", {"groups.0.instance_type": "inf2.48xlarge"}),
    Mistake("EC2-011", "rehearsal", {"groups.0.instance_type": "inf2.48xlarge", "groups.0.root_volume_gib": 100}),
    Mistake("EC2-020", RESERVED, {"zone_id": "usw2-az3"}, "groups.0.instance_type"),
    Mistake("EC2-020", SPOT, {"groups.0.instance_type": "trn2.48xlarge"}),
    Mistake("EC2-021", SPOT, {"groups.0.instance_type": "hpc7a.96xlarge", "network.closed": True}, "groups.0.image_id"),
    Mistake("EC2-021", BLOCK, {"groups.0.instance_type": "trn2.48xlarge"}, "groups.0.image_id"),
    Mistake("EC2-022", SPOT, {"groups.0.instance_type": "hpc7a.96xlarge"}, "groups.0.image_id"),
    Mistake("EC2-013", SPOT, {"groups.0.instance_type": "g6e.4xlarge", "groups.0.efa": True}),
    Mistake("EC2-014", SPOT, {"instance_types": {"p9.48xlrage": P9}}, ".p9.48xlrage"),
    Mistake("EC2-014", SPOT, {"instance_types": {"g6e.48xlarge": P9}}, ".g6e.48xlarge"),
    Mistake(
        "EC2-010",
        BLOCK,
        {"groups.0.instance_type": "p9.48xlarge", "instance_types": {"p9.48xlarge": {**P9, "efa": 17}}},
        ".p9.48xlarge",
    ),
    Mistake("EC2-012", SPOT, {"groups.0.instance_type": "mac1.metal"}),
    Mistake("HYP-001", SLURM, {"groups.0": GONE}, "groups"),
    Mistake("HYP-001", SLURM, {"groups.0.count": 2}),
    Mistake("HYP-001", SLURM, {"groups.1.role": "controller"}),
    Mistake("HYP-002", SLURM, {"groups.3": group(role="login", instance_type="m5.2xlarge")}, ".role"),
    Mistake("HYP-003", SPOT, {"groups.1": group(role="controller")}, ".role"),
    Mistake("HYP-003", SPOT, {"groups.1": group(role="login")}, ".role"),
    Mistake("HYP-003", WITH_SLURM, {"groups.1": group(role="controller")}, ".role"),
    Mistake("HYP-004", SLURM, {"groups.2.instance_type": "p3dn.24xlarge"}),
    Mistake("HYP-005", SLURM, {"groups.0.deep_health_checks": ["InstanceStress"]}),
    Mistake("HYP-006", SLURM, {"groups.2.deep_health_checks": []}),
    Mistake("HYP-007", SLURM, {"groups.1.instance_type": "g5.xlarge"}),
    Mistake("HYP-008", EKS, {"groups": [group(name=f"g{i}") for i in range(101)]}),
    Mistake("HYP-009", SLURM, {"groups.2.partition": "default"}),
    Mistake("HYP-010", SLURM, {"groups.1.partition": "login"}),
    Mistake("HYP-011", SLURM, {}, "backend", Place("cn-north-1", "123456789012", "aws-cn")),
    Mistake(
        "HYP-015",
        SLURM,
        {"groups.2.auto_patch": "WhenAllIdle", "groups.2.image_id": "ami-0123456789abcdef0"},
        "groups.2.auto_patch",
    ),
    Mistake("HYP-016", SLURM, {"groups.1.interface_type": "efa-only"}),
    Mistake("CFG-006", SPOT, {"groups.0.interface_type": "efa-only"}),
    Mistake("HYP-012", SLURM, {"groups.3": group(instance_type="m5.2xlarge", partition="train")}, ".partition"),
    Mistake("HYP-013", SLURM, {"network.closed": True}),
    Mistake("HYP-020", SLURM, {"zone_id": "euw3-az1"}, "backend", Place("eu-west-3", "123456789012")),
    Mistake("HYP-014", SLURM, {"slurm.accounting": DATABASE}, ".secret_arn"),
    Mistake("IAM-004", SLURM, {"slurm.accounting": DATABASE}, ".secret_arn", GOVERNMENT),
    Mistake("EKS-001", EKS, {"network.second_zone_id": GONE}),
    Mistake("EKS-001", EKS, {"network.existing": EXISTING}, ".control_subnet_ids"),
    Mistake("EKS-002", EKS, {"network.second_zone_id": "use2-az1"}),
    Mistake("EKS-003", EKS, {"eks.version": "1.22"}),
    Mistake("EKS-004", EKS, {"groups.1.labels": {"kubernetes.io/role": "x"}}, ".kubernetes.io/role"),
    Mistake("EKS-004", EKS, {"groups.1.labels": {"role": "a b"}}, ".role"),
    Mistake("EKS-004", EKS, {"groups.1.labels": {f"a{number}": "b" for number in range(51)}}),
    Mistake("EKS-005", EKS, {"groups.1.taints": [{"key": f"a{number}"} for number in range(51)]}),
    Mistake("EKS-005", EKS, {"groups.1.taints": [{"key": "a"}, {"key": "a"}]}),
    Mistake("EKS-005", EKS, {"groups.1.taints": [{"key": "-a"}]}, ".0"),
    Mistake("EKS-006", EKS, {"groups.0": GONE}, "groups"),
    Mistake("EKS-007", EKS, {"access.admin_roles": []}),
    Mistake("EKS-008", EKS, {CIDRS: ["203.0.113.7"]}, ".0"),
    Mistake("EKS-008", EKS, {CIDRS: ["198.51.100.0/24", "10.1.0.0/16"]}, ".1"),
    Mistake("EKS-008", EKS, {CIDRS: ["198.51.100.7/24"]}, ".0"),
    Mistake("EKS-008", EKS, {CIDRS: [f"198.51.100.{i}/32" for i in range(41)]}),
    Mistake("EKS-030", EKS, {CIDRS: ["0.0.0.0/0"]}, ".0"),
    Mistake("EKS-031", EKS, {}, f"{CIDRS}.0"),
    Mistake(
        "CAP-021",
        BLOCK,
        {"groups.0.capacity.starts_at": "2027-02-14T10:55:00Z", "groups.0.capacity.ends_at": "2027-02-14T11:30:00Z"},
        "groups.0.capacity.starts_at",
    ),
    Mistake("EKS-032", EKS, {CIDRS: []}),
    Mistake("EKS-033", EKS, {"eks.karpenter": True}),
    Mistake("EKS-033", EKS, {"eks.karpenter": True, "groups.0.count": 0, "groups.1.count": 0}, "groups"),
    Mistake("EKS-034", EKS, {"eks.training_operator": True, "eks.version": "1.36"}, "eks.training_operator"),
    Mistake("EKS-035", EKS, {"eks.karpenter": True, "groups.1.count": 0}, "groups.1.capacity.mode"),
    Mistake(
        "EKS-035",
        EKS,
        {
            "eks.karpenter": True,
            "groups.1.count": 0,
            "groups.1.capacity": GONE,
            "groups.1.deep_health_checks": ["InstanceStress"],
        },
    ),
    Mistake("EKS-010", EKS, {"eks.version": "1.33"}),
    Mistake("EKS-010", EKS, {"eks.version": "1.30", "eks.upgrade_policy": "EXTENDED"}, "eks.version"),
    Mistake("EKS-020", EKS, {"eks.version": "1.34"}),
    Mistake("EKS-020", EKS, {"eks.version": "1.33", "eks.upgrade_policy": "EXTENDED"}, "eks.version"),
    Mistake("EKS-021", EKS, {"zone_id": "use1-az3"}, place=Place("us-east-1", "123456789012")),
    Mistake("EKS-009", EKS, {"groups.0": GONE}, "groups"),
    Mistake("EKS-040", EKS, {**JOINED, "network": {}}, "network.existing"),
    *(
        Mistake("EKS-041", EKS, {**JOINED, f"eks.{key}": value})
        for key, value in {
            "version": "1.35",
            "upgrade_policy": "EXTENDED",
            "public_access_cidrs": ["52.95.4.7/32"],
            "cluster_role": NODE_ROLE,
        }.items()
    ),
    Mistake("EKS-041", EKS, {**JOINED, "network.existing.control_subnet_ids": [SUBNET]}),
    Mistake("EKS-042", EKS, {"eks.storage_role": NODE_ROLE}),
    Mistake("EKS-042", EKS, {"eks.operator_role": NODE_ROLE}),
    Mistake("EKS-042", EKS, {"eks.karpenter_role": NODE_ROLE}),
    Mistake("EKS-042", EKS, {**JOINED, "eks.existing.addons": ["coredns", "cert-manager"]}, ".1"),
    Mistake("NET-018", EKS, {**JOINED, FURTHER: [f"sg-0123456{number}" for number in range(4)]}),
    Mistake("EKS-022", EKS, {"groups.0.root_volume_gib": 100}),
    Mistake("FSX-001", SPOT, {"storage.lustre": {"capacity_gib": 5000, "per_tib_mb_s": 250}}, ".capacity_gib"),
    Mistake(
        "FSX-002", SPOT, {"storage.lustre": {"capacity_gib": 2400, "per_tib_mb_s": 250, "efa": True}}, ".capacity_gib"
    ),
    Mistake("FSX-003", SPOT, {"storage.lustre": {"capacity_gib": 2400, "per_tib_mb_s": 200}}, ".per_tib_mb_s"),
    Mistake("FSX-003", RESERVED, {"storage.lustre.throughput_gb_s": GONE}),
    Mistake("FSX-004", BLOCK, {"storage.lustre.metadata_iops": 5000}),
    Mistake("FSX-004", RESERVED, {"storage.lustre.metadata_iops": 3000}),
    Mistake("FSX-004", BLOCK, {"storage.lustre.metadata_iops": 1500}),
    Mistake("FSX-005", RESERVED, {"storage.lustre.read_cache_gib": 8}),
    Mistake("FSX-005", SPOT, {"storage.lustre.read_cache_gib": 64}),
    Mistake("FSX-006", RESERVED, {LINKS: [LINK]}),
    Mistake("FSX-007", SPOT, {"storage.lustre.backup_days": 7}),
    Mistake("FSX-008", SPOT, {"storage.lustre.mount_path": "/usr/fsx"}),
    Mistake("FSX-009", SPOT, {"storage.home.mount_path": "/etc"}),
    Mistake("FSX-010", SPOT, {"storage.home.mount_path": "/fsx/home"}),
    Mistake("FSX-010", SPOT, {"storage.lustre.mount_path": "/opt/dlami/nvme"}),
    Mistake(
        "FSX-011", SPOT, {"storage.lustre.efa": True, "groups.0.instance_type": "g6e.4xlarge"}, "storage.lustre.efa"
    ),
    Mistake("FSX-017", BLOCK, {"groups.0.count": 1025}),
    Mistake("FSX-017", BLOCK, {"groups.0.instance_type": "trn2.48xlarge"}),
    Mistake("FSX-017", BLOCK, {"storage.lustre.efa": True, "groups.0.instance_type": "p4d.24xlarge"}),
    Mistake(
        "FSX-012",
        SPOT,
        {"network.existing": EXISTING, "storage.lustre.existing": THERE},
        "storage.lustre.throughput_gb_s",
    ),
    Mistake(
        "FSX-013",
        SPOT,
        {"storage.lustre": {"existing": {**LUSTRE, "dns_name": "nfs.example.com"}}},
        ".existing.dns_name",
    ),
    Mistake("FSX-013", BLOCK, {"storage.lustre": {"existing": THERE}}, ".existing.dns_name"),
    Mistake("FSX-014", SPOT, {"storage.lustre": {"existing": THERE}}, ".existing"),
    Mistake("FSX-015", SLURM, {"storage": {}}),
    Mistake("FSX-016", SPOT, {"storage.home.throughput_mb_s": 200}),
    Mistake("FSX-018", SPOT, {"storage.home.type": "efs", "storage.home.throughput_mb_s": 320}),
    Mistake("FSX-018", SPOT, {"storage.home.backup": False}),
    Mistake("FSX-018", SPOT, {"storage.home": {"existing": HOMES, "kms_key": KEY}}, ".kms_key"),
    Mistake("FSX-013", SPOT, {"storage.home": {"type": "efs", "existing": HOMES}}, ".existing.dns_name"),
    Mistake("FSX-014", SPOT, {"storage.home": {"existing": HOMES}}, ".existing"),
    Mistake("DRA-001", SPOT, {LINKS: [{**LINK, "path": f"/d{i}", "prefix": f"d{i}"} for i in range(9)]}),
    Mistake("DRA-002", SPOT, {f"{LINKS}.1": {**LINK, "path": "/data/text"}}, ".path"),
    Mistake("DRA-003", SPOT, {f"{LINKS}.1": {**LINK, "prefix": "datasets/text"}}, ".prefix"),
    Mistake("DRA-004", BLOCK, {f"{LINKS}.1.prefix": "runs"}, f"{LINKS}.1.export_events"),
    Mistake("DRA-004", BLOCK, {f"{LINKS}.1.prefix": ""}, f"{LINKS}.1.export_events"),
    Mistake("DRA-005", BLOCK, {f"{LINKS}.1.export_events": ["DELETED"]}),
    Mistake("DRA-006", BLOCK, {f"{LINKS}.1.prefix": "milestone"}),
    Mistake("DRA-007", SPOT, {f"{LINKS}.0.path": "/data/../x"}),
    Mistake("DRA-007", SPOT, {f"{LINKS}.0.prefix": "a//b"}),
    Mistake("DRA-007", SPOT, {f"{LINKS}.0.prefix": "é" * 600}),
    Mistake("DRA-008", SPOT, {f"{LINKS}.0.import_events": []}),
    Mistake("DRA-009", SPOT, {f"{LINKS}.0.export_events": ["DELETED"]}),
    Mistake("DRA-011", SPOT, {f"{LINKS}.0.path": "/fsx/data"}),
    Mistake("DRA-011", SPOT, {f"{LINKS}.0.path": "/fsx"}),
    Mistake("S3-001", SPOT, {"buckets.data": "My_Data"}),
    Mistake("S3-001", SPOT, {"name": "a" * 40}, place=Place("ap-southeast-2", "123456789012")),
    Mistake("S3-001", SPOT, {"buckets.data": "192.168.0.1"}),
    Mistake("S3-001", SPOT, {"buckets.data": "mine-s3alias"}),
    Mistake("S3-001", SPOT, {"network.s3_buckets": ["open-corpus", "s3://my"]}, ".1"),
    Mistake("S3-002", SLURM, {"buckets.lifecycle": "my-scripts"}),
    Mistake("S3-003", SPOT, {"buckets.data": "mine", "buckets.checkpoints": "mine"}),
    Mistake("S3-004", SPOT, {"runs_uri": "s3://mine/runs"}),
    Mistake("S3-004", SPOT, {"runs_uri": "gs://mine/runs/"}),
    Mistake("S3-005", SPOT, {"runs_uri": "/scratch/runs"}),
    Mistake("S3-006", SPOT, {"runs_uri": "s3://another/runs/"}),
    Mistake("S3-007", SPOT, {"buckets.runs_prefix": "ephemeral/runs/"}),
    Mistake("S3-008", SPOT, {"buckets.data": "my.data"}),
    Mistake("S3-005", SPOT, {S3_MOUNTS: [MOUNT], "runs_uri": "/s3/data/runs"}),
    Mistake("S3-010", EKS, {S3_MOUNTS: [MOUNT]}, S3_MOUNTS),
    Mistake("S3-011", SPOT, {S3_MOUNTS: [{**MOUNT, "path": "/usr/share/data"}]}, f"{S3_MOUNTS}.0.path"),
    Mistake("S3-011", SPOT, {S3_MOUNTS: [{**MOUNT, "path": "/fsx/s3"}]}, f"{S3_MOUNTS}.0.path"),
    Mistake("S3-011", SLURM, {S3_MOUNTS: [MOUNT, MOUNT]}, f"{S3_MOUNTS}.1.path"),
    Mistake("S3-012", SPOT, {S3_MOUNTS: [MOUNT], "network.closed": True}, "groups.0.image_id"),
    Mistake(
        "S3-013",
        SPOT,
        {S3_MOUNTS: [{**MOUNT, "bucket": "checkpoints", "read_only": False}]},
        f"{S3_MOUNTS}.0.read_only",
    ),
    Mistake("S3-014", SPOT, {S3_MOUNTS: [{**MOUNT, "region": "us-west-2"}]}, f"{S3_MOUNTS}.0.region"),
    Mistake("S3-009", SPOT, {"runs_uri": RUNS_IN_DATA}, f"{LINKS}.0.prefix"),
    Mistake("DRA-010", SPOT, {"buckets.kms_key": KEY}),
    Mistake("DRA-010", SPOT, {f"{LINKS}.1": {**LINK, "bucket": "theirs", "kms_key": KEY}}, ".kms_key"),
    Mistake("DRA-012", SPOT, {f"{LINKS}.0.kms_key": KEY}),
    Mistake("IAM-001", SPOT, {f"{LINKS}.1": {**LINK, "bucket": "theirs", "kms_key": "1234abcd"}}, ".kms_key"),
    Mistake("IAM-001", SPOT, {"buckets.kms_key": "alias/mine"}),
    Mistake("IAM-001", SPOT, {"buckets.kms_key": "arn:aws:kms"}),
    Mistake("IAM-001", SLURM, {"groups.2.volume_kms_key": "1234abcd"}),
    Mistake("IAM-003", SLURM, {"groups.2.volume_kms_key": ALIAS}),
    Mistake("IAM-007", SPOT, {"groups.0.volume_kms_key": KEY}),
    Mistake("IAM-002", BLOCK, {"buckets.kms_key": KEY}),
    Mistake("IAM-001", SPOT, {S3_MOUNTS: [{**THEIRS, "kms_key": "1234abcd"}]}, f"{S3_MOUNTS}.0.kms_key"),
    Mistake("IAM-002", SPOT, {S3_MOUNTS: [{**THEIRS, "kms_key": KEY}]}, f"{S3_MOUNTS}.0.kms_key"),
    Mistake("IAM-010", SPOT, {S3_MOUNTS: [{"bucket": f"b-{n}-{'a' * 50}", "path": f"/s3/{n}"} for n in range(60)]}),
    Mistake("IAM-003", SPOT, {"storage.lustre.kms_key": "arn:aws:kms:us-east-1:123456789012:alias/mine"}),
    Mistake("IAM-003", SPOT, {"storage.home.kms_key": "arn:aws:kms:us-east-1:123456789012:alias/mine"}),
    Mistake("IAM-004", EKS, {"access.admin_roles": ["arn:aws-cn:iam::123456789012:role/a"]}, ".0"),
    Mistake("IAM-005", EKS, {"access.admin_roles": ["arn:aws:iam::123456789012:role/a"] * 2}, ".1"),
    Mistake("IAM-005", EKS, {"access.admin_roles": [SERVICE_ROLE]}, ".0"),
    Mistake("IAM-006", SPOT, {"access.user": "root"}),
    Mistake("IAM-004", SPOT, {"access.permissions_boundary": BOUNDARY.format("-cn", "123456789012")}),
    Mistake("IAM-008", SPOT, {"access.permissions_boundary": BOUNDARY.format("", "210987654321")}),
    Mistake("IAM-008", SLURM, {"access.node_role": "arn:aws:iam::210987654321:role/nodes"}),
    Mistake("IAM-008", EKS, {"eks.cluster_role": "arn:aws:iam::210987654321:role/eks"}),
    Mistake("IAM-009", SPOT, {"access.node_role": NODE_ROLE}),
    Mistake("IAM-009", SPOT, {"access.instance_profile": PROFILE}),
    Mistake("CFG-007", SLURM, {"access.node_role": NODE_ROLE, "access.instance_profile": PROFILE}),
    Mistake("BUD-001", SPOT, {"budget": GONE}),
    Mistake("BUD-002", SPOT, {"alarms": {}}, ".emails"),
    Mistake("BUD-003", SPOT, {"budget.emails": ["nobody"]}, ".0"),
    Mistake("BUD-003", SPOT, {"alarms.emails": ["a@example.com", "a@example.com"]}, ".1"),
    Mistake("BUD-004", SPOT, {"budget.monthly_usd": 10}),
    Mistake("BUD-004", BLOCK, {"budget.monthly_usd": 11_000}),
    Mistake("BUD-004", RESERVED, {"budget.monthly_usd": 200_000}),
    Mistake(
        "BUD-004", SPOT, {"storage.home": {"capacity_gib": 524_288, "throughput_mb_s": 10_240}}, "budget.monthly_usd"
    ),
    Mistake("BUD-005", SPOT, {"alarms.emails": ["a@example.com"]}, "budget", GOVERNMENT),
    Mistake("SLM-001", SLURM, {"scheduler": {"type": "slurm"}}),
    Mistake("SLM-002", WITH_SLURM, {"groups.0.name": "controller"}),
    Mistake("SLM-002", WITH_SLURM, {"groups.0.partition": "default"}),
    Mistake("SLM-003", WITH_SLURM, {"scheduler.controller.type": "mac1.metal"}),
    Mistake("SLM-004", WITH_SLURM, {"scheduler.controller.type": "g6.xlarge"}),
    Mistake("SLM-005", WITH_SLURM, {"network.closed": True}, KEY_OF_IT),
    Mistake("SLM-006", WITH_SLURM, {"storage.lustre": {"throughput_gb_s": 1.2, "capacity_tib": 4.8}}, KEY_OF_IT),
    Mistake("SLM-007", WITH_SLURM, {"groups.0.min_count": 0, "groups.0.capacity": BOUGHT}, "groups.0.min_count"),
    Mistake("SLM-008", WITH_SLURM, {"scheduler.idle_minutes": 15}),
    Mistake("SLM-009", WITH_SLURM, {"groups.1.placement": "cluster"}),
    Mistake("SLM-009", WITH_SLURM, {"groups.1.capacity": BOUGHT}, ".mode"),
    Mistake(
        "SLM-010",
        WITH_SLURM,
        {"scheduler.accounting": {}, "scheduler.settings": {"accountingStorageHost": "dbd"}},
        "scheduler.settings.accountingStorageHost",
    ),
    Mistake("SLM-011", WITH_SLURM, {"scheduler.account": "nlp"}, "scheduler.account"),
    Mistake(
        "SLM-011",
        WITH_SLURM,
        {"scheduler.settings": {"AccountingStorageEnforce": "limits"}},
        "scheduler.settings.AccountingStorageEnforce",
    ),
    Mistake(
        "SLM-012",
        WITH_SLURM,
        {"network.closed": True, "scheduler.accounting": {"database": {**RECORDS, "secret_arn": ELSEWHERE}}},
        "scheduler.accounting.database.secret_arn",
    ),
    Mistake(
        "IAM-004",
        WITH_SLURM,
        {"scheduler.accounting": {"database": RECORDS}},
        "scheduler.accounting.database.secret_arn",
        GOVERNMENT,
    ),
    Mistake("EC2-001", WITH_SLURM, {"scheduler.controller.type": "m7i.huge"}),
    Mistake("TUN-001", SPOT, {"tuning.profiles": {"gang": "cpu"}}, ".gang"),
    Mistake("TUN-002", SPOT, {"tuning.settings": {"vm.max_map_count": "on"}}, ".vm.max_map_count"),
    Mistake("TUN-003", SPOT, {"tuning.settings": {"sysctl.vm.max_map_count": "many"}}, ".sysctl.vm.max_map_count"),
    Mistake("CFG-090", SPOT, {"suppress": [{"code": "BUD-001", "reason": "there is a budget"}]}, ".0"),
    Mistake(
        "CFG-092",
        SPOT,
        {"suppress": [{"code": "DRA-007", "reason": "AWS takes it"}], f"{LINKS}.0.path": "/a/../x"},
        "suppress.0",
    ),
    Mistake("CFG-091", SPOT, {"suppress": [{"code": "NET-099", "reason": "no such rule"}]}, ".0"),
    Mistake("CFG-091", SPOT, {"suppress": [{"code": "CFG-001", "reason": "essential for a plan"}]}, ".0"),
]
