"""EKS and IAM 1xx: Kubernetes versions, their add-ons, and roles as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from infra.aws import Aws, answered
from infra.catalog.kubernetes import DATE, HYPERPOD, VERSIONS
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.documents import Document
from infra.plan.nodes.eks import EXISTING, MODES, ControlPlane, addons, join_problems, needed_addons
from infra.plan.place import COST_TAG, Arn
from infra.plan.roles import RolePlan, flow_log_role, key_of_existing, node_role, services
from infra.preflight.online.answers import missing
from infra.preflight.rule import Context, Family, listed

if TYPE_CHECKING:
    from mypy_boto3_iam.type_defs import ContextEntryTypeDef

RULES = Family()
TAG_SESSION = "sts:TagSession"


@RULES.add(
    "EKS-101",
    "EKS has the Kubernetes version, in standard support, or with upgrade_policy EXTENDED in extended support.",
    "https://docs.aws.amazon.com/eks/latest/userguide/kubernetes-versions.html",
    permission="eks:DescribeClusterVersions",
)
def version(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    if spec.backend != "hyperpod-eks" or spec.eks.existing:
        return
    pages = aws.eks.get_paginator("describe_cluster_versions").paginate(includeAll=True)
    versions = {item.get("clusterVersion"): item for page in pages for item in page["clusterVersions"]}
    there = versions.get(spec.eks.version)
    status = there.get("versionStatus") if there else None
    if there is None or status == "UNSUPPORTED":
        known = sorted(str(one) for one, about in versions.items() if about.get("versionStatus") == "STANDARD_SUPPORT")
        yield finding("eks.version", f"EKS has no {spec.eks.version}", f"choose one of {', '.join(known)}")
    elif status == "EXTENDED_SUPPORT":
        message = f"{spec.eks.version} is in extended support, at six times the price of a control plane"
        level = "warning" if spec.eks.upgrade_policy == "EXTENDED" else "error"
        yield finding("eks.version", message, "choose a newer version", level=level)


@RULES.add(
    "EKS-102",
    "EKS has the cluster's add-ons for its Kubernetes version: a new version may come before them.",
    "https://docs.aws.amazon.com/eks/latest/APIReference/API_DescribeAddonVersions.html",
    permission="eks:DescribeAddonVersions",
)
def addon_versions(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    if spec.backend != "hyperpod-eks":
        return
    plane = existing_plane(spec, aws)
    version, describe = plane.version if plane else spec.eks.version, aws.eks.describe_addon_versions
    for addon in addons(spec):
        answer = answered("ResourceNotFound", describe, kubernetesVersion=version, addonName=addon.name)
        if answer is None or not answer["addons"]:
            message = f"EKS has no add-on {addon.name} for Kubernetes {version}"
            path = EXISTING if plane else "eks.version"
            yield finding(path, message, "choose an older version, or remove the key that brings the add-on")


def existing_plane(spec: ClusterSpec, aws: Aws) -> ControlPlane | None:
    """Return the existing control plane that the spec names; None where it names none, or there is none."""
    if spec.backend != "hyperpod-eks" or spec.eks.existing is None:
        return None
    described = _described(spec, aws)
    if described is None:
        return None
    # A cluster that runs elsewhere (EKS Connector) has no network and no version, one that is being made no group yet.
    network = described.get("resourcesVpcConfig", {})
    return ControlPlane(
        arn=described["arn"],
        version=described.get("version", ""),
        status=described["status"],
        authentication_mode=described.get("accessConfig", {}).get("authenticationMode", "CONFIG_MAP"),
        vpc_id=network.get("vpcId", ""),
        security_group_id=network.get("clusterSecurityGroupId", ""),
    )


def _described(spec: ClusterSpec, aws: Aws) -> Any:
    def read() -> Any:
        answer = answered("ResourceNotFound", aws.eks.describe_cluster, name=spec.eks_name)
        return answer["cluster"] if answer else None

    return aws.once(("eks", spec.eks_name), read)


@RULES.add(
    "EKS-103",
    "An existing EKS cluster is there, active, entered by access entries, and in the nodes' VPC.",
    HYPERPOD,
    permission="eks:DescribeCluster",
)
def joinable(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    if spec.backend != "hyperpod-eks" or spec.eks.existing is None:
        return
    plane = existing_plane(spec, aws)
    if plane is None:
        yield missing(EXISTING, f"EKS cluster {spec.eks_name}")
    else:
        yield from join_problems(spec, plane)


@RULES.add(
    "EKS-104",
    "HyperPod's page names the Kubernetes version of an existing EKS cluster.",
    HYPERPOD,
    level="warning",
    permission="eks:DescribeCluster",
)
def version_of_existing(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    plane = existing_plane(spec, aws)
    taken = [item.name for item in VERSIONS.values() if item.hyperpod]
    if plane and plane.version and plane.version not in taken:
        message = f"{spec.eks_name} runs {plane.version}; HyperPod's page of {DATE[:4]} names {taken[0]} to {taken[-1]}"
        yield finding(EXISTING, message, "upgrade it first, or suppress this when HyperPod takes the version now")


@RULES.add(
    "EKS-105",
    "Nodes reach the Kubernetes API of an existing EKS cluster inside the VPC.",
    "https://docs.aws.amazon.com/eks/latest/userguide/cluster-endpoint.html",
    level="warning",
    permission="eks:DescribeCluster",
)
def private_endpoint(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    if existing_plane(spec, aws) is None:
        return
    network = _described(spec, aws).get("resourcesVpcConfig", {})
    if network.get("endpointPrivateAccess"):
        return
    ranges = listed(network.get("publicAccessCidrs", []))
    message = f"{spec.eks_name} has no private endpoint: nodes reach its API by the internet only, from {ranges}"
    fix = f"aws eks update-cluster-config --name {spec.eks_name} --resources-vpc-config endpointPrivateAccess=true"
    yield finding(EXISTING, message, fix, level="error" if spec.network.closed else "")


@RULES.add(
    "EKS-106",
    "Add-ons that the stack puts into an existing EKS cluster are not there yet, and those that it needs are there.",
    "https://docs.aws.amazon.com/eks/latest/APIReference/API_CreateAddon.html",
    permission="eks:ListAddons and eks:DescribeAddon",
)
def addons_of_existing(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    if existing_plane(spec, aws) is None:
        return
    pages = aws.eks.get_paginator("list_addons").paginate(clusterName=spec.eks_name)
    there = {name for page in pages for name in page["addons"]}
    brought = [addon.name for addon in addons(spec)]
    for name in brought:
        if name in there and not _is_ours(spec, aws, name):
            message = f"{spec.eks_name} has {name} already, and EKS takes an add-on once"
            yield finding("eks", message, "remove the name from eks.existing.addons, or the key that brings it")
    absent = [addon.name for addon in needed_addons(spec) if addon.name not in there and addon.name not in brought]
    if absent:
        message = f"{spec.eks_name} has no add-on {listed(absent)}"
        fix = "add them here, or suppress this where they are installed in another way, such as Helm"
        yield finding("eks.existing.addons", message, fix, level="warning")


def _is_ours(spec: ClusterSpec, aws: Aws, name: str) -> bool:
    addon = aws.eks.describe_addon(clusterName=spec.eks_name, addonName=name)["addon"]
    return addon.get("tags", {}).get(COST_TAG) == spec.name


@RULES.add(
    "EKS-107",
    "Administrators of an existing EKS cluster have no access entry there yet: EKS takes a role once.",
    "https://docs.aws.amazon.com/eks/latest/userguide/creating-access-entries.html",
    permission="eks:DescribeAccessEntry",
)
def entries_of_existing(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    plane = existing_plane(spec, aws)
    if plane is None or plane.authentication_mode not in MODES:
        return
    for index, role in enumerate(spec.access.admin_roles):
        entry = answered(
            "ResourceNotFound", aws.eks.describe_access_entry, clusterName=spec.eks_name, principalArn=role
        )
        if entry and entry["accessEntry"].get("tags", {}).get(COST_TAG) != spec.name:
            message = f"{role} has an access entry in {spec.eks_name} already"
            yield finding(f"access.admin_roles.{index}", message, "remove it: the owners of the cluster let it in")


@RULES.add(
    "IAM-101",
    "Administrators' roles of this account exist: EKS refuses an access entry for one that does not.",
    "https://docs.aws.amazon.com/eks/latest/userguide/creating-access-entries.html",
    permission="iam:GetRole",
)
def admin_roles(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for index, arn in enumerate(spec.access.admin_roles if spec.backend == "hyperpod-eks" else ()):
        if context.account and Arn.parse(arn).account != context.account:
            continue
        if answered("NoSuchEntity", aws.iam.get_role, RoleName=arn.rpartition("/")[2]) is None:
            yield finding(f"access.admin_roles.{index}", f"role {arn} does not exist", "correct it, or make the role")


@RULES.add(
    "IAM-102",
    "The permissions boundary exists: IAM makes no role with one that does not.",
    "https://docs.aws.amazon.com/IAM/latest/APIReference/API_CreateRole.html",
    permission="iam:GetPolicy",
)
def boundary(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    arn = spec.access.permissions_boundary
    if arn and answered("NoSuchEntity", aws.iam.get_policy, PolicyArn=arn) is None:
        yield finding("access.permissions_boundary", f"policy {arn} does not exist", "correct it, or make the policy")


@RULES.add(
    "IAM-103",
    "An existing role is there and trusts the service that takes it on; that of the nodes is in the instance profile.",
    "https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_create_for-service.html",
    permission="iam:GetRole and iam:GetInstanceProfile",
)
def existing_role(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for plan in context.plan.roles:
        if plan.existing is not None:
            yield from _trusts(plan, plan.existing, aws)
    plan = node_role(spec, context.place)
    if plan.existing is None:
        return
    if plan.existing_profile is not None:
        name = plan.existing_profile.rpartition("/")[2]
        profile = answered("NoSuchEntity", aws.iam.get_instance_profile, InstanceProfileName=name)
        held = [role["Arn"] for role in profile["InstanceProfile"]["Roles"]] if profile else []
        if plan.existing not in held:
            message = f"holds {listed(held) or 'no role'}, not {plan.existing}" if profile else "does not exist"
            yield finding("access.instance_profile", message, "name the profile that holds access.node_role")


def _trusts(plan: RolePlan, role: str, aws: Aws) -> Problems:
    here, (service,) = key_of_existing(plan), services([plan])
    answer = answered("NoSuchEntity", aws.iam.get_role, RoleName=role.rpartition("/")[2])
    if answer is None or answer["Role"]["Arn"] != role:
        yield finding(here, f"role {role} does not exist", "correct it, or make the role")
        return
    trusted = json.dumps(answer["Role"].get("AssumeRolePolicyDocument"))
    fix = f"add what `{_prints(plan)}` prints to its trust policy"
    # Pod Identity tags its sessions; without that right pods get no credentials
    # (https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html).
    tags = TAG_SESSION in plan.trust["Statement"][0]["Action"]
    if f'"{service}"' not in trusted:
        yield finding(here, f"{service} may not take the role on", fix)
    elif tags and f'"{TAG_SESSION}"' not in trusted and '"sts:*"' not in trusted:
        yield finding(here, f"{service} may not tag its sessions ({TAG_SESSION})", fix)


def _prints(plan: RolePlan) -> str:
    return "fab node-policy" if plan.key == "node" else f"fab node-policy --role {plan.key}"


@RULES.add(
    "IAM-104",
    "An existing role allows what is done with it, as far as IAM's simulator can tell.",
    "https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulatePrincipalPolicy.html",
    level="warning",
    permission="iam:SimulatePrincipalPolicy",
)
def role_allows(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for plan in context.plan.roles:
        if plan.existing is None or plan.policy is None:
            continue
        simulate = partial(
            aws.iam.get_paginator("simulate_principal_policy").paginate,
            PolicySourceArn=plan.existing,
        )
        if missing := _denied(aws, plan.policy, simulate):
            message = f"does not allow all of the statements {listed(missing)}"
            yield finding(key_of_existing(plan), message, f"add them; `{_prints(plan)}` prints what the role needs")


@RULES.add(
    "IAM-105",
    "The permissions boundary lets the roles that the stack makes do their work, as far as IAM's simulator can tell.",
    "https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulateCustomPolicy.html",
    level="warning",
    permission="iam:GetPolicy, iam:GetPolicyVersion and iam:SimulateCustomPolicy",
)
def boundary_allows(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    """Try each role's own policy within the boundary; AWS's policies that a role has as well are not tried."""
    arn = spec.access.permissions_boundary
    boundary = _policy_text(aws, arn) if arn else None
    if boundary is None:
        return  # IAM-102 reports a policy that does not exist.
    flow_logs = [flow_log_role(spec, context.place)] if spec.network.flow_logs else []
    for role in [*context.plan.roles, *flow_logs]:
        if role.existing is not None or role.policy is None:
            continue
        simulate = partial(
            aws.iam.get_paginator("simulate_custom_policy").paginate,
            PolicyInputList=[json.dumps(role.policy)],
            PermissionsBoundaryPolicyInputList=[boundary],
        )
        if missing := _denied(aws, role.policy, simulate):
            message = f"denies role {role.key} all or some of the statements {listed(missing)}"
            yield finding("access.permissions_boundary", message, "allow them in the boundary, or name another one")


def _policy_text(aws: Aws, arn: str) -> str | None:
    """Return the document of a managed policy; None where it does not exist."""
    answer = answered("NoSuchEntity", aws.iam.get_policy, PolicyArn=arn)
    if answer is None:
        return None
    version = aws.iam.get_policy_version(PolicyArn=arn, VersionId=answer["Policy"]["DefaultVersionId"])
    return json.dumps(version["PolicyVersion"]["Document"])


def _denied(aws: Aws, policy: Document, simulate: Callable[..., Iterable[Any]]) -> list[str]:
    """Return the Sids of the statements of which a right is denied, in the circumstances that their conditions name."""
    region: ContextEntryTypeDef = {
        "ContextKeyName": "aws:RequestedRegion",
        "ContextKeyValues": [aws.region],
        "ContextKeyType": "string",
    }
    denied: list[str] = []
    for statement in policy["Statement"]:
        pages = simulate(
            ActionNames=statement["Action"],
            ResourceArns=statement["Resource"],
            ContextEntries=[region, *_circumstances(statement.get("Condition", {}))],
        )
        if any(item["EvalDecision"] != "allowed" for page in pages for item in page["EvaluationResults"]):
            denied.append(statement["Sid"])
    return denied


def _circumstances(condition: Mapping[str, Mapping[str, Any]]) -> Iterator[ContextEntryTypeDef]:
    """Yield a value for each key of a condition, with which it holds."""
    for operator, keys in condition.items():
        for key, values in keys.items():
            texts = [values] if isinstance(values, str) else list(values)
            plain = [text for text in texts if "*" not in text] or texts
            kind: Literal["string", "stringList"] = "stringList" if operator.startswith("ForA") else "string"
            yield {"ContextKeyName": key, "ContextKeyValues": plain[:1], "ContextKeyType": kind}
