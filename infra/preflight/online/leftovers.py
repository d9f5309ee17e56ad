"""CFG 1xx: resources that already exist under the names that the cluster would make."""

from __future__ import annotations

from collections.abc import Iterator

from infra.config import ClusterSpec
from infra.finding import finding
from infra.plan.watch.interruptions import queue_name
from infra.preflight.online.client import Aws, answered
from infra.preflight.rule import Context, Family, Problems
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
    "No bucket, repository, queue or log group exists under the names that the cluster would make.",
    "https://docs.aws.amazon.com/AmazonS3/latest/API/API_CreateBucket.html",
    level="warning",
    permission="s3:ListBucket, ecr:DescribeRepositories, sqs:GetQueueUrl and logs:DescribeLogGroups",
)
def names_taken(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    mine = "if this stack made it, ignore this; else"
    names = context.plan.bucket_names
    for key in KEYS:
        name = getattr(names, key)
        if getattr(spec.buckets, key) is None and answered(ABSENT, aws.s3.head_bucket, Bucket=name) is not None:
            fix = f"{mine} set buckets.{key}: {name}, or choose another name"
            yield finding("name", f"bucket {name} exists already", fix)
    image = context.plan.repository.name
    ours = [] if spec.repository.existing else [image]
    if ours and answered(ABSENT, aws.ecr.describe_repositories, repositoryNames=ours) is not None:
        fix = f"{mine} give its URL as repository.existing, or choose another name"
        yield finding("name", f"image repository {image} exists already", fix)
    for what in _taken_over(spec, aws):
        message = f"{what} exists already: two stacks of one name share it, and the first to go takes it along"
        yield finding("name", message, f"{mine} choose another name")


def _taken_over(spec: ClusterSpec, aws: Aws) -> Iterator[str]:
    queue = queue_name(spec)
    if answered(ABSENT, aws.sqs.get_queue_url, QueueName=queue):
        yield f"queue {queue}"
    prefix = f"/lustrain/{spec.name}/"
    if aws.logs.describe_log_groups(logGroupNamePrefix=prefix, limit=1)["logGroups"]:
        yield f"a log group under {prefix}"
