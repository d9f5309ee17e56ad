"""Networks: disjoint subnets of the size asked for, one way out or none, and enough addresses for all nodes."""

from __future__ import annotations

import re
from ipaddress import IPv4Network
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given

from infra.config import ClusterSpec, Network
from infra.plan.network.endpoints import aws_buckets, s3_policy
from infra.plan.network.vpc import NetworkPlan, addresses_needed, cidr_problems, network, usable
from infra.plan.place import Place, bucket_names
from lustrain.problem import UserError
from tests.infra.specs import ACCOUNT, AWS, CHINA, EXISTING, EXISTING_LUSTRE, GOVERNMENT, PLACES, spec_of, specs
from tests.infra.stacks import EXAMPLES, example, region_of


def subnets_of(plan: NetworkPlan) -> dict[str, str]:
    return {subnet.key: subnet.cidr for subnet in plan.subnets}


def ways(plan: NetworkPlan) -> dict[str, str]:
    """Where each subnet's traffic to elsewhere goes."""
    return {subnet: table.default for table in plan.route_tables for subnet in table.subnets}


def errors(spec: ClusterSpec) -> list[str]:
    return [found.path for found in cidr_problems(spec) if found.level == "error"]


@pytest.mark.parametrize("stack", EXAMPLES)
def test_every_example_has_its_nodes_in_one_private_subnet_with_room_for_all(stack: str) -> None:
    spec = example(stack)
    plan = network(spec, Place(region_of(stack), ACCOUNT))
    compute = next(subnet for subnet in plan.subnets if subnet.key == "compute")
    assert compute.zone_id == spec.zone_id
    assert ways(plan)["compute"] == ("none" if spec.network.closed else "nat")
    assert addresses_needed(spec) <= usable(compute.cidr)
    assert not list(cidr_problems(spec))


@given(specs())
def test_subnets_lie_inside_the_vpc_apart_from_each_other_and_compute_is_as_large_as_asked(spec: ClusterSpec) -> None:
    if errors(spec):
        with pytest.raises(UserError, match="network"):
            network(spec, AWS)
        return
    plan = network(spec, AWS)
    if plan.existing:
        assert plan == NetworkPlan("demo", existing=spec.network.existing)
        return
    blocks = {key: IPv4Network(cidr) for key, cidr in subnets_of(plan).items()}
    assert all(block.subnet_of(IPv4Network(plan.cidr)) for block in blocks.values())
    assert not any(one.overlaps(other) for one, other in combinations(blocks.values(), 2))
    assert all(block.prefixlen <= 28 for block in blocks.values())
    assert blocks["compute"].prefixlen == spec.network.compute_prefix
    assert set(ways(plan)) == set(blocks)


@given(specs())
def test_only_the_public_subnet_leads_to_the_internet_and_a_closed_network_nowhere(spec: ClusterSpec) -> None:
    if errors(spec) or spec.network.existing:
        return
    found = ways(network(spec, AWS))
    assert [key for key, way in found.items() if way == "internet"] == [key for key in found if key == "public"]
    out = spec.network.nat and not spec.network.closed
    assert ("public" in found) == out
    assert found["compute"] == ("nat" if out else "none")


def test_turning_nat_off_moves_no_subnet() -> None:
    on = subnets_of(network(spec_of("hyperpod-eks"), AWS))
    off = subnets_of(network(spec_of("hyperpod-eks", network={"nat": False}), AWS))
    assert off == {key: cidr for key, cidr in on.items() if key != "public"}


