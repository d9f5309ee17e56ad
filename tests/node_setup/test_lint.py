"""The linter names what does harm and why, lets good advice be, and shows nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.agent.lint import HARMS, lint
from node_setup.agent.settings import condition, data
from tests.node_setup.machines import facts_of

PROFILE = "/etc/profile.d/training.sh"
RULES = data.tables()["variables"]


def found(name: str, value: str, machine: str = "p5", where: str = PROFILE) -> dict[str, Any] | None:
    facts = facts_of(machine)
    facts["environment"] = [{"where": where, "line": 3, "name": name, "value": value}]
    said = lint(facts)
    assert len(said) <= 1
    return said[0] if said else None


SEEDS = {
    "debug": ("NCCL_DEBUG=INFO", "TORCH_SHOW_CPP_STACKTRACES=1"),
    "harmful": (
        *("NCCL_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=ib0", "NCCL_MIN_NRINGS=8", "NCCL_NET_GDR_LEVEL=5"),
        *("NCCL_P2P_LEVEL=NVL", "NCCL_PROTO=simple", "LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH"),
        *("CUDA_VISIBLE_DEVICES=0,1,2,3", "PT_HPU_MAX_COMPOUND_OP_SIZE=256"),
    ),
    "obsolete": (
        *("NCCL_TREE_THRESHOLD=0", "FI_EFA_USE_DEVICE_RDMA=1", "TORCH_CUDNN_V8_API_ENABLED=1", "PT_HPU_LAZY_MODE=1"),
    ),
    "useless": (
        *("NCCL_IB_DISABLE=0", "NCCL_TIMEOUT=7200", "FI_PROVIDER=efa", "FI_EFA_FORK_SAFE=1", "DOCKER_BUILDKIT=1"),
        *("CUDA_LAUNCH_BLOCKING=0", "CUDA_CACHE_DISABLE=0", "TORCH_CUDA_ARCH_LIST=7.0;8.0;8.6", "OMP_NUM_THREADS=8"),
        *("PT_HPU_ENABLE_LAZY_COMPILATION=1", "PT_HPU_GRAPH_COMPILER_OPT_LEVEL=1", "PT_HPU_ENABLE_SYNAPSE_LAYOUT_OPT=1"),
        *("PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE=1", "PT_HPU_ENABLE_CONV_FLATTEN_OPT=1", "PT_HPU_POOL_STRATEGY=1"),
        *("PT_HPU_ENABLE_COMPILATION_CACHE=1", "PT_HPU_COMPILATION_CACHE_PATH=1", "PT_HPU_ENABLE_EAGER_EXECUTION=1"),
        *("PT_HPU_ENABLE_DYNAMIC_COMPILATION=1", "HABANA_ROCE_ENABLED=1", "HABANA_ROCE_PRIORITY=1", "HABANA_ROCE_DSCP=1"),
        *("HABANA_ENABLE_GRADIENT_COMPRESSION=1", "HABANA_COMM_BACKEND=1", "HABANA_COMM_TOPOLOGY=1"),
    ),
}  # fmt: skip
"""What widely copied guides tell people to export."""


@pytest.mark.parametrize(("line", "harm"), [(line, harm) for harm, lines in SEEDS.items() for line in lines])
def test_copied_advice_is_judged(line: str, harm: str) -> None:
    name, _, value = line.partition("=")
    said = found(name, value)
    assert said is not None
    assert (said["harm"], bool(said["why"]), bool(said["fix"])) == (harm, True, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "^docker,lo,veth"),
        ("NCCL_NET", "AWS Libfabric"),
        ("NCCL_DEBUG", "WARN"),
        ("FI_EFA_USE_HUGE_PAGE", "0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PT_HPU_LAZY_MODE", "0"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/recipes,false,1024,false"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64"),
    ],
)
def test_good_advice_is_let_be(name: str, value: str) -> None:
    assert found(name, value) is None


@pytest.mark.parametrize(
    ("name", "value", "machine"),
    [("FI_EFA_USE_DEVICE_RDMA", "1", "gaudi"), ("RDMAV_FORK_SAFE", "1", "gaudi"), ("NCCL_SOCKET_IFNAME", "ib0", "cpu")],
)
def test_variables_of_gaudi_and_machines_are_right_only_there(name: str, value: str, machine: str) -> None:
    assert found(name, value, machine) is None
    assert found(name, value, "p5") is not None


def test_device_rdma_on_a_type_without_it_ends_the_application() -> None:
    facts = facts_of("p5")
    facts["instance"]["type"] = "p3dn.24xlarge"
    facts["environment"] = [{"where": PROFILE, "line": 1, "name": "FI_EFA_USE_DEVICE_RDMA", "value": "1"}]
    assert lint(facts)[0]["harm"] == "harmful"


def test_variable_of_one_slurm_job_is_not_one_for_all() -> None:
    assert found("CUDA_VISIBLE_DEVICES", "0,1", where="slurm job 4711") is None


def test_a_variable_that_no_rule_names_is_never_shown() -> None:
    facts = facts_of("p5")
    names = ["AWS_SECRET_ACCESS_KEY", "TORCH_HUB_TOKEN", "NCCL_SOMETHING_NEW"]
    facts["environment"] = [{"where": PROFILE, "line": 1, "name": name, "value": "hush"} for name in names]
    assert lint(facts) == []


def test_the_harmful_come_first() -> None:
    facts = facts_of("p5")
    names = {"NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_PROTO": "simple"}
    facts["environment"] = [
        {"where": PROFILE, "line": at, "name": name, "value": v} for at, (name, v) in enumerate(names.items())
    ]
    assert [one["harm"] for one in lint(facts)] == ["harmful", "useless", "debug"]


def test_value_is_shown_unquoted_and_cut_when_long() -> None:
    quoted, endless = (
        found("NCCL_SOCKET_IFNAME", '"eth0"'),
        found("LD_LIBRARY_PATH", "/opt/amazon/efa/lib/:" + "/x" * 500),
    )
    assert quoted is not None
    assert endless is not None
    assert (quoted["value"], len(endless["value"])) == ("eth0", 121)


def test_every_rule_is_whole() -> None:
    for rule in RULES["variable"]:
        assert (
            {"name", "harm", "why", "fix", "source"}
            <= set(rule)
            <= {"name", "value", "when", "files", "harm", "why", "fix", "source"}
        )
        assert rule["harm"] in HARMS
    for rule in (*RULES["variable"], *RULES["allow"]):
        re.compile(rule.get("value", ""))
        for text in rule.get("when", ()):
            condition.parse(text)


@given(st.text(), st.text(), st.sampled_from([rule["name"].replace("*", "X") for rule in RULES["variable"]]))
def test_any_value_of_any_variable_is_judged_without_an_error(where: str, value: str, name: str) -> None:
    for said in lint({"environment": [{"where": where, "line": None, "name": name, "value": value}]}):
        assert said["harm"] in HARMS
        assert said["value"].isprintable()
