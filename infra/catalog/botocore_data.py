"""Lists of AWS's that botocore carries, read from its files: the package itself is not imported."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Partition(NamedTuple):
    """How its regions are named, and what hosts of its services end in."""

    regions: re.Pattern[str]
    dns_suffix: str


@cache
def partitions() -> Mapping[str, Partition]:
    """AWS's partitions by id (https://github.com/boto/botocore/blob/develop/botocore/data/partitions.json)."""
    partitions_data = json.loads((_data() / "partitions.json").read_bytes())["partitions"]
    return {
        item["id"]: Partition(re.compile(item["regionRegex"]), item["outputs"]["dnsSuffix"]) for item in partitions_data
    }


@cache
def regions() -> frozenset[str]:
    """Every region of AWS (https://github.com/boto/botocore/blob/develop/botocore/data/endpoints.json)."""
    found = json.loads((_data() / "endpoints.json").read_bytes())["partitions"]
    return frozenset(region for item in found for region in item["regions"])


@cache
def regions_with(service: str) -> frozenset[str]:
    """Regions with an endpoint of a service, by its prefix in endpoints.json: those that this botocore knows of."""
    found = json.loads((_data() / "endpoints.json").read_bytes())["partitions"]
    return frozenset(region for item in found for region in item["services"].get(service, {}).get("endpoints", {}))


@cache
def hyperpod_types() -> frozenset[str]:
    """Instance types that HyperPod clusters take, with their `ml.`, as SageMaker's API model lists them."""
    model = max((_data() / "sagemaker").iterdir()) / "service-2.json.gz"
    shapes: dict[str, Any] = json.loads(gzip.decompress(model.read_bytes()))["shapes"]
    return frozenset(shapes["ClusterInstanceType"]["enum"])


def botocore_version() -> str:
    return version("botocore")


def _data() -> Path:
    package = find_spec("botocore")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("botocore, which comes with boto3, is not installed")
    return Path(package.submodule_search_locations[0]) / "data"
