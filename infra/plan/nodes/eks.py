"""The EKS control plane under a HyperPod cluster: cluster, access, add-ons, pod identities, and the steps that need Helm.

HyperPod asks for authentication by the API, the VPC CNI, and its own chart before it joins
(https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-prerequisites.html).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from infra.config import ClusterSpec
from infra.finding import finding
from infra.plan.nodes import logs
from infra.plan.nodes.logs import carries_logs
from infra.plan.place import Place
from lustrain.problem import Problem

LOG_TYPES = ("api", "audit", "authenticator")
"""Who did what; `scheduler` and `controllerManager` are many lines that no one reads until EKS itself misbehaves."""
ADMIN_POLICY = "cluster-access-policy/AmazonEKSClusterAdminPolicy"
"""https://docs.aws.amazon.com/eks/latest/userguide/access-policy-permissions.html"""
CLUSTER_ROLE = "eks-cluster"
CSI_ROLE = "fsx-csi"
OPERATOR_ROLE = "train-operator"
METRICS_ROLE = "hyperpod-metrics"
KARPENTER_ROLE = "karpenter"
LOGS_ROLE = "logs"
GOVERNANCE = "amazon-sagemaker-hyperpod-taskgovernance"
"""https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-operate-console-ui-governance-setup-task-governance.html;
awsome-distributed-ai's Terraform module makes it as this does, without a role."""
OPERATOR = "amazon-sagemaker-hyperpod-training-operator"
"""https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator-install.html: needs cert-manager, the Pod Identity
agent and a role. cert-manager comes as EKS's add-on; the chart has one too, switched off."""
METRICS = "amazon-sagemaker-hyperpod-observability"
"""Exporters of nodes and GPUs, and a collector that writes to a workspace of Prometheus
(https://docs.aws.amazon.com/sagemaker/latest/dg/hyperpod-observability-addon-setup.html)."""
CSI_DRIVER = "aws-fsx-csi-driver"
CERT_MANAGER = "cert-manager"
MODES = ("API", "API_AND_CONFIG_MAP")
"""Authentication modes with which HyperPod joins a cluster (source of this module)."""
EXISTING = "eks.existing.name"
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
    preserve: bool = False
    """Whether its software stays in the cluster when the add-on is deleted."""
    values: Mapping[str, Any] | None = None
    """Its configuration, where that differs from its own."""
    workspace: bool = False
    """Whether its values name the cluster's workspace of Prometheus."""


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
class ControlPlane:
    """An existing control plane, as EKS describes it."""

    arn: str
    version: str
    status: str
    authentication_mode: str
    vpc_id: str
    security_group_id: str
    """Of the group that EKS made for the cluster: the control plane and the nodes in it reach each other
    (https://docs.aws.amazon.com/eks/latest/userguide/sec-group-reqs.html)."""


def join_problems(spec: ClusterSpec, plane: ControlPlane) -> Iterator[Problem]:
    """Yield why HyperPod cannot join an existing control plane."""
    if plane.status != "ACTIVE":
        yield finding(
            EXISTING, f"{spec.eks_name} is {plane.status}", "wait until it is ACTIVE, or name another cluster"
        )
    if plane.authentication_mode not in MODES:
        message = f"{spec.eks_name} authenticates by {plane.authentication_mode}, and HyperPod enters by access entries"
        change = f"aws eks update-cluster-config --name {spec.eks_name} --access-config authenticationMode={MODES[1]}"
        yield finding(EXISTING, message, f"{change} (cannot be taken back)")
    nodes = spec.network.existing.vpc_id if spec.network.existing else None
    if nodes and plane.vpc_id != nodes:
        message = f"{spec.eks_name} is in {plane.vpc_id or 'no VPC of AWS'}, the nodes in {nodes}"
        fix = f"set network.existing.vpc_id: {plane.vpc_id} with subnets of it"
        yield finding(EXISTING, message, fix if plane.vpc_id else "name a cluster that EKS runs in this VPC")


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
    existing: bool = False
    """The control plane is there already: only access, add-ons and pod identities are made."""

    @property
    def addons_before_nodes(self) -> tuple[Addon, ...]:
        return tuple(addon for addon in self.addons if addon.before_nodes)

    @property
    def addons_after_nodes(self) -> tuple[Addon, ...]:
        return tuple(addon for addon in self.addons if not addon.before_nodes)


