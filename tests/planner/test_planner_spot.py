"""Advice from a history of spot prices: weighted by time, beside a capacity block, and one line for what is no history."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from infra.catalog.prices import price
from lustrain.problem import UserError
from planner import tasks
from planner.flags import SpotAdviceFlags
from planner.online import changes_of
from planner.spot import advice, markets, read_history
from tests.infra.test_preflight_online import aws_that_says


def row(day: int, usd: object, zone: str = "us-east-1a", **more: object) -> dict[str, Any]:
    return {
        "AvailabilityZone": zone,
        "InstanceType": "p5.48xlarge",
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": str(usd),
        "Timestamp": f"2026-01-{day:02d}T00:00:00+00:00",
        **more,
    }


def history(folder: Path, *rows: object) -> Path:
    path = folder / "history.json"
    path.write_text(json.dumps({"SpotPriceHistory": rows}))
    return path


def test_prices_count_for_as_long_as_they_held(tmp_path: Path) -> None:
    """Newest first, as AWS writes them: three days at 10, one at 50; the other zone has 20 all the time."""
    windows = row(2, 99, ProductDescription="Windows")
    path = history(tmp_path, row(5, 10), row(4, 50), windows, row(1, 20, "us-east-1b"), row(1, 10))
    a, b = sorted(markets(read_history(path)), key=lambda one: one.zone)
    block = price("capacity-block:p5.48xlarge", "us-east-1")
    assert block is not None
    assert (a.mean, a.now, a.least, a.most, a.days, a.changes) == (20.0, 10.0, 10.0, 50.0, 4.0, 2)
    assert (b.mean, b.volatility, b.changes) == (20.0, 0.0, 0)
    assert a.volatility == pytest.approx((0.75 * 10**2 + 0.25 * 30**2) ** 0.5 / 20)
    assert (a.block_cheaper, b.block_cheaper) == (0.25, 0.0)
    assert b.break_even == pytest.approx(20 / block.usd_hour)
    assert a.gpu_hour_usd == 2.5
    assert any("steadiest" in line and "us-east-1b" in line for line in advice([a, b]))


def test_single_price_is_a_market(tmp_path: Path) -> None:
    (market,) = markets(read_history(history(tmp_path, row(1, 100))))
    assert (market.mean, market.days, market.volatility, market.block_cheaper) == (100.0, 0.0, 0.0, 1.0)
    answer = tasks.spot_advice.body.__wrapped__(SpotAdviceFlags(str(tmp_path / "history.json")))
    assert any("cheaper on average" in line for line in answer.lines)
    assert json.loads(json.dumps(answer.data))["markets"][0]["zone"] == "us-east-1a"


def test_online_types_stand_in_place_of_a_file() -> None:
    rows = [row(5, 10), row(4, 50), row(1, 10)]
    for one in rows:
        one["Timestamp"] = datetime.fromisoformat(one["Timestamp"])
    answered = ("ec2", "describe_spot_price_history", {"SpotPriceHistory": rows})
    changes = changes_of(SpotAdviceFlags(" p5.48xlarge"), connect=lambda region: aws_that_says([answered]))
    assert [market.mean for market in markets(changes)] == [20.0]
    assert [(change.type, change.usd) for change in changes] == [("p5.48xlarge", usd) for usd in (10.0, 50.0, 10.0)]


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"history": "history.json,"}, "HISTORY"),
        ({"history": "p5.48xlarge"}, "HISTORY"),
        ({"history": "p5.48xlarge", "days": "91"}, "--days"),
        ({"history": "p5.48xlarge", "region": "us-esat-1"}, "--region"),
    ],
)
def test_history_that_aws_cannot_have_is_one_line(flags: dict[str, str], path: str) -> None:
    none = ("ec2", "describe_spot_price_history", {"SpotPriceHistory": []})
    with pytest.raises(UserError) as error:
        changes_of(SpotAdviceFlags(**flags), connect=lambda region: aws_that_says([none]))
    assert [line.path for line in error.value.problems] == [path]


def test_type_without_a_history_is_named() -> None:
    rows = [{**row(1, 10), "Timestamp": datetime.fromisoformat("2026-11-01T00:00:00+00:00")}]
    answered = ("ec2", "describe_spot_price_history", {"SpotPriceHistory": rows})
    with pytest.raises(UserError) as error:
        changes_of(SpotAdviceFlags("p5.48xlarge,p5.typo"), connect=lambda region: aws_that_says([answered]))
    assert "p5.typo" in error.value.problems[0]


@pytest.mark.parametrize("flags", [{"region": "us-east-1"}, {"days": "3"}])
def test_flag_for_aws_is_refused_with_a_file(flags: dict[str, str]) -> None:
    with pytest.raises(UserError) as error:
        tasks.spot_advice.body.__wrapped__(SpotAdviceFlags("history.json", **flags))
    assert [line.path for line in error.value.problems] == [f"--{key}" for key in flags]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", "HISTORY"),
        ("[]", "HISTORY"),
        ('{"SpotPriceHistory": []}', "HISTORY"),
        ('{"SpotPriceHistory": [1]}', "SpotPriceHistory[0]"),
        (json.dumps({"SpotPriceHistory": [row(1, 1), row(1, -1)]}), "SpotPriceHistory[1]"),
        (json.dumps({"SpotPriceHistory": [row(1, "nan")]}), "SpotPriceHistory[0]"),
        (json.dumps({"SpotPriceHistory": [row(1, 1, Timestamp=7)]}), "SpotPriceHistory[0]"),
        (json.dumps({"SpotPriceHistory": [row(1, 1, zone="")]}), "SpotPriceHistory[0]"),
        (json.dumps({"SpotPriceHistory": [row(1, 1, zone="us-east-1a b")]}), "SpotPriceHistory[0]"),
        (json.dumps({"SpotPriceHistory": [row(1, 1, InstanceType=None)]}), "SpotPriceHistory[0]"),
        (json.dumps({"SpotPriceHistory": [{"SpotPrice": "1"}]}), "SpotPriceHistory[0]"),
    ],
)
def test_what_is_no_history_is_one_line(tmp_path: Path, text: str, path: str) -> None:
    (tmp_path / "history.json").write_text(text)
    with pytest.raises(UserError) as error:
        read_history(tmp_path / "history.json")
    (line,) = error.value.problems
    assert line.path == path


def test_history_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(UserError, match="HISTORY"):
            read_history(path)
