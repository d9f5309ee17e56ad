"""The monitor's own files before real programs: Prometheus finds nodes, scrapes them and evaluates the rules, and an alert
becomes a message to a topic.

Stand-ins: the embedded AWS for EC2, planted answers of SageMaker, a receiver for SNS and AMP. Paths, ports and pauses are
others.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from infra.local.aws import LocalAws
from infra.plan.watch.monitor import (
    ALERTMANAGER_PORT,
    DATA,
    FILES,
    FIND_TARGETS,
    GPU_PORT,
    NODE_PORT,
    PROMETHEUS_PORT,
    UNITS,
    MonitorSettings,
    monitor_files,
    rule_groups,
)
from tests.conftest import require
from tests.infra.test_dashboards_live import free_ports
from tests.infra.test_monitor import AMP, AWS, HYPERPOD, SELF, plant
from trainer.metrics.prometheus import PrometheusSink

pytestmark = pytest.mark.slow

PATIENCE_S = 150.0
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "prometheus-node-exporter")
NODE, GROUP, KIND = "i-0", "gpu", "g6e.12xlarge"
PUBLISHED = '<PublishResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><PublishResult/></PublishResponse>'


@pytest.fixture(autouse=True)
def programs() -> None:
    require(all(map(shutil.which, PROGRAMS)), f"apt-get install {' '.join(PROGRAMS)}")


def put(settings: MonitorSettings, root: Path, ports: dict[int, int]) -> None:
    """Lay the files out below a folder, with its paths, other ports, and pauses of a second."""
    for path, text in monitor_files(settings).items():
        file = root / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (FILES, DATA):
            text = text.replace(folder, f"{root}{folder}")
        for port, free in ports.items():
            text = text.replace(f":{port}", f":{free}")
        if file.suffix == ".yml":
            text = re.sub(r"((?:scrape|evaluation|refresh|group)_(?:interval|wait): )\w+", r"\g<1>1s", text)
        file.write_text(text)


@pytest.mark.parametrize("settings", [SELF, AMP, HYPERPOD, replace(HYPERPOD, prometheus="amp")])
def test_promtool_accepts_the_files(settings: MonitorSettings, tmp_path: Path) -> None:
    put(settings, tmp_path, {})
    agent = ["--agent"] if settings.prometheus == "amp" else []
    (tmp_path / "groups.yml").write_text(rule_groups("demo"))
    for words in (["config", *agent, f"{tmp_path}{FILES}/prometheus.yml"], ["rules", str(tmp_path / "groups.yml")]):
        done = subprocess.run(["promtool", "check", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


class Topic:
    """Takes what is published, as SNS does, and what else comes: paths and signatures."""

    def __init__(self) -> None:
        self.published: list[dict[str, str]] = []
        self.signed: list[tuple[str, str]] = []
        topic = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode(errors="replace")
                topic.signed.append((self.path, self.headers["Authorization"]))
                topic.published.append(dict(urllib.parse.parse_qsl(body)))
                self.send_response(200)
                self.send_header("Content-Length", str(len(PUBLISHED)))
                self.end_headers()
                self.wfile.write(PUBLISHED.encode())

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def flags(root: Path, unit: str) -> list[str]:
    """The command of a drop-in."""
    text = (root / UNITS[1:] / f"{unit}.service.d/lustrain.conf").read_text()
    return shlex.split(re.findall(r"(?m)^ExecStart=(.+)$", text)[-1])


def name_hyperpods_node(settings: MonitorSettings, root: Path, folder: Path) -> None:
    """Name this machine as a node, by the monitor's own program."""
    details = {"InstanceId": NODE, "InstanceGroupName": GROUP, "InstanceType": f"ml.{KIND}"}
    summaries = [{**details, "InstanceStatus": {"Status": "Running"}}]
    (folder / "nodes").write_text(json.dumps({"ClusterNodeSummaries": summaries}))
    plant(folder, "aws", AWS.format(folder=folder).replace("10.0.0.1", "127.0.0.1"))
    unit = (root / UNITS[1:] / f"{Path(FIND_TARGETS).name}.service").read_text()
    [words] = re.findall(r"(?m)^ExecStart=\S+ -I \S+ (.+)$", unit)
    subprocess.run(
        [sys.executable, "-I", f"{root}{FIND_TARGETS}", *shlex.split(words)],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        check=True,
    )


def name_ec2_node(settings: MonitorSettings, root: Path, aws: str) -> str:
    """Have EC2 name this machine as a node, beside one of another cluster; return its id."""
    ec2 = boto3.client("ec2", "us-east-1", endpoint_url=aws, aws_access_key_id="x", aws_secret_access_key="x")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    ids = []
    for address, cluster in (("127.0.0.1", settings.cluster), ("127.0.0.2", "other")):
        tags = [{"Key": "lustrain:cluster", "Value": cluster}, {"Key": "lustrain:group", "Value": GROUP}]
        made = ec2.run_instances(
            ImageId=image,
            InstanceType=KIND,
            MinCount=1,
            MaxCount=1,
            PrivateIpAddress=address,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
        )
        ids.append(made["Instances"][0]["InstanceId"])
    path = root / FILES[1:] / "prometheus.yml"
    config = yaml.safe_load(path.read_text())
    for scrape in config["scrape_configs"]:
        [discovery] = scrape["ec2_sd_configs"]
        discovery["endpoint"] = aws
    path.write_text(yaml.safe_dump(config))
    return ids[0]


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "NO_PROXY": "*"}
    with (folder / "log").open("a") as log:
        started = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **keys})
        try:
            yield
        finally:
            started.kill()
            started.wait()


