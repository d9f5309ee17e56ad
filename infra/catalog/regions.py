"""The zones of AWS's regions, dated: one that is not among them is a typing error, or newer than this list."""

from __future__ import annotations

ZONES_SOURCE = "https://docs.aws.amazon.com/global-infrastructure/latest/regions/aws-availability-zones.html"
ZONES_DATE = "2026"
"""The year of the copy of ZONES_SOURCE that is here. It announces one more zone for us-east-1, in Maryland, without its id."""
_NUMBERS = {
    "af-south-1": "afs1 123",
    "ap-east-1": "ape1 123",
    "ap-east-2": "ape2 123",
    "ap-northeast-1": "apne1 1234",
    "ap-northeast-2": "apne2 1234",
    "ap-northeast-3": "apne3 123",
    "ap-south-1": "aps1 123",
    "ap-south-2": "aps2 123",
    "ap-southeast-1": "apse1 123",
    "ap-southeast-2": "apse2 123",
    "ap-southeast-3": "apse3 123",
    "ap-southeast-4": "apse4 123",
    "ap-southeast-5": "apse5 123",
    "ap-southeast-6": "apse6 123",
    "ap-southeast-7": "apse7 123",
    "ca-central-1": "cac1 1234",
    "ca-west-1": "caw1 123",
    "eu-central-1": "euc1 123",
    "eu-central-2": "euc2 123",
    "eu-north-1": "eun1 123",
    "eu-south-1": "eus1 123",
    "eu-south-2": "eus2 123",
    "eu-west-1": "euw1 1234",
    "eu-west-2": "euw2 1234",
    "eu-west-3": "euw3 123",
    "il-central-1": "ilc1 123",
    "me-central-1": "mec1 123",
    "me-south-1": "mes1 123",
    "mx-central-1": "mxc1 123",
    "sa-east-1": "sae1 123",
    "us-east-1": "use1 123456",
    "us-east-2": "use2 123",
    "us-west-1": "usw1 123",
    "us-west-2": "usw2 1234",
}
"""A zone id is the prefix, `-az` and one of the digits. The page leaves out two that old accounts may still have: cac1-az3
(WITHOUT_EKS_SOURCE) and euw1-az4 (https://docs.aws.amazon.com/vpc-lattice/latest/ug/quotas.html). China and GovCloud are
not on the page, and Local Zones on none."""
ZONES = {
    region: tuple(f"{prefix}-az{digit}" for digit in digits)
    for region, (prefix, digits) in ((region, text.split()) for region, text in _NUMBERS.items())
}
WITHOUT_EKS = frozenset({"use1-az3", "usw1-az2", "cac1-az3"})
"""Zones in which a control plane of EKS may have no subnet."""
WITHOUT_EKS_SOURCE = "https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html"
HYPERPOD = frozenset(
    [
        "ap-northeast-1",
        "ap-south-1",
        "ap-southeast-1",
        "ap-southeast-2",
        "ap-southeast-3",
        "ap-southeast-4",
        "eu-central-1",
        "eu-north-1",
        "eu-south-2",
        "eu-west-1",
        "eu-west-2",
        "sa-east-1",
        "us-east-1",
        "us-east-2",
        "us-west-1",
        "us-west-2",
    ]
)
"""Regions with HyperPod, as a copy of HYPERPOD_SOURCE from 2026 has them."""
HYPERPOD_SOURCE = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod.html"
