"""What a destroyed stack leaves behind, and how to remove that."""

from __future__ import annotations

from infra.config import ClusterSpec
from infra.plan.capacity import bought
from infra.plan.place import Place, bucket_names


def teardown(spec: ClusterSpec, place: Place) -> tuple[str, ...]:
    """Lines to read before `pulumi destroy`: it stops at what holds data or money, which is protected."""
    names = bucket_names(spec, place)
    own = [
        name
        for name, existing in (
            (names.data, spec.buckets.data),
            (names.checkpoints, spec.buckets.checkpoints),
            (names.lifecycle, spec.buckets.lifecycle),
        )
        if not existing
    ]
    lines = [
        "Take the nodes and all that costs by the hour down: pulumi destroy --exclude-protected",
        "What stays holds data or money, and the network under it; each costs until it is removed by hand:",
        *(f"  bucket {name}: aws s3 rb s3://{name} --force" for name in own),
    ]
    if spec.storage.lustre and not spec.storage.lustre.existing:
        lines.append("  FSx for Lustre: aws fsx delete-file-system --file-system-id $(pulumi stack output fileSystem)")
    if spec.storage.home:
        lines.append(
            "  FSx for OpenZFS: aws fsx delete-file-system --file-system-id $(pulumi stack output homeFileSystem) "
            "--open-zfs-configuration SkipFinalBackup=true,Options=DELETE_CHILD_VOLUMES_AND_SNAPSHOTS"
        )
    for purchase in bought(spec):
        end = "cannot be ended early" if purchase.offering else "aws ec2 cancel-capacity-reservation"
        lines.append(f"  capacity of group {purchase.group}: {end}")
    lines += [
        "Then forget what is gone and remove the rest: pulumi refresh, pulumi state unprotect --all, pulumi destroy",
        "A VPC that will not go may hold GuardDuty's own endpoint and security group: aws ec2 describe-vpc-endpoints "
        "--filters Name=tag:GuardDutyManaged,Values=true",
    ]
    return tuple(lines)
