"""EC2 1xx: what AWS sells in the zone, what the account may run, and whether a launch would go through."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from botocore.exceptions import ClientError

from infra.aws import DENIED, Aws, answered, code_of
from infra.catalog.refresh import summary
from infra.config import MONITOR, ClusterSpec, Group
from infra.finding import Problems, finding
from infra.plan.nodes.auto_scaling import CANONICAL, image
from infra.plan.nodes.capacity import market
from infra.plan.nodes.machine import PATHS
from infra.preflight.online.answers import quotas_of, unknown
from infra.preflight.rule import (
    Context,
    Family,
    GroupType,
    group_types,
    groups,
    known_machines,
)
from infra.preflight.rules.instances import wrong_facts
from lustrain.problem import without_page

QUOTAS = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-quotas.html"
CUSTOM_IMAGE = "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterInstanceGroupSpecification.html"
ERRORS = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html"
RULES = Family()


@RULES.add(
    "EC2-101",
    "EC2 offers the instance types in the cluster's zone.",
    "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypeOfferings.html",
    permission="ec2:DescribeInstanceTypeOfferings",
)
def offered(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    types: list[Any] = sorted({kind.group.ec2_type for kind in group_types(spec) if kind.facts})
    zones: dict[str, set[str]] = defaultdict(set)
    pages = aws.ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone-id", Filters=[{"Name": "instance-type", "Values": types}]
    )
    for page in pages if types else ():
        for offering in page["InstanceTypeOfferings"]:
            zones[offering["InstanceType"]].add(offering["Location"])
    for kind in group_types(spec):
        group = kind.group
        offering_zones = zones[group.ec2_type]
        if kind.facts and (zone := spec.zone_of(group)) not in offering_zones:
            message = f"{group.ec2_type} is not offered in {zone}"
            fix = (
                f"take {' or '.join(sorted(offering_zones))}"
                if offering_zones
                else f"take another type: none in {aws.region}"
            )
            # HyperPod's machines lie in AWS's own account; what EC2 offers there is a sign, no more.
            level = "warning" if spec.hyperpod else "error"
            yield finding(kind.key, message, fix, level=level)


@RULES.add(
    "EC2-102",
    "The account's vCPU quotas hold all nodes that are on demand or spot.",
    QUOTAS,
    permission="servicequotas:ListServiceQuotas",
)
def vcpu_quota(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    machines = [*(spec.all_groups if spec.backend == "ec2" else ()), *filter(None, [spec.monitor])]
    wanted = [vcpus for group in machines for vcpus in _vcpus(spec, group)]
    if not wanted:
        return
    quotas = quotas_of(aws, "ec2")
    # Any of a group's types may get all of its nodes: of those that share a quota the largest counts.
    most: dict[tuple[str, str], int] = defaultdict(int)
    for group, family, spot, vcpus in wanted:
        name = quota_of(family, spot, list(quotas))
        if name is None:
            sold = "spot" if spot else "on demand"
            yield unknown("groups", f"no quota for {family} {sold} is listed", "look at Service Quotas, Amazon EC2")
        else:
            most[name, group] = max(most[name, group], vcpus)
    by_quota: dict[str, int] = defaultdict(int)
    for (name, _), vcpus in most.items():
        by_quota[name] += vcpus
    for name, vcpus in by_quota.items():
        if vcpus > quotas[name]:
            message = f"{vcpus} vCPUs, but the quota `{name}` is {quotas[name]:g}"
            yield finding("groups", message, f"ask for {vcpus} or more in Service Quotas, {aws.region}")


def _vcpus(spec: ClusterSpec, group: Group) -> Iterator[tuple[str, str, bool, int]]:
    """Yield the group's name, a type's family, whether spot, and the vCPUs that the group may have of it; none for a block,
    which counts against no quota."""
    mode = group.capacity.mode
    base = group.capacity.on_demand_base if mode == "spot" else group.count
    for kind in group.ec2_types if mode != "capacity-block" else ():
        facts, family = spec.node_of(group.of_type(kind)), re.split(r"[.-]", kind)[0]
        for spot, count in ((False, base), (True, group.count - base)):
            if facts and count:
                yield group.name, family, spot, count * facts.vcpus


@RULES.add(
    "HYP-101",
    "SageMaker's quotas `… for cluster usage` hold all on-demand nodes of the HyperPod cluster.",
    "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-prerequisites.html",
    permission="servicequotas:ListServiceQuotas",
)
def cluster_quota(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    wanted: dict[str, int] = defaultdict(int)
    for _, group in groups(spec):
        if spec.hyperpod and group.capacity.mode == "on-demand":
            wanted[group.hyperpod_type] += group.count
    quotas = quotas_of(aws, "sagemaker") if wanted else {}
    for kind, count in wanted.items():
        name = f"{kind} for cluster usage"
        if name not in quotas:
            yield unknown("groups", f"no quota `{name}` is listed", "look at Service Quotas, Amazon SageMaker")
        elif count > quotas[name]:
            message = f"{count} x {kind}, but the quota `{name}` is {quotas[name]:g}"
            yield finding("groups", message, f"ask for {count} or more in Service Quotas, {aws.region}")


@RULES.add(
    "EC2-103", "A dry run of RunInstances goes through for each EC2 group.", ERRORS, permission="ec2:RunInstances"
)
def dry_run(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for kind in group_types(spec):
        if spec.backend != "ec2" or not kind.group.count or not kind.facts or kind.facts.architecture not in CANONICAL:
            continue
        try:
            aws.ec2.run_instances(**launch(spec, kind.group), DryRun=True)
        except ClientError as error:
            yield from _answer(kind, error)


def _answer(kind: GroupType, error: ClientError) -> Problems:
    path, group = kind.path, kind.group
    code = code_of(error)
    text = without_page(str(error.response.get("Error", {}).get("Message", "")))
    if code == "DryRunOperation":
        return
    if code in DENIED or code in UNDECIDED:
        yield unknown(path, f"{code} {text}", UNDECIDED.get(code, "allow ec2:RunInstances"))
        return
    key, meaning, fix = PLAIN_WORDS.get(code, ("", f"EC2 would answer {code}: {text}", "see the message"))
    level = "warning" if code in MAY_PASS else "error"
    message = f"{group.count} x {group.ec2_type}: {meaning}"
    here = kind.key if key == "instance_type" else f"{path}.{key}" if key else path
    yield finding(here, message, fix, level=level)


@RULES.add(
    "EC2-104",
    "What is known here about the instance types is what AWS says today.",
    "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypes.html",
    level="warning",
    permission="ec2:DescribeInstanceTypes",
)
def facts(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    types: list[Any] = sorted({kind.group.ec2_type for kind in group_types(spec) if kind.facts})
    if not types:
        return
    records = aws.ec2.describe_instance_types(InstanceTypes=types)["InstanceTypes"]
    today: dict[str, Any] = {record.get("InstanceType", ""): record for record in records}
    for kind in group_types(spec):
        record, facts = today.get(kind.group.ec2_type), spec.type_of(kind.group)
        if record and facts:
            now = summary(record)
            cards = sum(repeated for repeated, *_ in now["cards"])
            if (now["efa"], cards, now["vcpus"]) != (facts.efa, len(facts.cards), facts.vcpus):
                message = f"{now['efa']} EFA on {cards} cards, known here {facts.efa} on {len(facts.cards)}"
                yield wrong_facts(spec, kind.key, kind.group, message)


@RULES.add(
    "EC2-105",
    "An image exists, of the type's architecture, and for HyperPod unencrypted, with one volume, yours or its own.",
    "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeImages.html",
    permission="ec2:DescribeImages",
)
def image_rule(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, group, facts in known_machines(spec):
        if not group.image_id:
            continue
        answer = answered("InvalidAMIID", aws.ec2.describe_images, ImageIds=[group.image_id])
        images = answer["Images"] if answer else []
        if not images:
            message = f"{group.image_id} is not there, or not yours to use, in {aws.region}"
            yield finding(f"{path}.image_id", message, "copy it to the region, share it, or remove the key")
        elif images[0].get("Architecture") != facts.architecture:
            message = f"{group.image_id} is {images[0].get('Architecture')}, {group.ec2_type} {facts.architecture}"
            yield finding(f"{path}.image_id", message, "take an image of the type's architecture")
        elif spec.hyperpod and path != PATHS[MONITOR]:
            yield from _for_hyperpod(path, group, images[0], context)


def _for_hyperpod(path: str, group: Group, there: Any, context: Context) -> Problems:
    volumes = [mapping["Ebs"] for mapping in there.get("BlockDeviceMappings", []) if "Ebs" in mapping]
    wrong = {
        "is encrypted": any(volume.get("Encrypted") for volume in volumes),
        f"has {len(volumes)} volumes": len(volumes) > 1,
        f"is of account {there.get('OwnerId')}": not there.get("Public")
        and context.account is not None
        and there.get("OwnerId") not in (None, context.account),
    }
    for what in (what for what, is_so in wrong.items() if is_so):
        message = f"{group.image_id} {what}, which HyperPod does not take"
        fix = "copy it into this account, unencrypted and with its root volume alone"
        yield finding(f"{path}.image_id", message, fix, source=CUSTOM_IMAGE)


@RULES.add(
    "EC2-107",
    "AWS names an image for each group that names none.",
    "https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html",
    permission="ssm:GetParameter",
)
def default_image(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, group, facts in known_machines(spec):
        theirs = spec.hyperpod and path != PATHS[MONITOR]
        if theirs or group.image_id or facts.architecture not in CANONICAL:
            continue
        parameter = image(spec, group, facts).parameter
        if answered("ParameterNotFound", aws.ssm.get_parameter, Name=str(parameter)) is None:
            message = f"AWS names no image for {group.ec2_type} in {aws.region}: {parameter} does not exist"
            yield finding(f"{path}.image_id", message, "set it to an image of yours")


@RULES.add(
    "EC2-106",
    "The SSH key pair exists.",
    "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeKeyPairs.html",
    permission="ec2:DescribeKeyPairs",
)
def key_pair(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    name = spec.access.ssh_key
    if spec.backend != "ec2" or name is None:
        return
    found = aws.ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [name]}])["KeyPairs"]
    if not found:
        yield finding(
            "access.ssh_key", f"key pair {name} does not exist in {aws.region}", "import it, or remove the key"
        )


PLAIN_WORDS = {
    "InstanceLimitExceeded": ("count", "the account's quota is too small", "ask for more in Service Quotas"),
    "VcpuLimitExceeded": ("count", "the account's vCPU quota is too small", "ask for more in Service Quotas"),
    "MaxSpotInstanceCountExceeded": (
        "count",
        "the account's spot quota is too small",
        "ask for more in Service Quotas",
    ),
    "InsufficientInstanceCapacity": (
        "capacity",
        "EC2 has no capacity in the zone now",
        "try later, elsewhere, or reserve",
    ),
    "InsufficientFreeAddressesInSubnet": ("count", "the subnet has too few addresses", "take a larger subnet"),
    "Unsupported": ("instance_type", "EC2 does not launch that in this zone", "take another zone or type"),
    "UnsupportedOperation": (
        "instance_type",
        "EC2 does not launch this type that way",
        "take another zone, type or mode",
    ),
    "InvalidSubnetID.NotFound": ("", "the subnet is not there", "correct network.existing.compute_subnet_id"),
    "InvalidCapacityReservationId.NotFound": ("capacity.reservation", "the reservation is not there", "correct it"),
    "ReservationCapacityExceeded": ("capacity", "the reservation is used up", "lower count, or enlarge it"),
}
"""What an answer of EC2 means, by its code: key, words, fix (ERRORS)."""
MAY_PASS = frozenset({"InsufficientInstanceCapacity"})
UNDECIDED = {
    "VPCIdNotSpecified": "set network.existing, or make a default VPC: a dry run needs a subnet that is there",
    "MissingInput": "set network.existing: a dry run needs a subnet that is there",
}


def launch(spec: ClusterSpec, group: Group) -> dict[str, Any]:
    """Return RunInstances as far as it is known before anything is made."""
    facts = spec.node_of(group)
    assert facts is not None, "only called for known types"
    wanted = market(group, facts)
    picture = image(spec, group, facts)
    request: dict[str, Any] = {
        "InstanceType": group.ec2_type,
        "MinCount": group.count,
        "MaxCount": group.count,
        "ImageId": picture.id or f"resolve:ssm:{picture.parameter}",
    }
    if existing := spec.network.existing:
        request["SubnetId"] = existing.zone_subnet_ids.get(spec.zone_of(group), existing.compute_subnet_id)
    if wanted.type:
        request["InstanceMarketOptions"] = {"MarketType": wanted.type}
    if wanted.reservation:
        request["CapacityReservationSpecification"] = {
            "CapacityReservationTarget": {"CapacityReservationId": wanted.reservation}
        }
    return request


STORAGE = {"im": "i", "is": "i"}
"""Families whose quota goes by another letter than their own (QUOTAS)."""


def quota_of(family: str, spot: bool, names: list[str]) -> str | None:
    """Which vCPU quota an instance family counts against, by the quotas' names.

    They read `Running On-Demand P instances`, `Running On-Demand Standard (A, C, D, …) instances`, `All G and VT Spot
    Instance Requests`, `All P5 Spot Instance Requests`: a generation of its own goes before its letter (QUOTAS).
    """
    pattern = r"All (.+) Spot Instance Requests" if spot else r"Running On-Demand (.+) instances"
    letters = re.match(r"[a-z]+", family)
    letter = letters[0] if letters else family
    generation = re.match(r"[a-z]+\d+", family)
    for wanted in filter(None, [generation[0] if generation else "", letter, STORAGE.get(letter)]):
        for name in names:
            found = re.fullmatch(pattern, name)
            if found and wanted in {item.lower() for item in re.findall(r"[A-Za-z0-9]+", found[1])}:
                return name
    return None
