"""FSX, DRA, S3, ECR 1xx: existing file systems, buckets and repositories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network
from typing import Any

from botocore.exceptions import ClientError

from infra.aws import Aws, answered
from infra.catalog.efs import EFS_PORT as NFS_PORT
from infra.catalog.efs import GUIDE
from infra.catalog.fsx import LUSTRE_GUIDE, LUSTRE_PORTS
from infra.config import ClusterSpec, ExistingLustre
from infra.finding import Problems, finding
from infra.plan.place import COST_TAG, host
from infra.plan.storage.associations import S3_OWN_KEY, AssociationPlan, association_key
from infra.plan.storage.buckets import made_buckets
from infra.plan.storage.home import SOURCE
from infra.preflight.online.answers import missing, unknown
from infra.preflight.online.network import subnet
from infra.preflight.rule import Context, Family
from infra.preflight.rules.buckets import KEYS, existing_buckets
from lustrain.problem import Problem

PORTS = sorted({port for ends in LUSTRE_PORTS for port in ends})
HERE = "storage.lustre.existing"
HOMES = "storage.home.existing"
RULES = Family()


@RULES.add(
    "FSX-101",
    "An existing Lustre is there, available, and what the spec says: names, EFA, VPC and zone.",
    f"{LUSTRE_GUIDE}/efa-file-systems.html",
    permission="fsx:DescribeFileSystems",
)
def existing_lustre_facts(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    existing = spec.storage.lustre.existing if spec.storage.lustre else None
    if existing is None:
        return
    answer = answered("FileSystemNotFound", aws.fsx.describe_file_systems, FileSystemIds=[existing.id])
    if answer is None:
        yield missing(f"{HERE}.id", existing.id)
        return
    yield from _described(existing, dict(answer["FileSystems"][0]))
    yield from _reached(spec, aws, dict(answer["FileSystems"][0]))


def _described(existing: ExistingLustre, there: dict[str, Any]) -> Problems:
    if there.get("Lifecycle") not in ("AVAILABLE", "UPDATING"):
        yield finding(f"{HERE}.id", f"is {there.get('Lifecycle')}", "use one that is AVAILABLE")
    lustre = there.get("LustreConfiguration", {})
    facts = {
        "dns_name": (existing.dns_name, there.get("DNSName", existing.dns_name)),
        "mount_name": (existing.mount_name, lustre.get("MountName", existing.mount_name)),
        "efa": (existing.efa, lustre.get("EfaEnabled", False)),
    }
    for key, (given, true) in facts.items():
        if given != true:
            yield finding(
                f"{HERE}.{key}",
                f"{given}, but AWS says {true}",
                f"set {str(true).lower() if key == 'efa' else true}",
            )


def _reached(spec: ClusterSpec, aws: Aws, there: dict[str, Any]) -> Problems:
    network = spec.network.existing
    if network and there.get("VpcId") != network.vpc_id:
        message = f"lies in {there.get('VpcId')}, the nodes in {network.vpc_id}"
        yield finding(f"{HERE}.id", message, "use one of the nodes' VPC")
    lies = subnet(aws, there["SubnetIds"][0]) if there.get("SubnetIds") else None
    if lies and lies["AvailabilityZoneId"] != spec.zone_id:
        zone = lies["AvailabilityZoneId"]
        message = f"lies in {zone}, the cluster in {spec.zone_id}: every byte crosses zones, and EFA does not"
        yield finding(f"{HERE}.id", message, f"use one in {spec.zone_id}, or set zone_id: {zone}")


@RULES.add(
    "FSX-103",
    "An existing EFS is there and available, with a mount target in the VPC and each zone of the nodes.",
    f"{GUIDE}/mounting-fs-mount-cmd-dns-name.html",
    permission="elasticfilesystem:DescribeMountTargets",
)
def existing_efs(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    homes = spec.storage.home
    if homes is None or homes.existing is None or homes.type != "efs":
        return
    named = homes.existing.id
    answer = answered("FileSystemNotFound", aws.efs.describe_file_systems, FileSystemId=named)
    if answer is None:
        yield missing(f"{HOMES}.id", named)
        return
    state = answer["FileSystems"][0]["LifeCycleState"]
    if state not in ("available", "updating"):
        yield finding(f"{HOMES}.id", f"is {state}", "use one that is available")
        return
    targets = aws.efs.describe_mount_targets(FileSystemId=named)["MountTargets"]
    network = spec.network.existing
    if network and (
        strange := sorted({vpc for one in targets if (vpc := one.get("VpcId")) not in (None, network.vpc_id)})
    ):
        yield finding(
            f"{HOMES}.id", f"has its mount targets in {', '.join(strange)}, the nodes are in {network.vpc_id}", SAME_VPC
        )
        return
    zones = {one.get("AvailabilityZoneId") for one in targets if one["LifeCycleState"] in ("available", "updating")}
    for zone in (spec.zone_id, *spec.other_zones):
        if zone not in zones:
            message = f"has no available mount target in {zone}, where nodes cannot resolve its name"
            yield finding(
                f"{HOMES}.id", message, f"make one: aws efs create-mount-target --file-system-id {named} --subnet-id …"
            )


@RULES.add(
    "FSX-104",
    "An existing OpenZFS for homes is there, available, and in the VPC of the nodes.",
    SOURCE,
    permission="fsx:DescribeFileSystems",
)
def existing_openzfs(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    homes = spec.storage.home
    if homes is None or homes.existing is None or homes.type != "openzfs":
        return
    named, network = homes.existing.id, spec.network.existing
    answer = answered("FileSystemNotFound", aws.fsx.describe_file_systems, FileSystemIds=[named])
    there: Any = answer["FileSystems"][0] if answer else {}
    if there.get("FileSystemType") != "OPENZFS":
        yield finding(f"{HOMES}.id", f"{named} is no OpenZFS in this account and region", "correct it, or set type")
    elif there.get("Lifecycle") not in ("AVAILABLE", "UPDATING"):
        yield finding(f"{HOMES}.id", f"is {there.get('Lifecycle')}", "use one that is AVAILABLE")
    elif network and there.get("VpcId") != network.vpc_id:
        message = f"lies in {there.get('VpcId')}, the nodes in {network.vpc_id}"
        yield finding(f"{HOMES}.id", message, "use one of the nodes' VPC")


SAME_VPC = "use one of the nodes' VPC: a file system has mount targets in one VPC only"


@RULES.add(
    "FSX-102",
    "An existing file system's security group is of the nodes' VPC and lets them in (Lustre: 988, 1018 to 1023; homes: 2049).",
    f"{LUSTRE_GUIDE}/limit-access-security-groups.html",
    permission="ec2:DescribeSecurityGroups",
)
def open_ports(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    lustre, homes = spec.storage.lustre, spec.storage.home
    if lustre and lustre.existing:
        yield from lets_in(spec, aws, f"{HERE}.security_group_id", lustre.existing.security_group_id, PORTS)
    if homes and homes.existing:
        yield from lets_in(spec, aws, f"{HOMES}.security_group_id", homes.existing.security_group_id, [NFS_PORT])


def lets_in(spec: ClusterSpec, aws: Aws, path: str, group_id: str, ports: Sequence[int]) -> Problems:
    """Report a security group that is not of the nodes' VPC, or does not admit them at these ports."""
    describe = aws.ec2.describe_security_groups
    answer = answered("InvalidGroup.NotFound", describe, GroupIds=[group_id])
    if answer is None:
        yield missing(path, group_id)
        return
    group = answer["SecurityGroups"][0]
    if spec.network.existing and group.get("VpcId") != spec.network.existing.vpc_id:
        yield finding(path, f"is of {group.get('VpcId')}, the nodes of {spec.network.existing.vpc_id}", "correct it")
    yield from _closed_ports(spec, aws, group.get("IpPermissions", []), path, ports)


