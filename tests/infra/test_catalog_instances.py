"""The snapshot of instance types: where it comes from, what it says of well-known types, and that it can be renewed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import moto.ec2
import pytest

from infra.catalog.instances import SNAPSHOT, Accelerator, instance, snapshot
from infra.catalog.refresh import render, summary


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """moto ships a dump of DescribeInstanceTypes."""
    dump = Path(moto.ec2.__file__).parent / "resources/instance_types.json.gz"
    return list(json.loads(gzip.decompress(dump.read_bytes())).values())


def test_the_snapshot_is_what_its_source_says(records: list[dict[str, Any]]) -> None:
    assert render(records, snapshot().source, snapshot().date) == SNAPSHOT.read_text(encoding="utf-8")


def test_a_p5_is_what_its_maker_says() -> None:
    found = instance("ml.p5.48xlarge")
    assert found is not None
    assert found.name == "p5.48xlarge"
    assert (found.vcpus, found.memory_mib, found.efa, len(found.cards)) == (192, 2048 * 1024, 32, 32)
    assert found.accelerators == (Accelerator("gpu", "NVIDIA H100", 8, 81920),)
    assert (found.nvme_count, found.nvme_gb) == (8, 30400)
    assert found.usage == {"on-demand", "spot", "capacity-block"}
    assert found.architecture == "x86_64"


def test_trainium_counts_as_an_accelerator() -> None:
    found = instance("trn1.32xlarge")
    assert found is not None
    assert [(one.kind, one.count) for one in found.accelerators] == [("neuron", 16)]


def test_cards_with_a_gap_in_their_numbers_are_refused(records: list[dict[str, Any]]) -> None:
    record = next(one for one in records if one["InstanceType"] == "p4d.24xlarge")
    cards = [
        {**card, "NetworkCardIndex": 2 * card["NetworkCardIndex"]} for card in record["NetworkInfo"]["NetworkCards"]
    ]
    with pytest.raises(ValueError, match="not numbered from 0"):
        summary({**record, "NetworkInfo": {**record["NetworkInfo"], "NetworkCards": cards}})