@pytest.fixture(params=[SELF, HYPERPOD], ids=["ec2", "hyperpod"])
def monitor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Topic, dict[str, str]]]:
    """Address of a monitor's Prometheus, the topic it sends to, and the labels of a node. A run's loss is no number."""
    ports = free_ports(5)
    settings = replace(request.param, trainer_port=ports[4], gpus_per_node=1)
    root = tmp_path / "root"
    put(settings, root, dict(zip((NODE_PORT, GPU_PORT, PROMETHEUS_PORT, ALERTMANAGER_PORT), ports, strict=False)))
    topic, node = Topic(), NODE
    path = root / FILES[1:] / "alertmanager.yml"
    manager = yaml.safe_load(path.read_text())
    manager["receivers"][0]["sns_configs"][0]["api_url"] = topic.url
    path.write_text(yaml.safe_dump(manager))
    sink = PrometheusSink(run="r", rank=0, launch=1)
    fields = ("step", "lr", "grad_norm", "tokens", "tokens_per_second", "world_size", "attempt")
    seconds = dict.fromkeys(("step_seconds", "data_seconds", "blocked_seconds"), 0.1)
    sink.step({**dict.fromkeys(fields, 1.0), **seconds, "loss": math.nan, "skipped": False})
    commands = (
        ["prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{ports[0]}"],
        flags(root, "prometheus"),
        flags(root, "prometheus-alertmanager"),
    )
    with ExitStack() as ends:
        if settings.nodes == "ec2":
            node = name_ec2_node(settings, root, ends.enter_context(LocalAws()).endpoint)
        else:
            name_hyperpods_node(settings, root, tmp_path)
        sink.serve("127.0.0.1", settings.trainer_port)
        ends.callback(sink.close)
        ends.callback(topic.server.shutdown)
        for command in commands:
            ends.enter_context(running(command, tmp_path))
        labels = {"cluster": "demo", "group": GROUP, "node": node, "job": "node", "instance": f"127.0.0.1:{ports[0]}"}
        yield f"http://127.0.0.1:{ports[2]}/api/v1", topic, labels


def ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return json.loads(reply.read())["data"]
    except OSError:
        return {}


def wait_for(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < ends:
        time.sleep(0.5)


def test_monitor_scrapes_evaluates_and_tells(monitor: tuple[str, Topic, dict[str, str]]) -> None:
    api, topic, labels = monitor

    def states() -> dict[str, str]:
        return {one["labels"]["job"]: one["health"] for one in ask(f"{api}/targets").get("activeTargets", [])}

    # Nothing stands for dcgm-exporter.
    wanted = {"node": "up", "run": "up", "gpu": "down"}
    wait_for(lambda: states() == wanted)
    assert states() == wanted
    [node] = [one for one in ask(f"{api}/targets")["activeTargets"] if one["labels"]["job"] == "node"]
    assert node["labels"] == labels

    def health() -> set[str]:
        return {rule["health"] for group in ask(f"{api}/rules").get("groups", []) for rule in group["rules"]}

    wait_for(lambda: health() == {"ok"})
    assert health() == {"ok"}

    def messages() -> list[dict[str, str]]:
        return [one for one in topic.published if "LossNotFinite" in one["Subject"]]

    wait_for(messages)
    message = messages()[0]
    assert (message["Action"], message["TopicArn"]) == ("Publish", SELF.topic_arn)
    assert message["Subject"] == "firing LossNotFinite demo"
    assert re.match(r"AWS4-HMAC-SHA256 Credential=x/\d+/us-east-1/sns/", topic.signed[0][1])
    assert {"run=r", "docs/runbook.md", "(page)"} <= set(
        re.findall(r"run=r|docs/runbook\.md|\(page\)", message["Message"])
    )


def test_agent_sends_to_the_workspace(tmp_path: Path) -> None:
    """Unsigned: that takes the build that monitor.sh downloads (`PROMETHEUS`)."""
    topic, [port] = Topic(), free_ports(1)
    settings = replace(HYPERPOD, prometheus="amp", workspace_url=f"{topic.url}/workspaces/ws-1/")
    root = tmp_path / "root"
    put(settings, root, {PROMETHEUS_PORT: port})
    name_hyperpods_node(settings, root, tmp_path)
    command = flags(root, "prometheus")
    assert command[0] == "/usr/local/bin/prometheus"
    with running(["prometheus", *command[1:]], tmp_path):
        wait_for(lambda: topic.signed)
    topic.server.shutdown()
    assert topic.signed[0][0] == "/workspaces/ws-1/api/v1/remote_write"
