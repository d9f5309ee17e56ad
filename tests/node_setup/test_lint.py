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


SEEDS = [
    ("NCCL_DEBUG", "INFO", "debug"),
    ("NCCL_SOCKET_IFNAME", "eth0", "harmful"),
    ("NCCL_SOCKET_IFNAME", "ib0", "harmful"),
    ("NCCL_MIN_NRINGS", "8", "harmful"),
    ("NCCL_TREE_THRESHOLD", "0", "obsolete"),
    ("NCCL_IB_DISABLE", "0", "useless"),
    ("NCCL_NET_GDR_LEVEL", "5", "harmful"),
    ("NCCL_P2P_LEVEL", "NVL", "harmful"),
    ("NCCL_PROTO", "simple", "harmful"),
    ("NCCL_TIMEOUT", "7200", "useless"),
    ("FI_PROVIDER", "efa", "useless"),
    ("FI_EFA_USE_DEVICE_RDMA", "1", "obsolete"),
    ("FI_EFA_FORK_SAFE", "1", "useless"),
    ("LD_LIBRARY_PATH", "/opt/amazon/efa/lib:$LD_LIBRARY_PATH", "harmful"),
    ("DOCKER_BUILDKIT", "1", "useless"),
    ("CUDA_VISIBLE_DEVICES", "0,1,2,3", "harmful"),
    ("CUDA_LAUNCH_BLOCKING", "0", "useless"),
    ("CUDA_CACHE_DISABLE", "0", "useless"),
    ("TORCH_CUDA_ARCH_LIST", "7.0;8.0;8.6", "useless"),
    ("TORCH_CUDNN_V8_API_ENABLED", "1", "obsolete"),
    ("TORCH_SHOW_CPP_STACKTRACES", "1", "debug"),
    ("OMP_NUM_THREADS", "8", "useless"),
    ("PT_HPU_LAZY_MODE", "1", "obsolete"),
    ("PT_HPU_MAX_COMPOUND_OP_SIZE", "256", "harmful"),
    *((f"PT_HPU_{name}", "1", "useless") for name in ("ENABLE_LAZY_COMPILATION", "GRAPH_COMPILER_OPT_LEVEL")),
    *(
        (f"PT_HPU_ENABLE_{name}", "1", "useless")
        for name in ("SYNAPSE_LAYOUT_OPT", "WEIGHT_CPU_PERMUTE", "CONV_FLATTEN_OPT")
    ),
    *(
        (f"PT_HPU_{name}", "1", "useless")
        for name in ("POOL_STRATEGY", "ENABLE_COMPILATION_CACHE", "COMPILATION_CACHE_PATH")
    ),
    *((f"PT_HPU_ENABLE_{name}", "1", "useless") for name in ("EAGER_EXECUTION", "DYNAMIC_COMPILATION")),
    *((f"HABANA_ROCE_{name}", "1", "useless") for name in ("ENABLED", "PRIORITY", "DSCP")),
    *((f"HABANA_{name}", "1", "useless") for name in ("ENABLE_GRADIENT_COMPRESSION", "COMM_BACKEND", "COMM_TOPOLOGY")),
]
"""What widely copied guides tell people to export."""


@pytest.mark.parametrize(("name", "value", "harm"), SEEDS)
def test_copied_advice_is_judged(name: str, value: str, harm: str) -> None:
    said = found(name, value)
    assert said is not None
    assert said["harm"] == harm
    assert said["why"]
    assert said["fix"]


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


@pytest.mark.parametrize("name", ["FI_EFA_USE_DEVICE_RDMA", "RDMAV_FORK_SAFE"])
def test_on_gaudi_what_its_host_nic_needs_is_right_and_on_gpus_it_is_not(name: str) -> None:
    assert found(name, "1", "gaudi") is None
    assert found(name, "1", "p5") is not None


def test_device_rdma_on_a_type_without_it_ends_the_application() -> None:
    facts = facts_of("p5")
    facts["instance"]["type"] = "p3dn.24xlarge"
    facts["environment"] = [{"where": PROFILE, "line": 1, "name": "FI_EFA_USE_DEVICE_RDMA", "value": "1"}]
    assert lint(facts)[0]["harm"] == "harmful"


def test_interfaces_of_machines_that_are_not_on_ec2_are_their_owners_business() -> None:
    facts = facts_of("cpu")
    assert facts["instance"]["type"] is None
    facts["environment"] = [{"where": PROFILE, "line": 1, "name": "NCCL_SOCKET_IFNAME", "value": "ib0"}]
    assert lint(facts) == []


def test_what_slurm_gives_one_job_is_not_what_a_file_gives_everybody() -> None:
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


def test_quotes_are_not_part_of_a_value() -> None:
    said = found("NCCL_SOCKET_IFNAME", '"eth0"')
    assert said is not None
    assert said["value"] == "eth0"


def test_an_endless_value_is_cut() -> None:
    said = found("LD_LIBRARY_PATH", "/opt/amazon/efa/lib/:" + "/x" * 500)
    assert said is not None
    assert len(said["value"]) <= 121


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
