"""What CloudWatch gets of a run: lines of its embedded metric format, also where the run makes no step."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from lustrain.problem import UserError
from tests.processes import wait_until
from tests.trainer.tiny_runs import events, train, write_config
from trainer import config as configuration
from trainer.metrics import cloudwatch
from trainer.metrics.cloudwatch import UNITS, AgentConnection, CloudWatchSink, line
from trainer.run.past import Past

DIMENSION = {"type": "string", "minLength": 1, "maxLength": 1024, "pattern": "^[ -9;-~][ -~]*$"}
NAME = {"type": "string", "minLength": 1, "maxLength": 1024}
DIRECTIVE = {
    "type": "object",
    "required": ["Namespace", "Dimensions", "Metrics"],
    "additionalProperties": False,
    "properties": {
        "Namespace": NAME,
        "Dimensions": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "maxItems": 30, "items": {"enum": ["Cluster", "Run"]}},
        },
        "Metrics": {
            "type": "array",
            "minItems": 1,
            "maxItems": 100,
            "items": {
                "type": "object",
                "required": ["Name"],
                "additionalProperties": False,
                "properties": {"Name": NAME, "Unit": {"enum": ["None", "Seconds", "Count/Second"]}},
            },
        },
    },
}
FORMAT = {
    "type": "object",
    "required": ["_aws", "Cluster", "Run"],
    "properties": {
        "_aws": {
            "type": "object",
            "required": ["Timestamp", "CloudWatchMetrics", "LogGroupName"],
            "additionalProperties": False,
            "properties": {
                "Timestamp": {"type": "integer"},
                "LogGroupName": NAME,
                "CloudWatchMetrics": {"type": "array", "minItems": 1, "items": DIRECTIVE},
            },
        },
        "Cluster": DIMENSION,
        "Run": DIMENSION,
    },
    "additionalProperties": {"type": "number"},
}
"""After https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch_Embedded_Metric_Format_Specification.html;
the log group is for the agent
(https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch_Embedded_Metric_Format_Generation_CloudWatch_Agent.html)."""


def checked(text: str) -> dict[str, Any]:
    """The line's document, which fits the format, and whose directives name what is in it and nothing twice."""
    document: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no number of JSON"))
    Draft7Validator(FORMAT).validate(document)
    named = [one["Name"] for directive in document["_aws"]["CloudWatchMetrics"] for one in directive["Metrics"]]
    assert sorted(named) == sorted(document.keys() - {"_aws", "Cluster", "Run"})
    return document


