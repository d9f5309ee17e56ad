"""The monitor of a cluster: the machine, what it boots with, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi

from infra.components.auto_scaling import FoundImage
from infra.components.bundle import LifecycleBundle
from infra.components.machine import data_volume, instance
from infra.components.workspace import Workspace
from infra.plan.stack import Plan
from infra.plan.watch.machine import WORKSPACE_URL, MonitorPlan, forwarding, user_data


class Monitor(pulumi.ComponentResource):
    """The instance, its bundle, and the volume of what is kept, which is protected and outlives the stack.

    `pages` are the commands that bring what people look at to their own machine.
    """

    instance_id: pulumi.Output[str]
    volume_id: pulumi.Output[str]
    pages: dict[str, pulumi.Output[str]]

    def __init__(
        self,
        plan: MonitorPlan,
        stack: Plan,
        *,
        image: FoundImage,
        subnet_id: pulumi.Input[str],
        security_group_ids: Sequence[pulumi.Input[str]],
        instance_profile_arn: pulumi.Output[str],
        lifecycle_bucket: pulumi.Input[str],
        workspace: Workspace | None,
        depends_on: Sequence[pulumi.Resource] = (),
    ) -> None:
        name = plan.name
        super().__init__("lustrain:infra:Monitor", name)
        later = {WORKSPACE_URL: workspace.endpoint} if workspace else {}
        bundle = LifecycleBundle(
            name, plan.bundle, lifecycle_bucket, later=later, opts=pulumi.ResourceOptions(parent=self)
        )
        volume = data_volume(f"{name}-data", plan, self)
        script = pulumi.Output.all(bundle.uri, volume.id).apply(
            lambda known: user_data(stack.spec, stack.place, bundle_uri=known[0], volume_id=known[1])
        )
        made = instance(
            name,
            plan,
            self,
            image_id=image.id,
            instance_profile_arn=instance_profile_arn,
            user_data=script,
            volume=(f"{name}-data", volume.id),
            network={"subnet_id": subnet_id, "vpc_security_group_ids": list(security_group_ids)},
            depends_on=[bundle, *depends_on],
        )
        self.instance_id, self.volume_id = made.id, volume.id
        region = stack.place.region
        self.pages = {
            page: made.id.apply(lambda id_, port=port: forwarding(id_, port, region))  # type: ignore[misc]
            for page, port in plan.pages.items()
        }
        self.register_outputs({"instance_id": self.instance_id, "volume_id": self.volume_id})
