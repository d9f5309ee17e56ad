"""EKS of the embedded AWS: control planes, access entries, add-ons, pod identities, and HyperPod on EKS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infra.local.aws import LocalAws
from tests.infra.local_network import ACCOUNT, Network, client, refusal
from tests.infra.test_local_hyperpod import make_role

pytestmark = pytest.mark.slow

ADMIN = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
PLATFORM = f"arn:aws:iam::{ACCOUNT}:role/teams/platform"


@pytest.fixture(scope="module")
def eks(aws: LocalAws) -> Any:
    return client(aws, "eks", "us-east-2")


@pytest.fixture(scope="module")
def network(aws: LocalAws) -> Network:
    return Network(aws, "us-east-2", "use2-az1")


@pytest.fixture(scope="module")
def request_of(aws: LocalAws, network: Network) -> Callable[..., dict[str, Any]]:
    """A function that returns a valid request for a cluster, each with a new name."""
    role = make_role(aws, "eks-cluster", "eks.amazonaws.com")
    second_subnet = network.ec2.create_subnet(
        VpcId=network.vpc, CidrBlock="10.0.16.0/24", AvailabilityZoneId="use2-az2"
    )
    vpc = {"subnetIds": [network.subnet, second_subnet["Subnet"]["SubnetId"]], "securityGroupIds": [network.group]}
    count = 0

    def make(**changes: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        return {
            "name": f"plane-{count}",
            "version": "1.33",
            "roleArn": role,
            "accessConfig": {"authenticationMode": "API", "bootstrapClusterCreatorAdminPermissions": False},
            "logging": {"clusterLogging": [{"types": ["api", "audit"], "enabled": True}]},
            "tags": {"lustrain:cluster": "demo"},
            **changes,
            "resourcesVpcConfig": {**vpc, "endpointPrivateAccess": True, **changes.get("resourcesVpcConfig", {})},
        }

    return make


@pytest.fixture
def plane(eks: Any, request_of: Any) -> str:
    return str(create_active_cluster(eks, request_of())["name"])


def create_active_cluster(eks: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Create the cluster of a request, which is active once it has been described."""
    assert eks.create_cluster(**request)["cluster"]["status"] == "CREATING"
    answers = [eks.describe_cluster(name=request["name"])["cluster"] for _ in range(2)]
    assert [answer["status"] for answer in answers] == ["CREATING", "ACTIVE"]
    return dict(answers[-1])


def addon_status(eks: Any, plane: str, name: str) -> str:
    """The status of an add-on that has been described before."""
    eks.describe_addon(clusterName=plane, addonName=name)
    return str(eks.describe_addon(clusterName=plane, addonName=name)["addon"]["status"])


def test_network_of_cluster_cannot_be_deleted(eks: Any, request_of: Any, network: Network) -> None:
    request = request_of()
    cluster = create_active_cluster(eks, request)
    assert cluster["resourcesVpcConfig"]["vpcId"] == network.vpc
    assert cluster["upgradePolicy"] == {"supportType": "EXTENDED"}
    assert refusal(eks.create_cluster, **request)[0] == "ResourceInUseException"
    group = cluster["resourcesVpcConfig"]["clusterSecurityGroupId"]
    assert network.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["VpcId"] == network.vpc
    assert refusal(network.ec2.delete_subnet, SubnetId=network.subnet)[0] == "DependencyViolation"
    assert refusal(network.ec2.delete_security_group, GroupId=group)[0] == "DependencyViolation"
    eks.delete_cluster(name=request["name"])
    assert refusal(eks.describe_cluster, name=request["name"])[0] == "ResourceNotFoundException"
    assert refusal(network.ec2.describe_security_groups, GroupIds=[group])[0] == "InvalidGroup.NotFound"


@pytest.mark.parametrize(
    ("changes", "vpc", "message_part"),
    [
        ({}, {"subnetIds": ["subnet-1", "subnet-2"]}, "subnet ID 'subnet-1' does not exist"),
        ({}, {"securityGroupIds": ["sg-1"]}, "security group ID 'sg-1' does not exist"),
        ({}, {"endpointPublicAccess": False, "endpointPrivateAccess": False}, "cannot be false"),
        ({"roleArn": f"arn:aws:iam::{ACCOUNT}:role/nobody"}, {}, "could not be assumed"),
        ({"version": "latest"}, {}, "unsupported Kubernetes version"),
        ({"deletionProtection": True}, {}, "keeps no deletionProtection"),
        ({"accessConfig": {"authenticationMode": "IAM"}}, {}, "enum value set"),
        ({"name": "-dash"}, {}, "'name' failed to satisfy constraint"),
    ],
)
def test_invalid_cluster_is_refused(
    eks: Any, request_of: Any, changes: dict[str, Any], vpc: dict[str, Any], message_part: str
) -> None:
    code, message = refusal(eks.create_cluster, **request_of(**changes, resourcesVpcConfig=vpc))
    assert (code, message_part in message) == ("InvalidParameterException", True), message


