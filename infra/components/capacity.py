"""Capacity that the deployment reserves: billed whether it is used or not, so nothing ends it by accident."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.plan.capacity import PLATFORM, ReservationPlan


class Reservation(pulumi.ComponentResource):
    """An on-demand capacity reservation; it is protected, and a destroy leaves it as it is."""

    reservation_id: pulumi.Output[str]

    def __init__(self, name: str, plan: ReservationPlan, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("lustrain:infra:Reservation", name, None, opts)
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
