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
def far_subnet(network: Network) -> str:
    made = network.ec2.create_subnet(VpcId=network.vpc, CidrBlock="10.0.16.0/24", AvailabilityZoneId="use2-az2")
    return str(made["Subnet"]["SubnetId"])


@pytest.fixture(scope="module")
def request_of(aws: LocalAws, network: Network, far_subnet: str) -> Callable[..., dict[str, Any]]:
    """A request that EKS accepts, each under a name of its own."""
    role = make_role(aws, "eks-cluster", "eks.amazonaws.com")
    count = 0

    def make(**changes: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        vpc = {
            "subnetIds": [network.subnet, far_subnet],
            "securityGroupIds": [network.group],
            "endpointPrivateAccess": True,
        }
        return {
            "name": f"plane-{count}",
            "version": "1.33",
            "roleArn": role,
            "accessConfig": {"authenticationMode": "API", "bootstrapClusterCreatorAdminPermissions": False},
            "logging": {"clusterLogging": [{"types": ["api", "audit"], "enabled": True}]},
            "tags": {"lustrain:cluster": "demo"},
            **changes,
            "resourcesVpcConfig": {**vpc, **changes.get("resourcesVpcConfig", {})},
        }

    return make


@pytest.fixture
def plane(eks: Any, request_of: Any) -> str:
    request = request_of()
    eks.create_cluster(**request)
    active(eks, request["name"])
    return str(request["name"])


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


def test_a_cluster_comes_up_as_it_was_asked_for(eks: Any, request_of: Any, network: Network) -> None:
    request = request_of()
    assert eks.create_cluster(**request)["cluster"]["status"] == "CREATING"
    found = active(eks, request["name"])
    assert found["accessConfig"]["authenticationMode"] == "API"
    assert found["resourcesVpcConfig"]["vpcId"] == network.vpc
    assert found["resourcesVpcConfig"]["endpointPrivateAccess"] is True
    assert {"types": ["api", "audit"], "enabled": True} in found["logging"]["clusterLogging"]
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
    ("changes", "said"),
    [
        ({"resourcesVpcConfig": {"subnetIds": ["subnet-1", "subnet-2"]}}, "subnet ID 'subnet-1' does not exist"),
        ({"resourcesVpcConfig": {"securityGroupIds": ["sg-1"]}}, "security group ID 'sg-1' does not exist"),
        ({"resourcesVpcConfig": {"endpointPublicAccess": False, "endpointPrivateAccess": False}}, "cannot be false"),
        ({"roleArn": f"arn:aws:iam::{ACCOUNT}:role/nobody"}, "could not be assumed"),
        ({"resourcesVpcConfig": {"publicAccessCidrs": ["10.0.0.0/8"]}}, "invalid in publicAccessCidrs: [10.0.0.0/8]"),
        (
            {"resourcesVpcConfig": {"publicAccessCidrs": ["8.8.8.8", "::/0"]}},
            "invalid in publicAccessCidrs: [8.8.8.8, ::/0]",
        ),
        ({"resourcesVpcConfig": {"publicAccessCidrs": ["8.8.8.0/24"] * 41}}, "40 entries at most"),
        ({"version": "latest"}, "unsupported Kubernetes version"),
        ({"accessConfig": {"authenticationMode": "IAM"}}, "enum value set"),
        ({"name": "-dash"}, "'name' failed to satisfy constraint"),
    ],
)
def test_a_wrong_cluster_is_refused(eks: Any, request_of: Any, changes: dict[str, Any], said: str) -> None:
    code, message = refusal(eks.create_cluster, **request_of(**changes))
    assert (code, said in message) == ("InvalidParameterException", True), message


