"""The EKS control plane under a HyperPod cluster: cluster, access, add-ons, pod identities, and the steps that need Helm.

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
OPERATOR_ROLE = "train-operator"
KARPENTER_ROLE = "karpenter"
GOVERNANCE = "amazon-sagemaker-hyperpod-taskgovernance"
"""https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-operate-console-ui-governance-setup-task-governance.html;
awsome-distributed-ai's Terraform module makes it as this does, without a role."""
OPERATOR = "amazon-sagemaker-hyperpod-training-operator"
"""https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator-install.html: needs cert-manager, the Pod Identity
agent and a role. cert-manager comes as EKS's add-on; the chart has one too, switched off."""
CHART_REPOSITORY = "https://github.com/aws/sagemaker-hyperpod-cli.git"
CHART_REVISION = "bb6a9f9534217c55a5806ae968e1dd8b285d4b8c"
"""Commit of the chart that AWS's own templates name (https://github.com/awslabs/awsome-distributed-ai/pull/1216); a chart
that moves makes a cluster that cannot be made again."""
CHART_FOLDER = "/tmp/sagemaker-hyperpod-cli"
WITHOUT_HYPERPOD = "pulumi up --exclude '**lustrain:infra:HyperPod**' --exclude-dependents"


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
    """A service account and the key of the role (`infra.plan.roles`) that its pods have."""

    namespace: str
    service_account: str
    role: str


@dataclass(frozen=True)
class EksPlan:
    name: str
    version: str
    upgrade_policy: Literal["STANDARD", "EXTENDED"]
    role: str
    public_access_cidrs: tuple[str, ...]
    """Whom the public endpoint answers; there is none without them."""
    log_types: tuple[str, ...]
    access: tuple[AccessEntry, ...]
    addons: tuple[Addon, ...]
    pod_identities: tuple[PodIdentity, ...]
    creator_is_admin: bool
    """Only where no one else is named: EKS refuses an access entry for a role that has one as the creator."""
    at_creation_only: tuple[str, ...]
    """Properties that a running cluster keeps, whatever the plan says."""
    authentication_mode: Literal["API"] = "API"

    @property
    def addons_before_nodes(self) -> tuple[Addon, ...]:
        return tuple(addon for addon in self.addons if addon.before_nodes)

    @property
    def addons_after_nodes(self) -> tuple[Addon, ...]:
        return tuple(addon for addon in self.addons if not addon.before_nodes)


def eks_plan(spec: ClusterSpec, place: Place) -> EksPlan:
    """Return the control plane that `spec` asks for."""
    return EksPlan(
        name=spec.name,
        version=spec.eks.version,
        upgrade_policy=spec.eks.upgrade_policy,
        role="eks-cluster",
        public_access_cidrs=tuple(dict.fromkeys(spec.eks.public_access_cidrs)),
        log_types=LOG_TYPES,
        access=access_entries(spec, place),
        addons=addons(spec),
        pod_identities=pod_identities(spec),
        creator_is_admin=not spec.access.admin_roles,
        at_creation_only=_at_creation_only(spec),
    )


def _at_creation_only(spec: ClusterSpec) -> tuple[str, ...]:
    """Return what never changes later: who may enter at first, as naming an administrator must not replace the cluster; and a
    version that the spec does not name, because our next default must not upgrade a control plane, which never goes back."""
    creator = "accessConfig.bootstrapClusterCreatorAdminPermissions"
    return (creator,) if spec.eks.version_named else (creator, "version")


def access_entries(spec: ClusterSpec, place: Place) -> tuple[AccessEntry, ...]:
    """One for each of `access.admin_roles`; EKS knows a role once, so that a repeated one counts once."""
    policy = place.arn("eks", ADMIN_POLICY, region="", account="aws")
    roles = dict.fromkeys(spec.access.admin_roles)
    return tuple(AccessEntry(f"admin-{number}", role, policy) for number, role in enumerate(roles))


