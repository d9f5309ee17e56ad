"""Slurm's controller: what outlives its instance, and the instance."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_aws as aws

from infra.components.auto_scaling import FoundImage
from infra.plan.nodes.auto_scaling import HOP_LIMIT
from infra.plan.nodes.controller import RECOVERY_DAYS, STATE_DEVICE, ControllerPlan
from infra.plan.nodes.user_data import SlurmIds, encoded


class ControllerState(pulumi.ComponentResource):
    """The interface with its fixed address, the volume of Slurm's state, which is protected and outlives the stack, and the
    secret for the munge key, empty: the controller fills it, so that no state of Pulumi holds the key."""

    address: pulumi.Output[str]
    interface_id: pulumi.Output[str]
    volume_id: pulumi.Output[str]
    ids: pulumi.Output[SlurmIds]

    def __init__(
        self,
        name: str,
        plan: ControllerPlan,
        *,
        subnet_id: pulumi.Input[str],
        security_group_ids: Sequence[pulumi.Input[str]],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("lustrain:infra:ControllerState", name, None, opts)
        ours = pulumi.ResourceOptions(parent=self)
        interface = aws.ec2.NetworkInterface(
            f"{name}-address",
            description=f"Slurm's controller {name}",
            subnet_id=subnet_id,
            security_groups=list(security_group_ids),
            tags=plan.tags,
            opts=ours,
        )
        zone = aws.get_availability_zone_output(zone_id=plan.zone_id, opts=pulumi.InvokeOutputOptions(parent=self))
        volume = aws.ebs.Volume(
            f"{name}-state",
            availability_zone=zone.name,
            type="gp3",
            size=plan.state_gib,
            encrypted=True,
            tags={**plan.tags, "Name": f"{name}-state"},
            opts=pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True),
        )
        secret = aws.secretsmanager.Secret(
            plan.secret,
            description=f"munge key of {name}, which makes it",
            recovery_window_in_days=RECOVERY_DAYS,
            opts=ours,
        )
        self.address, self.interface_id = interface.private_ip, interface.id
        self.volume_id = volume.id
        self.ids = pulumi.Output.all(self.address, secret.arn, volume.id).apply(lambda made: SlurmIds(*made))
        self.register_outputs({"address": self.address, "volume_id": self.volume_id, "munge_secret": secret.arn})


class Controller(pulumi.ComponentResource):
    """The instance. Whatever it boots with makes it anew: interface and volume move over, jobs run on meanwhile."""

    instance_id: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        plan: ControllerPlan,
        state: ControllerState,
        *,
        image: FoundImage,
        instance_profile_arn: pulumi.Output[str],
        user_data: pulumi.Output[str],
        depends_on: Sequence[pulumi.Resource] = (),
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("lustrain:infra:Controller", name, None, opts)
        kept = [] if plan.image.id else ["ami"]
        instance = aws.ec2.Instance(
            f"{name}-instance",
            ami=image.id,
            instance_type=plan.group.ec2_type,
            key_name=plan.key_name,
            iam_instance_profile=instance_profile_arn.apply(lambda arn: arn.rpartition("/")[2]),
            # The newer `primary_network_interface` is unknown to provider 5, which the tests' engine has.
            network_interfaces=[
                aws.ec2.InstanceNetworkInterfaceArgs(device_index=0, network_interface_id=state.interface_id)
            ],
            metadata_options=aws.ec2.InstanceMetadataOptionsArgs(
                http_endpoint="enabled",
                http_tokens="required",
                http_put_response_hop_limit=HOP_LIMIT,
                instance_metadata_tags="enabled",
            ),
            root_block_device=aws.ec2.InstanceRootBlockDeviceArgs(
                volume_type="gp3",
                volume_size=plan.group.root_volume_gib,
                encrypted=True,
                delete_on_termination=True,
                tags=plan.tags,
            ),
            user_data_base64=user_data.apply(encoded),
            user_data_replace_on_change=True,
            tags=plan.tags,
            # The interface and the volume are on one instance at a time.
            opts=pulumi.ResourceOptions(
                parent=self, depends_on=list(depends_on), ignore_changes=kept, delete_before_replace=True
            ),
        )
        aws.ec2.VolumeAttachment(
            f"{name}-state",
            device_name=STATE_DEVICE,
            instance_id=instance.id,
            volume_id=state.volume_id,
            # A stopped machine has unmounted it.
            stop_instance_before_detaching=True,
            opts=pulumi.ResourceOptions(parent=self, delete_before_replace=True),
        )
        self.instance_id = instance.id
        self.register_outputs({"instance_id": self.instance_id})
