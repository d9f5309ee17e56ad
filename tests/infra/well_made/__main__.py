"""What this part of a cluster consists of, as the real stack builds it."""

import pulumi
import pulumi_aws as aws

from infra.components.buckets import ImageRepository
from infra.components.interruptions import Interruptions
from infra.components.observability import Budget, Observability
from infra.components.tagging import tag_everything
from infra.config import parse
from infra.plan.place import Place
from infra.plan.stack import Plan

spec = parse(
    {
        "name": "llm",
        "backend": "ec2",
        "zone_id": "use1-az4",
        "groups": [{"name": "train", "instance_type": "g6e.8xlarge", "count": 2, "capacity": {"mode": "spot"}}],
        "storage": {"lustre": {"capacity_gib": 1200, "per_tib_mb_s": 250, "efa": False}, "home": {}},
        "alarms": {"emails": ["ops@example.com"], "unread_notices": True},
        "budget": {"monthly_usd": 100, "emails": ["ops@example.com"]},
    }
)
plan = Plan(spec, Place("us-east-1", aws.get_caller_identity().account_id))
tag_everything(plan.tags)

events = Interruptions("llm-events", plan.channel)
watch = Observability(
    "llm-watch",
    plan.observability,
    file_system_id=pulumi.Output.from_input("fs-0123456789abcdef0"),
    home_id=pulumi.Output.from_input("fs-0fedcba9876543210"),
    auto_scaling_groups=[pulumi.Output.from_input("llm-train-gang-1a2b3c4")],
    nat_gateway_id=pulumi.Output.from_input("nat-0123456789abcdef0"),
    topic_arn=events.topic_arn,
)
assert plan.budget is not None
Budget("llm-budget", plan.budget)
images = ImageRepository("llm", plan.repository)

pulumi.export("queue_url", events.queue_url)
pulumi.export("topic_arn", events.topic_arn)
pulumi.export("log_group", watch.log_group)
pulumi.export("repository", images.url)
