"""A worker group becomes a launch template and an Auto Scaling group that EC2 accepts, whatever its instance type."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.catalog.instances import snapshot
from infra.config import ClusterSpec
from infra.plan.nodes.auto_scaling import Cpu, Interface, NodeGroupPlan, node_groups, untaggable
from infra.plan.nodes.document import node_document
from infra.plan.nodes.nics import Policy, nics
from infra.preflight.offline import run_offline
from lustrain.problem import UserError
from tests.infra.mistakes import NOW, P9
from tests.infra.specs import AWS, spec_of

WITH_EFA = [found for found in snapshot().types.values() if found.efa]
BLOCK = {"mode": "capacity-block", "reservation": "cr-0a1b2c3d4e5f60718", "ends_at": "2027-02-14T11:30:00Z"}
GPU, UBUNTU = "base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id", "/canonical/ubuntu/server/22.04/stable/current"
LINUX = sorted(name for name, found in snapshot().types.items() if not found.architecture.endswith("mac"))


def spec(kind: str = "p5.48xlarge", *, network: dict[str, Any] | None = None, **group: Any) -> ClusterSpec:
    train = {"name": "train", "instance_type": kind, "count": 4, **group}
    return spec_of(groups=[train], network=network or {})


def plan(kind: str = "p5.48xlarge", **changes: Any) -> NodeGroupPlan:
    (found,) = node_groups(spec(kind, **changes), AWS, NOW)
    return found


@pytest.mark.parametrize("policy", ["addresses", "bandwidth"])
def test_every_efa_type_gets_an_interface_for_each_efa_it_has(policy: Policy) -> None:
    """The rules of the layout itself are held in test_plan_nics.py; here, that the template says what the layout is."""
    wrong = {}
    for kind in WITH_EFA:
        found = plan(kind.name, network={"nic_policy": policy}).interfaces
        said = [(one.card, one.device, one.type or "interface") for one in found]
        if said != [(nic.card, nic.device, nic.kind) for nic in nics(kind, policy)]:
            wrong[kind.name] = said
    assert wrong == {}


@pytest.mark.parametrize("policy", ["addresses", "bandwidth"])
def test_group_without_efa_has_one_plain_interface(policy: Policy) -> None:
    found = plan("p5.48xlarge", efa=False, network={"nic_policy": policy})
    assert found.interfaces == (Interface(0, 0, None, "false"),)


def test_there_is_one_gang_for_each_worker_group_whole_or_none() -> None:
    train = {"name": "b", "instance_type": "p5.48xlarge", "count": 3}
    found = node_groups(
        spec_of(groups=[{**train, "name": "a", "instance_type": "g6e.48xlarge", "count": 2}, train]), AWS, NOW
    )
    assert [(one.name, one.group, one.instance_type, one.min_size, one.count) for one in found] == [
        ("demo-a", "a", "g6e.48xlarge", 2, 2),
        ("demo-b", "b", "p5.48xlarge", 3, 3),
    ]


@pytest.mark.parametrize(
    ("starts_at", "desired", "fill_at"),
    [
        (None, 4, None),
        ("2026-11-20T11:30:00Z", 4, None),
        ("2026-11-21T00:05:00Z", 4, None),
        ("2026-11-21T00:05:01Z", 0, "2026-11-21T00:05:01Z"),
        ("2026-11-24T12:30:00+01:00", 0, "2026-11-24T11:30:00Z"),
    ],
)
def test_a_blocks_group_wants_no_node_before_the_block_begins(
    starts_at: str | None, desired: int, fill_at: str | None
) -> None:
    """Auto Scaling gives up a group that has failed to launch for about a day."""
    found = plan("p5en.48xlarge", capacity={**BLOCK, **({"starts_at": starts_at} if starts_at else {})})
    assert (found.desired, found.fill_at, found.count, found.min_size) == (desired, fill_at, 4, 0)


def test_deployment_stops_once_a_blocks_group_is_emptied() -> None:
    """Afterwards it would ask for the nodes again, in a block that is over, and for a schedule in the past."""
    cluster = spec("p5en.48xlarge", capacity=BLOCK)
    emptied = node_groups(cluster, AWS, NOW)[0].empty_at
    assert emptied is not None
    moment = datetime.fromisoformat(emptied)

    def errors(now: datetime) -> set[str]:
        return {one.code for one in run_offline(cluster, AWS, now) if one.level == "error"}

    assert "CAP-011" in errors(moment)
    assert "CAP-011" not in errors(moment - timedelta(seconds=1))


@pytest.mark.parametrize(
    ("kind", "family", "parameter"),
    [
        ("p5.48xlarge", "nvidia-x86-64", f"/deeplearning/ami/x86_64/{GPU}"),
        ("g5g.16xlarge", "nvidia-arm64", f"/deeplearning/ami/arm64/{GPU}"),
        ("trn1.32xlarge", "neuron-x86-64", "/neuron/dlami/base/ubuntu-24.04/latest/image_id"),
        ("trn2u.48xlarge", "neuron-x86-64", "/neuron/dlami/base/ubuntu-24.04/latest/image_id"),
        ("c5n.18xlarge", "ubuntu-x86-64", f"{UBUNTU}/amd64/hvm/ebs-gp2/ami-id"),
        ("c7g.16xlarge", "ubuntu-arm64", f"{UBUNTU}/arm64/hvm/ebs-gp2/ami-id"),
    ],
)
def test_the_image_fits_accelerator_and_architecture(kind: str, family: str, parameter: str) -> None:
    found = plan(kind).image
    assert found.family == family
    assert found.parameter == f"/aws/service{parameter}"
    assert (found.id, found.root_device) == (None, "/dev/sda1")


def test_image_of_the_user_is_taken_and_its_root_device_read() -> None:
    found = plan(image_id="ami-0123456789abcdef0").image
    assert (found.id, found.parameter, found.root_device) == ("ami-0123456789abcdef0", None, None)


@pytest.mark.parametrize(
    ("kind", "wish", "cpu"),
    [
        ("p5.48xlarge", 1, Cpu(96, 1)),
        ("p5.48xlarge", 2, None),
        ("c7g.16xlarge", 1, None),
        ("hpc7a.96xlarge", 2, None),
        ("m5.metal", 1, None),
        ("m8g.metal-48xl", 1, None),
    ],
)
def test_cpu_options_are_set_where_they_change_something(kind: str, wish: int, cpu: Cpu | None) -> None:
    assert plan(kind, threads_per_core=wish).cpu == cpu


@given(kind=st.sampled_from(LINUX), threads=st.sampled_from([1, 2]))
def test_no_type_is_asked_for_more_threads_than_it_has(kind: str, threads: int) -> None:
    cpu = plan(kind, threads_per_core=threads).cpu
    if cpu is not None:
        assert cpu.cores * cpu.threads_per_core < snapshot().types[kind].vcpus
        assert cpu.cores >= 1


@pytest.mark.parametrize("key", ["cost centre", "team/owner", "größe", "..", "_index"])
def test_tag_key_that_the_metadata_service_cannot_serve_is_named(key: str) -> None:
    assert untaggable({"owner": "me", key: "x"}) == (key,)


@pytest.mark.parametrize("kind", ["p9.48xlarge", "mac2.metal"])
def test_type_that_is_unknown_or_runs_no_linux_is_an_error(kind: str) -> None:
    with pytest.raises(UserError, match=r"^groups\.0\.instance_type = "):
        plan(kind)


def test_described_type_becomes_a_node_group() -> None:
    """Its facts are those of a p6-b300 in other words, so that its template has the same interfaces and image."""
    train = {"name": "train", "instance_type": "p9.48xlarge", "count": 2}
    wanted = spec_of(groups=[train], instance_types={"p9.48xlarge": P9}, storage={"lustre": {"throughput_gb_s": 9.6}})
    (found,), known = node_groups(wanted, AWS, NOW), plan("p6-b300.48xlarge")
    assert (found.interfaces, found.image, found.cpu) == (known.interfaces, known.image, known.cpu)
    told = node_document(wanted)["groups"]["train"]
    assert (told["gpus"], told["efa"], told["nvme"], told["lustre_efa"], told["by_hand"]) == (8, 16, 4, 2, True)
    assert "by_hand" not in node_document(spec())["groups"]["train"]


def test_logins_without_a_scheduler_are_no_node_groups() -> None:
    assert node_groups(spec(role="login"), AWS, NOW) == ()
