"""The Pulumi program of one cluster: its foundation, its nodes by backend, and the stack's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.clock import now
from infra.components.auto_scaling import AutoScalingNodeGroup, FoundImage, Reservation, look_up, refusal
from infra.components.controller import Controller, ControllerState
from infra.components.eks import EksCluster, NodeAddons, look_up_plane
from infra.components.foundation import Foundation
from infra.components.grafana import Grafana
from infra.components.hyperpod import HyperPod
from infra.components.monitor import Monitor
from infra.components.observability import Budget, Observability
from infra.components.tagging import tag_everything
from infra.components.workspace import Workspace
from infra.config import CONTROLLER, MONITOR, ClusterSpec, Group, parse
from infra.plan.nodes.eks import KARPENTER_ROLE, ControlPlane
from infra.plan.nodes.hyperpod import HomeMount, Mount, Refs, desired_state, protected
from infra.plan.nodes.user_data import user_data
from infra.plan.outputs import DeployedIds, cluster
from infra.plan.place import Place
from infra.plan.stack import Plan
from infra.plan.teardown import first_steps, teardown
from infra.plan.watch.grafana import ROLE as GRAFANA_ROLE
from infra.plan.watch.machine import boot_digits
from infra.preflight.offline import run_in, run_offline
from infra.preflight.rule import Context
from lustrain.cluster import to_json
from lustrain.problem import Problem, UserError

Text = pulumi.Output[str]


@dataclass(frozen=True)
class Nodes:
    """Names and ids by which other tools find the nodes."""

    auto_scaling_groups: list[Text] = field(default_factory=list)
    hyperpod_name: Text | None = None
    hyperpod_id: Text | None = None
    eks_name: Text | None = None
    eks_version: Text | None = None
    """That of the running control plane."""
    reservations: list[Text] = field(default_factory=list)
    """Ids of the capacity reservations that this stack made."""
    controller: Text | None = None
    """Id of the instance of Slurm's controller."""
    controller_state: ControllerState | None = None


def program(value: object) -> dict[str, Any]:
    """Declare the cluster of the configuration `value`, once it is checked; `pulumi up` runs this.

    UserError lists what is wrong with the description, or why AWS does not answer; nothing is declared then.
    """
    spec = parse(value)
    stop_on_errors(run_in(Context.of_region(spec, aws.config.region, now())))
    return declare(spec, current_place())


def declare(spec: ClusterSpec, place: Place) -> dict[str, Any]:
    """Stop on preflight's errors, then declare everything, tagged; returns the stack's outputs."""
    findings = run_offline(spec, place)
    stop_on_errors(findings)
    for finding in findings:
        pulumi.log.warn(finding)
    plan = Plan(spec, place)
    tag_everything(plan.tags)
    return build(plan)


def stop_on_errors(findings: Sequence[Problem]) -> None:
    if errors := [finding for finding in findings if finding.level == "error"]:
        raise UserError(errors)


def current_place() -> Place:
    """Region, account and partition of this deployment, as AWS tells them; UserError where it does not."""
    try:
        partition = aws.get_partition().partition
        # A plugin over an older provider leaves `region` empty; its other names are deprecated.
        region = aws.get_region().region or aws.config.region
        account = aws.get_caller_identity().account_id
    except Exception as error:  # noqa: BLE001 - the SDK raises nothing narrower when the provider cannot ask
        fix = "log in (aws sso login), or set AWS_PROFILE and aws:region, then try `aws sts get-caller-identity`"
        raise UserError(f"AWS cannot be reached: {refusal(error)}; fix: {fix}") from None
    if not region:
        raise UserError("aws:region is missing: it has no default; fix: pulumi config set aws:region us-east-1")
    return Place(region, account, partition)


