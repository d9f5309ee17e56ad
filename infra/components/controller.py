"""Slurm's controller: what outlives its instance, and the instance."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_aws as aws

from infra.components.auto_scaling import FoundImage
from infra.components.machine import data_volume, instance
from infra.plan.nodes.controller import RECOVERY_DAYS, ControllerPlan
from infra.plan.nodes.user_data import SlurmIds


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
    ) -> None:
        super().__init__("lustrain:infra:ControllerState", name)
        ours = pulumi.ResourceOptions(parent=self)
        interface = aws.ec2.NetworkInterface(
            f"{name}-address",
            description=f"Slurm's controller {name}",
            subnet_id=subnet_id,
            security_groups=list(security_group_ids),
            tags=plan.tags,
            opts=ours,
        )
        volume = data_volume(f"{name}-state", plan, self)
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
    ) -> None:
        super().__init__("lustrain:infra:Controller", name)
        # The newer `primary_network_interface` is unknown to provider 5, which the tests' engine has.
        interface = aws.ec2.InstanceNetworkInterfaceArgs(device_index=0, network_interface_id=state.interface_id)
        made = instance(
            name,
            plan,
            self,
            image_id=image.id,
            instance_profile_arn=instance_profile_arn,
            user_data=user_data,
            volume=(f"{name}-state", state.volume_id),
            network={"network_interfaces": [interface]},
            depends_on=depends_on,
        )
        self.instance_id = made.id
        self.register_outputs({"instance_id": self.instance_id})
