"""What a cluster costs by its plan: each part, the sums, and what no price is known of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from infra.catalog.fsx import PER_TIB_MB_S
from infra.catalog.instances import instance
from infra.catalog.prices import ANYWHERE, HOME, PRICES, price, prices
from infra.plan.cost import Cost, Part, cost
from infra.plan.stack import Plan
from tests.infra.edits import STACKS, place, spec_of
from tests.infra.mistakes import BLOCK, BOUGHT, EKS, HOMES, JOINED, P9, RESERVED, SLURM, SPOT, THERE

BARE = {key: value for key, value in P9.items() if key != "accelerators"}
NOW = datetime(2026, 11, 25, tzinfo=UTC)
DISKS_EC2 = 500 * 0.08 + 3_000 * 0.005 + 375 * 0.04
"""500 GiB of gp3 with 6,000 IOPS and 500 MB/s: 3,000 and 125 are free."""


def cost_of(stack: str, edits: dict[str, Any] | None = None, region: str = HOME, now: datetime = NOW) -> Cost:
    return cost(Plan(spec_of(stack, edits or {}), replace(place(stack), region=region), now))


def part_of(total: Cost, name: str) -> Part | None:
    return next((part for part in total.parts if part.name == name), None)


SSD = {"capacity_gib": 9_600, "per_tib_mb_s": 1_000, "efa": True}
EXTENDED = {"eks.version": "1.33", "eks.upgrade_policy": "EXTENDED"}


@pytest.mark.parametrize(
    ("stack", "edits", "name", "month"),
    [
        (SPOT, {}, "train", 8 * 30.13118 * 730),
        (SPOT, {}, "train disks", 8 * DISKS_EC2),
        (SPOT, {}, "home", 256 * 0.09 + 160 * 0.52),
        (SPOT, {}, "Lustre", 4_800 * 0.21),
        (SPOT, {"storage.lustre": SSD}, "Lustre", 9_600 * 0.6),
        (SPOT, {"storage.lustre": {**SSD, "metadata_iops": 12_000}}, "Lustre", 9_600 * 0.6 + 6_000 * 0.055),
        (SPOT, {"storage.lustre": {**SSD, "metadata_iops": 6_000}}, "Lustre", 9_600 * 0.6),
        (SPOT, {"storage.lustre": {"type": "intelligent-tiering"}}, "Lustre", 4_000 * 0.52),
        (SPOT, {"storage.lustre": {"existing": THERE}}, "Lustre", None),
        (SPOT, {"storage": {}}, "home", None),
        (SPOT, {"storage.home": {"type": "efs"}}, "home", 0.0),
        (SPOT, {"storage.home": {"existing": HOMES}}, "home", None),
        (SPOT, {}, "NAT gateway", (0.045 + 0.005) * 730),
        (SPOT, {"network.nat": False}, "NAT gateway", None),
        (SPOT, {}, "endpoints", None),
        (BLOCK, {}, "NAT gateway", None),
        (BLOCK, {}, "endpoints", 12 * 0.01 * 730),
        (BLOCK, {}, "train", 0),
        (BLOCK, {}, "train disks", 16 * DISKS_EC2),
        (RESERVED, {"groups.0.instance_type": "p5.48xlarge"}, "train", 2 * 55.04 * 730),
        (RESERVED, {"groups.0.instance_type": "p5.48xlarge", "groups.0.capacity": BOUGHT}, "train", 0),
        (SLURM, {}, "controller", 0.34 * 730),
        (SLURM, {}, "login", 0.384 * 730),
        (SLURM, {}, "login disks", 500 * 0.08),
        (SLURM, {}, "train", 0),
        (EKS, {}, "system", 2 * 0.384 * 730),
        (EKS, {}, "EKS", 73),
        (EKS, EXTENDED, "EKS", 438),
        (EKS, {**EXTENDED, "eks.upgrade_policy": "STANDARD"}, "EKS", 73),
        (EKS, {"eks.upgrade_policy": "EXTENDED"}, "EKS", 73),
        (EKS, JOINED, "EKS", None),
        (SPOT, {"observability.dashboard": False}, "CloudWatch", 12 * 0.1),
        (SPOT, {}, "monitor", 0.1008 * 730),
        (SPOT, {}, "monitor disks", 70 * 0.08),
        (SLURM, {}, "workspace", 0),
    ],
)
def test_each_part_costs_what_its_plan_says(stack: str, edits: dict[str, Any], name: str, month: float | None) -> None:
    part = part_of(cost_of(stack, edits), name)
    assert (part and part.usd_month) == (None if month is None else pytest.approx(month))


@pytest.mark.parametrize(
    ("stack", "edits", "name", "always_on", "least"),
    [
        (SPOT, {}, "train", False, 0.1),
        (SPOT, {}, "train disks", False, 1),
        (SPOT, {}, "home", True, 1),
        (RESERVED, {}, "train", True, 1),
        (RESERVED, {}, "train disks", False, 1),
        (SLURM, {}, "controller", True, 1),
        (SLURM, {}, "controller disks", True, 1),
        (EKS, {"groups.0.capacity": {"mode": "spot"}}, "system", True, 0.1),
        (SPOT, {"groups.0.instance_type": "p9.48xlarge", "instance_types": {"p9.48xlarge": BARE}}, "train", True, 0.1),
    ],
)
def test_machines_and_made_reservations_are_always_on(
    stack: str, edits: dict[str, Any], name: str, always_on: bool, least: float
) -> None:
    part = part_of(cost_of(stack, edits), name)
    assert part
    assert (part.always_on, part.least) == (always_on, least)


@pytest.mark.parametrize("stack", STACKS)
def test_sums_are_those_of_the_parts(stack: str) -> None:
    total = cost_of(stack)
    assert total.usd_month == pytest.approx(sum(part.usd_month for part in total.parts))
    assert total.always_on.usd_hour + total.training.usd_hour == pytest.approx(total.usd_hour)
    assert 0 < total.least_usd_hour <= total.usd_hour


def test_type_without_a_price_is_unknown_and_counts_nothing() -> None:
    total = cost_of(SPOT, {"groups.0.instance_type": "p5e.48xlarge"})
    train = part_of(total, "train")
    assert train
    assert (train.usd_hour, train.counted, total.unknown) == (0, False, ("p5e.48xlarge",))
    assert total.usd_hour == pytest.approx(sum(part.usd_hour for part in total.parts if part is not train))


def test_what_intelligent_tiering_stores_has_no_known_price() -> None:
    assert any("Lustre stores" in item for item in cost_of(RESERVED).unknown)


def test_region_without_a_price_shows_us_east_1_and_says_so() -> None:
    home, away = cost_of(EKS), cost_of(EKS, region="eu-west-1")
    assert [part.usd_hour for part in away.parts] == [part.usd_hour for part in home.parts]
    assert home.priced_elsewhere == ()
    assert set(away.priced_elsewhere) == {part.name for part in away.parts} - {"EKS"}


def test_region_with_its_own_price_is_shown_at_that() -> None:
    assert price("p6-b300.48xlarge", "us-west-2")
    assert price("p6-b300.48xlarge", "us-east-1") is None
    train = part_of(cost_of(RESERVED, region="us-west-2"), "train")
    assert train
    assert train.usd_hour == pytest.approx(2 * 142.416)


def test_prices_have_a_date_a_source_and_a_known_subject() -> None:
    for (name, region), entry in prices().items():
        assert entry.usd > 0, name
        assert re.fullmatch(r"20\d\d(-\d\d-\d\d)?", entry.date), name
        assert entry.source.startswith("https://"), name
        assert region == ANYWHERE or re.fullmatch(r"[a-z]+-[a-z]+-\d", region), name
        assert "." not in name or instance(name.rpartition(":")[2]), f"{name} is no instance type"


def test_no_price_stands_twice() -> None:
    _, *rows = map(json.loads, PRICES.read_text(encoding="utf-8").splitlines())
    assert len(prices()) == sum(len(row["regions"]) * len(row["usd"]) for row in rows)


def test_every_rate_of_lustre_has_a_price() -> None:
    assert [rate for rate in PER_TIB_MB_S if not price(f"lustre-ssd-{rate}-gb", HOME)] == []
