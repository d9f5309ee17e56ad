"""What AWS might answer to the questions of online rules."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

NOW = datetime(2026, 11, 21, tzinfo=UTC)
SPOT, BLOCK, RESERVED = "ec2-spot-g6e", "ec2-capacity-block-p5en", "ec2-p6-b300-reservation"
SLURM, EKS = "hyperpod-slurm-p5", "hyperpod-eks-g6e-spot"
VPC, SUBNET, OTHER, GROUP = (
    "vpc-0123456789abcdef0",
    "subnet-0123456789abcdef0",
    "subnet-0123456789abcdef1",
    "sg-0123456789abcdef0",
)
EXISTING: dict[str, Any] = {"network.existing": {"vpc_id": VPC, "compute_subnet_id": SUBNET}}
CONTROL: dict[str, Any] = {"network.existing": {**EXISTING["network.existing"], "control_subnet_ids": [SUBNET, OTHER]}}
ZONAL: dict[str, Any] = {"network.existing": {**EXISTING["network.existing"], "zone_subnet_ids": {"use1-az2": SUBNET}}}
FS = "fs-0123456789abcdef0"
DNS = f"{FS}.fsx.us-east-1.amazonaws.com"
LUSTRE: dict[str, Any] = {
    **EXISTING,
    "storage.lustre": {"existing": {"id": FS, "dns_name": DNS, "mount_name": "fsx", "security_group_id": GROUP}},
}
ENDS = datetime(2027, 2, 14, 11, 30, tzinfo=UTC)
PLAN_ENDS = datetime(2027, 3, 1, 11, 30, tzinfo=UTC)
REPOSITORY = {"repository.existing": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train"}
BUCKETS = {"buckets": {"data": "one", "checkpoints": "two", "lifecycle": "three"}}
IMAGE = {"groups.0.image_id": "ami-0123456789abcdef0"}
BUILT = {"Architecture": "x86_64", "OwnerId": "123456789012", "BlockDeviceMappings": [{"Ebs": {"Encrypted": False}}]}
"""An image that was built on HyperPod's own."""

Answer = tuple[str, str, dict[str, Any] | str]
"""Service, method, and what it answers; text is an error's code."""


def offered(*zones: str) -> Answer:
    found = [
        {"InstanceType": "g6e.48xlarge", "LocationType": "availability-zone-id", "Location": zone} for zone in zones
    ]
    return "ec2", "describe_instance_type_offerings", {"InstanceTypeOfferings": found}


def quotas(**values: float) -> Answer:
    found = [{"QuotaName": name.replace("_", " "), "Value": value} for name, value in values.items()]
    return "service-quotas", "list_service_quotas", {"Quotas": found}


def quota(name: str, value: float) -> Answer:
    return "service-quotas", "list_service_quotas", {"Quotas": [{"QuotaName": name, "Value": value}]}


def reservation(**keys: Any) -> Answer:
    """The capacity block of the p5en stack, as EC2 would describe it."""
    found = {
        "CapacityReservationId": "cr-0a1b2c3d4e5f60718",
        "AvailabilityZoneId": "use2-az2",
        "InstanceType": "p5en.48xlarge",
        "InstancePlatform": "Linux/UNIX",
        "TotalInstanceCount": 16,
        "AvailableInstanceCount": 16,
        "State": "active",
        "EndDate": ENDS,
        "ReservationType": "capacity-block",
        **keys,
    }
    return "ec2", "describe_capacity_reservations", {"CapacityReservations": [found]}


def plan(part: dict[str, Any] | None = None, **keys: Any) -> Answer:
    """The training plan of the p5 stack."""
    where = {
        "AvailabilityZoneId": "usw2-az2",
        "InstanceType": "ml.p5.48xlarge",
        "TotalInstanceCount": 4,
        "Status": "Active",
    }
    where["ReservedCapacityArn"] = "arn:aws:sagemaker:us-west-2:123456789012:reserved-capacity/" + "a" * 12
    found = {
        "TrainingPlanArn": "arn:aws:sagemaker:us-west-2:123456789012:training-plan/llm-p5",
        "TrainingPlanName": "llm-p5",
        "Status": "Active",
        "EndTime": PLAN_ENDS,
        "TotalInstanceCount": 4,
        "TargetResources": ["hyperpod-cluster"],
        "ReservedCapacitySummaries": [{**where, **(part or {})}],
        **keys,
    }
    return "sagemaker", "describe_training_plan", found


def prices(*usd: str) -> Answer:
    found = [{"InstanceType": "g6e.48xlarge", "SpotPrice": one, "Timestamp": NOW} for one in usd]
    return "ec2", "describe_spot_price_history", {"SpotPriceHistory": found}


def scores(**by_zone: int) -> Answer:
    found = [{"AvailabilityZoneId": zone.replace("_", "-"), "Score": score} for zone, score in by_zone.items()]
    return "ec2", "get_spot_placement_scores", {"SpotPlacementScores": found}


def zone(name: str, **keys: str) -> Answer:
    found = {"ZoneId": name, "State": "available", "OptInStatus": "opt-in-not-required", "GroupName": "g", **keys}
    return "ec2", "describe_availability_zones", {"AvailabilityZones": [found]}


def subnet(**keys: Any) -> Answer:
    found = {
        "SubnetId": SUBNET,
        "VpcId": VPC,
        "AvailabilityZoneId": "use1-az4",
        "AvailableIpAddressCount": 1000,
        "CidrBlock": "10.0.0.0/22",
        "MapPublicIpOnLaunch": False,
        **keys,
    }
    return "ec2", "describe_subnets", {"Subnets": [found]}


def attribute(name: str, value: bool) -> Answer:
    return "ec2", "describe_vpc_attribute", {"VpcId": VPC, name: {"Value": value}}


def routes(*found: dict[str, str]) -> Answer:
    table = {"Associations": [{"SubnetId": SUBNET}], "Routes": list(found)}
    return "ec2", "describe_route_tables", {"RouteTables": [table]}


def file_system(**keys: Any) -> Answer:
    lustre = {"MountName": "fsx", **keys.pop("lustre", {})}
    found = {"FileSystemId": FS, "Lifecycle": "AVAILABLE", "VpcId": VPC, "SubnetIds": [SUBNET], "DNSName": DNS, **keys}
    return "fsx", "describe_file_systems", {"FileSystems": [{**found, "LustreConfiguration": lustre}]}


def security_group(*permissions: dict[str, Any], vpc: str = VPC) -> Answer:
    found = {"GroupId": GROUP, "VpcId": vpc, "IpPermissions": list(permissions)}
    return "ec2", "describe_security_groups", {"SecurityGroups": [found]}


def bucket(region: str) -> Answer:
    return "s3", "head_bucket", {"BucketRegion": region, "ResponseMetadata": {"HTTPStatusCode": 200, "HTTPHeaders": {}}}


def no_bucket(status: str) -> Answer:
    return "s3", "head_bucket", status


def nothing_left() -> list[Answer]:
    return [
        ("ecr", "describe_repositories", "RepositoryNotFoundException"),
        ("sqs", "get_queue_url", "AWS.SimpleQueueService.NonExistentQueue"),
        ("logs", "describe_log_groups", {"logGroups": []}),
    ]


def dry_run(code: str) -> Answer:
    return "ec2", "run_instances", code


def versions(**status: str) -> Answer:
    found = [
        {"clusterVersion": key.strip("v").replace("_", "."), "versionStatus": value} for key, value in status.items()
    ]
    return "eks", "describe_cluster_versions", {"clusterVersions": found}