def eks_plan(spec: ClusterSpec, place: Place) -> EksPlan:
    """Return the control plane that `spec` asks for."""
    return EksPlan(
        name=spec.eks_name,
        version=spec.eks.version,
        upgrade_policy=spec.eks.upgrade_policy,
        role=CLUSTER_ROLE,
        public_access_cidrs=tuple(dict.fromkeys(spec.eks.public_access_cidrs)),
        log_types=LOG_TYPES,
        access=access_entries(spec, place),
        addons=addons(spec),
        pod_identities=pod_identities(spec),
        creator_is_admin=not spec.access.admin_roles,
        at_creation_only=_at_creation_only(spec),
        existing=spec.eks.existing is not None,
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
    """Return the add-ons that the stack makes, in their order: all that the cluster needs, or of an existing one those that the
    spec names."""
    needed, existing = needed_addons(spec), spec.eks.existing
    if existing is None:
        return needed
    named = (*existing.addons, GOVERNANCE, OPERATOR, METRICS)
    return tuple(replace(one, on_create="NONE", preserve=True) for one in needed if one.name in named)


def needed_addons(spec: ClusterSpec) -> tuple[Addon, ...]:
    """Return what the cluster needs. Until CoreDNS comes as an add-on, the copy that EKS brings with it answers."""
    first = (Addon("vpc-cni"), Addon("kube-proxy"), Addon("eks-pod-identity-agent"))
    network = tuple(addon.name for addon in first)
    addons = [*first, Addon("coredns", after=network, before_nodes=False)]
    if spec.storage.lustre:
        addons.append(Addon(CSI_DRIVER, after=network, before_nodes=False))
    if carries_logs(spec):
        addons.append(Addon(logs.ADDON, after=("coredns",), before_nodes=False, values=logs.addon_configuration()))
    if spec.eks.task_governance:
        addons.append(Addon(GOVERNANCE, after=("coredns",), before_nodes=False))
    if spec.eks.training_operator:
        addons.append(Addon(CERT_MANAGER, after=("coredns",), before_nodes=False))
        addons.append(Addon(OPERATOR, after=(CERT_MANAGER,), before_nodes=False))
    if spec.observability.prometheus == "amp":
        addons.append(Addon(METRICS, after=("coredns",), before_nodes=False, workspace=True))
    return tuple(addons)


def pod_identities(spec: ClusterSpec) -> tuple[PodIdentity, ...]:
    """For the Lustre driver, the training operator and what carries logs or collects metrics, where the stack brings them. They
    stand apart from their add-ons: inside one they have failed (https://github.com/awslabs/awsome-distributed-ai/issues/1075)."""
    identities = {
        CSI_DRIVER: PodIdentity("kube-system", "fsx-csi-controller-sa", CSI_ROLE),
        OPERATOR: PodIdentity("aws-hyperpod", "hp-training-operator-controller-manager", OPERATOR_ROLE),
        METRICS: PodIdentity("hyperpod-observability", "hyperpod-observability-operator-otel-collector", METRICS_ROLE),
        logs.ADDON: PodIdentity(logs.ADDON_NAMESPACE, logs.ADDON_ACCOUNT, LOGS_ROLE),
    }
    made = [addon.name for addon in addons(spec)]
    return tuple(identity for name, identity in identities.items() if name in made)


def workspace_values(arn: str, endpoint: str) -> dict[str, Any]:
    """Return the configuration of the observability add-on: where it writes, and AWS's defaults for what it measures."""
    return {"ampWorkspace": {"arn": arn, "prometheusEndpoint": endpoint}}


def helm_commands(spec: ClusterSpec, place: Place) -> tuple[str, ...]:
    """Return what to type in infra/ the first time, line by line. HyperPod refuses an EKS cluster without its chart (health
    monitoring, device plugins, training operators), so the chart goes between the control plane and the rest, and into an
    existing cluster before all.

    The chart has no Chart.lock, so that `helm dependency build` would do the same as `update`, which AWS's page has. `--wait`
    would wait for pods that have no node yet.
    https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-install-packages-using-helm-chart.html
    """
    if spec.backend != "hyperpod-eks":
        return ()
    chart = f"{CHART_FOLDER}/helm_chart/HyperPodHelmChart"
    return (
        *(() if spec.eks.existing else (WITHOUT_HYPERPOD,)),
        f"aws eks update-kubeconfig --name {spec.eks_name} --region {place.region}{_as_admin(spec)}",
        "kubectl auth can-i create clusterroles",
        f"test -d {CHART_FOLDER} || git clone {CHART_REPOSITORY} {CHART_FOLDER}",
        f"git -C {CHART_FOLDER} fetch origin",
        f"git -C {CHART_FOLDER} checkout {CHART_REVISION}",
        f"helm dependency update {chart}",
        f"helm upgrade --install hyperpod-dependencies {chart} --namespace kube-system",
        "pulumi up",
    )


def first_up(spec: ClusterSpec, place: Place) -> tuple[str, ...]:
    """Return what to know before there is a stack whose outputs say the rest."""
    if spec.backend != "hyperpod-eks":
        return ()
    if spec.eks.existing:
        where = f"EKS cluster {spec.eks_name} needs HyperPod's Helm chart before the first `pulumi up`"
        note = f"{where}. Where `helm list -A` does not show it, type in infra/, {helm_place(spec)}:"
        return (note, *(f"  {command}" for command in helm_commands(spec, place)))
    why = "HyperPod needs its Helm chart in EKS first"
    return (f"The first `pulumi up` leaves HyperPod out ({why}; output firstSteps goes on): {WITHOUT_HYPERPOD}",)


def helm_place(spec: ClusterSpec) -> str:
    """From where, and as whom, those commands work."""
    ranges, roles = spec.eks.public_access_cidrs, spec.access.admin_roles
    if spec.eks.existing:
        return "from where its Kubernetes API answers, as one of its administrators"
    where = f"from an address in {', '.join(ranges)}" if ranges else "from a machine inside the VPC"
    if role := _assumable_admin(spec):
        return f"{where}, with the credentials of `pulumi up`, which have to be allowed to assume {role}"
    whom = f"as {' or '.join(roles)}" if roles else "with the credentials of the first `pulumi up`"
    return f"{where}, {whom}"


def _as_admin(spec: ClusterSpec) -> str:
    """Kubernetes is reached as the administrator, while `pulumi up` keeps its own credentials. Administrators of an existing
    cluster are known to its owners; those that the stack adds come after the chart."""
    role = None if spec.eks.existing else _assumable_admin(spec)
    return f" --role-arn {role}" if role else ""


def _assumable_admin(spec: ClusterSpec) -> str | None:
    """Return the first administrator that is not a role of IAM Identity Center, which only its sign-in assumes
    (https://docs.aws.amazon.com/singlesignon/latest/userguide/referencingpermissionsets.html)."""
    return next((role for role in spec.access.admin_roles if "/AWSReservedSSO_" not in role), None)
