"""What a run has cost: nodes by the hours between its launches, divided over where its time went."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.aws import Aws
from lustrain.problem import UserError
from planner.flags import RunCostFlags
from planner.online import prices_of_today
from planner.run_cost import run_cost
from planner.spent import spent
from tests.infra.test_preflight_online import aws_that_says
from tests.infra.test_prices_online import P5, change, item
from tests.planner.requests import CLUSTER, Files
from trainer.checkpoint.stored_config import encode as encode_config
from trainer.config import load
from trainer.metrics.records import STEPS, PartName, encode
from trainer.run.journal import attempt_key


def record(step: int, generation: int) -> dict[str, Any]:
    return {"step": step, "attempt": generation, "step_seconds": 100.0, "blocked_seconds": 0.0, "world_size": 8}


LAUNCHES: list[dict[str, Any]] = [
    {"attempt": 1, "nodes": ["a", "b"], "started": 0.0, "ended": 1100.0, "code": 75, "generation": 1, "start_s": 200.0},
    {"attempt": 2, "nodes": ["a"], "idle": ["c"], "started": 1800.0, "ended": 3600.0, "code": 0}
    | {"generation": 2, "start_s": 200.0},
]
"""100 s of start and ten steps; 700 s without ranks; 100 s of start and 17 steps, of which two are done over."""
GENERATIONS = {1: [record(step, 1) for step in range(1, 11)], 2: [record(step, 2) for step in range(9, 26)]}


def test_parts_and_projection_follow_the_nodes_and_their_time() -> None:
    cost = spent(LAUNCHES, GENERATIONS, 50, 36.0)
    assert cost.node_hours == pytest.approx(2.0)
    assert cost.usd == pytest.approx(72.0)
    assert sum(share.usd for share in cost.shares) == pytest.approx(cost.usd)
    assert {share.name: share.seconds for share in cost.shares if share.seconds} == {
        "progress": 2500.0,
        "repeated steps": 200.0,
        "starts": 200.0,
        "between launches, after a lost node": 700.0,
    }
    assert cost.goodput == pytest.approx(2500 / 3600)
    # The second start, the time between, and the steps that were done over.
    assert cost.lost_usd == pytest.approx(72.0 * (100 + 700 + 200) / 3600)
    assert (cost.interruptions, cost.step) == (1, 25)
    assert (cost.remaining_s, cost.remaining_usd) == (pytest.approx(3600.0), pytest.approx(72.0))


def test_goodput_is_that_of_the_run_after_a_roll_back() -> None:
    """Steps 9 to 25 were done by generation 2 of the same launch; a roll back is no interruption."""
    launch = {"attempt": 1, "nodes": ["a"], "started": 0.0, "ended": 3600.0, "code": 0, "start_s": 200.0}
    cost = spent([launch | {"generation": 2, "generations": [1, 2]}], GENERATIONS, 50, 36.0)
    assert cost.goodput == pytest.approx(2500 / 3600) == pytest.approx(cost.shares[0].seconds / 3600)
    assert (cost.interruptions, cost.lost_usd) == (0, pytest.approx(36.0 * 200 / 3600))
    undone = GENERATIONS | {2: GENERATIONS[2][:1]}
    assert spent([launch | {"generations": [1, 2]}], undone, 50, 36.0).step == 9


def test_time_after_a_stop_is_not_paid() -> None:
    first, second = LAUNCHES[0] | {"code": 85}, LAUNCHES[1]
    stopped = spent([first, second], GENERATIONS, 50, 36.0)
    assert stopped.node_hours == pytest.approx(2.0 - 2 * 700 / 3600)
    assert sum(share.usd for share in stopped.shares) == pytest.approx(stopped.usd)
    assert next(share.usd for share in stopped.shares if share.name == "between launches, after a stop") == 0
    assert (stopped.interruptions, stopped.remaining_s) == (0, pytest.approx(2900.0))
    noticed = spent([first | {"noticed": ["a"]}, second], GENERATIONS, 50, 36.0)
    assert (noticed.interruptions, noticed.node_hours) == (1, pytest.approx(2.0))


def test_pause_of_a_growth_is_paid_and_no_interruption() -> None:
    first, second = LAUNCHES[0] | {"code": 85, "grows_to": 3}, LAUNCHES[1]
    grown = spent([first, second], GENERATIONS, 50, 36.0)
    assert (grown.interruptions, grown.node_hours) == (0, pytest.approx(2.0))
    assert next(share.usd for share in grown.shares if share.name == "between launches, after growth") > 0
    noticed = spent([first | {"noticed": ["a"]}, second], GENERATIONS, 50, 36.0)
    assert (noticed.interruptions, noticed.node_hours) == (1, pytest.approx(2.0))


def test_idle_nodes_are_paid_too() -> None:
    without = [launch | {"idle": []} for launch in LAUNCHES]
    assert spent(without, GENERATIONS, 50, 36.0).node_hours == pytest.approx(1.5)


def test_finished_run_needs_nothing_more() -> None:
    assert spent(LAUNCHES, GENERATIONS, 25, 36.0).remaining_usd == 0


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run of the launches above, of which the last one's end is known."""
    files = Files(tmp_path)
    folder = tmp_path / "run"
    for launch in LAUNCHES:
        path = folder / attempt_key(launch["attempt"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"version": 1, "by": "x"} | launch))
    (folder / "config.toml").write_bytes(encode_config(load(files.config, ["train.steps=50"]), {}))
    for generation, records in GENERATIONS.items():
        path = folder / PartName(generation, 0).key(STEPS)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(encode, records)))
    (folder / "events").mkdir()
    (folder / "events/000001-00000.jsonl").write_bytes(encode({"event": "started"}))
    return str(folder)


