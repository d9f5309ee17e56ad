"""CFG: the region that a stack names, without which nothing about its place can be judged."""

from __future__ import annotations

from difflib import get_close_matches

from infra.catalog.botocore_data import botocore_version, regions
from infra.config import ClusterSpec
from infra.finding import finding
from infra.preflight.rule import Context, Family, Problems

PATH = "aws:region"
SOURCE = "https://docs.aws.amazon.com/global-infrastructure/latest/regions/aws-regions.html"
RULES = Family()


@RULES.add("CFG-012", "The region is one that AWS has.", SOURCE)
def region_there(spec: ClusterSpec, context: Context) -> Problems:
    if context.region is not None and context.region not in regions():
        close = get_close_matches(context.region, sorted(regions()), 1)
        meant = close[0] if close else "one like us-east-1"
        message = f"there is no region {context.region} in the list of botocore {botocore_version()}"
        yield finding(PATH, message, f"write {meant}, or suppress this where the region is new")


@RULES.add(
    "CFG-013",
    "The stack names its region: without it the rules about zones, partitions and names are silent.",
    SOURCE,
    level="warning",
)
def region_named(spec: ClusterSpec, context: Context) -> Problems:
    if context.region is None:
        message = "is missing: nothing that depends on the region was checked"
        yield finding(PATH, message, "set it in Pulumi.<stack>.yaml, or set AWS_REGION")
