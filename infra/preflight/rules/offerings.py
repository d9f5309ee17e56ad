"""What AWS offers where, by dated lists: zones, instance types in them, HyperPod, control planes.

A list that is older than AWS's last opening must not block a user for good: every error here can be suppressed, what may
have been opened since is a warning, and what a list does not hold is not judged. `--online` has the last word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from infra.catalog.botocore_data import regions
from infra.catalog.offerings import missing_in, offerings
from infra.catalog.regions import (
    HYPERPOD,
    HYPERPOD_SOURCE,
    WITHOUT_EKS,
    WITHOUT_EKS_SOURCE,
    ZONES,
    ZONES_DATE,
    ZONES_SOURCE,
)
from infra.config import ClusterSpec, Group
from infra.finding import Problems, finding
from infra.preflight.rule import Context, Family, group_types, groups, listed
from infra.preflight.rules.network import elsewhere, named_zones

OFFERED = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypeOfferings.html"
FEW = 5
"""Regions that a fix names at most."""
_AVAILABILITY_ZONE = re.compile(r"[a-z]+\d-az\d+")
"""And no Local Zone (`use1-bos1-az1`), of which there is no list."""
RULES = Family()


@RULES.add("NET-020", "The region has the zones that are named.", ZONES_SOURCE)
def zone_of_list(spec: ClusterSpec, context: Context) -> Problems:
    zones = ZONES.get(context.region or "", ())
    for path, zone in _zones(spec):
        wrong = _AVAILABILITY_ZONE.fullmatch(zone) and not elsewhere(zone, context.region) and zone not in zones
        if zones and wrong:
            message = f"{context.region} has no zone {zone} by AWS's list of {ZONES_DATE}"
            yield finding(
                path,
                message,
                f"choose one of {listed(zones)}, or suppress this rule if the zone is newer than this list",
            )


@RULES.add(
    "EC2-020", "The zone offers the instance type, where that has EFA or accelerators.", OFFERED, level="warning"
)
def type_in_zone(spec: ClusterSpec, context: Context) -> Problems:
    for kind in group_types(spec):
        group, mine = kind.group, spec.zone_of(kind.group)
        others = missing_in(group.ec2_type, mine) if kind.facts else None
        if others is None or _has_bought_machines(group, spec):
            continue
        near = [zone for zone in sorted(others) if _prefix(zone) == _prefix(mine)]
        message = f"{group.ec2_type} was not offered in {mine}"
        message += f" on {offerings().date}" if near else f", nor elsewhere in its region, on {offerings().date}"
        fix = f"take {' or '.join(near)}" if near else f"take a region that had it, such as {_regions(others)}"
        yield finding(kind.key, message, f"{fix}, or ask AWS: fab preflight --online")


@RULES.add("HYP-020", "The region has HyperPod.", HYPERPOD_SOURCE)
def hyper_pod_in_region(spec: ClusterSpec, context: Context) -> Problems:
    known = context.region in regions() and context.partition == "aws"
    if spec.hyperpod and known and context.region not in HYPERPOD:
        message = f"HyperPod is not offered in {context.region} by AWS's list of {ZONES_DATE}"
        fix = f"take {' or '.join(sorted(HYPERPOD))}, or backend: ec2, or suppress this if it is offered now"
        yield finding("backend", message, fix)


@RULES.add("EKS-021", "The control plane has no subnet in a zone where EKS takes none.", WITHOUT_EKS_SOURCE)
def control_plane_zone(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "hyperpod-eks" or spec.network.existing:
        return
    for path, zone in (("zone_id", spec.zone_id), ("network.second_zone_id", spec.network.second_zone_id)):
        if zone in WITHOUT_EKS:
            yield finding(path, f"EKS makes no control plane with a subnet in {zone}", "take another zone")


def _zones(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield every zone id that a spec names, those of bought capacity too, with its path."""
    yield from named_zones(spec)
    for path, group in groups(spec):
        if group.capacity.zone_id:
            yield f"{path}.capacity.zone_id", group.capacity.zone_id


def _has_bought_machines(group: Group, spec: ClusterSpec) -> bool:
    """Whether the user has bought machines of the group in the zone, and knows better than a list."""
    has = group.capacity
    return bool(has.reservation or has.training_plan) and has.zone_id == spec.zone_of(group)


def _prefix(zone_id: str) -> str:
    return zone_id.rpartition("-az")[0]


def _regions(zones: Iterable[str]) -> str:
    prefixes = {_prefix(zone) for zone in zones}
    regions = [region for region, there in ZONES.items() if _prefix(there[0]) in prefixes]
    return listed(regions[:FEW])
