"""Roles: held against AWS's service authorization reference, in three partitions, for all examples and generated specs."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from infra.config import ClusterSpec
from infra.plan.deployer_policy import MANAGED_POLICY_CHARACTERS, deployer_policy, managed_policies
from infra.plan.network.endpoints import interface_services, s3_policy
from infra.plan.place import Place
from infra.plan.roles import RolePlan, flow_log_role, roles
from infra.preflight.online.run import ONLINE
from tests.infra.specs import ACCOUNT, AWS, CHINA, EXISTING, PLACES, spec_of, specs
from tests.infra.stacks import EXAMPLES, example, region_of

Json = dict[str, Any]

NOT_SCOPED = frozenset({"cloudwatch:PutMetricData"})
"""Actions on `*` that the reference would scope, each with its reason: a data set is what other accounts' metrics go to;
metrics of one's own are held by their namespace, which the statement's condition does."""


@cache
def reference() -> Mapping[str, Any]:
    """Services, actions, resource types and condition keys as AWS publishes them; cfn-lint ships a copy."""
    found = importlib.util.find_spec("cfnlint")
    assert found is not None
    assert found.origin is not None
    text = (Path(found.origin).parent / "data/AdditionalSpecs/Policies.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


@cache
def resource_types(action: str) -> tuple[str, ...] | None:
    """Resource types of an action (the union for a pattern), empty where it has none, None where it does not exist."""
    service, _, name = action.partition(":")
    actions = reference().get(service, {"Actions": {}})["Actions"]
    found = [actions[known] for known in fnmatch.filter(actions, name.lower())]
    return tuple(sorted({kind for one in found for kind in one.get("Resources", [])})) if found else None


@cache
def fits(action: str, arn: str) -> bool:
    """Whether the ARN can be that of a resource of this action."""
    kinds = reference()[action.partition(":")[0]]["Resources"]
    formats = [text for kind in resource_types(action) or () for text in kinds[kind.lower()]["ARNFormats"]]
    return any(re.fullmatch(re.sub(r"\$\{\w+\}", "[^:]*", text), arn) for text in formats)


def every_role(spec: ClusterSpec, place: Place) -> tuple[RolePlan, ...]:
    return (*roles(spec, place), flow_log_role(spec, place))


def grants(spec: ClusterSpec, place: Place) -> list[Json]:
    """All documents that give rights to someone, those of the deployer too."""
    own = [role.policy for role in every_role(spec, place) if role.policy]
    return [*own, deployer_policy(spec, place)]


def documents(spec: ClusterSpec, place: Place) -> list[Json]:
    return [*grants(spec, place), *(role.trust for role in every_role(spec, place)), s3_policy(spec, place)]


def statements(spec: ClusterSpec, place: Place) -> Iterator[Json]:
    for one in grants(spec, place):
        yield from one["Statement"]


def node(spec: ClusterSpec, place: Place = AWS) -> dict[str, Json]:
    """The statements of the node role by Sid."""
    (role,) = [role for role in roles(spec, place) if role.key == "node"]
    assert role.policy is not None
    return {statement["Sid"]: statement for statement in role.policy["Statement"]}


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts(one)


def hold(spec: ClusterSpec, place: Place) -> None:
    """What is true of every document, whatever the spec."""
    for one in documents(spec, place):
        assert one["Version"] == "2012-10-17"
        sids = [statement["Sid"] for statement in one["Statement"]]
        assert len(set(sids)) == len(sids)
        assert all(re.fullmatch(r"[A-Za-z0-9]+", sid) for sid in sids)
        assert all(statement["Effect"] == "Allow" and statement["Action"] for statement in one["Statement"])
        arns = [text for text in texts(one) if text.startswith("arn:")]
        assert {arn.split(":")[1] for arn in arns} <= {place.partition}
    for statement in statements(spec, place):
        for action in statement["Action"]:
            kinds = resource_types(action)
            assert kinds is not None, f"{action} is no action of AWS"
            assert "*" not in action or re.fullmatch(r"[a-z0-9]+:Describe\*|s3:(Get|List)\*", action), (
                "patterns are reads"
            )
            if statement["Resource"] == ["*"] and "*" not in action:
                assert not kinds or action in NOT_SCOPED, f"{action} can be held to {kinds}"
            elif statement["Resource"] != ["*"]:
                assert any(fits(action, arn) for arn in statement["Resource"]), f"{action} has no such resource"
        if statement["Resource"] != ["*"]:
            for arn in statement["Resource"]:
                assert any(fits(action, arn) for action in statement["Action"]), f"no action for {arn}"


@pytest.mark.parametrize("stack", EXAMPLES)
def test_documents_of_every_example_name_aws_actions_narrowly(stack: str) -> None:
    hold(example(stack), Place(region_of(stack), ACCOUNT))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.partition)
@settings(max_examples=25, deadline=None)
@given(spec=specs())
def test_documents_hold_in_every_partition_for_every_spec(place: Place, spec: ClusterSpec) -> None:
    hold(spec, place)


@pytest.mark.parametrize("stack", EXAMPLES)
def test_conditions_on_tags_stand_where_the_resource_has_tags(stack: str) -> None:
    for statement in statements(example(stack), AWS):
        keys = [
            key for operator in statement.get("Condition", {}).values() for key in operator if "ResourceTag/" in key
        ]
        for key in keys:
            template = f"{key.partition('/')[0]}/${{TagKey}}"
            for action in statement["Action"]:
                kinds = reference()[action.partition(":")[0]]["Resources"]
                asked = [kind for kind in resource_types(action) or () if fits_kind(kinds[kind.lower()], statement)]
                assert any(template in kinds[kind.lower()].get("ConditionKeys", []) for kind in asked), (action, key)


def fits_kind(kind: Json, statement: Json) -> bool:
    patterns = [re.sub(r"\$\{\w+\}", "[^:]*", text) for text in kind["ARNFormats"]]
    return any(re.fullmatch(pattern, arn) for pattern in patterns for arn in statement["Resource"])


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.partition)
def test_services_have_one_name_in_every_partition(
    place: Place,
) -> None:
    def trusted(**sections: Any) -> dict[str, str]:
        found = roles(spec_of("hyperpod-eks", **sections), place)
        return {role.key: role.trust["Statement"][0]["Principal"]["Service"] for role in found}

    wanted = {"node": "sagemaker.amazonaws.com", "eks-cluster": "eks.amazonaws.com", "logs": "pods.eks.amazonaws.com"}
    assert trusted() == wanted
    assert trusted(storage={"lustre": {"throughput_gb_s": 1.2}}) == {**wanted, "fsx-csi": "pods.eks.amazonaws.com"}


BOUNDARY = "arn:aws:iam::123456789012:policy/team/boundary"
GIVES_RIGHTS = {"CreateRole", "PutRolePolicy", "AttachRolePolicy", "PutRolePermissionsBoundary"}


@pytest.mark.parametrize("backend", ["ec2", "hyperpod-slurm", "hyperpod-eks"])
def test_with_a_boundary_every_role_has_it(backend: str) -> None:
    access = {"permissions_boundary": BOUNDARY, "role_path": "/team/ml/"}
    spec = spec_of(backend, access=access, network={"flow_logs": True}, eks=OPTIONS if "eks" in backend else {})
    made = every_role(spec, AWS)
    assert {(role.boundary, role.path) for role in made} == {(BOUNDARY, "/team/ml/lustrain/demo/")}
    giving = [
        one
        for one in deployer_policy(spec, AWS)["Statement"]
        if {action.removeprefix("iam:") for action in one["Action"]} & GIVES_RIGHTS and one["Sid"] != "LustreS3Role"
    ]
    assert giving
    for one in giving:
        assert one["Condition"]["StringEquals"] == {"iam:PermissionsBoundary": BOUNDARY}, one["Sid"]
        assert one["Resource"] == ["arn:aws:iam::123456789012:role/team/ml/lustrain/demo/*"]
    granted = {action for one in deployer_policy(spec, AWS)["Statement"] for action in one["Action"]}
    assert "iam:DeleteRolePermissionsBoundary" not in granted
    assert "iam:PutRolePermissionsBoundary" not in {
        action for one in deployer_policy(spec_of(backend), AWS)["Statement"] for action in one["Action"]
    }


NODE_ROLE, PROFILE = "arn:aws:iam::123456789012:role/nodes", "arn:aws:iam::123456789012:instance-profile/nodes"


def test_with_an_existing_role_deployer_passes_it_and_makes_none() -> None:
    spec = spec_of(access={"node_role": NODE_ROLE, "instance_profile": PROFILE})
    hold(spec, AWS)
    policy = {one["Sid"]: one for one in deployer_policy(spec, AWS)["Statement"]}
    assert not {"Roles", "RolesMake", "RolesAttach", "RolesPass", "Profiles"} & set(policy)
    assert policy["NodeRolePass"]["Resource"] == [NODE_ROLE]
    assert policy["NodeRolePass"]["Condition"] == {"StringEquals": {"iam:PassedToService": ["ec2.amazonaws.com"]}}
    eks = deployer_policy(spec_of("hyperpod-eks", access={"node_role": NODE_ROLE}), AWS)["Statement"]
    (attach,) = [one for one in eks if one["Sid"] == "RolesAttach"]
    assert attach["Condition"]["ArnEquals"]["iam:PolicyARN"] == ["arn:aws:iam::aws:policy/AmazonEKSClusterPolicy"]


JOINED = {"existing": {"name": "platform"}, "training_operator": True}


def test_existing_eks_cluster_is_not_the_deployers_to_change() -> None:
    spec = spec_of("hyperpod-eks", network={"existing": EXISTING}, eks={**JOINED, "operator_role": NODE_ROLE})
    hold(spec, AWS)
    policy = {one["Sid"]: one for one in deployer_policy(spec, AWS)["Statement"]}
    granted = {action for one in policy.values() for action in one["Action"] if action.startswith("eks:")}
    assert not granted & {f"eks:{verb}Cluster" for verb in ("Create", "Delete", "Tag")}
    assert not [action for action in granted if action.startswith("eks:UpdateCluster")]
    assert policy["EksAdd"]["Resource"] == ["arn:aws:eks:us-east-2:123456789012:cluster/platform"]
    assert policy["EksOwn"]["Condition"] == {"StringEquals": {"aws:ResourceTag/lustrain:cluster": "demo"}}
    assert not [arn for arn in policy["EksTag"]["Resource"] if ":cluster/" in arn]
    assert policy["TrainOperatorRolePass"]["Resource"] == [NODE_ROLE]
    assert "eks.amazonaws.com" not in policy["ServiceLinkedRoles"]["Condition"]["StringEquals"]["iam:AWSServiceName"]


def test_roles_are_for_pods_of_the_existing_eks_cluster() -> None:
    spec = spec_of("hyperpod-eks", network={"existing": EXISTING}, eks=JOINED)
    there, made = "arn:aws:eks:us-east-2:123456789012:cluster/platform", {one.key: one for one in roles(spec, AWS)}
    assert made["train-operator"].trust["Statement"][0]["Condition"]["ArnEquals"] == {"aws:SourceArn": there}
    policy = {one["Sid"]: one for one in (made["node"].policy or {})["Statement"]}
    assert policy["PodIdentity"]["Resource"] == [there]


def test_deployer_may_ask_what_preflight_asks_of_eks() -> None:
    abroad = NODE_ROLE.replace(AWS.account, "210987654321")
    access = {"admin_roles": [NODE_ROLE, abroad]}
    spec = spec_of("hyperpod-eks", network={"existing": EXISTING}, eks=JOINED, access=access)
    policy = {one["Sid"]: one for one in deployer_policy(spec, AWS)["Statement"]}
    assert policy["AdminRolesLook"]["Resource"] == [NODE_ROLE]
    asked = " ".join(rule.permission for code, rule in ONLINE.items() if code.startswith("EKS-"))
    assert set(re.findall(r"eks:\w+", asked)) <= {action for one in policy.values() for action in one["Action"]}


OPTIONS = {"karpenter": True, "task_governance": True, "training_operator": True}


def test_karpenter_and_operator_act_on_this_clusters_nodes_only() -> None:
    found = {role.key: role for role in roles(spec_of("hyperpod-eks", eks=OPTIONS), AWS)}
    own = {"StringEquals": {"aws:ResourceTag/lustrain:cluster": "demo"}}
    wanted = {
        "karpenter": (["sagemaker:BatchAddClusterNodes", "sagemaker:BatchDeleteClusterNodes"], "hyperpod.sagemaker"),
        "train-operator": (["sagemaker:DescribeClusterNode"], "pods.eks"),
    }
    assert set(found) == {"node", "eks-cluster", "logs", *wanted}
    # The longest name of a cluster, with the dash and seven letters that Pulumi adds: IAM takes 64.
    assert max(len(f"{'c' * 40}-{key}-0123456") for key in found) <= 64
    for key, (actions, service) in wanted.items():
        assert found[key].trust["Statement"][0]["Principal"] == {"Service": f"{service}.amazonaws.com"}
        assert found[key].policy is not None
        statement = found[key].policy["Statement"][0]
        assert (statement["Action"], statement["Condition"]) == (actions, own)


def test_managed_policies_are_such_as_aws_keeps() -> None:
    text = importlib.import_module("moto.iam.aws_managed_policies").aws_managed_policies_data
    known = {f"arn:aws:iam::aws:policy/{name}" for name, one in json.loads(text).items() if one["Path"] == "/"}
    for backend in ("ec2", "hyperpod-slurm", "hyperpod-eks"):
        managed = {arn for role in roles(spec_of(backend), AWS) for arn in role.managed}
        assert managed
        assert managed <= known


def test_buckets_that_the_spec_names_are_read_and_not_written() -> None:
    found = node(spec_of(network={"s3_buckets": ["open-corpus"]}))
    touching = [sid for sid, one in found.items() if any("open-corpus" in arn for arn in one["Resource"])]
    assert touching == ["NamedList", "NamedRead"]
    assert (found["NamedList"]["Action"], found["NamedRead"]["Action"]) == (["s3:ListBucket"], ["s3:GetObject"])


def test_mounted_prefixes_are_read_and_written_only_if_asked() -> None:
    mounts = [
        {"bucket": "data", "path": "/s3/data"},
        {
            "bucket": "theirs",
            "prefix": "corpus",
            "path": "/s3/corpus",
            "region": "eu-west-1",
            "kms_key": "alias/theirs",
        },
        {"bucket": "theirs", "prefix": "out/", "path": "/s3/out", "read_only": False},
    ]
    bare, found = node(spec_of()), node(spec_of(storage={"s3_mounts": mounts}))
    added = {sid: one for sid, one in found.items() if sid not in bare}
    theirs = "arn:aws:s3:::theirs"
    assert set(added) == {"MountsList0", "MountsRead", "MountsWrite", "MountKey1"}
    assert (added["MountsList0"]["Resource"], added["MountsList0"]["Condition"]) == (
        [theirs],
        {"StringLike": {"s3:prefix": ["corpus/", "corpus/*", "out/", "out/*"]}},
    )
    assert added["MountsRead"]["Resource"] == [f"{theirs}/corpus/*", f"{theirs}/out/*"]
    assert added["MountsWrite"]["Resource"] == [f"{theirs}/out/*"]
    assert added["MountsWrite"]["Action"] == ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:PutObject"]
    assert added["MountKey1"]["Action"] == ["kms:Decrypt"]
    assert added["MountKey1"]["Condition"]["StringEquals"] == {"kms:ViaService": "s3.eu-west-1.amazonaws.com"}


def test_runs_elsewhere_are_written_there_too() -> None:
    found = node(spec_of(runs_uri="s3://team-runs/demo"))
    assert "arn:aws:s3:::team-runs/demo/*" in found["RunsReadWrite"]["Resource"]
    assert found["RunsList1"]["Resource"] == ["arn:aws:s3:::team-runs"]
    assert found["RunsList1"]["Condition"] == {"StringLike": {"s3:prefix": ["demo/", "demo/*"]}}
    assert "RunsList1" not in node(spec_of(runs_uri="/fsx/runs"))


@pytest.mark.parametrize(
    ("key", "resource", "alias"),
    [
        ("1234abcd-12ab", "arn:aws-cn:kms:cn-north-1:123456789012:key/1234abcd-12ab", None),
        ("arn:aws-cn:kms:cn-north-1:1:key/x", "arn:aws-cn:kms:cn-north-1:1:key/x", None),
        ("alias/data", "arn:aws-cn:kms:cn-north-1:123456789012:key/*", "alias/data"),
        ("arn:aws-cn:kms:cn-north-1:1:alias/data", "arn:aws-cn:kms:cn-north-1:123456789012:key/*", "alias/data"),
    ],
)
def test_a_key_is_used_through_s3_only(key: str, resource: str, alias: str | None) -> None:
    found = node(spec_of(buckets={"kms_key": key}), CHINA)["BucketKey"]
    assert found["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]
    assert found["Resource"] == [resource]
    assert found["Condition"]["StringEquals"] == {"kms:ViaService": "s3.cn-north-1.amazonaws.com.cn"}
    assert found["Condition"].get("ForAnyValue:StringEquals") == ({"kms:ResourceAliases": alias} if alias else None)


VOLUME_KEY = "arn:aws:kms:us-east-2:123456789012:key/01234567-89ab-cdef-0123-456789abcdef"
KEYED = {"name": "train", "instance_type": "p5.48xlarge", "count": 2, "volume_kms_key": VOLUME_KEY}


def test_hyperpod_encrypts_volumes_by_node_role_and_deployer() -> None:
    found = node(spec_of("hyperpod-slurm", groups=[KEYED]))["VolumeKeys"]
    assert (found["Action"], found["Resource"]) == (["kms:CreateGrant", "kms:DescribeKey"], [VOLUME_KEY])
    assert "VolumeKeys" not in node(spec_of(groups=[KEYED])), "EC2 launches under roles of AWS's own"
    for backend in ("hyperpod-slurm", "ec2"):
        policy = deployer_policy(spec_of(backend, groups=[KEYED]), AWS)["Statement"]
        (deployer,) = [one for one in policy if one["Sid"] == "VolumeKeys"]
        assert set(deployer["Action"]) >= {"kms:CreateGrant", "kms:DescribeKey"}
        assert deployer["Resource"] == [VOLUME_KEY]


def test_only_the_secret_of_slurms_database_is_read() -> None:
    secret = "arn:aws:secretsmanager:us-east-2:123456789012:secret:slurm-AbCdEf"
    named: dict[str, Any] = {"slurm": {"accounting": {"endpoint": "db.example.com", "secret_arn": secret}}}
    found = node(spec_of("hyperpod-slurm", **named))["AccountingSecret"]
    assert (found["Action"], found["Resource"]) == (["secretsmanager:GetSecretValue"], [secret])
    assert "secretsmanager" in interface_services(spec_of("hyperpod-slurm", network={"closed": True}, **named))


def test_nodes_pull_the_image_that_is_named() -> None:
    url = "210987654321.dkr.ecr.eu-west-1.amazonaws.com/team/trainer:v3"
    other = node(spec_of(repository={"existing": url}))["EcrPull"]["Resource"]
    assert other == ["arn:aws:ecr:eu-west-1:210987654321:repository/team/trainer"]
    assert "EcrPull" not in node(spec_of(repository={"existing": "docker.io/team/trainer"}))


def test_pods_of_other_clusters_cannot_take_the_drivers_role() -> None:
    spec = spec_of("hyperpod-eks", storage={"lustre": {"throughput_gb_s": 1.2}})
    (role,) = [role for role in roles(spec, AWS) if role.key == "fsx-csi"]
    (statement,) = role.trust["Statement"]
    assert statement["Action"] == ["sts:AssumeRole", "sts:TagSession"]
    cluster = "arn:aws:eks:us-east-2:123456789012:cluster/demo"
    assert statement["Condition"]["ArnEquals"] == {"aws:SourceArn": cluster}


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_deployers_policy_fits_into_managed_policies(stack: str) -> None:
    policy = deployer_policy(example(stack), Place(region_of(stack), ACCOUNT))
    parts = managed_policies(policy)
    assert [one for part in parts for one in part["Statement"]] == policy["Statement"]
    assert all(len(json.dumps(part, separators=(",", ":"))) <= MANAGED_POLICY_CHARACTERS for part in parts)
    assert len(parts) <= 10


@settings(max_examples=25, deadline=None)
@given(specs())
def test_deployer_passes_this_clusters_roles_to_their_services(spec: ClusterSpec) -> None:
    policy = {one["Sid"]: one for one in deployer_policy(spec, AWS)["Statement"]}
    assert policy["RolesPass"]["Resource"] == ["arn:aws:iam::123456789012:role/lustrain/demo/*"]
    trusted = {role.trust["Statement"][0]["Principal"]["Service"] for role in roles(spec, AWS)}
    passed = set(policy["RolesPass"]["Condition"]["StringEquals"]["iam:PassedToService"])
    assert trusted <= passed <= trusted | {"vpc-flow-logs.amazonaws.com"}
    assert all(role.path == "/lustrain/demo/" for role in every_role(spec, AWS))
    attached = {arn for role in roles(spec, AWS) for arn in role.managed}
    assert set(policy["RolesAttach"]["Condition"]["ArnEquals"]["iam:PolicyARN"]) == attached


RESERVING = {"mode": "reservation", "create": True}
TRAIN = {"name": "train", "instance_type": "p5.48xlarge", "count": 2}
OURS = {"data": "a", "checkpoints": "b", "lifecycle": "sagemaker-c"}


@pytest.mark.parametrize(
    ("backend", "sections", "sids", "granted"),
    [
        ("ec2", {}, {"NetworkMake", "NetworkDrop", "Images", "Buckets"}, True),
        ("ec2", {}, {"CapacityReserve", "ImagesShare", "LustreKey", "BucketKey"}, False),
        ("ec2", {"network": {"existing": EXISTING}}, {"NetworkMake", "NetworkDrop"}, False),
        ("ec2", {"repository": {"existing": "1.dkr.ecr.us-east-2.amazonaws.com/a"}}, {"Images"}, False),
        ("ec2", {"buckets": OURS}, {"Buckets"}, False),
        ("hyperpod-slurm", {"groups": [{**TRAIN, "image_id": "ami-0123456789abcdef0"}]}, {"ImagesShare"}, True),
        ("ec2", {"groups": [{**TRAIN, "capacity": RESERVING}]}, {"CapacityReserve"}, True),
    ],
)
def test_deployer_gets_no_right_on_what_exists_or_is_not_bought(
    backend: str, sections: dict[str, Any], sids: set[str], granted: bool
) -> None:
    found = {one["Sid"] for one in deployer_policy(spec_of(backend, **sections), AWS)["Statement"]}
    assert sids & found == (sids if granted else set())


@pytest.mark.parametrize(("backend", "launches"), [("ec2", True), ("hyperpod-slurm", False)])
def test_deployer_tags_machines_where_it_launches_them(backend: str, launches: bool) -> None:
    policy = {one["Sid"]: one for one in deployer_policy(spec_of(backend), AWS)["Statement"]}
    for sid in ("Tag", "Untag"):
        assert any(arn.endswith(":instance/*") for arn in policy[sid]["Resource"]) == launches


def test_deployer_may_look_into_a_linked_bucket() -> None:
    link = {"path": "/corpus", "bucket": "their-data", "prefix": "v1/"}
    spec = spec_of("ec2", storage={"lustre": {"throughput_gb_s": 1.0, "associations": [link]}})
    policy = {item["Sid"]: item for item in deployer_policy(spec, AWS)["Statement"]}
    looked, written = policy["LinkedBuckets"], policy["LinkedObjects"]
    assert looked["Resource"] == ["arn:aws:s3:::their-data", "arn:aws:s3:::their-data/v1/*"]
    assert (written["Action"], written["Resource"]) == (["s3:PutObject"], ["arn:aws:s3:::their-data/v1/*"])


def test_deployer_may_use_the_key_of_a_linked_bucket() -> None:
    key = "arn:aws:kms:us-east-2:210987654321:key/01234567-89ab-cdef-0123-456789abcdef"
    link = {"path": "/corpus", "bucket": "their-data", "kms_key": key}
    spec = spec_of("ec2", storage={"lustre": {"throughput_gb_s": 1.0, "associations": [link]}})
    policy = {item["Sid"]: item for item in deployer_policy(spec, AWS)["Statement"]}
    assert policy["LinkedKey0"]["Resource"] == [key]


def test_the_deployer_may_use_the_keys_that_are_named() -> None:
    lustre = {"throughput_gb_s": 1.2, "kms_key": "1234abcd"}
    home = {"type": "efs", "kms_key": "5678abcd"}
    spec = spec_of(buckets={"kms_key": "alias/data"}, storage={"lustre": lustre, "home": home})
    found = {one["Sid"]: one for one in deployer_policy(spec, AWS)["Statement"]}
    assert found["LustreKey"]["Resource"] == ["arn:aws:kms:us-east-2:123456789012:key/1234abcd"]
    assert found["HomeKey"]["Resource"] == ["arn:aws:kms:us-east-2:123456789012:key/5678abcd"]
    assert "kms:GenerateDataKeyWithoutPlaintext" in found["HomeKey"]["Action"], (
        "EFS never sees a data key in plain text"
    )
    assert found["BucketKey"]["Condition"] == {"ForAnyValue:StringEquals": {"kms:ResourceAliases": "alias/data"}}


def test_deployer_tags_no_file_system_of_others_as_its_own() -> None:
    spec = spec_of("ec2", storage={"home": {"type": "efs"}})
    tagging = [
        one for one in deployer_policy(spec, AWS)["Statement"] if "elasticfilesystem:TagResource" in one["Action"]
    ]
    assert [one["Condition"]["StringEquals"] for one in tagging] == [
        {"elasticfilesystem:CreateAction": "CreateFileSystem"},
        {"aws:ResourceTag/lustrain:cluster": spec.name},
    ]


def test_deployer_launches_into_a_reservation_of_another_account() -> None:
    group = {**TRAIN, "capacity": {"mode": "reservation", "reservation": "cr-0123456789abcdef0"}}
    policy = {item["Sid"]: item for item in deployer_policy(spec_of("ec2", groups=[group]), AWS)["Statement"]}
    shared = "arn:aws:ec2:us-east-2:*:capacity-reservation/cr-0123456789abcdef0"
    assert shared in policy["Launch"]["Resource"]