def test_run_is_priced_as_the_cluster_pays(run: str, tmp_path: Path) -> None:
    cluster = Files(tmp_path).cluster()
    _, data = run_cost(RunCostFlags(run=run, cluster=cluster))
    assert (data["type"], data["rate"]["mode"]) == ("p5en.48xlarge", "spot")
    assert data["usd"] == pytest.approx(2 * 26.5714)
    lines, data = run_cost(RunCostFlags(run=run, instance_type="g6e.12xlarge", price=("on-demand=36",)))
    assert data["remaining_usd"] == pytest.approx(72.0)
    assert any("144.00 USD in all" in line for line in lines)


def test_launch_without_an_end_is_not_billed_until_now(run: str) -> None:
    path = Path(run) / attempt_key(2)
    path.write_text(json.dumps({"version": 1, "by": "x", "attempt": 2, "nodes": ["a"], "started": 1800.0}))
    lines, data = run_cost(RunCostFlags(run=run, instance_type="g6e.12xlarge", price=("on-demand=36",)))
    assert data["usd"] == pytest.approx(36.0)
    assert any(line.startswith("launch 2 ") for line in lines)


@pytest.mark.parametrize("mode", ["owned", "reservation", "mixed"])
def test_capacity_without_a_price_has_to_be_given(run: str, tmp_path: Path, mode: str) -> None:
    """The group's own capacity goes before the Cluster's, which is spot."""
    cluster = Files(tmp_path).cluster(train=CLUSTER["groups"]["train"] | {"capacity": {"mode": mode}})
    with pytest.raises(UserError) as error:
        run_cost(RunCostFlags(run=run, cluster=cluster))
    assert [line.path for line in error.value.problems] == ["--paid"]
    _, data = run_cost(RunCostFlags(run=run, cluster=cluster, price=("capacity-block=36",)))
    assert (data["rate"]["mode"], data["usd"]) == ("capacity-block", pytest.approx(72.0))
    assert run_cost(RunCostFlags(run=run, cluster=cluster, paid="spot"))[1]["rate"]["mode"] == "spot"


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"instance_type": None}, "--instance-type"),
        ({"instance_type": "g6e.12xlrge"}, "--instance-type"),
        ({"paid": "weekly"}, "--paid"),
        ({"paid": "training-plan"}, "--paid"),
    ],
)
def test_cost_without_a_price_is_one_line(run: str, flags: dict[str, Any], path: str) -> None:
    with pytest.raises(UserError) as error:
        run_cost(RunCostFlags(**{"run": run, "instance_type": "g6e.12xlarge"} | flags))
    assert [line.path for line in error.value.problems] == [path]


def test_run_is_priced_by_what_aws_answers_today(run: str) -> None:
    sold = ("pricing", "get_products", {"FormatVersion": "aws_v1", "PriceList": [item("60.5")]})
    rows = [change("eu-west-1a", "30.0", 20), change("eu-west-1b", "18.0", 20)]
    history = ("ec2", "describe_spot_price_history", {"SpotPriceHistory": rows})

    def today(paid: str, *answers: Any) -> dict[str, Any]:
        ask = partial(prices_of_today, connect=lambda region: aws_that_says(list(answers), region))
        return run_cost(RunCostFlags(run=run, instance_type=P5, region="eu-west-1", paid=paid), ask)[1]

    assert today("on-demand", sold)["usd"] == pytest.approx(2 * 60.5)
    spot = today("spot", history)
    assert spot["usd"] == pytest.approx(2 * 18.0)
    assert "eu-west-1b" in spot["rate"]["origin"]
    with pytest.raises(UserError) as error:
        today("on-demand", ("pricing", "get_products", {"PriceList": []}))
    assert [line.path for line in error.value.problems] == ["--paid"]


@pytest.mark.parametrize(
    "flags", [{"paid": "capacity-block"}, {"paid": "training-plan"}, {"price": ("on-demand=36",)}], ids=str
)
def test_online_is_refused_where_aws_has_nothing_to_say(run: str, flags: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        run_cost(RunCostFlags(run=run, instance_type=P5, **flags), partial(prices_of_today, connect=broken_off))
    assert [line.path for line in error.value.problems] == ["--online"]


def broken_off(region: str) -> Aws:
    raise AssertionError("AWS was asked")


def test_run_without_launches_is_one_line(run: str) -> None:
    for launch in LAUNCHES:
        (Path(run) / attempt_key(launch["attempt"])).unlink()
    with pytest.raises(UserError) as error:
        run_cost(RunCostFlags(run=run, instance_type="g6e.12xlarge"))
    assert [line.path for line in error.value.problems] == ["RUN"]