def test_cluster_in_a_single_zone_is_refused(eks: Any, request_of: Any, network: Network) -> None:
    single_zone = request_of(resourcesVpcConfig={"subnetIds": [network.subnet]})
    assert "two different AZs" in refusal(eks.create_cluster, **single_zone)[1]


def test_cluster_takes_single_forward_updates(eks: Any, plane: str) -> None:
    update = eks.update_cluster_version(name=plane, version="1.34")["update"]
    assert eks.describe_update(name=plane, updateId=update["id"])["update"]["status"] == "Successful"
    for version in ("1.33", "1.36", "1.34"):
        assert refusal(eks.update_cluster_version, name=plane, version=version)[0] == "InvalidParameterException"
    logging = {"clusterLogging": [{"types": ["audit"], "enabled": False}, {"types": ["scheduler"], "enabled": True}]}
    eks.update_cluster_config(name=plane, logging=logging)
    eks.update_cluster_config(name=plane, resourcesVpcConfig={"endpointPublicAccess": False})
    cluster = eks.describe_cluster(name=plane)["cluster"]
    assert cluster["version"] == "1.34"
    assert {"types": ["api", "scheduler"], "enabled": True} in cluster["logging"]["clusterLogging"]
    assert cluster["resourcesVpcConfig"]["endpointPublicAccess"] is False
    assert len(cluster["resourcesVpcConfig"]["subnetIds"]) == 2
    both = {"logging": logging, "upgradePolicy": {"supportType": "STANDARD"}}
    assert refusal(eks.update_cluster_config, name=plane, **both)[0] == "InvalidParameterException"


def test_access_entry_takes_valid_policies(eks: Any, plane: str) -> None:
    principal = {"clusterName": plane, "principalArn": PLATFORM}
    entry = eks.create_access_entry(**principal)["accessEntry"]
    assert entry["username"] == f"arn:aws:sts::{ACCOUNT}:assumed-role/platform/{{{{SessionName}}}}"
    assert refusal(eks.create_access_entry, **principal)[0] == "ResourceInUseException"
    unknown = {"policyArn": ADMIN + "s", "accessScope": {"type": "cluster"}}
    assert refusal(eks.associate_access_policy, **principal, **unknown)[0] == "InvalidParameterException"
    eks.associate_access_policy(**principal, policyArn=ADMIN, accessScope={"type": "cluster"})
    (association,) = eks.list_associated_access_policies(**principal)["associatedAccessPolicies"]
    assert (association["policyArn"], association["accessScope"]["type"]) == (ADMIN, "cluster")
    eks.delete_access_entry(**principal)
    assert refusal(eks.describe_access_entry, **principal)[0] == "ResourceNotFoundException"


def test_invalid_access_entries_are_refused(eks: Any, request_of: Any, plane: str) -> None:
    for invalid in ({"principalArn": "no-arn"}, {"principalArn": PLATFORM, "kubernetesGroups": ["readers"]}):
        assert refusal(eks.create_access_entry, clusterName=plane, **invalid)[0] == "InvalidParameterException"
    old = create_active_cluster(eks, request_of(accessConfig={"authenticationMode": "CONFIG_MAP"}))["name"]
    code, _ = refusal(eks.create_access_entry, clusterName=old, principalArn=PLATFORM)
    assert code == "InvalidRequestException"


def test_second_pod_identity_of_account_is_refused(aws: LocalAws, eks: Any, plane: str) -> None:
    role = make_role(aws, "fsx-csi", "pods.eks.amazonaws.com")
    account = {"namespace": "kube-system", "serviceAccount": "fsx-csi-controller-sa"}
    request = {"clusterName": plane, **account, "roleArn": role}
    association = eks.create_pod_identity_association(**request)["association"]
    assert refusal(eks.create_pod_identity_association, **request)[0] == "ResourceInUseException"
    foreign_role = {**request, "serviceAccount": "other", "roleArn": f"arn:aws:iam::{ACCOUNT}:role/nobody"}
    assert refusal(eks.create_pod_identity_association, **foreign_role)[0] == "InvalidParameterException"
    identifier = {"clusterName": plane, "associationId": association["associationId"]}
    assert eks.describe_pod_identity_association(**identifier)["association"]["roleArn"] == role
    eks.delete_pod_identity_association(**identifier)
    assert refusal(eks.describe_pod_identity_association, **identifier)[0] == "ResourceNotFoundException"


