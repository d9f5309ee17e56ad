"""The place of a cluster: region, account and partition, and the names that follow from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from infra.catalog.botocore_data import partitions
from infra.config import ClusterSpec


def partition_of(region: str) -> str:
    return next((name for name, known in partitions().items() if known.regions.fullmatch(region)), "aws")


def dns_suffix(partition: str) -> str:
    """Return what hosts of AWS's services end in."""
    known = partitions().get(partition)
    return known.dns_suffix if known else "amazonaws.com"


@dataclass(frozen=True)
class Host:
    """A name under a service's own: of fs-1.fsx.us-east-1.amazonaws.com `fs-1` in us-east-1."""

    name: str
    region: str


def host(text: str, service: str) -> Host | None:
    """Return what a host name of `service` says; None for one that AWS has not, such as a region's under another's suffix."""
    found = re.fullmatch(rf"([^.]+)\.{re.escape(service)}\.([a-z0-9-]+)\.(.+)", text)
    return Host(found[1], found[2]) if found and found[3] == dns_suffix(partition_of(found[2])) else None


class Arn(NamedTuple):
    """The parts of `arn:partition:service:region:account:resource`; a resource may hold colons, and IAM has no region.

    Parts that a text lacks are empty: preflight reads keys that are no whole ARN too, and other rules say so.
    """

    partition: str
    service: str
    region: str
    account: str
    resource: str

    @classmethod
    def parse(cls, text: str) -> Arn:
        _, *parts = text.split(":", 5)
        return cls(*parts, *[""] * (len(cls._fields) - len(parts)))


PRIVATE_RANGES = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
"""RFC 1918's, and RFC 6598's, which a VPC may have too (https://docs.aws.amazon.com/vpc/latest/userguide/vpc-cidr-blocks.html)."""
COST_TAG = "lustrain:cluster"
"""Says whose a resource is: the budget and the conditions of the roles go by it."""


@dataclass(frozen=True)
class Place:
    """`partition` is an id that botocore knows, like aws-us-gov; ARNs and service hosts never spell it out elsewhere."""

    region: str
    account: str
    partition: str = "aws"

    @property
    def dns_suffix(self) -> str:
        return dns_suffix(self.partition)

    def arn(self, service: str, resource: str, *, region: str | None = None, account: str | None = None) -> str:
        """Return an ARN here; pass an empty `region` or `account` for services whose ARNs have none (S3, IAM policies of
        AWS)."""
        where = self.region if region is None else region
        whose = self.account if account is None else account
        return f"arn:{self.partition}:{service}:{where}:{whose}:{resource}"

    def bucket_arn(self, bucket: str, key: str = "") -> str:
        return self.arn("s3", f"{bucket}/{key}" if key else bucket, region="", account="")

    def managed_policy(self, name: str) -> str:
        """ARN of a policy that AWS keeps, e.g. `AmazonSSMManagedInstanceCore`."""
        return self.arn("iam", f"policy/{name}", region="", account="aws")


@dataclass(frozen=True)
class BucketNames:
    """Physical names: those of the user, or ours with account and region in them, since S3 has one namespace."""

    data: str
    checkpoints: str
    lifecycle: str

    @property
    def by_word(self) -> dict[str, str]:
        """The buckets that other keys of a stack may name by a word, by that word."""
        return {"data": self.data, "checkpoints": self.checkpoints}


ANYWHERE = Place("us-east-1", "000000000000")
"""Where two specs or two versions of Lustrain are compared: an update never moves a stack to another region."""


def bucket_names(spec: ClusterSpec, place: Place) -> BucketNames:
    """HyperPod's managed policy reads lifecycle scripts from buckets named `sagemaker-…` only."""
    rest = f"{place.account}-{place.region}"
    return BucketNames(
        data=spec.buckets.data or f"{spec.name}-data-{rest}",
        checkpoints=spec.buckets.checkpoints or f"{spec.name}-checkpoints-{rest}",
        lifecycle=spec.buckets.lifecycle or f"sagemaker-{spec.name}-{rest}",
    )


def runs_uri(spec: ClusterSpec, place: Place) -> str:
    """Where runs go, with a slash at the end."""
    return spec.runs_uri or f"s3://{bucket_names(spec, place).checkpoints}/{spec.buckets.runs_prefix}"


def ours(spec: ClusterSpec) -> dict[str, dict[str, str]]:
    """Return the condition of a right at what carries the cluster's tag."""
    return {"StringEquals": {f"aws:ResourceTag/{COST_TAG}": spec.name}}


def tags(spec: ClusterSpec) -> dict[str, str]:
    """On everything that takes tags."""
    return {**spec.tags, COST_TAG: spec.name, "lustrain:backend": spec.backend}
