"""CFG: the region that a stack names, without which nothing about its place can be judged."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from infra.catalog.regions import REGIONS
from infra.config import ClusterSpec
from infra.preflight.finding import Finding
from infra.preflight.rule import Context, OfflineRule

PATH = "aws:region"
SOURCE = "https://docs.aws.amazon.com/global-infrastructure/latest/regions/aws-regions.html"


class RegionThere(OfflineRule):
    code = "CFG-012"
    checks = "The region is one that AWS has."
    source = SOURCE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if context.region is not None and context.region not in REGIONS:
            close = get_close_matches(context.region, sorted(REGIONS), 1)
            meant = close[0] if close else "one like us-east-1"
            message = f"there is no region {context.region} in the list of botocore 1.44.5"
            yield self.finding(PATH, message, f"write {meant}, or suppress this where the region is new")


class RegionNamed(OfflineRule):
    code = "CFG-013"
    level = "warning"
    checks = "The stack names its region: without it the rules about zones, partitions and names are silent."
    source = SOURCE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if context.region is None:
            message = "is missing: nothing that depends on the region was checked"
            yield self.finding(PATH, message, "set it in Pulumi.<stack>.yaml, or set AWS_REGION")


RULES = (RegionThere(), RegionNamed())
