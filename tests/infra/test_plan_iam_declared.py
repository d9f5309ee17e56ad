"""The deployer's policy against what the program declares: what nobody may make, read or drop fails here, not in AWS."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from functools import cache

import pytest

from infra.local.engine import PROGRAM
from infra.plan.deployer_policy import deployer_policy
from infra.plan.place import Place
from tests.infra.specs import ACCOUNT
from tests.infra.stacks import EXAMPLES, example, region_of

CALLS: dict[str, str] = {
    "aws:autoscaling/group:Group": """autoscaling:CreateAutoScalingGroup autoscaling:DescribeAutoScalingGroups
        autoscaling:UpdateAutoScalingGroup autoscaling:DeleteAutoScalingGroup autoscaling:CreateOrUpdateTags
        autoscaling:DeleteTags autoscaling:DescribeScalingActivities ec2:RunInstances iam:PassRole
        iam:CreateServiceLinkedRole""",
    "aws:autoscaling/lifecycleHook:LifecycleHook": """autoscaling:PutLifecycleHook autoscaling:DescribeLifecycleHooks
        autoscaling:DeleteLifecycleHook""",
    "aws:autoscaling/schedule:Schedule": """autoscaling:PutScheduledUpdateGroupAction
        autoscaling:DescribeScheduledActions autoscaling:DeleteScheduledAction""",
    "aws:budgets/budget:Budget": "budgets:ModifyBudget budgets:ViewBudget budgets:TagResource",
    "aws:cloudcontrol/resource:Resource": """cloudformation:CreateResource cloudformation:GetResource
        cloudformation:UpdateResource cloudformation:DeleteResource cloudformation:GetResourceRequestStatus
        cloudformation:DescribeType sagemaker:CreateCluster sagemaker:DescribeCluster sagemaker:UpdateCluster
        sagemaker:DeleteCluster iam:PassRole""",
    "aws:cloudwatch/dashboard:Dashboard": "cloudwatch:PutDashboard cloudwatch:GetDashboard cloudwatch:DeleteDashboards",
    "aws:cloudwatch/eventRule:EventRule": "events:PutRule events:DescribeRule events:DeleteRule events:TagResource",
    "aws:cloudwatch/eventTarget:EventTarget": "events:PutTargets events:ListTargetsByRule events:RemoveTargets",
    "aws:cloudwatch/logGroup:LogGroup": """logs:CreateLogGroup logs:DescribeLogGroups logs:PutRetentionPolicy
        logs:DeleteLogGroup logs:TagResource logs:ListTagsForResource""",
    "aws:cloudwatch/metricAlarm:MetricAlarm": """cloudwatch:PutMetricAlarm cloudwatch:DescribeAlarms
        cloudwatch:DeleteAlarms cloudwatch:TagResource cloudwatch:ListTagsForResource""",
    "aws:ec2/capacityReservation:CapacityReservation": """ec2:CreateCapacityReservation
        ec2:DescribeCapacityReservations ec2:ModifyCapacityReservation ec2:CancelCapacityReservation""",
    "aws:ec2/eip:Eip": "ec2:AllocateAddress ec2:DescribeAddresses ec2:ReleaseAddress ec2:CreateTags",
    "aws:ec2/flowLog:FlowLog": "ec2:CreateFlowLogs ec2:DescribeFlowLogs ec2:DeleteFlowLogs iam:PassRole",
    "aws:ec2/internetGateway:InternetGateway": """ec2:CreateInternetGateway ec2:AttachInternetGateway
        ec2:DescribeInternetGateways ec2:DetachInternetGateway ec2:DeleteInternetGateway""",
    "aws:ec2/launchTemplate:LaunchTemplate": """ec2:CreateLaunchTemplate ec2:CreateLaunchTemplateVersion
        ec2:DescribeLaunchTemplates ec2:DescribeLaunchTemplateVersions ec2:ModifyLaunchTemplate
        ec2:DeleteLaunchTemplate""",
    "aws:ec2/natGateway:NatGateway": "ec2:CreateNatGateway ec2:DescribeNatGateways ec2:DeleteNatGateway",
    "aws:ec2/placementGroup:PlacementGroup": """ec2:CreatePlacementGroup ec2:DescribePlacementGroups
        ec2:DeletePlacementGroup""",
    "aws:ec2/route:Route": "ec2:CreateRoute ec2:ReplaceRoute ec2:DescribeRouteTables ec2:DeleteRoute",
    "aws:ec2/routeTable:RouteTable": "ec2:CreateRouteTable ec2:DescribeRouteTables ec2:DeleteRouteTable",
    "aws:ec2/routeTableAssociation:RouteTableAssociation": """ec2:AssociateRouteTable ec2:DescribeRouteTables
        ec2:DisassociateRouteTable""",
    "aws:ec2/securityGroup:SecurityGroup": """ec2:CreateSecurityGroup ec2:DescribeSecurityGroups
        ec2:DescribeNetworkInterfaces ec2:RevokeSecurityGroupEgress ec2:DeleteSecurityGroup""",
    "aws:ec2/subnet:Subnet": "ec2:CreateSubnet ec2:ModifySubnetAttribute ec2:DescribeSubnets ec2:DeleteSubnet",
    "aws:ec2/vpc:Vpc": """ec2:CreateVpc ec2:ModifyVpcAttribute ec2:DescribeVpcs ec2:DescribeVpcAttribute
        ec2:DeleteVpc""",
    "aws:ec2/vpcEndpoint:VpcEndpoint": """ec2:CreateVpcEndpoint ec2:ModifyVpcEndpoint ec2:DescribeVpcEndpoints
        ec2:DescribePrefixLists ec2:DeleteVpcEndpoints""",
    "aws:ecr/lifecyclePolicy:LifecyclePolicy": """ecr:PutLifecyclePolicy ecr:GetLifecyclePolicy
        ecr:DeleteLifecyclePolicy""",
    "aws:ecr/repository:Repository": """ecr:CreateRepository ecr:DescribeRepositories ecr:PutImageScanningConfiguration
        ecr:PutImageTagMutability ecr:DeleteRepository ecr:TagResource ecr:ListTagsForResource""",
    "aws:eks/accessEntry:AccessEntry": """eks:CreateAccessEntry eks:DescribeAccessEntry eks:UpdateAccessEntry
        eks:DeleteAccessEntry""",
    "aws:eks/accessPolicyAssociation:AccessPolicyAssociation": """eks:AssociateAccessPolicy
        eks:ListAssociatedAccessPolicies eks:DisassociateAccessPolicy""",
    "aws:eks/addon:Addon": "eks:CreateAddon eks:DescribeAddon eks:UpdateAddon eks:DeleteAddon eks:DescribeUpdate",
    "aws:eks/cluster:Cluster": """eks:CreateCluster eks:DescribeCluster eks:UpdateClusterConfig
        eks:UpdateClusterVersion eks:DescribeUpdate eks:DeleteCluster eks:TagResource iam:PassRole""",
    "aws:eks/podIdentityAssociation:PodIdentityAssociation": """eks:CreatePodIdentityAssociation
        eks:DescribePodIdentityAssociation eks:UpdatePodIdentityAssociation eks:DeletePodIdentityAssociation
        iam:PassRole""",
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation": """fsx:CreateDataRepositoryAssociation
        fsx:DescribeDataRepositoryAssociations fsx:UpdateDataRepositoryAssociation
        fsx:DeleteDataRepositoryAssociation iam:CreateServiceLinkedRole iam:AttachRolePolicy iam:PutRolePolicy""",
    "aws:fsx/lustreFileSystem:LustreFileSystem": """fsx:CreateFileSystem fsx:DescribeFileSystems fsx:UpdateFileSystem
        fsx:DeleteFileSystem fsx:TagResource iam:CreateServiceLinkedRole logs:CreateLogStream logs:PutLogEvents""",
    "aws:fsx/openZfsFileSystem:OpenZfsFileSystem": """fsx:CreateFileSystem fsx:DescribeFileSystems fsx:DescribeVolumes
        fsx:UpdateFileSystem fsx:UpdateVolume fsx:DeleteFileSystem fsx:TagResource""",
    "aws:iam/instanceProfile:InstanceProfile": """iam:CreateInstanceProfile iam:GetInstanceProfile
        iam:AddRoleToInstanceProfile iam:RemoveRoleFromInstanceProfile iam:DeleteInstanceProfile iam:PassRole""",
    "aws:iam/role:Role": """iam:CreateRole iam:GetRole iam:UpdateRole iam:UpdateAssumeRolePolicy iam:ListRolePolicies
        iam:ListAttachedRolePolicies iam:ListInstanceProfilesForRole iam:DeleteRole iam:TagRole""",
    "aws:iam/rolePolicy:RolePolicy": "iam:PutRolePolicy iam:GetRolePolicy iam:DeleteRolePolicy",
    "aws:iam/rolePolicyAttachment:RolePolicyAttachment": """iam:AttachRolePolicy iam:ListAttachedRolePolicies
        iam:DetachRolePolicy""",
    "aws:s3/bucket:Bucket": """s3:CreateBucket s3:ListBucket s3:GetBucketTagging s3:PutBucketTagging
        s3:GetBucketLocation s3:GetBucketPolicy s3:GetBucketAcl s3:GetBucketVersioning s3:GetBucketCORS
        s3:GetBucketWebsite s3:GetBucketLogging s3:GetBucketRequestPayment s3:GetBucketObjectLockConfiguration
        s3:GetAccelerateConfiguration s3:GetReplicationConfiguration s3:GetLifecycleConfiguration
        s3:GetEncryptionConfiguration s3:DeleteBucket""",
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration": """s3:PutLifecycleConfiguration
        s3:GetLifecycleConfiguration""",
    "aws:s3/bucketObjectv2:BucketObjectv2": "s3:PutObject s3:GetObject s3:DeleteObject s3:GetObjectTagging s3:PutObjectTagging",
    "aws:s3/bucketOwnershipControls:BucketOwnershipControls": """s3:PutBucketOwnershipControls
        s3:GetBucketOwnershipControls""",
    "aws:s3/bucketPolicy:BucketPolicy": "s3:PutBucketPolicy s3:GetBucketPolicy s3:DeleteBucketPolicy",
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": """s3:PutBucketPublicAccessBlock
        s3:GetBucketPublicAccessBlock""",
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": """
        s3:PutEncryptionConfiguration s3:GetEncryptionConfiguration""",
    "aws:s3/bucketVersioning:BucketVersioning": "s3:PutBucketVersioning s3:GetBucketVersioning",
    "aws:sns/topic:Topic": """sns:CreateTopic sns:GetTopicAttributes sns:SetTopicAttributes sns:DeleteTopic
        sns:TagResource sns:ListTagsForResource""",
    "aws:sns/topicPolicy:TopicPolicy": "sns:SetTopicAttributes sns:GetTopicAttributes",
    "aws:sns/topicSubscription:TopicSubscription": """sns:Subscribe sns:GetSubscriptionAttributes
        sns:SetSubscriptionAttributes sns:Unsubscribe""",
    "aws:sqs/queue:Queue": """sqs:CreateQueue sqs:GetQueueAttributes sqs:SetQueueAttributes sqs:DeleteQueue
        sqs:TagQueue sqs:ListQueueTags""",
    "aws:sqs/queuePolicy:QueuePolicy": "sqs:SetQueueAttributes sqs:GetQueueAttributes",
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": """ec2:AuthorizeSecurityGroupEgress
        ec2:DescribeSecurityGroupRules ec2:ModifySecurityGroupRules ec2:RevokeSecurityGroupEgress""",
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": """ec2:AuthorizeSecurityGroupIngress
        ec2:DescribeSecurityGroupRules ec2:ModifySecurityGroupRules ec2:RevokeSecurityGroupIngress""",
}
"""What the provider calls to make, read, change and drop a resource; deletes of settings of a bucket are puts in IAM. Read
from the provider's documentation and the services' authorization reference, by a person, row by row."""


@cache
def declared(stack: str) -> frozenset[str]:
    """The resource types of a stack; in a process of its own, since Pulumi's state is global."""
    command = [sys.executable, "-m", "rehearsal.mocked", str(PROGRAM / f"Pulumi.{stack}.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kinds = {kind for kind, _ in json.loads(done.stdout)["resources"]}
    return frozenset(kind for kind in kinds if kind.startswith("aws:"))


@pytest.mark.slow
@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_deployer_may_make_read_and_drop_whatever_the_stack_declares(stack: str) -> None:
    policy = deployer_policy(example(stack), Place(region_of(stack), ACCOUNT))
    granted = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert declared(stack)
    unknown = declared(stack) - set(CALLS)
    assert not unknown, f"no row in CALLS for {sorted(unknown)}: write what the provider calls, then grant it"
    missing = {
        f"{kind}: {call}"
        for kind in declared(stack)
        for call in CALLS[kind].split()
        if not any(fnmatch.fnmatchcase(call, pattern) for pattern in granted)
    }
    assert not missing, sorted(missing)
