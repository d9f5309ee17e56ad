"""An Auto Scaling group of EC2 instances: reservation, placement group, launch template, the group itself and its hook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.plan.nodes.auto_scaling import (
    GONE_WITHIN,
    HOP_LIMIT,
    METRICS,
    ROOT_IOPS,
    ROOT_MB_S,
    SUSPENDED,
    TAGGED,
    Image,
    Interface,
    NodeGroupPlan,
)
from infra.plan.nodes.capacity import (
    ON_DEMAND_STRATEGY,
    PLATFORM,
    SAVE_SECONDS,
    SPOT_STRATEGY,
    Mix,
    ReservationPlan,
)
from infra.plan.nodes.user_data import encoded
from lustrain.problem import UserError, problem, without_page

LONGEST_WORD_OF_AWS = 300
"""The provider's own account of a failure fills a screen, its cause comes first."""


@dataclass(frozen=True)
class FoundImage:
    """An AMI, and the device name of its root volume."""

    id: str
    root_device: str


def look_up(group: str, image: Image) -> FoundImage:
    """Return the image of a group, looked up in AWS where the plan leaves it open; UserError where the lookup fails."""
    try:
        image_id = image.id or aws.ssm.get_parameter(name=str(image.parameter)).value
        only = aws.ec2.GetAmiFilterArgs(name="image-id", values=[image_id])
        return FoundImage(image_id, image.root_device or aws.ec2.get_ami(filters=[only]).root_device_name)
    except Exception as error:  # noqa: BLE001 - the SDK raises nothing narrower when the provider cannot ask
        why = f"this image cannot be looked up: {refusal(error)}"
        fix = "name an image of the region that this account may use; fab preflight --online asks for it too"
        raise UserError(problem(f"image_id of group {group}", image.id or image.parameter, why, fix=fix)) from None


def refusal(error: Exception) -> str:
    """Return the provider's error message on one line, cut to a readable length."""
    return without_page(" ".join(str(error).split()))[:LONGEST_WORD_OF_AWS]


class Reservation(pulumi.ComponentResource):
    """An on-demand capacity reservation: billed whether it is used or not, protected, and kept by a destroy."""

    reservation_id: pulumi.Output[str]

    def __init__(self, name: str, plan: ReservationPlan) -> None:
        super().__init__("lustrain:infra:Reservation", name)
        keep = pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True)
        zone = aws.get_availability_zone_output(zone_id=plan.zone_id, opts=pulumi.InvokeOutputOptions(parent=self))
        made = aws.ec2.CapacityReservation(
            f"{name}-reservation",
            availability_zone=zone.name,
            instance_type=plan.instance_type,
            instance_platform=PLATFORM,
            instance_count=plan.count,
            instance_match_criteria="targeted",
            end_date_type=plan.end_type,
            end_date=plan.ends_at,
            opts=keep,
        )
        self.reservation_id = made.id
        self.register_outputs({"reservation_id": self.reservation_id})


