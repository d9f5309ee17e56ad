"""Every rule of the policy pack speaks up about what it forbids, and about nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.plan.place import COST_TAG
from infra.policy import checks, relations
from infra.policy.checks import BILLED
from infra.policy.declared import UNKNOWN, Resource
from lustrain.problem import Problem

TAGS = {COST_TAG: "llm"}
SPECIFIED = [{"resourceType": kind, "tags": TAGS} for kind in ("instance", "volume")]
RULES = (*checks.RULES, *relations.RULES)
CODES = [rule.code for rule in RULES]


def resource(kind: str, *, uses: dict[str, tuple[Resource, ...]] | None = None, **more: Any) -> Resource:
    """`kind` in short (`ec2/vpc:Vpc`); every resource has a URN of its own."""
    linked = {prop: frozenset(one.urn for one in used) for prop, used in (uses or {}).items()}
    props = more.pop("props", {})
    options = {key: more.pop(key) for key in ("protect", "ignore_changes") if key in more}
    return Resource(f"aws:{kind}", props, kind, f"urn:{kind}:{json.dumps(props, default=str)}", uses=linked, **options)


METADATA = {"httpTokens": "required", "httpPutResponseHopLimit": 2.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "queue": ("sqs/queue:Queue", {"sqsManagedSseEnabled": True, "tags": TAGS}),
    "ingress": ("vpc/securityGroupIngressRule:SecurityGroupIngressRule", {}),
    "subnet": ("ec2/subnet:Subnet", {}),
    "role": ("iam/role:Role", {}),
    "policy": ("iam/policy:Policy", {}),
    "role policy": ("iam/rolePolicy:RolePolicy", {}),
    "attached": ("iam/rolePolicyAttachment:RolePolicyAttachment", {}),
    "queue policy": ("sqs/queuePolicy:QueuePolicy", {}),
    "topic policy": ("sns/topicPolicy:TopicPolicy", {}),
    "bucket policy": ("s3/bucketPolicy:BucketPolicy", {}),
    "acl": ("s3/bucketAcl:BucketAcl", {}),
    "logs": ("cloudwatch/logGroup:LogGroup", {"tags": TAGS}),
    "topic": ("sns/topic:Topic", {"tags": TAGS}),
    "images": ("ecr/repository:Repository", {"tags": TAGS}),
    "machine": ("ec2/instance:Instance", {}),
    "alert rules": ("amp/ruleGroupNamespace:RuleGroupNamespace", {}),
    "alert manager": ("amp/alertManagerDefinition:AlertManagerDefinition", {}),
}


def of(name: str, **props: Any) -> Resource:
    kind, good = KINDS[name]
    return resource(kind, props={**good, **props})


def template(uses: dict[str, tuple[Resource, ...]] | None = None, **props: Any) -> Resource:
    good = {
        "metadataOptions": METADATA,
        "tagSpecifications": SPECIFIED,
    }
    return resource("ec2/launchTemplate:LaunchTemplate", props={**good, **props}, uses=uses)


def statement(**more: Any) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Resource": "*", **more}]})


VPC = resource("ec2/vpc:Vpc")
INTERNET = resource("ec2/internetGateway:InternetGateway", uses={"vpcId": (VPC,)})


def endpoint(**props: Any) -> Resource:
    name = "com.amazonaws.us-east-1.s3"
    kind = "ec2/vpcEndpoint:VpcEndpoint"
    return resource(kind, props={"serviceName": name, "tags": TAGS, **props}, uses={"vpcId": (VPC,)})


def lustre(**options: Any) -> Resource:
    props = {"tags": TAGS, "securityGroupIds": ["sg-1"], **options.pop("props", {})}
    return resource("fsx/lustreFileSystem:LustreFileSystem", props=props, **options)


def eks(**network: Any) -> Resource:
    return resource("eks/cluster:Cluster", props={"tags": TAGS, "vpcConfig": network})


OVER_TLS = {"Bool": {"aws:SecureTransport": "true"}}
FROM_ONE = {"ArnEquals": {"aws:SourceArn": "arn:aws:x"}}
OF_ACCOUNT = {"StringEquals": {"aws:ResourceAccount": "123456789012"}}
ADMINISTRATOR = "arn:aws:iam::aws:policy/AdministratorAccess"
ALL_USERS = "http://acs.amazonaws.com/groups/global/AllUsers"


def public_nic(count: int) -> list[dict[str, Any]]:
    return [{"deviceIndex": index, "associatePublicIpAddress": "true"} for index in range(count)]


GROUP = resource("ec2/placementGroup:PlacementGroup", props={"name": "near"})
RESERVED = {"capacityReservationTarget": {"capacityReservationId": "cr-0123456789abcdef0"}}
INTO: dict[str, Any] = {"capacityReservationSpecification": RESERVED}
IN_GROUP: dict[str, Any] = {"placement": {"groupName": "near"}}
MADE_IN_GROUP = resource(
    "ec2/capacityReservation:CapacityReservation",
    props={"tags": TAGS, "placementGroupArn": UNKNOWN},
    uses={"placementGroupArn": (GROUP,)},
    protect=True,
)

BUCKET = resource("s3/bucket:Bucket", props={"bucket": "runs", "tags": TAGS}, protect=True)
BLOCKS = dict.fromkeys(("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"), True)
BLOCKED = resource("s3/bucketPublicAccessBlock:BucketPublicAccessBlock", props=BLOCKS, uses={"bucket": (BUCKET,)})
ABORTS = {"status": "Enabled", "abortIncompleteMultipartUpload": {"daysAfterInitiation": 1.0}}


def lifecycle(**rule: Any) -> Resource:
    props = {"bucket": UNKNOWN, "rules": [{**ABORTS, **rule}]}
    kind = "s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration"
    return resource(kind, props=props, uses={"bucket": (BUCKET,)})


CLUSTER = resource("ec2/securityGroup:SecurityGroup", props={"name": "cluster"})
OTHER = resource("ec2/securityGroup:SecurityGroup", props={"name": "other"})
EFA = template(networkInterfaces=[{"interfaceType": "efa-only"}], uses={"networkInterfaces": (CLUSTER,)})


def own_rule(way: str, peer: Resource = CLUSTER, protocol: str = "-1") -> Resource:
    return resource(
        f"vpc/securityGroup{way}Rule:SecurityGroup{way}Rule",
        props={"ipProtocol": protocol},
        uses={"securityGroupId": (CLUSTER,), "referencedSecurityGroupId": (peer,)},
    )


BAD: dict[str, list[list[Resource]]] = {
    "POL-001": [
        [template(**IN_GROUP, instanceMarketOptions={"marketType": "capacity-block"})],
        [GROUP, template(**IN_GROUP, **INTO)],
        [GROUP, template(placement={"groupName": UNKNOWN}, **INTO, uses={"placement": (GROUP,)})],
    ],
    "POL-002": [[template(networkInterfaces=public_nic(2))]],
    "POL-003": [
        [resource("s3/bucketV2:BucketV2", props={"tags": TAGS})],
        [lustre()],
        [resource("fsx/openZfsFileSystem:OpenZfsFileSystem", props={"tags": TAGS})],
        [resource("ebs/volume:Volume", props={"tags": TAGS, "encrypted": True})],
        [resource("efs/fileSystem:FileSystem", props={"tags": TAGS, "encrypted": True})],
        [resource("amp/workspace:Workspace", props={"tags": TAGS})],
    ],
    "POL-004": [
        [lustre()],
        [lustre(ignore_changes=("storageCapacity",))],
        [lustre(protect=True, props={"securityGroupIds": None})],
        [lustre(protect=True, props={"securityGroupIds": []})],
    ],
    "POL-005": [
        [of("ingress", cidrIpv4="0.0.0.0/0")],
        [of("ingress", cidrIpv6="::/0")],
        [resource("ec2/securityGroupRule:SecurityGroupRule", props={"type": "ingress", "cidrBlocks": ["0.0.0.0/0"]})],
        [resource("ec2/securityGroup:SecurityGroup", props={"ingress": [{"ipv6CidrBlocks": ["::/0"]}]})],
        [resource("ec2/defaultSecurityGroup:DefaultSecurityGroup", props={"ingress": [{"cidrBlocks": ["0.0.0.0/0"]}]})],
        *([of("ingress", cidrIpv4=half)] for half in ("0.0.0.0/1", "128.0.0.0/1", "64.0.0.0/2", "8.0.0.0/7")),
        *([of("ingress", cidrIpv6=most)] for most in ("0::/0", "0:0::0/0", "8000::/1", "2000::/3")),
        [eks()],
        *([eks(publicAccessCidrs=ranges)] for ranges in ([], ["0.0.0.0/0"])),
        [eks(endpointPublicAccess=True, publicAccessCidrs=["203.0.113.0/24", "0.0.0.0/1"])],
    ],
    "POL-006": [
        [template(metadataOptions={"httpTokens": "optional"})],
        [template(metadataOptions=None)],
        [template(metadataOptions={"httpTokens": "required", "httpPutResponseHopLimit": 3.0})],
        [of("machine", tags=TAGS)],
    ],
    "POL-007": [
        [of("queue", tags={"Name": "mine"})],
        [of("queue", tags=None)],
        [template(tagSpecifications=SPECIFIED[:1])],
        [resource("autoscaling/group:Group", props={"tags": [{"key": COST_TAG, "propagateAtLaunch": False}]})],
        [resource("cloudcontrol/resource:Resource", props={"desiredState": json.dumps({"Tags": [{"Key": "Name"}]})})],
        *([resource(kind.removeprefix("aws:"), protect=True)] for kind in sorted(BILLED)),
    ],
    "POL-008": [
        [VPC, endpoint(policy=statement(Action="*", Principal="*"))],
        [VPC, endpoint(policy=statement(Action=["s3:*"], Principal="*", Resource=["arn:aws:s3:::*"]))],
    ],
    "POL-009": [
        [resource("ec2/capacityBlockReservation:CapacityBlockReservation", props={"tags": TAGS})],
        [resource("ec2/capacityReservation:CapacityReservation", props={"tags": TAGS})],
    ],
    "POL-010": [
        [BUCKET, BLOCKED],
        [BUCKET, BLOCKED, lifecycle(status="Disabled")],
        [BUCKET, BLOCKED, lifecycle(abortIncompleteMultipartUpload=None)],
        [BUCKET, BLOCKED, lifecycle(filter={"prefix": "runs/"})],
    ],
    "POL-011": [
        [CLUSTER, EFA],
        [CLUSTER, EFA, own_rule("Ingress")],
        [CLUSTER, EFA, own_rule("Ingress"), own_rule("Egress", peer=OTHER)],
        [CLUSTER, EFA, own_rule("Ingress"), own_rule("Egress", protocol="tcp")],
        [CLUSTER, resource("cloudcontrol/resource:Resource", uses={"desiredState": (CLUSTER,)})],
    ],
    "POL-012": [
        [template(blockDeviceMappings=[{"ebs": {"volumeSize": 100.0}}])],
        [template(blockDeviceMappings=[{"ebs": {"encrypted": "true"}}, {"ebs": {"encrypted": "false"}}])],
        [resource("ebs/volume:Volume", props={"tags": TAGS})],
        [resource("efs/fileSystem:FileSystem", protect=True, props={"tags": TAGS})],
        [of("machine", rootBlockDevice={"encrypted": False})],
    ],
    "POL-013": [[of("queue", sqsManagedSseEnabled=False)], [of("queue", sqsManagedSseEnabled=None)]],
    "POL-014": [[of("topic", kmsMasterKeyId="alias/aws/sns")]],
    "POL-015": [
        [of("logs")],
        [of("logs", retentionInDays=0.0)],
    ],
    "POL-016": [[of("images")]],
    "POL-017": [
        [BUCKET, lifecycle()],
        [resource("s3/bucketV2:BucketV2", props={"tags": TAGS}, protect=True)],
        [BUCKET, lifecycle(), replace(BLOCKED, props={**BLOCKS, "blockPublicPolicy": False})],
    ],
    "POL-018": [
        [of("policy", policy=statement(Action="*"))],
        [of("role policy", policy=statement(Action=["s3:*"]))],
        [of("role policy", policy=statement(NotAction="iam:*"))],
        [of("role policy", policy=statement(Action="*:*"))],
        [of("policy", policy="Action: *")],
        [of("attached", policyArn="arn:aws:iam::aws:policy/AdministratorAccess")],
        [of("attached", policyArn="arn:aws-cn:iam::aws:policy/PowerUserAccess")],
        [of("role", managedPolicyArns=["arn:aws:iam::aws:policy/job-function/Billing", ADMINISTRATOR])],
        [of("role", inlinePolicies=[{"name": "all", "policy": statement(Action="*")}])],
        [of("role", inlinePolicies=[{"name": "all", "policy": "[]"}])],
    ],
    "POL-019": [
        [of("queue policy", policy=statement(Action="sqs:*", Principal="*"))],
        [of("role", assumeRolePolicy=statement(Principal={"AWS": "*"}))],
        [of("role", assumeRolePolicy="anyone")],
        [of("acl", acl="public-read")],
        [of("acl", acl="authenticated-read")],
        [of("acl", accessControlPolicy={"grants": [{"grantee": {"uri": ALL_USERS}, "permission": "READ"}]})],
        [resource("s3/bucketV2:BucketV2", props={"tags": TAGS, "grants": [{"uri": ALL_USERS}]}, protect=True)],
        [of("bucket policy", policy=statement(Principal="*", Condition=OVER_TLS))],
    ],
    "POL-020": [[of("subnet", mapPublicIpOnLaunch=True)]],
    "POL-021": [[of("machine", tags=TAGS, associatePublicIpAddress=True)]],
    "POL-022": [
        [of("alert rules", workspaceId="ws-1")],
        [of("alert rules", workspaceId="ws-1"), of("alert manager", workspaceId="ws-2")],
    ],
}

GOOD: dict[str, list[list[Resource]]] = {
    "POL-001": [
        [GROUP, template(**IN_GROUP)],
        [template(**INTO)],
        [GROUP, MADE_IN_GROUP, template(**IN_GROUP, **INTO)],
        [template(placement={"groupName": "theirs"}, **INTO)],
        [template(placement={"tenancy": "default"}, instanceMarketOptions={"marketType": "capacity-block"})],
    ],
    "POL-002": [[template(networkInterfaces=public_nic(1))], [template(networkInterfaces=[{}, {}])]],
    "POL-003": [[lustre(protect=True)]],
    "POL-004": [
        [lustre(protect=True)],
        [lustre(protect=True, ignore_changes=("securityGroupIds",))],
        [lustre(protect=True, props={"securityGroupIds": UNKNOWN})],
    ],
    "POL-005": [
        [of("ingress", cidrIpv4="10.0.0.0/16")],
        [resource("vpc/securityGroupEgressRule:SecurityGroupEgressRule", props={"cidrIpv4": "0.0.0.0/0"})],
        [resource("ec2/securityGroupRule:SecurityGroupRule", props={"type": "egress", "cidrBlocks": ["0.0.0.0/0"]})],
        *([of("ingress", cidrIpv4=own)] for own in ("10.0.0.0/8", "203.0.113.7/32", "no range")),
        [of("ingress", cidrIpv6="fc00::/7")],
        *([eks(endpointPublicAccess=no)] for no in (False, "false")),
        [eks(endpointPublicAccess=True, publicAccessCidrs=["203.0.113.0/24"])],
        [eks(endpointPublicAccess=True, publicAccessCidrs=UNKNOWN)],
    ],
    "POL-006": [[template()]],
    "POL-007": [
        [of("queue")],
        [template()],
        [resource("autoscaling/group:Group", props={"tags": [{"key": COST_TAG, "propagateAtLaunch": True}]})],
        [resource("cloudcontrol/resource:Resource", props={"desiredState": json.dumps({"Tags": [{"Key": COST_TAG}]})})],
        [resource("ec2/routeTable:RouteTable")],
    ],
    "POL-008": [
        [VPC, INTERNET, endpoint(policy=statement(Action="*", Principal="*"))],
        [endpoint(policy=statement(Action="*", Principal="*"))],
        [
            VPC,
            endpoint(
                policy=statement(Action="s3:*", Principal="*", Resource=["arn:aws:s3:::runs", "arn:aws:s3:::runs/*"])
            ),
        ],
        [VPC, endpoint(policy=statement(Action="*", Principal="*", Condition=OF_ACCOUNT))],
        [VPC, endpoint(serviceName="com.amazonaws.us-east-1.sts")],
    ],
    "POL-009": [[resource("ec2/capacityReservation:CapacityReservation", props={"tags": TAGS}, protect=True)]],
    "POL-010": [[BUCKET, BLOCKED, lifecycle()], [BUCKET, BLOCKED, lifecycle(filter={"prefix": ""})]],
    "POL-011": [
        [CLUSTER, EFA, own_rule("Ingress"), own_rule("Egress")],
        [replace(CLUSTER, props={way: [{"self": True, "protocol": "-1"}] for way in ("ingress", "egress")}), EFA],
        [CLUSTER, template(networkInterfaces=[{"interfaceType": "interface"}], uses={"networkInterfaces": (CLUSTER,)})],
    ],
    "POL-012": [[template(blockDeviceMappings=[{"ebs": {"encrypted": "true"}}])]],
    "POL-013": [[of("queue")], [of("queue", sqsManagedSseEnabled=None, kmsMasterKeyId="alias/mine")]],
    "POL-014": [
        [of("topic")],
        [of("topic", kmsMasterKeyId="alias/mine")],
    ],
    "POL-015": [[of("logs", retentionInDays=30.0)]],
    "POL-016": [[of("images", imageTagMutability="IMMUTABLE")]],
    "POL-017": [[BUCKET, lifecycle(), BLOCKED]],
    "POL-018": [
        [of("policy", policy=statement(Action="ec2:DescribeInstances"))],
        [of("policy", policy=UNKNOWN)],
        [of("attached", policyArn="arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore")],
        [of("attached", policyArn="arn:aws:iam::123456789012:policy/AdministratorAccess")],
        [of("role", managedPolicyArns=["arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"])],
        [of("role", inlinePolicies=[{"name": "look", "policy": statement(Action="ec2:DescribeInstances")}, {}])],
        [of("policy", policy=statement(Action="s3:*", Resource="arn:aws:s3:::runs/*"))],
        [of("policy", policy=json.dumps({"Statement": {"Effect": "Deny", "Action": "*"}}))],
    ],
    "POL-019": [
        [of("acl", acl="private")],
        [of("acl", accessControlPolicy={"grants": [{"grantee": {"id": "79a5"}, "permission": "READ"}]})],
        [of("queue policy", policy=statement(Principal={"Service": "events.amazonaws.com"}, Action="sqs:Send"))],
        [of("topic policy", policy=statement(Principal="*", Condition=FROM_ONE))],
    ],
    "POL-020": [[of("subnet", mapPublicIpOnLaunch=False)]],
    "POL-021": [[of("machine", tags=TAGS, metadataOptions=METADATA, associatePublicIpAddress=False)]],
    "POL-022": [[of("alert rules", workspaceId="ws-1"), of("alert manager", workspaceId="ws-1")]],
}


def cases(samples: dict[str, list[list[Resource]]]) -> list[Any]:
    return [
        pytest.param(code, resources, id=f"{code}-{index}")
        for code, several in samples.items()
        for index, resources in enumerate(several)
    ]


def problems(resources: list[Resource]) -> list[Problem]:
    alone = [problem for rule in checks.RULES for item in resources for problem in rule.check(item)]
    return alone + [problem for rule in relations.RULES for problem in rule.check(resources)]


def codes(resources: list[Resource]) -> set[str]:
    return {problem.code for problem in problems(resources)}


def test_every_rule_has_its_own_code_and_both_kinds_of_samples() -> None:
    assert len(set(CODES)) == len(CODES)
    assert set(CODES) == set(BAD) == set(GOOD)


@pytest.mark.parametrize(("code", "resources"), cases(BAD))
def test_what_a_rule_forbids_is_reported(code: str, resources: list[Resource]) -> None:
    assert code in codes(resources)


@pytest.mark.parametrize(("code", "resources"), cases(GOOD))
def test_what_no_rule_forbids_is_not_reported(code: str, resources: list[Resource]) -> None:
    assert problems(resources) == []


class NothingKnown(dict[str, Any]):
    def get(self, key: str, default: Any = None) -> Any:
        return UNKNOWN


NOT_ABOUT_VALUES = {"POL-003", "POL-004", "POL-009", "POL-010", "POL-011", "POL-017"}
"""Rules about options, or about resources that are missing."""


@pytest.mark.parametrize(("code", "resources"), [case for case in cases(BAD) if case.values[0] not in NOT_ABOUT_VALUES])
def test_what_a_preview_does_not_know_does_not_count_against_it(code: str, resources: list[Resource]) -> None:
    unknown = [replace(one, props=NothingKnown()) for one in resources]
    assert code not in codes(unknown)


def test_message_names_resource_and_fix_rules_name_their_source() -> None:
    queue = of("queue", sqsManagedSseEnabled=False)
    (problem,) = problems([queue])
    assert (problem.code, problem.path, problem.fix) == ("POL-013", queue.urn, "sqs_managed_sse_enabled=True")
    assert all(rule.source.startswith("https://") for rule in RULES)
