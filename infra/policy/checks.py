"""What a rule looks at in one resource: each check yields a text for everything that is wrong, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_network
from typing import Any

from infra.plan.network.security import WORLD
from infra.plan.nodes.auto_scaling import HOP_LIMIT
from infra.plan.place import COST_TAG
from infra.policy.declared import UNKNOWN, Resource, allowed, any_resource, is_true, is_unknown, parsed, tables, texts

LAUNCH_TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
INSTANCE = "aws:ec2/instance:Instance"
LUSTRE = "aws:fsx/lustreFileSystem:LustreFileSystem"
OPEN_ZFS = "aws:fsx/openZfsFileSystem:OpenZfsFileSystem"
EFS = "aws:efs/fileSystem:FileSystem"
VOLUME = "aws:ebs/volume:Volume"
WORKSPACE = "aws:amp/workspace:Workspace"
BUCKETS = ("aws:s3/bucket:Bucket", "aws:s3/bucketV2:BucketV2")
SECURITY_GROUP = "aws:ec2/securityGroup:SecurityGroup"
ENDPOINT = "aws:ec2/vpcEndpoint:VpcEndpoint"
EKS = "aws:eks/cluster:Cluster"
ROLE = "aws:iam/role:Role"
CLOUD_CONTROL = "aws:cloudcontrol/resource:Resource"
GROUP = "aws:autoscaling/group:Group"
BLOCK = "aws:ec2/capacityBlockReservation:CapacityBlockReservation"
RESERVATION = "aws:ec2/capacityReservation:CapacityReservation"

BILLED = frozenset(
    {
        INSTANCE,
        LUSTRE,
        OPEN_ZFS,
        EFS,
        *BUCKETS,
        ENDPOINT,
        BLOCK,
        RESERVATION,
        WORKSPACE,
        "aws:cloudwatch/logGroup:LogGroup",
        "aws:cloudwatch/metricAlarm:MetricAlarm",
        VOLUME,
        "aws:ec2/eip:Eip",
        "aws:ec2/natGateway:NatGateway",
        "aws:ecr/repository:Repository",
        EKS,
        "aws:kms/key:Key",
        "aws:secretsmanager/secret:Secret",
        "aws:sns/topic:Topic",
        "aws:sqs/queue:Queue",
    }
)
"""What appears on the bill and takes a map of tags; three more kinds take them in a form of their own."""
IDENTITY_POLICIES = {
    "aws:iam/policy:Policy": "policy",
    "aws:iam/rolePolicy:RolePolicy": "policy",
    "aws:iam/userPolicy:UserPolicy": "policy",
    "aws:iam/groupPolicy:GroupPolicy": "policy",
}
ATTACHMENTS = frozenset(
    f"aws:iam/{kind}:{kind[0].upper()}{kind[1:]}"
    for kind in ("policyAttachment", "rolePolicyAttachment", "userPolicyAttachment", "groupPolicyAttachment")
)
MIGHTY = ("AdministratorAccess", "PowerUserAccess", "IAMFullAccess")
"""AWS's own policies that allow everything, or giving oneself everything
(https://docs.aws.amazon.com/IAM/latest/UserGuide/access_policies_job-functions.html)."""
ACLS = ("aws:s3/bucketAcl:BucketAcl", "aws:s3/bucketAclV2:BucketAclV2", *BUCKETS)
PUBLIC_ACLS = ("public-read", "public-read-write", "authenticated-read")
PUBLIC_GROUPS = ("/global/AllUsers", "/global/AuthenticatedUsers")
"""How https://docs.aws.amazon.com/AmazonS3/latest/userguide/acl-overview.html calls everyone."""
RESOURCE_POLICIES = {
    "aws:ecr/repositoryPolicy:RepositoryPolicy": "policy",
    ROLE: "assumeRolePolicy",
    "aws:kms/key:Key": "policy",
    "aws:s3/bucketPolicy:BucketPolicy": "policy",
    "aws:sns/topic:Topic": "policy",
    "aws:sns/topicPolicy:TopicPolicy": "policy",
    "aws:sqs/queue:Queue": "policy",
    "aws:sqs/queuePolicy:QueuePolicy": "policy",
}
NARROWING = frozenset(
    {"aws:sourcearn", "aws:sourceaccount", "aws:principalarn", "aws:principalorgid", "aws:principalaccount"}
    | {"aws:sourcevpce", "aws:sourcevpc", "sts:externalid"}
)
"""Condition keys that say who may, where the principal is everyone."""


def public_address(resource: Resource) -> Iterator[str]:
    if resource.type != LAUNCH_TEMPLATE:
        return
    interfaces = resource.rows("networkInterfaces")
    if len(interfaces) > 1 and any(is_true(nic.get("associatePublicIpAddress")) for nic in interfaces):
        yield f"asks for a public address on {len(interfaces)} interfaces; EC2 gives one to a single interface only"


def public_machine(resource: Resource) -> Iterator[str]:
    if resource.type == INSTANCE and is_true(resource.at("associatePublicIpAddress")):
        yield "has a public address: it is on the internet, and so is what it serves where a rule lets it"


def unprotected_data(resource: Resource) -> Iterator[str]:
    if resource.type in (LUSTRE, OPEN_ZFS, EFS, VOLUME, WORKSPACE, *BUCKETS) and not resource.protect:
        yield "holds data and is not protected: a replacement or `destroy` deletes it"


def follows_groups(resource: Resource) -> Iterator[str]:
    """Yield what lets a change of security groups replace a file system; a pack sees no former state."""
    if resource.type not in (LUSTRE, OPEN_ZFS):
        return
    if not resource.at("securityGroupIds") and not is_unknown(resource.at("securityGroupIds")):
        yield "names no security group, so it gets the VPC's default one, and naming one later makes another file system"
    ignored = {path.replace("security_group_ids", "securityGroupIds") for path in resource.ignore_changes}
    if not resource.protect and "securityGroupIds" not in ignored:
        yield "follows a change of its security groups, and FSx changes them by making another file system, empty"


def open_to_the_world(resource: Resource) -> Iterator[str]:
    kind = resource.type.rsplit(":", 1)[-1]
    if kind == "SecurityGroupIngressRule":
        ranges = [resource.at("cidrIpv4"), resource.at("cidrIpv6")]
    elif kind == "SecurityGroupRule" and resource.at("type") == "ingress":
        ranges = _ranges(resource.props)
    elif kind in ("SecurityGroup", "DefaultSecurityGroup"):
        ranges = [found for rule in resource.rows("ingress") for found in _ranges(rule)]
    elif resource.type == EKS:
        ranges = _let_in_by_eks(resource)
    else:
        return
    for found in filter(_wide, texts(ranges)):
        yield f"lets {found} in"


def _let_in_by_eks(resource: Resource) -> Any:
    """Whom the API server answers; everyone is the default, as is a public endpoint."""
    public, ranges = resource.at("vpcConfig", "endpointPublicAccess"), resource.at("vpcConfig", "publicAccessCidrs")
    if public in (False, "false") or is_unknown(public) or is_unknown(ranges):
        return []
    return ranges or ["0.0.0.0/0"]


def _wide(text: str) -> bool:
    try:
        found = ip_network(text, strict=False)
    except ValueError:
        return False
    return found.prefixlen < WORLD[found.version] and not found.is_private


def _ranges(rule: Mapping[str, Any]) -> list[Any]:
    return [*texts(rule.get("cidrBlocks")), *texts(rule.get("ipv6CidrBlocks"))]


def metadata(resource: Resource) -> Iterator[str]:
    if resource.type not in (LAUNCH_TEMPLATE, INSTANCE):
        return
    tokens = resource.at("metadataOptions", "httpTokens")
    if not is_unknown(tokens) and tokens != "required":
        yield f"allows IMDSv1 (httpTokens is {tokens!r}): any program that can be made to fetch a URL gets the role"
    hops = resource.at("metadataOptions", "httpPutResponseHopLimit")
    if isinstance(hops, int | float) and hops > HOP_LIMIT:
        yield f"lets metadata answers travel {hops:g} hops"


def untagged(resource: Resource) -> Iterator[str]:
    if COST_TAG not in _tag_keys(resource):
        yield f"has no tag {COST_TAG}, so the budget does not count it"


def _tag_keys(resource: Resource) -> set[Any]:
    """Keys of the tags; the cost tag itself where the resource takes none or they are not known yet."""
    if resource.type == LAUNCH_TEMPLATE:
        return _launch_template_keys(resource)
    if resource.type == CLOUD_CONTROL:
        return _desired_state_keys(resource)
    tags = resource.at("tags")
    if resource.type == GROUP and not is_unknown(tags):
        return {row.get("key") for row in tables(tags) if is_true(row.get("propagateAtLaunch"))}
    return _keys(tags) if resource.type in BILLED else {COST_TAG}


def _launch_template_keys(resource: Resource) -> set[Any]:
    """Those on both the instances and their volumes; a volume does not inherit the tags of its instance."""
    if is_unknown(resource.at("tagSpecifications")):
        return {COST_TAG}
    specifications = {row.get("resourceType"): row.get("tags") for row in resource.rows("tagSpecifications")}
    return _keys(specifications.get("instance")) & _keys(specifications.get("volume"))


def _keys(tags: Any) -> set[Any]:
    if is_unknown(tags):
        return {COST_TAG}
    return set(tags) if isinstance(tags, Mapping) else set()


def _desired_state_keys(resource: Resource) -> set[Any]:
    state = resource.at("desiredState")
    return {COST_TAG} if is_unknown(state) else {row.get("Key") for row in tables(parsed(state).get("Tags"))}


def unprotected_purchase(resource: Resource) -> Iterator[str]:
    if resource.type in (BLOCK, RESERVATION) and not resource.protect:
        yield "is paid for and not protected: a replacement buys a second one"


def plain_volume(resource: Resource) -> Iterator[str]:
    mappings = [row.get("ebs") for row in resource.rows("blockDeviceMappings")]
    if resource.type == INSTANCE:
        mappings = [resource.at("rootBlockDevice"), *resource.rows("ebsBlockDevices")]
    if resource.type in (VOLUME, EFS):
        mappings = [resource.props]
    for volume in mappings:
        encrypted = volume.get("encrypted") if isinstance(volume, Mapping) else UNKNOWN
        if not is_unknown(encrypted) and not is_true(encrypted):
            yield "has a volume that is not encrypted"


def plain_queue(resource: Resource) -> Iterator[str]:
    if resource.type != "aws:sqs/queue:Queue":
        return
    own, key = resource.at("sqsManagedSseEnabled"), resource.at("kmsMasterKeyId")
    if not (is_true(own) or is_unknown(own) or is_unknown(key) or key):
        yield "does not say that its messages are encrypted"


def deaf_topic(resource: Resource) -> Iterator[str]:
    if resource.type == "aws:sns/topic:Topic" and str(resource.at("kmsMasterKeyId")).endswith("alias/aws/sns"):
        yield "is encrypted with AWS's own key, which lets neither alarms nor EventBridge publish: no message arrives"


def endless_logs(resource: Resource) -> Iterator[str]:
    days = resource.at("retentionInDays")
    if resource.type == "aws:cloudwatch/logGroup:LogGroup" and not is_unknown(days) and not days:
        yield "keeps logs forever"


def mutable_tags(resource: Resource) -> Iterator[str]:
    mutability = resource.at("imageTagMutability")
    if resource.type == "aws:ecr/repository:Repository" and not is_unknown(mutability) and mutability != "IMMUTABLE":
        yield "lets a tag move to another image, so a node that is replaced may run other code than its peers"


def all_actions(resource: Resource) -> Iterator[str]:
    documents = [row.get("policy") for row in resource.rows("inlinePolicies")] if resource.type == ROLE else []
    if resource.type in IDENTITY_POLICIES:
        documents = [resource.at(IDENTITY_POLICIES[resource.type])]
    for document in documents:
        yield from _unreadable(document)
        yield from _wide_actions(document)
    attached = resource.at("policyArn") if resource.type in ATTACHMENTS else None
    for arn in texts(resource.at("managedPolicyArns") if resource.type == ROLE else attached):
        if arn.partition(":aws:policy/")[2] in MIGHTY:
            yield f"has {arn}, which allows everything or leads there"


def _wide_actions(document: Any) -> Iterator[str]:
    for statement in allowed(document):
        actions = texts(statement.get("Action"))
        if {"*", "*:*"} & set(actions) or "NotAction" in statement:
            yield "allows every action"
        elif any_resource(statement) and (wide := [action for action in actions if action.endswith(":*")]):
            yield f"allows {', '.join(wide)} on every resource"


def _unreadable(document: Any) -> Iterator[str]:
    if isinstance(document, str) and not parsed(document):
        yield "has a policy that is not a JSON object, so what it allows is unknown"


def anyone(resource: Resource) -> Iterator[str]:
    if resource.type in ACLS:
        yield from _public_acl(resource)
    if resource.type not in RESOURCE_POLICIES:
        return
    document = resource.at(RESOURCE_POLICIES[resource.type])
    yield from _unreadable(document)
    for statement in allowed(document):
        if _everyone(statement.get("Principal")) and not _narrowed(statement.get("Condition")):
            yield "allows everyone in every account"


def _public_acl(resource: Resource) -> Iterator[str]:
    if (acl := resource.at("acl")) in PUBLIC_ACLS:
        yield f"has the ACL {acl}"
    grants = [*resource.rows("accessControlPolicy", "grants"), *resource.rows("grants")]
    takers = [row.get("uri") for row in grants]
    takers += [row["grantee"].get("uri") for row in grants if isinstance(row.get("grantee"), Mapping)]
    for uri in texts(takers):
        if uri.endswith(PUBLIC_GROUPS):
            yield f"gives {uri.rpartition('/')[2]} its objects"


def _everyone(principal: Any) -> bool:
    return "*" in texts(principal.get("AWS") if isinstance(principal, Mapping) else principal)


def _narrowed(condition: Any) -> bool:
    operators = condition.values() if isinstance(condition, Mapping) else ()
    return any(key.lower() in NARROWING for keys in operators if isinstance(keys, Mapping) for key in keys)


def public_subnet(resource: Resource) -> Iterator[str]:
    if resource.type == "aws:ec2/subnet:Subnet" and is_true(resource.at("mapPublicIpOnLaunch")):
        yield "gives every machine in it a public address"
