"""CFG 1xx: resources that already exist under the names that the cluster would make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.aws import Aws, answered
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.nodes.logs import log_groups
from infra.plan.place import COST_TAG
from infra.plan.watch.interruptions import queue_name
from infra.preflight.rule import Context, Family
from infra.preflight.rules.buckets import KEYS

ABSENT = (
    "404",
    "403",
    "NoSuchBucket",
    "RepositoryNotFound",
    "AWS.SimpleQueueService.NonExistentQueue",
    "QueueDoesNotExist",
)
"""A bucket that may not be looked at is S3-102's."""
RULES = Family()


@RULES.add(
    "CFG-101",
    "No bucket, repository, queue or log group of others exists under the names that the cluster would make.",
    "https://docs.aws.amazon.com/AmazonS3/latest/API/API_CreateBucket.html",
    level="warning",
    permission="s3:ListBucket, s3:GetBucketTagging, ecr:DescribeRepositories, ecr:ListTagsForResource, sqs:GetQueueUrl, "
    "sqs:ListQueueTags, logs:DescribeLogGroups and logs:ListTagsForResource",
)
def names_taken(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    """Report those without this cluster's tag; its own stack made the others."""
    names = context.plan.bucket_names
    for key in KEYS:
        name = getattr(names, key)
        if getattr(spec.buckets, key) is None and _foreign_bucket(spec, aws, name):
            yield finding("name", f"bucket {name} exists already", f"set buckets.{key}: {name}, or {RENAME}")
    image = context.plan.repository.name
    if spec.repository.existing is None and _foreign_repository(spec, aws, image):
        fix = f"give its URL as repository.existing, or {RENAME}"
        yield finding("name", f"image repository {image} exists already", fix)
    for what in _foreign_queue_and_logs(spec, aws):
        message = f"{what} exists already: two stacks of one name share it, and the first to go takes it along"
        yield finding("name", message, RENAME)


RENAME = "choose another name"


def _foreign_bucket(spec: ClusterSpec, aws: Aws, name: str) -> bool:
    if answered(ABSENT, aws.s3.head_bucket, Bucket=name) is None:
        return False
    answer = answered("NoSuchTagSet", aws.s3.get_bucket_tagging, Bucket=name)
    return not _ours(spec, _by_key(answer["TagSet"] if answer else ()))


def _foreign_repository(spec: ClusterSpec, aws: Aws, name: str) -> bool:
    answer = answered(ABSENT, aws.ecr.describe_repositories, repositoryNames=[name])
    if answer is None:
        return False
    arn = answer["repositories"][0]["repositoryArn"]
    return not _ours(spec, _by_key(aws.ecr.list_tags_for_resource(resourceArn=arn)["tags"]))


def _foreign_queue_and_logs(spec: ClusterSpec, aws: Aws) -> Iterator[str]:
    queue = queue_name(spec)
    answer = answered(ABSENT, aws.sqs.get_queue_url, QueueName=queue)
    if answer and not _ours(spec, aws.sqs.list_queue_tags(QueueUrl=answer["QueueUrl"]).get("Tags", {})):
        yield f"queue {queue}"
    own, made = f"/lustrain/{spec.name}/", {group.name for group in log_groups(spec)}
    # Those of EKS have the names that its add-on gives them, among others that the stack does not make.
    for prefix in dict.fromkeys([own, *(f"{name.rpartition('/')[0]}/" for name in sorted(made))]):
        pages = aws.logs.get_paginator("describe_log_groups").paginate(logGroupNamePrefix=prefix)
        for group in (group for page in pages for group in page["logGroups"]):
            name = group["logGroupName"]
            is_taken = prefix == own or name in made
            if is_taken and not _ours(spec, aws.logs.list_tags_for_resource(resourceArn=group["logGroupArn"])["tags"]):
                yield f"log group {name}"


def _by_key(tags: Iterable[Any]) -> dict[str, str]:
    """Return S3's and ECR's list of tags as other services give it."""
    return {tag["Key"]: tag["Value"] for tag in tags}


def _ours(spec: ClusterSpec, tags: Mapping[str, str]) -> bool:
    return tags.get(COST_TAG) == spec.name
