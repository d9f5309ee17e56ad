"""POL: what no stack may be, where that shows only between several resources.

Ids are not known in a preview, so resources are matched by what their values were made from; that also means that a
group or a bucket which this stack only uses, and does not make, is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.finding import Problems, RuleTable
from infra.policy.checks import (
    BUCKETS,
    CLOUD_CONTROL,
    EC2,
    ENDPOINT,
    LAUNCH_TEMPLATE,
    LUSTRE,
    RESERVATION,
    SECURITY_GROUP,
)
from infra.policy.declared import Resource, allowed, any_resource, is_true, is_unknown, texts

RULES = RuleTable()
"""Each looks at all resources of a stack."""
VPC = "aws:ec2/vpc:Vpc"
INTERNET_GATEWAYS = (
    "aws:ec2/internetGateway:InternetGateway",
    "aws:ec2/internetGatewayAttachment:InternetGatewayAttachment",
)
PLACEMENT_GROUP = "aws:ec2/placementGroup:PlacementGroup"
LIFECYCLES = (
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration",
    "aws:s3/bucketLifecycleConfigurationV2:BucketLifecycleConfigurationV2",
)
ACCESS_BLOCK = "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock"
ACCESS_BLOCKS = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
EGRESS = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"
ALERT_RULES = "aws:amp/ruleGroupNamespace:RuleGroupNamespace"
ALERT_MANAGER = "aws:amp/alertManagerDefinition:AlertManagerDefinition"
EFA_KINDS = ("efa", "efa-only")


@RULES.add(
    "POL-001",
    "A placement group has no reserved capacity that was not made in it.",
    f"{EC2}/capacity-blocks-how.html",
    fix="no placement group, except the one that the reservation itself was made in",
)
def grouped_reservations(resources: Sequence[Resource]) -> Problems:
    """EC2 answers such a launch with InsufficientInstanceCapacity, however much is reserved."""
    groups = [one for one in resources if one.type == PLACEMENT_GROUP]
    reservations = [one for one in resources if one.type == RESERVATION]
    for template in resources:
        if template.type != LAUNCH_TEMPLATE or template.at("placement", "groupName") is None:
            continue
        if template.at("instanceMarketOptions", "marketType") == "capacity-block":
            yield template.problem("puts a capacity block's instances into a placement group")
        elif template.at("capacityReservationSpecification", "capacityReservationTarget"):
            made_here = [group for group in groups if _placed_in(template, group)]
            if any(not any(one.made_from("placementGroupArn", group) for one in reservations) for group in made_here):
                yield template.problem("puts a reservation's instances into a placement group that it was not made in")


def _placed_in(template: Resource, group: Resource) -> bool:
    name = group.at("name")
    named = not is_unknown(name) and name is not None and name == template.at("placement", "groupName")
    return named or template.made_from("placement", group)


@RULES.add(
    "POL-010",
    "A bucket does not keep the parts of broken uploads.",
    "https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpu-abort-incomplete-mpu-lifecycle-config.html",
    fix="a lifecycle rule over the whole bucket with abort_incomplete_multipart_upload",
)
def kept_parts(resources: Sequence[Resource]) -> Problems:
    lifecycles = [one for one in resources if one.type in LIFECYCLES and _aborts(one)]
    for bucket in resources:
        if bucket.type in BUCKETS and not any(_of_bucket(one, bucket) for one in lifecycles):
            yield bucket.problem("keeps the parts of uploads that were never finished, and bills them forever")


def _aborts(lifecycle: Resource) -> bool:
    return any(
        rule.get("status") == "Enabled" and rule.get("abortIncompleteMultipartUpload") and not _narrow(rule)
        for rule in lifecycle.rows("rules")
    )


def _narrow(rule: Mapping[str, Any]) -> bool:
    """Whether a rule holds for some objects only."""
    limits = rule.get("filter")
    return bool(rule.get("prefix")) or (isinstance(limits, Mapping) and any(limits.values()))


@RULES.add(
    "POL-017",
    "No bucket can become public.",
    "https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-control-block-public-access.html",
    fix="an s3.BucketPublicAccessBlock with all four set",
)
def unblocked_buckets(resources: Sequence[Resource]) -> Problems:
    blocks = [one for one in resources if one.type == ACCESS_BLOCK]
    for bucket in resources:
        if bucket.type not in BUCKETS:
            continue
        of_it = [one for one in blocks if _of_bucket(one, bucket)]
        if not any(all(is_true(one.at(key)) for key in ACCESS_BLOCKS) for one in of_it):
            yield bucket.problem("can be made public by a policy or an ACL")


def _of_bucket(companion: Resource, bucket: Resource) -> bool:
    name = bucket.at("bucket")
    named = not is_unknown(name) and name is not None and companion.at("bucket") == name
    return named or companion.made_from("bucket", bucket)


@RULES.add(
    "POL-008",
    "In a network without an internet gateway, no S3 endpoint is for all of S3.",
    "https://docs.aws.amazon.com/AmazonS3/latest/userguide/example-bucket-policies-vpc-endpoint.html",
    fix="give it a policy that names the buckets",
)
def leaks(resources: Sequence[Resource]) -> Problems:
    """Yield endpoints for all of S3 in a network without an internet gateway, which is meant to keep data in.

    With a gateway the network itself is as open as the endpoint, and a list of buckets breaks pulls from public registries.

    AWS gives an endpoint without a policy one for everything, which a preview does not know yet; an update does.
    """
    for vpc in (one for one in resources if one.type == VPC):
        if any(one.type in INTERNET_GATEWAYS and one.made_from("vpcId", vpc) for one in resources):
            continue
        for endpoint in (one for one in resources if one.type == ENDPOINT and one.made_from("vpcId", vpc)):
            yield from map(endpoint.problem, _open_to_s3(endpoint))


def _open_to_s3(endpoint: Resource) -> Iterator[str]:
    service, policy = endpoint.at("serviceName"), endpoint.at("policy")
    if not isinstance(service, str) or not service.endswith(".s3") or is_unknown(policy):
        return
    for statement in allowed(policy):
        everything = {"*", "s3:*"} & set(texts(statement.get("Action")))
        if everything and any_resource(statement) and not statement.get("Condition"):
            yield "allows everything on every bucket: from a network without another way out, data leaves through it"


@RULES.add(
    "POL-022",
    "Alert rules have an alert manager.",
    "https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-alert-manager.html",
    fix="an amp.AlertManagerDefinition for the same workspace, with an SNS topic",
)
def silent_rules(resources: Sequence[Resource]) -> Problems:
    """Yield rules of a workspace that has no alert manager: their alerts fire where nothing looks."""
    managers = [one for one in resources if one.type == ALERT_MANAGER]
    for rules in (one for one in resources if one.type == ALERT_RULES):
        if is_unknown(rules.at("workspaceId")) and not rules.uses.get("workspaceId"):
            continue
        if not any(_same_workspace(one, rules) for one in managers):
            yield rules.problem("evaluates alerts in a workspace without an alert manager, which sends them nowhere")


def _same_workspace(one: Resource, other: Resource) -> bool:
    mine, theirs = (item.at("workspaceId") for item in (one, other))
    if not is_unknown(mine) and mine is not None and mine == theirs:
        return True
    return bool(one.uses.get("workspaceId", frozenset()) & other.uses.get("workspaceId", frozenset()))


@RULES.add(
    "POL-011",
    "A security group with EFA lets itself in and out.",
    f"{EC2}/efa-start.html",
    fix='an ingress and an egress rule with ip_protocol="-1" that reference the group itself',
)
def deaf_groups(resources: Sequence[Resource]) -> Problems:
    """EFA's own protocol has no ports: a rule for 0.0.0.0/0 does not cover it, only one for the group itself does."""
    for group in (one for one in resources if one.type == SECURITY_GROUP):
        if not any(_carries_efa(one, group) for one in resources):
            continue
        for kind, inline, way in ((INGRESS, "ingress", "in"), (EGRESS, "egress", "out")):
            if not (_inline_self(group, inline) or any(_self_rule(one, group, kind) for one in resources)):
                yield group.problem(f"carries EFA and does not let itself {way}: NCCL hangs at the first collective")


def _carries_efa(user: Resource, group: Resource) -> bool:
    if user.type == LAUNCH_TEMPLATE:
        efa = any(nic.get("interfaceType") in EFA_KINDS for nic in user.rows("networkInterfaces"))
        return efa and user.made_from("networkInterfaces", group)
    if user.type == LUSTRE:
        return is_true(user.at("efaEnabled")) and user.made_from("securityGroupIds", group)
    return user.type == CLOUD_CONTROL and user.made_from("desiredState", group)


def _inline_self(group: Resource, way: str) -> bool:
    return any(is_true(rule.get("self")) and rule.get("protocol") in ("-1", "all") for rule in group.rows(way))


def _self_rule(rule: Resource, group: Resource, kind: str) -> bool:
    ours = rule.made_from("securityGroupId", group) and rule.made_from("referencedSecurityGroupId", group)
    return rule.type == kind and ours and rule.at("ipProtocol") == "-1"
