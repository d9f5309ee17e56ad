"""Real faults make real alerts: Prometheus and Alertmanager watch a run and a node, a webhook hears of each fault and its end,
and a browser shows both in the report of the run.

All is real: the run with its ranks and its S3 server, node_exporter on a lab's node, both daemons with the rules of
`fab alert-rules`. Only the rules' times are shorter, all by TIME_SCALE, as nobody waits for quarters of an hour here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.plan.watch.alert_rules import ALERTS, render
from rehearsal.lab.node import Node
from tests.conftest import require
from tests.infra.test_dashboards_live import free_ports, series
from tests.lab.browser import WIDTH, Screen
from tests.lab.faulty_proxy import Answer, FaultyProxy
from tests.lab.nodes import StartLab
from tests.lab.servers import S3Place
from tests.lab.training import ROOT, config
from trainer.errors import EXIT_REQUEUE
from trainer.metrics.plot import CUT_COLOURS, LOSS, SHARE, SPEED
from trainer.metrics.timeline import Cut
from trainer.node.launcher import LocalJob

pytestmark = pytest.mark.slow

TIME_SCALE = 1 / 30
"""A rule's minute is two seconds here."""
PATIENCE_S = 300.0
NODE_PORT = 9100
FULL = "/scratch"
RANKS = 3
"""From three on a rank can differ from the median."""
SLOW_S = 0.2
"""Above the 0.05 s from which on a rank that waits for its batches counts as slow."""
RUN = "watched"
FIGURE = f"seconds from fault to webhook at {TIME_SCALE:.3f} of the rules' times"
KEPT = ROOT / ".prove/alerts/report"


class Webhook:
    """Receives what Alertmanager sends, and knows the newest state of each alert."""

    def __init__(self) -> None:
        self._alerts: dict[str, dict[str, Any]] = {}
        self.arrived: dict[str, float] = {}
        """When each alert was heard of last, by the monotonic clock."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.arrived[body["groupLabels"]["alertname"]] = time.monotonic()
                receiver._alerts |= {alert["fingerprint"]: alert for alert in body["alerts"]}
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def firing(self, name: str) -> list[dict[str, Any]]:
        alerts = [alert for alert in list(self._alerts.values()) if alert["labels"]["alertname"] == name]
        return [alert for alert in alerts if alert["status"] == "firing"]


def wait_for(what: str, condition: Callable[[], object], log: Path) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, f"not within {PATIENCE_S:.0f} s: {what}\n{log.read_text()[-4000:]}"
        time.sleep(0.1)


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    webhook = Webhook()
    yield webhook
    webhook.close()


@pytest.fixture
def node(lab: StartLab) -> Node:
    """A node with node_exporter and a small file system."""
    (node,) = lab(1).nodes
    node.exec("mkdir", "-p", FULL)
    node.exec("mount", "-t", "tmpfs", "-o", "size=1m", "scratch", FULL)
    node.start("prometheus-node-exporter", f"--web.listen-address=:{NODE_PORT}")
    return node


@pytest.fixture
def ports() -> list[int]:
    """For the ranks, Prometheus and Alertmanager."""
    return free_ports(RANKS + 2)


class RankFiles:
    """The file of each rank that its batches are read from, of which one can be slow: a FIFO whose writer takes its time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mended = threading.Event()
        self._writer: threading.Thread | None = None
        folder.mkdir()
        for rank in range(RANKS):
            (folder / str(rank)).touch()

    def slow_down(self, rank: int) -> None:
        """Have each read of this rank take `SLOW_S`."""
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        fifo.replace(self.folder / str(rank))
        self._writer = threading.Thread(target=self._write, args=(self.folder / str(rank),))
        self._writer.start()

    def mend(self) -> None:
        self._mended.set()
        if self._writer:
            self._writer.join()

    def _write(self, path: Path) -> None:
        while not self._mended.is_set():
            try:
                writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # Nobody reads it now.
                self._mended.wait(0.001)
                continue
            self._mended.wait(SLOW_S)
            os.close(writer)
        file = self.folder / "file"
        file.touch()
        # A reader that has opened the FIFO since waits for a writer, and gets the end of this one's.
        fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        file.replace(path)
        os.close(fifo)


@pytest.fixture
def rank_files(tmp_path: Path) -> Iterator[RankFiles]:
    files = RankFiles(tmp_path / "reads")
    yield files
    files.mend()


@pytest.fixture
def run(
    weed_s3: S3Place, ports: list[int], rank_files: RankFiles, tmp_path: Path
) -> Iterator[tuple[FaultyProxy, LocalJob]]:
    """Three ranks that train without end and save often, each with a port for its metrics; the proxy is before their S3."""
    (tmp_path / "config.toml").write_text(config(weed_s3.uri(RUN), steps=1_000_000_000, global_batch=2 * RANKS))
    sets = (
        f"task.reads={rank_files.folder}",
        f"metrics.prometheus_port={ports[0]}",
        "metrics.prometheus_address=127.0.0.1",
        "checkpoint.every_steps=200",
    )
    with FaultyProxy(weed_s3.endpoint) as proxy:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LUSTRAIN_SILENT_S": "1000",
            "LUSTRAIN_CACHE": str(tmp_path / "cache"),
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "AWS_MAX_ATTEMPTS": "2",
        }
        words = [word for one in sets for word in ("--set", one)]
        job = LocalJob(["train", str(tmp_path / "config.toml"), *words], RANKS, environment)
        yield proxy, job
        job.kill()
        job.wait()


