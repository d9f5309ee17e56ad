"""POL: what no resource of a stack may be.

Values that a preview does not know yet are not held against a resource; `pulumi up` runs the same rules again with the
values in hand, before it makes the resource.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any

from infra.finding import Problems, RuleTable
from infra.plan.network.security import WORLD
from infra.plan.nodes.auto_scaling import HOP_LIMIT
from infra.plan.place import COST_TAG
from infra.policy.declared import UNKNOWN, Resource, allowed, any_resource, is_true, is_unknown, parsed, tables, texts


class ResourceRules(RuleTable):
    """Functions that yield a text for everything that is wrong with one resource."""

    @staticmethod
    def called(look: Callable[..., Any]) -> Callable[..., Problems]:
        return lambda resource: map(resource.problem, look(resource))


RULES = ResourceRules()
EC2 = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide"
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
        "aws:grafana/workspace:Workspace",
        EKS,
        "aws:kms/key:Key",
        "aws:secretsmanager/secret:Secret",
        "aws:sns/topic:Topic",
        "aws:sqs/queue:Queue",
    }
)
"""What appears on the bill and takes a map of tags; three more kinds take them in a form of their own."""
IDENTITY_POLICIES = tuple(
    f"aws:iam/{kind}:{kind[0].upper()}{kind[1:]}" for kind in ("policy", "rolePolicy", "userPolicy", "groupPolicy")
)
ATTACHMENTS = tuple(":".join(f"{part}Attachment" for part in kind.rsplit(":", 1)) for kind in IDENTITY_POLICIES)
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


@RULES.add(
    "POL-002",
    "A launch template with several network interfaces asks for no public address.",
    f"{EC2}/using-instance-addressing.html",
    fix="leave associatePublicIpAddress out and reach the nodes through SSM",
)
def public_address(resource: Resource) -> Iterator[str]:
    if resource.type != LAUNCH_TEMPLATE:
        return
    interfaces = resource.rows("networkInterfaces")
    if len(interfaces) > 1 and any(is_true(nic.get("associatePublicIpAddress")) for nic in interfaces):
        yield f"asks for a public address on {len(interfaces)} interfaces; EC2 gives one to a single interface only"


@RULES.add(
    "POL-021",
    "No machine has a public address.",
    f"{EC2}/using-instance-addressing.html",
    fix="leave associate_public_ip_address out and reach it through SSM",
)
def public_machine(resource: Resource) -> Iterator[str]:
    if resource.type == INSTANCE and is_true(resource.at("associatePublicIpAddress")):
        yield "has a public address: it is on the internet, and so is what it serves where a rule lets it"


@RULES.add(
    "POL-003",
    "What holds data is protected.",
    "https://www.pulumi.com/docs/iac/concepts/resources/options/protect/",
    fix="protect=True, retain_on_delete=True",
)
def unprotected_data(resource: Resource) -> Iterator[str]:
    if resource.type in (LUSTRE, OPEN_ZFS, EFS, VOLUME, WORKSPACE, *BUCKETS) and not resource.protect:
        yield "holds data and is not protected: a replacement or `destroy` deletes it"


@RULES.add(
    "POL-004",
    "No change of security groups replaces a file system.",
    "https://docs.aws.amazon.com/AWSCloudFormation/latest/TemplateReference/aws-resource-fsx-filesystem.html",
    fix=(
        'security_group_ids from the first day, and protect=True or ignore_changes=["security_group_ids"]; later change '
        "the rules inside the groups"
    ),
)
def follows_groups(resource: Resource) -> Iterator[str]:
    """Yield what lets a change of security groups replace a file system; a pack sees no former state."""
    if resource.type not in (LUSTRE, OPEN_ZFS):
        return
    if not resource.at("securityGroupIds") and not is_unknown(resource.at("securityGroupIds")):
        yield "names no security group, so it gets the VPC's default one, and naming one later makes another file system"
    ignored = {path.replace("security_group_ids", "securityGroupIds") for path in resource.ignore_changes}
    if not resource.protect and "securityGroupIds" not in ignored:
        yield "follows a change of its security groups, and FSx changes them by making another file system, empty"


@RULES.add(
    "POL-005",
    "No port is open to the world.",
    f"{EC2}/security-group-rules-reference.html",
    fix="name the security group or the range that needs it; log in through SSM",
)
def open_to_the_world(resource: Resource) -> Iterator[str]:
    kind = resource.type.rsplit(":", 1)[-1]
    if kind == "SecurityGroupIngressRule":
        ranges = [resource.at("cidrIpv4"), resource.at("cidrIpv6")]
    elif kind == "SecurityGroupRule" and resource.at("type") == "ingress":
        ranges = _ranges(resource.props)
    elif kind in ("SecurityGroup", "DefaultSecurityGroup"):
        ranges = [block for rule in resource.rows("ingress") for block in _ranges(rule)]
    elif resource.type == EKS:
        ranges = _let_in_by_eks(resource)
    else:
        return
    for block in filter(_wide, texts(ranges)):
        yield f"lets {block} in"


def _let_in_by_eks(resource: Resource) -> Any:
    """Whom the API server answers; everyone is the default, as is a public endpoint."""
    public, ranges = resource.at("vpcConfig", "endpointPublicAccess"), resource.at("vpcConfig", "publicAccessCidrs")
    if public in (False, "false") or is_unknown(public) or is_unknown(ranges):
        return []
    return ranges or ["0.0.0.0/0"]


def _wide(text: str) -> bool:
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return False
    return network.prefixlen < WORLD[network.version] and not network.is_private


def _ranges(rule: Mapping[str, Any]) -> list[Any]:
    return [*texts(rule.get("cidrBlocks")), *texts(rule.get("ipv6CidrBlocks"))]


@RULES.add(
    "POL-006",
    "Instance metadata takes a token, and is not read from further away.",
    f"{EC2}/configuring-instance-metadata-service.html",
    fix=f'metadata_options with http_tokens="required" and a hop limit of {HOP_LIMIT} at most',
)
def metadata(resource: Resource) -> Iterator[str]:
    if resource.type not in (LAUNCH_TEMPLATE, INSTANCE):
        return
    tokens = resource.at("metadataOptions", "httpTokens")
    if not is_unknown(tokens) and tokens != "required":
        yield f"allows IMDSv1 (httpTokens is {tokens!r}): any program that can be made to fetch a URL gets the role"
    hops = resource.at("metadataOptions", "httpPutResponseHopLimit")
    if isinstance(hops, int | float) and hops > HOP_LIMIT:
        yield f"lets metadata answers travel {hops:g} hops"


@RULES.add(
    "POL-007",
    "What is billed has the cost tag.",
    "https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/cost-alloc-tags.html",
    fix=f"tag it {COST_TAG} (instances and volumes by tag_specifications of their launch template)",
)
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


@RULES.add(
    "POL-009", "A purchase is protected.", f"{EC2}/capacity-blocks-how.html", fix="protect=True, retain_on_delete=True"
)
def unprotected_purchase(resource: Resource) -> Iterator[str]:
    if resource.type in (BLOCK, RESERVATION) and not resource.protect:
        yield "is paid for and not protected: a replacement buys a second one"


@RULES.add("POL-012", "Volumes are encrypted.", f"{EC2}/ebs-encryption.html", fix="encrypted=True")
def unencrypted_volume(resource: Resource) -> Iterator[str]:
    mappings = [row.get("ebs") for row in resource.rows("blockDeviceMappings")]
    if resource.type == INSTANCE:
        mappings = [resource.at("rootBlockDevice"), *resource.rows("ebsBlockDevices")]
    if resource.type in (VOLUME, EFS):
        mappings = [resource.props]
    for volume in mappings:
        encrypted = volume.get("encrypted") if isinstance(volume, Mapping) else UNKNOWN
        if not is_unknown(encrypted) and not is_true(encrypted):
            yield "has a volume that is not encrypted"


@RULES.add(
    "POL-013",
    "Queues are encrypted.",
    "https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-sse-existing-queue.html",
    fix="sqs_managed_sse_enabled=True",
)
def unencrypted_queue(resource: Resource) -> Iterator[str]:
    if resource.type != "aws:sqs/queue:Queue":
        return
    own, key = resource.at("sqsManagedSseEnabled"), resource.at("kmsMasterKeyId")
    if not (is_true(own) or is_unknown(own) or is_unknown(key) or key):
        yield "does not say that its messages are encrypted"


@RULES.add(
    "POL-014",
    "Alarms and EventBridge can write to a topic.",
    "https://repost.aws/knowledge-center/cloudwatch-configure-alarm-sns",
    fix="a key of your own whose policy lets cloudwatch and events use it, or no key",
)
def topic_key_blocks_services(resource: Resource) -> Iterator[str]:
    if resource.type == "aws:sns/topic:Topic" and str(resource.at("kmsMasterKeyId")).endswith("alias/aws/sns"):
        yield "is encrypted with AWS's own key, which lets neither alarms nor EventBridge publish: no message arrives"


@RULES.add(
    "POL-015",
    "Logs have an end.",
    "https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutRetentionPolicy.html",
    fix="set retention_in_days",
)
def logs_without_retention(resource: Resource) -> Iterator[str]:
    days = resource.at("retentionInDays")
    if resource.type == "aws:cloudwatch/logGroup:LogGroup" and not is_unknown(days) and not days:
        yield "keeps logs forever"


@RULES.add(
    "POL-016",
    "Tags of images do not move.",
    "https://docs.aws.amazon.com/AmazonECR/latest/userguide/image-tag-mutability.html",
    fix='image_tag_mutability="IMMUTABLE"',
)
def mutable_tags(resource: Resource) -> Iterator[str]:
    mutability = resource.at("imageTagMutability")
    if resource.type == "aws:ecr/repository:Repository" and not is_unknown(mutability) and mutability != "IMMUTABLE":
        yield "lets a tag move to another image, so a node that is replaced may run other code than its peers"


@RULES.add(
    "POL-018",
    "No policy allows everything.",
    "https://docs.aws.amazon.com/IAM/latest/UserGuide/best-practices.html",
    fix="name the actions and resources",
)
def all_actions(resource: Resource) -> Iterator[str]:
    documents = [row.get("policy") for row in resource.rows("inlinePolicies")] if resource.type == ROLE else []
    if resource.type in IDENTITY_POLICIES:
        documents = [resource.at("policy")]
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


@RULES.add(
    "POL-019",
    "No policy is for everyone.",
    "https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_principal.html",
    fix="name the principal, or narrow it by aws:SourceArn",
)
def public_access(resource: Resource) -> Iterator[str]:
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


@RULES.add(
    "POL-020",
    "No subnet hands out public addresses.",
    "https://docs.aws.amazon.com/vpc/latest/userguide/vpc-ip-addressing.html",
    fix="leave map_public_ip_on_launch out; only the NAT gateway needs an address",
)
def public_subnet(resource: Resource) -> Iterator[str]:
    if resource.type == "aws:ec2/subnet:Subnet" and is_true(resource.at("mapPublicIpOnLaunch")):
        yield "gives every machine in it a public address"
