"""The EKS control plane under a HyperPod cluster: cluster, who may enter, add-ons, pod identities; what needs Helm, in words.

HyperPod asks for authentication by the API, the VPC CNI, and its own chart before it joins
(https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-prerequisites.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.config import ClusterSpec
from infra.plan.place import Place

LOG_TYPES = ("api", "audit", "authenticator")
"""Who did what; `scheduler` and `controllerManager` are many lines that no one reads until EKS itself misbehaves."""
ADMIN_POLICY = "cluster-access-policy/AmazonEKSClusterAdminPolicy"
"""https://docs.aws.amazon.com/eks/latest/userguide/access-policy-permissions.html"""
CSI_ROLE = "fsx-csi"
CSI_NAMESPACE = "kube-system"
CSI_SERVICE_ACCOUNT = "fsx-csi-controller-sa"
CHART_REPOSITORY = "https://github.com/aws/sagemaker-hyperpod-cli.git"
CHART_REVISION = "bb6a9f9534217c55a5806ae968e1dd8b285d4b8c"
"""Commit of the chart that AWS's own templates name (https://github.com/awslabs/awsome-distributed-ai/pull/1216); a chart
that moves makes a cluster that cannot be made again."""


@dataclass(frozen=True)
class Addon:
    """`after`: add-ons that must stand first; `before_nodes`: whether it gets healthy without a node.

    EKS keeps an add-on whose pods have no node at DEGRADED, and the provider waits 20 minutes for it and fails
    (https://github.com/pulumi/pulumi-eks/issues/1819): those come after HyperPod.
    """

    name: str
    after: tuple[str, ...] = ()
    before_nodes: bool = True
    on_create: Literal["OVERWRITE", "NONE"] = "OVERWRITE"
    on_update: Literal["OVERWRITE", "PRESERVE", "NONE"] = "PRESERVE"


@dataclass(frozen=True)
class AccessEntry:
    """A role of the account and the access policy that it has in the whole cluster."""

    key: str
    principal_arn: str
    policy_arn: str


@dataclass(frozen=True)
class PodIdentity:
    """A service account and the key of the role (`infra.plan.iam`) that its pods have."""

    namespace: str
    service_account: str
    role: str


@dataclass(frozen=True)
class EksPlan:
    name: str
    version: str
    upgrade_policy: Literal["STANDARD", "EXTENDED"]
    role: str
    public_endpoint: bool
    log_types: tuple[str, ...]
    access: tuple[AccessEntry, ...]
    addons: tuple[Addon, ...]
    pod_identities: tuple[PodIdentity, ...]
    creator_is_admin: bool
    """Only where no one else is named: EKS refuses an access entry for a role that has one as the creator."""
    authentication_mode: Literal["API"] = "API"

    @property
    def addons_before_nodes(self) -> tuple[Addon, ...]:
        return tuple(addon for addon in self.addons if addon.before_nodes)

    @property
    def addons_after_nodes(self) -> tuple[Addon, ...]:
        return tuple(addon for addon in self.addons if not addon.before_nodes)


def eks_plan(spec: ClusterSpec, place: Place) -> EksPlan:
    """The control plane that `spec` asks for; the Lustre driver and its identity only where there is a Lustre system."""
    lustre = spec.storage.lustre is not None
    identity = PodIdentity(CSI_NAMESPACE, CSI_SERVICE_ACCOUNT, CSI_ROLE)
    return EksPlan(
        name=spec.name,
        version=spec.eks.version,
        upgrade_policy=spec.eks.upgrade_policy,
        role="eks-cluster",
        public_endpoint=spec.eks.public_endpoint,
        log_types=LOG_TYPES,
        access=access_entries(spec, place),
        addons=addons(spec),
        pod_identities=(identity,) if lustre else (),
        creator_is_admin=not spec.access.admin_roles,
    )


def access_entries(spec: ClusterSpec, place: Place) -> tuple[AccessEntry, ...]:
    """One for each of `access.admin_roles`; EKS knows a role once, so that a repeated one counts once."""
    policy = place.arn("eks", ADMIN_POLICY, region="", account="aws")
    roles = dict.fromkeys(spec.access.admin_roles)
    return tuple(AccessEntry(f"admin-{number}", role, policy) for number, role in enumerate(roles))


def addons(spec: ClusterSpec) -> tuple[Addon, ...]:
    """In the order in which they are made. Until CoreDNS comes as an add-on, the copy that EKS brings with it answers."""
    first = (Addon("vpc-cni"), Addon("kube-proxy"), Addon("eks-pod-identity-agent"))
    network = tuple(addon.name for addon in first)
    found = (*first, Addon("coredns", after=network, before_nodes=False))
    if spec.storage.lustre is None:
        return found
    return (*found, Addon("aws-fsx-csi-driver", after=network, before_nodes=False))


def helm_commands(spec: ClusterSpec, place: Place) -> tuple[str, ...]:
    """What to type the first time, line by line. HyperPod refuses an EKS cluster without its chart (health monitoring, device
    plugins, training operators), so the chart goes between the control plane and the rest. Without `eks.public_endpoint`
    type it where the VPC is reached.

    https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-install-packages-using-helm-chart.html
    """
    if spec.backend != "hyperpod-eks":
        return ()
    chart = "sagemaker-hyperpod-cli/helm_chart/HyperPodHelmChart"
    return (
        "pulumi up --exclude '**lustrain:infra:HyperPod**' --exclude-dependents",
        f"aws eks update-kubeconfig --name {spec.name} --region {place.region}",
        f"git clone {CHART_REPOSITORY}",
        f"git -C sagemaker-hyperpod-cli checkout {CHART_REVISION}",
        f"helm dependencies update {chart}",
        f"helm upgrade --install hyperpod-dependencies {chart} --namespace kube-system",
        "pulumi up",
    )
