"""Every metric that alert rules and dashboards may ask for, with its labels, and a reader of their expressions.

The trainer's and the agent's names come from their code. Those of others are listed here, with their source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser as promql
from prometheus_client.samples import Sample

from infra.plan.watch.alert_rules import ALERTS, RECORDINGS
from infra.plan.watch.dashboards import dashboards
from infra.plan.watch.dashboards.panel import Choice
from node_setup.agent.metrics.readings import EFA, readings
from node_setup.agent.slurm.queue import Queue
from tests.node_setup.test_node_metrics import planted
from trainer.errors import EXIT_DONE
from trainer.metrics.prometheus import PrometheusSink

Table = Mapping[str, frozenset[str]]

OF_TARGET = frozenset({"instance", "job", "cluster"})
"""Prometheus adds the first two to what it scrapes; the third is the usual one of those who scrape several clusters."""
DCGM = ("gpu", "UUID", "device", "modelName", "Hostname")
OTHERS = {
    # https://github.com/prometheus/node_exporter/tree/v1.5.0/collector
    "node_boot_time_seconds": (),
    "node_cpu_seconds_total": ("cpu", "mode"),
    "node_filesystem_avail_bytes": ("device", "fstype", "mountpoint"),
    "node_filesystem_readonly": ("device", "fstype", "mountpoint"),
    "node_filesystem_size_bytes": ("device", "fstype", "mountpoint"),
    "node_memory_MemAvailable_bytes": (),
    "node_network_receive_bytes_total": ("device",),
    "node_network_transmit_bytes_total": ("device",),
    "node_textfile_mtime_seconds": ("file",),
    # https://github.com/NVIDIA/dcgm-exporter/blob/main/etc/default-counters.csv
    "DCGM_FI_DEV_FB_USED": DCGM,
    "DCGM_FI_DEV_GPU_TEMP": DCGM,
    "DCGM_FI_DEV_GPU_UTIL": DCGM,
    "DCGM_FI_DEV_POWER_USAGE": DCGM,
    "DCGM_FI_DEV_SM_CLOCK": DCGM,
    # https://prometheus.io/docs/concepts/jobs_instances/#automatically-generated-labels-and-time-series
    "up": (),
    # https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/#inspecting-alerts-during-runtime
    "ALERTS": ("alertname", "alertstate", "severity", "run", "rank"),
}
GRAFANA = {"$__rate_interval": "1m", "$__range": "1h", "$run": ".*", "$node": ".*", "$gpu_hour": "6.88"}
"""Values for Grafana's variables and the pages' own."""


def trainer_samples() -> Iterator[Sample]:
    """Yield what rank 0 serves when all has happened that it has metrics for."""
    sink = PrometheusSink(run="r", rank=0, launch=1, mfu_per_token=1e-9, step_age=lambda: 1.0, deadline=1.0)
    past: Any = SimpleNamespace(began=None, useful_s=0.0, interruptions=0)
    sink.set_past(0, past)
    fields = ("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "world_size", "attempt")
    sink.step({**dict.fromkeys((*fields, "step_seconds", "data_seconds", "blocked_seconds"), 1.0), "skipped": False})
    for kind, told in (("checkpoint_committed", {"seconds": 1.0}), ("stopped", {"exit_code": EXIT_DONE})):
        sink.event(kind, {"step": 1, **told})
    return (sample for family in sink.registry.collect() for sample in family.samples)


def node_facts(folder: Path) -> dict[str, Any]:
    """Facts of a p5 on which something is wrong with each part, from recorded answers; its driver of EFA has every counter."""
    facts = planted(folder)
    facts["efa"]["devices"][0]["counters"] |= dict.fromkeys(EFA, 1)
    return facts


def table(facts: Mapping[str, Any]) -> Table:
    """Return the labels of every metric by name; `facts` are those of a node."""
    queue = Queue({("idle", ""): 1}, {"running": 1})
    known = {sample.name: frozenset(sample.labels) for sample in trainer_samples()}
    for metric in readings(dict(facts), [], queue):
        if metric.samples:
            known[metric.name] = frozenset(metric.samples[0].labels)
    known |= {name: frozenset(labels) for name, labels in OTHERS.items()}
    known = {name: labels | OF_TARGET for name, labels in known.items()}
    for recording in RECORDINGS:
        known[recording.name] = labels_of(promql.parse(recording.expression), known)
    return known


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every expression of rules, panels and variables, with where it stands."""
    yield from ((rule.name, rule.expression) for rule in (*RECORDINGS, *ALERTS))
    for page in dashboards():
        yield from (
            (f"{page.name}: {panel.title}", fill_variables(query.expression))
            for panel in page.panels
            for query in panel.queries
        )
    yield from variables()


def variables() -> Iterator[tuple[str, str]]:
    """Yield an expression with a series for each value that the reader of a page chooses from."""
    for page in dashboards():
        for variable in page.variables:
            if isinstance(variable, Choice):
                metric, label = variable.query.removeprefix("label_values(").rstrip(")").split(", ")
                yield f"{page.name}: {variable.name}", f"count by ({label}) ({metric})"


def fill_variables(expression: str, values: Mapping[str, str] = GRAFANA) -> str:
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def labels_of(expression: Any, known: Table) -> frozenset[str]:
    """Return the labels that the series of an expression may have. LookupError for a metric or a label that does not exist."""
    read = lambda inner: labels_of(inner, known)  # noqa: E731
    match expression:
        case promql.VectorSelector():
            if expression.name not in known:
                raise LookupError(f"no metric {expression.name}")
            return _require_labels(known[expression.name], [one.name for one in expression.matchers.matchers])
        case promql.MatrixSelector():
            return read(expression.vector_selector)
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            return read(expression.expr)
        case promql.AggregateExpr():
            within, modifier = read(expression.expr), expression.modifier
            if modifier is None:
                return within if str(expression.op) in ("topk", "bottomk") else frozenset()
            _require_labels(within, modifier.labels)
            listed = frozenset(modifier.labels)
            return listed if modifier.type == promql.AggModifierType.By else within - listed
        case promql.Call():
            return frozenset().union(*map(read, expression.args))
        case promql.BinaryExpr():
            left, right = read(expression.lhs), read(expression.rhs)
            matching = expression.modifier and expression.modifier.matching
            for side in (left, right):
                _require_labels(side, matching.labels if matching else ())
            return left | right if str(expression.op) == "or" else left or right
        case _:
            return frozenset()


def metrics_of(expression: Any) -> frozenset[str]:
    """Return the names of the metrics that an expression reads."""
    match expression:
        case promql.VectorSelector():
            return frozenset({expression.name})
        case promql.MatrixSelector():
            return metrics_of(expression.vector_selector)
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr() | promql.AggregateExpr():
            return metrics_of(expression.expr)
        case promql.Call():
            return frozenset[str]().union(*map(metrics_of, expression.args))
        case promql.BinaryExpr():
            return metrics_of(expression.lhs) | metrics_of(expression.rhs)
        case _:
            return frozenset()


def _require_labels(labels: frozenset[str], wanted: Any) -> frozenset[str]:
    if missing := set(wanted) - labels:
        raise LookupError(f"no label {', '.join(sorted(missing))}; there are {', '.join(sorted(labels))}")
    return labels
