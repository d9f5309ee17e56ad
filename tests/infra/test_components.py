"""The program's resources beyond what tests/test_golden.py pins: what is kept, what waits for what, what other wishes make."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from typing import Any

import grpc
import pytest
from pulumi.runtime import MockCallArgs, MockResourceArgs

from infra.components.stack import current_place
from infra.config import ClusterSpec
from infra.local.mocks import Recorder
from infra.plan.nodes.bundle import bundle
from infra.plan.nodes.hyperpod import create_only
from infra.plan.storage.home import OPTIONS
from lustrain.problem import UserError
from tests.infra.edits import GONE, place, spec_of
from tests.infra.mistakes import (
    BLOCK,
    EKS,
    EXISTING,
    JOINED,
    KEY,
    LUSTRE,
    NODE_ROLE,
    PROFILE,
    RESERVED,
    SLURM,
    SPOT,
    TWO_TYPES,
    US_EAST_1_DNS,
)
from tests.infra.registered import Registered, built, properties_of, waits_for

TEMPLATE, GROUP = "aws:ec2/launchTemplate:LaunchTemplate", "aws:autoscaling/group:Group"
CLUSTER, PLANE = "aws:cloudcontrol/resource:Resource", "aws:eks/cluster:Cluster"
SYSTEM, LINK = (
    "aws:fsx/lustreFileSystem:LustreFileSystem",
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation",
)
EFS = "aws:efs/fileSystem:FileSystem"
HOME, BUCKET = "aws:fsx/openZfsFileSystem:OpenZfsFileSystem", "aws:s3/bucket:Bucket"
OBJECT, ADDON = "aws:s3/bucketObjectv2:BucketObjectv2", "aws:eks/addon:Addon"
RESERVATION, HOOK = "aws:ec2/capacityReservation:CapacityReservation", "aws:autoscaling/lifecycleHook:LifecycleHook"
IMAGE = "ami-0fedcba9876543210"
HYPERPOD_ARN = "arn:aws:sagemaker:us-east-2:123456789012:cluster/abcdefghijkl"
LONGEST = "a" * 40
JOINED_GROUP = "sg-0fedcba9876543210"
PLATFORM: dict[str, Any] = {
    "arn": "arn:aws:eks:us-east-2:123456789012:cluster/platform",
    "version": "1.34",
    "status": "ACTIVE",
    "accessConfigs": [{"authenticationMode": "API_AND_CONFIG_MAP"}],
    "vpcConfig": {"vpcId": EXISTING["vpc_id"], "clusterSecurityGroupId": JOINED_GROUP},
}
"""An existing EKS cluster, as the provider tells it."""
AUTOMATIC = len("-1234567")
"""What Pulumi adds to a name that the program does not set."""
LIMITS = {
    "aws:iam/role:Role": 64,
    "aws:iam/rolePolicy:RolePolicy": 128,
    "aws:iam/instanceProfile:InstanceProfile": 128,
    "aws:cloudwatch/eventRule:EventRule": 64,
    "aws:sqs/queue:Queue": 80,
    "aws:ec2/launchTemplate:LaunchTemplate": 128,
    "aws:autoscaling/group:Group": 255,
    "aws:eks/cluster:Cluster": 100,
    "aws:budgets/budget:Budget": 100,
}
"""https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html, the API references of the others."""

pytestmark = pytest.mark.slow


class Aws(Recorder):
    """Answers with what tells one wish from another: root devices, address lists, ARNs, and a version that runs."""

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        made, state = super().new_resource(args)
        if args.typ == PLANE:
            state["version"] = "1.33"
        return (HYPERPOD_ARN if args.typ == CLUSTER else made), state

    def call(self, args: MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]] | None]:
        if args.token == "aws:ec2/getAmi:getAmi":
            assert args.args["filters"] == [{"name": "image-id", "values": [IMAGE]}]
            return {"rootDeviceName": "/dev/xvda"}, []
        if args.token == "aws:eks/getCluster:getCluster":
            return {**PLATFORM, "name": args.args["name"]}, []
        if args.token == "aws:ec2/getPrefixList:getPrefixList":
            return {"id": f"list of {args.args['name']}"}, []
        return super().call(args)


def made_by(stack: str, **edits: Any) -> Registered:
    return built(stack, edits, Aws(place(stack).region))[0]


@pytest.fixture(scope="module")
def spot() -> Registered:
    return made_by(SPOT)


@pytest.fixture(scope="module")
def slurm() -> Registered:
    return made_by(SLURM)


@pytest.fixture(scope="module")
def eks() -> tuple[Registered, dict[str, Any]]:
    edits = {"eks.training_operator": True, "storage.lustre": {"throughput_gb_s": 1.0}, "eks.version": GONE}
    return built(EKS, edits, Aws("us-east-2"))


def test_what_holds_data_or_was_paid_for_is_protected_and_stays(spot: Registered) -> None:
    kept = [*spot.requests(BUCKET).values(), spot.only(SYSTEM), spot.only(HOME), made_by(RESERVED).only(RESERVATION)]
    assert len(kept) == 6
    assert {(one.protect, one.retainOnDelete, *one.ignoreChanges) for one in kept} == {(True, True)}
    images = [spot.only(f"aws:ecr/{kind}") for kind in ("repository:Repository", "lifecyclePolicy:LifecyclePolicy")]
    left = [*spot.requests(OBJECT).values(), *images]
    assert {(one.protect, one.retainOnDelete) for one in left} == {(False, True)}


def test_efs_home_and_its_backups_outlive_the_stack(slurm: Registered) -> None:
    system, backup = slurm.only(EFS), slurm.only("aws:efs/backupPolicy:BackupPolicy")
    assert (system.protect, system.retainOnDelete, backup.protect, backup.retainOnDelete) == (True, True, False, True)
    assert slurm.only("aws:efs/mountTarget:MountTarget").deleteBeforeReplace, "a zone has one at most"
    storage = json.loads(slurm.of(CLUSTER)["llm-p5-cluster"]["desiredState"])["InstanceGroups"][0][
        "InstanceStorageConfigs"
    ]
    assert not [one for one in storage if "FsxOpenZfsConfig" in one], "HyperPod mounts no EFS"


@pytest.mark.parametrize(("kind", "resource"), [("efs", EFS), ("openzfs", HOME)])
def test_homes_are_encrypted_with_the_named_key(kind: str, resource: str) -> None:
    (sent,) = made_by(SPOT, **{"storage.home": {"type": kind, "kms_key": KEY}}).of(resource).values()
    assert sent["kmsKeyId"] == KEY


def test_existing_home_is_mounted_and_nothing_is_made() -> None:
    dns = "fs-0123456789abcdef0.efs.us-east-1.amazonaws.com"
    home = {"id": "fs-0123456789abcdef0", "dns_name": dns, "security_group_id": "sg-0123456789abcdef0"}
    made, outputs = built(SPOT, {"storage.home": {"type": "efs", "existing": home}}, Aws("us-east-1"))
    assert not [kind for kind in made.kinds if kind.startswith("aws:efs/") or kind == HOME]
    script = base64.b64decode(made.of(TEMPLATE)["spot-g6e-train-nvidia-x86-64"]["userData"]).decode()
    assert f"\nhome_source={dns}:/\n" in script
    options = OPTIONS["efs"].split(",")
    assert outputs["cluster"]["home"] == {"id": home["id"], "dns_name": dns, "path": "/home", "options": options}


def test_destroy_leaves_nodes_time_to_save_and_waits_for_last(spot: Registered) -> None:
    group, hook = spot.only(GROUP), spot.only(HOOK)
    assert hook.retainOnDelete, "or it goes before the group that depends on nothing of it"
    assert (group.customTimeouts.delete, group.retainOnDelete, list(group.ignoreChanges)) == ("1h", False, [])


def test_mixed_group_has_a_policy_and_a_template_without_spot(spot: Registered) -> None:
    mixed = made_by(SPOT, **TWO_TYPES, **{"groups.0.capacity.on_demand_base": 2})
    (group,), (template,) = mixed.of(GROUP).values(), mixed.of(TEMPLATE).values()
    policy = group["mixedInstancesPolicy"]
    assert [override["instanceType"] for override in policy["launchTemplate"]["overrides"]] == [
        "g6.12xlarge",
        "g5.12xlarge",
    ]
    assert policy["instancesDistribution"] == {
        "onDemandAllocationStrategy": "prioritized",
        "onDemandBaseCapacity": 2,
        "onDemandPercentageAboveBaseCapacity": 0,
        "spotAllocationStrategy": "capacity-optimized-prioritized",
    }
    assert ("launchTemplate" in group, "instanceMarketOptions" in template) == (False, False)
    (plain,), (asks,) = spot.of(GROUP).values(), spot.of(TEMPLATE).values()
    assert ("mixedInstancesPolicy" in plain, asks["instanceMarketOptions"]["marketType"]) == (False, "spot")


def test_boot_script_arrives_as_base64_and_names_what_was_made(spot: Registered) -> None:
    script = base64.b64decode(spot.of(TEMPLATE)["spot-g6e-train-nvidia-x86-64"]["userData"]).decode()
    assert script.startswith("#!/bin/bash")
    named = ["fs-mock.fsx.us-east-1.amazonaws.com", "mockmock", "/spot-g6e-interruptions"]
    named.append(f"s3://sagemaker-spot-g6e-123456789012-us-east-1/lifecycle/{bundle(spec_of(SPOT, {})).sha}")
    assert [one for one in named if one not in script] == []


def test_nodes_wait_for_what_they_need_in_their_first_minute(spot: Registered, slurm: Registered) -> None:
    for made, kind, name in ((spot, GROUP, "spot-g6e"), (slurm, CLUSTER, "llm-p5")):
        needed = {
            f"{name}-{part}" for part in ("s3", "node", "system", "private-default", "cluster-ingress-all-cluster")
        }
        bundle_of_nodes = {item for item in made.requests(OBJECT) if f"{name}-monitor-" not in item}
        assert needed | bundle_of_nodes <= waits_for(made.only(kind))


def test_looked_up_image_stays_and_a_named_one_follows_the_name(spot: Registered) -> None:
    found = {}
    for made in (spot, made_by(SPOT, **{"groups.0.image_id": IMAGE, "groups.0.volume_kms_key": KEY})):
        request, (template,) = made.only(TEMPLATE), made.of(TEMPLATE).values()
        (root,) = template["blockDeviceMappings"]
        found[template["imageId"]] = (list(request.ignoreChanges), root["deviceName"], root["ebs"].get("kmsKeyId"))
    assert found == {"ami-0123456789abcdef0": (["imageId"], "/dev/sda1", None), IMAGE: ([], "/dev/xvda", KEY)}


@pytest.mark.parametrize("image_id", [GONE, IMAGE])
def test_image_that_is_not_looked_up_stops_before_declarations(
    image_id: Any,
) -> None:
    class RefusalError(grpc.RpcError):
        """As the engine hands on what a provider says."""

        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNKNOWN

        def details(self) -> str:
            return "invoking it: 1 error occurred:\n\t* reading it: not found\n\n"

    class Refusing(Recorder):
        def call(self, args: MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]] | None]:
            raise RefusalError

    service = Refusing("us-east-1")
    with pytest.raises(UserError) as caught:
        built(SPOT, {} if image_id is GONE else {"groups.0.image_id": image_id}, service)
    (line,) = caught.value.problems
    assert line.startswith(f"image_id of group train = '{'/aws/service/' if image_id is GONE else IMAGE}")
    assert "1 error occurred: * reading it: not found; fix: " in line
    assert line.isprintable()
    assert service.resources == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("invoking it:\n\t* no valid credential sources\n", "invoking it: * no valid credential sources"),
        ("got <!DOCTYPE html>\n<html>Log in to go on</html>", "an HTML page, so that something else than AWS answers"),
    ],
)
def test_aws_that_cannot_say_where_we_are_stops_with_one_line(
    monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    def refuse() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr("pulumi_aws.get_partition", refuse)
    with pytest.raises(UserError) as caught:
        current_place()
    (line,) = caught.value.problems
    assert line.startswith(f"AWS cannot be reached: {said}; fix: ")


def test_the_bundle_lies_under_its_own_name_beside_another(slurm: Registered) -> None:
    ours, objects = bundle(spec_of(SLURM, {})), slurm.of(OBJECT)
    objects = {name: one for name, one in objects.items() if not name.startswith("llm-p5-monitor-")}
    assert set(objects) == {f"llm-p5-{ours.sha}-{file.path}" for file in ours.files}
    assert {one["key"]: one["sourceHash"] for one in objects.values()} == {
        ours.key(one): one.sha256 for one in ours.files
    }


def test_hyperpod_is_replaced_by_create_only_keys_its_arn_has_id(slurm: Registered) -> None:
    request, (sent,) = slurm.only(CLUSTER), slurm.of(CLUSTER).values()
    assert (request.protect, request.deleteBeforeReplace) == (True, True)
    state = json.loads(sent["desiredState"])
    assert json.loads(request.replacement_trigger.string_value) == create_only(state)
    cluster = built(SLURM, {}, Aws("us-west-2"))[1]["cluster"]
    assert cluster["reach"]["ssm_target"].startswith("sagemaker-cluster:abcdefghijkl_")


def test_training_operator_waits_for_cert_manager_and_hyperpod(
    eks: tuple[Registered, dict[str, Any]],
) -> None:
    made = eks[0]
    assert not made.only(CLUSTER).protect
    before = {"vpc-cni", "kube-proxy", "eks-pod-identity-agent", "fsx-csi", "train-operator"}
    assert {f"vision-g6e-{name}" for name in before} <= waits_for(made.only(CLUSTER))
    after = {
        name: waits_for(made.requests(ADDON)[f"vision-g6e-nodes-{name}"]) for name in ("coredns", "aws-fsx-csi-driver")
    }
    operator = waits_for(made.requests(ADDON)["vision-g6e-nodes-amazon-sagemaker-hyperpod-training-operator"])
    assert all("vision-g6e-cluster" in waited for waited in (*after.values(), operator))
    assert "vision-g6e-nodes-cert-manager" in operator
    identity = made.of("aws:eks/podIdentityAssociation:PodIdentityAssociation")["vision-g6e-fsx-csi"]
    assert identity["serviceAccount"] == "fsx-csi-controller-sa"
    assert identity["roleArn"].endswith("fsx-csi-mock")
    policy = made.only("aws:eks/accessPolicyAssociation:AccessPolicyAssociation")
    assert "vision-g6e-admin-0" in waits_for(policy)


def test_default_version_leaves_a_running_control_plane_alone(
    eks: tuple[Registered, dict[str, Any]],
) -> None:
    made, told = eks
    creator = "accessConfig.bootstrapClusterCreatorAdminPermissions"
    assert set(made.only(PLANE).ignoreChanges) == {"version", creator}
    assert (told["spec"]["eks"]["version"], told["spec"]["eks"]["upgrade_policy"]) == ("1.33", "STANDARD")
    assert list(made_by(EKS).only(PLANE).ignoreChanges) == [creator]


def test_a_control_plane_without_named_ranges_is_private() -> None:
    (plane,) = made_by(EKS, **{"eks.public_access_cidrs": []}).of(PLANE).values()
    assert (plane["vpcConfig"]["endpointPublicAccess"], "publicAccessCidrs" in plane["vpcConfig"]) == (False, False)


def test_existing_eks_cluster_is_joined_and_only_added_to() -> None:
    named = ["eks-pod-identity-agent", "aws-fsx-csi-driver"]
    edits = {**JOINED, "eks.existing.addons": named, "access.admin_roles": [NODE_ROLE]}
    made, told = built(EKS, {**edits, "storage.lustre": {"throughput_gb_s": 1.0}}, Aws("us-east-2"))
    assert not made.of(PLANE)
    assert {name.partition("-")[2] for name in made.of("aws:iam/role:Role")} == {"g6e-node", "g6e-fsx-csi"}
    (cluster,) = made.requests(CLUSTER).values()
    state = json.loads(properties_of(cluster)["desiredState"])
    assert state["Orchestrator"] == {"Eks": {"ClusterArn": PLATFORM["arn"]}}
    assert state["VpcConfig"]["SecurityGroupIds"] == ["vision-g6e-cluster-id", JOINED_GROUP]
    addons = made.of(ADDON)
    assert {one["addonName"] for one in addons.values()} == set(named)
    assert {(one["clusterName"], one["resolveConflictsOnCreate"], one["preserve"]) for one in addons.values()} == {
        ("platform", "NONE", True)
    }
    assert {"vision-g6e-eks-pod-identity-agent", "vision-g6e-admin-0-policy"} <= waits_for(cluster)
    assert (told["cluster"]["kubernetes"]["context"], told["spec"]["eks"]["version"]) == (PLATFORM["arn"], "1.34")
    assert "helm" not in told["firstSteps"]
    assert "EKS cluster platform is not the stack's" in told["teardown"]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("accessConfigs", [{"authenticationMode": "CONFIG_MAP"}], "platform authenticates by CONFIG_MAP"),
        ("vpcConfig", None, "platform is in no VPC"),
    ],
)
def test_eks_cluster_that_cannot_be_joined_stops_at_first(
    monkeypatch: pytest.MonkeyPatch, key: str, value: Any, told: str
) -> None:
    monkeypatch.setitem(PLATFORM, key, value)
    with pytest.raises(UserError, match=rf"eks\.existing\.name: {told}"):
        built(EKS, JOINED, Aws("us-east-2"))


def test_existing_roles_of_eks_are_used_and_none_is_made() -> None:
    roles = {
        f"eks.{key}": f"{NODE_ROLE}-{key}"
        for key in ("cluster_role", "storage_role", "operator_role", "karpenter_role", "logs_role")
    }
    edits = {"eks.training_operator": True, "eks.karpenter": True, "storage.lustre": {"throughput_gb_s": 1.0}}
    made = made_by(EKS, **edits, **roles)
    assert list(made.of("aws:iam/role:Role")) == ["vision-g6e-node"]
    assert properties_of(made.only(PLANE))["roleArn"] == roles["eks.cluster_role"]
    identities = {one["roleArn"] for one in made.of("aws:eks/podIdentityAssociation:PodIdentityAssociation").values()}
    assert identities == {roles[f"eks.{key}_role"] for key in ("storage", "operator", "logs")}
    assert json.loads(properties_of(made.only(CLUSTER))["desiredState"])["ClusterRole"] == roles["eks.karpenter_role"]


def test_what_leads_out_waits_for_the_internet_gateway(spot: Registered) -> None:
    routes = spot.requests("aws:ec2/route:Route")
    out = [spot.only("aws:ec2/eip:Eip"), spot.only("aws:ec2/natGateway:NatGateway"), *routes.values()]
    assert len(out) == 4
    assert all("spot-g6e-internet" in waits_for(one) for one in out)


def test_closed_network_reaches_s3_by_list_and_logs_by_role() -> None:
    made = made_by(BLOCK)
    rules = made.of("aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule").values()
    assert [one["prefixListId"] for one in rules if "prefixListId" in one] == ["list of com.amazonaws.us-east-2.s3"]
    log = made.only("aws:ec2/flowLog:FlowLog")
    assert {name for kind, name in made.registered if kind == "aws:iam/rolePolicy:RolePolicy"} & waits_for(log)


def test_existing_network_is_passed_on_and_only_groups_are_made() -> None:
    control = ["subnet-0123456789abcdef1", "subnet-0123456789abcdef2"]
    edits = {"network.existing": {**EXISTING, "control_subnet_ids": control}, "network.second_zone_id": GONE}
    made = made_by(EKS, **edits)
    assert {kind for kind in made.kinds if kind.startswith("aws:ec2/")} == {"aws:ec2/securityGroup:SecurityGroup"}
    assert {one["vpcId"] for one in made.of("aws:ec2/securityGroup:SecurityGroup").values()} == {EXISTING["vpc_id"]}
    (plane,), (cluster,) = made.of(PLANE).values(), made.of(CLUSTER).values()
    assert plane["vpcConfig"]["subnetIds"] == control
    assert json.loads(cluster["desiredState"])["VpcConfig"]["Subnets"] == [EXISTING["compute_subnet_id"]]


def test_existing_file_system_and_repository_are_passed_on() -> None:
    url = "123456789012.dkr.ecr.us-east-1.amazonaws.com/mine"
    there = {**LUSTRE, "dns_name": US_EAST_1_DNS}
    edits = {"network.existing": EXISTING, "storage.lustre": {"existing": there}, "repository.existing": url}
    made, told = built(SPOT, edits)
    assert not [kind for kind in made.kinds if kind == SYSTEM or kind.startswith("aws:ecr/")]
    found = told["cluster"]
    assert (found["lustre"]["id"], found["lustre"]["dns_name"], found["lustre"]["mount_name"]) == (
        *(LUSTRE["id"], US_EAST_1_DNS, "fsx"),
    )
    assert found["image_repository"] == url


def test_prometheus_and_the_dashboard_are_made_where_specified(spot: Registered) -> None:
    board, metrics = "aws:cloudwatch/dashboard:Dashboard", "aws:amp/workspace:Workspace"
    other = made_by(SPOT, observability={"dashboard": False, "prometheus": "amp"})
    assert (spot.kinds & {board, metrics}, other.kinds & {board, metrics}) == ({board}, {metrics})


def test_the_file_system_of_the_spec_is_what_fsx_is_asked_for() -> None:
    exact = {"capacity_gib": 4800, "per_tib_mb_s": 500, "efa": False}
    wish = {**exact, "kms_key": KEY, "backup_days": 7, "compression": "NONE", "metadata_iops": 6000}
    (sent,) = made_by(SPOT, **{"storage.lustre": wish}).of(SYSTEM).values()
    assert (sent["storageCapacity"], sent["perUnitStorageThroughput"], sent["efaEnabled"]) == (4800, 500, False)
    assert (sent["kmsKeyId"], sent["automaticBackupRetentionDays"], sent["dataCompressionType"]) == (KEY, 7, "NONE")
    assert sent["metadataConfiguration"] == {"mode": "USER_PROVISIONED", "iops": 6000}
    assert sent["copyTagsToBackups"] is True


def test_links_are_made_one_after_other_and_go_with_the_stack() -> None:
    made = made_by(BLOCK, **{"storage.lustre.associations.0.chunk_mib": 128})
    links = made.requests(LINK)
    assert len(links) == 2
    (system,) = made.requests(SYSTEM)
    for before, name in pairwise([system, *links]):
        assert before in waits_for(links[name])
    for link in links.values():
        assert (link.protect, link.retainOnDelete, link.deleteBeforeReplace) == (False, False, True)
        assert (link.customTimeouts.create, link.customTimeouts.delete) == ("60m", "60m")
    assert [one["importedFileChunkSize"] for one in made.of(LINK).values()] == [128, 256]


def test_settings_of_one_bucket_are_made_one_after_the_other(spot: Registered) -> None:
    ours = {name: request for (kind, name), request in spot.registered.items() if kind.startswith("aws:s3/bucket")}
    for before, after in pairwise(["", "-ownership", "-private", "-encryption", "-versions", "-policy", "-rules"]):
        assert f"spot-g6e-lifecycle{before}" in waits_for(ours[f"spot-g6e-lifecycle{after}"])


def test_users_key_encrypts_and_existing_bucket_is_not_touched() -> None:
    made, told = built("rehearsal", {"buckets.kms_key": KEY, "buckets.data": "mine"})
    encryption = "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration"
    for one in made.of(encryption).values():
        (rule,) = one["rules"]
        assert rule["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "aws:kms", "kmsMasterKeyId": KEY}
        assert rule["bucketKeyEnabled"] is True
    assert told["cluster"]["buckets"]["data"] == "mine"
    assert len(made.requests(BUCKET)) == 2
    assert not [name for _, name in made.registered if name.startswith("rehearsal-data")]


def test_the_longest_names_of_the_form_are_longest_here() -> None:
    (field,) = [one for one in ClusterSpec.model_fields["name"].metadata if hasattr(one, "max_length")]
    assert field.max_length == len(LONGEST)


@pytest.mark.parametrize("stack", [SPOT, SLURM, EKS])
def test_no_name_of_the_longest_cluster_name_is_too_long_for_aws(stack: str) -> None:
    # S3-001 refuses buckets named after so long a name; the user then names them.
    buckets = {f"buckets.{key}": f"sagemaker-{key}" for key in ("data", "checkpoints", "lifecycle")}
    made = made_by(stack, **{"name": LONGEST, "groups.0.name": LONGEST, "network.flow_logs": True, **buckets})
    lengths = {
        (kind, name): len(inputs["name"]) if "name" in inputs else len(name) + AUTOMATIC
        for kind in LIMITS
        for name, inputs in made.of(kind).items()
    }
    assert "aws:iam/role:Role" in {kind for kind, _ in lengths}
    assert {one: length for one, length in lengths.items() if length > LIMITS[one[0]]} == {}


@pytest.mark.parametrize("stack", [BLOCK, SLURM, EKS])
def test_every_role_that_the_program_declares_has_the_boundary(stack: str) -> None:
    boundary = "arn:aws:iam::123456789012:policy/boundary"
    edits = {"access.permissions_boundary": boundary, "network.flow_logs": True}
    made = built(stack, edits)[0].of("aws:iam/role:Role")
    assert len(made) >= 2
    assert {role.get("permissionsBoundary") for role in made.values()} == {boundary}


def test_existing_role_is_used_as_it_is_and_none_is_made() -> None:
    edits = {"access.node_role": NODE_ROLE, "access.instance_profile": PROFILE, "observability": GONE}
    made, outputs = built(SPOT, edits, Aws("us-east-1"))
    assert not [kind for kind in made.kinds if kind.startswith("aws:iam/")]
    assert [one["iamInstanceProfile"] for one in made.of(TEMPLATE).values()] == [{"arn": PROFILE}]
    assert outputs["cluster"]["role_arn"] == NODE_ROLE
    made = made_by(SLURM, **{"access.node_role": NODE_ROLE, "observability": GONE})
    assert not [kind for kind in made.kinds if kind.startswith("aws:iam/")]
    state = json.loads(made.of(CLUSTER)["llm-p5-cluster"]["desiredState"])
    assert {group["ExecutionRole"] for group in state["InstanceGroups"]} == {NODE_ROLE}


def test_further_security_groups_are_on_every_interface() -> None:
    further = "sg-0123456789abcdef0"
    edits = {
        "network.existing": EXISTING,
        "network.security_group_ids": [further],
        "network.allow_from": ["pl-01234567"],
    }
    made = made_by(SPOT, **edits)
    (template,) = made.of(TEMPLATE).values()
    groups = [one["securityGroups"] for one in template["networkInterfaces"]]
    assert len(groups) > 1
    assert all(len(one) == 2 and one[1] == further for one in groups)
    ssh = [
        rule
        for rule in made.of("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule").values()
        if "prefixListId" in rule
    ]
    assert [(rule["prefixListId"], rule["fromPort"], rule["toPort"]) for rule in ssh] == [("pl-01234567", 22, 22)]
    state = json.loads(made_by(SLURM, **edits).of(CLUSTER)["llm-p5-cluster"]["desiredState"])
    assert state["VpcConfig"]["SecurityGroupIds"][1:] == [further]
