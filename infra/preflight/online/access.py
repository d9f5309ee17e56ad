"""EKS and IAM 1xx: Kubernetes versions, their add-ons, and roles as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from infra.config import ClusterSpec
from infra.finding import finding
from infra.plan.documents import Document
from infra.plan.nodes.eks import addons
from infra.plan.roles import flow_log_role, node_role, services
from infra.preflight.online.client import Aws, answered
from infra.preflight.rule import Context, Family, Problems, listed

if TYPE_CHECKING:
    from mypy_boto3_iam.type_defs import ContextEntryTypeDef

RULES = Family()


@RULES.add(
    "EKS-101",
    "EKS has the Kubernetes version, in standard support, or with upgrade_policy EXTENDED in extended support.",
    "https://docs.aws.amazon.com/eks/latest/userguide/kubernetes-versions.html",
    permission="eks:DescribeClusterVersions",
)
def version(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    if spec.backend != "hyperpod-eks":
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
    version, describe = spec.eks.version, aws.eks.describe_addon_versions
    for addon in addons(spec) if spec.backend == "hyperpod-eks" else ():
        answer = answered("ResourceNotFound", describe, kubernetesVersion=version, addonName=addon.name)
        if answer is None or not answer["addons"]:
            message = f"EKS has no add-on {addon.name} for Kubernetes {version}"
            yield finding("eks.version", message, "choose an older version, or remove the key that brings the add-on")


@RULES.add(
    "IAM-101",
    "Administrators' roles of this account exist: EKS refuses an access entry for one that does not.",
    "https://docs.aws.amazon.com/eks/latest/userguide/creating-access-entries.html",
    permission="iam:GetRole",
)
def admin_roles(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for index, arn in enumerate(spec.access.admin_roles if spec.backend == "hyperpod-eks" else ()):
        if context.account and arn.split(":")[4] != context.account:
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
    "An existing role of the nodes is there, trusts the service that takes it on, and is in the instance profile.",
    "https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_create_for-service.html",
    permission="iam:GetRole and iam:GetInstanceProfile",
)
def existing_role(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    plan = node_role(spec, context.place)
    if plan.existing is None:
        return
    here, (service,) = "access.node_role", services([plan])
    answer = answered("NoSuchEntity", aws.iam.get_role, RoleName=plan.existing.rpartition("/")[2])
    if answer is None or answer["Role"]["Arn"] != plan.existing:
        yield finding(here, f"role {plan.existing} does not exist", "correct it, or make the role")
    elif f'"{service}"' not in json.dumps(answer["Role"].get("AssumeRolePolicyDocument")):
        yield finding(
            here, f"{service} may not take the role on", "add what `fab node-policy` prints to its trust policy"
        )
    if plan.existing_profile is not None:
        name = plan.existing_profile.rpartition("/")[2]
        profile = answered("NoSuchEntity", aws.iam.get_instance_profile, InstanceProfileName=name)
        held = [role["Arn"] for role in profile["InstanceProfile"]["Roles"]] if profile else []
        if plan.existing not in held:
            message = f"holds {listed(held) or 'no role'}, not {plan.existing}" if profile else "does not exist"
            yield finding("access.instance_profile", message, "name the profile that holds access.node_role")


@RULES.add(
    "IAM-104",
    "An existing role of the nodes allows what they do, as far as IAM's simulator can tell.",
    "https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulatePrincipalPolicy.html",
    level="warning",
    permission="iam:SimulatePrincipalPolicy",
)
def role_allows(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    plan = node_role(spec, context.place)
    if plan.existing is None or plan.policy is None:
        return
    simulate = partial(
        aws.iam.get_paginator("simulate_principal_policy").paginate,
        PolicySourceArn=plan.existing,
    )
    if missing := _denied(aws, plan.policy, simulate):
        message = f"does not allow all of the statements {listed(missing)}"
        yield finding("access.node_role", message, "add them; `fab node-policy` prints what the role needs")


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
