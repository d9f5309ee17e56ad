"""The monitor's files as data: what Prometheus scrapes and evaluates, where alerts go, and what Grafana shows. Pure.

The monitor is a machine of its own beside a cluster's nodes. `monitor.sh` puts these files at their paths and starts the units.
Its programs listen on 127.0.0.1, and Session Manager forwards their ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from infra.config import CONTROLLER, MONITOR
from infra.plan.nodes.proxy import ENVIRONMENT
from infra.plan.watch import alert_rules, dashboards
from lustrain.problem import UserError, problem

NODE_PORT, GPU_PORT = 9100, 9400
"""Of node_exporter and dcgm-exporter (https://github.com/prometheus/prometheus/wiki/Default-port-allocations)."""
PROMETHEUS_PORT, ALERTMANAGER_PORT, GRAFANA_PORT = 9090, 9093, 3000
SCRAPE_S = 15
"""docs/metrics.md: a run that is done waits 45 s for a scrape."""
DISCOVERY_S = 60
PROMETHEUS = {"self": "/usr/bin/prometheus", "amp": "/usr/local/bin/prometheus"}
"""Of Ubuntu's archive, or of the project itself, which monitor.sh puts there: Debian 12's 2.42 takes `sigv4` and sends without
a signature, Debian 13's 2.53.3 signs, and what Ubuntu's does was not tried."""
FILES = "/etc/lustrain/monitor"
SETTINGS = f"{FILES}/boot.env"
"""What monitor.sh has to know, in the syntax of a shell."""
DATA = "/var/lib/lustrain-monitor"
"""Where the data volume is mounted."""
UNITS = "/etc/systemd/system"
TARGETS = f"{DATA}/targets/nodes.json"
FIND_TARGETS = "/usr/local/sbin/lustrain-targets"
PASSWORD = f"{DATA}/grafana.env"
"""Grafana's administrator, in a file of root's that monitor.sh makes: systemd reads it before it becomes Grafana's user."""
PROXY = {"proxy_from_environment": True}
"""Of what goes to AWS: without it Prometheus and Alertmanager take no proxy from their environment. From Prometheus 2.43 and
Alertmanager 0.25 on (https://prometheus.io/docs/prometheus/latest/configuration/configuration/#http_config)."""
REPEAT = {"page": "4h", "ticket": "1d"}
"""How often an alert that stays is sent again; AMP takes five days at most
(https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-alertmanager-config.html)."""
SUBJECT_CHARACTERS = 100
"""SNS takes less than that (https://docs.aws.amazon.com/sns/latest/api/API_Publish.html): a longer subject is cut here."""
SUBJECT = (
    f'{{{{ printf "%.{SUBJECT_CHARACTERS - 1}s" '
    '(printf "%s %s %s" .Status .GroupLabels.alertname .GroupLabels.cluster) }}'
)
MESSAGE = """\
{{ range .Alerts }}{{ .Status }}: {{ .Labels.alertname }} ({{ .Labels.severity }})
{{ .Annotations.summary }}
{{ range .Labels.SortedPairs }}{{ .Name }}={{ .Value }} {{ end }}
{{ .Annotations.runbook }}

{{ end }}"""
GPU_TYPES = r"(ml\.)?(p|g|gr)[0-9].*"
"""EC2's families with NVIDIA GPUs, also by HyperPod's names of types
(https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html)."""
Subject = Literal["*", "topic", "workspace", "hyperpod_cluster"]


@dataclass(frozen=True)
class MonitorSettings:
    """What differs between monitors.

    `workspace_url` is the AMP workspace's base with a slash at the end, as `aps:DescribeWorkspace` gives it
    (`prometheusEndpoint`); empty without one. `hyperpod_cluster` is the name or ARN that `sagemaker list-cluster-nodes` takes.
    `trainer_port` is `[metrics] prometheus_port` of a run (docs/metrics.md); rank k of a node listens on that port + k.
    `rankless` are the groups on which no rank runs. `proxied`: AWS is reached through the proxy of `ENVIRONMENT`.
    """

    cluster: str
    region: str
    nodes: Literal["ec2", "hyperpod"]
    prometheus: Literal["none", "self", "amp"]
    grafana: Literal["none", "self"]
    retention_days: int
    disk_gib: int
    topic_arn: str
    workspace_url: str = ""
    hyperpod_cluster: str = ""
    trainer_port: int = 28400
    gpus_per_node: int = 8
    proxied: bool = False
    rankless: tuple[str, ...] = (CONTROLLER, MONITOR)


@dataclass(frozen=True)
class Right:
    """A statement of the monitor's role: `subject` says on what, by a word, since ARNs are known to the stack alone."""

    sid: str
    actions: tuple[str, ...]
    subject: Subject = "*"


@dataclass(frozen=True)
class Discovery:
    """How Prometheus learns of nodes, and the names that the discovery gives to what it knows of each."""

    config: Mapping[str, Any]
    address: str
    node: str
    group: str
    type: str


def monitor_files(settings: MonitorSettings) -> Mapping[str, str]:
    """Return the content of each file by its absolute path on the monitor. UserError where nothing is scraped, or Grafana's
    pages cannot be made."""
    if settings.prometheus == "none":
        raise UserError(problem("observability.prometheus", "none", "leaves the monitor nothing to do", "self, amp"))
    files = {
        SETTINGS: _shell(settings),
        f"{FILES}/prometheus.yml": _yaml(prometheus(settings)),
        **_prometheus_unit(settings),
    }
    if settings.prometheus == "self":
        files[f"{FILES}/lustrain.rules.yml"] = alert_rules.render()
        routes = _routes(settings.topic_arn, settings.region, proxied=settings.proxied)
        files[f"{FILES}/alertmanager.yml"] = _yaml(routes)
        files |= _alertmanager_unit()
    if settings.nodes == "hyperpod":
        files |= _targets_unit(settings)
    if settings.grafana == "self":
        files |= _grafana(settings)
    return files


def monitor_actions(settings: MonitorSettings) -> tuple[Right, ...]:
    """Return what the monitor's role needs on top of what every node's has (Session Manager, its bundle, its metrics).

    EC2's describing actions know no resource; AMP's are those of
    https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-APIReference-IAM.html.
    """
    rights = []
    if settings.nodes == "ec2":
        rights.append(Right("NodesFind", ("ec2:DescribeInstances", "ec2:DescribeAvailabilityZones")))
    else:
        look = ("sagemaker:ListClusterNodes", "sagemaker:DescribeClusterNode")
        rights.append(Right("NodesFind", look, "hyperpod_cluster"))
    if settings.prometheus == "self":
        rights.append(Right("AlertsSend", ("sns:Publish",), "topic"))
    if settings.prometheus == "amp":
        rights.append(Right("SamplesWrite", ("aps:RemoteWrite",), "workspace"))
        if settings.grafana == "self":
            read = ("aps:QueryMetrics", "aps:GetLabels", "aps:GetSeries", "aps:GetMetricMetadata")
            rights.append(Right("SamplesRead", read, "workspace"))
    return tuple(rights)


@cache
def rule_groups(cluster: str) -> str:
    """Return the rules as YAML for an AMP rule group namespace. A workspace adds no labels of its own to alerts, so each rule
    names the cluster."""
    rules = alert_rules.rule_file()
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["labels"]["cluster"] = cluster
    return _yaml(rules)


def alert_manager(topic_arn: str, region: str) -> str:
    """Return the alert manager definition of an AMP workspace as YAML: all alerts go to the SNS topic
    (https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-alertmanager-config.html)."""
    return _yaml({"alertmanager_config": _yaml(_routes(topic_arn, region))})


def prometheus(settings: MonitorSettings) -> dict[str, Any]:
    """Return Prometheus's configuration
    (https://prometheus.io/docs/prometheus/latest/configuration/configuration/)."""
    config: dict[str, Any] = {
        "global": {
            "scrape_interval": f"{SCRAPE_S}s",
            "evaluation_interval": f"{SCRAPE_S}s",
            "external_labels": {"cluster": settings.cluster},
        },
        "scrape_configs": _scrapes(settings),
    }
    if settings.prometheus == "self":
        config["rule_files"] = [f"{FILES}/lustrain.rules.yml"]
        manager = {"targets": [f"127.0.0.1:{ALERTMANAGER_PORT}"]}
        config["alerting"] = {"alertmanagers": [{"static_configs": [manager]}]}
    else:
        url = f"{settings.workspace_url}api/v1/remote_write"
        config["remote_write"] = [{"url": url, "sigv4": {"region": settings.region}, **_proxy(settings.proxied)}]
    return config


def _discovery(settings: MonitorSettings) -> Discovery:
    """Return EC2's own discovery, whose labels have `_` where a name has what none may have, or the file of
    `lustrain-targets`."""
    if settings.nodes == "hyperpod":
        files = {"files": [TARGETS], "refresh_interval": f"{DISCOVERY_S}s"}
        names = (f"__meta_lustrain_{name}" for name in ("node", "group", "type"))
        return Discovery({"file_sd_configs": [files]}, "__address__", *names)
    filters = {"tag:lustrain:cluster": settings.cluster, "instance-state-name": "running"}
    instances = {
        "region": settings.region,
        "refresh_interval": f"{DISCOVERY_S}s",
        "filters": [{"name": name, "values": [value]} for name, value in filters.items()],
        **_proxy(settings.proxied),
    }
    names = (f"__meta_ec2_{name}" for name in ("private_ip", "instance_id", "tag_lustrain_group", "instance_type"))
    return Discovery({"ec2_sd_configs": [instances]}, *names)


def _scrapes(settings: MonitorSettings) -> list[dict[str, Any]]:
    """Return a job for each port of a node. Prometheus asks equal discoveries once, and job names must differ: the ports of a
    node's ranks become the one job `run` by a label."""
    discovery = _discovery(settings)
    gpus = {"source_labels": [discovery.type], "regex": GPU_TYPES, "action": "keep"}
    workers = {"source_labels": [discovery.group], "regex": "|".join(settings.rankless), "action": "drop"}
    run = {"target_label": "job", "replacement": "run"}
    ranks = range(settings.gpus_per_node)
    return [
        _scrape("node", NODE_PORT, settings, discovery),
        _scrape("gpu", GPU_PORT, settings, discovery, gpus),
        *(_scrape(f"run-{rank}", settings.trainer_port + rank, settings, discovery, workers, run) for rank in ranks),
    ]


def _scrape(
    job: str, port: int, settings: MonitorSettings, discovery: Discovery, *further: Mapping[str, Any]
) -> dict[str, Any]:
    """`instance` becomes address and port: the dashboards tell nodes apart by its host."""
    return {
        "job_name": job,
        **discovery.config,
        "relabel_configs": [
            {"source_labels": [discovery.address], "target_label": "__address__", "replacement": f"$1:{port}"},
            {"source_labels": [discovery.node], "target_label": "node"},
            {"source_labels": [discovery.group], "target_label": "group"},
            # Rules group by it, and the label that goes to others is not on series here.
            {"target_label": "cluster", "replacement": settings.cluster},
            *further,
        ],
    }


def _proxy(proxied: bool) -> dict[str, Any]:
    return PROXY if proxied else {}


def _routes(topic_arn: str, region: str, *, proxied: bool = False) -> dict[str, Any]:
    """Return Alertmanager's configuration (https://prometheus.io/docs/alerting/latest/configuration/)."""
    topic = {
        "topic_arn": topic_arn,
        "sigv4": {"region": region},
        "subject": SUBJECT,
        "message": MESSAGE,
        "send_resolved": True,
        **({"http_config": PROXY} if proxied else {}),
    }
    return {
        "route": {
            "receiver": "topic",
            "group_by": ["cluster", "alertname", "run"],
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": REPEAT["ticket"],
            "routes": [{"receiver": "topic", "matchers": ['severity="page"'], "repeat_interval": REPEAT["page"]}],
        },
        "receivers": [{"name": "topic", "sns_configs": [topic]}],
    }


def _prometheus_unit(settings: MonitorSettings) -> dict[str, str]:
    """Return Prometheus's flags. As an agent it keeps only what the workspace has not taken yet, four hours of it at most
    (`--storage.agent.retention.max-time`)."""
    flags = [f"--config.file={FILES}/prometheus.yml", f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}"]
    if settings.prometheus == "amp":
        flags += ["--enable-feature=agent", f"--storage.agent.path={DATA}/prometheus"]
    else:
        flags += [
            f"--storage.tsdb.path={DATA}/prometheus",
            f"--storage.tsdb.retention.time={settings.retention_days}d",
            # A compaction needs room beside what is counted here.
            f"--storage.tsdb.retention.size={settings.disk_gib * 7 // 10}GB",
        ]
    return _drop_in("prometheus", PROMETHEUS[settings.prometheus], flags)


def _alertmanager_unit() -> dict[str, str]:
    """Return Alertmanager's flags: it has no peers, and so no address for them."""
    flags = [
        f"--config.file={FILES}/alertmanager.yml",
        f"--web.listen-address=127.0.0.1:{ALERTMANAGER_PORT}",
        f"--storage.path={DATA}/alertmanager",
        "--cluster.listen-address=",
    ]
    return _drop_in("prometheus-alertmanager", "/usr/bin/prometheus-alertmanager", flags)


def _drop_in(unit: str, program: str, flags: list[str]) -> dict[str, str]:
    """Return a drop-in, since apt would ask about a change of the package's own files."""
    text = f"""[Unit]
RequiresMountsFor={DATA}

[Service]
EnvironmentFile=-/{ENVIRONMENT}
ExecStart=
ExecStart={" ".join([program, *flags])}
Restart=always
RestartSec=5
"""
    return {f"{UNITS}/{unit}.service.d/lustrain.conf": text}


def _targets_unit(settings: MonitorSettings) -> dict[str, str]:
    name = FIND_TARGETS.rpartition("/")[2]
    words = f"--cluster {settings.hyperpod_cluster} --region {settings.region} --output {TARGETS}"
    service = f"""[Unit]
Description=Targets of Prometheus: the nodes of a HyperPod cluster
RequiresMountsFor={DATA}

[Service]
Type=oneshot
EnvironmentFile=-/{ENVIRONMENT}
Environment=PATH=/usr/local/bin:/usr/bin:/bin:/snap/bin
ExecStart=/usr/bin/python3 -I {FIND_TARGETS} {words}
TimeoutStartSec=10min
"""
    timer = f"""[Unit]
Description=Targets of Prometheus, each minute

[Timer]
AccuracySec=5
OnActiveSec=0
OnUnitInactiveSec={DISCOVERY_S}

[Install]
WantedBy=timers.target
"""
    program = Path(__file__).with_name("hyperpod_targets.py").read_text(encoding="utf-8")
    return {FIND_TARGETS: program, f"{UNITS}/{name}.service": service, f"{UNITS}/{name}.timer": timer}


def _grafana(settings: MonitorSettings) -> dict[str, str]:
    """Return provisioning, pages and unit. Grafana 12 signs for AMP itself; 13 does it by a plugin that it would have to
    download (https://grafana.com/docs/grafana/latest/datasources/prometheus/configure/aws-authentication)."""
    signed = {"sigV4Auth": True, "sigV4AuthType": "default", "sigV4Region": settings.region}
    amp = settings.prometheus == "amp"
    source = {
        "name": "AMP" if amp else "Prometheus",
        "uid": "lustrain",
        "type": "prometheus",
        "access": "proxy",
        "url": settings.workspace_url if amp else f"http://127.0.0.1:{PROMETHEUS_PORT}",
        "isDefault": True,
        "editable": False,
        "jsonData": {"httpMethod": "POST", "timeInterval": f"{SCRAPE_S}s", **(signed if amp else {})},
    }
    pages = dashboards.files(f"{FILES}/pages")
    provisioning = pages.pop(dashboards.PROVISIONING)
    variables = {
        "SERVER_HTTP_ADDR": "127.0.0.1",
        "SERVER_HTTP_PORT": str(GRAFANA_PORT),
        "PATHS_DATA": f"{DATA}/grafana",
        "PATHS_PROVISIONING": f"{FILES}/grafana",
        "AUTH_ANONYMOUS_ENABLED": "false",
        "USERS_ALLOW_SIGN_UP": "false",
        "AUTH_SIGV4_AUTH_ENABLED": str(amp).lower(),
        "ANALYTICS_REPORTING_ENABLED": "false",
        "ANALYTICS_CHECK_FOR_UPDATES": "false",
        "ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "NEWS_NEWS_FEED_ENABLED": "false",
        "PLUGINS_PREINSTALL_DISABLED": "true",
    }
    environment = "".join(f"Environment=GF_{name}={value}\n" for name, value in variables.items())
    unit = f"""[Unit]
RequiresMountsFor={DATA}

[Service]
EnvironmentFile=-/{ENVIRONMENT}
EnvironmentFile={PASSWORD}
{environment}Restart=always
RestartSec=5
"""
    return {
        f"{FILES}/grafana/datasources/lustrain.yaml": _yaml({"apiVersion": 1, "datasources": [source]}),
        f"{FILES}/grafana/dashboards/lustrain.yaml": provisioning,
        **{f"{FILES}/pages/{name}": text for name, text in pages.items()},
        f"{UNITS}/grafana-server.service.d/lustrain.conf": unit,
    }


def _shell(settings: MonitorSettings) -> str:
    """Return what to install, which units to start, and what answers when they are up."""
    packages, units = ["prometheus", "prometheus-node-exporter"], ["prometheus"]
    answers = [f"http://127.0.0.1:{PROMETHEUS_PORT}/-/ready"]
    folders = {"prometheus": "prometheus"}
    if settings.prometheus == "self":
        packages.append("prometheus-alertmanager")
        units.append("prometheus-alertmanager")
        answers.append(f"http://127.0.0.1:{ALERTMANAGER_PORT}/-/ready")
        folders["alertmanager"] = "prometheus"
    if settings.nodes == "hyperpod":
        units.append(f"{FIND_TARGETS.rpartition('/')[2]}.timer")
    if settings.grafana == "self":
        units.append("grafana-server")
        answers.append(f"http://127.0.0.1:{GRAFANA_PORT}/api/health")
        folders["grafana"] = "grafana"
    values = {
        "prometheus": settings.prometheus,
        "grafana": settings.grafana,
        "packages": " ".join(packages),
        "units": " ".join([*units, "prometheus-node-exporter"]),
        "answers": " ".join(answers),
        "folders": " ".join(f"{folder}:{owner}" for folder, owner in folders.items()),
    }
    return "".join(f"{name}='{value}'\n" for name, value in values.items())


class _WithoutAliases(yaml.SafeDumper):
    """Writes what stands in several places in each of them, for people who read the file on the monitor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_WithoutAliases, sort_keys=False, width=10_000)
