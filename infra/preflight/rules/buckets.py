"""S3: buckets' names, and where runs go."""

from __future__ import annotations

import re
from collections.abc import Iterator

from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.storage.associations import nested
from infra.plan.storage.buckets import violations
from infra.plan.storage.s3_mounts import DOCS, OWN, SEMANTICS
from infra.plan.storage.s3_mounts import violations as mount_violations
from infra.preflight.rule import Context, Family, named_images

NAMES = "https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"
LIFECYCLE_BUCKET = "https://docs.aws.amazon.com/sagemaker/latest/dg/security-iam-awsmanpol-AmazonSageMakerClusterInstanceRolePolicy.html"
PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
SUFFIXES = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
"""Reserved by S3 (NAMES)."""
KEYS = ("data", "checkpoints", "lifecycle")
"""Of the section `buckets`; each names a bucket that exists, or the stack makes one."""
RULES = Family()


def name_problem(name: str) -> str:
    """Why S3 takes no bucket of this name; empty where it does."""
    if not 3 <= len(name) <= 63:
        return f"has {len(name)} characters; allowed: 3 to 63"
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*[a-z0-9]", name) or ".." in name:
        return "is not a bucket name; allowed: small letters, digits, - and single dots, a letter or digit at both ends"
    if re.fullmatch(r"\d+\.\d+\.\d+\.\d+", name):
        return "looks like an IP address"
    reserved = [one for one in PREFIXES if name.startswith(one)] + [one for one in SUFFIXES if name.endswith(one)]
    return f"holds {reserved[0]}, which S3 keeps for itself" if reserved else ""


@RULES.add("S3-001", "Buckets have names that S3 takes, those that follow from the cluster's name too.", NAMES)
def bucket_name(spec: ClusterSpec, context: Context) -> Problems:
    for path, name in _named(spec, context):
        if why := name_problem(name):
            yield finding(path, f"{name!r} {why}", "shorten or change it")


@RULES.add(
    "S3-002",
    "HyperPod's lifecycle bucket is called sagemaker-…: its managed policy reads no other.",
    LIFECYCLE_BUCKET,
    judgement=True,
)
def lifecycle_bucket(spec: ClusterSpec, context: Context) -> Problems:
    name = spec.buckets.lifecycle
    if spec.hyperpod and name and not name.startswith("sagemaker-"):
        message = f"{name!r} does not begin with sagemaker-, so that nodes may not read their scripts"
        yield finding("buckets.lifecycle", message, "remove it and one is made, or name another bucket")


@RULES.add(
    "S3-003", "Data, checkpoints and lifecycle are different buckets.", "infra/plan/storage/buckets.py", level="warning"
)
def one_bucket_twice(spec: ClusterSpec, context: Context) -> Problems:
    given = [(key, getattr(spec.buckets, key)) for key in KEYS]
    for index, (key, name) in enumerate(given):
        for other, same in given[:index]:
            if name and name == same:
                message = f"{name} is {other} too: their rules and permissions then meet in one bucket"
                yield finding(f"buckets.{key}", message, "name different buckets, or leave them out")


@RULES.add(
    "S3-004",
    "runs_uri is s3://bucket/prefix/ with a slash at the end, or a folder.",
    "infra/plan/place.py",
    essential=True,
)
def runs_form(spec: ClusterSpec, context: Context) -> Problems:
    uri = spec.runs_uri
    if uri is None or re.fullmatch(r"s3://[^/\s]+/([^/\s]+/)*|(/[^/\s]+)+/?", uri):
        return
    yield finding("runs_uri", f"{uri!r} is neither", "write it like s3://my-bucket/runs/ or /fsx/runs")


@RULES.add("S3-005", "A runs folder lies on a file system that every node sees.", "lustrain/cluster.py")
def runs_folder(spec: ClusterSpec, context: Context) -> Problems:
    uri = spec.runs_uri or ""
    if not uri.startswith("/"):
        return
    mounts = [one.mount_path for one in (spec.storage.lustre, spec.storage.home) if one]
    if not any(nested(uri, mount) and len(uri) >= len(mount) for mount in mounts):
        seen = ", ".join(mounts) or "none"
        message = f"{uri} is on each node's own disk; shared here: {seen}"
        if any(nested(uri, mount.path) for mount in spec.storage.s3_mounts):
            message = (
                f"{uri} is on a mounted bucket, where no file can be renamed, as saving does; file systems: {seen}"
            )
        yield finding("runs_uri", message, "choose a folder below one of them, or s3://…")