def build(plan: Plan) -> dict[str, Any]:
    """Declare every resource of the plan; of the outputs, `cluster` is the contract (lustrain/cluster.py)."""
    # What is there already is looked up before anything is declared: a refusal then leaves nothing half-made.
    plane = look_up_plane(plan.spec)
    images = {node_group.group: look_up(node_group.group, node_group.image) for node_group in plan.node_groups}
    for machine in filter(None, (plan.controller, plan.monitor)):
        images[machine.group.name] = look_up(machine.group.name, machine.image)
    base = Foundation(plan)
    workspace = Workspace(plan.spec.name, found) if (found := plan.observability.workspace) else None
    nodes = _hyperpod(plan, base, plane, workspace) if plan.spec.hyperpod else _node_groups(plan, base, images)
    monitor = _monitor(plan, base, images, workspace)
    watch = Observability(
        plan.spec.name,
        plan.observability,
        file_system_id=base.lustre.id if base.lustre else None,
        home_id=base.home.id if base.home else None,
        auto_scaling_groups=nodes.auto_scaling_groups,
        nat_gateway_id=base.network.nat_gateway_id,
        topic_arn=base.channel.topic_arn,
        controller_id=nodes.controller,
        monitor_id=monitor.instance_id if monitor else None,
    )
    grafana = _grafana(plan, base)
    if plan.budget:
        Budget(plan.spec.name, plan.budget)
    outputs = {
        "cluster": _cluster(plan, base, nodes, watch),
        "spec": _deployed(plan.spec, nodes.eks_version),
        "bundle": plan.bundle.sha,
        "firstSteps": "\n".join(first_steps(plan)),
        "teardown": "\n".join(teardown(plan)),
        "prometheus": workspace.endpoint if workspace else None,
        "grafana": grafana.url if grafana else None,
        "reservations": nodes.reservations or None,
        "fileSystem": base.lustre.id if base.lustre else None,
        "homeFileSystem": base.home.id if base.home else None,
        "controller": nodes.controller,
        "slurmState": nodes.controller_state.volume_id if nodes.controller_state else None,
        "monitor": monitor.instance_id if monitor else None,
        "monitorData": monitor.volume_id if monitor else None,
        "monitorBoot": boot_digits(plan.spec),
        "open": monitor.pages or None if monitor else None,
    }
    return {name: value for name, value in outputs.items() if value is not None}


def _monitor(
    plan: Plan, base: Foundation, images: Mapping[str, FoundImage], workspace: Workspace | None
) -> Monitor | None:
    if plan.monitor is None:
        return None
    return Monitor(
        plan.monitor,
        plan,
        image=images[plan.monitor.group.name],
        subnet_id=base.network.compute_subnet_id,
        security_group_ids=[base.security.ids["monitor"]],
        instance_profile_arn=base.roles.profile_arns[MONITOR],
        lifecycle_bucket=base.buckets.names["lifecycle"],
        workspace=workspace,
        depends_on=base.ready,
    )


def _grafana(plan: Plan, base: Foundation) -> Grafana | None:
    if plan.grafana is None:
        return None
    return Grafana(plan.spec.name, plan.grafana, base.roles.arns[GRAFANA_ROLE], base.roles.ready)


def _node_groups(plan: Plan, base: Foundation, images: Mapping[str, FoundImage]) -> Nodes:
    spec = plan.spec
    reserved = {entry.group: Reservation(f"{spec.name}-{entry.group}", entry) for entry in plan.reservations}
    named = [pulumi.Output.from_input(group) for group in spec.network.security_group_ids]
    security_groups: list[Text] = [base.security.ids["cluster"], *named]
    state = _controller_state(plan, base, security_groups)
    later = {
        "lustre_dns": base.lustre.dns_name if base.lustre else "",
        "lustre_mount_name": base.lustre.mount_name if base.lustre else "",
        "home_dns": base.home.dns_name if base.home else "",
        "bundle_uri": base.bundle.uri,
        "queue_url": base.channel.queue_url,
        "slurm": state.ids if state else None,
    }

    def script(group: Group) -> Text:
        return pulumi.Output.all(**later).apply(lambda known: user_data(spec, plan.place, group, **known))

    made, profiles = [], base.roles.profile_arns
    for planned, group in zip(plan.node_groups, spec.node_groups, strict=True):
        reservation = reserved.get(group.name)
        node_group = AutoScalingNodeGroup(
            planned.name,
            planned,
            image=images[planned.group],
            subnet_id=base.network.zone_subnet_ids.get(spec.zone_of(group), base.network.compute_subnet_id),
            security_group_ids=security_groups,
            instance_profile_arn=profiles.get(group.role, profiles["node"]),
            user_data=script(group),
            reservation_id=reservation.reservation_id if reservation else None,
            depends_on=base.ready,
        )
        made.append(node_group.auto_scaling_group)
    nodes = Nodes(auto_scaling_groups=made, reservations=[item.reservation_id for item in reserved.values()])
    if plan.controller is None or state is None:
        return nodes
    controller = Controller(
        plan.controller.name,
        plan.controller,
        state,
        image=images[plan.controller.group.name],
        instance_profile_arn=profiles.get(CONTROLLER, profiles["node"]),
        user_data=script(plan.controller.group),
        depends_on=base.ready,
    )
    return replace(nodes, controller=controller.instance_id, controller_state=state)


