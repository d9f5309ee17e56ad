"""What AWS might answer to the questions of online rules: a good answer and bad ones for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from infra.plan.network.endpoints import ALWAYS, BY_BACKEND
from infra.plan.node_policy import node_statements
from infra.plan.nodes.eks import addons, needed_addons
from tests.infra.edits import place, spec_of
from tests.infra.mistakes import (
    BLOCK,
    BOUNDARY,
    EKS,
    FURTHER,
    JOINED,
    KEY,
    KEY_OF_IT,
    LINKS,
    NODE_ROLE,
    NOW,
    OTHERS,
    PROFILE,
    PROXY,
    RECORDS,
    SLURM,
    SPOT,
    TWO_TYPES,
    WITH_SLURM,
)

VPC, GROUP = "vpc-0123456789abcdef0", "sg-0123456789abcdef0"
SUBNET, OTHER = "subnet-0123456789abcdef0", "subnet-0123456789abcdef1"
EXISTING: dict[str, Any] = {"network.existing": {"vpc_id": VPC, "compute_subnet_id": SUBNET}}
CONTROL: dict[str, Any] = {"network.existing": {**EXISTING["network.existing"], "control_subnet_ids": [SUBNET, OTHER]}}
ZONAL: dict[str, Any] = {"network.existing": {**EXISTING["network.existing"], "zone_subnet_ids": {"use1-az2": SUBNET}}}
FS = "fs-0123456789abcdef0"
MANAGED: dict[str, Any] = {"observability": {"prometheus": "amp", "grafana": "managed"}}
TABLE = "rtb-0123456789abcdef0"
DNS = f"{FS}.fsx.us-east-1.amazonaws.com"
LUSTRE: dict[str, Any] = {
    **EXISTING,
    "storage.lustre": {"existing": {"id": FS, "dns_name": DNS, "mount_name": "fsx", "security_group_id": GROUP}},
}
EFS = "storage.home.existing"
EFS_DNS = f"{FS}.efs.us-east-1.amazonaws.com"
HOMES: dict[str, Any] = {
    **EXISTING,
    "storage.home": {"type": "efs", "existing": {"id": FS, "dns_name": EFS_DNS, "security_group_id": GROUP}},
}
ZFS = {**EXISTING, "storage.home": {"existing": {"id": FS, "dns_name": DNS, "security_group_id": GROUP}}}
ACCOUNTING = {**EXISTING, "scheduler.accounting": {"database": RECORDS}}
DATABASE_GROUP = "scheduler.accounting.database.security_group_id"
STARTS = datetime(2027, 1, 14, 11, 30, tzinfo=UTC)
SOON = NOW + timedelta(hours=3)
STARTS_KEY, LATER = "groups.0.capacity.starts_at", "2027-01-15T11:30:00Z"
ENDS = datetime(2027, 2, 14, 11, 30, tzinfo=UTC)
PLAN_ENDS = datetime(2027, 3, 1, 11, 30, tzinfo=UTC)
REPOSITORY = {"repository.existing": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train"}
BUCKETS = {"buckets": {"data": "one", "checkpoints": "two", "lifecycle": "three"}}
IMAGE = {"groups.0.image_id": "ami-0123456789abcdef0"}
CONTROLLERS_IMAGE = {KEY_OF_IT: "ami-0123456789abcdef0"}
BUILT = {"Architecture": "x86_64", "OwnerId": "123456789012", "BlockDeviceMappings": [{"Ebs": {"Encrypted": False}}]}
"""An image that was built on HyperPod's own."""

Answer = tuple[str, str, dict[str, Any] | str]
"""Service, method, and what it answers; text is an error's code."""


def offered(*zones: str, type_: str = "g6e.48xlarge") -> Answer:
    kind = {"InstanceType": type_, "LocationType": "availability-zone-id"}
    found = [{**kind, "Location": zone} for zone in zones]
    return "ec2", "describe_instance_type_offerings", {"InstanceTypeOfferings": found}


def eks(**changes: Any) -> Answer:
    """An EKS cluster that HyperPod can join."""
    network = {"vpcId": VPC, "clusterSecurityGroupId": GROUP, "endpointPrivateAccess": True, "publicAccessCidrs": []}
    about = {"arn": "arn:aws:eks:us-east-2:123456789012:cluster/platform", "version": "1.35", "status": "ACTIVE"}
    found = {**about, "accessConfig": {"authenticationMode": "API"}}
    found |= {key: value for key, value in changes.items() if key not in network}
    network |= {key: value for key, value in changes.items() if key in network}
    return "eks", "describe_cluster", {"cluster": {**found, "resourcesVpcConfig": network}}


BEING_MADE: Answer = (
    "eks",
    "describe_cluster",
    {"cluster": {"arn": "arn", "version": "1.35", "status": "CREATING", "resourcesVpcConfig": {"vpcId": VPC}}},
)
CONNECTED: Answer = ("eks", "describe_cluster", {"cluster": {"arn": "arn", "status": "ACTIVE", "connectorConfig": {}}})


def addons_of(*names: str) -> Answer:
    return "eks", "list_addons", {"addons": list(names)}


def made_by(tags: dict[str, str]) -> Answer:
    """An add-on with these tags."""
    return "eks", "describe_addon", {"addon": {"tags": tags}}


def entry(tags: dict[str, str], *, absent: bool = False) -> Answer:
    """An access entry with these tags, or none."""
    answer = "ResourceNotFoundException" if absent else {"accessEntry": {"tags": tags}}
    return "eks", "describe_access_entry", answer


def identity_center(*states: str) -> Answer:
    return "sso-admin", "list_instances", {"Instances": [{"Status": state} for state in states]}


def quota(name: str, value: float, **more: float) -> Answer:
    found = [{"QuotaName": key, "Value": most} for key, most in {name: value, **more}.items()]
    return "service-quotas", "list_service_quotas", {"Quotas": found}


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


def prices(*usd: str, type_: str = "g6e.48xlarge") -> Answer:
    found = [{"InstanceType": type_, "SpotPrice": one, "Timestamp": NOW} for one in usd]
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
    table = {"RouteTableId": TABLE, "Associations": [{"SubnetId": SUBNET}], "Routes": list(found)}
    return "ec2", "describe_route_tables", {"RouteTables": [table]}


def endpoints(*found: dict[str, Any]) -> Answer:
    return "ec2", "describe_vpc_endpoints", {"VpcEndpoints": list(found)}


