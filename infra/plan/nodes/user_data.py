"""The first boot of an EC2 node: the cluster's facts in front of `boot_steps.sh` and `first_boot.sh`.

Mounts and settings only, and no secrets: everyone who may read the node's metadata reads this. Values that exist only after
the deployment (names of file systems, the bundle's place) come in as text, so that a component can wait for them.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.config import LOGIN, ClusterSpec, Group
from infra.plan.nodes.clients import lustre_interfaces, module_options
from infra.plan.nodes.controller import host
from infra.plan.nodes.document import node_document
from infra.plan.nodes.proxy import environment
from infra.plan.place import Place, runs_uri
from infra.plan.storage.home import nfs_mount
from lustrain.problem import UserError, problem

STEPS = Path(__file__).with_name("boot_steps.sh")
"""What all machines do at their first boot, before `BODY` of the one or the other."""
BODY = Path(__file__).with_name("first_boot.sh")
MAX_BYTES = 16 * 1024
"""EC2's limit before base64 (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html); ours is on the base64."""


DUTIES = {"controller": "controller", "worker": "compute", "login": "client"}
"""What a node does for Slurm, by the role of its group."""


@dataclass(frozen=True)
class SlurmIds:
    """What AWS gave the parts of Slurm's controller that outlive its instance."""

    address: str
    munge_secret: str
    state_volume: str


def facts(
    spec: ClusterSpec,
    place: Place,
    group: Group,
    *,
    queue_url: str = "",
    lustre: bool,
    home: bool,
    slurm: SlurmIds | None = None,
) -> dict[str, Any]:
    """Return the description of a node and its cluster that is written to /etc/lustrain/node.json."""
    kind = spec.node_of(group)
    config = spec.storage.lustre
    return {
        "cluster": spec.name,
        "backend": spec.backend,
        "region": place.region,
        "zone_id": spec.zone_of(group),
        "group": group.name,
        "instance_type": group.ec2_type,
        "efa": kind.efa if kind else 0,
        "accelerators": kind.accelerator_count if kind else 0,
        "capacity": group.capacity.mode,
        # Of what computes: with another end the controller would be made anew.
        "ends_at": spec.ends_at.isoformat() if spec.ends_at and group.role == "worker" else None,
        "runs_uri": runs_uri(spec, place),
        "lustre": config.mount_path if lustre and config else None,
        "home": spec.storage.home.mount_path if home and spec.storage.home else None,
        # A login's role may not read it.
        "interruption_queue": (queue_url or None) if group.role != LOGIN else None,
        "slurm": _slurm(spec, group, slurm) if slurm else None,
    }


def _slurm(spec: ClusterSpec, group: Group, ids: SlurmIds) -> dict[str, Any]:
    return {
        "duty": DUTIES[group.role],
        "host": host(spec),
        "address": ids.address,
        "munge_secret": ids.munge_secret,
        "state_volume": ids.state_volume if group.role == "controller" else None,
    }


def user_data(
    spec: ClusterSpec,
    place: Place,
    group: Group,
    *,
    lustre_dns: str = "",
    lustre_mount_name: str = "",
    home_dns: str = "",
    bundle_uri: str = "",
    queue_url: str = "",
    slurm: SlurmIds | None = None,
) -> str:
    """Return the script as text; what is empty is left out of the boot, and homes need the bundle. UserError when EC2 would not
    take it."""
    config = spec.storage.lustre
    home = nfs_mount(spec.storage.home) if spec.storage.home and home_dns else None
    options = module_options(spec, group, node_document(spec, group)) if lustre_dns else ""
    known = facts(spec, place, group, queue_url=queue_url, lustre=bool(lustre_dns), home=bool(home_dns), slurm=slurm)
    head = [
        "#!/bin/bash",
        f"# First boot of a node of cluster {spec.name}, group {group.name}; written by Lustrain.",
        "set -euo pipefail",
        # Without it some versions of the CLI ask S3 in us-east-1, which a closed network does not reach.
        f"export AWS_REGION={shlex.quote(place.region)} AWS_DEFAULT_REGION={shlex.quote(place.region)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment(spec, place.region).items()),
        f"cluster={shlex.quote(spec.name)}",
        f"facts={shlex.quote(json.dumps(known, indent=1))}",
        f"lustre_dns={shlex.quote(lustre_dns)}",
        f"lustre_mount={shlex.quote(lustre_mount_name)}",
        f"lustre_path={shlex.quote(config.mount_path if config else '')}",
        f"lustre_efa={lustre_interfaces(spec, group)}",
        f"lustre_options={shlex.quote(options)}",
        f"home_source={shlex.quote(f'{home_dns}:{home.export}' if home else '')}",
        f"home_path={shlex.quote(home.path if home else '')}",
        f"home_options={shlex.quote(home.options if home else '')}",
        f"bundle_uri={shlex.quote(bundle_uri)}",
    ]
    return first_boot(head, BODY)


def encoded(text: str) -> str:
    """User data as a launch template wants it."""
    return base64.b64encode(text.encode("ascii")).decode("ascii")


def first_boot(head: Iterable[str], body: Path) -> str:
    """Return the script of a first boot: the cluster's facts, the steps of every machine, the body of this kind of machine.
    UserError where EC2 would not take it."""
    text = "\n".join([*head, "", STEPS.read_text(encoding="ascii"), body.read_text(encoding="ascii")])
    if not text.isascii():
        odd = next(character for character in text if not character.isascii())
        raise UserError(problem("user data", odd, "must be ASCII: cloud-init takes other text in another form only"))
    if (size := len(encoded(text))) > MAX_BYTES:
        fix = "carry what is large in the lifecycle bundle"
        raise UserError(problem("user data", size, "too many bytes", allowed=f"<= {MAX_BYTES}", fix=fix))
    return text
