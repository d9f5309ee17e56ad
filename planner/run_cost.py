"""Reads a run and its prices for `fab run-cost`, and shows what it has cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.catalog.instances import instance, snapshot
from infra.catalog.prices import Price
from launch.report import lost_launchers, with_ends
from launch.request import uri_of
from launch.runs import open_existing_run
from lustrain import deployed
from lustrain.cluster import Cluster, NodeGroup
from lustrain.problem import UserError, did_you_mean, problem
from lustrain.progress import duration_text
from lustrain.tables import table
from planner.flags import RunCostFlags
from planner.price import MODES, Rate, rates
from planner.request import group_of, prices_of, region_of, type_of
from planner.spent import Spent, spent
from trainer.checkpoint.stored_config import read_stored
from trainer.metrics.reader import read_generations
from trainer.run import journal
from trainer.storage import ObjectStore

AskPrices = Callable[[str, str, str], Mapping[str, Price | None]]
"""Prices of today by the way to pay, the type and the region of a node."""


def run_cost(flags: RunCostFlags, ask: AskPrices | None = None) -> tuple[list[str], dict[str, Any]]:
    """Return what a run has cost, as lines and as data; `ask` is for --online. UserError where its nodes have no price, or it
    has not trained."""
    cluster = deployed.cluster(flags.cluster, flags.stack)
    group = None if flags.instance_type and not flags.group else group_of(flags.group, cluster)
    type_name = type_of(flags.instance_type, group).removeprefix("ml.")
    if instance(type_name) is None:
        fix = did_you_mean(type_name, snapshot().types) or "give the name of an EC2 instance type"
        raise UserError(problem("--instance-type", type_name, "is not in the catalogue of instance types", fix=fix))
    prices = prices_of(flags.price)
    mode = _mode(flags.paid, prices, cluster, group)
    if ask is not None and mode in prices:
        why = f"--price {mode}=… gives the price that AWS would tell"
        raise UserError(problem("--online", True, why, fix="leave one of them out"))
    store = open_existing_run(uri_of(flags.run, cluster, Path.cwd()))
    generations = read_generations(store)
    launches = with_ends(store, journal.read(store), generations, time.time())
    region = region_of(flags.region, cluster)
    rate = _rate(mode, type_name, region, prices, {} if ask is None else ask(mode, type_name, region))
    cost = _spent(store, launches, generations, rate)
    data = asdict(cost) | {"rate": asdict(rate), "type": type_name}
    return [*_lines(store, cost, type_name, rate), *lost_launchers(launches)], data


def _mode(paid: str | None, prices: Mapping[str, float], cluster: Cluster | None, group: NodeGroup | None) -> str:
    """Return how the nodes were paid: as the flag says, as the only price given does, else as the Cluster. UserError."""
    allowed = ", ".join(MODES)
    if paid is not None:
        if paid not in MODES:
            raise UserError(problem("--paid", paid, "is no way to pay for nodes", allowed=allowed))
        return paid
    if len(prices) == 1:
        return next(iter(prices))
    if cluster is None:
        return "on-demand"
    mode = (group.capacity if group and group.capacity else cluster.capacity).mode
    if mode not in MODES:
        why = f"is not given, and the Cluster's capacity is {mode}, which has no price of its own"
        raise UserError(problem("--paid", None, why, allowed=allowed, fix="--paid MODE, or --price MODE=USD"))
    return mode


def _rate(
    mode: str, type_name: str, region: str, prices: Mapping[str, float], today: Mapping[str, Price | None]
) -> Rate:
    rate = rates(type_name, region, prices, today)[MODES.index(mode)]
    if rate.usd_hour is None:
        why = f"AWS sells no {type_name} in {region} so" if today else f"no price of a {type_name} paid so is known"
        raise UserError(problem("--paid", mode, why, fix=f"--price {mode}=USD"))
    return rate


def _spent(
    store: ObjectStore,
    launches: Sequence[Mapping[str, Any]],
    generations: Mapping[int, Sequence[Mapping[str, Any]]],
    rate: Rate,
) -> Spent:
    stored = read_stored(store)
    steps = int(stored.settings["train.steps"]) if stored else 0
    try:
        return spent(launches, generations, steps, rate.usd_hour or 0.0)
    except ValueError:
        why, fix = "has no launch with a step in its journal", "wait for its first steps; `fab train` keeps a journal"
        raise UserError(problem("RUN", store.uri, why, fix=fix)) from None


def _lines(store: ObjectStore, cost: Spent, type_name: str, rate: Rate) -> Iterator[str]:
    yield (
        f"{store.uri}: {cost.usd:,.2f} USD for {cost.node_hours:,.2f} hours of a {type_name} at {rate.usd_hour:,.2f} USD "
        f"({rate.mode}, {rate.origin})"
    )
    rows = [
        (share.name, duration_text(share.seconds), f"{share.usd:,.2f}")
        for share in cost.shares
        if share.seconds >= 0.05
    ]
    yield from table(("where it went", "time", "USD"), rows, ("time", "USD"))
    yield (
        f"goodput {cost.goodput:.1%}; {cost.interruptions} interruptions, other restarts and repeated steps cost "
        f"{cost.lost_usd:,.2f} USD"
    )
    if cost.step < cost.steps:
        yield (
            f"step {cost.step:,} of {cost.steps:,}: at this pace {duration_text(cost.remaining_s)} and "
            f"{cost.remaining_usd:,.2f} USD more, {cost.usd + cost.remaining_usd:,.2f} USD in all"
        )
    yield "nodes alone: storage, traffic and what was bought beside them are not in it"
