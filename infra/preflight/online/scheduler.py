"""SLM 1xx: what AWS knows of the images of a cluster with a Slurm of its own."""

from __future__ import annotations

import re

from infra.aws import Aws, answered
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.preflight.online.storage import lets_in
from infra.preflight.rule import Context, Family, named_images

OLD_UBUNTU = re.compile(r"(?i)bionic|focal|jammy|ubuntu.*\b(18|20|22)\.04")
"""Their packages are of Slurm 17.11, 19.05 and 21.08 (https://launchpad.net/ubuntu/+source/slurm-wlm)."""
RULES = Family()


@RULES.add(
    "SLM-101",
    "Named images are not of an Ubuntu whose Slurm has no dynamic nodes: those came with 22.05.",
    "https://slurm.schedmd.com/dynamic_nodes.html",
    level="warning",
    permission="ec2:DescribeImages",
)
def old_slurm(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, image_id in named_images(spec).items() if spec.controller else ():
        if image_id is None:
            continue
        answer = answered("InvalidAMIID", aws.ec2.describe_images, ImageIds=[image_id])
        names = [image.get("Name", "") for image in answer["Images"]] if answer else []
        for name in filter(OLD_UBUNTU.search, names):
            message = f"{name} is of an Ubuntu whose own Slurm has no dynamic nodes"
            fix = "take one of Ubuntu 24.04, or suppress this if it has a newer Slurm of yours"
            yield finding(path, message, fix)


@RULES.add(
    "SLM-102",
    "The security group of the accounting database is of the nodes' VPC and lets them in at its port.",
    "https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/Overview.RDSSecurityGroups.html",
    permission="ec2:DescribeSecurityGroups",
)
def open_database(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    accounting = spec.scheduler.accounting if spec.controller and spec.scheduler else None
    if accounting and (database := accounting.database):
        path = "scheduler.accounting.database.security_group_id"
        yield from lets_in(spec, aws, path, database.security_group_id, [database.port])
