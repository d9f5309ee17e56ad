"""Buckets that nodes mount with Mountpoint for Amazon S3: the systemd units, the rights of the nodes' role, and the checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from infra.config import ClusterSpec, S3Mount
from infra.finding import finding
from infra.plan.documents import Statement, allow
from infra.plan.place import Place, bucket_names, runs_uri
from infra.plan.storage.associations import as_prefix, nested, s3_uri
from infra.plan.storage.mounts import mount_problem
from lustrain.problem import Problem

DOCS = "https://github.com/awslabs/mountpoint-s3/blob/main/doc"
SEMANTICS = f"{DOCS}/SEMANTICS.md"
OWN = ("data", "checkpoints")
"""Words for the cluster's own buckets."""
PLACEHOLDERS = {name: f"{{{name}_bucket}}" for name in OWN}
"""Stand in a unit for the names of the cluster's buckets, which hold the account's number."""
READ = ("s3:GetObject",)
WRITE = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:DeleteObject")
"""What writing and deleting files takes (DOCS/CONFIGURATION.md#iam-permissions)."""


@dataclass(frozen=True)
class S3MountPlan:
    """`prefix` has a slash at its end, or is empty for a whole bucket."""

    path: str
    bucket: str
    prefix: str
    region: str
    read_only: bool
    kms_key: str | None

    @property
    def uri(self) -> str:
        return s3_uri(self.bucket, self.prefix)


def s3_mounts(spec: ClusterSpec, place: Place) -> tuple[S3MountPlan, ...]:
    """In the order of the configuration, `data` and `checkpoints` resolved to the cluster's buckets."""
    own = bucket_names(spec, place).by_word
    return tuple(
        S3MountPlan(
            path=one.path,
            bucket=own.get(one.bucket, one.bucket),
            prefix=as_prefix(one.prefix),
            region=one.region or place.region,
            read_only=one.read_only,
            kms_key=one.kms_key,
        )
        for one in spec.storage.s3_mounts
    )


def unit_name(path: str) -> str:
    return f"lustrain-s3{path.replace('-', '--').replace('/', '-')}.service"


def unit(config: S3Mount, region: str, proxy_file: str) -> str:
    """Return the unit of one mount, with a placeholder for a bucket of the cluster's.

    `Type=forking` as DOCS/CONFIGURATION.md has it: mount-s3 goes into the background once the bucket is mounted. Files belong
    to root; where they may be written, every user of the node may, since the role is the node's and not a user's.
    Every option is in Mountpoint since 1.0, as images bring older ones. Only another region's bucket gets the company's proxy:
    ours is reached without it, and clients before 1.20 ignore no_proxy
    (https://github.com/awslabs/mountpoint-s3/issues/322).
    """
    prefix, options = as_prefix(config.prefix), ["--allow-other"]
    elsewhere = f"EnvironmentFile=-/{proxy_file}\n" if config.region and config.region != region else ""
    if region := config.region or region:
        options += ["--region", region]
    if prefix:
        options += [f"--prefix={prefix}"]
    options += ["--read-only"] if config.read_only else ["--allow-delete", "--dir-mode 0777", "--file-mode 0666"]
    bucket = PLACEHOLDERS.get(config.bucket, config.bucket)
    return f"""[Unit]
Description=Mountpoint for Amazon S3 at {config.path}
Documentation={DOCS}/CONFIGURATION.md
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=forking
{elsewhere}ExecStartPre=/bin/mkdir -p {config.path}
ExecStart=/usr/bin/env mount-s3 {bucket} {config.path} {" ".join(options)}
ExecStop=/bin/umount {config.path}
# A client that was killed leaves a mount on which every access fails.
ExecStopPost=-/bin/umount --lazy {config.path}
Restart=on-failure
RestartSec=10

[Install]
WantedBy=remote-fs.target
"""


def statements(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Yield the rights of the nodes' role at what is mounted; it may read all of the data bucket without them."""
    plans = s3_mounts(spec, place)
    read = [plan for plan in plans if plan.bucket != bucket_names(spec, place).data]
    for number, bucket in enumerate(dict.fromkeys(plan.bucket for plan in read)):
        prefixes = {plan.prefix for plan in read if plan.bucket == bucket}
        # The prefix itself too: a listing without a trailing star asks for exactly it.
        under = sorted(text for prefix in prefixes for text in (prefix, f"{prefix}*"))
        condition = None if "" in prefixes else {"StringLike": {"s3:prefix": under}}
        yield allow(f"MountsList{number}", ["s3:ListBucket"], place.bucket_arn(bucket), condition)
    if read:
        yield allow("MountsRead", READ, [_objects(place, plan) for plan in read])
    if written := [plan for plan in plans if not plan.read_only]:
        yield allow("MountsWrite", WRITE, [_objects(place, plan) for plan in written])


def _objects(place: Place, plan: S3MountPlan) -> str:
    return place.bucket_arn(plan.bucket, f"{plan.prefix}*")


def violations(spec: ClusterSpec, place: Place) -> Iterator[Problem]:
    """Yield mounts that would not work, hide something, or write where they must not."""
    plans = s3_mounts(spec, place)
    for index, (config, plan) in enumerate(zip(spec.storage.s3_mounts, plans, strict=True)):
        here = f"storage.s3_mounts.{index}"
        yield from _paths(spec, here, plan)
        if not plan.read_only and nested(plan.uri, runs := runs_uri(spec, place)):
            message = f"{plan.uri} holds runs ({runs}), which a process on any node could then damage"
            fix = "set read_only: true, or mount another prefix"
            yield finding(f"{here}.read_only", message, fix, code="S3-013")
        if config.region and config.bucket in OWN:
            message = "the cluster's own buckets are in the cluster's region"
            yield finding(f"{here}.region", message, "remove the key", code="S3-014")
        elif spec.network.closed and plan.region != place.region:
            message = f"a closed network reaches S3 of its own region only, and {plan.region} is another"
            yield finding(f"{here}.region", message, "copy the data to a bucket here", code="S3-014")
        if config.kms_key and config.bucket in OWN:
            message = "the cluster's own buckets have buckets.kms_key"
            yield finding(f"{here}.kms_key", message, "remove the key", code="S3-014")
    for (first, one), (second, other) in combinations(enumerate(plans), 2):
        if nested(one.path, other.path):
            message = f"{other.path} and storage.s3_mounts.{first}.path ({one.path}) lie inside one another"
            fix = "mount them side by side"
            yield finding(f"storage.s3_mounts.{second}.path", message, fix, code="S3-011")


def _paths(spec: ClusterSpec, here: str, plan: S3MountPlan) -> Iterator[Problem]:
    others = {"/opt/dlami/nvme": "the local NVMe"}
    if spec.storage.lustre:
        others[spec.storage.lustre.mount_path] = "storage.lustre.mount_path"
    if spec.storage.home:
        others[spec.storage.home.mount_path] = "storage.home.mount_path"
    why = mount_problem(plan.path)
    beside = [f"{path} ({owner})" for path, owner in others.items() if nested(path, plan.path)]
    if not why and beside:
        why = f"and {beside[0]} lie inside one another"
    if why:
        yield finding(f"{here}.path", f"{plan.path} {why}", "mount it at a path like /s3/data", code="S3-011")
