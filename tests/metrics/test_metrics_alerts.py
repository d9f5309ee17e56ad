"""When alerts fired is read from Prometheus, and shown on the page of a run."""

from __future__ import annotations

import importlib.util
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launch.report import make
from lustrain.problem import UserError
from tests.conftest import require
from trainer.metrics.alerts import Firing, firings, read_firings
from trainer.metrics.plot import draw_timeline, story_of
from trainer.metrics.records import encode
from trainer.storage import open_store

Serve = Callable[[int, bytes], tuple[str, list[str]]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that gives one answer to everything; returns its address and the list of paths that it gets."""
    servers = []

    def start(status: int, body: bytes) -> tuple[str, list[str]]:
        paths: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                paths.append(self.path)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", paths

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def series(*alerts: tuple[str, list[int]]) -> list[dict[str, Any]]:
    return [{"metric": {"alertname": name}, "values": [[time, "1"] for time in times]} for name, times in alerts]


def test_gap_ends_a_firing_and_a_single_moment_is_one() -> None:
    found = firings(series(("RunDown", [10, 12, 14, 40, 42]), ("DiskFull", [12])), 2.0)
    assert found == [Firing("RunDown", 10, 14), Firing("DiskFull", 12, 12), Firing("RunDown", 40, 42)]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b""),
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"data": {}}'),
        (200, b'{"data": {"result": [{}]}}'),
        (503, b"starting"),
    ],
)
def test_other_server_is_no_prometheus(serve: Serve, status: int, body: bytes) -> None:
    address, _ = serve(status, body)
    with pytest.raises(UserError) as error:
        read_firings(address, "r", 0.0, 1.0)
    (line,) = error.value.problems
    assert address in line.partition(": ")[0]


@pytest.mark.parametrize("address", ["localhost:9090", "ftp://a", "", "http://", "http://127.0.0.1:1", "http://[::1"])
def test_bad_address_of_prometheus_is_one_line(address: str) -> None:
    with pytest.raises(UserError) as error:
        read_firings(address, "r", 0.0, 1.0)
    assert len(error.value.problems) == 1


def test_page_of_a_run_shows_its_alerts_and_goodput(tmp_path: Path, serve: Serve) -> None:
    require(importlib.util.find_spec("matplotlib"), "no matplotlib: pip install 'lustrain[plot]'")
    store = open_store(str(tmp_path / "my-run"))
    steps = [
        {"step": step, "attempt": 1, "step_seconds": 1.0, "blocked_seconds": 0.0, "loss": 2.0, "tokens_per_second": 1.0}
        for step in (1, 2)
    ]
    times = ("1970-01-01T00:00:08Z", "1970-01-01T00:00:10Z")
    parts = (encode({**record, "time": time}) for record, time in zip(steps, times, strict=True))
    store.put("metrics/000001-00000.jsonl", b"".join(parts))
    store.put("events/000001-00000.jsonl", encode({"event": "started", "time": "1970-01-01T00:00:00Z"}))
    address, paths = serve(200, json.dumps({"data": {"result": series(("RunStalled", [3, 4, 5, 9]))}}).encode())
    lines, data = make(store, tmp_path / "report.md", address)
    assert data["alerts"] == [
        {"alert": "RunStalled", "began": 3.0, "ended": 5.0},
        {"alert": "RunStalled", "began": 9.0, "ended": 9.0},
    ]
    assert any("RunStalled 2 x" in line for line in lines)
    (words,) = (urllib.parse.parse_qs(urllib.parse.urlsplit(path).query) for path in paths)
    assert (words["start"], words["end"], words["step"]) == (["0.0"], ["10.0"], ["1.0"])
    assert 'run=~"my' in words["query"][0]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    figure = draw_timeline(story_of(store), title="", alerts=firings(series(("RunStalled", [3, 4])), 1.0))
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss", "tokens / s", "goodput", "alerts"]
    (curve,) = figure.axes[2].get_lines()
    assert list(curve.get_ydata()) == [1 / 8, 2 / 10]  # type: ignore[arg-type]
    assert [text.get_text() for text in figure.axes[3].get_yticklabels()] == ["RunStalled"]
