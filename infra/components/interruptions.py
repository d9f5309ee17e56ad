"""The interruption channel: rules of EventBridge, the queue and the topic they write to."""

from __future__ import annotations

import json

import pulumi
import pulumi_aws as aws

from infra.plan.watch import interruptions as events
from infra.plan.watch.interruptions import ChannelPlan
from lustrain.capacity_events import LOOK_S


class Interruptions(pulumi.ComponentResource):
    """One queue for the runs, one topic for people; mail addresses must be confirmed by a click before they get any."""

    queue_url: pulumi.Output[str]
    topic_arn: pulumi.Output[str]

    def __init__(self, name: str, plan: ChannelPlan) -> None:
        super().__init__("lustrain:infra:Interruptions", name)
        self._ours = pulumi.ResourceOptions(parent=self)
        dead = self._dead_letters(name, plan)
        queue = self._queue(name, plan, dead)
        topic = self._topic(name, plan)
        rules = self._rules(name, plan)
        for signal in plan.queued:
            self._target(f"{name}-{signal.key}-queue", rules[signal.key], queue.arn, dead.arn)
        for signal in plan.mailed:
            self._target(f"{name}-{signal.key}-topic", rules[signal.key], topic.arn, dead.arn)
        self.queue_url, self.topic_arn = queue.url, topic.arn
        self.register_outputs(
            {"queue_url": self.queue_url, "topic_arn": self.topic_arn},
        )

    def _dead_letters(self, name: str, plan: ChannelPlan) -> aws.sqs.Queue:
        return aws.sqs.Queue(
            f"{name}-dead",
            name=plan.dead_letters,
            message_retention_seconds=events.DEAD_LETTER_SECONDS,
            sqs_managed_sse_enabled=True,
            policy=json.dumps(plan.dead_letters_policy),
            opts=self._ours,
        )

    def _queue(self, name: str, plan: ChannelPlan, dead: aws.sqs.Queue) -> aws.sqs.Queue:
        return aws.sqs.Queue(
            f"{name}-queue",
            name=plan.queue,
            message_retention_seconds=events.RETENTION_SECONDS,
            visibility_timeout_seconds=LOOK_S,
            receive_wait_time_seconds=events.LONG_POLL_SECONDS,
            sqs_managed_sse_enabled=True,
            # In the provider's own spelling, or each preview would find a difference in the spaces.
            redrive_policy=json.dumps(plan.redrive, sort_keys=True, separators=(",", ":")),
            policy=json.dumps(plan.queue_policy),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[dead]),
        )

    def _topic(self, name: str, plan: ChannelPlan) -> aws.sns.Topic:
        topic = aws.sns.Topic(f"{name}-topic", name=plan.topic, policy=json.dumps(plan.topic_policy), opts=self._ours)
        for index, email in enumerate(plan.emails):
            aws.sns.TopicSubscription(
                f"{name}-mail-{index}", topic=topic.arn, protocol="email", endpoint=email, opts=self._ours
            )
        return topic

    def _rules(self, name: str, plan: ChannelPlan) -> dict[str, aws.cloudwatch.EventRule]:
        return {
            signal.key: aws.cloudwatch.EventRule(
                f"{name}-{signal.key}",
                name=plan.rule_names[signal.key],
                description=signal.description,
                event_pattern=json.dumps(signal.pattern),
                opts=self._ours,
            )
            for signal in plan.signals
        }

    def _target(
        self,
        name: str,
        rule: aws.cloudwatch.EventRule,
        arn: pulumi.Output[str],
        dead_letters: pulumi.Output[str],
    ) -> None:
        aws.cloudwatch.EventTarget(
            name,
            rule=rule.name,
            arn=arn,
            dead_letter_config=aws.cloudwatch.EventTargetDeadLetterConfigArgs(arn=dead_letters),
            retry_policy=aws.cloudwatch.EventTargetRetryPolicyArgs(
                maximum_event_age_in_seconds=events.EVENT_AGE_SECONDS, maximum_retry_attempts=events.RETRIES
            ),
            opts=self._ours,
        )
