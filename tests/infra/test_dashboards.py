"""Dashboards: what `fab dashboards` writes is what Grafana loads, and each alert has a panel that leads to its runbook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.models import units
from invoke.context import Context as Invocation
from invoke.exceptions import Exit

from infra import tasks
from infra.plan.watch.alert_rules import ALERTS
from infra.plan.watch.dashboards import PROVISIONING, cost, dashboards

BUILT_IN = {"datasource", "__rate_interval", "__range"}
PAGES = ("cluster", "run", "node", "checkpoint", "cost")


def test_task_writes_what_grafana_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    tasks.dashboards(Invocation(), output=str(folder), runbook="https://git.example/runbook.md", json=True)
    written = json.loads(capsys.readouterr().out)["files"]
    assert written == [*(f"{folder}/lustrain-{page}.json" for page in PAGES), f"{folder}/{PROVISIONING}"]
    [provider] = yaml.safe_load((folder / PROVISIONING).read_text())["providers"]
    assert (provider["type"], provider["options"]["path"]) == ("file", str(folder))
    run = json.loads((folder / "lustrain-run.json").read_text())
    assert run["uid"] == "lustrain-run"
    panels = {panel["title"]: panel for panel in run["panels"]}
    assert [link["url"] for link in panels["Share of data"]["links"]] == ["https://git.example/runbook.md#dataslow"]
    assert panels["Loss"]["targets"][0]["expr"] == 'lustrain_loss{run=~"$run"}'
    assert {variable["name"] for variable in run["templating"]["list"]} == {"datasource", "run"}


def test_each_alert_has_a_panel_that_names_its_section() -> None:
    shown = {name for page in dashboards() for panel in page.panels for name in panel.alerts}
    assert shown == {alert.name for alert in ALERTS}


def test_queries_use_variables_that_their_page_has() -> None:
    for page in dashboards():
        known = BUILT_IN | {variable.name for variable in page.variables}
        used = {
            name
            for panel in page.panels
            for query in panel.queries
            for name in re.findall(r"\$(\w+)", query.expression)
        }
        assert used <= known, page.name


def test_units_are_those_of_grafana() -> None:
    known = {value for value in vars(units).values() if isinstance(value, str)}
    assert {panel.unit for page in dashboards() for panel in page.panels} <= known


@pytest.mark.parametrize(("given", "begins"), [(None, cost.list_price()), (2.5, 2.5)])
def test_price_of_a_gpu_hour_begins_where_it_is_told(given: float | None, begins: float) -> None:
    [price] = [variable for variable in cost.dashboard(given).variables if variable.name == "gpu_hour"]
    assert getattr(price, "value", None) == begins


@pytest.mark.parametrize("output", ["", "file", "file/new"])
def test_folder_that_cannot_be_made_is_one_line(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exit, match="--output = "):
        tasks.dashboards(Invocation(), output=output and str(tmp_path / output))
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("flags", "path"), [({"runbook": "runbook.md"}, "--runbook"), ({"gpu_hour_usd": "-1"}, "--gpu-hour-usd")]
)
def test_mistake_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, str], path: str
) -> None:
    with pytest.raises(Exit, match=f"{path} = "):
        tasks.dashboards(Invocation(), output=str(tmp_path / "new"), **flags)
    assert (list(tmp_path.iterdir()), capsys.readouterr().out) == ([], "")
