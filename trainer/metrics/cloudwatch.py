"""Progress of a run as CloudWatch metrics: once a minute rank 0 hands a line to a CloudWatch agent, which logs it.

CloudWatch makes metrics of lines in the embedded metric format
(https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch_Embedded_Metric_Format_Specification.html), so that
an alarm needs no agent of ours. The names are those of Prometheus, without their prefix. Not yet seen by a real agent.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.interrupt.notice import OnEvent
from trainer.metrics.goodput import LiveGoodput, RunPast

NAMESPACE = "Lustrain"
CLUSTER, RUN = "Cluster", "Run"
"""The dimensions: both are bounded by how many clusters and runs there are."""
EVERY_S = 60.0
"""CloudWatch's own resolution."""
SEND_S = 5.0
"""Seconds that an agent has for a connection and a line."""
LONGEST_VALUE = 1024
"""Of a dimension (https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_Dimension.html)."""
UNITS = {
    "step": "None",
    "loss": "None",
    "tokens_per_second": "Count/Second",
    "goodput_ratio": "None",
    "checkpoint_age_seconds": "Seconds",
    "seconds_since_step": "Seconds",
}
"""Unit of each metric (https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_MetricDatum.html)."""
ALSO_BY_CLUSTER = frozenset({"checkpoint_age_seconds", "seconds_since_step"})
"""What an alarm watches that knows no names of runs."""


def line(*, cluster: str, run: str, log_group: str, unix_s: float, values: Mapping[str, float]) -> str:
    """Return one line of the format, without its end; a value that is no finite number is left out."""
    known = {name: values[name] for name in UNITS if name in values and math.isfinite(values[name])}
    sets = {
        True: [[CLUSTER], [CLUSTER, RUN]],
        False: [[CLUSTER, RUN]],
    }
    directives = [
        {
            "Namespace": NAMESPACE,
            "Dimensions": dimensions,
            "Metrics": [
                {"Name": name, "Unit": UNITS[name]} for name in known if (name in ALSO_BY_CLUSTER) is by_cluster
            ],
        }
        for by_cluster, dimensions in sets.items()
    ]
    metadata = {
        "Timestamp": round(unix_s * 1000),
        "LogGroupName": log_group,
        "CloudWatchMetrics": [directive for directive in directives if directive["Metrics"]],
    }
    return json.dumps({"_aws": metadata, CLUSTER: _value(cluster), RUN: _value(run), **known})


def _value(text: str) -> str:
    """Return it as the value of a dimension: ASCII, and no colon at its begin."""
    return text.encode("ascii", "replace").decode("ascii").lstrip(":")[:LONGEST_VALUE] or "?"


class CloudWatchSink:
    """A Sink of rank 0 that a thread reads once a minute, also where the run makes no step; `step` never waits for the agent.

    An agent that takes no line is one warning, until it works again. The connection belongs to the thread.
    """

    def __init__(
        self,
        *,
        run: str,
        cluster: str,
        log_group: str,
        agent: AgentConnection,
        on_event: OnEvent,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
    ) -> None:
        self._run, self._cluster, self._log_group = run, cluster, log_group
        self._agent, self._on_event = agent, on_event
        self._clock, self._monotonic, self._every_s = clock, monotonic, every_s
        self._live = LiveGoodput(clock)
        self._record: Mapping[str, Any] = {}
        self._stepped_at = self._saved_at = monotonic()
        self._is_lost = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_until_closed, name="metrics-cloudwatch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin_generation(self, generation: int) -> None:
        self._live.begin_generation(generation)

    def set_past(self, generation: int, past: RunPast) -> None:
        self._live.set_past(generation, past)

    def step(self, record: Mapping[str, Any]) -> None:
        self._live.step(record)
        self._record, self._stepped_at = record, self._monotonic()

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "checkpoint_committed":
            self._saved_at = self._monotonic() - fields["seconds"]
        elif kind == "resumed":
            self._saved_at = self._monotonic()

    def close(self) -> None:
        """Hand over how the run ended; a thread that waits longer than `SEND_S` for the agent is left behind."""
        if not self._closing.is_set() and self._thread.is_alive():
            self._closing.set()
            self._thread.join(SEND_S)

    def values(self) -> dict[str, float]:
        """Return what is known now, by name."""
        now, record = self._monotonic(), self._record
        share = self._live.value()
        known = {name: float(record[name]) for name in ("step", "loss", "tokens_per_second") if name in record}
        ages = {"checkpoint_age_seconds": now - self._saved_at, "seconds_since_step": now - self._stepped_at}
        return {**known, **ages, **({} if share is None else {"goodput_ratio": share})}

    def _send_until_closed(self) -> None:
        try:
            self._send_lines()
        finally:
            self._agent.close()

    def _send_lines(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._every_s)
            names = {"cluster": self._cluster, "run": self._run, "log_group": self._log_group}
            try:
                self._agent.send(line(**names, unix_s=self._clock(), values=self.values()))
                self._is_lost = False
            except (OSError, ValueError) as error:
                if not self._is_lost and not is_last:
                    detail = f"no progress reaches CloudWatch: its agent does not take it: {address_error(error)}"
                    self._on_event("warning", {"source": "metrics", "detail": detail})
                self._is_lost = True


def address_error(error: OSError | ValueError) -> str:
    """Return why an address cannot be used. Python's own codec refuses some names of hosts, with a ValueError, before the
    resolver sees them."""
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


class AgentConnection:
    """Hands lines to an agent over TCP, on a connection that is made anew where it is lost."""

    def __init__(self, agent: str) -> None:
        """`agent`: HOST:PORT."""
        host, _, port = agent.rpartition(":")
        self._address = (host, int(port))
        self._socket: socket.socket | None = None

    def send(self, text: str) -> None:
        """Send one line, on the connection of the line before or, where that has ended, on a new one.

        OSError where the agent does not take it, ValueError for a host's name that cannot be one.
        """
        if self._socket is None or self._is_ended(self._socket):
            self.close()
            self._socket = socket.create_connection(self._address, timeout=SEND_S)
        try:
            self._socket.sendall(text.encode("ascii") + b"\n")
        except OSError:
            # A part of the line may have gone: the next one would continue it.
            self.close()
            raise

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _is_ended(self, held: socket.socket) -> bool:
        """Whether the agent has ended the connection: it never writes, so that anything to read is its end."""
        try:
            held.setblocking(False)
            return held.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            held.settimeout(SEND_S)
