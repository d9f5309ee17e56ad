"""A good answer and bad ones for each online rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.infra.answers import (
    BLOCK,
    BUCKETS,
    BUILT,
    CONTROL,
    EKS,
    EXISTING,
    IMAGE,
    LUSTRE,
    NOW,
    REPOSITORY,
    SLURM,
    SPOT,
    ZONAL,
    Answer,
    attribute,
    bucket,
    dry_run,
    file_system,
    no_bucket,
    nothing_left,
    offered,
    plan,
    prices,
    quota,
    reservation,
    routes,
    scores,
    security_group,
    subnet,
    versions,
    zone,
)


@dataclass(frozen=True)
class Case:
    """`path` is empty where the rule has nothing to say."""

    code: str
    stack: str
    answers: Sequence[Answer]
    path: str = ""
    level: str = "error"
    edits: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code} {self.path or 'good'} {self.level} {'+'.join(self.edits)}"


TCP = {"IpProtocol": "tcp"}
NAT = {"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-0123456789abcdef0"}
GATEWAY = {"DestinationPrefixListId": "pl-01234567", "GatewayId": "vpce-01234567"}
INTERNET = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-01234567"}
G_SPOT = "All G and VT Spot Instance Requests"
RESERVATION_KEY = "groups.0.capacity.reservation"
PLAN_KEY = "groups.2.capacity.training_plan"
MODE = "groups.0.capacity.mode"
COMPUTE = "network.existing.compute_subnet_id"

CASES = [
    Case("EC2-101", SPOT, [offered("use1-az1", "use1-az4")]),
    Case("EC2-101", SPOT, [offered("use1-az1")], "groups.0.instance_type"),
    Case("EC2-101", SPOT, [offered()], "groups.0.instance_type"),
    Case("EC2-102", SPOT, [quota(G_SPOT, 1536)]),
    Case("EC2-102", SPOT, [quota(G_SPOT, 1535)], "groups"),
    Case("EC2-102", SPOT, [quota("All P5 Spot Instance Requests", 9999)], "groups", "unknown"),
    Case("HYP-101", EKS, [quota("ml.m5.2xlarge for cluster usage", 2)]),
    Case("HYP-101", EKS, [quota("ml.m5.2xlarge for cluster usage", 1)], "groups"),
    Case("HYP-101", EKS, [quota("ml.m5.2xlarge for training job usage", 9)], "groups", "unknown"),
    Case("EC2-103", SPOT, [dry_run("DryRunOperation")]),
    Case("EC2-103", SPOT, [dry_run("VcpuLimitExceeded")], "groups.0.count"),
    Case("EC2-103", SPOT, [dry_run("InsufficientFreeAddressesInSubnet")], "groups.0.count", edits=EXISTING),
    Case("EC2-103", SPOT, [dry_run("InsufficientInstanceCapacity")], "groups.0.capacity", "warning"),
    Case("EC2-103", SPOT, [dry_run("Unsupported")], "groups.0.instance_type"),
    Case("EC2-103", SPOT, [dry_run("InvalidParameterValue")], "groups.0"),
    Case("EC2-103", SPOT, [dry_run("UnauthorizedOperation")], "groups.0", "unknown"),
    Case("EC2-103", SPOT, [dry_run("VPCIdNotSpecified")], "groups.0", "unknown"),
    Case("EC2-103", BLOCK, [dry_run("ReservationCapacityExceeded")], "groups.0.capacity"),
    Case("EC2-105", SPOT, [("ec2", "describe_images", {"Images": [{"Architecture": "x86_64"}]})], edits=IMAGE),
    Case(
        "EC2-105",
        SPOT,
        [("ec2", "describe_images", {"Images": [{"Architecture": "arm64"}]})],
        "groups.0.image_id",
        edits=IMAGE,
    ),
    Case("EC2-105", SPOT, [("ec2", "describe_images", "InvalidAMIID.NotFound")], "groups.0.image_id", edits=IMAGE),
    Case("EC2-107", SPOT, [("ssm", "get_parameter", {"Parameter": {"Value": "ami-0123456789abcdef0"}})]),
    Case("EC2-107", SPOT, [("ssm", "get_parameter", "ParameterNotFound")], "groups.0.image_id"),
    Case("EC2-107", SPOT, [], edits=IMAGE),
    *(
        Case("EC2-105", SLURM, [("ec2", "describe_images", {"Images": [{**BUILT, **more}]})], path, edits=IMAGE)
        for path, more in (
            ("", {}),
            ("", {"OwnerId": "763104351884", "Public": True}),
            ("groups.0.image_id", {"OwnerId": "763104351884"}),
            ("groups.0.image_id", {"BlockDeviceMappings": [{"Ebs": {"Encrypted": True}}]}),
            ("groups.0.image_id", {"BlockDeviceMappings": [{"Ebs": {}}, {"Ebs": {}}]}),
        )
    ),
    Case(
        "EC2-106",
        SPOT,
        [("ec2", "describe_key_pairs", {"KeyPairs": [{"KeyName": "me"}]})],
        edits={"access.ssh_key": "me"},
    ),
    Case(
        "EC2-106",
        SPOT,
        [("ec2", "describe_key_pairs", {"KeyPairs": []})],
        "access.ssh_key",
        edits={"access.ssh_key": "me"},
    ),
    Case("CAP-101", BLOCK, [reservation()]),
    Case("CAP-101", BLOCK, [reservation(State="scheduled")], RESERVATION_KEY, "warning"),
    Case("CAP-101", BLOCK, [reservation(State="expired")], RESERVATION_KEY),
    Case(
        "CAP-101",
        BLOCK,
        [("ec2", "describe_capacity_reservations", "InvalidCapacityReservationId.NotFound")],
        RESERVATION_KEY,
    ),
    Case("CAP-102", BLOCK, [reservation()]),
    Case("CAP-102", BLOCK, [reservation(AvailabilityZoneId="use2-az1")], edits={"groups.0.zone_id": "use2-az1"}),
    Case("CAP-102", BLOCK, [reservation(AvailabilityZoneId="use2-az1")], RESERVATION_KEY),
    Case("CAP-102", BLOCK, [reservation(InstanceType="p5.48xlarge")], RESERVATION_KEY),
    Case("CAP-102", BLOCK, [reservation(InstancePlatform="Windows")], RESERVATION_KEY),
    Case("CAP-102", BLOCK, [reservation(ReservationType="default")], MODE),
    Case(
        "CAP-102",
        BLOCK,
        [reservation(PlacementGroupArn="arn:aws:ec2:us-east-2:123456789012:placement-group/pg")],
        "groups.0.capacity.placement_group",
    ),
    Case("CAP-103", BLOCK, [reservation()]),
    Case("CAP-103", BLOCK, [reservation(TotalInstanceCount=8, AvailableInstanceCount=8)], RESERVATION_KEY),
    Case("CAP-103", BLOCK, [reservation(AvailableInstanceCount=8)], RESERVATION_KEY, "warning"),
    Case("CAP-104", BLOCK, [reservation()]),
    Case("CAP-104", BLOCK, [reservation(EndDate=datetime(2027, 2, 13, tzinfo=UTC))], "groups.0.capacity.ends_at"),
    Case("CAP-105", SLURM, [plan()]),
    Case("CAP-105", SLURM, [plan(Status="Scheduled")], PLAN_KEY, "warning"),
    Case("CAP-105", SLURM, [plan(Status="Expired")], PLAN_KEY),
    Case("CAP-105", SLURM, [plan(TargetResources=["training-job"])], PLAN_KEY),
    Case("CAP-105", SLURM, [plan({"AvailabilityZoneId": "usw2-az1"})], PLAN_KEY),
    Case("CAP-105", SLURM, [plan({"InstanceType": "ml.p5e.48xlarge"})], PLAN_KEY),
    Case("CAP-105", SLURM, [plan(TotalInstanceCount=2)], PLAN_KEY),
    Case("CAP-105", SLURM, [plan(EndTime=NOW)], "groups.2.capacity.ends_at"),
    Case("CAP-105", SLURM, [("sagemaker", "describe_training_plan", "ResourceNotFound")], PLAN_KEY),
    Case("CAP-106", SPOT, [prices("3.10", "3.40")]),
    Case("CAP-106", SPOT, [prices()], MODE, "warning"),
    Case("CAP-106", SPOT, [prices("3.10", "9.40")], MODE, "warning"),
    Case("CAP-107", SPOT, [scores(use1_az4=9)]),
    Case("CAP-107", SPOT, [scores(use1_az4=1, use1_az6=9)], MODE, "warning"),
    Case("NET-101", SPOT, [zone("use1-az4")]),
    Case("NET-101", SPOT, [zone("use1-az1")], "zone_id"),
    Case("NET-101", SPOT, [zone("use1-az4", State="impaired")], "zone_id"),
    Case("NET-101", SPOT, [zone("use1-az4", OptInStatus="not-opted-in")], "zone_id"),
    Case("NET-101", SPOT, [zone("use1-az4")], "groups.0.zone_id", edits={"groups.0.zone_id": "use1-az9"}),
    Case("NET-102", SPOT, [subnet()], edits=EXISTING),
    Case("NET-102", SPOT, [subnet()], "network.existing.zone_subnet_ids.use1-az2", edits=ZONAL),
    Case("NET-102", SPOT, [subnet(VpcId="vpc-0fedcba9876543210")], COMPUTE, edits=EXISTING),
    Case("NET-102", SPOT, [subnet(AvailabilityZoneId="use1-az1")], COMPUTE, edits=EXISTING),
    Case("NET-102", SPOT, [("ec2", "describe_subnets", "InvalidSubnetID.NotFound")], COMPUTE, edits=EXISTING),
    Case(
        "NET-102",
        EKS,
        [subnet(AvailabilityZoneId="use2-az1"), subnet(AvailabilityZoneId="use2-az1")],
        "network.existing.control_subnet_ids",
        edits=CONTROL,
    ),
    Case("NET-103", SPOT, [subnet()], edits=EXISTING),
    Case("NET-103", SPOT, [subnet(AvailableIpAddressCount=3)], COMPUTE, edits=EXISTING),
    Case("NET-104", SPOT, [subnet()], edits=EXISTING),
    Case("NET-104", SPOT, [subnet(MapPublicIpOnLaunch=True)], COMPUTE, edits=EXISTING),
    Case("NET-105", SPOT, [attribute("EnableDnsSupport", True), attribute("EnableDnsHostnames", True)], edits=EXISTING),
    Case(
        "NET-105",
        SPOT,
        [attribute("EnableDnsSupport", True), attribute("EnableDnsHostnames", False)],
        "network.existing.vpc_id",
        edits=EXISTING,
    ),
    Case(
        "NET-105",
        SPOT,
        [("ec2", "describe_vpc_attribute", "InvalidVpcID.NotFound")],
        "network.existing.vpc_id",
        edits=EXISTING,
    ),
    Case("NET-106", SPOT, [routes(NAT, GATEWAY)], edits=EXISTING),
    Case("NET-106", SPOT, [routes(NAT)], COMPUTE, "warning", edits=EXISTING),
    Case("NET-106", SPOT, [routes(GATEWAY)], COMPUTE, "warning", edits=EXISTING),
    Case("NET-106", SPOT, [routes(INTERNET, GATEWAY)], COMPUTE, edits=EXISTING),
    Case("FSX-101", SPOT, [file_system(), subnet()], edits=LUSTRE),
    Case("FSX-101", SPOT, [file_system(Lifecycle="FAILED"), subnet()], "storage.lustre.existing.id", edits=LUSTRE),
    Case(
        "FSX-101",
        SPOT,
        [file_system(lustre={"MountName": "abcd1234"}), subnet()],
        "storage.lustre.existing.mount_name",
        edits=LUSTRE,
    ),
    Case(
        "FSX-101",
        SPOT,
        [file_system(lustre={"EfaEnabled": True}), subnet()],
        "storage.lustre.existing.efa",
        edits=LUSTRE,
    ),
    Case("FSX-101", SPOT, [file_system(VpcId="vpc-01234567"), subnet()], "storage.lustre.existing.id", edits=LUSTRE),
    Case(
        "FSX-101",
        SPOT,
        [file_system(), subnet(AvailabilityZoneId="use1-az1")],
        "storage.lustre.existing.id",
        edits=LUSTRE,
    ),
    Case(
        "FSX-101",
        SPOT,
        [("fsx", "describe_file_systems", "FileSystemNotFound")],
        "storage.lustre.existing.id",
        edits=LUSTRE,
    ),
    Case("FSX-102", SPOT, [security_group({"IpProtocol": "-1"})], edits=LUSTRE),
    Case(
        "FSX-102",
        SPOT,
        [security_group({**TCP, "FromPort": 988, "ToPort": 988}, {**TCP, "FromPort": 1018, "ToPort": 1023})],
        edits=LUSTRE,
    ),
    Case(
        "FSX-102",
        SPOT,
        [security_group({**TCP, "FromPort": 988, "ToPort": 988})],
        "storage.lustre.existing.security_group_id",
        edits=LUSTRE,
    ),
    Case(
        "FSX-102",
        SPOT,
        [security_group({"IpProtocol": "-1"}, vpc="vpc-01234567")],
        "storage.lustre.existing.security_group_id",
        edits=LUSTRE,
    ),
    Case(
        "FSX-102",
        SPOT,
        [("ec2", "describe_security_groups", "InvalidGroup.NotFound")],
        "storage.lustre.existing.security_group_id",
        edits=LUSTRE,
    ),
    Case("S3-101", SPOT, [bucket("us-east-1")], edits={"buckets.data": "mine"}),
    Case("S3-101", SPOT, [bucket("eu-west-1")], "buckets.data", edits={"buckets.data": "mine"}),
    Case("S3-101", SPOT, [no_bucket("404")], "buckets.data", edits={"buckets.data": "mine"}),
    Case("S3-101", SPOT, [no_bucket("403")], "buckets.data", "unknown", edits={"buckets.data": "mine"}),
    Case("S3-102", SPOT, [no_bucket("404")] * 3),
    Case("S3-102", SPOT, [no_bucket("404"), no_bucket("403"), bucket("us-east-1")], "name", "unknown"),
    Case("CFG-101", SPOT, [*[no_bucket("404")] * 3, *nothing_left()]),
    Case("CFG-101", SPOT, [no_bucket("403"), *[no_bucket("404")] * 2, *nothing_left()]),
    Case(
        "CFG-101", SPOT, [no_bucket("404"), bucket("us-east-1"), no_bucket("404"), *nothing_left()], "name", "warning"
    ),
    Case(
        "CFG-101",
        SPOT,
        [*[no_bucket("404")] * 3, *nothing_left()[1:], ("ecr", "describe_repositories", {"repositories": [{}]})],
        "name",
        "warning",
    ),
    Case(
        "CFG-101",
        SPOT,
        [*[no_bucket("404")] * 3, *nothing_left()[::2], ("sqs", "get_queue_url", {"QueueUrl": "https://queue"})],
        "name",
        "warning",
    ),
    Case(
        "CFG-101",
        SPOT,
        [*[no_bucket("404")] * 3, *nothing_left()[:2], ("logs", "describe_log_groups", {"logGroups": [{}]})],
        "name",
        "warning",
    ),
    Case("CFG-101", SPOT, [*nothing_left()[1:]], edits={**BUCKETS, **REPOSITORY}),
    Case("ECR-101", SPOT, [("ecr", "describe_repositories", {"repositories": []})], edits=REPOSITORY),
    Case(
        "ECR-101",
        SPOT,
        [("ecr", "describe_repositories", "RepositoryNotFoundException")],
        "repository.existing",
        edits=REPOSITORY,
    ),
    Case("EKS-101", EKS, [versions(v1_35="STANDARD_SUPPORT")]),
    Case("EKS-101", EKS, [versions(v1_35="EXTENDED_SUPPORT")], "eks.version"),
    Case(
        "EKS-101",
        EKS,
        [versions(v1_35="EXTENDED_SUPPORT")],
        "eks.version",
        "warning",
        edits={"eks.upgrade_policy": "EXTENDED"},
    ),
    Case("EKS-101", EKS, [versions(v1_35="UNSUPPORTED", v1_36="STANDARD_SUPPORT")], "eks.version"),
    Case("EKS-101", EKS, [versions(v1_36="STANDARD_SUPPORT")], "eks.version"),
    Case("IAM-101", EKS, [("iam", "get_role", "NoSuchEntity")], "access.admin_roles.0"),
]
