"""A plan as tables for people, and as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from infra.catalog.instances import snapshot
from lustrain.progress import BYTES, amount_text, duration_text
from lustrain.tables import table
from planner.hardware import FRAGMENTATION, LINK_SHARE, PCIE_SHARE, RESERVED_BYTES
from planner.plan import NODE_MTBF_S, Option, Outcome, Plan, Scaling, host_bytes
from planner.step import COPY_BYTES_S, HOST_BYTES_S
from planner.strategy import Strategy
from planner.units import parameters_text, usd_text
from planner.work import Work

GIB = 2**30
CONFIRMED_NODES = 16
"""Up to here published runs scale as the law says; docs/plan.md has the figures."""
FITTED = "https://arxiv.org/abs/2411.13055"
"""See `planner.hardware.HOP_S`."""


def lines(plan: Plan) -> Iterator[str]:
    """Yield the plan: what was requested, strategies, scaling, checkpoints, and what each way to pay comes to."""
    yield from _heading(plan)
    yield ""
    yield from _options(plan)
    yield ""
    yield from _scaling(plan)
    yield ""
    yield from _checkpoints(plan)
    yield ""
    yield from _outcomes(plan)


def _heading(plan: Plan) -> Iterator[str]:
    request = plan.request
    work, node = request.work, request.node
    yield (
        f"model: {parameters_text(work.parameters)} parameters, {work.seq_len:,} tokens a sample, {work.global_batch:,} "
        f"samples a step in micro-batches of {work.micro_batch}, {work.precision.mode}"
    )
    network = f", {node.network_gb_s:g} GB/s between nodes{' by EFA' if node.efa else ''}" if request.nodes > 1 else ""
    yield (
        f"nodes: {request.nodes} x {node.type}, {node.gpus} x {node.gpu} each, {node.usable_bytes / GIB:.1f} of "
        f"{node.gpu_bytes / GIB:.1f} GiB for tensors{network} (catalogue of {snapshot().date})"
    )
    yield f"speed: {request.efficiency:.1%} of a GPU's peak while nothing waits for the network, {request.efficiency_origin}"


def _options(plan: Plan) -> Iterator[str]:
    heads = (
        "strategy",
        "recompute",
        "GiB a GPU",
        "state",
        "activations",
        "fits",
        "step s",
        "waiting s",
        "MFU",
        "tokens/s",
        "",
    )
    rows = [_option_row(plan, option) for option in plan.options]
    yield from table(heads, rows, heads[2:5] + heads[6:10])
    if plan.best.memory.host:
        host, of = host_bytes(plan.request, plan.best.memory), plan.request.node.host_bytes
        yield f"in host memory: {host / GIB:,.1f} of {of / GIB:,.1f} GiB a node for the fastest's states and a save's copy"


def _option_row(plan: Plan, option: Option) -> tuple[str, ...]:
    memory, step = option.memory, option.step
    marks = []
    if option is plan.best:
        marks.append("<- fastest that fits")
    strategy = option.strategy
    if plan.request.configured == (strategy.shard, strategy.tensor, strategy.recompute):
        marks.append("configured")
    if step is None:
        marks.append("too few micro-batches")
    times = ("-",) * 4
    if step is not None:
        times = (f"{step.total:.3g}", f"{step.exposed:.2g}", f"{option.mfu:.1%}", f"{option.tokens_per_s:,.0f}")
    return (
        option.strategy.kind,
        option.strategy.recompute,
        f"{memory.total / GIB:.1f}",
        f"{memory.state / GIB:.1f}",
        f"{memory.activations / GIB:.1f}",
        "yes" if option.fits else "no",
        *times,
        ", ".join(marks),
    )


def _scaling(plan: Plan) -> Iterator[str]:
    heads = ("nodes", "strategy", "recompute", "step s", "tokens/s", "efficiency", "target")
    yield from table(heads, [_scaling_row(row) for row in plan.scaling], heads[3:])
    if plan.request.nodes > CONFIRMED_NODES:
        yield f"beyond {CONFIRMED_NODES} nodes the latency of collectives is fitted to one figure ({FITTED})"


def _scaling_row(row: Scaling) -> tuple[str, ...]:
    target = f"{row.target:.0%}" if row.target else ""
    option = row.option
    if option is None or option.step is None or row.efficiency is None:
        return (str(row.nodes), "nothing fits", "", "", "", "", target)
    return (
        str(row.nodes),
        option.strategy.kind,
        option.strategy.recompute,
        f"{option.step.total:.3g}",
        f"{option.tokens_per_s:,.0f}",
        f"{row.efficiency:.1%}",
        target,
    )


def _checkpoints(plan: Plan) -> Iterator[str]:
    saves, assumed = plan.checkpoints, plan.request.assumptions
    yield (
        f"checkpoint: {amount_text(saves.bytes, BYTES)}; a save stops the loop for {saves.stall_s:.2g} s and commits after "
        f"{saves.commit_s:.3g} s, a restore reads for {saves.restore_s:.3g} s"
    )
    yield (
        f"by {assumed.copy_gb_s:g} GB/s from a GPU to its host (assumed), {assumed.store_gb_s:g} GB/s between a node and the "
        f"store ({_origin(plan, 'store_gb_s')}); a restart takes {assumed.restart_s:g} s more ({_origin(plan, 'restart_s')})"
    )


def _origin(plan: Plan, name: str) -> str:
    return "as given" if name in plan.request.assumptions.given else "assumed"


def settings_of(work: Work, best: Strategy) -> dict[str, Any]:
    """Return the settings that choose a strategy, with defaults for those of the other way to share the model that were given:
    the trainer refuses them."""
    return best.settings | _defaults_again(work, best)


def _defaults_again(work: Work, best: Strategy) -> dict[str, str]:
    if best.uses_fsdp:
        return {} if work.bucket_views else {"parallel.gradient_as_bucket_view": "true"}
    offload = {"parallel.offload": "none"} if work.offload else {}
    return offload | ({} if work.reshard else {"parallel.reshard": "true"})


def _outcomes(plan: Plan) -> Iterator[str]:
    request = plan.request
    best = plan.best.strategy
    settings = settings_of(request.work, best)
    sets = " ".join(f"--set {key}={value}" for key, value in settings.items())
    yield f"{amount_text(request.tokens, 'tokens')} with {best.kind}, recomputation {best.recompute} ({sets}):"
    heads = (
        *("paid", "USD/h a node", "interrupted every", "best interval", "trainer's", "goodput", "at best"),
        *("wall time", "USD", "USD/M tokens", "rate"),
    )
    yield from table(heads, [_outcome_row(plan, outcome) for outcome in plan.outcomes], heads[1:10])
    failures = (
        "as given"
        if "mtbf_hours" in request.assumptions.given
        else ("6,334 h of a node as in Llama 3's training, spot also by checkpoint.mtbf_hours (assumed)")
    )
    yield f"interruptions: {failures}, none with a notice"
    store = plan.storage
    yield (
        f"storage in these sums: {store.s3_usd_hour:.3g} USD/h for {request.checkpoint.keep_last} checkpoints in S3, "
        f"{store.lustre_usd_hour:.3g} USD/h for {request.lustre_gib:,} GiB of FSx ({store.origin})"
    )


def _outcome_row(plan: Plan, outcome: Outcome) -> tuple[str, ...]:
    per_million = outcome.usd_per_million(plan.request.tokens)
    endless = outcome.goodput <= 0
    return (
        outcome.rate.mode,
        "?" if outcome.rate.usd_hour is None else f"{outcome.rate.usd_hour:,.2f}",
        duration_text(outcome.mtbf_s),
        duration_text(outcome.best_interval_s),
        duration_text(outcome.trainers_interval_s),
        f"{outcome.goodput:.1%}",
        f"{outcome.best_goodput:.1%}",
        "never" if endless else duration_text(outcome.wall_s),
        "?" if outcome.usd is None or endless else usd_text(outcome.usd),
        "?" if per_million is None or endless else f"{per_million:.3g}",
        outcome.rate.origin,
    )


def data(plan: Plan) -> dict[str, Any]:
    """Return the plan for `--json`: seconds, bytes and USD; null stands for what is unknown or never ends."""
    request = plan.request
    return {
        "parameters": request.work.parameters,
        "tokens": request.tokens,
        "nodes": request.nodes,
        "instance_type": request.node.type,
        "gpus": request.gpus,
        "usable_bytes": request.node.usable_bytes,
        "efficiency": request.efficiency,
        "efficiency_origin": request.efficiency_origin,
        "assumed": _assumed(plan),
        "options": [_option_data(option) for option in plan.options],
        "best": _option_data(plan.best),
        "scaling": [
            {
                "nodes": row.nodes,
                "efficiency": row.efficiency,
                "target": row.target,
                "option": None if row.option is None else _option_data(row.option),
            }
            for row in plan.scaling
        ],
        "checkpoint": asdict(plan.checkpoints),
        "storage": asdict(plan.storage),
        "outcomes": [_outcome_data(plan, outcome) for outcome in plan.outcomes],
    }


def _assumed(plan: Plan) -> dict[str, float]:
    """Return every figure that was neither measured nor given."""
    request, assumptions = plan.request, plan.request.assumptions
    figures = {
        "efficiency": request.efficiency,
        "reserved_bytes": RESERVED_BYTES,
        "fragmentation": FRAGMENTATION,
        "link_share": LINK_SHARE,
        "pcie_share": PCIE_SHARE,
        "copy_gb_s": assumptions.copy_gb_s,
        **({"offload_copy_gb_s": COPY_BYTES_S / 1e9, "host_gb_s": HOST_BYTES_S / 1e9} if request.work.offload else {}),
        "store_gb_s": assumptions.store_gb_s,
        "restart_s": assumptions.restart_s,
        "node_mtbf_hours": NODE_MTBF_S / 3600,
        "spot_mtbf_hours": request.checkpoint.mtbf_hours,
    }
    known = set(assumptions.given) | ({"efficiency"} if request.efficiency_origin != "assumed" else set())
    if "mtbf_hours" in known:
        known |= {"node_mtbf_hours", "spot_mtbf_hours"}
    return {name: value for name, value in figures.items() if name not in known}


def _option_data(option: Option) -> dict[str, Any]:
    return {
        "strategy": option.strategy.kind,
        "recompute": option.strategy.recompute,
        "replicate": option.strategy.replicate,
        "shard": option.strategy.shard,
        "tensor": option.strategy.tensor,
        "memory": asdict(option.memory) | {"total": option.memory.total},
        "fits": option.fits,
        "step": None if option.step is None else asdict(option.step) | {"total": option.step.total},
        "mfu": option.mfu,
        "tokens_per_s": option.tokens_per_s,
    }


def _outcome_data(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    ends = outcome.goodput > 0
    return {
        "mode": outcome.rate.mode,
        "usd_hour_node": outcome.rate.usd_hour,
        "rate_origin": outcome.rate.origin,
        "rate_source": outcome.rate.source,
        "mtbf_s": outcome.mtbf_s,
        "best_interval_s": outcome.best_interval_s,
        "trainers_interval_s": outcome.trainers_interval_s,
        "goodput": outcome.goodput,
        "best_goodput": outcome.best_goodput,
        "wall_s": outcome.wall_s if ends else None,
        "usd": outcome.usd if ends else None,
        "storage_usd": outcome.storage_usd if ends else None,
        "usd_per_million_tokens": outcome.usd_per_million(plan.request.tokens) if ends else None,
    }
