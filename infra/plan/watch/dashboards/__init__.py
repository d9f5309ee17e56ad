"""Grafana dashboards of runs and nodes: a module for each, of panels as data, which Grafana's own builders turn into JSON."""

from __future__ import annotations

import re

from infra.plan.watch.dashboards import checkpoint, cluster, cost, node, run
from infra.plan.watch.dashboards.panel import Dashboard
from lustrain.flags import number
from lustrain.problem import FAILED, UserError, problem

PROVISIONING = "lustrain-provisioning.yaml"


def dashboards(gpu_hour_usd: float | None = None) -> tuple[Dashboard, ...]:
    """Return all pages; `gpu_hour_usd` is the price that the page of costs begins with, a list price by default."""
    return (cluster.DASHBOARD, run.DASHBOARD, node.DASHBOARD, checkpoint.DASHBOARD, cost.dashboard(gpu_hour_usd))


def files(folder: str, runbook: str | None = None, gpu_hour_usd: str | None = None) -> dict[str, str]:
    """Return the texts of a folder's files by name, from flags. UserError."""
    usd = None if gpu_hour_usd is None else number("--gpu-hour-usd", gpu_hour_usd, 0, 10_000, whole=False)
    if runbook is not None and not re.fullmatch(r"https?://[^\s#]+", runbook):
        allowed = "an http or https address without #"
        raise UserError(
            problem("--runbook", runbook, "cannot be linked to", allowed, "name the page that has docs/runbook.md")
        )
    try:
        from infra.plan.watch.dashboards import render
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "grafana_foundation_sdk":
            raise
        raise UserError(
            "grafana-foundation-sdk is not installed; fix: pip install 'lustrain[dashboards]'", FAILED
        ) from None
    texts = {render.file_name(page): render.render(page, runbook) for page in dashboards(usd)}
    return {**texts, PROVISIONING: render.provisioning(folder)}
