"""Prometheus beside the journey, where it is installed: it has the rules of `fab alert-rules`, and scrapes the run that is
interrupted."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from infra.plan.watch.alert_rules import render
from trainer.metrics.alerts import Firing, read_firings

ALERT = "RunDown"
"""Nothing trains the run: it comes with the end of the launch that had the notice, and goes with the first step of the next."""
TIME_SCALE = 1 / 300
"""A quarter of an hour is three seconds here."""
PATIENCE_S = 180.0
_PORTS = range(23_000, 28_000)
"""Below those that the kernel gives away by itself: they have to stay free between the launches of the run."""


@dataclass(frozen=True)
class Watch:
    """A Prometheus that scrapes one run; the ranks of the run serve their metrics from `port` on."""

    address: str
    run: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def settings(self) -> Mapping[str, str]:
        """Return what the run adds to its configuration."""
        return {"metrics.prometheus_port": str(self.port), "metrics.prometheus_address": "127.0.0.1"}

    def wait_until_seen(self, more: Callable[[], bool]) -> None:
        """Wait until a step of the run was scraped, while `more` holds."""
        self._wait(f'lustrain_step{{run="{self.run}"}}', more)

    def wait_for_alert(self) -> None:
        """Wait until the alert fires; what came of it, `firings` says."""
        self._wait(f'ALERTS{{alertname="{ALERT}",alertstate="firing",run="{self.run}"}}', lambda: True)

    def firings(self, began: float) -> list[Firing]:
        """Return all alerts about the run from a Unix time until now. UserError where Prometheus is gone."""
        return read_firings(self.address, self.run, began, time.time())

    def _wait(self, query: str, more: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not self._series(query) and more() and self.process.poll() is None and time.monotonic() < ends:
            time.sleep(0.2)

    def _series(self, query: str) -> int:
        url = f"{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return len(json.loads(reply.read())["data"]["result"])
        except OSError:
            # It comes up, or is gone, which `firings` says.
            return 0


def why_not() -> str | None:
    """Return why no Prometheus can watch here; None where one can."""
    missing = [name for name in ("prometheus", "setpriv") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


@contextmanager
def watch(folder: Path, run: str, ranks: int) -> Iterator[Watch | None]:
    """Run a Prometheus that scrapes the ranks of a run every two seconds, until the block ends; None where there is none."""
    if why_not():
        yield None
        return
    folder.mkdir()
    ports = _free_ports(ranks + 1)
    targets = [f"127.0.0.1:{port}" for port in ports[1:]]
    settings = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "run", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (folder / "rules.yml").write_text(render(TIME_SCALE), encoding="utf-8")
    # It ends with this process, however that ends.
    command = ["setpriv", "--pdeathsig", "KILL", "prometheus", "--config.file=prometheus.yml"]
    command += ["--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{ports[0]}"]
    with ExitStack() as ends, (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ends.callback(process.wait)
        ends.callback(process.kill)
        yield Watch(f"http://127.0.0.1:{ports[0]}", run, ports[1], process)


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, one after the other. RuntimeError where there are none."""
    for first in _PORTS[::count]:
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return list(range(first, first + count))
    raise RuntimeError(f"no {count} free ports from {_PORTS.start} to {_PORTS.stop}")
