"""Lookups in AWS before anything is declared: a refusal stops the update in one line."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi_aws as aws

from infra.plan.nodes.gang import Image
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
