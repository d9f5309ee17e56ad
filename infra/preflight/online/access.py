"""EKS and IAM 1xx: Kubernetes versions and roles as they are."""

from __future__ import annotations

from collections.abc import Iterable

from botocore.exceptions import ClientError

from infra.config import ClusterSpec
from infra.preflight.finding import Finding, Level
from infra.preflight.online.asking import Aws, OnlineRule, code_of
from infra.preflight.rule import Context


class Version(OnlineRule):
    code = "EKS-101"
    checks = "EKS has the Kubernetes version, in standard support, or with upgrade_policy EXTENDED in extended support."
    source = "https://docs.aws.amazon.com/eks/latest/userguide/kubernetes-versions.html"
    permission = "eks:DescribeClusterVersions"

    def look(self, spec: ClusterSpec, context: Context, aws: Aws) -> Iterable[Finding]:
        if spec.backend != "hyperpod-eks":
            return
        answer = aws.eks.describe_cluster_versions(includeAll=True)
        found = {one.get("clusterVersion"): one for one in answer["clusterVersions"]}
        there = found.get(spec.eks.version)
        status = there.get("versionStatus") if there else None
        if there is None or status == "UNSUPPORTED":
            known = sorted(str(one) for one, about in found.items() if about.get("versionStatus") == "STANDARD_SUPPORT")
            yield self.finding("eks.version", f"EKS has no {spec.eks.version}", f"choose one of {', '.join(known)}")
        elif status == "EXTENDED_SUPPORT":
            message = f"{spec.eks.version} is in extended support, at six times the price of a control plane"
            level: Level = "warning" if spec.eks.upgrade_policy == "EXTENDED" else "error"
            yield self.finding("eks.version", message, "choose a newer version", level=level)


class AdminRoles(OnlineRule):
    code = "IAM-101"
    checks = "Administrators' roles of this account are there: EKS refuses an access entry for one that is not."
    source = "https://docs.aws.amazon.com/eks/latest/userguide/creating-access-entries.html"
    permission = "iam:GetRole"

    def look(self, spec: ClusterSpec, context: Context, aws: Aws) -> Iterable[Finding]:
        for index, arn in enumerate(spec.access.admin_roles if spec.backend == "hyperpod-eks" else ()):
            if context.account and arn.split(":")[4] != context.account:
                continue
            try:
                aws.iam.get_role(RoleName=arn.rpartition("/")[2])
            except ClientError as error:
                if code_of(error) != "NoSuchEntity":
                    raise
                yield self.finding(
                    f"access.admin_roles.{index}", f"there is no role {arn}", "correct it, or make the role"
                )


RULES = (Version(), AdminRoles())
