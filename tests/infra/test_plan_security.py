"""Security groups: EFA's pair of rules, the ports of the file systems, and nobody else."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given

from infra.config import ClusterSpec
from infra.plan.network.security import DESCRIPTIONS, EVERYWHERE, Peer, Rule, rules
from tests.infra.specs import EXISTING, EXISTING_LUSTRE, spec_of, specs
from tests.infra.stacks import EXAMPLES, example

SMALL_LUSTRE = {"lustre": {"throughput_gb_s": 1.2, "capacity_tib": 4.8, "efa": False}}
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


@pytest.mark.parametrize("stack", EXAMPLES)
def test_every_example_has_the_efa_pair_and_lets_no_block_of_addresses_in(stack: str) -> None:
    assert efa_pair(example(stack))
    assert let_in(rules(example(stack))) == {"group"}


@given(specs())
def test_whatever_the_spec_efa_has_its_pair_and_only_groups_are_let_in(spec: ClusterSpec) -> None:
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
def test_nodes_of_a_closed_network_reach_no_public_address_but_s3(spec: ClusterSpec) -> None:
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


def test_lustre_without_efa_speaks_lnet_with_the_nodes_and_itself_both_ways() -> None:
    spec = spec_of(kind="m5.2xlarge", storage=SMALL_LUSTRE)
    for direction in ("ingress", "egress"):
        assert of(spec, "lustre", direction, group("cluster")) == LNET
        assert of(spec, "lustre", direction, group("lustre")) == LNET
    assert of(spec, "cluster", "ingress", group("lustre")) == LNET


def test_lustre_with_efa_lies_in_the_clusters_own_group() -> None:
    spec = spec_of(storage={"lustre": {"throughput_gb_s": 19.2, "efa": True}})
    assert {rule.group for rule in rules(spec)} == {"cluster"}


@pytest.mark.parametrize(
    ("efa", "ingress", "egress"), [(False, LNET, set()), (True, {("-1", None)}, {("-1", None)})], ids=["tcp", "efa"]
)
def test_an_existing_file_system_may_call_back(efa: bool, ingress: Any, egress: Any) -> None:
    spec = spec_of(storage={"lustre": {"existing": {**EXISTING_LUSTRE, "efa": efa}}})
    peer = Peer("group-id", "sg-0123456789abcdef0")
    assert of(spec, "cluster", "ingress", peer) == ingress
    assert of(spec, "cluster", "egress", peer) == egress
    assert {rule.group for rule in rules(spec)} == {"cluster"}


def test_homes_are_reached_by_nfs_from_the_nodes_only() -> None:
    ports = ((111, 111), (2049, 2049), (20001, 20003))
    spec = spec_of(storage={"home": {}})
    assert of(spec, "home", "ingress", group("cluster")) == {(name, pair) for name in ("tcp", "udp") for pair in ports}
    assert [rule for rule in rules(spec) if rule.group == "home" and rule.peer != group("cluster")] == []


def test_interface_endpoints_answer_https_from_the_nodes_only_where_there_are_any() -> None:
    closed = spec_of(network={"closed": True})
    assert [rule for rule in rules(closed) if rule.group == "endpoints"] == [
        Rule("endpoints", "ingress", "tcp", (443, 443), group("cluster"), "HTTPS to services of AWS")
    ]
    for other in (spec_of(), spec_of(network={"closed": True, "existing": EXISTING})):
        assert "endpoints" not in {rule.group for rule in rules(other)}
