"""Nodes get the settings that AWS documents for machines of their size, and folders a layout that fits their files."""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import ClusterSpec, parse
from infra.plan.nodes.clients import module_options, stripes
from infra.plan.nodes.document import node_document
from node_setup.agent.owned import HEADER


def spec(**lustre: Any) -> ClusterSpec:
    storage = {"lustre": lustre} if lustre else {}
    groups = [{"name": "train", "instance_type": "p5.48xlarge", "count": 2}]
    return parse({"name": "llm", "backend": "ec2", "zone_id": "use1-az4", "groups": groups, "storage": storage})


def options(**group: Any) -> list[str]:
    """The lines of the file of module options but its head and its comments."""
    found = spec(capacity_gib=19200, per_tib_mb_s=250, **group.pop("lustre", {}))
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
def test_module_options_follow_the_threads_that_are_on_and_are_those_of_aws(
    name: str, threads: int, wide: bool
) -> None:
    aws = {"options ptlrpc ptlrpcd_per_cpt_max=32", "options ksocklnd credits=2560"}
    assert set(options(instance_type=name, threads_per_core=threads)) == (aws if wide else set())


@pytest.mark.parametrize("efa", [False, True])
def test_modules_have_the_same_options_with_efa_and_without(efa: bool) -> None:
    """EFA's requests go through ptlrpc, and TCP stays beside it for what EFA does not reach."""
    assert options(lustre={"efa": efa}) == options()


def test_without_a_file_system_no_module_gets_options() -> None:
    assert module_options(spec(), spec().groups[0], node_document(spec())) == ""


def test_layouts_lie_under_the_mount_and_the_data_keep_the_default() -> None:
    found = {stripe.path: stripe for stripe in stripes(spec(mount_path="/shared"))}
    assert set(found) == {"/shared/checkpoints", "/shared/containers", "/shared/logs"}
    assert " ".join(found["/shared/checkpoints"].options) == "-E 100M -c 1 -E 10G -c 8 -E -1 -c -1 -S 16M"
    assert found["/shared/logs"].options == ("-c", "1")
    assert all(stripe.why for stripe in found.values())


def test_without_a_file_system_there_is_nothing_to_lay_out() -> None:
    assert stripes(spec()) == ()
