"""Prometheus beside the journey, where it is installed: it has the rules of `fab alert-rules`, and scrapes the run that is
interrupted."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.plan.watch.alert_rules import render
from lustrain.ports import ports_in_a_row
from lustrain.problem import UserError
from trainer.metrics.alerts import Firing, query, read_firings

ALERT = "RunDown"
"""Nothing trains the run: it comes with the end of the launch that had the notice, and goes with the first step of the next."""
TIME_SCALE = 1 / 300
"""A quarter of an hour is three seconds here."""
PATIENCE_S = 180.0
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
_PORTS = range(23_000, 28_000)
"""They have to stay free between the launches of the run."""


@dataclass
class Watch:
    """A Prometheus that scrapes one run; the ranks of the run serve their metrics from `port` on.

    What it has seen decides, and not when: a run that is over before a scrape, or a Prometheus that ends, shows nothing.
    """

    address: str
    run: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    seen: bool = False
    """Whether a step was scraped before the notice."""
    fired: bool = False
    """Whether the alert fired while nothing trained the run."""
    done: bool = False
    """Whether the end of the run was scraped."""
    went: bool = False
    """Whether the alert no longer fired after that."""
    bind: str = LOOPBACK
    """Address at which each rank serves its metrics."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Return what the run adds to its configuration."""
        return {"metrics.prometheus_port": str(self.port), "metrics.prometheus_address": self.bind}

    def before_notice(self, more: Callable[[], bool]) -> None:
        """Wait until a step is scraped and the alert is quiet, while `more` holds; a busy machine may have missed scrapes."""
        self._wait(lambda: self._series(f"{self._step} unless on (run) {self._firing}"), more)
        self.seen = bool(self._series(f"last_over_time({self._step}[1d])"))

    def after_notice(self) -> None:
        """Wait, once no rank is left, until the alert fires."""
        if self.seen:
            self.fired = self._wait(lambda: self._series(self._firing))

    def at_end(self) -> None:
        """Wait, once the run is done, until Prometheus knows that no rank is left, and until the alert no longer fires.

        A run that was scraped waits itself for the scrape of its end.
        """
        if not self.seen:
            return
        self._wait(lambda: self._series(self._step) == [])
        self.done = bool(self._series(f'last_over_time(lustrain_done_step{{run="{self.run}"}}[1d])'))
        if self.fired and self.done:
            self.went = self._wait(lambda: self._series(self._firing) == [])

    def firings(self, began: float) -> list[Firing]:
        """Return all alerts about the run from a Unix time until now; none where Prometheus is gone."""
        try:
            return read_firings(self.address, self.run, began, time.time())
        except UserError:
            return []

    def why_blind(self) -> str | None:
        """Return why Prometheus saw too little to tell anything from it; None where it saw enough."""
        code = self.process.poll()
        if code is not None:
            last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
            return f"Prometheus ended with {code}: {''.join(last)}"
        if not self.seen:
            return "the run was half over before Prometheus had scraped a step"
        return None if self.done or not self.fired else "the run was over before Prometheus had scraped its end"

    @property
    def _step(self) -> str:
        return f'lustrain_step{{run="{self.run}"}}'

    @property
    def _firing(self) -> str:
        return f'ALERTS{{alertname="{ALERT}",alertstate="firing",run="{self.run}"}}'

    def _wait(self, condition: Callable[[], object], more: Callable[[], bool] = lambda: True) -> bool:
        """Wait for a condition, and return whether it came."""
        ends = time.monotonic() + PATIENCE_S
        while not condition():
            if not more() or self.process.poll() is not None or time.monotonic() > ends:
                return False
            time.sleep(0.2)
        return True

    def _series(self, expression: str) -> list[Any] | None:
        """Return the series of an expression now; None where Prometheus does not answer: it comes up, is busy, or is gone."""
        try:
            return query(self.address, "query", {"query": expression})
        except UserError:
            return None


def why_not() -> str | None:
    """Return why no Prometheus can watch here; None where one can."""
    missing = [name for name in ("prometheus", "setpriv") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


@contextmanager
def watch(folder: Path, run: str, hosts: Sequence[str], ranks: int) -> Iterator[Watch | None]:
    """Run a Prometheus that scrapes `ranks` ranks of a run on each of the hosts every two seconds, until the block ends; None
    where there is none."""
    if why_not():
        yield None
        return
    folder.mkdir()
    port, *of_ranks = ports_in_a_row(ranks + 1, _PORTS)
    targets = [f"{host}:{one}" for host in hosts for one in of_ranks]
    settings = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "run", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (folder / "rules.yml").write_text(render(TIME_SCALE), encoding="utf-8")
    # It ends with this process, however that ends.
    command = ["setpriv", "--pdeathsig", "KILL", "prometheus", "--config.file=prometheus.yml"]
    command += ["--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
    with ExitStack() as ends, (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ends.callback(process.wait)
        ends.callback(process.kill)
        bind = LOOPBACK if list(hosts) == [LOOPBACK] else EVERYWHERE
        yield Watch(f"http://{LOOPBACK}:{port}", run, of_ranks[0], process, folder / "log", bind=bind)
