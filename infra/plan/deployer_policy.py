"""The permissions for `pulumi up` and `pulumi destroy`, held to this cluster's names and tags where AWS allows it.

Making roles and handing them to machines is power over the account within what roles may do; give this policy to people
whom you would trust with that, or set `access.permissions_boundary`, without which it then lets no role be made. Written
from the calls of the provider's resources and AWS's service authorization reference; not yet used on a real account.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from infra.config import ClusterSpec, HomeType
from infra.plan.documents import Document, Statement, allow, characters, document
from infra.plan.network.endpoints import interface_services
from infra.plan.node_policy import key_resource
from infra.plan.nodes.controller import secret_name
from infra.plan.nodes.logs import log_groups
from infra.plan.place import Arn, Place, bucket_names, ours
from infra.plan.roles import RolePlan, flow_log_role, role_path, roles, services
from infra.plan.storage.associations import associations

NETWORK = (
    "vpc",
    "subnet",
    "internet-gateway",
    "elastic-ip",
    "natgateway",
    "route-table",
    "vpc-endpoint",
    "vpc-flow-log",
)
GROUPS = ("security-group", "security-group-rule")
LAUNCH = (
    "instance",
    "volume",
    "network-interface",
    "subnet",
    "security-group",
    "launch-template",
    "placement-group",
    "capacity-reservation",
    "key-pair",
    "spot-instances-request",
)
SERVICE_LINKED = {
    "always": ("fsx.amazonaws.com", "s3.data-source.lustre.fsx.amazonaws.com"),
    "efs": ("elasticfilesystem.amazonaws.com", "backup.amazonaws.com"),
    "grafana": ("grafana.amazonaws.com",),
    "ec2": ("autoscaling.amazonaws.com", "spot.amazonaws.com"),
    "hyperpod-slurm": ("sagemaker.amazonaws.com", "hyperpod.sagemaker.amazonaws.com"),
    "hyperpod-eks": ("sagemaker.amazonaws.com", "hyperpod.sagemaker.amazonaws.com", "eks.amazonaws.com"),
}
"""Services that make a role of their own in the account at first use. For a data repository association FSx does so with
the caller's rights (https://docs.aws.amazon.com/fsx/latest/LustreGuide/setting-up.html#fsx-adding-permissions-s3)."""

MANAGED_POLICY_CHARACTERS = 6144
"""https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html"""


def deployer_policy(spec: ClusterSpec, place: Place) -> Document:
    """Return the document for this cluster; statements that another backend or option would need are not in it.

    It is longer than one managed policy may be: `managed_policies` splits it.
    """
    statements = [*_look(spec), *_ec2(spec, place), *_iam(spec, place), *_s3(spec, place), *_fsx(spec, place)]
    statements += _efs(spec, place)
    statements += [*_signals(spec, place), *_named(spec, place), *_keys(spec, place)]
    if spec.backend == "ec2":
        statements += _node_group(spec, place)
    else:
        statements += _hyperpod(spec, place)
        statements += _launch(spec, place) if spec.monitor else ()
    statements += _machines(spec, place) if spec.controller or spec.monitor else ()
    return document([*statements, *_eks(spec, place)] if spec.backend == "hyperpod-eks" else statements)


def managed_policies(policy: Document) -> tuple[Document, ...]:
    """`policy` in as many documents as IAM needs to hold it, statements in their order."""
    documents: list[list[Statement]] = [[]]
    for statement in policy["Statement"]:
        if documents[-1] and characters([*documents[-1], statement]) > MANAGED_POLICY_CHARACTERS:
            documents.append([])
        documents[-1].append(statement)
    return tuple(document(statements) for statements in documents)


def _named_actions(service: str, actions: str) -> list[str]:
    return [f"{service}:{action}" for action in actions.split()]