def gateway(table: str = TABLE, service: str = "s3") -> dict[str, Any]:
    return {
        "ServiceName": f"com.amazonaws.us-east-1.{service}",
        "VpcEndpointType": "Gateway",
        "RouteTableIds": [table],
    }


def interface(private_dns: bool, **options: bool) -> dict[str, Any]:
    return {
        "ServiceName": "com.amazonaws.us-east-1.s3",
        "VpcEndpointType": "Interface",
        "PrivateDnsEnabled": private_dns,
        "DnsOptions": options,
    }


def file_system(**keys: Any) -> Answer:
    lustre = {"MountName": "fsx", **keys.pop("lustre", {})}
    found = {"FileSystemId": FS, "Lifecycle": "AVAILABLE", "VpcId": VPC, "SubnetIds": [SUBNET], "DNSName": DNS, **keys}
    return "fsx", "describe_file_systems", {"FileSystems": [{**found, "LustreConfiguration": lustre}]}


def efs(zone: str, vpc: str = VPC, state: str = "available", target_state: str = "available") -> list[Answer]:
    system = {
        "OwnerId": "123456789012",
        "CreationToken": "a",
        "FileSystemId": FS,
        "CreationTime": ENDS,
        "LifeCycleState": state,
        "NumberOfMountTargets": 1,
        "SizeInBytes": {"Value": 1},
        "PerformanceMode": "generalPurpose",
        "Tags": [],
    }
    target = {
        "MountTargetId": "fsmt-0123456789abcdef0",
        "FileSystemId": FS,
        "SubnetId": SUBNET,
        "LifeCycleState": target_state,
    }
    targets = [{**target, "VpcId": vpc, "AvailabilityZoneId": zone}]
    found: list[Answer] = [("efs", "describe_file_systems", {"FileSystems": [system]})]
    return found if state != "available" else [*found, ("efs", "describe_mount_targets", {"MountTargets": targets})]


def nfs(port: int) -> dict[str, Any]:
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, **NODES}


def security_group(*permissions: dict[str, Any], vpc: str = VPC) -> Answer:
    found = {"GroupId": GROUP, "VpcId": vpc, "IpPermissions": list(permissions)}
    return "ec2", "describe_security_groups", {"SecurityGroups": [found]}


def lnet(**source: Any) -> list[dict[str, Any]]:
    """Return rules for Lustre's ports from one source."""
    return [{**TCP, "FromPort": first, "ToPort": last, **source} for first, last in ((988, 988), (1018, 1023))]


def cluster_groups(*found: str) -> Answer:
    """Which of the groups that rules name carry the cluster's tag."""
    return "ec2", "describe_security_groups", {"SecurityGroups": [{"GroupId": group} for group in found]}


def addon(name: str = "vpc-cni") -> Answer:
    return "eks", "describe_addon_versions", {"addons": [{"addonName": name}] if name else []}


def endpoint_services(*missing: str, zone: str = "us-east-1d") -> list[Answer]:
    """What EC2 says of the services of the closed spot stack: all but `missing` are offered in `zone`."""
    services = [f"com.amazonaws.us-east-1.{service}" for service in (*ALWAYS, *BY_BACKEND["ec2"])]
    offered = [{"ServiceName": name, "AvailabilityZones": [zone]} for name in services if name not in missing]
    zones = {"AvailabilityZones": [{"ZoneId": "use1-az4", "ZoneName": "us-east-1d"}]}
    return [
        ("ec2", "describe_availability_zones", zones),
        ("ec2", "describe_vpc_endpoint_services", {"ServiceDetails": offered}),
    ]


def entries(*cidrs: str) -> Answer:
    return "ec2", "get_managed_prefix_list_entries", {"Entries": [{"Cidr": cidr} for cidr in cidrs]}


def prefix_lists(*max_entries: int) -> Answer:
    """Lists that may hold so many entries; 0: one of AWS's own."""
    names = [f"pl-0123456{number}" for number in range(len(max_entries))]
    found = [
        {"PrefixListId": name, **({"MaxEntries": most} if most else {})}
        for name, most in zip(names, max_entries, strict=True)
    ]
    return "ec2", "describe_managed_prefix_lists", {"PrefixLists": found}


def bucket(region: str) -> Answer:
    return "s3", "head_bucket", {"BucketRegion": region, "ResponseMetadata": {"HTTPStatusCode": 200, "HTTPHeaders": {}}}


def encrypted(key: str | None = None) -> Answer:
    by_default: dict[str, str] = (
        {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key} if key else {"SSEAlgorithm": "AES256"}
    )
    rules = [{"ApplyServerSideEncryptionByDefault": by_default}]
    return "s3", "get_bucket_encryption", {"ServerSideEncryptionConfiguration": {"Rules": rules}}


def no_bucket(status: str) -> Answer:
    return "s3", "head_bucket", status


def nothing_left() -> list[Answer]:
    return [
        ("ecr", "describe_repositories", "RepositoryNotFoundException"),
        ("sqs", "get_queue_url", "AWS.SimpleQueueService.NonExistentQueue"),
        ("logs", "describe_log_groups", {"logGroups": []}),
    ]


def image(architecture: str) -> Answer:
    return "ec2", "describe_images", {"Images": [{"Architecture": architecture}]}


def encrypted_image() -> Answer:
    """One that EC2 takes and HyperPod does not."""
    return "ec2", "describe_images", {"Images": [{**BUILT, "BlockDeviceMappings": [{"Ebs": {"Encrypted": True}}]}]}


def named(name: str) -> Answer:
    return "ec2", "describe_images", {"Images": [{"Name": name}]}


def dry_run(code: str) -> Answer:
    return "ec2", "run_instances", code


def versions(**status: str) -> Answer:
    found = [{"clusterVersion": key.strip("v").replace("_", "."), "versionStatus": one} for key, one in status.items()]
    return "eks", "describe_cluster_versions", {"clusterVersions": found}


def facts(efa: int = 4, cards: int = 4, vcpus: int = 192) -> Answer:
    """What EC2 says of a g6e.48xlarge."""
    found = {
        "NetworkPerformance": "400 Gigabit",
        "NetworkCards": [{"NetworkCardIndex": n, "MaximumNetworkInterfaces": 10} for n in range(cards)],
    }
    record = {
        "InstanceType": "g6e.48xlarge",
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": vcpus},
        "MemoryInfo": {"SizeInMiB": 1},
        "SupportedUsageClasses": ["spot"],
        "PlacementGroupInfo": {"SupportedStrategies": ["cluster"]},
        "NetworkInfo": {**found, "EfaInfo": {"MaximumEfaInterfaces": efa}},
    }
    return "ec2", "describe_instance_types", {"InstanceTypes": [record]}


