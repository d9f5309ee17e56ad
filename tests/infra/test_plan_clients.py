"""Nodes get the settings that AWS documents for machines of their size, and folders a layout that fits their files."""

from __future__ import annotations

from typing import Any

import pytest

from infra.catalog.instances import Instance, instance
from infra.config import ClusterSpec, parse
from infra.plan.clients import MODULES, PARAMETERS, client_modules, client_parameters, client_settings, stripes

LARGE = ["ldlm.namespaces.*.lru_max_age", "ldlm.namespaces.*.lru_size"]
WIDE = ["osc.*OST*.max_rpcs_in_flight", "mdc.*.max_rpcs_in_flight", "mdc.*.max_mod_rpcs_in_flight"]


def machine(name: str) -> Instance:
    found = instance(name)
    assert found is not None
    return found


def spec(**lustre: Any) -> ClusterSpec:
    storage = {"lustre": lustre} if lustre else {}
    groups = [{"name": "train", "instance_type": "p5.48xlarge", "count": 2}]
    return parse({"name": "llm", "backend": "ec2", "zone_id": "use1-az4", "groups": groups, "storage": storage})


@pytest.mark.parametrize(
    ("name", "threads", "keys"),
    [
        ("p5.48xlarge", 2, LARGE + WIDE),
        ("p5.48xlarge", 1, LARGE + WIDE),
        ("p4d.24xlarge", 2, LARGE + WIDE),
        ("p4d.24xlarge", 1, LARGE),
        ("g6e.16xlarge", 2, LARGE),
        ("m5.2xlarge", 2, []),
        ("m5.4xlarge", 2, []),
    ],
)
def test_settings_follow_memory_and_threads_that_are_on(name: str, threads: int, keys: list[str]) -> None:
    assert list(client_parameters(machine(name), threads)) == keys
    assert bool(client_modules(machine(name), threads)) is set(WIDE).issubset(keys)


def test_the_values_are_those_of_aws() -> None:
    assert client_parameters(machine("p5.48xlarge"), 1) == {
        "ldlm.namespaces.*.lru_max_age": "600000",
        "ldlm.namespaces.*.lru_size": "9600",
        "osc.*OST*.max_rpcs_in_flight": "32",
        "mdc.*.max_rpcs_in_flight": "64",
        "mdc.*.max_mod_rpcs_in_flight": "50",
    }
    assert client_modules(machine("p5.48xlarge")) == {
        "ptlrpc": "ptlrpcd_per_cpt_max=32",
        "ksocklnd": "credits=2560",
    }


def test_requests_that_change_something_stay_fewer_than_all_and_come_after() -> None:
    keys = list(client_parameters(machine("p5.48xlarge")))
    assert keys.index("mdc.*.max_mod_rpcs_in_flight") > keys.index("mdc.*.max_rpcs_in_flight")


@pytest.mark.parametrize("efa", [False, True])
def test_a_groups_clients_have_the_settings_of_its_type_with_efa_and_without(efa: bool) -> None:
    found = spec(capacity_gib=19200, per_tib_mb_s=250, efa=efa)
    modules, parameters = client_settings(found, found.groups[0])
    assert modules == client_modules(machine("p5.48xlarge"), 1)
    assert parameters == client_parameters(machine("p5.48xlarge"), 1)
    assert client_settings(spec(), found.groups[0]) == ({}, {})


def test_every_setting_says_why_and_who_says_so() -> None:
    for setting in (*PARAMETERS, *MODULES):
        assert setting.why
        assert setting.source.startswith("https://docs.aws.amazon.com/")


def test_layouts_lie_under_the_mount_and_the_data_keep_the_default() -> None:
    found = {stripe.path: stripe for stripe in stripes(spec(mount_path="/shared"))}
    assert set(found) == {"/shared/checkpoints", "/shared/containers", "/shared/logs"}
    assert " ".join(found["/shared/checkpoints"].options) == "-E 100M -c 1 -E 10G -c 8 -E -1 -c -1 -S 16M"
    assert found["/shared/logs"].options == ("-c", "1")
    assert all(stripe.why for stripe in found.values())


def test_without_a_file_system_there_is_nothing_to_lay_out() -> None:
    assert stripes(spec()) == ()
