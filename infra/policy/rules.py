"""What no stack may declare: a table of rules over single resources and one over whole stacks.

Values that a preview does not know yet are not held against a resource; `pulumi up` runs the same rules again with the
values in hand, before it makes the resource.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from infra.plan.nodes.auto_scaling import HOP_LIMIT
from infra.plan.place import COST_TAG
from infra.policy import checks, relations
from infra.policy.declared import Resource
from infra.policy.relations import Blame

Check = TypeVar("Check", bound=Callable[..., Iterable[object]])
OfResource = Callable[[Resource], Iterable[str]]
"""Yields a text for everything that is wrong with one resource."""
OfStack = Callable[[Sequence[Resource]], Iterable[Blame]]
"""Yields the resource to blame and what is wrong with it, where that shows only between several resources."""


@dataclass(frozen=True)
class Rule(Generic[Check]):
    """A row of the table: `says` is what is wrong in general, `check` what is wrong here."""

    code: str
    says: str
    fix: str
    source: str
    check: Check

    def line(self, violation: str) -> str:
        return f"{violation}; fix: {self.fix}"


_EC2 = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide"

RESOURCE_RULES: tuple[Rule[OfResource], ...] = (
    Rule(
        "POL-002",
        "a public address with several network interfaces",
        "leave associatePublicIpAddress out and reach the nodes through SSM",
        f"{_EC2}/using-instance-addressing.html",
        checks.public_address,
    ),
    Rule(
        "POL-003",
        "data that is not protected",
        "protect=True, retain_on_delete=True",
        "https://www.pulumi.com/docs/iac/concepts/resources/options/protect/",
        checks.unprotected_data,
    ),
    Rule(
        "POL-004",
        "a file system that a change of security groups replaces",
        'security_group_ids from the first day, and protect=True or ignore_changes=["security_group_ids"]; later change '
        "the rules inside the groups",
        "https://docs.aws.amazon.com/AWSCloudFormation/latest/TemplateReference/aws-resource-fsx-filesystem.html",
        checks.follows_groups,
    ),
    Rule(
        "POL-005",
        "a port that is open to the world",
        "name the security group or the range that needs it; log in through SSM",
        f"{_EC2}/security-group-rules-reference.html",
        checks.open_to_the_world,
    ),
    Rule(
        "POL-006",
        "instance metadata that anything can read",
        f'metadata_options with http_tokens="required" and a hop limit of {HOP_LIMIT} at most',
        f"{_EC2}/configuring-instance-metadata-service.html",
        checks.metadata,
    ),
    Rule(
        "POL-007",
        "something billed without the cost tag",
        f"tag it {COST_TAG} (instances and volumes by tag_specifications of their launch template)",
        "https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/cost-alloc-tags.html",
        checks.untagged,
    ),
    Rule(
        "POL-009",
        "a purchase that is not protected",
        "protect=True, retain_on_delete=True",
        f"{_EC2}/capacity-blocks-how.html",
        checks.unprotected_purchase,
    ),
    Rule("POL-012", "a volume in plain text", "encrypted=True", f"{_EC2}/ebs-encryption.html", checks.plain_volume),
    Rule(
        "POL-013",
        "a queue in plain text",
        "sqs_managed_sse_enabled=True",
        "https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-sse-existing-queue.html",
        checks.plain_queue,
    ),
    Rule(
        "POL-014",
        "a topic that alarms cannot write to",
        "a key of your own whose policy lets cloudwatch and events use it, or no key",
        "https://repost.aws/knowledge-center/cloudwatch-configure-alarm-sns",
        checks.deaf_topic,
    ),
    Rule(
        "POL-015",
        "logs without an end",
        "set retention_in_days",
        "https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutRetentionPolicy.html",
        checks.endless_logs,
    ),
    Rule(
        "POL-016",
        "image tags that move",
        'image_tag_mutability="IMMUTABLE"',
        "https://docs.aws.amazon.com/AmazonECR/latest/userguide/image-tag-mutability.html",
        checks.mutable_tags,
    ),
    Rule(
        "POL-018",
        "a policy that allows everything",
        "name the actions and resources",
        "https://docs.aws.amazon.com/IAM/latest/UserGuide/best-practices.html",
        checks.all_actions,
    ),
    Rule(
        "POL-019",
        "a policy for everyone",
        "name the principal, or narrow it by aws:SourceArn",
        "https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_principal.html",
        checks.anyone,
    ),
    Rule(
        "POL-020",
        "a subnet that hands out public addresses",
        "leave map_public_ip_on_launch out; only the NAT gateway needs an address",
        "https://docs.aws.amazon.com/vpc/latest/userguide/vpc-ip-addressing.html",
        checks.public_subnet,
    ),
    Rule(
        "POL-021",
        "a machine with a public address",
        "leave associate_public_ip_address out and reach it through SSM",
        f"{_EC2}/using-instance-addressing.html",
        checks.public_machine,
    ),
)


STACK_RULES: tuple[Rule[OfStack], ...] = (
    Rule(
        "POL-001",
        "a placement group with reserved capacity",
        "no placement group, except the one that the reservation itself was made in",
        f"{_EC2}/capacity-blocks-how.html",
        relations.grouped_reservations,
    ),
    Rule(
        "POL-008",
        "an S3 endpoint for all of S3 in a network without an internet gateway",
        "give it a policy that names the buckets",
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/example-bucket-policies-vpc-endpoint.html",
        relations.leaks,
    ),
    Rule(
        "POL-010",
        "a bucket that keeps the parts of broken uploads",
        "a lifecycle rule over the whole bucket with abort_incomplete_multipart_upload",
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpu-abort-incomplete-mpu-lifecycle-config.html",
        relations.kept_parts,
    ),
    Rule(
        "POL-011",
        "an EFA security group that does not let itself in and out",
        'an ingress and an egress rule with ip_protocol="-1" that reference the group itself',
        f"{_EC2}/efa-start.html",
        relations.deaf_groups,
    ),
    Rule(
        "POL-017",
        "a bucket that can become public",
        "an s3.BucketPublicAccessBlock with all four set",
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-control-block-public-access.html",
        relations.unblocked_buckets,
    ),
    Rule(
        "POL-022",
        "alert rules that tell no one",
        "an amp.AlertManagerDefinition for the same workspace, with an SNS topic",
        "https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-alert-manager.html",
        relations.silent_rules,
    ),
)


def violations(resources: Sequence[Resource]) -> list[str]:
    """Return one line for each thing that is wrong with these resources, each of them alone and all of them together."""

    def line(rule: Rule[Any], resource: Resource, violation: str) -> str:
        return f"{rule.code}: {resource.type} {resource.name} {rule.line(violation)}"

    alone = [line(rule, item, text) for rule in RESOURCE_RULES for item in resources for text in rule.check(item)]
    together = [line(rule, one, text) for rule in STACK_RULES for one, text in rule.check(resources)]
    return alone + together