def test_one_zone_is_not_enough_and_some_zones_have_no_eks(
    eks: Any, aws: LocalAws, request_of: Any, network: Network
) -> None:
    code, message = refusal(eks.create_cluster, **request_of(resourcesVpcConfig={"subnetIds": [network.subnet]}))
    assert (code, "two different AZs" in message) == ("InvalidParameterException", True)
    east = Network(aws, "us-east-1", "use1-az3")
    other = east.ec2.create_subnet(VpcId=east.vpc, CidrBlock="10.0.16.0/24", AvailabilityZoneId="use1-az4")["Subnet"][
        "SubnetId"
    ]
    vpc = {"subnetIds": [east.subnet, other], "securityGroupIds": [east.group]}
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
    entry = eks.create_access_entry(clusterName=plane, principalArn=PLATFORM)["accessEntry"]
    assert entry["username"] == f"arn:aws:sts::{ACCOUNT}:assumed-role/platform/{{{{SessionName}}}}"
    assert refusal(eks.create_access_entry, clusterName=plane, principalArn=PLATFORM)[0] == "ResourceInUseException"
    eks.associate_access_policy(
        clusterName=plane, principalArn=PLATFORM, policyArn=ADMIN, accessScope={"type": "cluster"}
    )
    found = eks.list_associated_access_policies(clusterName=plane, principalArn=PLATFORM)["associatedAccessPolicies"]
    assert [(one["policyArn"], one["accessScope"]["type"]) for one in found] == [(ADMIN, "cluster")]
    eks.update_access_entry(clusterName=plane, principalArn=PLATFORM, kubernetesGroups=["ml"])
    assert eks.describe_access_entry(clusterName=plane, principalArn=PLATFORM)["accessEntry"]["kubernetesGroups"] == [
        "ml"
    ]
    eks.disassociate_access_policy(clusterName=plane, principalArn=PLATFORM, policyArn=ADMIN)
    assert (
        eks.list_associated_access_policies(clusterName=plane, principalArn=PLATFORM)["associatedAccessPolicies"] == []
    )
    eks.delete_access_entry(clusterName=plane, principalArn=PLATFORM)
    assert (
        refusal(eks.describe_access_entry, clusterName=plane, principalArn=PLATFORM)[0] == "ResourceNotFoundException"
    )


def test_wrong_entries_and_policies_are_refused(eks: Any, request_of: Any, plane: str) -> None:
    for changes, said in (
        ({"principalArn": "platform"}, "principalArn"),
        ({"principalArn": PLATFORM, "kubernetesGroups": ["system:masters"]}, "cannot start with system:"),
        ({"principalArn": PLATFORM, "type": "NODE"}, "NODE is not valid"),
    ):
        code, message = refusal(eks.create_access_entry, clusterName=plane, **changes)
        assert (code, said in message) == ("InvalidParameterException", True), message
    eks.create_access_entry(clusterName=plane, principalArn=PLATFORM)
    scope = {"type": "cluster"}
    unknown = {"policyArn": ADMIN + "s", "accessScope": scope}
    aimless = {"policyArn": ADMIN, "accessScope": {"type": "namespace"}}
    for wrong in (unknown, aimless):
        code, _ = refusal(eks.associate_access_policy, clusterName=plane, principalArn=PLATFORM, **wrong)
        assert code == "InvalidParameterException"
    old = request_of(accessConfig={"authenticationMode": "CONFIG_MAP"})
    eks.create_cluster(**old)
    active(eks, old["name"])
    code, message = refusal(eks.create_access_entry, clusterName=old["name"], principalArn=PLATFORM)
    assert (code, "authentication mode must be set" in message) == ("InvalidRequestException", True)


def test_a_service_account_has_one_pod_identity(aws: LocalAws, eks: Any, plane: str) -> None:
    role = make_role(aws, "fsx-csi", "pods.eks.amazonaws.com")
    asked = {
        "clusterName": plane,
        "namespace": "kube-system",
        "serviceAccount": "fsx-csi-controller-sa",
        "roleArn": role,
    }
    made = eks.create_pod_identity_association(**asked)["association"]
    assert refusal(eks.create_pod_identity_association, **asked)[0] == "ResourceInUseException"
    foreign = {**asked, "serviceAccount": "other", "roleArn": f"arn:aws:iam::{ACCOUNT}:role/nobody"}
    assert refusal(eks.create_pod_identity_association, **foreign)[0] == "InvalidParameterException"
    wanted = {"clusterName": plane, "associationId": made["associationId"]}
    assert eks.describe_pod_identity_association(**wanted)["association"]["roleArn"] == role
    assert len(eks.list_pod_identity_associations(clusterName=plane)["associations"]) == 1
    eks.delete_pod_identity_association(**wanted)
    assert refusal(eks.describe_pod_identity_association, **wanted)[0] == "ResourceNotFoundException"