def test_a_group_in_another_zone_has_a_subnet_there_and_moves_none_of_the_others() -> None:
    def train(name: str, zone: str | None) -> dict[str, Any]:
        return {"name": name, "instance_type": "g6e.48xlarge", "count": 2, "zone_id": zone}

    alone = network(spec_of("hyperpod-eks"), AWS)
    groups = [train("a", None), train("b", "use2-az3")]
    two = network(spec_of("hyperpod-eks", groups=groups), AWS)
    three = network(spec_of("hyperpod-eks", groups=[*groups, train("c", "use2-az2"), train("d", "use2-az3")]), AWS)
    assert subnets_of(alone).items() < subnets_of(two).items() < subnets_of(three).items()
    zones = {one.key: one.zone_id for one in three.subnets if one.key.startswith("compute")}
    assert zones == {"compute": "use2-az1", "compute-use2-az3": "use2-az3", "compute-use2-az2": "use2-az2"}
    assert ways(three)["compute-use2-az3"] == "nat"


def test_addresses_are_counted_in_the_zone_where_they_are_taken() -> None:
    def group(name: str, count: int, zone: str | None = None) -> dict[str, Any]:
        return {"name": name, "instance_type": "p5.48xlarge", "count": count, "zone_id": zone}

    spec = spec_of("hyperpod-slurm", groups=[group("a", 1), group("b", 3, "use2-az3")], storage={"home": {}})
    assert (addresses_needed(spec) - 2, addresses_needed(spec, "use2-az3")) == (32, 96)


def test_the_control_plane_of_eks_gets_subnets_in_two_zones_with_the_addresses_it_wants() -> None:
    plan = network(spec_of("hyperpod-eks"), AWS)
    control = [subnet for subnet in plan.subnets if subnet.key.startswith("control-")]
    assert [subnet.zone_id for subnet in control] == ["use2-az1", "use2-az2"]
    assert all(usable(subnet.cidr) >= 16 for subnet in control)
    assert not [key for key in subnets_of(network(spec_of("hyperpod-slurm"), AWS)) if key.startswith("control-")]


@pytest.mark.parametrize("zone", [None, "use2-az1"])
def test_a_control_plane_in_one_zone_is_refused(zone: str | None) -> None:
    with pytest.raises(UserError, match=r"^network\.second_zone_id = .*two zones"):
        network(spec_of("hyperpod-eks", network={"second_zone_id": zone}), AWS)


@pytest.mark.parametrize(
    ("cidr", "prefix", "path"),
    [
        ("10.0.0.0/16", 18, None),
        ("10.0.0.0/24", 25, None),
        ("10.0.0.0/27", 28, None),
        ("10.0.0.0/15", 18, "network.cidr"),
        ("10.0.0.0/29", 28, "network.cidr"),
        ("10.0.0.1/16", 18, "network.cidr"),
        ("ten", 18, "network.cidr"),
        ("10.0.0.0/20", 18, "network.compute_prefix"),
        ("10.0.0.0/18", 18, "network.compute_prefix"),
    ],
)
def test_blocks_that_aws_refuses_or_that_do_not_fit_are_named(cidr: str, prefix: int, path: str | None) -> None:
    spec = spec_of(network={"cidr": cidr, "compute_prefix": prefix})
    assert errors(spec) == ([path] if path else [])


@pytest.mark.parametrize(
    ("cidr", "said"),
    [("172.16.0.0/16", ""), ("100.64.0.0/16", ""), ("11.0.0.0/16", "not a private range"), ("172.17.0.0/16", "Docker")],
)
def test_blocks_that_make_trouble_later_are_warned_of(cidr: str, said: str) -> None:
    found = list(cidr_problems(spec_of(network={"cidr": cidr})))
    assert [one.level for one in found] == (["warning"] if said else [])
    assert all(said in one.why for one in found)


@pytest.mark.slow
@given(specs())
def test_the_fix_for_a_compute_subnet_that_does_not_fit_is_the_largest_that_does(spec: ClusterSpec) -> None:
    found = [one for one in cidr_problems(spec) if one.path == "network.compute_prefix"]
    if not found:
        return

    def fits(prefix: int) -> bool:
        other = spec.model_copy(update={"network": spec.network.model_copy(update={"compute_prefix": prefix})})
        return not errors(other)

    advised = re.search(r"raise compute_prefix to (\d+)", found[0].fix)
    larger = range(spec.network.compute_prefix, int(advised[1]) if advised else 29)
    assert advised is None or fits(int(advised[1]))
    assert not any(fits(prefix) for prefix in larger)


