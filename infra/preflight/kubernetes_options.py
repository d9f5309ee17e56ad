"""EKS: who reaches the Kubernetes API from outside the VPC, and what Karpenter and the add-ons of HyperPod need."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from infra.config import ClusterSpec
from infra.finding import finding
from infra.plan.network.security import WORLD
from infra.plan.network.vpc import PRIVATE
from infra.preflight.rule import Context, Family, Problems

ENDPOINT = "https://docs.aws.amazon.com/eks/latest/userguide/config-cluster-endpoint.html"
NODE_CLASS = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-autoscaling-nodeclass.html"
OPERATOR = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator.html"
KEY = "eks.public_access_cidrs"
MINE = "name your own: `curl https://checkip.amazonaws.com` prints the address, add /32"
MOST_CIDRS = 40
"""Ranges of one cluster (https://docs.aws.amazon.com/eks/latest/userguide/service-quotas.html)."""
RESERVED = (*PRIVATE, *map(IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")))
"""Nobody on the internet has these. EKS says that a range "can't include reserved addresses" (ENDPOINT) and does not list
them."""
DOCUMENTATION = tuple(map(IPv4Network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")))
"""RFC 5737: for examples, such as ours."""
OPERATOR_VERSIONS = ("1.28", "1.29", "1.30", "1.31", "1.32", "1.33")
"""Kubernetes versions that the training operator's page names (OPERATOR), as it was in 2026."""
RULES = Family()


@RULES.add(
    "EKS-008",
    "Ranges that reach the Kubernetes API are ones that EKS takes: IPv4, on the internet, at most 40.",
    ENDPOINT,
    essential=True,
)
def public_ranges(spec: ClusterSpec, context: Context) -> Problems:
    count = len({text for _, text in _each(spec)})
    if count > MOST_CIDRS:
        yield finding(KEY, f"{count} ranges; EKS takes {MOST_CIDRS}", "join neighbours, or drop some")
    for path, text in _each(spec):
        block = _block(text)
        if block is None and (whole := _block(text, strict=False)):
            message = f"{text} has an address inside the range, not the range's first"
            yield finding(path, message, f"write {whole}, or /32 for the one address")
        elif block is None:
            message = f"{text!r} is not an IPv4 range: an address, a slash, and how many of its bits count"
            yield finding(path, message, "write it like 198.51.100.7/32 or 198.51.100.0/24")
        elif not _world(block) and (other := next(filter(block.overlaps, RESERVED), None)):
            message = f"{text} holds addresses of {other}, which nobody has on the internet: EKS refuses it"
            yield finding(path, message, MINE)


@RULES.add("EKS-030", "The Kubernetes API does not answer the whole internet.", ENDPOINT)
def world(spec: ClusterSpec, context: Context) -> Problems:
    for path, text in _each(spec):
        if (block := _block(text)) and _world(block):
            yield finding(path, f"the Kubernetes API would answer {block.num_addresses:,} addresses", MINE)


@RULES.add(
    "EKS-031",
    "No range of documentation is left among those that reach the Kubernetes API.",
    "https://www.rfc-editor.org/rfc/rfc5737",
    level="warning",
)
def example(spec: ClusterSpec, context: Context) -> Problems:
    for path, text in _each(spec):
        if (block := _block(text)) and any(block.subnet_of(one) for one in DOCUMENTATION):
            yield finding(path, f"{text} is an example's range: helm and kubectl would get no answer", MINE)


@RULES.add(
    "EKS-032",
    "In a VPC that the stack makes, some range reaches the Kubernetes API: helm must run before the first node.",
    ENDPOINT,
    level="warning",
)
def no_way_in(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend == "hyperpod-eks" and spec.network.existing is None and not spec.eks.public_access_cidrs:
        message = "nobody outside the VPC reaches the Kubernetes API, and nothing is in it yet to run helm"
        yield finding(KEY, message, f"{MINE}; or bring a VPN or a machine into the VPC before the second `up`")


@RULES.add(
    "EKS-033",
    "With Karpenter some group starts at 0 machines, for it to fill, and some group has machines for CoreDNS.",
    NODE_CLASS,
    level="warning",
)
def karpenter_groups(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "hyperpod-eks" or not spec.eks.karpenter:
        return
    if all(group.count for group in spec.groups):
        message = "no group has count: 0: Karpenter empties those that it is given before it fills them"
        yield finding("eks.karpenter", message, "set count: 0 for the groups that its NodeClass will name")
    if not any(group.count for group in spec.groups):
        message = "every group has count: 0: CoreDNS has no node, and `pulumi up` waits an hour for it and fails"
        yield finding("groups", message, "add a small group that stays, e.g. two m5.2xlarge")


@RULES.add("EKS-034", "The training operator's page names the Kubernetes version.", OPERATOR, level="warning")
def operator_version(spec: ClusterSpec, context: Context) -> Problems:
    wanted = spec.eks.training_operator and spec.backend == "hyperpod-eks"
    if wanted and spec.eks.version not in OPERATOR_VERSIONS:
        message = f"the page names {OPERATOR_VERSIONS[0]} to {OPERATOR_VERSIONS[-1]}, not {spec.eks.version}"
        look = "aws eks describe-addon-versions --addon-name amazon-sagemaker-hyperpod-training-operator"
        yield finding("eks.training_operator", message, f"ask: {look} --kubernetes-version {spec.eks.version}")


def _each(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """With its path in the config; another backend has no Kubernetes API (CFG-007 says so)."""
    for index, text in enumerate(spec.eks.public_access_cidrs if spec.backend == "hyperpod-eks" else ()):
        yield f"{KEY}.{index}", text


def _block(text: str, *, strict: bool = True) -> IPv4Network | None:
    try:
        return IPv4Network(text, strict=strict) if "/" in text else None
    except ValueError:
        return None


def _world(block: IPv4Network) -> bool:
    return block.prefixlen < WORLD[4]
