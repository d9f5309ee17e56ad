"""What nodes are told of their group before there are any: role, devices, EFA for Lustre, module options, layouts."""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import ClusterSpec, parse
from infra.plan.nodes.clients import lustre_interfaces, module_options, stripes
from infra.plan.nodes.document import node_document, node_group
from infra.plan.storage.lustre import efa_wanted
from infra.preflight.offline import OFFLINE
from infra.preflight.rule import Context
from node_setup.agent.owned import HEADER
from tests.infra.specs import spec_of


def spec(kind: str = "p5.48xlarge", count: int = 4, backend: str = "ec2", efa: bool = True) -> ClusterSpec:
    return spec_of(backend, kind=kind, count=count, storage={"lustre": {"throughput_gb_s": 4.8, "efa": efa}})


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
        ("m6i.32xlarge", 4, 1),
        ("p4d.24xlarge", 4, 0),
        ("trn2.48xlarge", 4, 0),
        ("m5.large", 4, 0),
    ],
)
def test_lustre_takes_awss_number_of_efa_cards_within_limits(kind: str, count: int, interfaces: int) -> None:
    wanted = spec(kind, count)
    assert lustre_interfaces(wanted, wanted.workers[0]) == interfaces


@pytest.mark.parametrize("backend", ["ec2", "hyperpod-slurm", "hyperpod-eks"])
def test_nodes_of_every_backend_hear_it_even_if_only_pods_mount(backend: str) -> None:
    told = [node_document(spec(backend=backend, efa=efa))["groups"]["train"]["lustre_efa"] for efa in (True, False)]
    assert told == [8, 0]


def test_another_count_changes_the_document_with_the_connections() -> None:
    assert node_document(spec(count=4)) == node_document(spec(count=128)) != node_document(spec(count=129))


def test_all_groups_share_the_connections_of_the_file_system() -> None:
    """1,024 // 200 for each of two groups of 100, which alone would get all of AWS's 8."""
    described = spec(count=100).model_dump(mode="json")
    (one,) = described["groups"]
    wanted = parse({**described, "groups": [one, {**one, "name": "more"}]})
    assert [lustre_interfaces(wanted, group) for group in wanted.workers] == [5, 5]


def test_efa_counts_only_in_the_zone_of_the_file_system() -> None:
    """1,500 nodes elsewhere would leave none of the 1,024 connections."""
    described = spec().model_dump(mode="json")
    (here,) = described["groups"]
    there = {**here, "name": "far", "count": 1500, "zone_id": "use2-az3"}
    plain = {**there, "name": "small", "instance_type": "m5.large"}
    wanted = parse({**described, "groups": [here, there, plain]})
    assert [lustre_interfaces(wanted, group) for group in wanted.workers] == [8, 0, 0]
    assert list(OFFLINE["FSX-017"].check(Context(wanted))) == []
    far, small = OFFLINE["NET-017"].check(Context(wanted))
    assert "over TCP: EFA does not leave the zone" in far.why
    assert "EFA" not in small.why


def test_group_without_efa_reaches_lustre_over_tcp() -> None:
    """HyperPod attaches all that the type has, whatever the key says."""
    train = {"name": "train", "instance_type": "p5.48xlarge", "count": 200, "efa": False}
    groups, lustre = [train, {**train, "name": "wide", "count": 4, "efa": None}], {"throughput_gb_s": 9.6}
    without = spec_of(groups=groups[:1], storage={"lustre": lustre})
    both = spec_of(groups=groups, storage={"lustre": lustre})
    assert (efa_wanted(without), efa_wanted(both)) == (False, True)
    told = node_document(both)["groups"]
    assert [(one["efa"], one["lustre_efa"]) for one in told.values()] == [(0, 0), (32, 8)]
    slurm = node_document(spec_of("hyperpod-slurm", groups=groups[:1], storage={"lustre": lustre}))["groups"]
    assert (slurm["train"]["efa"], slurm["train"]["lustre_efa"]) == (32, 5)