class AutoScalingNodeGroup(pulumi.ComponentResource):
    """All nodes of one group. `user_data` is the script as text; `reservation_id` that of capacity reserved beside it."""

    auto_scaling_group: pulumi.Output[str]
    launch_template_id: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        plan: NodeGroupPlan,
        *,
        image: FoundImage,
        subnet_id: pulumi.Input[str],
        security_group_ids: Sequence[pulumi.Input[str]],
        instance_profile_arn: pulumi.Input[str],
        user_data: pulumi.Input[str],
        reservation_id: pulumi.Input[str] | None = None,
        depends_on: Sequence[pulumi.Resource] = (),
    ) -> None:
        super().__init__("lustrain:infra:Gang", name)
        self._name = name
        self._plan = plan
        # The image that was looked up first stays: see Image.
        kept = [] if plan.image.id else ["image_id"]
        template = aws.ec2.LaunchTemplate(
            f"{name}-{plan.image.family}",
            description=plan.description,
            image_id=image.id,
            instance_type=plan.instance_type,
            key_name=plan.key_name,
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=instance_profile_arn),
            network_interfaces=[_interface(interface, security_group_ids) for interface in plan.interfaces],
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled",
                http_tokens="required",
                http_put_response_hop_limit=HOP_LIMIT,
                instance_metadata_tags="enabled",
            ),
            block_device_mappings=[_root(image.root_device, plan)],
            cpu_options=self._cpu(),
            instance_market_options=self._market(),
            capacity_reservation_specification=self._reservation(reservation_id),
            placement=self._placement(),
            instance_initiated_shutdown_behavior="terminate",
            tag_specifications=[
                aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=plan.tags) for kind in TAGGED
            ],
            user_data=pulumi.Output.from_input(user_data).apply(encoded),
            update_default_version=True,
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=kept),
        )
        group = self._group(template, subnet_id, depends_on)
        self.auto_scaling_group = group.name
        self.launch_template_id = template.id
        self.register_outputs(
            {"auto_scaling_group": self.auto_scaling_group, "launch_template_id": self.launch_template_id}
        )

    def _group(
        self, template: aws.ec2.LaunchTemplate, subnet_id: pulumi.Input[str], depends_on: Sequence[pulumi.Resource]
    ) -> aws.autoscaling.Group:
        name, plan = self._name, self._plan
        version = template.latest_version.apply(lambda version: str(int(version)))
        group = aws.autoscaling.Group(
            f"{name}-gang",
            min_size=plan.min_size,
            max_size=plan.count,
            desired_capacity=plan.desired,
            vpc_zone_identifiers=[subnet_id],
            launch_template=None
            if plan.mix
            else aws.autoscaling.GroupLaunchTemplateArgs(id=template.id, version=version),
            mixed_instances_policy=_policy(plan.mix, template, version) if plan.mix else None,
            # Nodes may come late or never: a deployment must not wait for capacity.
            wait_for_capacity_timeout="0",
            health_check_type="EC2",
            protect_from_scale_in=plan.by_jobs or None,
            suspended_processes=list(SUSPENDED),
            enabled_metrics=[aws.autoscaling.Metric(metric) for metric in METRICS],
            metrics_granularity="1Minute",
            tags=[
                aws.autoscaling.GroupTagArgs(key=key, value=value, propagate_at_launch=True)
                for key, value in plan.tags.items()
            ],
            # The last nodes of a large group take longer to save and end than the provider's ten minutes.
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(depends_on),
                custom_timeouts=pulumi.CustomTimeouts(delete=GONE_WITHIN),
            ),
        )
        if plan.role == "worker":
            self._time_to_save(group)
        for edge, moment, wanted in (("start", plan.fill_at, plan.count), ("end", plan.empty_at, 0)):
            if moment:
                aws.autoscaling.Schedule(
                    f"{name}-{edge}",
                    autoscaling_group_name=group.name,
                    scheduled_action_name=f"{edge}-of-capacity-block",
                    min_size=0,
                    max_size=plan.count,
                    desired_capacity=wanted,
                    start_time=moment,
                    opts=pulumi.ResourceOptions(parent=self),
                )
        return group

    def _time_to_save(self, group: aws.autoscaling.Group) -> None:
        # The hook depends on its group, so a destroy would take it first, and the nodes would end without the time to save.
        # Left alone it ends with its group, which waits for it; an initial hook would too, but could never be changed.
        aws.autoscaling.LifecycleHook(
            f"{self._name}-save",
            autoscaling_group_name=group.name,
            lifecycle_transition="autoscaling:EC2_INSTANCE_TERMINATING",
            heartbeat_timeout=SAVE_SECONDS,
            default_result="CONTINUE",
            opts=pulumi.ResourceOptions(parent=self, retain_on_delete=True),
        )

    def _cpu(self) -> aws.ec2.LaunchTemplateCpuOptionsArgs | None:
        cpu = self._plan.cpu
        if cpu is None:
            return None
        return aws.ec2.LaunchTemplateCpuOptionsArgs(core_count=cpu.cores, threads_per_core=cpu.threads_per_core)

    def _market(self) -> aws.ec2.LaunchTemplateInstanceMarketOptionsArgs | None:
        market = self._plan.market
        if market.type is None:
            return None
        spot = market.spot_type and aws.ec2.LaunchTemplateInstanceMarketOptionsSpotOptionsArgs(
            spot_instance_type=market.spot_type, instance_interruption_behavior=market.interruption
        )
        return aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type=market.type, spot_options=spot or None)

    def _reservation(
        self, bought: pulumi.Input[str] | None
    ) -> aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs | None:
        market = self._plan.market
        target = bought if bought is not None else market.reservation
        if target is None:
            return None
        return aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs(
            capacity_reservation_target=aws.ec2.LaunchTemplateCapacityReservationSpecificationCapacityReservationTargetArgs(
                capacity_reservation_id=target
            ),
        )

    def _placement(self) -> aws.ec2.LaunchTemplatePlacementArgs | None:
        market = self._plan.market
        group: pulumi.Input[str] | None = market.placement_group
        if market.own_placement_group:
            group = aws.ec2.PlacementGroup(
                f"{self._name}-near", strategy="cluster", opts=pulumi.ResourceOptions(parent=self)
            ).name
        return None if group is None else aws.ec2.LaunchTemplatePlacementArgs(group_name=group)


def _policy(
    mix: Mix, template: aws.ec2.LaunchTemplate, version: pulumi.Output[str]
) -> aws.autoscaling.GroupMixedInstancesPolicyArgs:
    return aws.autoscaling.GroupMixedInstancesPolicyArgs(
        launch_template=aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateArgs(
            launch_template_specification=aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateLaunchTemplateSpecificationArgs(
                launch_template_id=template.id, version=version
            ),
            overrides=[
                aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateOverrideArgs(instance_type=kind)
                for kind in mix.types
            ],
        ),
        instances_distribution=aws.autoscaling.GroupMixedInstancesPolicyInstancesDistributionArgs(
            on_demand_allocation_strategy=ON_DEMAND_STRATEGY,
            on_demand_base_capacity=mix.on_demand_base,
            on_demand_percentage_above_base_capacity=0,
            spot_allocation_strategy=SPOT_STRATEGY,
        ),
    )


def _interface(
    one: Interface, security_group_ids: Sequence[pulumi.Input[str]]
) -> aws.ec2.LaunchTemplateNetworkInterfaceArgs:
    """Return an interface without subnet, which an Auto Scaling group gives it; it must be deleted with its instance."""
    return aws.ec2.LaunchTemplateNetworkInterfaceArgs(
        network_card_index=one.card,
        device_index=one.device,
        interface_type=one.type,
        associate_public_ip_address=one.public_address,
        delete_on_termination="true",
        security_groups=list(security_group_ids),
    )


def _root(device: pulumi.Input[str], plan: NodeGroupPlan) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name=device,
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_type="gp3",
            volume_size=plan.root_volume_gib,
            iops=ROOT_IOPS,
            throughput=ROOT_MB_S,
            encrypted="true",
            kms_key_id=plan.volume_kms_key,
            delete_on_termination="true",
        ),
    )
