"""The deployer's policy against what the program declares: what nobody may make, read or drop fails here, not in AWS."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

import pytest

from infra.plan.deployer_policy import deployer_policy
from tests.infra.edits import STACKS, place, spec_of
from tests.infra.mistakes import EKS, JOINED, NODE_ROLE
from tests.infra.registered import built
from tests.infra.test_components import Aws

CALLS: dict[str, str] = {
    "aws:amp/alertManagerDefinition:AlertManagerDefinition": """aps: CreateAlertManagerDefinition
        DescribeAlertManagerDefinition PutAlertManagerDefinition DeleteAlertManagerDefinition""",
    "aws:amp/ruleGroupNamespace:RuleGroupNamespace": """aps: CreateRuleGroupsNamespace DescribeRuleGroupsNamespace
        PutRuleGroupsNamespace DeleteRuleGroupsNamespace TagResource ListTagsForResource""",
    "aws:amp/workspace:Workspace": """aps: CreateWorkspace DescribeWorkspace UpdateWorkspaceAlias DeleteWorkspace
        DescribeLoggingConfiguration TagResource ListTagsForResource""",
    "aws:autoscaling/group:Group": """autoscaling: CreateAutoScalingGroup DescribeAutoScalingGroups
        UpdateAutoScalingGroup DeleteAutoScalingGroup CreateOrUpdateTags DeleteTags DescribeScalingActivities; ec2:
        RunInstances; iam: PassRole CreateServiceLinkedRole""",
    "aws:autoscaling/lifecycleHook:LifecycleHook": """autoscaling: PutLifecycleHook DescribeLifecycleHooks
        DeleteLifecycleHook""",
    "aws:autoscaling/schedule:Schedule": """autoscaling: PutScheduledUpdateGroupAction DescribeScheduledActions
        DeleteScheduledAction""",
    "aws:budgets/budget:Budget": "budgets: ModifyBudget ViewBudget TagResource",
    "aws:cloudcontrol/resource:Resource": """cloudformation: CreateResource GetResource UpdateResource DeleteResource
        GetResourceRequestStatus DescribeType; sagemaker: CreateCluster DescribeCluster UpdateCluster DeleteCluster;
        iam: PassRole""",
    "aws:cloudwatch/dashboard:Dashboard": "cloudwatch: PutDashboard GetDashboard DeleteDashboards",
    "aws:cloudwatch/eventRule:EventRule": "events: PutRule DescribeRule DeleteRule TagResource",
    "aws:cloudwatch/eventTarget:EventTarget": "events: PutTargets ListTargetsByRule RemoveTargets",
    "aws:cloudwatch/logGroup:LogGroup": """logs: CreateLogGroup DescribeLogGroups PutRetentionPolicy DeleteLogGroup
        TagResource ListTagsForResource""",
    "aws:cloudwatch/metricAlarm:MetricAlarm": """cloudwatch: PutMetricAlarm DescribeAlarms DeleteAlarms TagResource
        ListTagsForResource""",
    "aws:ebs/volume:Volume": "ec2: CreateVolume DescribeVolumes ModifyVolume DeleteVolume CreateTags",
    "aws:ec2/capacityReservation:CapacityReservation": """ec2: CreateCapacityReservation DescribeCapacityReservations
        ModifyCapacityReservation CancelCapacityReservation""",
    "aws:ec2/eip:Eip": "ec2: AllocateAddress DescribeAddresses ReleaseAddress CreateTags",
    "aws:ec2/flowLog:FlowLog": "ec2: CreateFlowLogs DescribeFlowLogs DeleteFlowLogs; iam: PassRole",
    "aws:ec2/instance:Instance": """ec2: RunInstances DescribeInstances DescribeInstanceAttribute DescribeInstanceTypes
        DescribeVolumes DescribeTags ModifyInstanceAttribute ModifyInstanceMetadataOptions StopInstances
        StartInstances TerminateInstances AssociateIamInstanceProfile
        ReplaceIamInstanceProfileAssociation CreateTags; iam: PassRole GetInstanceProfile""",
    "aws:ec2/internetGateway:InternetGateway": """ec2: CreateInternetGateway AttachInternetGateway
        DescribeInternetGateways DetachInternetGateway DeleteInternetGateway""",
    "aws:ec2/launchTemplate:LaunchTemplate": """ec2: CreateLaunchTemplate CreateLaunchTemplateVersion
        DescribeLaunchTemplates DescribeLaunchTemplateVersions ModifyLaunchTemplate DeleteLaunchTemplate""",
    "aws:ec2/natGateway:NatGateway": "ec2: CreateNatGateway DescribeNatGateways DeleteNatGateway",
    "aws:ec2/networkInterface:NetworkInterface": """ec2: CreateNetworkInterface DescribeNetworkInterfaces
        ModifyNetworkInterfaceAttribute DeleteNetworkInterface CreateTags""",
    "aws:ec2/placementGroup:PlacementGroup": "ec2: CreatePlacementGroup DescribePlacementGroups DeletePlacementGroup",
    "aws:ec2/route:Route": "ec2: CreateRoute ReplaceRoute DescribeRouteTables DeleteRoute",
    "aws:ec2/routeTable:RouteTable": "ec2: CreateRouteTable DescribeRouteTables DeleteRouteTable",
    "aws:ec2/routeTableAssociation:RouteTableAssociation": """ec2: AssociateRouteTable DescribeRouteTables
        DisassociateRouteTable""",
    "aws:ec2/securityGroup:SecurityGroup": """ec2: CreateSecurityGroup DescribeSecurityGroups
        DescribeNetworkInterfaces RevokeSecurityGroupEgress DeleteSecurityGroup""",
    "aws:ec2/subnet:Subnet": "ec2: CreateSubnet ModifySubnetAttribute DescribeSubnets DeleteSubnet",
    "aws:ec2/volumeAttachment:VolumeAttachment": """ec2: AttachVolume DetachVolume DescribeVolumes DescribeInstances
        StopInstances""",
    "aws:ec2/vpc:Vpc": "ec2: CreateVpc ModifyVpcAttribute DescribeVpcs DescribeVpcAttribute DeleteVpc",
    "aws:ec2/vpcEndpoint:VpcEndpoint": """ec2: CreateVpcEndpoint ModifyVpcEndpoint DescribeVpcEndpoints
        DescribePrefixLists DeleteVpcEndpoints""",
    "aws:ecr/lifecyclePolicy:LifecyclePolicy": "ecr: PutLifecyclePolicy GetLifecyclePolicy DeleteLifecyclePolicy",
    "aws:ecr/repository:Repository": """ecr: CreateRepository DescribeRepositories PutImageScanningConfiguration
        PutImageTagMutability DeleteRepository TagResource ListTagsForResource""",
    "aws:efs/backupPolicy:BackupPolicy": "elasticfilesystem: PutBackupPolicy DescribeBackupPolicy",
    "aws:efs/fileSystem:FileSystem": """elasticfilesystem: CreateFileSystem DescribeFileSystems UpdateFileSystem
        DescribeLifecycleConfiguration PutLifecycleConfiguration DeleteFileSystem TagResource; iam: CreateServiceLinkedRole""",
    "aws:efs/mountTarget:MountTarget": """elasticfilesystem: CreateMountTarget DescribeMountTargets
        DescribeMountTargetSecurityGroups DeleteMountTarget; ec2: CreateNetworkInterface DescribeNetworkInterfaces
        DescribeSubnets DeleteNetworkInterface""",
    "aws:eks/accessEntry:AccessEntry": "eks: CreateAccessEntry DescribeAccessEntry UpdateAccessEntry DeleteAccessEntry",
    "aws:eks/accessPolicyAssociation:AccessPolicyAssociation": """eks: AssociateAccessPolicy
        ListAssociatedAccessPolicies DisassociateAccessPolicy""",
    "aws:eks/addon:Addon": "eks: CreateAddon DescribeAddon UpdateAddon DeleteAddon DescribeUpdate",
    "aws:eks/cluster:Cluster": """eks: CreateCluster DescribeCluster UpdateClusterConfig UpdateClusterVersion
        DescribeUpdate DeleteCluster TagResource; iam: PassRole""",
    "aws:eks/podIdentityAssociation:PodIdentityAssociation": """eks: CreatePodIdentityAssociation
        DescribePodIdentityAssociation UpdatePodIdentityAssociation DeletePodIdentityAssociation; iam: PassRole""",
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation": """fsx: CreateDataRepositoryAssociation
        DescribeDataRepositoryAssociations UpdateDataRepositoryAssociation DeleteDataRepositoryAssociation; iam:
        CreateServiceLinkedRole AttachRolePolicy PutRolePolicy""",
    "aws:fsx/lustreFileSystem:LustreFileSystem": """fsx: CreateFileSystem DescribeFileSystems UpdateFileSystem
        DeleteFileSystem TagResource; iam: CreateServiceLinkedRole; logs: CreateLogStream PutLogEvents""",
    "aws:fsx/openZfsFileSystem:OpenZfsFileSystem": """fsx: CreateFileSystem DescribeFileSystems DescribeVolumes
        UpdateFileSystem UpdateVolume DeleteFileSystem TagResource""",
    "aws:grafana/workspace:Workspace": """grafana: CreateWorkspace DescribeWorkspace UpdateWorkspace DeleteWorkspace
        DescribeWorkspaceConfiguration TagResource ListTagsForResource; iam: PassRole""",
    "aws:iam/instanceProfile:InstanceProfile": """iam: CreateInstanceProfile GetInstanceProfile
        AddRoleToInstanceProfile RemoveRoleFromInstanceProfile DeleteInstanceProfile PassRole""",
    "aws:iam/role:Role": """iam: CreateRole GetRole UpdateRole UpdateAssumeRolePolicy ListRolePolicies
        ListAttachedRolePolicies ListInstanceProfilesForRole DeleteRole TagRole""",
    "aws:iam/rolePolicy:RolePolicy": "iam: PutRolePolicy GetRolePolicy DeleteRolePolicy",
    "aws:iam/rolePolicyAttachment:RolePolicyAttachment": """iam: AttachRolePolicy ListAttachedRolePolicies
        DetachRolePolicy""",
    "aws:s3/bucket:Bucket": """s3: CreateBucket ListBucket GetBucketTagging PutBucketTagging GetBucketLocation
        GetBucketPolicy GetBucketAcl GetBucketVersioning GetBucketCORS GetBucketWebsite GetBucketLogging
        GetBucketRequestPayment GetBucketObjectLockConfiguration GetAccelerateConfiguration
        GetReplicationConfiguration GetLifecycleConfiguration GetEncryptionConfiguration DeleteBucket""",
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration": """s3: PutLifecycleConfiguration
        GetLifecycleConfiguration""",
    "aws:s3/bucketObjectv2:BucketObjectv2": "s3: PutObject GetObject DeleteObject GetObjectTagging PutObjectTagging",
    "aws:s3/bucketOwnershipControls:BucketOwnershipControls": """s3: PutBucketOwnershipControls
        GetBucketOwnershipControls""",
    "aws:s3/bucketPolicy:BucketPolicy": "s3: PutBucketPolicy GetBucketPolicy DeleteBucketPolicy",
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": """s3: PutBucketPublicAccessBlock
        GetBucketPublicAccessBlock""",
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": """s3:
        PutEncryptionConfiguration GetEncryptionConfiguration""",
    "aws:s3/bucketVersioning:BucketVersioning": "s3: PutBucketVersioning GetBucketVersioning",
    "aws:secretsmanager/secret:Secret": """secretsmanager: CreateSecret DescribeSecret GetResourcePolicy UpdateSecret
        DeleteSecret TagResource UntagResource""",
    "aws:sns/topic:Topic": """sns: CreateTopic GetTopicAttributes SetTopicAttributes DeleteTopic TagResource
        ListTagsForResource""",
    "aws:sns/topicPolicy:TopicPolicy": "sns: SetTopicAttributes GetTopicAttributes",
    "aws:sns/topicSubscription:TopicSubscription": """sns: Subscribe GetSubscriptionAttributes
        SetSubscriptionAttributes Unsubscribe""",
    "aws:sqs/queue:Queue": "sqs: CreateQueue GetQueueAttributes SetQueueAttributes DeleteQueue TagQueue ListQueueTags",
    "aws:sqs/queuePolicy:QueuePolicy": "sqs: SetQueueAttributes GetQueueAttributes",
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": """ec2: AuthorizeSecurityGroupEgress
        DescribeSecurityGroupRules ModifySecurityGroupRules RevokeSecurityGroupEgress""",
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": """ec2: AuthorizeSecurityGroupIngress
        DescribeSecurityGroupRules ModifySecurityGroupRules RevokeSecurityGroupIngress""",
}
"""What the provider calls to make, read, change and drop a resource; deletes of settings of a bucket are puts in IAM. Read
from the provider's documentation and the services' authorization reference, by a person, row by row."""


def calls(kind: str) -> Iterator[str]:
    for part in CALLS[kind].split(";"):
        service, _, names = part.partition(":")
        yield from (f"{service.strip()}:{name}" for name in names.split())


ADDED: dict[str, Any] = {
    **JOINED,
    "eks.existing.addons": ["aws-fsx-csi-driver"],
    "storage.lustre": {"throughput_gb_s": 1.0},
    "access.admin_roles": [NODE_ROLE],
    "observability": {"prometheus": "amp", "grafana": "managed"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("stack", "edits"), [*((stack, {}) for stack in STACKS), (EKS, ADDED)])
def test_deployer_may_make_read_and_drop_whatever_is_declared(stack: str, edits: dict[str, Any]) -> None:
    policy = deployer_policy(spec_of(stack, edits), place(stack))
    granted = {action for statement in policy["Statement"] for action in statement["Action"]}
    declared = built(stack, edits, Aws(place(stack).region))[0].kinds
    assert declared
    unknown = declared - set(CALLS)
    assert not unknown, f"no row in CALLS for {sorted(unknown)}: write what the provider calls, then grant it"
    missing = {
        f"{kind}: {call}"
        for kind in declared
        for call in calls(kind)
        if not any(fnmatch.fnmatchcase(call, pattern) for pattern in granted)
    }
    assert not missing, sorted(missing)