def with_lustre(**lustre: Any) -> ClusterSpec:
    return spec_of(storage={"lustre": lustre} if lustre else {})


def options(**group: Any) -> list[str]:
    """The lines of the file of module options but its head and its comments."""
    found = with_lustre(capacity_gib=19200, per_tib_mb_s=250, **group.pop("lustre", {}))
    changed = found.model_copy(update={"groups": (found.groups[0].model_copy(update=group),), **group.pop("top", {})})
    text = module_options(changed, changed.groups[0], node_document(changed))
    assert not text or text.startswith(HEADER)
    return [line for line in text.removeprefix(HEADER).splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    ("name", "threads", "wide"),
    [
        ("p5.48xlarge", 2, True),
        ("p5.48xlarge", 1, True),
        ("p4d.24xlarge", 2, True),
        ("p4d.24xlarge", 1, False),
        ("g6e.16xlarge", 2, False),
        ("c5.18xlarge", 2, True),
        ("m5.2xlarge", 2, False),
        ("p9.huge", 2, False),
    ],
)
def test_module_options_follow_the_threads_that_are_on(name: str, threads: int, wide: bool) -> None:
    aws = {"options ptlrpc ptlrpcd_per_cpt_max=32", "options ksocklnd credits=2560"}
    assert set(options(instance_type=name, threads_per_core=threads)) == (aws if wide else set())


@pytest.mark.parametrize("efa", [False, True])
def test_modules_have_the_same_options_with_efa_and_without(efa: bool) -> None:
    """EFA's requests go through ptlrpc, and TCP stays beside it for what EFA does not reach."""
    assert options(lustre={"efa": efa}) == options()


def test_without_a_file_system_no_module_options_and_no_layout() -> None:
    assert module_options(with_lustre(), with_lustre().groups[0], node_document(with_lustre())) == ""
    assert stripes(with_lustre()) == ()


def test_layouts_lie_under_mount_and_the_data_keep_the_default() -> None:
    found = {stripe.path: stripe for stripe in stripes(with_lustre(mount_path="/shared"))}
    assert set(found) == {"/shared/checkpoints", "/shared/containers", "/shared/logs"}
    assert " ".join(found["/shared/checkpoints"].options) == "-E 100M -c 1 -E 10G -c 8 -E -1 -c -1 -S 16M"
    assert found["/shared/logs"].options == ("-c", "1")
    assert all(stripe.why for stripe in found.values())


def test_who_logs_in_and_who_schedules_is_no_worker() -> None:
    roles = {"worker": "worker", "controller": "controller", "login": "login"}
    groups = [{"name": role, "role": role, "instance_type": "ml.c5.2xlarge", "count": 1} for role in roles]
    told = node_document(spec_of("hyperpod-slurm", groups=groups))["groups"]
    assert {name: one["role"] for name, one in told.items()} == roles


@pytest.mark.parametrize(
    ("kind", "gpus", "accelerator", "efa", "nvme"),
    [
        ("p5.48xlarge", 8, "NVIDIA H100", 32, 8),
        ("g6e.48xlarge", 8, "NVIDIA L40S", 4, 4),
        ("trn1.32xlarge", 0, "Trainium", 8, 4),
        ("trn2.48xlarge", 0, "Trainium2", 16, 4),
        ("c5.2xlarge", 0, None, 0, 0),
        ("z9.unheard", 0, None, 0, 0),
    ],
)
def test_only_gpus_count_as_gpus_and_an_accelerator_has_its_name(
    kind: str, gpus: int, accelerator: str | None, efa: int, nvme: int
) -> None:
    found = spec_of("hyperpod-slurm", kind=f"ml.{kind}")
    told = node_group(found, found.groups[0])
    assert (told.type, told.gpus, told.accelerator, told.efa, told.nvme) == (kind, gpus, accelerator, efa, nvme)
