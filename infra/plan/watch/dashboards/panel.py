"""What a dashboard is made of, as data: queries of Prometheus, the question that each panel answers, and its alerts. Pure.

Metrics are those of docs/metrics.md; node_exporter and dcgm-exporter bring the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.plan.watch.alert_rules import RUNBOOK

RUN = 'run=~"$run"'
NODE = 'instance=~"$node(:[0-9]+)?"'
"""The exporters of a node differ in their ports only."""
DISKS = 'fstype!~"tmpfs|overlay|squashfs|ramfs"'
CARDS = 'device!~"lo|docker.*|veth.*|cni.*"'

NO_DCGM = "dcgm-exporter needs an NVIDIA GPU"
NO_PEAK = "the peak of a CPU is not known"


@dataclass(frozen=True)
class Query:
    """One expression; `legend` names its series by their labels.

    `absent` is why it has no series where a run trains on CPUs.
    """

    expression: str
    legend: str = ""
    absent: str | None = None


@dataclass(frozen=True)
class Panel:
    """Answers `question`; `unit` is Grafana's name of it (https://grafana.com/docs/grafana/latest/panels-visualizations/
    configure-standard-options/#unit), `alerts` are the rules that watch the same."""

    title: str
    question: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["graph", "number", "table"] = "graph"
    alerts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Choice:
    """A variable with the values of a label; `pattern` takes a part of each value."""

    name: str
    label: str
    query: str
    pattern: str = ""


@dataclass(frozen=True)
class Number:
    """A variable that the reader types in."""

    name: str
    label: str
    value: float
    about: str


@dataclass(frozen=True)
class Dashboard:
    """One page; `name` is its file's name and the end of its uid."""

    name: str
    title: str
    about: str
    variables: tuple[Choice | Number, ...]
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


CHOOSE_RUN = Choice("run", "Run", "label_values(lustrain_rank_step_seconds_count, run)")
CHOOSE_NODE = Choice("node", "Node", "label_values(lustrain_node_settings, instance)", r"/^(.*?)(?::\d+)?$/")


def make_panel(
    title: str,
    question: str,
    expression: str,
    unit: str = "short",
    *,
    legend: str = "",
    kind: Literal["graph", "number", "table"] = "graph",
    alerts: tuple[str, ...] = (),
    absent: str | None = None,
) -> Panel:
    """Return a panel with a single query."""
    return Panel(title, question, (Query(expression, legend, absent),), unit, kind, alerts)


def description(panel: Panel) -> str:
    """Return the question, and where the runbook is."""
    sections = ", ".join(panel.alerts)
    return f"{panel.question} {RUNBOOK}: {sections}." if sections else panel.question