def _look(spec: ClusterSpec) -> Iterator[Statement]:
    """Yield the reads that AWS does not scope; preflight's online rules need them too."""
    by_backend = {
        "ec2": ["autoscaling:Describe*", "ec2:GetSpotPlacementScores"],
        "hyperpod-slurm": ["sagemaker:ListClusters"],
        "hyperpod-eks": [
            "sagemaker:ListClusters",
            *_named_actions("eks", "DescribeAddonVersions DescribeClusterVersions ListClusters"),
        ],
    }
    efs = ["elasticfilesystem:Describe*"] if spec.storage.home and spec.storage.home.type == "efs" else []
    common = ["ec2:Describe*", *efs, "fsx:Describe*", "logs:DescribeLogGroups", "servicequotas:ListServiceQuotas"]
    yield allow("Look", [*common, *by_backend[spec.backend]], "*")


def _ec2(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    if spec.network.existing is None:
        make = """CreateVpc ModifyVpcAttribute CreateSubnet ModifySubnetAttribute CreateInternetGateway
            AttachInternetGateway AllocateAddress CreateNatGateway CreateRouteTable AssociateRouteTable CreateRoute
            ReplaceRoute CreateVpcEndpoint ModifyVpcEndpoint CreateFlowLogs"""
        drop = """DeleteVpc DeleteSubnet DetachInternetGateway DeleteInternetGateway ReleaseAddress DeleteNatGateway
            DisassociateRouteTable DeleteRoute DeleteRouteTable DeleteVpcEndpoints DeleteFlowLogs"""
        arns = [place.arn("ec2", f"{kind}/*") for kind in NETWORK]
        # The group of an endpoint's interfaces is named in the request that makes the endpoint.
        beside = [place.arn("ec2", "security-group/*")] if interface_services(spec) else []
        yield allow("NetworkMake", _named_actions("ec2", make), [*arns, *beside])
        yield allow("NetworkDrop", _named_actions("ec2", drop), arns, ours(spec))
    if lists := [source for source in spec.network.allow_from if source.startswith("pl-")]:
        # Also one that another account shares.
        arns = [place.arn("ec2", f"prefix-list/{prefix_list}", account="*") for prefix_list in lists]
        yield allow("PrefixListsLook", ["ec2:GetManagedPrefixListEntries"], arns)
    groups, vpcs = place.arn("ec2", "security-group/*"), place.arn("ec2", "vpc/*")
    make = "CreateSecurityGroup AuthorizeSecurityGroupIngress AuthorizeSecurityGroupEgress ModifySecurityGroupRules"
    drop = "DeleteSecurityGroup RevokeSecurityGroupIngress RevokeSecurityGroupEgress"
    yield allow("GroupsMake", _named_actions("ec2", make), [groups, vpcs, place.arn("ec2", "security-group-rule/*")])
    yield allow("GroupsDrop", _named_actions("ec2", drop), groups, ours(spec))
    kinds = dict.fromkeys((*NETWORK, *GROUPS, *(LAUNCH if spec.backend == "ec2" or spec.monitor else ())))
    tagged = [place.arn("ec2", f"{kind}/*") for kind in kinds if kind != "key-pair"]
    yield allow("Tag", ["ec2:CreateTags"], tagged)
    yield allow("Untag", ["ec2:DeleteTags"], tagged, ours(spec))


def _iam(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    plans = [*roles(spec, place), *([flow_log_role(spec, place)] if spec.network.flow_logs else [])]
    if made := [plan for plan in plans if plan.existing is None]:
        yield from _roles_made(spec, place, made)
    for plan in plans:
        if plan.existing is not None:
            passed = {"StringEquals": {"iam:PassedToService": services([plan])}}
            name = "".join(word.capitalize() for word in plan.key.split("-"))
            yield allow(f"{name}RolePass", ["iam:PassRole"], plan.existing, passed)
            yield allow(f"{name}RoleLook", ["iam:GetRole", "iam:SimulatePrincipalPolicy"], plan.existing)
            if plan.existing_profile is not None:
                yield allow("NodeProfileLook", ["iam:GetInstanceProfile"], plan.existing_profile)
    linked = place.arn("iam", "role/aws-service-role/*", region="")
    makes = [one for one in SERVICE_LINKED[spec.backend] if not (spec.eks.existing and one.startswith("eks."))]
    makes += SERVICE_LINKED["efs"] if _makes_home(spec, "efs") else ()
    makes += SERVICE_LINKED["grafana"] if spec.observability.grafana == "managed" else ()
    names = {"StringEquals": {"iam:AWSServiceName": [*SERVICE_LINKED["always"], *makes]}}
    yield allow("ServiceLinkedRoles", ["iam:CreateServiceLinkedRole"], linked, names)
    lustre = place.arn("iam", "role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/*", region="")
    if spec.storage.lustre and spec.storage.lustre.associations:
        yield allow("LustreS3Role", ["iam:AttachRolePolicy", "iam:PutRolePolicy"], lustre)


def _roles_made(spec: ClusterSpec, place: Place, made: Sequence[RolePlan]) -> Iterator[Statement]:
    path = role_path(spec)
    own = place.arn("iam", f"role{path}*", region="")
    keep = """DeleteRole GetRole UpdateRole UpdateRoleDescription UpdateAssumeRolePolicy TagRole UntagRole ListRolePolicies
        ListAttachedRolePolicies ListInstanceProfilesForRole GetRolePolicy"""
    make = "CreateRole PutRolePolicy DeleteRolePolicy DetachRolePolicy"
    yield allow("Roles", _named_actions("iam", keep), own)
    bounded: dict[str, dict[str, Any]] = {}
    if boundary := spec.access.permissions_boundary:
        make += " PutRolePermissionsBoundary"
        bounded = {"StringEquals": {"iam:PermissionsBoundary": boundary}}
        yield allow("BoundaryLook", ["iam:GetPolicy", "iam:GetPolicyVersion"], boundary)
        yield allow("BoundaryTry", ["iam:SimulateCustomPolicy"], "*")
    # The actions that give a role its rights, those to which the condition applies
    # (https://docs.aws.amazon.com/IAM/latest/UserGuide/access_policies_boundaries.html#access_policies_boundaries-delegate).
    yield allow("RolesMake", _named_actions("iam", make), own, bounded)
    if managed := sorted({arn for plan in made for arn in plan.managed}):
        yield allow("RolesAttach", ["iam:AttachRolePolicy"], own, {**bounded, "ArnEquals": {"iam:PolicyARN": managed}})
    passed = {"StringEquals": {"iam:PassedToService": services(made)}}
    yield allow("RolesPass", ["iam:PassRole"], own, passed)
    if any(plan.instance_profile for plan in made):
        profile = """CreateInstanceProfile DeleteInstanceProfile GetInstanceProfile AddRoleToInstanceProfile
            RemoveRoleFromInstanceProfile TagInstanceProfile UntagInstanceProfile"""
        arn = place.arn("iam", f"instance-profile{path}*", region="")
        yield allow("Profiles", _named_actions("iam", profile), arn)


def _s3(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    names = bucket_names(spec, place)
    made = {"data": names.data, "checkpoints": names.checkpoints, "lifecycle": names.lifecycle}
    own = [place.bucket_arn(name) for key, name in made.items() if getattr(spec.buckets, key) is None]
    others = [place.bucket_arn(name) for key, name in made.items() if getattr(spec.buckets, key) is not None]
    if others:
        yield allow("BucketsLook", ["s3:ListBucket", "s3:GetBucketLocation"], others)
    if own:
        settings = """CreateBucket DeleteBucket ListBucket GetBucketTagging PutBucketTagging GetBucketVersioning
            PutBucketVersioning GetBucketPublicAccessBlock PutBucketPublicAccessBlock GetBucketOwnershipControls
            PutBucketOwnershipControls GetEncryptionConfiguration PutEncryptionConfiguration GetLifecycleConfiguration
            PutLifecycleConfiguration GetBucketPolicy PutBucketPolicy DeleteBucketPolicy GetBucketAcl GetBucketCORS
            GetBucketLocation GetBucketLogging GetBucketObjectLockConfiguration GetBucketRequestPayment
            GetBucketWebsite GetAccelerateConfiguration GetReplicationConfiguration"""
        yield allow("Buckets", _named_actions("s3", settings), own)
    # Nodes of every backend read the bundle from there.
    objects = "PutObject GetObject DeleteObject GetObjectTagging PutObjectTagging"
    yield allow("LifecycleBundle", _named_actions("s3", objects), place.bucket_arn(names.lifecycle, "*"))


def _fsx(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    if spec.storage.lustre is None and not _makes_home(spec, "openzfs"):
        return
    arns = [place.arn("fsx", f"{kind}/*") for kind in ("file-system", "association", "volume", "backup")]
    make = """CreateFileSystem CreateDataRepositoryAssociation UpdateFileSystem UpdateDataRepositoryAssociation
        CreateVolume UpdateVolume TagResource UntagResource ListTagsForResource"""
    yield allow("FileSystems", _named_actions("fsx", make), arns)
    drop = "DeleteFileSystem DeleteDataRepositoryAssociation DeleteVolume"
    yield allow("FileSystemsDrop", _named_actions("fsx", drop), arns, ours(spec))
    # FSx looks into a linked bucket with the caller's rights
    # (https://docs.aws.amazon.com/fsx/latest/LustreGuide/troubleshooting.html#s3-validation-error).
    if links := associations(spec, place):
        inside = sorted({place.bucket_arn(link.bucket, f"{link.prefix}*") for link in links})
        around = sorted({place.bucket_arn(link.bucket) for link in links})
        yield allow("LinkedBuckets", ["s3:Get*", "s3:List*"], [*around, *inside])
        yield allow("LinkedObjects", ["s3:PutObject"], inside)


def _makes_home(spec: ClusterSpec, kind: HomeType) -> bool:
    config = spec.storage.home
    return config is not None and config.existing is None and config.type == kind


def _efs(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Yield the rights for homes on EFS. It makes and deletes mount targets' network interfaces with the caller's rights
    (https://docs.aws.amazon.com/efs/latest/ug/API_CreateMountTarget.html, and API_DeleteMountTarget.html)."""
    if not _makes_home(spec, "efs"):
        return
    systems = place.arn("elasticfilesystem", "file-system/*")
    encrypted = {"Bool": {"elasticfilesystem:Encrypted": "true"}}
    yield allow("HomesCreate", ["elasticfilesystem:CreateFileSystem"], "*", encrypted)
    # The tag says what is ours, so that a file system that is there already must not get it
    # (https://docs.aws.amazon.com/efs/latest/ug/using-tags-efs.html).
    at_creation = {"StringEquals": {"elasticfilesystem:CreateAction": "CreateFileSystem"}}
    yield allow("HomesTag", ["elasticfilesystem:TagResource"], systems, at_creation)
    keep = """UpdateFileSystem PutLifecycleConfiguration PutBackupPolicy CreateMountTarget TagResource UntagResource
        ListTagsForResource DeleteFileSystem DeleteMountTarget"""
    yield allow("Homes", _named_actions("elasticfilesystem", keep), systems, ours(spec))
    beside = [place.arn("ec2", f"{kind}/*") for kind in ("network-interface", "subnet", "security-group")]
    yield allow("MountTargets", ["ec2:CreateNetworkInterface", "ec2:DeleteNetworkInterface"], beside)


def _signals(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    queue = (
        "CreateQueue DeleteQueue GetQueueAttributes SetQueueAttributes GetQueueUrl TagQueue UntagQueue ListQueueTags"
    )
    yield allow("Queues", _named_actions("sqs", queue), place.arn("sqs", f"{spec.name}-*"))
    topic = """CreateTopic DeleteTopic GetTopicAttributes SetTopicAttributes Subscribe Unsubscribe TagResource
        UntagResource ListTagsForResource ListSubscriptionsByTopic GetSubscriptionAttributes SetSubscriptionAttributes"""
    yield allow("Topics", _named_actions("sns", topic), place.arn("sns", f"{spec.name}-*"))
    rule = """PutRule DeleteRule DescribeRule PutTargets RemoveTargets ListTargetsByRule TagResource UntagResource
        ListTagsForResource"""
    yield allow("Events", _named_actions("events", rule), place.arn("events", f"rule/{spec.name}-*"))
    alarm = "PutMetricAlarm DeleteAlarms DescribeAlarms TagResource UntagResource ListTagsForResource"
    yield allow("Alarms", _named_actions("cloudwatch", alarm), place.arn("cloudwatch", f"alarm:{spec.name}-*"))
    board = "PutDashboard GetDashboard DeleteDashboards"
    yield allow(
        "Dashboards", _named_actions("cloudwatch", board), place.arn("cloudwatch", f"dashboard/{spec.name}*", region="")
    )


def _named(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    logs = "CreateLogGroup DeleteLogGroup PutRetentionPolicy TagResource UntagResource ListTagsForResource"
    # FSx for Lustre takes groups under /aws/fsx/ only.
    groups = [f"/lustrain/{spec.name}/*", *([f"/aws/fsx/{spec.name}*"] if spec.storage.lustre else [])]
    groups += [f"{group.name}*" for group in log_groups(spec) if not group.name.startswith("/lustrain/")]
    arns = [place.arn("logs", f"log-group:{group}") for group in groups]
    yield allow("LogGroups", _named_actions("logs", logs), arns)
    if spec.storage.lustre:
        # FSx begins its log with the rights of the file system's creator; AWS's AmazonFSxFullAccess grants the same
        # (https://docs.aws.amazon.com/aws-managed-policy/latest/reference/AmazonFSxFullAccess.html).
        begin = ["logs:CreateLogStream", "logs:PutLogEvents"]
        yield allow("LustreLog", begin, place.arn("logs", f"log-group:/aws/fsx/{spec.name}*"))
    if spec.repository.existing is None:
        images = """CreateRepository DeleteRepository DescribeRepositories PutLifecyclePolicy GetLifecyclePolicy
            DeleteLifecyclePolicy PutImageScanningConfiguration PutImageTagMutability TagResource UntagResource
            ListTagsForResource"""
        yield allow("Images", _named_actions("ecr", images), place.arn("ecr", f"repository/{spec.name}/*"))
    if spec.budget is not None:
        money = "ModifyBudget ViewBudget TagResource UntagResource ListTagsForResource"
        arn = place.arn("budgets", f"budget/{spec.name}*", region="")
        yield allow("Budget", _named_actions("budgets", money), arn)
    if spec.observability.prometheus == "amp":
        yield from _workspace(spec, place)
    if spec.observability.grafana == "managed":
        yield from _grafana(spec, place)


def _workspace(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonmanagedserviceforprometheus.html"""
    yield allow("PrometheusMake", ["aps:CreateWorkspace"], "*")
    kept = """DescribeWorkspace UpdateWorkspaceAlias DeleteWorkspace DescribeLoggingConfiguration
        TagResource UntagResource ListTagsForResource"""
    if spec.monitor:
        kept += """ CreateAlertManagerDefinition DescribeAlertManagerDefinition PutAlertManagerDefinition
            DeleteAlertManagerDefinition"""
    yield allow("Prometheus", _named_actions("aps", kept), place.arn("aps", "workspace/*"), ours(spec))
    if spec.monitor:
        # By name: one that is still to be made has no tags.
        rules = """CreateRuleGroupsNamespace DescribeRuleGroupsNamespace PutRuleGroupsNamespace DeleteRuleGroupsNamespace
            TagResource UntagResource ListTagsForResource"""
        namespaces = place.arn("aps", f"rulegroupsnamespace/*/{spec.name}")
        yield allow("PrometheusRules", _named_actions("aps", rules), namespaces)


def _grafana(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Allow to enrol the workspace in IAM Identity Center, as it does with the rights of its maker: the actions on which
    CreateWorkspace and DeleteWorkspace depend
    (https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonmanagedgrafana.html; that of DeleteWorkspace
    is from memory), and those that read the enrolment
    (https://docs.aws.amazon.com/aws-managed-policy/latest/reference/AWSGrafanaWorkspacePermissionManagementV2.html)."""
    kept = """DescribeWorkspace UpdateWorkspace DeleteWorkspace DescribeWorkspaceAuthentication
        UpdateWorkspaceAuthentication DescribeWorkspaceConfiguration UpdateWorkspaceConfiguration ListPermissions
        UpdatePermissions TagResource UntagResource ListTagsForResource"""
    enrol = """CreateManagedApplicationInstance DeleteManagedApplicationInstance GetManagedApplicationInstance
        DescribeRegisteredRegions GetSharedSsoConfiguration ListInstances"""
    yield allow("GrafanaMake", ["grafana:CreateWorkspace"], "*")
    yield allow("Grafana", _named_actions("grafana", kept), place.arn("grafana", "/workspaces*"), ours(spec))
    yield allow("GrafanaSignIn", ["organizations:DescribeOrganization", *_named_actions("sso", enrol)], "*")


def _keys(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """FSx, EFS and S3 use a key of the user's with the rights of the file system's creator or of the object's writer
    (https://docs.aws.amazon.com/fsx/latest/LustreGuide/encryption-at-rest.html,
    https://docs.aws.amazon.com/efs/latest/ug/encryption-at-rest.html#EFSKMSPolicy)."""
    lustre = spec.storage.lustre.kms_key if spec.storage.lustre else None
    home = spec.storage.home.kms_key if spec.storage.home else None
    of_efs = "WithoutPlaintext" if _makes_home(spec, "efs") else ""
    for sid, key, kind in (
        ("LustreKey", lustre, ""),
        ("HomeKey", home, of_efs),
        ("BucketKey", spec.buckets.kms_key, ""),
    ):
        if key is not None:
            arn, condition = key_resource(key, place)
            actions = ["kms:DescribeKey", "kms:CreateGrant", "kms:Decrypt", f"kms:GenerateDataKey{kind}"]
            yield allow(sid, actions, arn, condition)
    # FSx tries a linked bucket with the rights of the association's creator.
    linked = dict.fromkeys(plan.kms_key for plan in associations(spec, place) if plan.kms_key)
    for number, key in enumerate(linked):
        arn, condition = key_resource(key, place)
        yield allow(f"LinkedKey{number}", ["kms:Decrypt", "kms:GenerateDataKey"], arn, condition)
    # HyperPod makes its grant, and Auto Scaling tries a template, with the rights of the group's creator.
    if keys := sorted({group.volume_kms_key for group in spec.groups if group.volume_kms_key}):
        tried = ["kms:Decrypt", "kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncryptFrom", "kms:ReEncryptTo"]
        made = ["kms:DescribeKey", "kms:CreateGrant"]
        yield allow("VolumeKeys", made if spec.hyperpod else [*made, *tried], keys)


def _launch(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Yield what starts an instance."""
    arns = [place.arn("ec2", f"{kind}/*") for kind in LAUNCH]
    # One that another account shares has that account in its ARN.
    named = {group.capacity.reservation for group in spec.groups if group.capacity.reservation}
    arns += [place.arn("ec2", f"capacity-reservation/{reservation}", account="*") for reservation in named]
    # Auto Scaling tries the template with the caller's rights when a group is made.
    yield allow("Launch", ["ec2:RunInstances"], [*arns, place.arn("ec2", "image/*", account="")])
    images = place.arn("ssm", "parameter/aws/service/*", account="")
    yield allow("ImageIds", ["ssm:GetParameter", "ssm:GetParameters"], images)


def _node_group(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    yield from _launch(spec, place)
    make = "CreateLaunchTemplate CreateLaunchTemplateVersion ModifyLaunchTemplate CreatePlacementGroup"
    kinds = [place.arn("ec2", f"{kind}/*") for kind in ("launch-template", "placement-group")]
    yield allow("TemplatesMake", _named_actions("ec2", make), kinds)
    drop = "DeleteLaunchTemplate DeleteLaunchTemplateVersions DeletePlacementGroup"
    yield allow("TemplatesDrop", _named_actions("ec2", drop), kinds, ours(spec))
    group = """CreateAutoScalingGroup UpdateAutoScalingGroup DeleteAutoScalingGroup PutLifecycleHook DeleteLifecycleHook
        PutScheduledUpdateGroupAction DeleteScheduledAction SuspendProcesses ResumeProcesses CreateOrUpdateTags DeleteTags
        EnableMetricsCollection DisableMetricsCollection SetInstanceProtection"""
    groups = place.arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{spec.name}-*")
    yield allow("Gangs", _named_actions("autoscaling", group), groups)
    if any(item.capacity.create for item in spec.groups):
        reserve = "CreateCapacityReservation ModifyCapacityReservation CancelCapacityReservation"
        yield allow("CapacityReserve", _named_actions("ec2", reserve), place.arn("ec2", "capacity-reservation/*"))


def _machines(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Yield what Slurm's controller and the monitor take. The controller's secret can be made and dropped, not read."""
    kinds = ("instance", "network-interface", "volume")
    arns = {kind: place.arn("ec2", f"{kind}/*") for kind in kinds}
    beside = [place.arn("ec2", "subnet/*"), place.arn("ec2", "security-group/*")]
    make = ["ec2:CreateNetworkInterface", "ec2:CreateVolume"]
    yield allow("MachinesMake", make, [arns["network-interface"], arns["volume"], *beside])
    keep = """StartInstances StopInstances ModifyInstanceAttribute ModifyInstanceMetadataOptions
        ModifyNetworkInterfaceAttribute ModifyVolume AttachVolume DetachVolume
        TerminateInstances DeleteNetworkInterface DeleteVolume"""
    yield allow("MachinesKeep", _named_actions("ec2", keep), list(arns.values()), ours(spec))
    # The groups that an interface gets are resources of that call too.
    yield allow("MachinesGroups", ["ec2:ModifyNetworkInterfaceAttribute"], place.arn("ec2", "security-group/*"))
    profiles = "AssociateIamInstanceProfile ReplaceIamInstanceProfileAssociation"
    yield allow("MachinesProfile", _named_actions("ec2", profiles), arns["instance"], ours(spec))
    if not spec.controller:
        return
    secret = place.arn("secretsmanager", f"secret:{secret_name(spec)}-*")
    actions = "CreateSecret DescribeSecret UpdateSecret DeleteSecret GetResourcePolicy TagResource UntagResource"
    yield allow("MungeKey", _named_actions("secretsmanager", actions), secret)


def _hyperpod(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Pulumi speaks to HyperPod through the Cloud Control API, whose own actions have no resources
    (https://docs.aws.amazon.com/cloudcontrolapi/latest/userguide/security.html)."""
    control = "CreateResource GetResource UpdateResource DeleteResource GetResourceRequestStatus DescribeType"
    yield allow("CloudControl", _named_actions("cloudformation", control), "*")
    clusters = """CreateCluster UpdateCluster DeleteCluster DescribeCluster ListClusterNodes DescribeClusterNode
        BatchDeleteClusterNodes UpdateClusterSoftware AddTags DeleteTags ListTags"""
    plans = {item.capacity.training_plan for item in spec.groups if item.capacity.training_plan}
    arns = [place.arn("sagemaker", "cluster/*"), *plans]
    yield allow("Clusters", _named_actions("sagemaker", clusters), arns)
    if any(group.image_id for group in spec.groups):
        # HyperPod shares an image of the user's with the account that its machines are in
        # (https://docs.aws.amazon.com/sagemaker/latest/dg/hyperpod-custom-ami-cluster-management.html).
        yield allow("ImagesLook", ["ec2:DescribeImages", "ec2:DescribeSnapshots"], "*")
        arns = [place.arn("ec2", f"{kind}/*", account="") for kind in ("image", "snapshot")]
        yield allow("ImagesShare", ["ec2:ModifyImageAttribute", "ec2:ModifySnapshotAttribute"], arns)
    if plans:
        yield allow("TrainingPlans", ["sagemaker:DescribeTrainingPlan"], sorted(plans))


def _eks(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    kinds = ("cluster/{0}", "addon/{0}/*/*", "access-entry/{0}/*", "podidentityassociation/{0}/*")
    if admins := [role for role in spec.access.admin_roles if Arn.parse(role).account == place.account]:
        yield allow("AdminRolesLook", ["iam:GetRole"], admins)
    cluster, *inside = (place.arn("eks", kind.format(spec.eks_name)) for kind in kinds)
    if spec.eks.existing:
        yield from _existing_eks(spec, cluster, inside)
        return
    add = """DescribeUpdate CreateAddon DescribeAddon UpdateAddon DeleteAddon CreateAccessEntry DescribeAccessEntry
        UpdateAccessEntry DeleteAccessEntry AssociateAccessPolicy DisassociateAccessPolicy ListAssociatedAccessPolicies
        CreatePodIdentityAssociation DescribePodIdentityAssociation UpdatePodIdentityAssociation
        DeletePodIdentityAssociation TagResource UntagResource
        ListTagsForResource"""
    yield allow("EksMake", ["eks:CreateCluster"], "*")
    make = "DescribeCluster UpdateClusterConfig UpdateClusterVersion DeleteCluster"
    yield allow("Eks", _named_actions("eks", f"{make} {add}"), [cluster, *inside])


def _existing_eks(spec: ClusterSpec, cluster: str, inside: Sequence[str]) -> Iterator[Statement]:
    """Yield what an existing control plane is read with, and what is made in it. HyperPod makes its own access entries there,
    with the rights of who creates the HyperPod cluster
    (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-prerequisites-iam.html). To make something in a cluster
    is a right on the cluster; to change or delete one, a right on the thing
    (https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonelastickubernetesservice.html)."""
    look = """DescribeCluster DescribeUpdate ListAddons DescribeAddon DescribeAccessEntry ListAssociatedAccessPolicies
        DescribePodIdentityAssociation ListTagsForResource"""
    yield allow("EksLook", _named_actions("eks", look), [cluster, *inside])
    yield allow("EksAdd", _named_actions("eks", "CreateAccessEntry CreateAddon CreatePodIdentityAssociation"), cluster)
    entries = "AssociateAccessPolicy DisassociateAccessPolicy UpdateAccessEntry DeleteAccessEntry"
    # HyperPod's own entries have no tag of ours.
    yield allow("EksEntries", _named_actions("eks", entries), inside[1])
    others = "UpdateAddon DeleteAddon UpdatePodIdentityAssociation DeletePodIdentityAssociation"
    yield allow("EksOwn", _named_actions("eks", others), [inside[0], inside[2]], ours(spec))
    yield allow("EksTag", ["eks:TagResource"], inside)
    yield allow("EksUntag", ["eks:UntagResource"], inside, ours(spec))
