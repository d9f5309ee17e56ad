"""A HyperPod cluster, through Cloud Control: pulumi-aws has no resource of its own for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.plan.nodes.hyperpod import TYPE, create_only


class HyperPod(pulumi.ComponentResource):
    """A cluster with the state that `infra.plan.nodes.hyperpod.desired_state` gives; SSM targets and log groups name its `id`.

    The provider compares wishes with wishes: what the service adds (counts, status) is in `properties` and makes no
    difference. A changed name, subnet, security group or EKS cluster replaces the cluster, and the name is taken until the
    old one is gone: hence it goes first.
    """

    name: pulumi.Output[str]
    arn: pulumi.Output[str]
    id: pulumi.Output[str]
    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        desired_state: Mapping[str, Any],
        depends_on: Sequence[pulumi.Resource] = (),
        *,
        protect: bool = False,
    ) -> None:
        super().__init__("lustrain:infra:HyperPod", name)
        cluster = aws.cloudcontrol.Resource(
            f"{name}-cluster",
            type_name=TYPE,
            desired_state=pulumi.Output.json_dumps(desired_state, sort_keys=True),
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(depends_on),
                protect=protect,
                delete_before_replace=True,
                # The provider sees a create-only property changed as a whole, but not inside (a subnet of VpcConfig): it
                # would preview an update that the service refuses.
                replacement_trigger=pulumi.Output.json_dumps(create_only(desired_state), sort_keys=True),
                # HyperPod itself gives up on a group after three hours.
                custom_timeouts=pulumi.CustomTimeouts(create="4h", update="4h", delete="2h"),
            ),
        )
        # Cloud Control's identifier of a cluster is its ARN. `properties` has it too, but is unknown in the preview of every
        # change, and with it all that is built on it would be.
        self.arn = cluster.id
        self.id = self.arn.apply(lambda arn: arn.rpartition("/")[2])
        self.name = pulumi.Output.all(cluster.id, desired_state["ClusterName"]).apply(lambda values: str(values[1]))
        self.ready = [cluster]
        self.register_outputs({"name": self.name, "arn": self.arn, "id": self.id})
