"""EC2: what the image of a type lacks, and whether the first boot can fetch it."""

from __future__ import annotations

from collections.abc import Iterator

from infra.catalog.instances import Instance
from infra.config import ClusterSpec, Group
from infra.finding import finding
from infra.plan.nodes.gang import CANONICAL, image
from infra.preflight.rule import Context, Family, Problems, known_groups, listed

IMAGES = "https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html"
EFA_INSTALLER = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html#efa-start-enable"
EFA_DRIVER = "EFA's driver"
RULES = Family()


@RULES.add(
    "EC2-021",
    "In a closed network the image has all that a node needs: its first boot reaches no package repository.",
    IMAGES,
)
def closed_image(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, family, lacks in _lacking(spec):
        if spec.network.closed:
            message = (
                f"the default image of {group.ec2_type} ({family}) lacks {listed(lacks)}, which a closed network "
                "cannot fetch"
            )
            fix = f"name an image that has {'them' if len(lacks) > 1 else 'it'}, or remove network.closed"
            yield finding(f"{path}.image_id", message, fix)


@RULES.add(
    "EC2-022",
    "The image of a type with EFA has its driver: the first boot does not install it.",
    EFA_INSTALLER,
    level="warning",
)
def image_without_efa(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, family, lacks in _lacking(spec):
        if EFA_DRIVER in lacks and not spec.network.closed:
            message = (
                f"the default image of {group.ec2_type} ({family}) lacks {EFA_DRIVER}: jobs and Lustre go over TCP, "
                "and node-verify fails"
            )
            yield finding(f"{path}.image_id", message, "name an image that AWS's EFA installer ran on")


def _lacking(spec: ClusterSpec) -> Iterator[tuple[str, Group, str, list[str]]]:
    """Path, group, kind of image and what that lacks, for each worker group on EC2 that has a default image."""
    if spec.backend != "ec2":
        return
    for path, group, facts in known_groups(spec):
        if group.role == "worker" and not group.image_id and facts.architecture in CANONICAL:
            family = image(group, facts).family.partition("-")[0]
            if lacks := list(_lacks(spec, facts, family)):
                yield path, group, family, lacks


def _lacks(spec: ClusterSpec, facts: Instance, family: str) -> Iterator[str]:
    """By `infra.plan.nodes.gang.IMAGES`; in an open network first_boot.sh fetches all of it but EFA's driver."""
    if family == "ubuntu":
        yield "the AWS CLI"
        if facts.efa:
            yield EFA_DRIVER
        if spec.storage.home:
            yield "the NFS client"
    if family != "nvidia" and spec.storage.lustre:
        yield "the Lustre client"