def addons(spec: ClusterSpec) -> tuple[Addon, ...]:
    """In the order in which they are made. Until CoreDNS comes as an add-on, the copy that EKS brings with it answers."""
    first = (Addon("vpc-cni"), Addon("kube-proxy"), Addon("eks-pod-identity-agent"))
    network = tuple(addon.name for addon in first)
    addons = [*first, Addon("coredns", after=network, before_nodes=False)]
    if spec.storage.lustre:
        addons.append(Addon("aws-fsx-csi-driver", after=network, before_nodes=False))
    if spec.eks.task_governance:
        addons.append(Addon(GOVERNANCE, after=("coredns",), before_nodes=False))
    if spec.eks.training_operator:
        addons.append(Addon("cert-manager", after=("coredns",), before_nodes=False))
        addons.append(Addon(OPERATOR, after=("cert-manager",), before_nodes=False))
    return tuple(addons)


def pod_identities(spec: ClusterSpec) -> tuple[PodIdentity, ...]:
    """For the Lustre driver and the training operator, where the spec has them. They stand apart from their add-ons: inside
    one they have failed (https://github.com/awslabs/awsome-distributed-ai/issues/1075)."""
    driver = PodIdentity("kube-system", "fsx-csi-controller-sa", CSI_ROLE)
    operator = PodIdentity("aws-hyperpod", "hp-training-operator-controller-manager", OPERATOR_ROLE)
    return (*((driver,) if spec.storage.lustre else ()), *((operator,) if spec.eks.training_operator else ()))


def helm_commands(spec: ClusterSpec, place: Place) -> tuple[str, ...]:
    """Return what to type in infra/ the first time, line by line. HyperPod refuses an EKS cluster without its chart (health
    monitoring, device plugins, training operators), so the chart goes between the control plane and the rest.

    The chart has no Chart.lock, so that `helm dependency build` would do the same as `update`, which AWS's page has. `--wait`
    would wait for pods that have no node yet.
    https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-install-packages-using-helm-chart.html
    """
    if spec.backend != "hyperpod-eks":
        return ()
    chart = f"{CHART_FOLDER}/helm_chart/HyperPodHelmChart"
    return (
        WITHOUT_HYPERPOD,
        f"aws eks update-kubeconfig --name {spec.name} --region {place.region}{_as_admin(spec)}",
        "kubectl auth can-i create clusterroles",
        f"test -d {CHART_FOLDER} || git clone {CHART_REPOSITORY} {CHART_FOLDER}",
        f"git -C {CHART_FOLDER} fetch origin",
        f"git -C {CHART_FOLDER} checkout {CHART_REVISION}",
        f"helm dependency update {chart}",
        f"helm upgrade --install hyperpod-dependencies {chart} --namespace kube-system",
        "pulumi up",
    )


def first_up(spec: ClusterSpec) -> tuple[str, ...]:
    """Return what to know before there is a stack whose outputs say the rest."""
    if spec.backend != "hyperpod-eks":
        return ()
    why = "HyperPod needs its Helm chart in EKS first"
    return (f"The first `pulumi up` leaves HyperPod out ({why}; output firstSteps goes on): {WITHOUT_HYPERPOD}",)


def helm_place(spec: ClusterSpec) -> str:
    """From where, and as whom, those commands work."""
    ranges, roles = spec.eks.public_access_cidrs, spec.access.admin_roles
    where = f"from an address in {', '.join(ranges)}" if ranges else "from a machine inside the VPC"
    if role := _assumable_admin(spec):
        return f"{where}, with the credentials of `pulumi up`, which have to be allowed to assume {role}"
    whom = f"as {' or '.join(roles)}" if roles else "with the credentials of the first `pulumi up`"
    return f"{where}, {whom}"


def _as_admin(spec: ClusterSpec) -> str:
    """Kubernetes is reached as the administrator, while `pulumi up` keeps its own credentials."""
    role = _assumable_admin(spec)
    return f" --role-arn {role}" if role else ""


def _assumable_admin(spec: ClusterSpec) -> str | None:
    """Return the first administrator that is not a role of IAM Identity Center, which only its sign-in assumes
    (https://docs.aws.amazon.com/singlesignon/latest/userguide/referencingpermissionsets.html)."""
    return next((role for role in spec.access.admin_roles if "/AWSReservedSSO_" not in role), None)