def _closed_ports(spec: ClusterSpec, aws: Aws, rules: Sequence[Any], path: str, ports: Sequence[int]) -> Problems:
    """Report ports at which no rule admits the nodes, by an address range that holds their subnet or by the cluster's own
    group, which exists after `pulumi up`."""
    subnets = tuple(_node_subnets(spec, aws))
    by_port = {port: [rule for rule in rules if _opens(rule, port)] for port in ports}
    closed = {port: opening for port, opening in by_port.items() if not _ranges_hold(opening, subnets)}
    if closed:
        ours = _cluster_groups(spec, aws, rules)
        closed = {port: opening for port, opening in closed.items() if not _groups_of(opening) & ours}
    if not closed:
        return
    listing = [item for opening in closed.values() for rule in opening for item in rule.get("PrefixListIds", [])]
    prefix_lists = sorted({item["PrefixListId"] for item in listing})
    if prefix_lists:
        yield unknown(
            path, f"the entries of {', '.join(prefix_lists)}", f"see that they hold {', '.join(map(str, subnets))}"
        )
        return
    message = f"does not let the nodes in at {', '.join(map(str, closed))}"
    needed = "988 and 1018-1023" if ports == PORTS else ", ".join(map(str, ports))
    yield finding(path, message, f"allow tcp {needed} from {', '.join(map(str, subnets))}")


