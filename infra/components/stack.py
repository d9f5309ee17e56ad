"""One cluster: its foundation, its nodes by backend, and what it tells the rest of the house."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.clock import now
from infra.components.budget import Budget
from infra.components.capacity import Reservation
from infra.components.eks import EksCluster, NodeAddons
from infra.components.foundation import Foundation
from infra.components.gang import Gang
from infra.components.hyperpod import HyperPod
from infra.components.lookup import FoundImage, look_up, refusal
from infra.components.observability import Observability
from infra.components.tagging import tag_everything
from infra.config import ClusterSpec, Group, parse
from infra.plan.budget import budget
from infra.plan.capacity import reservations
from infra.plan.eks import KARPENTER_ROLE, eks_plan
from infra.plan.gang import gangs
from infra.plan.hyperpod import HomeMount, Mount, Refs, desired_state, protected
from infra.plan.observability import observability
from infra.plan.outputs import Made, cluster
from infra.plan.place import Place, tags
from infra.plan.teardown import first_steps, teardown
from infra.plan.user_data import user_data
from infra.preflight.finding import Finding
from infra.preflight.offline import run_in, run_offline
from infra.preflight.rule import Context
from lustrain.cluster import to_json
from lustrain.problem import UserError

Text = pulumi.Output[str]


@dataclass(frozen=True)
class Nodes:
    """How to find the nodes once they are there."""

    auto_scaling_groups: list[Text] = field(default_factory=list)
    hyperpod_name: Text | None = None
    hyperpod_id: Text | None = None
    eks_name: Text | None = None
    eks_version: Text | None = None
    """That of the running control plane."""
    reservations: list[Text] = field(default_factory=list)
    """Ids of the capacity reservations that this stack made."""


def program(value: object) -> dict[str, Any]:
    """What `pulumi up` runs over the configuration `value`: judged before AWS is asked for anything.

    UserError lists what is wrong with the description, or why AWS does not answer; nothing is declared then.
    """
    spec = parse(value)
    stop_on_errors(run_in(spec, Context.of_region(aws.config.region, now())))
    return declare(spec, current_place())


def declare(spec: ClusterSpec, place: Place) -> dict[str, Any]:
    """Stop on what preflight finds in this place, then declare everything, tagged; returns the stack's outputs."""
    findings = run_offline(spec, place)
    stop_on_errors(findings)
    for finding in findings:
        pulumi.log.warn(finding.line())
    tag_everything(tags(spec))
    return build(spec, place)


def stop_on_errors(findings: Sequence[Finding]) -> None:
    if errors := [finding.line() for finding in findings if finding.level == "error"]:
        raise UserError(errors)


def current_place() -> Place:
    """Where the credentials and the region of this deployment lead."""
    try:
        partition = aws.get_partition().partition
        # A plugin over an older provider leaves `region` empty; its other names are deprecated.
        region = aws.get_region().region or aws.config.region
        account = aws.get_caller_identity().account_id
    except Exception as error:  # noqa: BLE001 - the SDK raises nothing narrower when the provider cannot ask
        fix = "log in (aws sso login), or set AWS_PROFILE and aws:region, then try `aws sts get-caller-identity`"
        raise UserError(f"AWS cannot be asked: {refusal(error)}; fix: {fix}") from None
    if not region:
        raise UserError("aws:region is missing: it has no default; fix: pulumi config set aws:region us-east-1")
    return Place(region, account, partition)


def build(spec: ClusterSpec, place: Place) -> dict[str, Any]:
    """Declare everything; of the outputs `cluster` is the contract (lustrain/cluster.py)."""
    images = (
        {plan.group: look_up(plan.group, plan.image) for plan in gangs(spec, place)} if spec.backend == "ec2" else {}
    )
    base = Foundation(spec, place)
    nodes = _gangs(spec, place, base, images) if spec.backend == "ec2" else _hyperpod(spec, place, base)
    watch = Observability(
        spec.name,
        observability(spec, place),
        file_system_id=base.lustre.id if base.lustre else None,
        auto_scaling_groups=nodes.auto_scaling_groups,
        nat_gateway_id=base.network.nat_gateway_id,
        topic_arn=base.channel.topic_arn,
    )
    if plan := budget(spec, place):
        Budget(spec.name, plan)
    outputs: dict[str, Any] = {
        "cluster": _cluster(spec, place, base, nodes, watch),
        "spec": _deployed(spec, nodes.eks_version),
        "bundle": base.bundle.sha,
        "firstSteps": "\n".join(first_steps(spec, place)),
        "teardown": "\n".join(teardown(spec, place)),
    }
    if watch.prometheus_endpoint is not None:
        outputs["prometheus"] = watch.prometheus_endpoint
    if nodes.reservations:
        outputs["reservations"] = nodes.reservations
    if base.lustre:
        outputs["fileSystem"] = base.lustre.id
    if base.home:
        outputs["homeFileSystem"] = base.home.id
    return outputs