def test_of_an_existing_network_only_the_compute_block_is_judged() -> None:
    existing = {"existing": EXISTING, "cidr": "nonsense"}
    assert not list(cidr_problems(spec_of(network=existing)))
    wrong = {"existing": {**EXISTING, "compute_cidr": "10.0.0.0/33"}}
    assert errors(spec_of(network=wrong)) == ["network.existing.compute_cidr"]


@pytest.mark.parametrize(("cidr", "count"), [("10.0.0.0/18", 16379), ("10.0.0.0/24", 251), ("10.0.0.0/28", 11)])
def test_aws_keeps_five_addresses_of_each_subnet(cidr: str, count: int) -> None:
    assert usable(cidr) == count


@pytest.mark.parametrize(
    ("backend", "kind", "policy", "each"),
    [
        ("ec2", "p5.48xlarge", "addresses", 1),
        ("ec2", "p5.48xlarge", "bandwidth", 8),
        ("ec2", "m5.2xlarge", "addresses", 1),
        ("hyperpod-slurm", "p5.48xlarge", "addresses", 32),
        ("hyperpod-slurm", "m5.2xlarge", "addresses", 1),
        ("hyperpod-eks", "p5.48xlarge", "addresses", 81),
        ("ec2", "x9.unknown", "addresses", 1),
    ],
)
def test_addresses_of_a_node_follow_its_interfaces(backend: str, kind: str, policy: str, each: int) -> None:
    def needed(count: int) -> int:
        return addresses_needed(spec_of(backend, kind=kind, count=count, network={"nic_policy": policy}))

    assert needed(10) - needed(0) == 10 * each
    assert needed(0) == 0


def test_file_systems_and_endpoints_take_addresses_too() -> None:
    def needed(**sections: Any) -> int:
        return addresses_needed(spec_of(count=0, **sections))

    small = needed(storage={"lustre": {"capacity_gib": 1200, "per_tib_mb_s": 125}})
    large = needed(storage={"lustre": {"capacity_gib": 24000, "per_tib_mb_s": 125}})
    assert 0 < small < large
    assert needed(storage={"lustre": {"type": "intelligent-tiering", "throughput_gb_s": 4}}) > 1
    assert needed(storage={"lustre": {"existing": EXISTING_LUSTRE}}) == 0
    assert needed(storage={"home": {}}) > 0
    assert needed(network={"closed": True}) == len(network(spec_of(network={"closed": True}), AWS).endpoints) - 1


def test_an_open_network_has_the_gateway_to_s3_and_a_closed_one_all_that_nodes_call() -> None:
    def made(backend: str, **sections: Any) -> dict[str, str]:
        return {one.key: one.kind for one in network(spec_of(backend, **sections), AWS).endpoints}

    assert made("ec2") == {"s3": "Gateway"}
    closed = made("ec2", network={"closed": True})
    assert closed.pop("s3") == "Gateway"
    assert set(closed.values()) == {"Interface"}
    common = [
        "ec2",
        "ecr-api",
        "ecr-dkr",
        "sts",
        "logs",
        "monitoring",
        "ssm",
        "ssmmessages",
        "ec2messages",
        "fsx",
        "sqs",
    ]
    assert set(closed) == {*common, "autoscaling"}
    slurm = made("hyperpod-slurm", network={"closed": True})
    assert set(slurm) == {*common, "s3", "sagemaker-api"}
    eks = made("hyperpod-eks", network={"closed": True}, observability={"prometheus": True})
    assert set(eks) == {*common, "s3", "sagemaker-api", "eks", "eks-auth", "aps-workspaces"}


