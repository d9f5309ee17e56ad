"""Dashboards as Grafana's JSON, by Grafana's own builders, and the file that has Grafana load a folder of them. Pure.

The builders write the schema of Grafana 10.4; later releases read it and turn it into their own
(https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/).
"""

from __future__ import annotations

from itertools import count
from typing import Any

import yaml
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from infra.plan.watch.dashboards.panel import Choice, Dashboard, Number, Panel, description

UID = "lustrain"
TITLE = "Lustrain"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The reader chooses the data source; a uid of one Grafana means nothing in another."""
WIDTH = 24
"""Columns of a dashboard."""
SPANS = {"number": 4, "graph": 8, "table": 12}
HEIGHTS = {"number": 5, "graph": 8, "table": 8}

AnyPanel = stat.Panel | table.Panel | timeseries.Panel


def file_name(page: Dashboard) -> str:
    return f"{UID}-{page.name}.json"


def render(page: Dashboard, runbook: str | None) -> str:
    """Return the page as JSON; `runbook` is where the runbook is served, to which panels then lead."""
    out = (
        builders.Dashboard(f"{TITLE}: {page.title}")
        .uid(f"{UID}-{page.name}")
        .description(page.about)
        .tags([UID])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(
            builders.DashboardLink(TITLE)
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([UID])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for variable in page.variables:
        out.with_variable(_choice(variable) if isinstance(variable, Choice) else _number(variable))
    number = count(1)
    for row in page.rows:
        out.with_row(builders.Row(row.title))
        for panel in row.panels:
            out.with_panel(_panel(panel, runbook).id(next(number)))
    return JSONEncoder(sort_keys=True, indent=2).encode(out.build()) + "\n"


def provisioning(folder: str) -> str:
    """Return a file for Grafana's provisioning/dashboards that loads the dashboards in `folder`
    (https://grafana.com/docs/grafana/latest/administration/provisioning/#dashboards)."""
    provider: dict[str, Any] = {
        "name": UID,
        "folder": TITLE,
        "type": "file",
        "allowUiUpdates": False,
        "options": {"path": folder},
    }
    return yaml.safe_dump({"apiVersion": 1, "providers": [provider]}, sort_keys=False)


def _choice(variable: Choice) -> builders.QueryVariable:
    return (
        builders.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(SOURCE)
        .query({"query": variable.query, "refId": variable.name})
        .regex(variable.pattern)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _number(variable: Number) -> builders.TextBoxVariable:
    value = f"{variable.value:g}"
    return (
        builders.TextBoxVariable(variable.name)
        .label(variable.label)
        .description(variable.about)
        .default_value(value)
        .current(models.VariableOption(selected=True, text=value, value=value))
    )


def _panel(panel: Panel, runbook: str | None) -> AnyPanel:
    out: AnyPanel
    if panel.kind == "number":
        out = stat.Panel()
    elif panel.kind == "table":
        out = table.Panel()
    else:
        out = timeseries.Panel().fill_opacity(10)
    out.title(panel.title).description(description(panel)).unit(panel.unit).datasource(SOURCE)
    out.span(SPANS[panel.kind]).height(HEIGHTS[panel.kind])
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        if query.legend:
            target.legend_format(query.legend)
        if panel.kind == "graph":
            target.range()
        else:
            target.instant()
        if panel.kind == "table":
            target.format(prometheus_models.PromQueryFormat.TABLE)
        out.with_target(target)
    if runbook is not None:
        out.links([_link(name, f"{runbook}#{name.lower()}") for name in panel.alerts])
    return out


def _link(alert: str, url: str) -> Builder[models.DashboardLink]:
    kind = models.DashboardLinkType.LINK
    return builders.DashboardLink(f"Runbook: {alert}").type(kind).url(url).target_blank(True)