def _gangs(spec: ClusterSpec, place: Place, base: Foundation, images: Mapping[str, FoundImage]) -> Nodes:
    reserved = {one.group: Reservation(f"{spec.name}-{one.group}", one) for one in reservations(spec)}
    later = {
        "lustre_dns": base.lustre.dns_name if base.lustre else "",
        "lustre_mount_name": base.lustre.mount_name if base.lustre else "",
        "home_dns": base.home.dns_name if base.home else "",
        "bundle_uri": base.bundle.uri,
        "queue_url": base.channel.queue_url,
    }
    made = []
    for plan, group in zip(gangs(spec, place), spec.workers, strict=True):

        def script(known: Mapping[str, str], group: Group = group) -> str:
            return user_data(spec, place, group, **known)

        reservation = reserved.get(group.name)
        gang = Gang(
            plan.name,
            plan,
            image=images[plan.group],
            subnet_id=base.network.zone_subnet_ids.get(spec.zone_of(group), base.network.compute_subnet_id),
            security_group_id=base.security.ids["cluster"],
            instance_profile_arn=base.roles.instance_profile_arn or "",
            user_data=pulumi.Output.all(**later).apply(script),
            reservation_id=reservation.reservation_id if reservation else None,
            depends_on=base.ready,
        )
        made.append(gang.auto_scaling_group)
    return Nodes(auto_scaling_groups=made, reservations=[one.reservation_id for one in reserved.values()])


def _hyperpod(spec: ClusterSpec, place: Place, base: Foundation) -> Nodes:
    eks = _eks(spec, place, base)
    lustre, home = spec.storage.lustre, spec.storage.home
    refs = Refs(
        role_arn=base.roles.arns["node"],
        subnet_id=base.network.compute_subnet_id,
        security_group_ids=[base.security.ids["cluster"]],
        lifecycle_uri=base.bundle.uri,
        zone_subnet_ids=base.network.zone_subnet_ids,
        lustre=Mount(base.lustre.dns_name, base.lustre.mount_name, lustre.mount_path)
        if base.lustre and lustre
        else None,
        home=HomeMount(base.home.dns_name, home.mount_path) if base.home and home else None,
        eks_cluster_arn=eks.arn if eks else None,
        cluster_role_arn=base.roles.arns.get(KARPENTER_ROLE),
    )
    made = HyperPod(
        spec.name,
        desired_state(spec, place, refs),
        [*base.ready, *(eks.ready if eks else [])],
        protect=protected(spec),
    )
    if eks:
        NodeAddons(f"{spec.name}-nodes", eks_plan(spec, place), eks.name, made.ready)
    return Nodes(
        hyperpod_name=made.name,
        hyperpod_id=made.id,
        eks_name=eks.name if eks else None,
        eks_version=eks.version if eks else None,
    )


def _eks(spec: ClusterSpec, place: Place, base: Foundation) -> EksCluster | None:
    if spec.backend != "hyperpod-eks":
        return None
    return EksCluster(
        spec.name,
        eks_plan(spec, place),
        base.network.control_subnet_ids,
        [base.security.ids["cluster"]],
        base.roles.arns,
        depends_on=[base.roles],
    )


def _deployed(spec: ClusterSpec, version: Text | None) -> Any:
    """All of the spec, since the default of a key that is left out may be another one tomorrow, with the Kubernetes version
    that runs, which a spec without one does not know."""
    told = spec.model_dump(mode="json")
    return (
        version.apply(lambda runs: {**told, "eks": {**told["eks"], "version": runs}}) if version is not None else told
    )


def _cluster(
    spec: ClusterSpec, place: Place, base: Foundation, nodes: Nodes, watch: Observability
) -> pulumi.Output[Any]:
    lustre, home = base.lustre, base.home
    values = {
        "auto_scaling_groups": nodes.auto_scaling_groups,
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
        groups = tuple(made["auto_scaling_groups"])
        return to_json(cluster(spec, place, Made(**{**made, "auto_scaling_groups": groups})))

    return pulumi.Output.all(**values).apply(described)
