"""What alert rules and dashboards ask Prometheus for exists: every metric, and every label of it."""

from __future__ import annotations

import re

import promql_parser as promql
import pytest

from infra.plan.watch.dashboards import dashboards
from tests.infra.watched_metrics import Table, expressions, fill_variables, labels_of, node_facts, table


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return table(node_facts(tmp_path_factory.mktemp("node")))


def test_each_metric_and_label_that_is_asked_for_exists(known: Table) -> None:
    wrong = []
    for place, expression in expressions():
        try:
            labels_of(promql.parse(expression), known)
        except (LookupError, ValueError) as error:
            wrong.append((place, str(error)))
    assert wrong == []


def test_each_legend_names_labels_of_its_series(known: Table) -> None:
    wrong = {
        (page.name, panel.title, query.legend)
        for page in dashboards()
        for panel in page.panels
        for query in panel.queries
        if set(re.findall(r"{{(\w+)}}", query.legend))
        - labels_of(promql.parse(fill_variables(query.expression)), known)
    }
    assert wrong == set()


@pytest.mark.parametrize(
    "expression",
    [
        "max by (run) (lustrain_steps)",
        'lustrain_loss{part="data"}',
        "sum by (part) (lustrain_loss)",
        "sum(lustrain_loss) / on (run) lustrain_step",
        "rate(lustrain_node_efa_rx_drops_total{gpu='0'}[5m])",
    ],
)
def test_what_does_not_exist_is_found(known: Table, expression: str) -> None:
    with pytest.raises(LookupError):
        labels_of(promql.parse(expression), known)
