"""EKS of the embedded AWS: control planes, who may enter, add-ons, pod identities, and HyperPod on top."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infra.local.aws import LocalAws
from tests.infra.local_network import ACCOUNT, Network, client, refusal
from tests.infra.test_local_hyperpod import make_role
from tests.processes import wait_for

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
    """A request that EKS accepts, each under a name of its own."""
    role = make_role(aws, "eks-cluster", "eks.amazonaws.com")
    far = network.ec2.create_subnet(VpcId=network.vpc, CidrBlock="10.0.16.0/24", AvailabilityZoneId="use2-az2")
    vpc = {"subnetIds": [network.subnet, far["Subnet"]["SubnetId"]], "securityGroupIds": [network.group]}
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
    return str(up(eks, request_of())["name"])


def up(eks: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The cluster of a request, once it is active."""
    assert eks.create_cluster(**request)["cluster"]["status"] == "CREATING"
    return active(eks, request["name"])


def active(eks: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(
        lambda: eks.describe_cluster(name=name)["cluster"], lambda seen: seen["status"] == "ACTIVE"
    )
    return found


def addon_status(eks: Any, plane: str, name: str) -> str:
    return wait_for(
        lambda: str(eks.describe_addon(clusterName=plane, addonName=name)["addon"]["status"]),
        lambda seen: seen != "CREATING",
    )


def test_what_a_cluster_stands_on_stays_as_long_as_it(eks: Any, request_of: Any, network: Network) -> None:
    request = request_of()
    found = up(eks, request)
    assert found["resourcesVpcConfig"]["vpcId"] == network.vpc
    assert found["upgradePolicy"] == {"supportType": "EXTENDED"}
    assert refusal(eks.create_cluster, **request)[0] == "ResourceInUseException"
    group = found["resourcesVpcConfig"]["clusterSecurityGroupId"]
    assert network.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["VpcId"] == network.vpc
    assert refusal(network.ec2.delete_subnet, SubnetId=network.subnet)[0] == "DependencyViolation"
    assert refusal(network.ec2.delete_security_group, GroupId=group)[0] == "DependencyViolation"
    eks.delete_cluster(name=request["name"])
    assert refusal(eks.describe_cluster, name=request["name"])[0] == "ResourceNotFoundException"
    assert refusal(network.ec2.describe_security_groups, GroupIds=[group])[0] == "InvalidGroup.NotFound"


@pytest.mark.parametrize(
    ("changes", "vpc", "said"),
    [
        ({}, {"subnetIds": ["subnet-1", "subnet-2"]}, "subnet ID 'subnet-1' does not exist"),
        ({}, {"securityGroupIds": ["sg-1"]}, "security group ID 'sg-1' does not exist"),
        ({}, {"endpointPublicAccess": False, "endpointPrivateAccess": False}, "cannot be false"),
        ({}, {"publicAccessCidrs": ["10.0.0.0/8"]}, "invalid in publicAccessCidrs: [10.0.0.0/8]"),
        ({}, {"publicAccessCidrs": ["8.8.8.8", "::/0"]}, "invalid in publicAccessCidrs: [8.8.8.8, ::/0]"),
        ({}, {"publicAccessCidrs": ["8.8.8.0/24"] * 41}, "40 entries at most"),
        ({"roleArn": f"arn:aws:iam::{ACCOUNT}:role/nobody"}, {}, "could not be assumed"),
        ({"version": "latest"}, {}, "unsupported Kubernetes version"),
        ({"accessConfig": {"authenticationMode": "IAM"}}, {}, "enum value set"),
        ({"name": "-dash"}, {}, "'name' failed to satisfy constraint"),
    ],
)
def test_a_wrong_cluster_is_refused(
    eks: Any, request_of: Any, changes: dict[str, Any], vpc: dict[str, Any], said: str
) -> None:
    code, message = refusal(eks.create_cluster, **request_of(**changes, resourcesVpcConfig=vpc))
    assert (code, said in message) == ("InvalidParameterException", True), message


def test_one_zone_is_not_enough_and_some_zones_have_no_eks(
    eks: Any, aws: LocalAws, request_of: Any, network: Network
) -> None:
    alone = request_of(resourcesVpcConfig={"subnetIds": [network.subnet]})
    assert "two different AZs" in refusal(eks.create_cluster, **alone)[1]
    east = Network(aws, "us-east-1", "use1-az3")
    other = east.ec2.create_subnet(VpcId=east.vpc, CidrBlock="10.0.16.0/24", AvailabilityZoneId="use1-az4")
    vpc = {"subnetIds": [east.subnet, other["Subnet"]["SubnetId"]], "securityGroupIds": [east.group]}
    wrong = refusal(client(aws, "eks", "us-east-1").create_cluster, **request_of(resourcesVpcConfig=vpc))
    assert wrong[0] == "UnsupportedAvailabilityZoneException"


def test_a_cluster_changes_in_place_one_thing_at_a_time_and_forwards_only(eks: Any, plane: str) -> None:
    update = eks.update_cluster_version(name=plane, version="1.34")["update"]
    assert eks.describe_update(name=plane, updateId=update["id"])["update"]["status"] == "Successful"
    for version in ("1.33", "1.36", "1.34"):
        assert refusal(eks.update_cluster_version, name=plane, version=version)[0] == "InvalidParameterException"
    logging = {"clusterLogging": [{"types": ["audit"], "enabled": False}, {"types": ["scheduler"], "enabled": True}]}
    eks.update_cluster_config(name=plane, logging=logging)
    eks.update_cluster_config(name=plane, resourcesVpcConfig={"endpointPublicAccess": False})
    found = active(eks, plane)
    assert found["version"] == "1.34"
    assert {"types": ["api", "scheduler"], "enabled": True} in found["logging"]["clusterLogging"]
    assert found["resourcesVpcConfig"]["endpointPublicAccess"] is False
    assert len(found["resourcesVpcConfig"]["subnetIds"]) == 2
    both = {"logging": logging, "upgradePolicy": {"supportType": "STANDARD"}}
    assert refusal(eks.update_cluster_config, name=plane, **both)[0] == "InvalidParameterException"
    back = {"authenticationMode": "API_AND_CONFIG_MAP"}
    assert "from API to API_AND_CONFIG_MAP" in refusal(eks.update_cluster_config, name=plane, accessConfig=back)[1]


def test_an_access_entry_lets_a_role_in_under_a_policy(eks: Any, plane: str) -> None:
    who = {"clusterName": plane, "principalArn": PLATFORM}
    entry = eks.create_access_entry(**who)["accessEntry"]
    assert entry["username"] == f"arn:aws:sts::{ACCOUNT}:assumed-role/platform/{{{{SessionName}}}}"
    assert refusal(eks.create_access_entry, **who)[0] == "ResourceInUseException"
    for wrong in ({"policyArn": ADMIN + "s", "type": "cluster"}, {"policyArn": ADMIN, "type": "namespace"}):
        asked = {"policyArn": wrong["policyArn"], "accessScope": {"type": wrong["type"]}}
        assert refusal(eks.associate_access_policy, **who, **asked)[0] == "InvalidParameterException"
    eks.associate_access_policy(**who, policyArn=ADMIN, accessScope={"type": "cluster"})
    (found,) = eks.list_associated_access_policies(**who)["associatedAccessPolicies"]
    assert (found["policyArn"], found["accessScope"]["type"]) == (ADMIN, "cluster")
    eks.delete_access_entry(**who)
    assert refusal(eks.describe_access_entry, **who)[0] == "ResourceNotFoundException"


def test_wrong_entries_are_refused_and_any_where_only_the_old_map_lets_in(
    eks: Any, request_of: Any, plane: str
) -> None:
    for changes, said in (
        ({"principalArn": "platform"}, "principalArn"),
        ({"principalArn": PLATFORM, "kubernetesGroups": ["system:masters"]}, "cannot start with system:"),
        ({"principalArn": PLATFORM, "type": "NODE"}, "NODE is not valid"),
    ):
        code, message = refusal(eks.create_access_entry, clusterName=plane, **changes)
        assert (code, said in message) == ("InvalidParameterException", True), message
    old = up(eks, request_of(accessConfig={"authenticationMode": "CONFIG_MAP"}))["name"]
    code, _ = refusal(eks.create_access_entry, clusterName=old, principalArn=PLATFORM)
    assert code == "InvalidRequestException"


def test_a_service_account_has_one_pod_identity(aws: LocalAws, eks: Any, plane: str) -> None:
    role = make_role(aws, "fsx-csi", "pods.eks.amazonaws.com")
    account = {"namespace": "kube-system", "serviceAccount": "fsx-csi-controller-sa"}
    asked = {"clusterName": plane, **account, "roleArn": role}
    made = eks.create_pod_identity_association(**asked)["association"]
    assert refusal(eks.create_pod_identity_association, **asked)[0] == "ResourceInUseException"
    foreign = {**asked, "serviceAccount": "other", "roleArn": f"arn:aws:iam::{ACCOUNT}:role/nobody"}
    assert refusal(eks.create_pod_identity_association, **foreign)[0] == "InvalidParameterException"
    wanted = {"clusterName": plane, "associationId": made["associationId"]}
    assert eks.describe_pod_identity_association(**wanted)["association"]["roleArn"] == role
    eks.delete_pod_identity_association(**wanted)
    assert refusal(eks.describe_pod_identity_association, **wanted)[0] == "ResourceNotFoundException"


def test_add_ons_are_made_updated_tagged_and_deleted(eks: Any, plane: str) -> None:
    cni = {"clusterName": plane, "addonName": "vpc-cni"}
    info = eks.describe_addon_versions(addonName="vpc-cni", kubernetesVersion="1.33")["addons"][0]["addonVersions"]
    newest = next(one["addonVersion"] for one in info if one["compatibilities"][0]["defaultVersion"])
    arn = eks.create_addon(**cni, resolveConflicts="OVERWRITE")["addon"]["addonArn"]
    assert addon_status(eks, plane, "vpc-cni") == "ACTIVE"
    assert eks.describe_addon(**cni)["addon"]["addonVersion"] == newest
    update = eks.update_addon(**cni, addonVersion=info[-1]["addonVersion"])["update"]
    done = eks.describe_update(name=plane, updateId=update["id"], addonName="vpc-cni")["update"]
    assert (done["status"], done["type"]) == ("Successful", "AddonUpdate")
    assert eks.describe_addon(**cni)["addon"]["addonVersion"] == info[-1]["addonVersion"]
    for wrong in ({"addonName": "vpc-cnii"}, {"addonName": "kube-proxy", "addonVersion": "v9"}):
        assert refusal(eks.create_addon, clusterName=plane, **wrong)[0] == "InvalidParameterException"
    assert refusal(eks.create_addon, **cni)[0] == "ResourceInUseException"
    eks.tag_resource(resourceArn=arn, tags={"team": "ml", "gone": "soon"})
    eks.untag_resource(resourceArn=arn, tagKeys=["gone"])
    assert eks.list_tags_for_resource(resourceArn=arn)["tags"] == {"team": "ml"}
    eks.delete_addon(**cni)
    assert eks.list_addons(clusterName=plane)["addons"] == []


def test_hyperpod_joins_a_cluster_that_the_api_opens_and_brings_the_nodes_that_add_ons_wait_for(
    aws: LocalAws, eks: Any, network: Network, request_of: Any, plane: str
) -> None:
    sagemaker = client(aws, "sagemaker", "us-east-2")
    role = make_role(aws, "node", "sagemaker.amazonaws.com")
    scaler = make_role(aws, "karpenter", "hyperpod.sagemaker.amazonaws.com")
    group = {"InstanceGroupName": "spot", "InstanceType": "ml.g6e.12xlarge", "InstanceCount": 2, "ExecutionRole": role}
    request: dict[str, Any] = {
        "ClusterName": "on-eks",
        "NodeProvisioningMode": "Continuous",
        "Orchestrator": {"Eks": {"ClusterArn": active(eks, plane)["arn"]}},
        "VpcConfig": {"SecurityGroupIds": [network.group], "Subnets": [network.subnet]},
        "TieredStorageConfig": {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 20},
        "AutoScaling": {"Mode": "Enable", "AutoScalerType": "Karpenter"},
        "ClusterRole": scaler,
        "InstanceGroups": [{**group, "KubernetesConfig": {"Labels": {"lustrain.dev/role": "worker"}}}],
    }
    eks.create_addon(clusterName=plane, addonName="coredns")
    assert addon_status(eks, plane, "coredns") == "DEGRADED"
    shut = up(eks, request_of(accessConfig={"authenticationMode": "CONFIG_MAP"}))["arn"]
    nowhere = f"arn:aws:eks:us-east-2:{ACCOUNT}:cluster/nowhere"
    for wrong, said in (
        ({"Orchestrator": {"Eks": {"ClusterArn": nowhere}}}, "does not exist"),
        ({"Orchestrator": {"Eks": {"ClusterArn": shut}}}, "authentication mode"),
        ({"ClusterRole": None}, "ClusterRole is required"),
        ({"ClusterRole": role}, "trust hyperpod.sagemaker.amazonaws.com"),
        ({"NodeProvisioningMode": None}, "NodeProvisioningMode Continuous only"),
        ({"NodeRecovery": "None"}, "NodeRecovery Automatic only"),
    ):
        asked = {name: value for name, value in {**request, **wrong}.items() if value is not None}
        assert said in refusal(sagemaker.create_cluster, **asked)[1]
    request["InstanceGroups"][0]["CapacityRequirements"] = {"Spot": {}}
    sagemaker.create_cluster(**request)
    assert sagemaker.describe_cluster(ClusterName="on-eks")["ClusterRole"] == scaler
    assert addon_status(eks, plane, "coredns") == "ACTIVE"
    operator = "amazon-sagemaker-hyperpod-training-operator"
    eks.create_addon(clusterName=plane, addonName=operator)
    assert addon_status(eks, plane, operator) == "DEGRADED"
    eks.create_addon(clusterName=plane, addonName="cert-manager")
    assert addon_status(eks, plane, operator) == "ACTIVE"
    node = sagemaker.list_cluster_nodes(ClusterName="on-eks")["ClusterNodeSummaries"][0]["InstanceId"]
    details = sagemaker.describe_cluster_node(ClusterName="on-eks", NodeId=node)["NodeDetails"]
    assert (details["CapacityType"], details["Placement"]["AvailabilityZoneId"]) == ("Spot", "use2-az1")