def test_addon_is_created_changed_tagged_and_deleted(eks: Any, plane: str) -> None:
    cni = {"clusterName": plane, "addonName": "vpc-cni"}
    (version,) = eks.describe_addon_versions(addonName="vpc-cni", kubernetesVersion="1.33")["addons"][0][
        "addonVersions"
    ]
    arn = eks.create_addon(**cni, resolveConflicts="OVERWRITE")["addon"]["addonArn"]
    assert addon_status(eks, plane, "vpc-cni") == "ACTIVE"
    assert eks.describe_addon(**cni)["addon"]["addonVersion"] == version["addonVersion"]
    update = eks.update_addon(**cni, configurationValues='{"env": {}}')["update"]
    completed = eks.describe_update(name=plane, updateId=update["id"], addonName="vpc-cni")["update"]
    assert (completed["status"], completed["type"]) == ("Successful", "AddonUpdate")
    assert eks.describe_addon(**cni)["addon"]["configurationValues"] == '{"env": {}}'
    for invalid in ({"addonName": "vpc-cnii"}, {"addonName": "kube-proxy", "addonVersion": "v9"}):
        assert refusal(eks.create_addon, clusterName=plane, **invalid)[0] == "InvalidParameterException"
    assert refusal(eks.create_addon, **cni)[0] == "ResourceInUseException"
    eks.tag_resource(resourceArn=arn, tags={"team": "ml", "gone": "soon"})
    eks.untag_resource(resourceArn=arn, tagKeys=["gone"])
    assert eks.list_tags_for_resource(resourceArn=arn)["tags"] == {"team": "ml"}
    eks.delete_addon(**cni)
    assert eks.list_addons(clusterName=plane)["addons"] == []


def test_hyperpod_nodes_make_addons_active(
    aws: LocalAws, eks: Any, network: Network, request_of: Any, plane: str
) -> None:
    sagemaker = client(aws, "sagemaker", "us-east-2")
    role = make_role(aws, "node", "sagemaker.amazonaws.com")
    scaler = make_role(aws, "karpenter", "hyperpod.sagemaker.amazonaws.com")
    group = {"InstanceGroupName": "spot", "InstanceType": "ml.g6e.12xlarge", "InstanceCount": 2, "ExecutionRole": role}
    request: dict[str, Any] = {
        "ClusterName": "on-eks",
        "NodeProvisioningMode": "Continuous",
        "Orchestrator": {"Eks": {"ClusterArn": eks.describe_cluster(name=plane)["cluster"]["arn"]}},
        "VpcConfig": {"SecurityGroupIds": [network.group], "Subnets": [network.subnet]},
        "TieredStorageConfig": {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 20},
        "AutoScaling": {"Mode": "Enable", "AutoScalerType": "Karpenter"},
        "ClusterRole": scaler,
        "InstanceGroups": [{**group, "KubernetesConfig": {"Labels": {"lustrain.dev/role": "worker"}}}],
    }
    eks.create_addon(clusterName=plane, addonName="coredns")
    assert addon_status(eks, plane, "coredns") == "DEGRADED"
    shut = create_active_cluster(eks, request_of(accessConfig={"authenticationMode": "CONFIG_MAP"}))["arn"]
    nowhere = f"arn:aws:eks:us-east-2:{ACCOUNT}:cluster/nowhere"
    for changes, message_part in (
        ({"Orchestrator": {"Eks": {"ClusterArn": nowhere}}}, "does not exist"),
        ({"Orchestrator": {"Eks": {"ClusterArn": shut}}}, "authentication mode"),
        ({"ClusterRole": role}, "trust hyperpod.sagemaker.amazonaws.com"),
    ):
        invalid = {name: value for name, value in {**request, **changes}.items() if value is not None}
        assert message_part in refusal(sagemaker.create_cluster, **invalid)[1]
    other = Network(aws, "us-east-2", "use2-az1")
    elsewhere = {"VpcConfig": {"SecurityGroupIds": [other.group], "Subnets": [other.subnet]}}
    assert "is not in the VPC" in refusal(sagemaker.create_cluster, **{**request, **elsewhere})[1]
    request["InstanceGroups"][0]["CapacityRequirements"] = {"Spot": {}}
    sagemaker.create_cluster(**request)
    assert sagemaker.describe_cluster(ClusterName="on-eks")["ClusterRole"] == scaler
    assert addon_status(eks, plane, "coredns") == "ACTIVE"
    operator = "amazon-sagemaker-hyperpod-training-operator"
    eks.create_addon(clusterName=plane, addonName=operator)
    assert addon_status(eks, plane, operator) == "DEGRADED"
    eks.create_addon(clusterName=plane, addonName="cert-manager")
    assert addon_status(eks, plane, operator) == "ACTIVE"