@pytest.fixture
def prometheus(
    node: Node, run: tuple[FaultyProxy, LocalJob], ports: list[int], webhook: Webhook, tmp_path: Path
) -> Iterator[str]:
    """Address of a Prometheus that scrapes run and node each second, and sends its alerts over Alertmanager to the webhook."""
    programs = {name: shutil.which(name) for name in ("prometheus", "prometheus-alertmanager")}
    require(all(programs.values()), "Prometheus; fix: apt-get install prometheus prometheus-alertmanager")
    *of_ranks, port, manager_port = ports
    at_once = {"group_wait": "0s", "group_interval": "1s", "repeat_interval": "1h"}
    manager = {
        "route": {"receiver": "test", "group_by": ["alertname"], **at_once},
        "receivers": [{"name": "test", "webhook_configs": [{"url": webhook.url, "send_resolved": True}]}],
    }
    targets = {"run": [f"127.0.0.1:{one}" for one in of_ranks], "machines": [f"{node.address}:{NODE_PORT}"]}
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager_port}"]}]}]},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": of_job}]} for job, of_job in targets.items()
        ],
    }
    (tmp_path / "rules.yml").write_text(render(TIME_SCALE))
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(manager))
    commands = (
        [
            str(programs["prometheus-alertmanager"]),
            "--config.file=alertmanager.yml",
            "--storage.path=alerts",
            "--cluster.listen-address=",
            f"--web.listen-address=127.0.0.1:{manager_port}",
        ],
        [
            str(programs["prometheus"]),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    )
    with ExitStack() as ends, (tmp_path / "log").open("w") as log:
        for command in commands:
            started = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
            ends.callback(started.wait)
            ends.callback(started.kill)
        yield f"http://127.0.0.1:{port}"


def test_faults_arrive_at_the_webhook_and_clear_when_mended(
    prometheus: str,
    node: Node,
    run: tuple[FaultyProxy, LocalJob],
    weed_s3: S3Place,
    rank_files: RankFiles,
    webhook: Webhook,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    proxy, job = run
    log = tmp_path / "log"
    seconds: dict[str, float] = {}

    def wait_for_alerts(*names: str) -> None:
        began = time.monotonic()
        for name in names:
            wait_for(f"{name} fires", lambda name=name: webhook.firing(name), log)  # type: ignore[misc]
            seconds[name] = round(webhook.arrived[name] - began, 1)

    wait_for("a commit is seen", lambda: series(prometheus, "lustrain_checkpoint_interval_seconds"), log)
    wait_for("the node is seen", lambda: series(prometheus, "node_boot_time_seconds"), log)
    faults = ("StragglerData", "SavesFailing", "DiskFull", "RunStalled", "NodeMissing")
    wait_for("all is quiet", lambda: not any(map(webhook.firing, faults)), log)

    rank_files.slow_down(2)
    wait_for_alerts("StragglerData")
    assert [alert["labels"]["rank"] for alert in webhook.firing("StragglerData")] == ["2"]
    rank_files.mend()
    wait_for("the straggler is mended", lambda: not webhook.firing("StragglerData"), log)

    proxy.inject(Answer(503, "SlowDown"))
    node.exec("sh", "-c", f"head -c 1000000 /dev/zero >{FULL}/full")
    wait_for_alerts("SavesFailing", "DiskFull")
    assert [alert["labels"]["mountpoint"] for alert in webhook.firing("DiskFull")] == [FULL]
    proxy.heal()
    node.exec("rm", f"{FULL}/full")

    wait_for("the full disk is mended", lambda: not webhook.firing("DiskFull"), log)
    job.ranks[1].send_signal(signal.SIGSTOP)
    node.link(False)
    wait_for_alerts("RunStalled", "NodeMissing")
    runbooks = {alert.name: alert.runbook for alert in ALERTS}
    for name in ("RunStalled", "NodeMissing"):
        assert {alert["annotations"]["runbook"] for alert in webhook.firing(name)} == {runbooks[name]}
    assert {alert["labels"]["run"] for alert in webhook.firing("RunStalled")} == {RUN}
    job.ranks[1].send_signal(signal.SIGCONT)
    node.link(True)
    wait_for("all is quiet again", lambda: not any(map(webhook.firing, faults)), log)
    assert job.running()
    assert not job.failed()
    record_property(FIGURE, seconds)

    for rank in job.ranks:
        rank.send_signal(signal.SIGTERM)
    assert job.wait() == EXIT_REQUEUE
    report_shows_the_run_in_a_browser(prometheus, weed_s3, faults)


def report_shows_the_run_in_a_browser(prometheus: str, s3: S3Place, faults: Sequence[str]) -> None:
    """The files stay where this fails: the page, what Chromium shows of it, and its log."""
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    page = KEPT / "report.html"
    words = ["report", s3.uri(RUN), "--output", str(page), "--prometheus", prometheus, "--json"]
    done = subprocess.run(
        [f"{sys.prefix}/bin/fab", "-r", str(ROOT), *words],
        env=os.environ | {"AWS_ENDPOINT_URL": s3.endpoint},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert set(faults) <= {alert["alert"] for alert in json.loads(done.stdout)["alerts"]}
    screen = Screen(page, KEPT)
    for colour in (LOSS, SPEED, SHARE):
        assert screen.extent(colour)[0] > WIDTH / 3, colour
    # A line through all panels where the run was interrupted, and bars of alerts, which are red.
    assert screen.extent(CUT_COLOURS[Cut.NOTICE])[1] > WIDTH / 3
    assert screen.extent(CUT_COLOURS[Cut.LOST])[0] > WIDTH / 10
    shutil.rmtree(KEPT)
