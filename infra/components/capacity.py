"""Capacity that the deployment reserves: billed whether it is used or not, so nothing ends it by accident."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.plan.capacity import PLATFORM, Purchase


class BoughtCapacity(pulumi.ComponentResource):
    """An on-demand capacity reservation; it is protected, and a destroy leaves it as it is."""

    reservation_id: pulumi.Output[str]

    def __init__(self, name: str, purchase: Purchase, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("lustrain:infra:BoughtCapacity", name, None, opts)
        keep = pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True)
        zone = aws.get_availability_zone_output(zone_id=purchase.zone_id, opts=pulumi.InvokeOutputOptions(parent=self))
        reservation = aws.ec2.CapacityReservation(
            f"{name}-reservation",
            availability_zone=zone.name,
            instance_type=purchase.instance_type,
            instance_platform=PLATFORM,
            instance_count=purchase.count,
            instance_match_criteria="targeted",
            end_date_type=purchase.end_type,
            end_date=purchase.ends_at,
            opts=keep,
        )
        self.reservation_id = reservation.id
        self.register_outputs({"reservation_id": self.reservation_id})