def _controller_state(plan: Plan, base: Foundation, security_groups: Sequence[Text]) -> ControllerState | None:
    if plan.controller is None:
        return None
    return ControllerState(
        plan.controller.name,
        plan.controller,
        subnet_id=base.network.compute_subnet_id,
        security_group_ids=security_groups,
    )


def _hyperpod(plan: Plan, base: Foundation, plane: ControlPlane | None, workspace: Workspace | None) -> Nodes:
    spec, eks = plan.spec, _eks(plan, base, plane)
    # Ours and an existing control plane have no other group in common.
    joins = [plane.security_group_id] if plane else []
    lustre, home = spec.storage.lustre, spec.storage.home
    refs = Refs(
        role_arn=base.roles.arns["node"],
        subnet_id=base.network.compute_subnet_id,
        security_group_ids=[base.security.ids["cluster"], *joins, *spec.network.security_group_ids],
        lifecycle_uri=base.bundle.uri,
        zone_subnet_ids=base.network.zone_subnet_ids,
        lustre=Mount(base.lustre.dns_name, base.lustre.mount_name, lustre.mount_path)
        if base.lustre and lustre
        else None,
        home=HomeMount(base.home.dns_name, home.mount_path) if base.home and home and home.type == "openzfs" else None,
        eks_cluster_arn=eks.arn if eks else None,
        cluster_role_arn=base.roles.arns.get(KARPENTER_ROLE),
    )
    made = HyperPod(
        spec.name, desired_state(spec, refs), [*base.ready, *(eks.ready if eks else [])], protect=protected(spec)
    )
    if eks and plan.eks:
        NodeAddons(f"{spec.name}-nodes", plan.eks, eks.name, made.ready, workspace)
    return Nodes(
        hyperpod_name=made.name,
        hyperpod_id=made.id,
        eks_name=eks.name if eks else None,
        eks_version=eks.version if eks else None,
    )


def _eks(plan: Plan, base: Foundation, plane: ControlPlane | None) -> EksCluster | None:
    if plan.eks is None:
        return None
    return EksCluster(
        plan.spec.name,
        plan.eks,
        base.network.control_subnet_ids,
        [base.security.ids["cluster"]],
        base.roles.arns,
        found=plane,
        depends_on=[base.roles],
    )


def _deployed(spec: ClusterSpec, version: Text | None) -> Any:
    """Return the whole spec, since the default of a key may change with a later release, and with the Kubernetes version
    that runs, which a spec without one does not name."""
    values = spec.model_dump(mode="json")
    if version is None:
        return values
    return version.apply(lambda running: {**values, "eks": {**values["eks"], "version": running}})


def _cluster(plan: Plan, base: Foundation, nodes: Nodes, watch: Observability) -> pulumi.Output[Any]:
    lustre, home = base.lustre, base.home
    values = {
        "auto_scaling_groups": nodes.auto_scaling_groups,
        "instances": [nodes.controller] if nodes.controller else [],
        "controller": nodes.controller_state.address if nodes.controller_state else None,
        "hyperpod_name": nodes.hyperpod_name,
        "hyperpod_id": nodes.hyperpod_id,
        "eks_name": nodes.eks_name,
        "lustre": {"id": lustre.id, "dns_name": lustre.dns_name, "mount_name": lustre.mount_name} if lustre else None,
        "home": {"id": home.id, "dns_name": home.dns_name} if home else None,
        "buckets": base.buckets.names,
        "role_arn": base.roles.arns["node"],
        "queue_url": base.channel.queue_url,
        "log_group": watch.log_group,
        "repository": base.repository.url,
    }

    def described(made: Mapping[str, Any]) -> dict[str, Any]:
        lists = {key: tuple(made[key]) for key in ("auto_scaling_groups", "instances")}
        return to_json(cluster(plan, DeployedIds(**{**made, **lists})))

    return pulumi.Output.all(**values).apply(described)
