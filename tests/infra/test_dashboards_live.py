"""Every panel, and what alert rules read, against Prometheus, which scrapes a run of two ranks and, through node_exporter, what
the agent writes.

The agent's file of a GPU node is made from recorded answers of such a node's programs. The rest is real: the run, Prometheus,
node_exporter, and the Slurm whose controller the agent asks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from infra.plan.watch.alert_rules import ALERTS, RECORDINGS, render
from infra.plan.watch.dashboards import dashboards
from lustrain.ports import ports_in_a_row
from node_setup import pack
from node_setup.agent.metrics import text as metrics_text
from node_setup.agent.metrics.readings import readings
from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import Slurm
from tests.conftest import require
from tests.infra.watched_metrics import GRAFANA, fill_variables, metrics_of, node_facts, variables
from tests.lab.training import ROOT, config
from tests.trainer.test_node_local import descendants, end

pytestmark = pytest.mark.slow

QUICK = GRAFANA | {"$__rate_interval": "10s", "$__range": "5m"}
ABSENT_OF_RULES = {"DCGM_FI_DEV_GPU_UTIL": "dcgm-exporter", "lustrain_done_step": "a run that is done"}
"""Metrics of alert rules that have no series here, and what they need."""
PATIENCE_S = 150.0
STARTING = 503
"""Prometheus answers so while it reads its log."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[tuple[Lab, Slurm]]:
    """A controller and a worker, each with the agent and a folder for its metrics below /fsx."""
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(2, "cpu") as lab:
        pack.pack(lab.shared / "agent.pyz")
        for node in lab.nodes:
            (lab.shared / node.name).mkdir()
        yield lab, Slurm(lab).start()


def write_metrics(node: Node) -> tuple[dict[str, Any], str]:
    """What the agent answers on a node, and the file that it writes there."""
    done = node.exec("python3", "-I", "-S", "/fsx/agent.pyz", "metrics", "--textfile", f"/fsx/{node.name}")
    return json.loads(done.stdout), node.read(f"/fsx/{node.name}/lustrain.prom")


def slurm_lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("lustrain_slurm_"))


@pytest.fixture
def prometheus(slurm: tuple[Lab, Slurm], tmp_path: Path) -> Iterator[str]:
    """Address of a Prometheus with the alert rules, which scrapes a run while it trains, and the controller's metrics."""
    programs = {name: shutil.which(name) for name in ("prometheus", "prometheus-node-exporter")}
    require(
        all(programs.values()), "prometheus and node_exporter; fix: apt-get install prometheus prometheus-node-exporter"
    )
    folder = tmp_path / "textfile"
    folder.mkdir()
    rows = [{"status": status} for status in ("change", "ok")]
    (folder / "lustrain.prom").write_text(metrics_text.render(readings(node_facts(tmp_path / "node"), rows)))
    (folder / "slurm.prom").write_text(
        "".join(f"{line}\n" for line in slurm_lines(write_metrics(slurm[1].controller)[1]))
    )
    ports = free_ports(4)
    targets = {"run": ports[:2], "node": ports[2:3]}
    scrapes = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in of_job]}]}
        for job, of_job in targets.items()
    ]
    (tmp_path / "rules.yml").write_text(render())
    seconds = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (tmp_path / "prometheus.yml").write_text(
        yaml.safe_dump({"global": seconds, "rule_files": ["rules.yml"], "scrape_configs": scrapes})
    )
    (tmp_path / "config.toml").write_text(config("run", steps=10_000_000))
    sets = (
        f"metrics.prometheus_port={ports[0]}",
        "metrics.prometheus_address=127.0.0.1",
        "checkpoint.every_steps=2000",
        "interrupt.deadline=2100-01-01T00:00:00Z",
    )
    commands = (
        [
            f"{sys.prefix}/bin/fab",
            "-r",
            str(ROOT),
            "train",
            "config.toml",
            "--nproc",
            "2",
            *(f"--set={one}" for one in sets),
        ],
        [
            str(programs["prometheus-node-exporter"]),
            f"--web.listen-address=127.0.0.1:{ports[2]}",
            f"--collector.textfile.directory={folder}",
        ],
        [
            str(programs["prometheus"]),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{ports[3]}",
        ],
    )
    variables = {name: value for name, value in os.environ.items() if name != "LUSTRAIN_CLUSTER"}
    with ExitStack() as ends, (tmp_path / "log").open("w") as log:
        for command in commands:
            started = subprocess.Popen(
                command,
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                env={**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
            ends.callback(started.wait)
            ends.callback(lambda pid: end([*descendants(pid), pid]), started.pid)
        yield f"http://127.0.0.1:{ports[3]}"


def free_ports(count: int) -> list[int]:
    return ports_in_a_row(count, range(21_000, 28_000))


def series(prometheus: str, expression: str) -> int:
    """How many series an expression has now; none while Prometheus comes up. HTTPError where it refuses the expression."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return len(json.loads(reply.read())["data"]["result"])
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError) and error.code != STARTING:
            raise
        return 0


def without_series(prometheus: str, queries: Mapping[str, str]) -> set[str]:
    """Those of the named expressions that have no series."""
    return {name for name, text in queries.items() if not series(prometheus, fill_variables(text, QUICK))}


def test_each_query_has_series_or_says_why_not(prometheus: str) -> None:
    queries = [
        (f"{page.name}, {panel.title}: {query.expression}", query)
        for page in dashboards()
        for panel in page.panels
        for query in panel.queries
    ]
    awaited = {name: query.expression for name, query in queries if not query.absent}
    awaited |= {expression: expression for _, expression in variables()}
    of_rules = frozenset[str]().union(*(metrics_of(promql.parse(rule.expression)) for rule in (*RECORDINGS, *ALERTS)))
    awaited |= {name: name for name in of_rules - ABSENT_OF_RULES.keys()}
    ends = time.monotonic() + PATIENCE_S
    while (left := without_series(prometheus, awaited)) and time.monotonic() < ends:
        time.sleep(1)
    assert not left, "\n".join(sorted(left))
    absent = {name: query.expression for name, query in queries if query.absent}
    absent |= {name: name for name in of_rules & ABSENT_OF_RULES.keys()}
    assert not (there := set(absent) - without_series(prometheus, absent)), "\n".join(sorted(there))


def test_controller_alone_writes_what_slurm_tells(slurm: tuple[Lab, Slurm]) -> None:
    there = slurm[1]
    there.submit("#!/bin/sh\nsleep 600\n", "--hold")
    worker = there.workers[0]
    assert slurm_lines(write_metrics(there.controller)[1]) == [
        'lustrain_slurm_jobs{state="pending"} 1',
        'lustrain_slurm_jobs{state="running"} 0',
        'lustrain_slurm_nodes{state="idle",flag=""} 1',
        "lustrain_slurm_up 1",
    ]
    assert slurm_lines(write_metrics(worker)[1]) == []
    there.call("scontrol", "update", f"NodeName={worker.name}", "State=DRAIN", "Reason=test")
    assert 'lustrain_slurm_nodes{state="drained",flag=""} 1' in write_metrics(there.controller)[1]
    there.controller.exec("systemctl", "stop", "slurmctld")
    answer, text = write_metrics(there.controller)
    assert slurm_lines(text) == ["lustrain_slurm_up 0"]
    assert answer["errors"][-1] == {"where": "slurm", "why": "slurmctld does not answer"}
    assert f"lustrain_node_unread_facts {len(answer['errors'])}\n" in text
