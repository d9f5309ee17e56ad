"""Networks: disjoint subnets, one way out or none, enough addresses; groups let EFA and file systems in, and nobody else."""

from __future__ import annotations

import re
from ipaddress import IPv4Network
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given

from infra.config import ClusterSpec, Home, Network, Storage
from infra.plan.network.endpoints import aws_buckets, s3_policy
from infra.plan.network.security import DESCRIPTIONS, EVERYWHERE, Peer, Rule, rules
from infra.plan.network.vpc import NetworkPlan, addresses_needed, cidr_problems, network, usable
from infra.plan.place import Place, bucket_names
from lustrain.problem import UserError
from tests.infra.specs import AWS, CHINA, EXISTING, EXISTING_LUSTRE, GOVERNMENT, PLACES, spec_of, specs


def subnets_of(plan: NetworkPlan) -> dict[str, str]:
    return {subnet.key: subnet.cidr for subnet in plan.subnets}


def ways(plan: NetworkPlan) -> dict[str, str]:
    """Where each subnet's traffic to elsewhere goes."""
    return {subnet: table.default for table in plan.route_tables for subnet in table.subnets}


def errors(spec: ClusterSpec) -> list[str]:
    return [found.path for found in cidr_problems(spec) if found.level == "error"]


@given(specs())
def test_subnets_lie_inside_the_vpc_apart_and_compute_is_large(spec: ClusterSpec) -> None:
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
def test_only_the_public_subnet_leads_to_the_internet(spec: ClusterSpec) -> None:
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


def test_group_in_another_zone_has_a_subnet_and_moves_no_other() -> None:
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
    efs = spec.model_copy(update={"storage": Storage(home=Home(type="efs"))})
    assert (addresses_needed(efs) - 1, addresses_needed(efs, "use2-az3") - 1) == (32, 96)


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
    ("cidr", "levels"),
    [("172.16.0.0/16", []), ("100.64.0.0/16", []), ("11.0.0.0/16", ["warning"]), ("172.17.0.0/16", ["warning"])],
)
def test_blocks_that_make_trouble_later_are_warned_of(cidr: str, levels: list[str]) -> None:
    assert [one.level for one in cidr_problems(spec_of(network={"cidr": cidr}))] == levels


@pytest.mark.slow
@given(specs())
def test_the_fix_for_a_compute_subnet_is_the_largest_that_fits(spec: ClusterSpec) -> None:
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


def test_hyperpod_node_with_efa_only_cards_takes_one_address() -> None:
    group = {"name": "train", "instance_type": "p5.48xlarge", "count": 3, "interface_type": "efa-only"}
    assert addresses_needed(spec_of("hyperpod-slurm", groups=[group])) == 3


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


def test_open_network_has_s3s_gateway_closed_one_all_nodes_call() -> None:
    def made(backend: str, **sections: Any) -> dict[str, str]:
        return {one.key: one.kind for one in network(spec_of(backend, **sections), AWS).endpoints}

    assert made("ec2") == {"s3": "Gateway"}
    closed = made("ec2", network={"closed": True})
    assert closed.pop("s3") == "Gateway"
    assert set(closed.values()) == {"Interface"}
    common = set("ec2 ecr-api ecr-dkr sts logs monitoring ssm ssmmessages ec2messages fsx sqs".split())  # noqa: SIM905
    assert set(closed) == common | {"autoscaling"}
    slurm = made("hyperpod-slurm", network={"closed": True})
    assert set(slurm) == common | {"s3", "sagemaker-api"}
    eks = made("hyperpod-eks", network={"closed": True}, observability={"prometheus": "amp"})
    assert set(eks) == common | {"s3", "sagemaker-api", "eks", "eks-auth", "aps-workspaces"}


@pytest.mark.parametrize(
    ("place", "region", "ec2"),
    [
        (AWS, "com.amazonaws.us-east-2", "com.amazonaws.us-east-2.ec2"),
        (CHINA, "com.amazonaws.cn-north-1", "cn.com.amazonaws.cn-north-1.ec2"),
        (GOVERNMENT, "com.amazonaws.us-gov-west-1", "com.amazonaws.us-gov-west-1.ec2"),
    ],
)
def test_endpoints_have_the_name_of_their_partition(place: Place, region: str, ec2: str) -> None:
    names = {one.key: one.service for one in network(spec_of(network={"closed": True}), place).endpoints}
    assert (names["s3"], names["ec2"], names["logs"]) == (f"{region}.s3", ec2, f"{region}.logs")


@pytest.mark.parametrize("place", PLACES)
@given(spec=specs())
def test_gateway_passes_all_of_s3_unless_the_network_is_closed(place: Place, spec: ClusterSpec) -> None:
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


def test_buckets_that_spec_names_pass_the_gateway_for_reading() -> None:
    spec = spec_of(network={"closed": True, "s3_buckets": ["open-corpus"]})
    found = {one["Sid"]: one for one in s3_policy(spec, AWS)["Statement"]}["NamedBuckets"]
    assert found["Action"] == ["s3:GetObject", "s3:ListBucket"]
    assert sorted(found["Resource"]) == ["arn:aws:s3:::open-corpus", "arn:aws:s3:::open-corpus/*"]