def _node_subnets(spec: ClusterSpec, aws: Aws) -> Iterator[IPv4Network]:
    """Yield address ranges of the nodes; a subnet that does not exist is NET-102's."""
    existing = spec.network.existing
    if existing is None:
        yield IPv4Network(spec.network.cidr)
        return
    for named in (existing.compute_subnet_id, *existing.zone_subnet_ids.values()):
        if there := subnet(aws, named):
            yield IPv4Network(there["CidrBlock"])


def _cluster_groups(spec: ClusterSpec, aws: Aws, rules: Sequence[Any]) -> frozenset[str]:
    """Return the nodes' groups that `rules` name: further ones of the spec, and those that this cluster made."""
    further = frozenset(spec.network.security_group_ids)
    others = sorted(_groups_of(rules) - further)
    if not others:
        return further
    filters: Any = [{"Name": "group-id", "Values": others}, {"Name": f"tag:{COST_TAG}", "Values": [spec.name]}]
    pages = aws.ec2.get_paginator("describe_security_groups").paginate(Filters=filters)
    return further | {group["GroupId"] for page in pages for group in page["SecurityGroups"]}


def _opens(rule: Any, port: int) -> bool:
    if rule.get("IpProtocol") == "-1":
        return True
    return rule.get("IpProtocol") == "tcp" and port in range(rule.get("FromPort", 0), rule.get("ToPort", 0) + 1)


def _groups_of(rules: Sequence[Any]) -> frozenset[str]:
    """Return the ids of the groups from which the rules let traffic in."""
    return frozenset(
        pair["GroupId"] for rule in rules for pair in rule.get("UserIdGroupPairs", []) if "GroupId" in pair
    )


def _ranges_hold(rules: Sequence[Any], subnets: Sequence[IPv4Network]) -> bool:
    """Return whether each subnet lies in an address range from which the rules let traffic in."""
    ranges = [IPv4Network(item["CidrIp"], strict=False) for rule in rules for item in rule.get("IpRanges", [])]
    return all(any(subnet.subnet_of(block) for block in ranges) for subnet in subnets)


