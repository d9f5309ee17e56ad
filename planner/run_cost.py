"""Reads a run and its prices for `fab run-cost`, and shows what it has cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.catalog.instances import instance, snapshot
from launch.request import uri_of
from launch.runs import open_existing_run
from lustrain import deployed
from lustrain.problem import UserError, did_you_mean, problem
from lustrain.progress import duration_text
from lustrain.tables import table
from planner.flags import RunCostFlags
from planner.price import MODES, Rate, rates
from planner.request import group_of, prices_of, region_of, type_of
from planner.spent import Spent, spent
from trainer.checkpoint.stored_config import read_stored
from trainer.launch import journal
from trainer.metrics.reader import read_generations
from trainer.storage import ObjectStore


def run_cost(flags: RunCostFlags) -> tuple[list[str], dict[str, Any]]:
    """Return what a run has cost, as lines and as data. UserError where its nodes have no price, or it has not trained."""
    cluster = deployed.cluster(flags.cluster, flags.stack)
    group = None if flags.instance_type else group_of(flags.group, cluster)
    type_name = type_of(flags.instance_type, group).removeprefix("ml.")
    if instance(type_name) is None:
        fix = did_you_mean(type_name, snapshot().types) or "give the name of an EC2 instance type"
        raise UserError(problem("--instance-type", type_name, "is not in the catalogue of instance types", fix=fix))
    paid = (group.capacity if group and group.capacity else cluster.capacity).mode if cluster else "on-demand"
    mode = flags.paid or (paid if paid in MODES else "on-demand")
    rate = _rate(mode, type_name, region_of(flags.region, cluster), flags)
    store = open_existing_run(uri_of(flags.run, cluster, Path.cwd()))
    found = _spent(store, rate)
    return list(_lines(store, found, type_name, rate)), asdict(found) | {"rate": asdict(rate), "type": type_name}


def _rate(mode: str, type_name: str, region: str, flags: RunCostFlags) -> Rate:
    if mode not in MODES:
        raise UserError(problem("--paid", mode, "is no way to pay for nodes", allowed=", ".join(MODES)))
    rate = rates(type_name, region, prices_of(flags.price))[MODES.index(mode)]
    if rate.usd_hour is None:
        why = f"no price of a {type_name} paid so is known"
        raise UserError(problem("--paid", mode, why, fix=f"--price {mode}=USD"))
    return rate


def _spent(store: ObjectStore, rate: Rate) -> Spent:
    launches = [
        launch if "ended" in launch else {**launch, "ended": time.time(), "code": None}
        for launch in journal.read(store)
    ]
    stored = read_stored(store)
    steps = int(stored.settings["train.steps"]) if stored else 0
    try:
        return spent(launches, read_generations(store), steps, rate.usd_hour or 0.0)
    except ValueError:
        why, fix = "has no launch with a step in its journal", "wait for its first steps; `fab train` keeps a journal"
        raise UserError(problem("RUN", store.uri, why, fix=fix)) from None


def _lines(store: ObjectStore, found: Spent, type_name: str, rate: Rate) -> Iterator[str]:
    yield (
        f"{store.uri}: {found.usd:,.2f} USD for {found.node_hours:,.2f} hours of a {type_name} at {rate.usd_hour:,.2f} USD "
        f"({rate.mode}, {rate.origin})"
    )
    rows = [
        (share.name, duration_text(share.seconds), f"{share.usd:,.2f}")
        for share in found.shares
        if share.seconds >= 0.05
    ]
    yield from table(("where it went", "time", "USD"), rows, ("time", "USD"))
    yield f"goodput {found.goodput:.1%}; {found.interruptions} interruptions cost {found.interruptions_usd:,.2f} USD"
    if found.step < found.steps:
        yield (
            f"step {found.step:,} of {found.steps:,}: at this pace {duration_text(found.remaining_s)} and "
            f"{found.remaining_usd:,.2f} USD more, {found.usd + found.remaining_usd:,.2f} USD in all"
        )
    yield "nodes alone: storage, traffic and what was bought beside them are not in it"
