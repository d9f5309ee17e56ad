"""What nodes are told of their group before there are any: its role, and devices of the kind that is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import ClusterSpec, parse
from infra.plan.nodes.document import node_document, node_group


def spec(*groups: dict[str, Any]) -> ClusterSpec:
    return parse(
        {
            "name": "llm",
            "backend": "hyperpod-slurm",
            "zone_id": "use1-az4",
            "groups": list(groups),
            "storage": {"lustre": {"capacity_gib": 4800, "per_tib_mb_s": 250}},
        }
    )


def group(name: str, kind: str, role: str = "worker") -> dict[str, Any]:
    return {"name": name, "instance_type": kind, "count": 1, "role": role}


def test_who_logs_in_and_who_schedules_is_no_worker() -> None:
    found = spec(
        group("train", "ml.p5.48xlarge"),
        group("head", "ml.c5.2xlarge", "controller"),
        group("door", "ml.c5.2xlarge", "login"),
    )
    roles = {"train": "worker", "head": "controller", "door": "login"}
    assert {one.name: node_group(found, one).role for one in found.groups} == roles
    assert {name: told["role"] for name, told in node_document(found)["groups"].items()} == roles


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
def test_only_gpus_count_as_gpus_and_an_accelerator_has_its_own_name(
    kind: str, gpus: int, accelerator: str | None, efa: int, nvme: int
) -> None:
    head = group("head", "ml.c5.2xlarge", "controller")
    found = spec(head, group("train", f"ml.{kind}"))
    told = node_group(found, found.groups[1])
    assert (told.type, told.gpus, told.accelerator, told.efa, told.nvme) == (kind, gpus, accelerator, efa, nvme)
