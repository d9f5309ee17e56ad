"""The EKS control plane under a HyperPod cluster, and the add-ons that need its nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pulumi
import pulumi_aws as aws

from infra.components.auto_scaling import refusal
from infra.components.workspace import Workspace
from infra.config import ClusterSpec
from infra.plan.nodes.eks import EXISTING, Addon, ControlPlane, EksPlan, join_problems, workspace_values
from lustrain.problem import UserError, problem


def look_up_plane(spec: ClusterSpec) -> ControlPlane | None:
    """Return the existing control plane that the spec names; UserError where HyperPod cannot join it."""
    if spec.backend != "hyperpod-eks" or spec.eks.existing is None:
        return None
    try:
        found = aws.eks.get_cluster(name=spec.eks_name)
    except Exception as error:  # noqa: BLE001 - the SDK raises nothing narrower when the provider cannot ask
        why = f"this EKS cluster cannot be looked up: {refusal(error)}"
        raise UserError(
            problem(EXISTING, spec.eks_name, why, fix="name a cluster of this account and region")
        ) from None
    network = found.vpc_config  # None of a cluster that runs elsewhere (EKS Connector)
    plane = ControlPlane(
        arn=found.arn,
        version=found.version,
        status=found.status,
        authentication_mode=next((one.authentication_mode for one in found.access_configs), "CONFIG_MAP"),
        vpc_id=network.vpc_id if network else "",
        security_group_id=network.cluster_security_group_id if network else "",
    )
    if problems := list(join_problems(spec, plane)):
        raise UserError(problems)
    return plane


class EksCluster(pulumi.ComponentResource):
    """Control plane, access entries, pod identities and the add-ons that are healthy without nodes.

    With `found` the control plane is an existing one, which this only adds to. `role_arns` maps the plan's role keys to ARNs.
    `ready` is what HyperPod must wait for. `version` is the one that runs.
    """

    name: pulumi.Output[str]
    arn: pulumi.Output[str]
    version: pulumi.Output[str]
    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        plan: EksPlan,
        subnet_ids: Sequence[pulumi.Input[str]],
        security_group_ids: Sequence[pulumi.Input[str]],
        role_arns: Mapping[str, pulumi.Input[str]],
        found: ControlPlane | None = None,
        depends_on: Sequence[pulumi.Resource] = (),
    ) -> None:
        super().__init__("lustrain:infra:EksCluster", name)
        self.ready = []
        if found is None:
            self._make_control_plane(name, plan, subnet_ids, security_group_ids, role_arns, depends_on)
        else:
            self.name, self.arn, self.version = (
                pulumi.Output.from_input(value) for value in (plan.name, found.arn, found.version)
            )
        access = self._admit(name, plan)
        identities = [
            aws.eks.PodIdentityAssociation(
                f"{name}-{identity.role}",
                cluster_name=self.name,
                namespace=identity.namespace,
                service_account=identity.service_account,
                role_arn=role_arns[identity.role],
                opts=pulumi.ResourceOptions(parent=self),
            )
            for identity in plan.pod_identities
        ]
        made = _make(self, name, plan.addons_before_nodes, self.name, ())
        self.ready += [*access, *identities, *made]
        self.register_outputs({"name": self.name, "arn": self.arn})

    def _make_control_plane(
        self,
        name: str,
        plan: EksPlan,
        subnet_ids: Sequence[pulumi.Input[str]],
        security_group_ids: Sequence[pulumi.Input[str]],
        role_arns: Mapping[str, pulumi.Input[str]],
        depends_on: Sequence[pulumi.Resource],
    ) -> None:
        cluster = aws.eks.Cluster(
            f"{name}-cluster",
            name=plan.name,
            version=plan.version,
            upgrade_policy=aws.eks.ClusterUpgradePolicyArgs(support_type=plan.upgrade_policy),
            role_arn=role_arns[plan.role],
            access_config=aws.eks.ClusterAccessConfigArgs(
                authentication_mode=plan.authentication_mode,
                bootstrap_cluster_creator_admin_permissions=plan.creator_is_admin,
            ),
            enabled_cluster_log_types=list(plan.log_types),
            vpc_config=aws.eks.ClusterVpcConfigArgs(
                subnet_ids=list(subnet_ids),
                security_group_ids=list(security_group_ids),
                endpoint_private_access=True,
                endpoint_public_access=bool(plan.public_access_cidrs),
                public_access_cidrs=list(plan.public_access_cidrs) or None,
            ),
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(depends_on),
                ignore_changes=list(plan.at_creation_only),
            ),
        )
        self.name, self.arn, self.version = cluster.name, cluster.arn, cluster.version
        self.ready.append(cluster)

    def _admit(self, name: str, plan: EksPlan) -> list[pulumi.Resource]:
        made: list[pulumi.Resource] = []
        for item in plan.access:
            entry = aws.eks.AccessEntry(
                f"{name}-{item.key}",
                cluster_name=self.name,
                principal_arn=item.principal_arn,
                opts=pulumi.ResourceOptions(parent=self),
            )
            policy = aws.eks.AccessPolicyAssociation(
                f"{name}-{item.key}-policy",
                cluster_name=self.name,
                principal_arn=item.principal_arn,
                policy_arn=item.policy_arn,
                access_scope=aws.eks.AccessPolicyAssociationAccessScopeArgs(type="cluster"),
                opts=pulumi.ResourceOptions(parent=self, depends_on=[entry]),
            )
            made += [entry, policy]
        return made


class NodeAddons(pulumi.ComponentResource):
    """The add-ons whose pods need a node; `depends_on` is the HyperPod cluster that brings it."""

    def __init__(
        self,
        name: str,
        plan: EksPlan,
        cluster_name: pulumi.Input[str],
        depends_on: Sequence[pulumi.Resource],
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__("lustrain:infra:NodeAddons", name)
        _make(self, name, plan.addons_after_nodes, cluster_name, depends_on, workspace)
        self.register_outputs({})


def _make(
    parent: pulumi.Resource,
    name: str,
    addons: Sequence[Addon],
    cluster_name: pulumi.Input[str],
    depends_on: Sequence[pulumi.Resource],
    workspace: Workspace | None = None,
) -> list[pulumi.Resource]:
    made: dict[str, pulumi.Resource] = {}
    of_workspace = None
    if workspace:
        known = pulumi.Output.all(workspace.arn, workspace.endpoint)
        of_workspace = known.apply(lambda pair: json.dumps(workspace_values(*pair), sort_keys=True))
    for addon in addons:
        first = [made[other] for other in addon.after if other in made]
        own = json.dumps(addon.values, sort_keys=True) if addon.values else None
        made[addon.name] = aws.eks.Addon(
            f"{name}-{addon.name}",
            cluster_name=cluster_name,
            addon_name=addon.name,
            resolve_conflicts_on_create=addon.on_create,
            resolve_conflicts_on_update=addon.on_update,
            preserve=addon.preserve or None,
            configuration_values=of_workspace if addon.workspace else own,
            opts=pulumi.ResourceOptions(
                parent=parent,
                depends_on=[*first, *depends_on],
                # Continuous provisioning calls a cluster InService before its first node has come.
                custom_timeouts=pulumi.CustomTimeouts(create="1h"),
            ),
        )
    return list(made.values())