def role(service: str, *actions: str) -> Answer:
    document = json.dumps({"Statement": [{"Principal": {"Service": f"{service}.amazonaws.com"}, "Action": actions}]})
    found = {**PLATFORM, "RoleName": "nodes", "Arn": NODE_ROLE, "AssumeRolePolicyDocument": document}
    return "iam", "get_role", {"Role": found}


def profile(*roles: str) -> Answer:
    held = [{**PLATFORM, "RoleName": "nodes", "Arn": arn} for arn in roles]
    found = {"InstanceProfileName": "nodes", "InstanceProfileId": "A" * 16, "Arn": PROFILE, "Path": "/team/"}
    return "iam", "get_instance_profile", {"InstanceProfile": {**found, "CreateDate": NOW, "Roles": held}}


def simulated(decision: str, method: str = "simulate_principal_policy") -> Answer:
    results = [{"EvalActionName": "s3:GetObject", "EvalResourceName": "*", "EvalDecision": decision}]
    return "iam", method, {"EvaluationResults": results, "IsTruncated": False}


def within_boundary(*decisions: str) -> list[Answer]:
    """The boundary's document, and what comes of each statement of the nodes' role within it."""
    version = {"PolicyVersion": {"Document": json.dumps({"Version": "2012-10-17", "Statement": []})}}
    return [
        ("iam", "get_policy", {"Policy": {"PolicyName": "boundary", "DefaultVersionId": "v3"}}),
        ("iam", "get_policy_version", version),
        *(simulated(decision, "simulate_custom_policy") for decision in decisions),
    ]


GIVEN_ROLE: dict[str, Any] = {"access.node_role": NODE_ROLE}
GIVEN: dict[str, Any] = {**GIVEN_ROLE, "access.instance_profile": PROFILE}
NO_PROFILE = ("iam", "get_instance_profile", "NoSuchEntity")
STATEMENTS = len(node_statements(spec_of(SPOT, {}), place(SPOT)))
"""Each is simulated by itself."""
ELSEWHERE = {"access.admin_roles": ["arn:aws:iam::210987654321:role/platform"]}


PLATFORM = {"RoleName": "platform", "RoleId": "A" * 16, "Path": "/", "CreateDate": NOW}
PLATFORM["Arn"] = "arn:aws:iam::123456789012:role/platform"


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
"""A gateway endpoint of S3, or of DynamoDB: only the endpoint says which."""
INBOUND_ONLY = {"PrivateDnsOnlyForInboundResolverEndpoint": True}
INTERNET = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-01234567"}
G_SPOT = "All G and VT Spot Instance Requests"
G_ON_DEMAND = "Running On-Demand G and VT instances"
STANDARD = "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
MONITOR: dict[str, Any] = {"observability": {"prometheus": "self"}}
MONITORS_IMAGE = "observability.monitor.image_id"
WITH_BASE: dict[str, Any] = {**TWO_TYPES, "groups.0.capacity.on_demand_base": 2}
RESERVATION_KEY = "groups.0.capacity.reservation"
PLAN_KEY = "groups.2.capacity.training_plan"
MODE = "groups.0.capacity.mode"
COMPUTE = "network.existing.compute_subnet_id"
TYPE, COUNT, OWN_IMAGE = "groups.0.instance_type", "groups.0.count", "groups.0.image_id"
ENDS_AT, PLACEMENT = "groups.0.capacity.ends_at", "groups.0.capacity.placement_group"
FSX = "storage.lustre.existing"
FSX_ID, FSX_GROUP = f"{FSX}.id", f"{FSX}.security_group_id"
NO_RESERVATION = ("ec2", "describe_capacity_reservations", "InvalidCapacityReservationId.NotFound")
NO_VPC = ("ec2", "describe_vpc_attribute", "InvalidVpcID.NotFound")
NO_FILE_SYSTEM = ("fsx", "describe_file_systems", "FileSystemNotFound")
NO_GROUP = ("ec2", "describe_security_groups", "InvalidGroup.NotFound")
NO_REPOSITORY = ("ecr", "describe_repositories", "RepositoryNotFoundException")
MORE_GROUPS: dict[str, Any] = {**EXISTING, FURTHER: [GROUP]}
FROM_LIST: dict[str, Any] = {"network.allow_from": ["10.0.0.0/8", "pl-01234567"]}
FROM_LISTS: dict[str, Any] = {"network.allow_from": ["10.0.0.0/8", "pl-01234560", "pl-01234561"]}
MANY_RANGES = [f"10.{number}.0.0/16" for number in range(60)]
INBOUND_RULES = "Inbound or outbound rules per security group"
PROXIED: dict[str, Any] = {**EXISTING, "network.proxy": PROXY}
THEIRS: dict[str, Any] = {f"{LINKS}.1": {"path": "/theirs", "bucket": "theirs"}}
THEIRS_WITH_KEY: dict[str, Any] = {f"{LINKS}.1": {**THEIRS[f"{LINKS}.1"], "kms_key": KEY}}
ALIAS = "alias/theirs"
THEIRS_WITH_ALIAS: dict[str, Any] = {
    f"{LINKS}.1": {**THEIRS[f"{LINKS}.1"], "kms_key": f"arn:aws:kms:us-east-1:123456789012:{ALIAS}"}
}
IN_GROUP = "arn:aws:ec2:us-east-2:123456789012:placement-group/pg"
NODES = {"IpRanges": [{"CidrIp": "10.0.0.0/16"}]}
STRANGERS = {"IpRanges": [{"CidrIp": "172.31.0.0/16"}, {"CidrIp": "10.0.0.0/24"}]}
PAIR = {"UserIdGroupPairs": [{"GroupId": GROUP}]}
LISTED = {"PrefixListIds": [{"PrefixListId": "pl-0123456789abcdef0"}]}
MINE: dict[str, Any] = {"buckets.data": "mine"}
MOUNTED: dict[str, Any] = {"storage.s3_mounts": [{"bucket": "theirs", "path": "/s3", "region": "us-west-2"}]}
SSH_KEY: dict[str, Any] = {"access.ssh_key": "me"}
BOUNDED: dict[str, Any] = {"access.permissions_boundary": BOUNDARY.format("", "123456789012")}
NEEDED = [addon.name for addon in needed_addons(spec_of(EKS, JOINED))]
WITH_ADDONS: dict[str, Any] = {**JOINED, "eks.existing.addons": ["eks-pod-identity-agent", "coredns"]}
ADMITTED: dict[str, Any] = {**JOINED, "access.admin_roles": [NODE_ROLE]}
GIVEN_POD_ROLE: dict[str, Any] = {"eks.training_operator": True, "eks.operator_role": NODE_ROLE}
GIVEN_EKS_ROLE: dict[str, Any] = {"eks.cluster_role": NODE_ROLE}
TAGGED_EKS = {"lustrain:cluster": spec_of(EKS, {}).name}
EXTENDED = {"eks.upgrade_policy": "EXTENDED"}
EMPTY = [no_bucket("404")] * 3
ADDONS = len(addons(spec_of(EKS, {})))
NO_ADDON = ("eks", "describe_addon_versions", "ResourceNotFoundException")
CLOSED: dict[str, Any] = {"network.closed": True, "network.nat": False}
UNTAGGED = ("s3", "get_bucket_tagging", "NoSuchTagSet")
TAGGED, FOREIGN = {"lustrain:cluster": spec_of(SPOT, {}).name}, {"lustrain:cluster": "another"}