@RULES.add(
    "S3-101",
    "Buckets that the spec names are there, yours to read, and in the region.",
    "https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html",
    permission="s3:ListBucket",
)
def buckets(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    mounted = {f"storage.s3_mounts.{index}.bucket": one for index, one in enumerate(spec.storage.s3_mounts)}
    paths: dict[tuple[str, str], str] = {}
    for path, name in existing_buckets(spec):
        wanted = mounted[path].region if path in mounted else None
        paths.setdefault((name, wanted or aws.region), path)
    for (name, wanted), path in paths.items():
        status, region = _head(aws, name)
        if status == 404:
            yield finding(path, f"bucket {name} does not exist", "make it, correct it, or leave the key out")
        elif status == 403:
            yield unknown(path, f"{name} is not yours to look at", "allow s3:ListBucket on it")
        elif region and region != wanted and path in mounted:
            message = f"{name} is in {region}, the mount looks for it in {wanted}"
            fix = (
                "remove the key" if region == aws.region else f"set region: {region}, and pay for what crosses regions"
            )
            yield finding(f"{path.removesuffix('bucket')}region", message, fix)
        elif region and region != wanted:
            message = f"{name} is in {region}, the cluster in {aws.region}: FSx links no bucket of another region"
            yield finding(path, message, "use a bucket of the region")


@RULES.add(
    "DRA-101",
    "A linked bucket that the stack does not make is under S3's own keys, or under the KMS key that its association names.",
    f"{LUSTRE_GUIDE}/s3-server-side-encryption-support.html",
    level="warning",
    permission="s3:GetEncryptionConfiguration",
)
def key_of_linked_bucket(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    made = made_buckets(spec, context.place)
    for index, plan in enumerate(context.plan.associations):
        key = None if plan.bucket in made else _kms_key(aws, plan.bucket)
        if key and _bare(key) != _bare(plan.kms_key or ""):
            yield _other_key(association_key(index, "kms_key"), context, plan, key)


def _other_key(path: str, context: Context, plan: AssociationPlan, key: str) -> Problem:
    """Return the finding where a bucket is under another key than its association names; an alias cannot be compared."""
    bare, wanted = _bare(key), _bare(plan.kms_key or "")
    if bare.startswith("alias/"):
        fix = f"`aws kms describe-key --key-id {key} --query KeyMetadata.Arn` shows its key's ARN: set kms_key to that"
        if wanted:
            return unknown(path, f"{plan.bucket} is under {key}, an alias, perhaps of {plan.kms_key}", fix)
        return finding(path, f"{plan.bucket} is under {key}, an alias: {READ_ONLY_IF}", fix)
    arn = key if key.startswith("arn:") else context.place.arn("kms", f"key/{bare}")
    if wanted.startswith("alias/"):
        return unknown(
            path, f"{plan.bucket} is under {arn}, perhaps not the key of {plan.kms_key}", f"set kms_key: {arn}"
        )
    named = f", not {plan.kms_key}" if wanted else ""
    fix = f"set kms_key: {arn}; rule DRA-010 then prints what its policy needs"
    return finding(path, f"{plan.bucket} is under {arn}{named}: {READ_ONLY_IF}", fix)


READ_ONLY_IF = "FSx reads it only if the policy of that key says so"


def _bare(key: str) -> str:
    """Return the id of a key, or the name of an alias, without the rest of its ARN: S3 returns what the bucket's owner gave it
    (https://docs.aws.amazon.com/AmazonS3/latest/API/API_ServerSideEncryptionByDefault.html). A bare id is of the account that
    asks."""
    return key.rpartition(":")[2].removeprefix("key/")


def _kms_key(aws: Aws, bucket: str) -> str | None:
    """Return the customer's key that a bucket is encrypted with by default; None with S3's own keys, and where there is no such
    bucket, which S3-101 reports."""
    absent = ("ServerSideEncryptionConfigurationNotFound", "NoSuchBucket")
    answer = answered(absent, aws.s3.get_bucket_encryption, Bucket=bucket)
    rules = answer["ServerSideEncryptionConfiguration"]["Rules"] if answer else []
    keys = [rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID", "") for rule in rules]
    return next((key for key in keys if key and not key.endswith(S3_OWN_KEY)), None)


@RULES.add(
    "S3-102",
    "The buckets that would be made are not somebody else's: names are one for all accounts.",
    "https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html",
    level="unknown",
    permission="s3:ListBucket",
)
def bucket_taken(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    names = context.plan.bucket_names
    for key in KEYS:
        if getattr(spec.buckets, key) is None and _head(aws, getattr(names, key))[0] == 403:
            message = f"{getattr(names, key)} is not yours to look at: another account's, or a permission is missing"
            yield unknown("name", message, "choose another name, or allow s3:ListBucket")


@RULES.add(
    "ECR-101",
    "An existing image repository is there.",
    "https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_DescribeRepositories.html",
    permission="ecr:DescribeRepositories",
)
def repository(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    registry, _, name = (spec.repository.existing or "").partition("/")
    named = host(registry, "dkr.ecr")
    if not named or not name:
        return
    if named.region != aws.region:
        yield unknown("repository.existing", f"it is in {named.region}", "replicate it to the region")
        return
    describe = aws.ecr.describe_repositories
    if answered("RepositoryNotFound", describe, registryId=named.name, repositoryNames=[name]) is None:
        message = f"repository {name} does not exist in account {named.name}"
        yield finding("repository.existing", message, "correct it, or remove the key and one is made")


def _head(aws: Aws, name: str) -> tuple[int, str]:
    """HTTP status and region of a bucket; S3 tells the region of buckets that it does not let you see, too."""
    try:
        answer: Any = aws.s3.head_bucket(Bucket=name)
    except ClientError as error:
        answer = error.response
    about = answer["ResponseMetadata"]
    region = answer.get("BucketRegion") or about.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
    return int(about["HTTPStatusCode"]), str(region)
