"""The event player: what AWS does to machines arrives at queues and topics through rules, and groups and metadata follow."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from infra.local import additions
from infra.local.aws import LocalAws
from infra.local.events import Events, send
from infra.local.metadata import LocalMetadata
from tests.infra.local_network import ACCOUNT, Network, client, refusal
from tests.infra.test_local_hyperpod import in_service, make_role, put_scripts, slurm_cluster
from tests.processes import wait_for, wait_until

pytestmark = pytest.mark.slow

REGION = "us-west-2"
HOOK = "save"
NEVER = 3600.0
"""Seconds to an end that does not come while a test looks."""


def gang(network: Network, name: str, kind: str, **data: Any) -> None:
    """A group of two machines."""
    template = {"ImageId": "ami-0123456789abcdef0", "InstanceType": kind, **data}
    network.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=template)
    launch = {"LaunchTemplate": {"LaunchTemplateName": name, "Version": "1"}, "VPCZoneIdentifier": network.subnet}
    network.scaling.create_auto_scaling_group(AutoScalingGroupName=name, **launch, MinSize=2, MaxSize=2)


class Cluster:
    """A gang of two spot nodes with a terminate hook, a queue that all rules may write to, and a rule for everything."""

    def __init__(self, aws: LocalAws, name: str, *, rebalance: bool) -> None:
        self.name, self.aws = name, aws
        self.network = Network(aws)
        self.scaling = self.network.scaling
        gang(self.network, name, "g6e.8xlarge", InstanceMarketOptions={"MarketType": "spot"})
        self.scaling.update_auto_scaling_group(AutoScalingGroupName=name, CapacityRebalance=rebalance)
        hook = {"LifecycleHookName": HOOK, "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING"}
        self.scaling.put_lifecycle_hook(AutoScalingGroupName=name, **hook, HeartbeatTimeout=3600)
        self.queue = Queue(aws, name, ["aws.ec2", "aws.autoscaling", "aws.health"])

    def nodes(self) -> dict[str, str]:
        """Instance ids and their lifecycle states."""
        shown = self.scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])["AutoScalingGroups"][0]
        return {one["InstanceId"]: one["LifecycleState"] for one in shown["Instances"]}


class Queue:
    """A queue behind a rule of its own, made through the API."""

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
        read: list[dict[str, Any]] = []
        while messages := self.sqs.receive_message(QueueUrl=self.url, MaxNumberOfMessages=10).get("Messages"):
            for message in messages:
                read.append(json.loads(message["Body"]))
                self.sqs.delete_message(QueueUrl=self.url, ReceiptHandle=message["ReceiptHandle"])
        return read


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


def test_a_spot_notice_reaches_queue_metadata_and_group_and_the_instance_ends_in_time(
    aws: LocalAws, cluster: Cluster
) -> None:
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
    read = cluster.queue.read()
    notice = read[0]
    found = [notice[name] for name in ("version", "detail-type", "source", "account", "region")]
    assert found == ["0", "EC2 Spot Instance Interruption Warning", "aws.ec2", ACCOUNT, REGION]
    assert notice["detail"] == {"instance-id": node, "instance-action": "terminate"}
    assert notice["resources"] == [f"arn:aws:ec2:us-west-2a:instance/{node}"]
    assert before <= datetime.fromisoformat(notice["time"]) <= datetime.now(UTC)
    action = next(one for one in read if one["detail-type"] == "EC2 Instance-terminate Lifecycle Action")
    assert action["source"] == "aws.autoscaling"
    assert (action["detail"]["EC2InstanceId"], action["detail"]["LifecycleHookName"]) == (node, HOOK)
    aws.events.spot(node, in_s=0.0)
    wait_until(lambda: node not in cluster.nodes())
    assert cluster.nodes().keys().isdisjoint({node})
    ended = cluster.network.ec2.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0]
    assert ended["State"]["Name"] == "terminated"


def test_a_recommendation_replaces_a_node_whose_hook_ends_when_the_node_says_so(
    aws: LocalAws, cluster: Cluster
) -> None:
    cluster.queue.read()
    node = min(cluster.nodes())
    aws.events.rebalance(node)
    assert [one["detail-type"] for one in cluster.queue.read()] == [
        "EC2 Instance Rebalance Recommendation",
        "EC2 Instance-terminate Lifecycle Action",
    ]
    assert list(cluster.nodes().values()).count("InService") == 2
    about = {"AutoScalingGroupName": "gang", "LifecycleHookName": HOOK, "InstanceId": node}
    cluster.scaling.record_lifecycle_action_heartbeat(**about)
    cluster.scaling.complete_lifecycle_action(**about, LifecycleActionResult="CONTINUE")
    wait_until(lambda: node not in cluster.nodes())
    kinds = wait_for(lambda: [one["detail-type"] for one in cluster.queue.read()])
    assert "EC2 Instance State-change Notification" in kinds
    assert refusal(cluster.scaling.record_lifecycle_action_heartbeat, **about)[0] == "ValidationError"


def test_a_group_that_does_not_rebalance_acts_when_the_instance_is_gone(aws: LocalAws) -> None:
    cluster = Cluster(aws, "late", rebalance=False)
    node = min(cluster.nodes())
    aws.events.spot(node, in_s=NEVER)
    assert set(cluster.nodes().values()) == {"InService"}
    aws.events.spot(node, in_s=0.0)
    wait_until(lambda: node not in cluster.nodes())
    assert list(cluster.nodes().values()) == ["InService", "InService"]


def test_only_a_running_spot_instance_gets_a_notice(aws: LocalAws, cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="no running instance i-0123456789abcdef0"):
        aws.events.spot("i-0123456789abcdef0")
    asked = {"ImageId": "ami-0123456789abcdef0", "InstanceType": "m5.large", "SubnetId": cluster.network.subnet}
    made = cluster.network.ec2.run_instances(**asked, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    with pytest.raises(ValueError, match="is not a spot instance"):
        aws.events.spot(made)
    with pytest.raises(ValueError, match="no spot action"):
        aws.events.spot(min(cluster.nodes()), action="explode")
    with pytest.raises(ValueError, match="no such command"):
        send(f"{aws.control}/control/earthquake", {})


def test_a_block_that_was_bought_before_takes_the_group_and_its_end_is_announced(aws: LocalAws) -> None:
    network = Network(aws)
    queue = Queue(aws, "blocks", ["aws.ec2"])
    block = "cr-0a1b2c3d4e5f60718"
    aws.events.block(block, "p5en.48xlarge", 2, "usw2-az2", REGION, datetime.now(UTC) + timedelta(days=14))
    target = {"CapacityReservationTarget": {"CapacityReservationId": block}}
    bought = {"InstanceMarketOptions": {"MarketType": "capacity-block"}, "CapacityReservationSpecification": target}
    gang(network, "blocks", "p5en.48xlarge", **bought)
    assert len(aws.events.state()["groups"]["blocks"]) == 2
    queue.read()
    said = aws.events.block_expiry(block)
    (warning,) = queue.read()
    assert warning["detail-type"] == "Capacity Block Expiration Warning"
    assert warning["detail"] == {"capacity-reservation-id": block, "end-date": said["ends"]}
    assert warning["resources"] == [f"arn:aws:ec2:{REGION}:{ACCOUNT}:capacity-reservation/{block}"]
    assert sorted(said["instances"]) == sorted(aws.events.state()["groups"]["blocks"])
    aws.events.block_expiry(block, in_s=0.0)
    wait_until(lambda: not set(said["instances"]) & set(aws.events.state()["groups"]["blocks"]))
    with pytest.raises(ValueError, match="there is no capacity reservation"):
        aws.events.block_expiry("cr-0123456789abcdef0")


def test_health_announces_a_change_that_has_not_come_yet(aws: LocalAws, cluster: Cluster) -> None:
    cluster.queue.read()
    node = min(cluster.nodes())
    aws.events.health(node)
    (event,) = cluster.queue.read()
    assert (event["source"], event["detail-type"]) == ("aws.health", "AWS Health Event")
    assert (event["detail"]["service"], event["detail"]["eventTypeCategory"]) == ("EC2", "scheduledChange")
    assert [one["entityValue"] for one in event["detail"]["affectedEntities"]] == [node]
    assert cluster.nodes()[node] == "InService"


def test_a_topic_gets_the_event_too_and_a_disabled_rule_or_one_of_another_pattern_stays_silent(
    aws: LocalAws, cluster: Cluster
) -> None:
    sns, events, sqs = client(aws, "sns"), client(aws, "events"), client(aws, "sqs")
    topic = sns.create_topic(Name="mail")["TopicArn"]
    inbox = sqs.create_queue(QueueName="inbox")["QueueUrl"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=f"arn:aws:sqs:{REGION}:{ACCOUNT}:inbox")
    rule = events.put_rule(Name="mail", EventPattern=json.dumps({"source": ["aws.health"]}))["RuleArn"]
    events.put_targets(Rule="mail", Targets=[{"Id": "topic", "Arn": topic}])
    sns.set_topic_attributes(TopicArn=topic, AttributeName="Policy", AttributeValue=policy("sns:Publish", topic, rule))
    other, off = Queue(aws, "other", ["aws.sagemaker"]), Queue(aws, "off", ["aws.health"])
    off.events.disable_rule(Name="off")
    aws.events.health(min(cluster.nodes()))
    (message,) = sqs.receive_message(QueueUrl=inbox)["Messages"]
    assert json.loads(json.loads(message["Body"])["Message"])["source"] == "aws.health"
    assert (other.read(), off.read()) == ([], [])


def test_a_rule_that_may_not_write_delivers_nothing_and_its_event_is_kept_where_it_may(
    aws: LocalAws, cluster: Cluster
) -> None:
    shut = Queue(aws, "shut", ["aws.health"], allowed=False)
    sqs = shut.sqs
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    arn = f"arn:aws:sqs:{REGION}:{ACCOUNT}:dead"
    sqs.set_queue_attributes(QueueUrl=dead, Attributes={"Policy": policy("sqs:SendMessage", arn, shut.rule)})
    shut.events.put_targets(Rule="shut", Targets=[{"Id": "queue", "Arn": shut.arn, "DeadLetterConfig": {"Arn": arn}}])
    aws.events.health(min(cluster.nodes()))
    assert shut.read() == []
    (message,) = sqs.receive_message(QueueUrl=dead, MessageAttributeNames=["All"])["Messages"]
    assert json.loads(message["Body"])["source"] == "aws.health"
    assert message["MessageAttributes"]["ERROR_CODE"]["StringValue"] == "NO_PERMISSIONS"
    why = next(one["why"] for one in aws.events.state()["undelivered"] if one["rule"] == "shut")
    assert f"the policy of {shut.arn} does not let events.amazonaws.com" in why


def test_nobody_but_aws_may_put_an_event_of_aws(aws: LocalAws) -> None:
    queue = Queue(aws, "users", ["aws.ec2", "my.app"])
    entry = {"DetailType": "t", "Detail": "{}"}
    said = queue.events.put_events(Entries=[{**entry, "Source": "aws.ec2"}, {**entry, "Source": "my.app"}])
    assert said["FailedEntryCount"] == 1
    assert said["Entries"][0]["ErrorCode"] == "NotAuthorizedForSourceException"
    assert [one["source"] for one in queue.read()] == ["my.app"]


def test_a_faulty_node_of_hyperpod_is_replaced_and_so_is_one_on_request(aws: LocalAws) -> None:
    put_scripts(aws)
    network, sagemaker = Network(aws), client(aws, "sagemaker")
    queue = Queue(aws, "hyperpod", ["aws.sagemaker"])
    role = make_role(aws, "fault-node", "sagemaker.amazonaws.com")
    sagemaker.create_cluster(**slurm_cluster("faults", network, role))

    def workers() -> dict[str, str]:
        shown = sagemaker.list_cluster_nodes(ClusterName="faults")["ClusterNodeSummaries"]
        ours = [one for one in shown if one["InstanceGroupName"] == "train"]
        return {one["InstanceId"]: one["InstanceStatus"]["Status"] for one in ours}

    wait_until(lambda: len(workers()) == 4)
    queue.read()
    faulty, tired, *_ = before = sorted(workers())
    fresh = aws.events.node_fault("faults", faulty, REGION)["instance"]
    assert fresh not in before
    assert set(workers()) == {fresh, *before} - {faulty}
    kind = "SageMaker HyperPod Cluster Node Health Event"
    health = [one["detail"] for one in queue.read() if one["detail-type"] == kind]
    assert [one["InstanceId"] for one in health] == [faulty, fresh]
    assert [one["HealthSummary"]["HealthStatus"] for one in health] == ["Unhealthy", "Healthy"]
    assert "NvidiaErrorTerminate" in health[0]["HealthSummary"]["HealthStatusReason"]
    other = aws.events.node_replacement("faults", tired, REGION)["instance"]
    assert set(workers()) == {fresh, other, *before} - {faulty, tired}
    assert set(workers().values()) == {"Running"}
    told = [one["detail"]["EventDetails"]["InstanceId"] for one in queue.read() if "EventDetails" in one["detail"]]
    assert tired in told
    with pytest.raises(ValueError, match=faulty):
        aws.events.node_fault("faults", faulty, REGION)
    with pytest.raises(ValueError, match="nowhere"):
        aws.events.node_replacement("nowhere", fresh, REGION)
    in_service(sagemaker, "faults")
    sagemaker.update_cluster(ClusterName="faults", NodeRecovery="None")
    in_service(sagemaker, "faults")
    assert aws.events.node_fault("faults", fresh, REGION)["instance"] == fresh
    assert workers()[fresh] == "Failure"


def test_control_addresses_are_on_loopback_only() -> None:
    with pytest.raises(ValueError, match="on loopback"):
        Events("http://192.0.2.1:80").rebalance("i-0123456789abcdef0")


def test_the_command_line_says_what_it_leaves_out_plays_events_and_leaves_nothing_running() -> None:
    server = subprocess.Popen([sys.executable, "-m", "infra.local"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    said: list[str] = []
    while not said or not said[-1].startswith("export LUSTRAIN_LOCAL_METADATA_CONTROL="):
        said.append(server.stdout.readline().strip())
        assert said[-1] or server.poll() is None
    exports = dict(line.removeprefix("export ").split("=", 1) for line in said if line.startswith("export "))
    try:
        for module in (*additions.MODULES, *additions.SHARED_MODULES):
            left_out = importlib.import_module(f"infra.local.additions.{module}").LEFT_OUT
            assert f"#   {left_out}" in said, module
        assert any(line.startswith("#   instance metadata: no IMDSv1") for line in said)
        play = [sys.executable, "-m", "infra.local"]
        heard: dict[str, Any] = {"env": {**os.environ, **exports}, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run([*play, "state"], **heard)
        assert json.loads(done.stdout) == {"groups": {}, "undelivered": []}
        done = subprocess.run([*play, "spot", "instance=i-0123456789abcdef0"], **heard)
        assert (done.returncode, done.stdout) == (2, "spot: no running instance i-0123456789abcdef0 in any region\n")
    finally:
        server.terminate()
        assert server.wait(300) == 0
    with pytest.raises(OSError, match="refused"):
        Events(exports["LUSTRAIN_LOCAL_AWS_CONTROL"]).state()
