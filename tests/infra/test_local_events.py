"""The event player: rules deliver its events to queues and topics, and groups and metadata change with them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from infra.local import additions
from infra.local.aws import LocalAws
from infra.local.events import Events, send
from infra.local.metadata import LocalMetadata
from tests.infra.local_network import ACCOUNT, Network, client
from tests.infra.test_local_hyperpod import make_role, put_scripts, slurm_cluster
from tests.processes import wait_for, wait_until

pytestmark = pytest.mark.slow

REGION = "us-west-2"
HOOK = "save"
NEVER = 3600.0
"""Seconds to an end that lies after every test."""


def create_group(network: Network, name: str, kind: str, **data: Any) -> None:
    """Create an Auto Scaling group of two instances."""
    template = {"ImageId": "ami-0123456789abcdef0", "InstanceType": kind, **data}
    network.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=template)
    launch = {"LaunchTemplate": {"LaunchTemplateName": name, "Version": "1"}, "VPCZoneIdentifier": network.subnet}
    network.scaling.create_auto_scaling_group(AutoScalingGroupName=name, **launch, MinSize=2, MaxSize=2)


class Cluster:
    """A group of two spot nodes with a terminate hook, and a queue that receives its events."""

    def __init__(self, aws: LocalAws, name: str, *, rebalance: bool) -> None:
        self.name, self.aws = name, aws
        self.network = Network(aws)
        self.scaling = self.network.scaling
        create_group(self.network, name, "g6e.8xlarge", InstanceMarketOptions={"MarketType": "spot"})
        self.scaling.update_auto_scaling_group(AutoScalingGroupName=name, CapacityRebalance=rebalance)
        hook = {"LifecycleHookName": HOOK, "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING"}
        self.scaling.put_lifecycle_hook(AutoScalingGroupName=name, **hook, HeartbeatTimeout=3600)
        self.queue = Queue(aws, name, ["aws.ec2", "aws.autoscaling"])

    def nodes(self) -> dict[str, str]:
        """Instance ids and their lifecycle states."""
        group = self.scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])["AutoScalingGroups"][0]
        return {instance["InstanceId"]: instance["LifecycleState"] for instance in group["Instances"]}


def in_service_node(cluster: Cluster) -> str:
    return min(node for node, state in cluster.nodes().items() if state == "InService")


class Queue:
    """A queue with a rule that delivers to it, created through the API."""

    def __init__(self, aws: LocalAws, name: str, sources: list[str], *, allowed: bool = True) -> None:
        self.sqs, self.events = client(aws, "sqs"), client(aws, "events")
        self.url = self.sqs.create_queue(QueueName=name)["QueueUrl"]
        self.arn = f"arn:aws:sqs:{REGION}:{ACCOUNT}:{name}"
        self.rule = self.events.put_rule(Name=name, EventPattern=json.dumps({"source": sources}))["RuleArn"]
        if allowed:
            allow = {"Policy": policy("sqs:SendMessage", self.arn, self.rule)}
            self.sqs.set_queue_attributes(QueueUrl=self.url, Attributes=allow)
        self.events.put_targets(Rule=name, Targets=[{"Id": "queue", "Arn": self.arn}])

    def read(self) -> list[dict[str, Any]]:
        """The events in the queue, which is empty afterwards."""
        events: list[dict[str, Any]] = []
        while messages := self.sqs.receive_message(QueueUrl=self.url, MaxNumberOfMessages=10).get("Messages"):
            for message in messages:
                events.append(json.loads(message["Body"]))
                self.sqs.delete_message(QueueUrl=self.url, ReceiptHandle=message["ReceiptHandle"])
        return events


def policy(action: str, arn: str, rule: str) -> str:
    allow = {
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": action,
        "Resource": arn,
        "Condition": {"ArnEquals": {"aws:SourceArn": rule}},
    }
    plain = {"Effect": "Deny", "Principal": "*", "Action": action, "Resource": arn}
    tls_only = {**plain, "Condition": {"Bool": {"aws:SecureTransport": "false"}}}
    return json.dumps({"Version": "2012-10-17", "Statement": [tls_only, allow]})


@pytest.fixture(scope="module")
def cluster(aws: LocalAws) -> Cluster:
    return Cluster(aws, "gang", rebalance=True)


def test_spot_notice_reaches_queue_metadata_and_group(aws: LocalAws, cluster: Cluster) -> None:
    cluster.queue.read()
    node, before = min(cluster.nodes()), datetime.now(UTC).replace(microsecond=0)
    with LocalMetadata() as metadata:
        aws.events.spot(node, in_s=NEVER, metadata=metadata.control)
        answers = metadata.state()["answers"]
    assert json.loads(answers["spot/instance-action"])["action"] == "terminate"
    assert answers["autoscaling/target-lifecycle-state"] == "Terminated"
    states = cluster.nodes()
    assert states[node] == "Terminating:Wait"
    assert sorted(states.values()) == ["InService", "InService", "Terminating:Wait"]
    events_received = cluster.queue.read()
    notice = events_received[0]
    header = [notice[name] for name in ("version", "detail-type", "source", "account", "region")]
    assert header == ["0", "EC2 Spot Instance Interruption Warning", "aws.ec2", ACCOUNT, REGION]
    assert notice["detail"] == {"instance-id": node, "instance-action": "terminate"}
    assert notice["resources"] == [f"arn:aws:ec2:us-west-2a:instance/{node}"]
    assert before <= datetime.fromisoformat(notice["time"]) <= datetime.now(UTC)
    action = next(
        event for event in events_received if event["detail-type"] == "EC2 Instance-terminate Lifecycle Action"
    )
    assert action["source"] == "aws.autoscaling"
    assert (action["detail"]["EC2InstanceId"], action["detail"]["LifecycleHookName"]) == (node, HOOK)
    aws.events.spot(node, in_s=0.0)
    wait_until(lambda: node not in cluster.nodes())
    assert cluster.nodes().keys().isdisjoint({node})
    instance = cluster.network.ec2.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0]
    assert instance["State"]["Name"] == "terminated"


def test_rebalanced_node_waits_unless_the_group_empties(aws: LocalAws, cluster: Cluster) -> None:
    cluster.queue.read()
    node = min(cluster.nodes())
    aws.events.rebalance(node)
    assert [event["detail-type"] for event in cluster.queue.read()] == [
        "EC2 Instance Rebalance Recommendation",
        "EC2 Instance-terminate Lifecycle Action",
    ]
    assert list(cluster.nodes().values()).count("InService") == 2
    cluster.scaling.update_auto_scaling_group(AutoScalingGroupName="gang", MinSize=0, DesiredCapacity=0)
    wait_until(lambda: not cluster.nodes())
    kinds = wait_for(lambda: [event["detail-type"] for event in cluster.queue.read()])
    assert "EC2 Instance State-change Notification" in kinds
    cluster.scaling.update_auto_scaling_group(AutoScalingGroupName="gang", MinSize=2, DesiredCapacity=2)


def test_group_without_rebalance_replaces_after_the_end(aws: LocalAws) -> None:
    cluster = Cluster(aws, "late", rebalance=False)
    node = min(cluster.nodes())
    aws.events.spot(node, in_s=NEVER)
    assert set(cluster.nodes().values()) == {"InService"}
    aws.events.spot(node, in_s=0.0)
    wait_until(lambda: node not in cluster.nodes())
    assert list(cluster.nodes().values()) == ["InService", "InService"]


def test_spot_notice_needs_a_running_spot_instance(aws: LocalAws, cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="no running instance i-0123456789abcdef0"):
        aws.events.spot("i-0123456789abcdef0")
    request = {"ImageId": "ami-0123456789abcdef0", "InstanceType": "m5.large", "SubnetId": cluster.network.subnet}
    instance = cluster.network.ec2.run_instances(**request, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    with pytest.raises(ValueError, match="is not a spot instance"):
        aws.events.spot(instance)
    with pytest.raises(ValueError, match="no spot action"):
        aws.events.spot(min(cluster.nodes()), action="explode")
    with pytest.raises(ValueError, match="no such command"):
        send(f"{aws.control}/control/earthquake", {})


def test_only_enabled_matching_rules_deliver(aws: LocalAws, cluster: Cluster) -> None:
    sns, events, sqs = client(aws, "sns"), client(aws, "events"), client(aws, "sqs")
    topic = sns.create_topic(Name="mail")["TopicArn"]
    inbox = sqs.create_queue(QueueName="inbox")["QueueUrl"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=f"arn:aws:sqs:{REGION}:{ACCOUNT}:inbox")
    rule = events.put_rule(Name="mail", EventPattern=json.dumps({"source": ["aws.ec2"]}))["RuleArn"]
    events.put_targets(Rule="mail", Targets=[{"Id": "topic", "Arn": topic}])
    sns.set_topic_attributes(TopicArn=topic, AttributeName="Policy", AttributeValue=policy("sns:Publish", topic, rule))
    other, off = Queue(aws, "other", ["aws.sagemaker"]), Queue(aws, "off", ["aws.ec2"])
    off.events.disable_rule(Name="off")
    aws.events.rebalance(in_service_node(cluster))
    (message,) = sqs.receive_message(QueueUrl=inbox)["Messages"]
    assert json.loads(json.loads(message["Body"])["Message"])["source"] == "aws.ec2"
    assert (other.read(), off.read()) == ([], [])


def test_denied_delivery_goes_to_the_dead_letter_queue(aws: LocalAws, cluster: Cluster) -> None:
    closed = Queue(aws, "shut", ["aws.ec2"], allowed=False)
    sqs = closed.sqs
    dead_letters = sqs.create_queue(QueueName="dead")["QueueUrl"]
    arn = f"arn:aws:sqs:{REGION}:{ACCOUNT}:dead"
    sqs.set_queue_attributes(QueueUrl=dead_letters, Attributes={"Policy": policy("sqs:SendMessage", arn, closed.rule)})
    closed.events.put_targets(
        Rule="shut", Targets=[{"Id": "queue", "Arn": closed.arn, "DeadLetterConfig": {"Arn": arn}}]
    )
    aws.events.rebalance(in_service_node(cluster))
    assert closed.read() == []
    (message,) = sqs.receive_message(QueueUrl=dead_letters, MessageAttributeNames=["All"])["Messages"]
    assert json.loads(message["Body"])["source"] == "aws.ec2"
    assert message["MessageAttributes"]["ERROR_CODE"]["StringValue"] == "NO_PERMISSIONS"
    reason = next(event["why"] for event in aws.events.state()["undelivered"] if event["rule"] == "shut")
    assert f"the policy of {closed.arn} does not let events.amazonaws.com" in reason


def test_faulty_hyperpod_node_is_replaced(aws: LocalAws) -> None:
    put_scripts(aws)
    network, sagemaker = Network(aws), client(aws, "sagemaker")
    queue = Queue(aws, "hyperpod", ["aws.sagemaker"])
    role = make_role(aws, "fault-node", "sagemaker.amazonaws.com")
    sagemaker.create_cluster(**slurm_cluster("faults", network, role))

    def workers() -> dict[str, str]:
        summaries = sagemaker.list_cluster_nodes(ClusterName="faults")["ClusterNodeSummaries"]
        train_nodes = [summary for summary in summaries if summary["InstanceGroupName"] == "train"]
        return {summary["InstanceId"]: summary["InstanceStatus"]["Status"] for summary in train_nodes}

    wait_until(lambda: len(workers()) == 4)
    queue.read()
    faulty, *_ = before = sorted(workers())
    replaced = aws.events.node_fault("faults", faulty, REGION)["instance"]
    assert replaced not in before
    assert set(workers()) == {replaced, *before} - {faulty}
    kind = "SageMaker HyperPod Cluster Node Health Event"
    health = [event["detail"] for event in queue.read() if event["detail-type"] == kind]
    assert [detail["InstanceId"] for detail in health] == [faulty, replaced]
    assert [detail["HealthSummary"]["HealthStatus"] for detail in health] == ["Unhealthy", "Healthy"]
    assert "NvidiaErrorTerminate" in health[0]["HealthSummary"]["HealthStatusReason"]
    assert set(workers().values()) == {"Running"}
    with pytest.raises(ValueError, match=faulty):
        aws.events.node_fault("faults", faulty, REGION)
    with pytest.raises(ValueError, match="nowhere"):
        aws.events.node_fault("nowhere", replaced, REGION)
    manual = {**slurm_cluster("manual", network, role), "NodeRecovery": "None"}
    sagemaker.create_cluster(**manual)
    (node, *_) = sagemaker.list_cluster_nodes(ClusterName="manual")["ClusterNodeSummaries"]
    assert aws.events.node_fault("manual", node["InstanceId"], REGION)["instance"] == node["InstanceId"]
    (node, *_) = sagemaker.list_cluster_nodes(ClusterName="manual")["ClusterNodeSummaries"]
    assert node["InstanceStatus"]["Status"] == "Failure"


def test_control_address_outside_loopback_is_refused() -> None:
    with pytest.raises(ValueError, match="on loopback"):
        Events("http://192.0.2.1:80").rebalance("i-0123456789abcdef0")


def test_command_line_prints_limits_and_plays_events() -> None:
    server = subprocess.Popen([sys.executable, "-m", "infra.local"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith("export LUSTRAIN_LOCAL_METADATA_CONTROL="):
        lines.append(server.stdout.readline().strip())
        assert lines[-1] or server.poll() is None
    exports = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
    try:
        for module in (*additions.MODULES, *additions.SHARED_MODULES):
            left_out = importlib.import_module(f"infra.local.{module}").LEFT_OUT
            assert f"#   {left_out}" in lines, module
        assert any(line.startswith("#   instance metadata: no IMDSv1") for line in lines)
        play = [sys.executable, "-m", "infra.local"]
        options: dict[str, Any] = {
            "env": {**os.environ, **exports},
            "capture_output": True,
            "text": True,
            "timeout": 300,
        }
        completed = subprocess.run([*play, "state"], **options)
        assert json.loads(completed.stdout) == {"groups": {}, "undelivered": []}
        completed = subprocess.run([*play, "spot", "instance=i-0123456789abcdef0"], **options)
        assert (completed.returncode, completed.stdout) == (
            2,
            "spot: no running instance i-0123456789abcdef0 in any region\n",
        )
    finally:
        server.terminate()
        assert server.wait(300) == 0
    with pytest.raises(OSError, match="refused"):
        Events(exports["LUSTRAIN_LOCAL_AWS_CONTROL"]).state()
