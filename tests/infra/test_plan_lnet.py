"""How many EFA interfaces a node gives to Lustre, and that every backend's nodes are told."""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import ClusterSpec, parse
from infra.plan.nodes.clients import lustre_interfaces
from infra.plan.nodes.document import node_document
from infra.preflight.offline import OFFLINE
from infra.preflight.rule import Context


def spec(kind: str = "p5.48xlarge", count: int = 4, backend: str = "ec2", efa: bool = True) -> ClusterSpec:
    prefix = "" if backend == "ec2" else "ml."
    described: dict[str, Any] = {
        "name": "demo",
        "backend": backend,
        "zone_id": "usw2-az2",
        "groups": [{"name": "train", "instance_type": f"{prefix}{kind}", "count": count}],
        "storage": {"lustre": {"throughput_gb_s": 4.8, "efa": efa}},
    }
    return parse(described)


@pytest.mark.parametrize(
    ("kind", "count", "interfaces"),
    [
        ("p5.48xlarge", 4, 8),
        ("p5.48xlarge", 128, 8),
        ("p5.48xlarge", 200, 5),
        ("p5.48xlarge", 2000, 0),
        ("p6-b300.48xlarge", 2, 16),
        ("g6e.48xlarge", 8, 2),
        ("g6e.8xlarge", 8, 1),
        ("trn2.48xlarge", 4, 0),
        ("m5.large", 4, 0),
    ],
)
def test_lustre_takes_awss_number_of_efa_interfaces_within_what_the_file_system_takes(
    kind: str, count: int, interfaces: int
) -> None:
    wanted = spec(kind, count)
    assert lustre_interfaces(wanted, wanted.workers[0]) == interfaces


@pytest.mark.parametrize("backend", ["ec2", "hyperpod-slurm", "hyperpod-eks"])
def test_nodes_of_every_backend_are_told_also_where_only_pods_mount(backend: str) -> None:
    told = [node_document(spec(backend=backend, efa=efa))["groups"]["train"]["lustre_efa"] for efa in (True, False)]
    assert told == [8, 0]


def test_another_count_makes_another_document_only_where_the_connections_run_out() -> None:
    assert node_document(spec(count=4)) == node_document(spec(count=128)) != node_document(spec(count=129))


def test_all_groups_share_the_connections_of_the_file_system() -> None:
    """1,024 // 200 for each of two groups of 100, which alone would get all of AWS's 8."""
    described = spec(count=100).model_dump(mode="json")
    (one,) = described["groups"]
    wanted = parse({**described, "groups": [one, {**one, "name": "more"}]})
    assert [lustre_interfaces(wanted, group) for group in wanted.workers] == [5, 5]


def test_efa_is_counted_and_given_only_in_the_zone_of_the_file_system() -> None:
    """1,500 nodes elsewhere would leave none of the 1,024 connections."""
    described = spec().model_dump(mode="json")
    (here,) = described["groups"]
    there = {**here, "name": "far", "count": 1500, "zone_id": "usw2-az1"}
    plain = {**there, "name": "small", "instance_type": "m5.large"}
    wanted = parse({**described, "groups": [here, there, plain]})
    assert [lustre_interfaces(wanted, group) for group in wanted.workers] == [8, 0, 0]
    assert list(OFFLINE["FSX-017"].check(Context(wanted))) == []
    far, small = OFFLINE["NET-017"].check(Context(wanted))
    assert "over TCP: EFA does not leave the zone" in far.why
    assert "EFA" not in small.why