class Agent:
    """Stands for the listener of a CloudWatch agent."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        lines = self.lines

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                lines.extend(data.decode().removesuffix("\n") for data in self.rfile)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def agent() -> Iterator[Agent]:
    found = Agent()
    yield found
    found.server.shutdown()
    found.server.server_close()


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "tokens_per_second": 50.0, "step_seconds": 2.0} | more


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_line_says_what_the_records_say() -> None:
    now = [1000.0]
    sink = CloudWatchSink(
        run="first",
        cluster="llm",
        log_group="/lustrain/llm/train",
        agent=AgentConnection(free_address()),
        on_event=lambda kind, fields: None,
        clock=lambda: now[0],
        monotonic=lambda: now[0],
    )
    sink.begin_generation(3)
    assert sink.values() == {"checkpoint_age_seconds": 0.0, "seconds_since_step": 0.0}
    sink.set_past(3, Past(began=900.0, useful_s=48.0, interruptions=0))
    sink.step(record(7))
    now[0] = 1030.0
    sink.event("checkpoint_committed", {"step": 7, "seconds": 5.0})
    assert sink.values() == {
        "step": 7.0,
        "loss": 2.5,
        "tokens_per_second": 50.0,
        "checkpoint_age_seconds": 5.0,
        "seconds_since_step": 30.0,
        "goodput_ratio": pytest.approx(50 / 130),
    }
    assert sink.values().keys() == UNITS.keys()


def test_line_fits_the_format_with_bounded_dimensions() -> None:
    told = {"cluster": "llm", "log_group": "/lustrain/llm/train", "unix_s": 1_700_000_000.25}
    whole = checked(line(run="first", values=dict.fromkeys(UNITS, 1.0), **told))
    assert (whole["_aws"]["Timestamp"], whole["Cluster"], whole["Run"]) == (1_700_000_000_250, "llm", "first")
    sets = {
        metric["Name"]: directive["Dimensions"]
        for directive in whole["_aws"]["CloudWatchMetrics"]
        for metric in directive["Metrics"]
    }
    assert sets["loss"] == [["Cluster", "Run"]]
    assert sets["seconds_since_step"] == [["Cluster"], ["Cluster", "Run"]], "what an alarm watches"
    holes = checked(line(run=":läuft", values={"step": 1.0, "loss": float("nan"), "seconds_since_step": 2.0}, **told))
    assert ("loss" in holes, holes["Run"]) == (False, "l?uft")


def test_run_that_stands_still_goes_on_telling_its_age(agent: Agent) -> None:
    clock = iter(range(10_000))
    sink = CloudWatchSink(
        run="first",
        cluster="llm",
        log_group="g",
        agent=AgentConnection(agent.address),
        on_event=lambda kind, fields: None,
        monotonic=lambda: float(next(clock)),
        every_s=0.01,
    )
    sink.start()
    wait_until(lambda: len(agent.lines) >= 3)
    sink.close()
    ages = [checked(text)["seconds_since_step"] for text in agent.lines[:3]]
    assert ages == sorted(set(ages))


def test_agent_that_is_away_is_one_warning_and_is_found_again(agent: Agent) -> None:
    told: list[str] = []
    connection = AgentConnection(agent.address)
    connection.send("{}")
    wait_until(lambda: agent.lines == ["{}"])
    gone = AgentConnection(free_address())
    sink = CloudWatchSink(
        run="r",
        cluster="c",
        log_group="g",
        agent=gone,
        on_event=lambda kind, fields: told.append(f"{kind} {fields['detail']}"),
        every_s=0.01,
    )
    sink.start()
    wait_until(lambda: bool(told))
    gone._address = ("127.0.0.1", int(agent.address.rpartition(":")[2]))
    wait_until(lambda: len(agent.lines) > 1)
    sink.close()
    connection.close()
    assert len(told) == 1
    assert told[0].startswith("warning ")


def test_line_to_an_agent_that_hangs_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloudwatch, "SEND_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = AgentConnection(f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(OSError):
            connection.send("x" * (64 << 20))
        connection.send("next")
        connection.close()
        server.accept()[0].close()
        with server.accept()[0] as second, second.makefile() as lines:
            assert lines.read() == "next\n"


def settings(**named: str) -> str:
    return "\n".join(["[metrics.cloudwatch]", *(f'{key} = "{value}"' for key, value in named.items())])


@pytest.mark.parametrize("answers", [True, False])
def test_run_ends_as_without_an_agent(tmp_path: Path, agent: Agent, answers: bool) -> None:
    address = agent.address if answers else free_address()
    more = settings(agent=address, log_group="/lustrain/llm/train", cluster="llm")
    assert train(write_config(tmp_path, 4, 2, more=more)) == 0
    if answers:
        wait_until(lambda: agent.lines)
        last = checked(agent.lines[-1])
        assert (last["Cluster"], last["Run"], last["step"]) == ("llm", "run", 4)
    assert not events(tmp_path / "run", "warning")


@pytest.mark.parametrize(
    ("more", "path"),
    [
        (settings(agent="localhost", log_group="g", cluster="c"), "metrics.cloudwatch.agent = "),
        (settings(agent="tcp://127.0.0.1:25888", log_group="g", cluster="c"), "metrics.cloudwatch.agent = "),
        (settings(agent="127.0.0.1:25888"), "metrics.cloudwatch"),
        (settings(agent="127.0.0.1:65536", log_group="g", cluster="c"), "metrics.cloudwatch"),
    ],
)
def test_agent_that_cannot_be_told_is_one_line(tmp_path: Path, more: str, path: str) -> None:
    with pytest.raises(UserError) as caught:
        configuration.load(write_config(tmp_path, 4, 2, more=more))
    (problem,) = caught.value.problems
    assert problem.startswith(path)