def test_add_ons_are_made_updated_and_deleted(eks: Any, plane: str) -> None:
    info = eks.describe_addon_versions(addonName="vpc-cni", kubernetesVersion="1.33")["addons"][0]["addonVersions"]
    newest = next(one["addonVersion"] for one in info if one["compatibilities"][0]["defaultVersion"])
    eks.create_addon(clusterName=plane, addonName="vpc-cni", resolveConflicts="OVERWRITE")
    assert addon_status(eks, plane, "vpc-cni") == "ACTIVE"
    assert eks.describe_addon(clusterName=plane, addonName="vpc-cni")["addon"]["addonVersion"] == newest
    older = info[-1]["addonVersion"]
    update = eks.update_addon(clusterName=plane, addonName="vpc-cni", addonVersion=older)["update"]
    done = eks.describe_update(name=plane, updateId=update["id"], addonName="vpc-cni")["update"]
    assert (done["status"], done["type"]) == ("Successful", "AddonUpdate")
    assert eks.describe_addon(clusterName=plane, addonName="vpc-cni")["addon"]["addonVersion"] == older
    for wrong in ({"addonName": "vpc-cnii"}, {"addonName": "kube-proxy", "addonVersion": "v9"}):
        assert refusal(eks.create_addon, clusterName=plane, **wrong)[0] == "InvalidParameterException"
    assert refusal(eks.create_addon, clusterName=plane, addonName="vpc-cni")[0] == "ResourceInUseException"
    eks.delete_addon(clusterName=plane, addonName="vpc-cni")
    assert eks.list_addons(clusterName=plane)["addons"] == []


def test_tags_of_every_kind_of_thing_come_and_go(eks: Any, plane: str) -> None:
    made = [
        active(eks, plane)["arn"],
        eks.create_addon(clusterName=plane, addonName="kube-proxy")["addon"]["addonArn"],
        eks.create_access_entry(clusterName=plane, principalArn=PLATFORM)["accessEntry"]["accessEntryArn"],
    ]
    for arn in made:
        eks.tag_resource(resourceArn=arn, tags={"team": "ml", "gone": "soon"})
        eks.untag_resource(resourceArn=arn, tagKeys=["gone"])
        found = eks.list_tags_for_resource(resourceArn=arn)["tags"]
        assert (found["team"], "gone" in found) == ("ml", False)


def test_hyperpod_joins_a_cluster_that_the_api_opens_and_brings_the_nodes_that_add_ons_wait_for(
    aws: LocalAws, eks: Any, network: Network, request_of: Any, plane: str
) -> None:
    sagemaker = client(aws, "sagemaker", "us-east-2")
    role = make_role(aws, "node", "sagemaker.amazonaws.com")
    group = {"InstanceGroupName": "spot", "InstanceType": "ml.g6e.12xlarge", "InstanceCount": 2, "ExecutionRole": role}
    request = {
        "ClusterName": "on-eks",
        "NodeProvisioningMode": "Continuous",
        "Orchestrator": {"Eks": {"ClusterArn": active(eks, plane)["arn"]}},
        "VpcConfig": {"SecurityGroupIds": [network.group], "Subnets": [network.subnet]},
        "TieredStorageConfig": {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 20},
        "InstanceGroups": [
            {
                **group,
                "CapacityRequirements": {"Spot": {}},
                "KubernetesConfig": {"Labels": {"lustrain.dev/role": "worker"}},
            }
        ],
    }
    eks.create_addon(clusterName=plane, addonName="coredns")
    assert addon_status(eks, plane, "coredns") == "DEGRADED"
    nowhere = {**request, "Orchestrator": {"Eks": {"ClusterArn": f"arn:aws:eks:us-east-2:{ACCOUNT}:cluster/nowhere"}}}
    assert "does not exist" in refusal(sagemaker.create_cluster, **nowhere)[1]
    closed = request_of(accessConfig={"authenticationMode": "CONFIG_MAP"})
    arn = eks.create_cluster(**closed)["cluster"]["arn"]
    active(eks, closed["name"])
    shut = {**request, "Orchestrator": {"Eks": {"ClusterArn": arn}}}
    assert "authentication mode" in refusal(sagemaker.create_cluster, **shut)[1]
    scaler = make_role(aws, "karpenter", "hyperpod.sagemaker.amazonaws.com")
    scaling = {"AutoScaling": {"Mode": "Enable", "AutoScalerType": "Karpenter"}, "ClusterRole": scaler}
    for wrong, said in (
        ({"ClusterRole": None}, "ClusterRole is required"),
        ({"ClusterRole": role}, "trust hyperpod.sagemaker.amazonaws.com"),
        ({"NodeProvisioningMode": None}, "NodeProvisioningMode Continuous only"),
        ({"NodeRecovery": "None"}, "NodeRecovery Automatic only"),
    ):
        asked = {name: value for name, value in {**request, **scaling, **wrong}.items() if value is not None}
        groups = [{name: value for name, value in group.items() if name != "CapacityRequirements"}]
        assert said in refusal(sagemaker.create_cluster, **{**asked, "InstanceGroups": groups})[1]
    request |= scaling
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
