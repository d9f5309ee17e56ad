"""Slurm's controller on EC2: an instance that may be made anew, and what outlives it: address, state, and the munge key.

A group of Auto Scaling would give its successor another address, and slurm.conf names one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infra.config import ClusterSpec
from infra.plan.nodes.machine import MachinePlan, machine_image
from infra.plan.place import tags
from node_setup.slurm.accounting import Database
from node_setup.slurm.dynamic import Records

RECOVERY_DAYS = 7
"""How long a deleted munge key can be brought back: Secrets Manager's least."""


@dataclass(frozen=True)
class ControllerPlan(MachinePlan):
    """The machine, and the munge key."""

    secret: str
    """What the name of the munge key's secret begins with; Pulumi adds digits, since a deleted name stays taken."""


def controller(spec: ClusterSpec) -> ControllerPlan | None:
    """Return the plan of the controller, None without a scheduler; UserError for a type that is not known or runs no Linux."""
    group = spec.controller
    if group is None or spec.scheduler is None:
        return None
    return ControllerPlan(
        name=host(spec),
        group=group,
        zone_id=spec.zone_id,
        image=machine_image(spec, group),
        root_gib=group.root_volume_gib,
        data_gib=spec.scheduler.controller.state_gib,
        key_name=spec.access.ssh_key,
        tags={**tags(spec), "Name": host(spec), "lustrain:group": group.name},
        secret=secret_name(spec),
    )


def host(spec: ClusterSpec) -> str:
    """Return the controller's host name, which slurm.conf names too."""
    return f"{spec.name}-controller"


def secret_name(spec: ClusterSpec) -> str:
    return f"{spec.name}-munge"


def accounting_secret(spec: ClusterSpec) -> str | None:
    """Return the ARN of the secret with the login of the database for Slurm's records; None where there is none elsewhere."""
    accounting = spec.scheduler.accounting if spec.controller and spec.scheduler else None
    return accounting.database.secret_arn if accounting and accounting.database else None


def records(spec: ClusterSpec) -> Records | None:
    """Return what the controller keeps of jobs, and where; None without accounting."""
    accounting = spec.scheduler.accounting if spec.scheduler else None
    if accounting is None:
        return None
    if (where := accounting.database) is None:
        return Records(accounting.keep_months)
    name = where.name or f"slurm_{re.sub('[^a-z0-9]', '_', spec.name.lower())}"
    return Records(accounting.keep_months, Database(where.endpoint, where.port, name, where.secret_arn))
