"""What GPUs cost: per hour, per million tokens, and for nothing. Storage, traffic and discounts are not in it.

Ranks have one GPU each; their price is the reader's, from a list price on.
"""

from __future__ import annotations

from infra.catalog.instances import instance
from infra.catalog.prices import HOME, price
from infra.plan.watch.dashboards.panel import CHOOSE_RUN, NO_DCGM, RUN, Dashboard, Number, Row, make_panel

TYPE = "p5.48xlarge"
_PRICE = "$gpu_hour"
_RANKS = f"max by (run) (lustrain_world_size{{{RUN}}})"
_SAMPLES_AN_HOUR = 120
_SPEED = f"max by (run) (avg_over_time(lustrain_tokens_per_second{{{RUN}}}[15m]))"
_SPENT = f"sum_over_time({_RANKS}[$__range:30s]) / {_SAMPLES_AN_HOUR} * {_PRICE}"
_TOKENS = (
    f"(max by (run) (max_over_time(lustrain_run_tokens{{{RUN}}}[$__range]))"
    f" - min by (run) (min_over_time(lustrain_run_tokens{{{RUN}}}[$__range])))"
)


def list_price() -> float:
    """Return the USD of an hour of one GPU of `TYPE`, on demand."""
    kind, found = instance(TYPE), price(TYPE, HOME)
    assert kind is not None
    assert found is not None
    return found.usd_hour / kind.accelerator_count


def dashboard(gpu_hour_usd: float | None = None) -> Dashboard:
    """Return the page, whose price of a GPU-hour begins with `gpu_hour_usd`, or with the list price."""
    where = f"list price of {TYPE} on demand in {HOME}, by GPU" if gpu_hour_usd is None else "as given"
    usd = list_price() if gpu_hour_usd is None else gpu_hour_usd
    return Dashboard(
        "cost",
        "Cost",
        "What GPUs cost while they train and while they do not, at the price that you type in.",
        (CHOOSE_RUN, Number("gpu_hour", "USD per GPU-hour", usd, where)),
        (
            Row(
                "Spend",
                (
                    make_panel(
                        "USD per hour by run",
                        "What does each run cost now?",
                        f"{_RANKS} * {_PRICE}",
                        "currencyUSD",
                        legend="{{run}}",
                    ),
                    make_panel(
                        "USD in this range by run",
                        "What did the ranks of each run cost while they trained, in the time that is shown?",
                        _SPENT,
                        "currencyUSD",
                        legend="{{run}}",
                        kind="number",
                    ),
                    make_panel(
                        "USD per hour of all GPUs",
                        "What does the cluster cost now, used or not?",
                        f"count(DCGM_FI_DEV_GPU_TEMP) * {_PRICE}",
                        "currencyUSD",
                        legend="all GPUs",
                        absent=NO_DCGM,
                    ),
                ),
            ),
            Row(
                "What it buys",
                (
                    make_panel(
                        "USD per million tokens, now",
                        "What do tokens cost at this speed?",
                        f"{_RANKS} * {_PRICE} / ({_SPEED} * 3600 / 1000000)",
                        "currencyUSD",
                        legend="{{run}}",
                    ),
                    make_panel(
                        "USD per million tokens, in this range",
                        "What did tokens cost with repeated steps and starts in it? Pauses between launches are not.",
                        f"{_SPENT} / ({_TOKENS} / 1000000)",
                        "currencyUSD",
                        legend="{{run}}",
                        kind="number",
                    ),
                ),
            ),
            Row(
                "For nothing",
                (
                    make_panel(
                        "USD per hour that is lost",
                        "What of each run's hour goes into starts, saves, repeated steps and pauses, on average?",
                        f"{_RANKS} * {_PRICE} * (1 - max by (run) (lustrain_goodput_ratio{{{RUN}}}))",
                        "currencyUSD",
                        legend="{{run}}",
                    ),
                    make_panel(
                        "USD per hour of idle GPUs",
                        "What do GPUs cost that did nothing for a quarter of an hour?",
                        f"sum(max_over_time(DCGM_FI_DEV_GPU_UTIL[15m]) < bool 1) * {_PRICE}",
                        "currencyUSD",
                        legend="idle GPUs",
                        absent=NO_DCGM,
                    ),
                    make_panel(
                        "Nodes that wait for a job",
                        "How many nodes of Slurm are powered and free?",
                        'max by (job) (sum by (job, instance) (lustrain_slurm_nodes{state="idle",flag=""}))',
                        legend="{{job}}",
                    ),
                ),
            ),
        ),
    )
