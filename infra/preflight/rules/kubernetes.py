"""EKS: the control plane's subnets, its version, labels and taints of nodes, and who gets in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date
from ipaddress import IPv4Network

from infra.catalog.kubernetes import (
    CALENDAR,
    DATE,
    HYPERPOD,
    NEWEST,
    NOTICE,
    VERSIONS,
    newer_than,
)
from infra.catalog.kubernetes import Version as Known
from infra.catalog.prices import ANYWHERE, HOURS_A_MONTH, prices
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.network.security import ipv4_block, too_wide
from infra.plan.network.vpc import PRIVATE
from infra.plan.nodes.eks import CSI_ROLE, LOGS_ROLE, METRICS_ROLE, OPERATOR_ROLE, needed_addons, pod_identities
from infra.plan.nodes.hyperpod import filled_by_karpenter
from infra.preflight.rule import Context, Family, groups, known_groups

VPC = "https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html"
NODE_LABELS = "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterKubernetesConfig.html"
ACCESS = "https://docs.aws.amazon.com/eks/latest/userguide/access-entries.html"
ROOT_DISK = "https://github.com/awslabs/awsome-distributed-ai/issues/187"
ROOT_DISK_GB = 100
"""Of a HyperPod node, whatever the group asks for (ROOT_DISK)."""
MOST = 50
"""Labels, and taints, of one HyperPod group (NODE_LABELS)."""
RESERVED = ("kubernetes.io", "k8s.io", "sagemaker.amazonaws.com")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
ENDPOINT = "https://docs.aws.amazon.com/eks/latest/userguide/config-cluster-endpoint.html"
NODE_CLASS = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-autoscaling-nodeclass.html"
OPERATOR = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator.html"
CIDRS = "eks.public_access_cidrs"
MINE = "name your own: `curl https://checkip.amazonaws.com` prints the address, add /32"
MOST_CIDRS = 40
"""Ranges of one cluster (https://docs.aws.amazon.com/eks/latest/userguide/service-quotas.html)."""
NOT_PUBLIC = (*PRIVATE, *map(IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")))
"""Not on the internet. EKS says that a range "can't include reserved addresses" (ENDPOINT) and does not list
them."""
DOCUMENTATION = tuple(map(IPv4Network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")))
"""RFC 5737: for examples, such as ours."""
OPERATOR_VERSIONS = ("1.28", "1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35")
"""Kubernetes versions that the training operator's v1.2.1 is the default add-on on, in October 2026
(https://github.com/awslabs/awsome-distributed-ai/pull/1076)."""
RULES = Family()


def _makes_plane(spec: ClusterSpec) -> bool:
    """Return whether the stack makes a control plane."""
    return spec.backend == "hyperpod-eks" and spec.eks.existing is None


@RULES.add("EKS-001", "The control plane has subnets in two zones.", VPC)
def two_zones(spec: ClusterSpec, context: Context) -> Problems:
    if not _makes_plane(spec):
        return
    existing = spec.network.existing
    if existing is None and spec.network.second_zone_id is None:
        message = "EKS needs subnets in two zones, there is one"
        yield finding("network.second_zone_id", message, "name another zone id of the region")
    if existing is not None and len(set(existing.control_subnet_ids)) < 2:
        count = len(set(existing.control_subnet_ids))
        message = f"{count} subnets for the control plane; EKS needs two, in different zones"
        yield finding("network.existing.control_subnet_ids", message, "list two or more")


@RULES.add("EKS-002", "The second zone differs from the first.", VPC)
def other_zone(spec: ClusterSpec, context: Context) -> Problems:
    if spec.network.second_zone_id == spec.zone_id:
        message = f"{spec.zone_id} is the cluster's own zone"
        yield finding("network.second_zone_id", message, "name another zone id of the region")


@RULES.add("EKS-003", "HyperPod supports the Kubernetes version.", HYPERPOD)
def version(spec: ClusterSpec, context: Context) -> Problems:
    taken = [item.name for item in VERSIONS.values() if item.hyperpod]
    if _makes_plane(spec) and spec.eks.version not in taken:
        message = f"HyperPod's page of {DATE[:4]} names {taken[0]} to {taken[-1]}, not {spec.eks.version}"
        older = int(spec.eks.version[2:]) < int(taken[0][2:])
        fix = f"set {NEWEST}" if older else f"set {NEWEST}, or suppress this when HyperPod takes it now"
        yield finding("eks.version", message, fix)


@RULES.add(
    "EKS-004",
    "Labels are ones that Kubernetes takes: prefix/name, 63 characters, at most 50, no reserved prefix.",
    NODE_LABELS,
)
def labels(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if len(group.labels) > MOST:
            yield finding(f"{path}.labels", f"{len(group.labels)} labels; HyperPod takes {MOST}", "drop some")
        for key, value in group.labels.items():
            for why in _wrong(key, value):
                yield finding(f"{path}.labels.{key}", why, "change it to a form like example.com/role: worker")


@RULES.add("EKS-005", "Taints are ones that Kubernetes takes, at most 50, each key with each effect once.", NODE_LABELS)
def taints(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if len(group.taints) > MOST:
            yield finding(f"{path}.taints", f"{len(group.taints)} taints; HyperPod takes {MOST}", "drop some")
        for (key, effect), count in Counter((taint.key, taint.effect) for taint in group.taints).items():
            if count > 1:
                yield finding(f"{path}.taints", f"{key} with {effect} stands {count} times", "keep one")
        for index, taint in enumerate(group.taints):
            for why in _wrong(taint.key, taint.value):
                yield finding(f"{path}.taints.{index}", why, "change it to a form like example.com/spot")


@RULES.add(
    "EKS-006",
    "Some group has no taint that keeps pods off: CoreDNS and operators must run somewhere.",
    "https://docs.aws.amazon.com/eks/latest/userguide/managing-coredns.html",
    level="warning",
)
def all_tainted(spec: ClusterSpec, context: Context) -> Problems:
    hard = [[taint for taint in group.taints if taint.effect != "PreferNoSchedule"] for group in spec.groups]
    if _makes_plane(spec) and all(hard):
        message = "every group has a taint: CoreDNS, device plugins and operators stay pending"
        yield finding("groups", message, "add a small group without taints, e.g. two m5.2xlarge")


@RULES.add("EKS-007", "Some role besides the deployer's administers the cluster.", ACCESS, level="warning")
def administrators(spec: ClusterSpec, context: Context) -> Problems:
    if _makes_plane(spec) and not spec.access.admin_roles:
        message = "only the role that runs `pulumi up` can reach the cluster with kubectl"
        yield finding("access.admin_roles", message, "list the roles of your administrators")


@RULES.add(
    "EKS-009",
    "Some group is not spot, so that an interruption does not take CoreDNS and the operators as well.",
    "https://docs.aws.amazon.com/eks/latest/userguide/managing-coredns.html",
    level="warning",
)
def only_spot(spec: ClusterSpec, context: Context) -> Problems:
    if _makes_plane(spec) and all(group.capacity.mode == "spot" for group in spec.groups):
        message = "every group is spot: one interruption may take the cluster's own services"
        yield finding("groups", message, "add a small on-demand group, e.g. two m5.2xlarge")


@RULES.add(
    "EKS-010", "The Kubernetes version is in support: in extended support only with upgrade_policy EXTENDED.", CALENDAR
)
def in_support(spec: ClusterSpec, context: Context) -> Problems:
    for known, today in _dated(spec, context):
        if today >= known.extended_ends:
            message = (
                f"all support of {known.name} ended on {known.extended_ends}: EKS makes no new control plane of it, "
                "and upgrades existing ones by itself"
            )
            yield finding("eks.version", message, _newer(known, today))
        elif today >= known.standard_ends and spec.eks.upgrade_policy == "STANDARD":
            message = (
                f"standard support of {known.name} ended on {known.standard_ends}: with upgrade_policy STANDARD EKS "
                "upgrades the control plane by itself, and no update goes back"
            )
            fix = f"{_newer(known, today)}, or upgrade_policy: EXTENDED ({_price()}, until {known.extended_ends})"
            yield finding("eks.version", message, fix)


@RULES.add(
    "EKS-020",
    f"The Kubernetes version is in standard support, for {NOTICE.days} days at least.",
    CALENDAR,
    level="warning",
)
def support_ends(spec: ClusterSpec, context: Context) -> Problems:
    for known, today in _dated(spec, context):
        extended = spec.eks.upgrade_policy == "EXTENDED"
        left = (known.standard_ends - today).days
        if 0 < left <= NOTICE.days:
            then = f"the control plane then costs {_price()}"
            message = f"standard support of {known.name} ends on {known.standard_ends}, in {left} days: "
            message += then if extended else "EKS then upgrades the control plane by itself"
            yield finding("eks.version", message, _newer(known, today))
        elif left <= 0 and extended and today < known.extended_ends:
            message = (
                f"standard support of {known.name} ended on {known.standard_ends}: the control plane costs {_price()}, "
                f"until EKS upgrades it on {known.extended_ends}"
            )
            yield finding("eks.version", message, _newer(known, today))


def _price() -> str:
    standard, extended = (prices()[f"eks-{support}", ANYWHERE].usd_hour for support in ("standard", "extended"))
    more = (extended - standard) * HOURS_A_MONTH
    return f"{extended:.2f} USD an hour, not {standard:.2f}: {more:.0f} USD a month more"


def _dated(spec: ClusterSpec, context: Context) -> Iterator[tuple[Known, date]]:
    """Yield the version and today in UTC, where both are known."""
    known = VERSIONS.get(spec.eks.version)
    if _makes_plane(spec) and known and context.now:
        yield known, context.now.astimezone(UTC).date()


def _newer(known: Known, today: date) -> str:
    newer = newer_than(known.name, today)
    return f"set {newer}" if newer else "set a newer one when HyperPod takes it (EKS-003 knows none)"


@RULES.add(
    "EKS-022",
    "Images and pods of a node without instance store have more room on the group's volume than on the root disk.",
    ROOT_DISK,
    level="warning",
)
def small_volume(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        if spec.backend == "hyperpod-eks" and not facts.nvme_count and group.root_volume_gib <= ROOT_DISK_GB:
            message = (
                f"{group.root_volume_gib} GiB for images, pods and /scratch, as {group.ec2_type} has no instance store: "
                f"no more than the root disk of {ROOT_DISK_GB} GB, which they fill"
            )
            yield finding(f"{path}.root_volume_gib", message, "set 500, the default, or more")


def _wrong(key: str, value: str) -> Iterator[str]:
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not _PREFIX.fullmatch(prefix)):
        yield f"{key!r} is not a key that Kubernetes takes"
    if value and not _NAME.fullmatch(value):
        yield f"{value!r} is not a value that Kubernetes takes: up to 63 letters, digits, and - _ . inside"
    if any(prefix == item or prefix.endswith(f".{item}") for item in RESERVED):
        yield f"the prefix {prefix}/ belongs to Kubernetes or AWS"


@RULES.add(
    "EKS-008",
    "Ranges that reach the Kubernetes API are ones that EKS takes: IPv4, on the internet, at most 40.",
    ENDPOINT,
    essential=True,
)
def public_ranges(spec: ClusterSpec, context: Context) -> Problems:
    count = len({text for _, text in _public_ranges(spec)})
    if count > MOST_CIDRS:
        yield finding(CIDRS, f"{count} ranges; EKS takes {MOST_CIDRS}", "join neighbours, or drop some")
    for path, text in _public_ranges(spec):
        block = ipv4_block(text)
        if block is None and (whole := ipv4_block(text, strict=False)):
            message = f"{text} has an address inside the range, not the range's first"
            yield finding(path, message, f"write {whole}, or /32 for the one address")
        elif block is None:
            message = f"{text!r} is not an IPv4 range: an address, a slash, and how many of its bits count"
            yield finding(path, message, "write it like 198.51.100.7/32 or 198.51.100.0/24")
        elif not too_wide(block) and (other := next(filter(block.overlaps, NOT_PUBLIC), None)):
            message = f"{text} holds addresses of {other}, which are not on the internet: EKS refuses it"
            yield finding(path, message, MINE)


@RULES.add("EKS-030", "The Kubernetes API does not answer the whole internet.", ENDPOINT)
def world(spec: ClusterSpec, context: Context) -> Problems:
    for path, text in _public_ranges(spec):
        if (block := ipv4_block(text)) and too_wide(block):
            yield finding(path, f"the Kubernetes API would answer {block.num_addresses:,} addresses", MINE)


@RULES.add(
    "EKS-031",
    "No range of documentation is left among those that reach the Kubernetes API.",
    "https://www.rfc-editor.org/rfc/rfc5737",
    level="warning",
)
def example(spec: ClusterSpec, context: Context) -> Problems:
    for path, text in _public_ranges(spec):
        if (block := ipv4_block(text)) and any(block.subnet_of(item) for item in DOCUMENTATION):
            yield finding(path, f"{text} is an example's range: helm and kubectl would get no answer", MINE)


@RULES.add(
    "EKS-032",
    "In a VPC that the stack makes, some range reaches the Kubernetes API: helm must run before the first node.",
    ENDPOINT,
    level="warning",
)
def no_way_in(spec: ClusterSpec, context: Context) -> Problems:
    if _makes_plane(spec) and spec.network.existing is None and not spec.eks.public_access_cidrs:
        message = (
            "the Kubernetes API cannot be reached from outside the VPC, and inside no machine runs yet to start helm on"
        )
        yield finding(CIDRS, message, f"{MINE}; or bring a VPN or a machine into the VPC before the second `up`")


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
    if _makes_plane(spec) and not any(group.count for group in spec.groups):
        message = "every group has count: 0: CoreDNS has no node, and `pulumi up` waits an hour for it and fails"
        yield finding("groups", message, "add a small group that stays, e.g. two m5.2xlarge")


@RULES.add(
    "EKS-035",
    "A group for Karpenter (count: 0) is on-demand, without deep health checks: it fills no other.",
    NODE_CLASS,
)
def not_for_karpenter(spec: ClusterSpec, context: Context) -> Problems:
    for index, group in enumerate(spec.groups):
        if not filled_by_karpenter(spec, group):
            continue
        if group.deep_health_checks:
            message = "Karpenter does not support deep health checks"
            yield finding(f"groups.{index}.deep_health_checks", message, "remove the key")
        if group.capacity.mode != "on-demand":
            message = f"Karpenter fills on-demand capacity only, not {group.capacity.mode}"
            yield finding(f"groups.{index}.capacity.mode", message, "a count above 0, or on-demand")


@RULES.add("EKS-034", "The training operator's add-on is known for the Kubernetes version.", OPERATOR, level="warning")
def operator_version(spec: ClusterSpec, context: Context) -> Problems:
    if _makes_plane(spec) and spec.eks.training_operator and spec.eks.version not in OPERATOR_VERSIONS:
        message = f"the add-on is known for {OPERATOR_VERSIONS[0]} to {OPERATOR_VERSIONS[-1]}, not {spec.eks.version}"
        look = "aws eks describe-addon-versions --addon-name amazon-sagemaker-hyperpod-training-operator"
        yield finding("eks.training_operator", message, f"ask: {look} --kubernetes-version {spec.eks.version}")


@RULES.add(
    "EKS-040",
    "An existing EKS cluster comes with the network that it is in: nodes are in subnets of the cluster's VPC.",
    VPC,
    essential=True,
)
def network_of_existing(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend == "hyperpod-eks" and spec.eks.existing and spec.network.existing is None:
        message = f"the stack would make a new VPC, in which EKS cluster {spec.eks_name} is not"
        yield finding("network.existing", message, "set vpc_id and compute_subnet_id to those of the EKS cluster's VPC")


OF_CONTROL_PLANE = ("version", "upgrade_policy", "public_access_cidrs", "cluster_role")
"""Keys of `eks` that shape a control plane."""


@RULES.add(
    "EKS-041",
    "Beside an existing EKS cluster no key shapes a control plane: the stack leaves it as it is.",
    "infra/config.py",
)
def keys_beside_existing(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "hyperpod-eks" or spec.eks.existing is None:
        return
    written = spec.eks.model_fields_set
    paths = [f"eks.{key}" for key in OF_CONTROL_PLANE if key in written and getattr(spec.eks, key) not in (None, ())]
    if spec.network.existing and spec.network.existing.control_subnet_ids:
        paths.append("network.existing.control_subnet_ids")
    for path in paths:
        message = f"has no effect: EKS cluster {spec.eks_name} is there already and is not changed"
        yield finding(path, message, "remove it")


@RULES.add(
    "EKS-042",
    "Roles and add-ons of `eks` are ones that the cluster uses.",
    "infra/config.py",
    level="warning",
)
def unused_parts(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "hyperpod-eks":
        return
    existing, pods = spec.eks.existing, {identity.role for identity in pod_identities(spec)}
    used = {
        "storage_role": CSI_ROLE in pods,
        "operator_role": OPERATOR_ROLE in pods,
        "logs_role": LOGS_ROLE in pods,
        "metrics_role": METRICS_ROLE in pods,
        "karpenter_role": spec.eks.karpenter,
    }
    for key, is_used in used.items():
        if getattr(spec.eks, key) and not is_used:
            yield finding(f"eks.{key}", "has no effect: the stack brings nothing that has this role", "remove it")
    needed = [addon.name for addon in needed_addons(spec)]
    for index, name in enumerate(existing.addons if existing else ()):
        if name not in needed:
            yield finding(f"eks.existing.addons.{index}", f"has no effect: nothing here needs {name}", "remove it")


def _public_ranges(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """With its path in the config; another backend has no Kubernetes API (CFG-007 says so)."""
    for index, text in enumerate(spec.eks.public_access_cidrs if spec.backend == "hyperpod-eks" else ()):
        yield f"{CIDRS}.{index}", text