@RULES.add(
    "S3-006",
    "Runs go to a bucket of the cluster, whose rules and permissions are the cluster's.",
    "infra/plan/place.py",
    level="warning",
)
def runs_elsewhere(spec: ClusterSpec, context: Context) -> Problems:
    uri = spec.runs_uri or ""
    bucket = uri.removeprefix("s3://").partition("/")[0]
    names = context.plan.bucket_names
    if uri.startswith("s3://") and bucket not in (names.data, names.checkpoints):
        message = f"{bucket} is none of the cluster's buckets: who may write there and what expires is not known here"
        yield finding("runs_uri", message, f"set buckets.checkpoints: {bucket}, and buckets.runs_prefix")


@RULES.add(
    "S3-007",
    "Runs do not lie where a lifecycle rule deletes or archives objects.",
    "https://docs.aws.amazon.com/AmazonS3/latest/userguide/intro-lifecycle-rules.html",
    judgement=True,
)
def runs_expire(spec: ClusterSpec, context: Context) -> Problems:
    return violations(spec, context.place)


@RULES.add("S3-008", "Bucket names have no dots: S3's certificate does not cover them.", NAMES, level="warning")
def dots(spec: ClusterSpec, context: Context) -> Problems:
    for path, name in _named(spec, context):
        if "." in name and not name_problem(name):
            message = f"{name}: a name with dots does not match S3's certificate, and FSx and SDKs fall back or fail"
            yield finding(path, message, "use a bucket without dots")


@RULES.add(
    "S3-009",
    "Runs do not lie under a prefix that is imported into Lustre as data.",
    "https://docs.aws.amazon.com/fsx/latest/LustreGuide/autoimport-data-repo-dra.html",
    level="warning",
)
def runs_in_data(spec: ClusterSpec, context: Context) -> Problems:
    uri = context.plan.runs_uri
    for index, one in enumerate(context.plan.associations):
        if one.import_events and not one.export_events and nested(one.uri, uri):
            message = f"each checkpoint under {uri} becomes a file of {one.path} as well"
            yield finding(f"storage.lustre.associations.{index}.prefix", message, "import another prefix")


@RULES.add(
    "S3-010",
    "Nodes mount buckets on ec2 and hyperpod-slurm; on EKS pods do, by the CSI driver.",
    "https://docs.aws.amazon.com/eks/latest/userguide/s3-csi.html",
    judgement=True,
)
def mounts_of_pods(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend == "hyperpod-eks" and spec.storage.s3_mounts:
        message = "pods would not see what nodes mount"
        fix = "remove it, add EKS's add-on aws-mountpoint-s3-csi-driver, and name the bucket in a PersistentVolume"
        yield finding("storage.s3_mounts", message, fix)


@RULES.add(
    "S3-011",
    "A bucket is mounted beside other mounts, and hides none of the system's folders.",
    SEMANTICS,
    judgement=True,
)
@RULES.add("S3-013", "No mount may write where runs are.", SEMANTICS, judgement=True)
@RULES.add(
    "S3-014", "Keys of a mount are those that its bucket takes, and its region can be reached.", DOCS, judgement=True
)
def bucket_mounts(spec: ClusterSpec, context: Context) -> Problems:
    return mount_violations(spec, context.place)


@RULES.add(
    "S3-012",
    "In a closed network, images bring Mountpoint themselves: nodes would download it from s3.amazonaws.com.",
    "https://docs.aws.amazon.com/AmazonS3/latest/userguide/mountpoint-installation.html",
    judgement=True,
)
def no_mountpoint(spec: ClusterSpec, context: Context) -> Problems:
    if not (spec.network.closed and spec.storage.s3_mounts):
        return
    for path, image_id in named_images(spec).items():
        if image_id is None:
            message = "the default image has no mount-s3, and a closed network nothing to download it from"
            yield finding(path, message, "name an image with mount-s3 in it, or remove storage.s3_mounts")


def _named(spec: ClusterSpec, context: Context) -> Iterator[tuple[str, str]]:
    """Yield every bucket's name with the key that it comes from."""
    for key in KEYS:
        if getattr(spec.buckets, key) is None:
            yield "name", getattr(context.plan.bucket_names, key)
    yield from existing_buckets(spec)
    for index, name in enumerate(spec.network.s3_buckets):
        yield f"network.s3_buckets.{index}", name


def existing_buckets(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield the buckets that the stack does not make and has to find, with their keys."""
    for key in KEYS:
        if name := getattr(spec.buckets, key):
            yield f"buckets.{key}", name
    for index, link in enumerate(spec.storage.lustre.associations if spec.storage.lustre else ()):
        if link.bucket not in ("data", "checkpoints"):
            yield f"storage.lustre.associations.{index}.bucket", link.bucket
    for index, mount in enumerate(spec.storage.s3_mounts):
        if mount.bucket not in OWN:
            yield f"storage.s3_mounts.{index}.bucket", mount.bucket
    if spec.runs_uri and spec.runs_uri.startswith("s3://"):
        yield "runs_uri", spec.runs_uri.removeprefix("s3://").partition("/")[0]
