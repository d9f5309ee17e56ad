"""Each example stack, up under the real engine: clean, told truly by its Cluster, and what the plan says it is."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from infra.plan.storage.buckets import buckets
from lustrain.cluster import parse as parse_cluster
from lustrain.cluster import to_json
from tests.infra.edits import place
from tests.infra.stacks import EXAMPLES, Live, example, region_of

pytestmark = pytest.mark.slow
Lives = Callable[[str], Live]

EC2 = [stack for stack in EXAMPLES if example(stack).backend == "ec2"]
HYPERPOD = [stack for stack in EXAMPLES if example(stack).hyperpod]


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_policy_pack_has_no_objection(lives: Lives, stack: str) -> None:
    said = lives(stack).said
    assert "lustrain@v" in said, "the pack was loaded"
    assert "POL-" not in said


@pytest.mark.parametrize("stack", EXAMPLES)
def test_a_second_preview_finds_nothing_to_change(lives: Lives, stack: str) -> None:
    assert lives(stack).engine.steps() == {}


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_cluster_output_reads_back_and_names_what_is_there(lives: Lives, stack: str) -> None:
    live = lives(stack)
    cluster, spec = live.cluster, live.spec
    assert parse_cluster(json.loads(json.dumps(to_json(cluster)))) == cluster
    assert (cluster.name, cluster.backend, cluster.zone_id) == (spec.name, spec.backend, spec.zone_id)
    assert cluster.region == region_of(stack)
    have = {one["Name"] for one in live.client("s3").list_buckets()["Buckets"]}
    assert {cluster.buckets.data, cluster.buckets.checkpoints, cluster.buckets.lifecycle} <= have
    assert cluster.runs_uri == f"s3://{cluster.buckets.checkpoints}/runs/"
    name = str(cluster.interruption_queue).rpartition("/")[2]
    assert live.client("sqs").get_queue_url(QueueName=name)["QueueUrl"] == cluster.interruption_queue
    role = str(cluster.role_arn).rpartition("/")[2]
    assert live.client("iam").get_role(RoleName=role)["Role"]["Arn"] == cluster.role_arn
    repository = str(cluster.image_repository).partition("/")[2]
    found = live.client("ecr").describe_repositories(repositoryNames=[repository])["repositories"][0]
    assert (found["repositoryUri"], found["imageTagMutability"]) == (cluster.image_repository, "IMMUTABLE")
    groups = live.client("logs").describe_log_groups(logGroupNamePrefix=cluster.log_group)["logGroups"]
    assert [one["retentionInDays"] for one in groups] == [30]
    if cluster.lustre:
        (system,) = live.client("fsx").describe_file_systems(FileSystemIds=[cluster.lustre.id])["FileSystems"]
        mount = (system["DNSName"], system["LustreConfiguration"]["MountName"])
        assert (system["Lifecycle"], *mount) == ("AVAILABLE", cluster.lustre.dns_name, cluster.lustre.mount_name)
    if names := list(cluster.nodes.auto_scaling_groups):
        asked = {"AutoScalingGroupNames": names}
        found = live.client("autoscaling").describe_auto_scaling_groups(**asked)["AutoScalingGroups"]
        tags = ({tag["Key"]: tag["Value"] for tag in one["Tags"]} for one in found)
        sizes = {tag["lustrain:group"]: one["DesiredCapacity"] for tag, one in zip(tags, found, strict=True)}
        assert sizes == {group.name: group.count for group in spec.groups}


@pytest.mark.parametrize("stack", EXAMPLES)
def test_nodes_reach_each_other_and_no_one_comes_in_from_outside(lives: Lives, stack: str) -> None:
    live = lives(stack)
    made = live.of_type("aws:ec2/securityGroup:SecurityGroup")
    filters = [{"Name": "group-id", "Values": [one["id"] for one in made]}]
    rules = live.client("ec2").describe_security_group_rules(Filters=filters)["SecurityGroupRules"]
    assert [one for one in rules if not one["IsEgress"] and (one.get("CidrIpv4") or one.get("CidrIpv6"))] == []
    cluster = next(one["id"] for one in made if one["urn"].endswith("-cluster"))
    own = {
        rule["IsEgress"]
        for rule in rules
        if rule["GroupId"] == cluster
        and rule.get("ReferencedGroupInfo", {}).get("GroupId") == cluster
        and rule["IpProtocol"] == "-1"
    }
    assert own == {True, False}


@pytest.mark.parametrize("stack", EXAMPLES)
def test_buckets_end_half_uploads_refuse_http_and_are_closed(lives: Lives, stack: str) -> None:
    live = lives(stack)
    s3 = live.client("s3")
    for plan in buckets(live.spec, place(stack)):
        rules = s3.get_bucket_lifecycle_configuration(Bucket=plan.name)["Rules"]
        assert any("AbortIncompleteMultipartUpload" in rule for rule in rules), plan.name
        policy = json.loads(s3.get_bucket_policy(Bucket=plan.name)["Policy"])
        assert {"Bool": {"aws:SecureTransport": "false"}} in [one.get("Condition") for one in policy["Statement"]]
        assert all(s3.get_public_access_block(Bucket=plan.name)["PublicAccessBlockConfiguration"].values())


@pytest.mark.parametrize("stack", HYPERPOD)
def test_hyperpod_runs_the_planned_groups(lives: Lives, stack: str) -> None:
    live = lives(stack)
    sagemaker = live.client("sagemaker")
    found = sagemaker.describe_cluster(ClusterName=live.cluster.nodes.hyperpod_cluster)
    groups = {one["InstanceGroupName"]: one for one in found["InstanceGroups"]}
    assert {name: (one["InstanceType"], one["TargetCount"]) for name, one in groups.items()} == {
        group.name: (group.hyperpod_type, group.count) for group in live.spec.groups
    }
    assert found["NodeRecovery"] == "Automatic"
    assert found["NodeProvisioningMode"] == "Continuous"
    uri = next(iter(groups.values()))["LifeCycleConfig"]["SourceS3Uri"]
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    keys = [one["Key"] for one in live.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]]
    assert f"{prefix.rstrip('/')}/on_init.sh" in keys
    target = str(live.cluster.reach.ssm_target)
    assert target.startswith(f"sagemaker-cluster:{found['ClusterArn'].rpartition('/')[2]}_")


@pytest.mark.parametrize("stack", [stack for stack in HYPERPOD if example(stack).backend == "hyperpod-eks"])
def test_the_control_plane_comes_first_and_answers_named_ranges(lives: Lives, stack: str) -> None:
    live = lives(stack)
    assert "aws:eks/cluster:Cluster" in live.without_nodes
    assert "aws:cloudcontrol/resource:Resource" not in live.without_nodes
    assert len(live.of_type("aws:cloudcontrol/resource:Resource")) == 1
    plane = live.client("eks").describe_cluster(name=live.cluster.kubernetes_cluster)["cluster"]["resourcesVpcConfig"]
    ranges = list(live.spec.eks.public_access_cidrs)
    assert (plane["endpointPublicAccess"], plane["publicAccessCidrs"]) == (True, ranges)


@pytest.mark.parametrize("stack", [stack for stack in EC2 if example(stack).groups[0].capacity.mode == "spot"])
def test_recommendation_for_a_node_arrives_in_the_clusters_queue(lives: Lives, stack: str) -> None:
    live = lives(stack)
    names = list(live.cluster.nodes.auto_scaling_groups)
    (group,) = live.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=names)["AutoScalingGroups"]
    node = group["Instances"][0]["InstanceId"]
    live.aws.events.rebalance(node)
    assert arrived(live, "EC2 Instance Rebalance Recommendation", node)


@pytest.mark.parametrize("stack", HYPERPOD)
def test_a_failing_node_arrives_in_the_clusters_queue(lives: Lives, stack: str) -> None:
    live = lives(stack)
    name = str(live.cluster.nodes.hyperpod_cluster)
    nodes = live.client("sagemaker").list_cluster_nodes(ClusterName=name)["ClusterNodeSummaries"]
    worker = next(one for one in nodes if one["InstanceGroupName"] == live.spec.workers[-1].name)
    live.aws.events.node_fault(name, worker["InstanceId"], str(live.cluster.region))
    assert arrived(live, "SageMaker HyperPod Cluster Node Health Event", worker["InstanceId"])


def arrived(live: Live, kind: str, node: str) -> bool:
    """Whether an event of a kind about a node comes to the cluster's queue within ten seconds.

    Notices of other clusters' nodes come as well: EC2's events say nothing of clusters.
    """
    sqs = live.client("sqs")
    for _ in range(5):
        found = sqs.receive_message(QueueUrl=live.cluster.interruption_queue, MaxNumberOfMessages=10, WaitTimeSeconds=2)
        events = [json.loads(message["Body"]) for message in found.get("Messages", [])]
        if any(event["detail-type"] == kind and node in json.dumps(event["detail"]) for event in events):
            return True
    return False
