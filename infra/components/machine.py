"""A machine that stands by itself beside the nodes, and its data volume, which outlives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.plan.nodes.auto_scaling import HOP_LIMIT
from infra.plan.nodes.machine import DATA_DEVICE, MachinePlan
from infra.plan.nodes.user_data import encoded


def data_volume(name: str, plan: MachinePlan, parent: pulumi.Resource) -> aws.ebs.Volume:
    """Declare the volume in the machine's zone; it is protected and outlives the stack."""
    zone = aws.get_availability_zone_output(zone_id=plan.zone_id, opts=pulumi.InvokeOutputOptions(parent=parent))
    return aws.ebs.Volume(
        name,
        availability_zone=zone.name,
        type="gp3",
        size=plan.data_gib,
        encrypted=True,
        tags={**plan.tags, "Name": name},
        opts=pulumi.ResourceOptions(parent=parent, protect=True, retain_on_delete=True),
    )


def instance(
    name: str,
    plan: MachinePlan,
    parent: pulumi.Resource,
    *,
    image_id: pulumi.Input[str],
    instance_profile_arn: pulumi.Output[str],
    user_data: pulumi.Output[str],
    volume: tuple[str, pulumi.Input[str]],
    network: Mapping[str, Any],
    depends_on: Sequence[pulumi.Resource] = (),
) -> aws.ec2.Instance:
    """Declare the instance with its `volume` (name of the attachment, id). Whatever it boots with makes it anew, the volume
    moves over."""
    kept = [] if plan.image.id else ["ami"]
    made = aws.ec2.Instance(
        f"{name}-instance",
        ami=image_id,
        instance_type=plan.group.ec2_type,
        key_name=plan.key_name,
        iam_instance_profile=instance_profile_arn.apply(lambda arn: arn.rpartition("/")[2]),
        metadata_options=aws.ec2.InstanceMetadataOptionsArgs(
            http_endpoint="enabled",
            http_tokens="required",
            http_put_response_hop_limit=HOP_LIMIT,
            instance_metadata_tags="enabled",
        ),
        root_block_device=aws.ec2.InstanceRootBlockDeviceArgs(
            volume_type="gp3",
            volume_size=plan.root_gib,
            encrypted=True,
            delete_on_termination=True,
            tags=plan.tags,
        ),
        user_data_base64=user_data.apply(encoded),
        user_data_replace_on_change=True,
        tags=plan.tags,
        # The volume is on one instance at a time.
        opts=pulumi.ResourceOptions(
            parent=parent, depends_on=list(depends_on), ignore_changes=kept, delete_before_replace=True
        ),
        **network,
    )
    attachment, volume_id = volume
    aws.ec2.VolumeAttachment(
        attachment,
        device_name=DATA_DEVICE,
        instance_id=made.id,
        volume_id=volume_id,
        # A stopped machine has unmounted it.
        stop_instance_before_detaching=True,
        opts=pulumi.ResourceOptions(parent=parent, delete_before_replace=True),
    )
    return made