@pytest.mark.parametrize(
    ("place", "s3", "ec2", "logs"),
    [
        (AWS, "com.amazonaws.us-east-2.s3", "com.amazonaws.us-east-2.ec2", "com.amazonaws.us-east-2.logs"),
        (CHINA, "com.amazonaws.cn-north-1.s3", "cn.com.amazonaws.cn-north-1.ec2", "com.amazonaws.cn-north-1.logs"),
        (
            GOVERNMENT,
            "com.amazonaws.us-gov-west-1.s3",
            "com.amazonaws.us-gov-west-1.ec2",
            "com.amazonaws.us-gov-west-1.logs",
        ),
    ],
)
def test_endpoints_have_the_name_of_their_partition(place: Place, s3: str, ec2: str, logs: str) -> None:
    names = {one.key: one.service for one in network(spec_of(network={"closed": True}), place).endpoints}
    assert (names["s3"], names["ec2"], names["logs"]) == (s3, ec2, logs)


@pytest.mark.parametrize("place", PLACES)
@given(spec=specs())
def test_the_gateway_lets_all_of_s3_through_unless_the_network_is_closed(place: Place, spec: ClusterSpec) -> None:
    """quay.io, Docker Hub, public data sets and presigned URLs of the region are S3 as well."""
    if not spec.network.closed:
        everything = {"Sid": "Everything", "Effect": "Allow", "Action": ["*"], "Resource": ["*"], "Principal": "*"}
        assert s3_policy(spec, place)["Statement"] == [everything]
        spec = spec.model_copy(update={"network": Network(closed=True)})
    own, foreign = s3_policy(spec, place)["Statement"]
    names = bucket_names(spec, place)
    wanted = {names.data, names.checkpoints, names.lifecycle}
    if spec.runs_uri and spec.runs_uri.startswith("s3://"):
        wanted.add("team-runs")
    assert set(own["Resource"]) == {place.bucket_arn(name, key) for name in wanted for key in ("", "*")}
    assert foreign["Action"] == ["s3:GetObject"]
    images = {f"prod-registry-k8s-io-{place.region}"} if spec.backend == "hyperpod-eks" else set()
    readable = {*aws_buckets(place.region), *images}
    assert {arn.split(":::")[1] for arn in foreign["Resource"]} == {f"{name}/*" for name in readable}
    assert all(arn.startswith(f"arn:{place.partition}:s3:::") for arn in (*own["Resource"], *foreign["Resource"]))


def test_buckets_that_the_spec_names_pass_the_gateway_for_reading() -> None:
    spec = spec_of(network={"closed": True, "s3_buckets": ["open-corpus"]})
    found = {one["Sid"]: one for one in s3_policy(spec, AWS)["Statement"]}["NamedBuckets"]
    assert found["Action"] == ["s3:GetObject", "s3:ListBucket"]
    assert sorted(found["Resource"]) == ["arn:aws:s3:::open-corpus", "arn:aws:s3:::open-corpus/*"]


def test_the_keys_of_the_lustre_client_lie_in_a_bucket_beside_its_packages() -> None:
    assert {"fsx-lustre-client-repo", "fsx-lustre-client-repo-public-keys"} <= set(aws_buckets("us-east-1"))


def test_flow_logs_have_a_group_that_ends_and_a_role_for_that_group_only() -> None:
    assert network(spec_of(), AWS).flow_logs is None
    found = network(spec_of(network={"flow_logs": True}, observability={"log_days": 10}), AWS).flow_logs
    assert found is not None
    assert (found.log_group, found.days) == ("/lustrain/demo/flow-logs", 14)
    assert found.role.policy is not None
    (statement,) = found.role.policy["Statement"]
    group = AWS.arn("logs", "log-group:/lustrain/demo/flow-logs")
    assert statement["Resource"] == [group, f"{group}:*"]
    (trusted,) = found.role.trust["Statement"]
    assert trusted["Condition"] == {
        "StringEquals": {"aws:SourceAccount": AWS.account},
        "ArnLike": {"aws:SourceArn": AWS.arn("ec2", "vpc-flow-log/*")},
    }