def repository_there(tags: dict[str, str]) -> list[Answer]:
    listed = {"tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
    return [
        ("ecr", "describe_repositories", {"repositories": [{"repositoryArn": "arn:aws:ecr:us-east-1:1:repository/a"}]}),
        ("ecr", "list_tags_for_resource", listed),
    ]


def queue_there(tags: dict[str, str]) -> list[Answer]:
    return [("sqs", "get_queue_url", {"QueueUrl": "https://queue"}), ("sqs", "list_queue_tags", {"Tags": tags})]


def logs_there(tags: dict[str, str]) -> list[Answer]:
    group = {"logGroupName": "/lustrain/a/train", "logGroupArn": "arn:aws:logs:us-east-1:1:log-group:a"}
    return [
        ("logs", "describe_log_groups", {"logGroups": [group]}),
        ("logs", "list_tags_for_resource", {"tags": tags}),
    ]


def second_page(*answers: Answer, token: str = "nextToken") -> list[Answer]:
    """A first page that is empty before the first of the answers."""
    service, method, last = answers[0]
    assert isinstance(last, dict)
    return [(service, method, {**{key: [] for key in last}, token: "2"}), *answers]


def tagged_bucket(tags: dict[str, str]) -> list[Answer]:
    listed = {"TagSet": [{"Key": key, "Value": value} for key, value in tags.items()]}
    return [bucket("us-east-1"), ("s3", "get_bucket_tagging", listed)]


CASES = [
    Case("EC2-101", SPOT, [offered("use1-az1", "use1-az4")]),
    Case("EC2-101", SPOT, [offered("use1-az1")], TYPE),
    Case("EC2-101", SPOT, [offered()], TYPE),
    Case(
        "EC2-101",
        SPOT,
        [offered("use1-az4")],
        "observability.monitor.type",
        edits=MONITOR,
    ),
    Case("EC2-102", SPOT, [quota(G_SPOT, 1536)]),
    Case("EC2-102", SPOT, [quota(G_SPOT, 1535)], "groups"),
    Case("EC2-102", SPOT, [quota("All P5 Spot Instance Requests", 9999)], "groups", "unknown"),
    Case("EC2-102", SLURM, [quota(STANDARD, 2)], edits=MONITOR),
    Case("EC2-102", SLURM, [quota(STANDARD, 1)], "groups", edits=MONITOR),
    Case("EC2-101", SPOT, [offered("use1-az4", type_="g6.12xlarge")], f"{OTHERS}.0", edits=TWO_TYPES),
    Case("EC2-102", SPOT, [quota(G_SPOT, 384)], edits=TWO_TYPES),
    Case("EC2-102", SPOT, [quota(G_SPOT, 383)], "groups", edits=TWO_TYPES),
    Case("EC2-102", SPOT, [quota(G_SPOT, 288, **{G_ON_DEMAND: 96})], edits=WITH_BASE),
    Case("EC2-102", SPOT, [quota(G_SPOT, 384, **{G_ON_DEMAND: 95})], "groups", edits=WITH_BASE),
    Case("EC2-103", SPOT, [dry_run("DryRunOperation"), dry_run("Unsupported")], f"{OTHERS}.0", edits=TWO_TYPES),
    Case("CAP-106", SPOT, [prices("3.10", type_="g6.12xlarge")], f"{OTHERS}.0", "warning", edits=TWO_TYPES),
    Case("HYP-101", EKS, [quota("ml.m5.2xlarge for cluster usage", 2)]),
    Case("HYP-101", EKS, [quota("ml.m5.2xlarge for cluster usage", 1)], "groups"),
    Case("HYP-101", EKS, [quota("ml.m5.2xlarge for training job usage", 9)], "groups", "unknown"),
    Case("EC2-103", SPOT, [dry_run("DryRunOperation")]),
    Case("EC2-103", SPOT, [dry_run("VcpuLimitExceeded")], COUNT),
    Case("EC2-103", SPOT, [dry_run("InsufficientFreeAddressesInSubnet")], COUNT, edits=EXISTING),
    Case("EC2-103", SPOT, [dry_run("InsufficientInstanceCapacity")], "groups.0.capacity", "warning"),
    Case("EC2-103", SPOT, [dry_run("Unsupported")], TYPE),
    Case("EC2-103", SPOT, [dry_run("InvalidParameterValue")], "groups.0"),
    Case("EC2-103", SPOT, [dry_run("UnauthorizedOperation")], "groups.0", "unknown"),
    Case("EC2-103", SPOT, [dry_run("VPCIdNotSpecified")], "groups.0", "unknown"),
    Case("EC2-103", BLOCK, [dry_run("ReservationCapacityExceeded")], "groups.0.capacity"),
    Case("EC2-105", SPOT, [image("x86_64")], edits=IMAGE),
    Case("EC2-105", SPOT, [image("arm64")], OWN_IMAGE, edits=IMAGE),
    Case("EC2-105", SPOT, [("ec2", "describe_images", "InvalidAMIID.NotFound")], OWN_IMAGE, edits=IMAGE),
    Case("EC2-105", WITH_SLURM, [image("arm64")], KEY_OF_IT, edits=CONTROLLERS_IMAGE),
    Case("SLM-101", WITH_SLURM, [named("ubuntu-noble-24.04-amd64-server")], edits=CONTROLLERS_IMAGE),
    Case("SLM-101", WITH_SLURM, [named("ubuntu-jammy-22.04-amd64-server")], KEY_OF_IT, "warning", CONTROLLERS_IMAGE),
    Case("SLM-102", WITH_SLURM, [security_group(nfs(3306)), subnet()], edits=ACCOUNTING),
    Case("SLM-102", WITH_SLURM, [security_group(nfs(5432)), subnet()], DATABASE_GROUP, edits=ACCOUNTING),
    Case("SLM-102", WITH_SLURM, [NO_GROUP], DATABASE_GROUP, edits=ACCOUNTING),
    Case("EC2-107", SPOT, [("ssm", "get_parameter", {"Parameter": {"Value": "ami-0123456789abcdef0"}})]),
    Case("EC2-107", SPOT, [("ssm", "get_parameter", "ParameterNotFound")], OWN_IMAGE),
    Case("EC2-107", SPOT, [], edits=IMAGE),
    Case("EC2-107", SLURM, [("ssm", "get_parameter", "ParameterNotFound")], MONITORS_IMAGE, edits=MONITOR),
    Case("EC2-105", SLURM, [encrypted_image()], edits={**MONITOR, MONITORS_IMAGE: "ami-0123456789abcdef0"}),
    *(
        Case("EC2-105", SLURM, [("ec2", "describe_images", {"Images": [{**BUILT, **more}]})], path, edits=IMAGE)
        for path, more in (
            ("", {}),
            ("", {"OwnerId": "763104351884", "Public": True}),
            (OWN_IMAGE, {"OwnerId": "763104351884"}),
            (OWN_IMAGE, {"BlockDeviceMappings": [{"Ebs": {"Encrypted": True}}]}),
            (OWN_IMAGE, {"BlockDeviceMappings": [{"Ebs": {}}, {"Ebs": {}}]}),
        )
    ),
    Case("EC2-106", SPOT, [("ec2", "describe_key_pairs", {"KeyPairs": [{"KeyName": "me"}]})], edits=SSH_KEY),
    Case("EC2-106", SPOT, [("ec2", "describe_key_pairs", {"KeyPairs": []})], "access.ssh_key", edits=SSH_KEY),
    Case("CAP-101", BLOCK, [reservation()]),
    Case("CAP-101", BLOCK, [reservation(State="scheduled")], RESERVATION_KEY, "warning"),
    Case("CAP-101", BLOCK, [reservation(State="scheduled", StartDate=STARTS)], STARTS_KEY),
    Case("CAP-101", BLOCK, [reservation(State="scheduled", StartDate=STARTS)], edits={STARTS_KEY: STARTS.isoformat()}),
    Case("CAP-101", BLOCK, [reservation(State="scheduled", StartDate=STARTS)], STARTS_KEY, edits={STARTS_KEY: LATER}),
    Case("CAP-101", BLOCK, [reservation(State="expired")], RESERVATION_KEY),
    Case("CAP-101", BLOCK, [reservation(State="expired", StartDate=STARTS)], RESERVATION_KEY),
    Case("CAP-101", BLOCK, [reservation(State="scheduled", StartDate=SOON)], RESERVATION_KEY, "warning"),
    Case("CAP-101", BLOCK, [reservation(StartDate=NOW)], STARTS_KEY, edits={STARTS_KEY: LATER}),
    Case("CAP-101", BLOCK, [NO_RESERVATION], RESERVATION_KEY),
    Case("CAP-102", BLOCK, [reservation()]),
    Case("CAP-102", BLOCK, [reservation(AvailabilityZoneId="use2-az1")], edits={"groups.0.zone_id": "use2-az1"}),
    Case("CAP-102", BLOCK, [reservation(AvailabilityZoneId="use2-az1")], RESERVATION_KEY),
    Case("CAP-102", BLOCK, [reservation(InstanceType="p5.48xlarge")], RESERVATION_KEY),
    Case("CAP-102", BLOCK, [reservation(InstancePlatform="Windows")], RESERVATION_KEY),
    Case("CAP-102", BLOCK, [reservation(ReservationType="default")], MODE),
    Case("CAP-102", BLOCK, [reservation(PlacementGroupArn=IN_GROUP)], PLACEMENT),
    Case("CAP-103", BLOCK, [reservation()]),
    Case("CAP-103", BLOCK, [reservation(TotalInstanceCount=8, AvailableInstanceCount=8)], RESERVATION_KEY),
    Case("CAP-103", BLOCK, [reservation(AvailableInstanceCount=8)], RESERVATION_KEY, "warning"),
    Case("CAP-104", BLOCK, [reservation()]),
    Case("CAP-104", BLOCK, [reservation(EndDate=datetime(2027, 2, 13, tzinfo=UTC))], ENDS_AT),
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
    Case("CAP-107", SPOT, [scores(use1_az4=1, use1_az6=1)]),
    Case("CAP-107", SPOT, [scores(use1_az4=1, use1_az6=2)], MODE, "warning"),
    Case("CAP-107", SPOT, [scores(use1_az4=1, use1_az6=1)], MODE, "warning", edits={OTHERS: ["g6.48xlarge"] * 2}),
    Case("CAP-107", SPOT, second_page(scores(use1_az4=9), token="NextToken")),
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
    Case("NET-105", SPOT, [NO_VPC], "network.existing.vpc_id", edits=EXISTING),
    Case("NET-106", SPOT, [routes(NAT, GATEWAY), endpoints(gateway())], edits=EXISTING),
    Case("NET-106", SPOT, [routes(NAT), endpoints()], COMPUTE, "warning", edits=EXISTING),
    Case(
        "NET-106",
        SPOT,
        [routes(NAT, GATEWAY), endpoints(gateway(service="dynamodb"))],
        COMPUTE,
        "warning",
        edits=EXISTING,
    ),
    Case("NET-106", SPOT, [routes(NAT), endpoints(gateway("rtb-01234567"))], COMPUTE, "warning", edits=EXISTING),
    Case("NET-106", SPOT, [routes(GATEWAY), endpoints(gateway())], COMPUTE, "warning", edits=EXISTING),
    Case("NET-106", SPOT, [routes(INTERNET, GATEWAY), endpoints(gateway())], COMPUTE, edits=EXISTING),
    Case(
        "NET-106",
        SPOT,
        [*second_page(routes(NAT, GATEWAY), token="NextToken"), endpoints(gateway())],
        edits=EXISTING,
    ),
    Case("NET-106", SPOT, [routes(NAT, GATEWAY), endpoints(gateway())], edits=PROXIED),
    Case("NET-106", SPOT, [routes(GATEWAY), endpoints(gateway())], edits=PROXIED),
    Case("NET-106", SPOT, [routes(NAT), endpoints()], COMPUTE, "warning", edits=PROXIED),
    Case("NET-106", SPOT, [routes(), endpoints()], COMPUTE, edits=PROXIED),
    Case("NET-106", SPOT, [routes(GATEWAY), endpoints()], COMPUTE, edits=PROXIED),
    Case("NET-106", SPOT, [routes(), endpoints(interface(False))], COMPUTE, edits=PROXIED),
    Case("NET-106", SPOT, [routes(), endpoints(interface(True, **INBOUND_ONLY))], COMPUTE, edits=PROXIED),
    Case("NET-106", SPOT, [routes(), endpoints(interface(True))], edits=PROXIED),
    Case("NET-106", SPOT, [routes(), endpoints()], COMPUTE, edits={**EXISTING, **CLOSED}),
    Case("NET-107", SPOT, [security_group()], edits=MORE_GROUPS),
    Case("NET-107", SPOT, [security_group(vpc="vpc-01234567")], f"{FURTHER}.0", edits=MORE_GROUPS),
    Case("NET-107", SPOT, [NO_GROUP], f"{FURTHER}.0", edits=MORE_GROUPS),
    Case("NET-108", SPOT, [entries("10.20.0.0/16")], edits=FROM_LIST),
    Case("NET-108", SPOT, [entries("10.20.0.0/16", "0.0.0.0/0")], "network.allow_from.1", edits=FROM_LIST),
    Case("NET-108", SPOT, [entries("2001:db8::/32")], "network.allow_from.1", edits=FROM_LIST),
    Case(
        "NET-108",
        SPOT,
        [("ec2", "get_managed_prefix_list_entries", "InvalidPrefixListID.NotFound")],
        "network.allow_from.1",
        edits=FROM_LIST,
    ),
    Case("NET-110", SPOT, [prefix_lists(30, 20)], edits=FROM_LISTS),
    Case("NET-110", SPOT, [prefix_lists(30, 60), quota(INBOUND_RULES, 60)], "network.allow_from", edits=FROM_LISTS),
    Case("NET-110", SPOT, [prefix_lists(30, 60), quota(INBOUND_RULES, 200)], edits=FROM_LISTS),
    Case("NET-110", SPOT, [prefix_lists(30, 0)], edits=FROM_LISTS),
    Case("NET-110", SPOT, [quota("Rules", 1)], "network.allow_from", edits={"network.allow_from": MANY_RANGES}),
    Case("NET-110", SPOT, []),
    Case("FSX-101", SPOT, [file_system(), subnet()], edits=LUSTRE),
    Case("FSX-101", SPOT, [file_system(Lifecycle="FAILED"), subnet()], FSX_ID, edits=LUSTRE),
    Case("FSX-101", SPOT, [file_system(lustre={"MountName": "abcd1234"}), subnet()], f"{FSX}.mount_name", edits=LUSTRE),
    Case("FSX-101", SPOT, [file_system(lustre={"EfaEnabled": True}), subnet()], f"{FSX}.efa", edits=LUSTRE),
    Case("FSX-101", SPOT, [file_system(VpcId="vpc-01234567"), subnet()], FSX_ID, edits=LUSTRE),
    Case("FSX-101", SPOT, [file_system(), subnet(AvailabilityZoneId="use1-az1")], FSX_ID, edits=LUSTRE),
    Case("FSX-101", SPOT, [NO_FILE_SYSTEM], FSX_ID, edits=LUSTRE),
    Case("FSX-102", SPOT, [security_group({"IpProtocol": "-1", **NODES}), subnet()], edits=LUSTRE),
    Case("FSX-102", SPOT, [security_group(*lnet(**NODES)), subnet()], edits=LUSTRE),
    Case("FSX-102", SPOT, [security_group(*lnet(**PAIR)), subnet(), cluster_groups(GROUP)], edits=LUSTRE),
    Case(
        "FSX-102",
        SPOT,
        [security_group(*lnet(**PAIR)), subnet(), *second_page(cluster_groups(GROUP), token="NextToken")],
        edits=LUSTRE,
    ),
    Case("FSX-102", SPOT, [security_group(*lnet(**NODES, **PAIR)), subnet()], edits=LUSTRE),
    Case("FSX-102", SPOT, [security_group(*lnet(**PAIR)), subnet(), cluster_groups()], FSX_GROUP, edits=LUSTRE),
    Case(
        "FSX-102",
        SPOT,
        [security_group(*lnet(**PAIR)), subnet()],
        edits={**LUSTRE, "network.security_group_ids": [GROUP]},
    ),
    Case("FSX-102", SPOT, [security_group(*lnet(**NODES)[:1]), subnet()], FSX_GROUP, edits=LUSTRE),
    Case("FSX-102", SPOT, [security_group(*lnet(**STRANGERS)), subnet()], FSX_GROUP, edits=LUSTRE),
    Case("FSX-102", SPOT, [security_group(*lnet(**LISTED)), subnet()], FSX_GROUP, "unknown", edits=LUSTRE),
    Case(
        "FSX-102",
        SPOT,
        [security_group({"IpProtocol": "-1", **NODES}, vpc="vpc-01234567"), subnet()],
        FSX_GROUP,
        edits=LUSTRE,
    ),
    Case("FSX-102", SPOT, [NO_GROUP], FSX_GROUP, edits=LUSTRE),
    Case("FSX-102", SPOT, [security_group(nfs(2049)), subnet()], edits=HOMES),
    Case("FSX-102", SPOT, [security_group(nfs(988)), subnet()], f"{EFS}.security_group_id", edits=HOMES),
    Case("FSX-103", SPOT, [*efs("use1-az4")], edits=HOMES),
    Case("FSX-103", SPOT, [*efs("use1-az1")], f"{EFS}.id", edits=HOMES),
    Case("FSX-103", SPOT, [*efs("use1-az4", target_state="error")], f"{EFS}.id", edits=HOMES),
    Case("FSX-103", SPOT, [*efs("use1-az4", vpc="vpc-01234567")], f"{EFS}.id", edits=HOMES),
    Case("FSX-103", SPOT, [*efs("use1-az4", state="deleting")], f"{EFS}.id", edits=HOMES),
    Case("FSX-103", SPOT, [("efs", "describe_file_systems", "FileSystemNotFound")], f"{EFS}.id", edits=HOMES),
    Case("FSX-104", SPOT, [file_system(FileSystemType="OPENZFS")], edits=ZFS),
    Case("FSX-104", SPOT, [file_system(FileSystemType="LUSTRE")], f"{EFS}.id", edits=ZFS),
    Case("FSX-104", SPOT, [file_system(FileSystemType="OPENZFS", Lifecycle="FAILED")], f"{EFS}.id", edits=ZFS),
    Case("FSX-104", SPOT, [file_system(FileSystemType="OPENZFS", VpcId="vpc-01234567")], f"{EFS}.id", edits=ZFS),
    Case("FSX-104", SPOT, [NO_FILE_SYSTEM], f"{EFS}.id", edits=ZFS),
    Case("S3-101", SPOT, [bucket("us-east-1")], edits=MINE),
    Case("S3-101", SPOT, [bucket("eu-west-1")], "buckets.data", edits=MINE),
    Case("S3-101", SPOT, [bucket("eu-west-1")], "storage.s3_mounts.0.region", edits=MOUNTED),
    Case("S3-101", SPOT, [no_bucket("404")], "buckets.data", edits=MINE),
    Case("S3-101", SPOT, [no_bucket("403")], "buckets.data", "unknown", edits=MINE),
    Case("DRA-101", SPOT, [encrypted()], edits=THEIRS),
    Case("DRA-101", SPOT, [("s3", "get_bucket_encryption", "NoSuchBucket")], edits=THEIRS),
    Case("DRA-101", SPOT, [encrypted("arn:aws:kms:us-east-1:123456789012:alias/aws/s3")], edits=THEIRS),
    Case("DRA-101", SPOT, [encrypted(KEY)], f"{LINKS}.1.kms_key", "warning", edits=THEIRS),
    Case("DRA-101", SPOT, [encrypted(KEY)], edits=THEIRS_WITH_KEY),
    Case("DRA-101", SPOT, [encrypted(KEY.rpartition("/")[2])], edits=THEIRS_WITH_KEY),
    Case("DRA-101", SPOT, [encrypted(f"{KEY[:-1]}e")], f"{LINKS}.1.kms_key", "warning", edits=THEIRS_WITH_KEY),
    Case("DRA-101", SPOT, [encrypted(ALIAS)], f"{LINKS}.1.kms_key", "warning", edits=THEIRS),
    Case("DRA-101", SPOT, [encrypted(ALIAS)], f"{LINKS}.1.kms_key", "unknown", edits=THEIRS_WITH_KEY),
    Case("DRA-101", SPOT, [encrypted(ALIAS)], edits=THEIRS_WITH_ALIAS),
    Case("DRA-101", SPOT, [encrypted(KEY)], f"{LINKS}.1.kms_key", "unknown", edits=THEIRS_WITH_ALIAS),
    Case("S3-102", SPOT, EMPTY),
    Case("S3-102", SPOT, [no_bucket("404"), no_bucket("403"), bucket("us-east-1")], "name", "unknown"),
    Case("CFG-101", SPOT, [*EMPTY, *nothing_left()]),
    Case("CFG-101", SPOT, [no_bucket("403"), *[no_bucket("404")] * 2, *nothing_left()]),
    Case("CFG-101", SPOT, [*tagged_bucket(FOREIGN), *EMPTY[1:], *nothing_left()], "name", "warning"),
    Case("CFG-101", SPOT, [bucket("us-east-1"), UNTAGGED, *EMPTY[1:], *nothing_left()], "name", "warning"),
    Case("CFG-101", SPOT, [*EMPTY, *nothing_left()[1:], *repository_there(FOREIGN)], "name", "warning"),
    Case("CFG-101", SPOT, [*EMPTY, *nothing_left()[::2], *queue_there({})], "name", "warning"),
    Case("CFG-101", SPOT, [*EMPTY, *nothing_left()[:2], *logs_there(FOREIGN)], "name", "warning"),
    Case("CFG-101", SPOT, [*EMPTY, *nothing_left()[:2], *second_page(*logs_there(FOREIGN))], "name", "warning"),
    Case(
        "CFG-101",
        SPOT,
        [*tagged_bucket(TAGGED) * 3, *repository_there(TAGGED), *queue_there(TAGGED), *logs_there(TAGGED)],
    ),
    Case("CFG-101", SPOT, [*nothing_left()[1:]], edits={**BUCKETS, **REPOSITORY}),
    Case("ECR-101", SPOT, [("ecr", "describe_repositories", {"repositories": []})], edits=REPOSITORY),
    Case("ECR-101", SPOT, [NO_REPOSITORY], "repository.existing", edits=REPOSITORY),
    Case("EKS-101", EKS, [versions(v1_35="STANDARD_SUPPORT")]),
    Case("EKS-101", EKS, [versions(v1_35="EXTENDED_SUPPORT")], "eks.version"),
    Case("EKS-101", EKS, [versions(v1_35="EXTENDED_SUPPORT")], "eks.version", "warning", edits=EXTENDED),
    Case("EKS-101", EKS, [versions(v1_35="UNSUPPORTED", v1_36="STANDARD_SUPPORT")], "eks.version"),
    Case("EKS-101", EKS, [versions(v1_36="STANDARD_SUPPORT")], "eks.version"),
    Case("EKS-101", EKS, second_page(versions(v1_35="STANDARD_SUPPORT"))),
    Case("EC2-104", SPOT, [facts()]),
    Case("EC2-104", SPOT, [facts(efa=8)], TYPE, "warning"),
    Case("EC2-104", SPOT, [facts(cards=8)], TYPE, "warning"),
    Case("EC2-104", SPOT, [facts(vcpus=96)], TYPE, "warning"),
    Case("EKS-102", EKS, [addon()] * ADDONS),
    Case("EKS-102", EKS, [*[addon()] * (ADDONS - 1), addon("")], "eks.version"),
    Case("EKS-102", EKS, [NO_ADDON, *[addon()] * (ADDONS - 1)], "eks.version"),
    Case("NET-109", SPOT, endpoint_services(), edits=CLOSED),
    Case("NET-109", SPOT, []),
    Case("NET-109", SPOT, endpoint_services("com.amazonaws.us-east-1.ssm"), "network.closed", edits=CLOSED),
    Case("NET-109", SPOT, endpoint_services(zone="us-east-1a"), "network.closed", edits=CLOSED),
    Case("EKS-102", EKS, [eks(), *[addon()] * 2], edits=WITH_ADDONS),
    Case("EKS-102", EKS, [eks(), addon(), addon("")], "eks.existing.name", edits=WITH_ADDONS),
    Case("EKS-103", EKS, [eks()], edits=JOINED),
    Case("EKS-103", EKS, [eks(accessConfig={"authenticationMode": "API_AND_CONFIG_MAP"})], edits=JOINED),
    Case("EKS-103", EKS, [("eks", "describe_cluster", "ResourceNotFoundException")], "eks.existing.name", edits=JOINED),
    Case("EKS-103", EKS, [eks(status="UPDATING")], "eks.existing.name", edits=JOINED),
    Case("EKS-103", EKS, [eks(accessConfig={"authenticationMode": "CONFIG_MAP"})], "eks.existing.name", edits=JOINED),
    Case("EKS-103", EKS, [eks(vpcId="vpc-99999999")], "eks.existing.name", edits=JOINED),
    Case("EKS-103", EKS, [BEING_MADE], "eks.existing.name", edits=JOINED),
    Case("EKS-103", EKS, [CONNECTED], "eks.existing.name", edits=JOINED),
    Case("EKS-104", EKS, [eks()], edits=JOINED),
    Case("EKS-104", EKS, [eks(version="1.29")], "eks.existing.name", "warning", edits=JOINED),
    Case("EKS-105", EKS, [eks()], edits=JOINED),
    Case("EKS-105", EKS, [eks(endpointPrivateAccess=False)], "eks.existing.name", "warning", edits=JOINED),
    Case(
        "EKS-105",
        EKS,
        [eks(endpointPrivateAccess=False)],
        "eks.existing.name",
        edits={**JOINED, "network.closed": True},
    ),
    Case("EKS-106", EKS, [eks(), addons_of(*NEEDED)], edits=JOINED),
    Case("EKS-106", EKS, [eks(), addons_of("vpc-cni", "kube-proxy")], edits=WITH_ADDONS),
    Case("EKS-106", EKS, [eks(), addons_of(*NEEDED), *[made_by(TAGGED_EKS)] * 2], edits=WITH_ADDONS),
    Case("EKS-106", EKS, [eks(), addons_of(*NEEDED), *[made_by({})] * 2], "eks", edits=WITH_ADDONS),
    Case("EKS-106", EKS, [eks(), addons_of(*NEEDED[1:])], "eks.existing.addons", "warning", edits=JOINED),
    Case("EKS-107", EKS, [eks(), entry({}, absent=True)], edits=ADMITTED),
    Case("EKS-107", EKS, [eks(accessConfig={"authenticationMode": "CONFIG_MAP"})], edits=ADMITTED),
    Case("EKS-107", EKS, [eks(), entry(TAGGED_EKS)], edits=ADMITTED),
    Case("EKS-107", EKS, [eks(), entry({})], "access.admin_roles.0", edits=ADMITTED),
    Case("OBS-101", EKS, [identity_center("ACTIVE")], edits=MANAGED),
    Case("OBS-101", EKS, [identity_center()], "observability.grafana", "warning", edits=MANAGED),
    Case("OBS-101", EKS, [identity_center("DELETE_IN_PROGRESS")], "observability.grafana", "warning", edits=MANAGED),
    Case("IAM-101", EKS, [("iam", "get_role", {"Role": PLATFORM})]),
    Case("IAM-101", EKS, [], edits=ELSEWHERE),
    Case("IAM-101", EKS, [("iam", "get_role", "NoSuchEntity")], "access.admin_roles.0"),
    Case("IAM-102", SPOT, [("iam", "get_policy", {"Policy": {"PolicyName": "boundary"}})], edits=BOUNDED),
    Case("IAM-102", SPOT, [("iam", "get_policy", "NoSuchEntity")], "access.permissions_boundary", edits=BOUNDED),
    Case("IAM-103", SPOT, [role("ec2"), profile(NODE_ROLE)], edits=GIVEN),
    Case("IAM-103", SPOT, [role("sagemaker"), profile(NODE_ROLE)], "access.node_role", edits=GIVEN),
    Case("IAM-103", SPOT, [role("ec2"), profile()], "access.instance_profile", edits=GIVEN),
    Case("IAM-103", SPOT, [role("ec2"), NO_PROFILE], "access.instance_profile", edits=GIVEN),
    Case("IAM-103", SLURM, [role("sagemaker")], edits=GIVEN_ROLE),
    Case("IAM-103", SLURM, [("iam", "get_role", "NoSuchEntity")], "access.node_role", edits=GIVEN_ROLE),
    Case("IAM-103", EKS, [role("eks")], edits=GIVEN_EKS_ROLE),
    Case("IAM-103", EKS, [role("ec2")], "eks.cluster_role", edits=GIVEN_EKS_ROLE),
    Case("IAM-103", EKS, [role("pods.eks", "sts:AssumeRole", "sts:TagSession")], edits=GIVEN_POD_ROLE),
    Case("IAM-103", EKS, [role("pods.eks", "sts:AssumeRole")], "eks.operator_role", edits=GIVEN_POD_ROLE),
    Case("IAM-105", SPOT, within_boundary(*["allowed"] * STATEMENTS), edits=BOUNDED),
    Case("IAM-105", SPOT, [("iam", "get_policy", "NoSuchEntity")], edits=BOUNDED),
    Case("IAM-105", SPOT, within_boundary()[:2], edits={**BOUNDED, **GIVEN}),
    Case(
        "IAM-105",
        SPOT,
        within_boundary(*["allowed"] * (STATEMENTS - 1), "implicitDeny"),
        "access.permissions_boundary",
        "warning",
        edits=BOUNDED,
    ),
    Case("IAM-104", SPOT, [simulated("allowed")] * STATEMENTS, edits=GIVEN),
    Case(
        "IAM-104",
        SPOT,
        [*[simulated("allowed")] * (STATEMENTS - 1), simulated("implicitDeny")],
        "access.node_role",
        "warning",
        edits=GIVEN,
    ),
]
