"""EKS and IAM 1xx: Kubernetes versions, their add-ons, and roles as they are."""

from __future__ import annotations

from infra.config import ClusterSpec
from infra.finding import finding
from infra.plan.nodes.eks import addons
from infra.preflight.online.client import Aws, answered
from infra.preflight.rule import Context, Family, Problems

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
    answer = aws.eks.describe_cluster_versions(includeAll=True)
    versions = {item.get("clusterVersion"): item for item in answer["clusterVersions"]}
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