def test_mounted_bucket_passes_a_closed_gateway() -> None:
    mounts = [{"bucket": name, "path": f"/s3/{name}"} for name in ("data", "theirs")]
    mounts += [{"bucket": "theirs", "prefix": "out", "path": "/s3/out", "read_only": False}]
    spec = spec_of(network={"closed": True}, storage={"s3_mounts": mounts})
    found = {one["Sid"]: one for one in s3_policy(spec, AWS)["Statement"]}
    mounted, written = found["MountedBuckets"], found["WrittenMounts"]
    assert mounted["Resource"] == ["arn:aws:s3:::theirs", "arn:aws:s3:::theirs/*"]
    assert mounted["Action"] == ["s3:GetObject", "s3:ListBucket"]
    # What is only read here must be no way out for data.
    assert written["Resource"] == ["arn:aws:s3:::theirs/out/*"]


LNET = {("tcp", (988, 988)), ("tcp", (1018, 1023))}


def of(spec: ClusterSpec, group: str, direction: str, peer: Peer) -> set[tuple[str, tuple[int, int] | None]]:
    """Protocols and ports of the rules of a group in one direction with one peer."""
    found = [rule for rule in rules(spec) if (rule.group, rule.direction, rule.peer) == (group, direction, peer)]
    return {(rule.protocol, rule.ports) for rule in found}


def group(key: str) -> Peer:
    return Peer("group", key)


def efa_pair(spec: ClusterSpec) -> bool:
    return all(("-1", None) in of(spec, "cluster", way, group("cluster")) for way in ("ingress", "egress"))


def let_in(found: tuple[Rule, ...]) -> set[str]:
    """Kinds of peers that may open connections."""
    return {rule.peer.kind for rule in found if rule.direction == "ingress"}


@given(specs())
def test_whatever_the_spec_efa_has_its_pair_of_group_rules(spec: ClusterSpec) -> None:
    assert efa_pair(spec)
    assert let_in(rules(spec)) <= {"group", "group-id"}


@given(specs())
def test_rules_are_such_as_ec2_accepts(spec: ClusterSpec) -> None:
    found = rules(spec)
    groups = {rule.group for rule in found}
    assert len({rule.key for rule in found}) == len(found)
    assert groups <= set(DESCRIPTIONS)
    legal = re.compile(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{1,255}")
    assert all(legal.fullmatch(text) for text in (*DESCRIPTIONS.values(), *(rule.why for rule in found)))
    for rule in found:
        assert (rule.ports is None) == (rule.protocol == "-1")
        assert rule.peer.kind != "group" or rule.peer.value in groups


@given(specs())
def test_nodes_of_closed_network_reach_no_public_address_but_s3(spec: ClusterSpec) -> None:
    out = [rule for rule in rules(spec) if rule.group == "cluster" and rule.direction == "egress"]
    blocks = {rule.peer.value for rule in out if rule.peer.kind == "cidr"}
    lists = [(rule.peer.value, rule.ports) for rule in out if rule.peer.kind == "prefix-list"]
    if not spec.network.closed:
        assert (blocks, lists) == ({EVERYWHERE}, [])
        return
    assert lists == [("s3", (443, 443))]
    assert blocks == (
        {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"}
        if spec.network.existing
        else {spec.network.cidr}
    )


@pytest.mark.parametrize(
    ("efa", "ingress", "egress"), [(False, LNET, set()), (True, {("-1", None)}, {("-1", None)})], ids=["tcp", "efa"]
)
def test_an_existing_file_system_may_call_back(efa: bool, ingress: Any, egress: Any) -> None:
    spec = spec_of(storage={"lustre": {"existing": {**EXISTING_LUSTRE, "efa": efa}}})
    peer = Peer("group-id", "sg-0123456789abcdef0")
    assert of(spec, "cluster", "ingress", peer) == ingress
    assert of(spec, "cluster", "egress", peer) == egress
    assert {rule.group for rule in rules(spec)} == {"cluster"}


def test_interface_endpoints_answer_https_from_the_nodes_only() -> None:
    closed = spec_of(network={"closed": True})
    assert [rule for rule in rules(closed) if rule.group == "endpoints"] == [
        Rule("endpoints", "ingress", "tcp", (443, 443), group("cluster"), "HTTPS to services of AWS")
    ]
    for other in (spec_of(), spec_of(network={"closed": True, "existing": EXISTING})):
        assert "endpoints" not in {rule.group for rule in rules(other)}


def test_ssh_comes_in_from_where_spec_says_and_nothing_else_does() -> None:
    found = set(rules(spec_of(network={"allow_from": ["pl-01234567", "10.20.0.0/16"]}))) - set(rules(spec_of()))
    assert {(rule.group, rule.direction, rule.protocol, rule.ports, rule.peer) for rule in found} == {
        ("cluster", "ingress", "tcp", (22, 22), Peer("prefix-list-id", "pl-01234567")),
        ("cluster", "ingress", "tcp", (22, 22), Peer("cidr", "10.20.0.0/16")),
    }
