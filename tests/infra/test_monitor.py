"""The monitor: its files have what rules and pages ask for, its script makes it from an empty machine, and nodes answer it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.plan.nodes.bundle import EXPORTERS, ON_INIT, PACKAGES, bundle
from infra.plan.nodes.document import node_document
from infra.plan.watch import hyperpod_targets
from infra.plan.watch.monitor import (
    DATA,
    FILES,
    UNITS,
    MonitorSettings,
    alert_manager,
    monitor_actions,
    monitor_files,
    prometheus,
    rule_groups,
)
from lustrain.problem import UserError
from tests.infra.edits import spec_of
from tests.infra.lifecycle_node import Node
from tests.infra.watched_metrics import OTHERS, expressions

SCRIPT = EXPORTERS.with_name("monitor.sh")
TOPIC = "arn:aws:sns:us-east-1:123456789012:demo-alarms"
WORKSPACE = "https://aps-workspaces.us-east-1.amazonaws.com/workspaces/ws-1/"
SELF = MonitorSettings("demo", "us-east-1", "ec2", "self", "self", 30, 50, TOPIC)
AMP = replace(SELF, prometheus="amp", workspace_url=WORKSPACE)
HYPERPOD = replace(SELF, nodes="hyperpod", hyperpod_cluster="demo")


def scraped_jobs(settings: MonitorSettings) -> dict[str, set[str]]:
    """The labels that each job's targets get, by the job's name as series have it."""
    jobs: dict[str, set[str]] = {}
    for scrape in prometheus(settings)["scrape_configs"]:
        rules = scrape["relabel_configs"]
        [job] = [one["replacement"] for one in rules if one.get("target_label") == "job"] or [scrape["job_name"]]
        labels = {one["target_label"] for one in rules if "target_label" in one} - {"__address__"}
        jobs[job] = labels | {"instance", "job"}
    return jobs


@pytest.mark.parametrize("settings", [SELF, HYPERPOD], ids=["ec2", "hyperpod"])
def test_scraping_makes_the_jobs_and_labels_of_rules_and_panels(settings: MonitorSettings) -> None:
    jobs = scraped_jobs(settings)
    assert set(jobs) == {"node", "gpu", "run"}
    assert all(labels >= {"cluster", "group", "node", "instance", "job"} for labels in jobs.values())
    assert {job for _, text in expressions() for job in re.findall(r'job="(\w+)"', text)} <= set(jobs)


def test_ports_are_those_of_exporters_and_ranks() -> None:
    rules = [scrape["relabel_configs"][0]["replacement"] for scrape in prometheus(SELF)["scrape_configs"]]
    assert rules == ["$1:9100", "$1:9400", *(f"$1:{port}" for port in range(28400, 28408))]


def test_every_program_listens_on_this_machine_alone() -> None:
    files = monitor_files(SELF)
    units = {path: text for path, text in files.items() if path.startswith(UNITS)}
    assert len(units) == 3
    for path, text in units.items():
        [address] = re.findall(r"(?:listen-address=|GF_SERVER_HTTP_ADDR=)(\d[\d.]+)", text)
        assert address == "127.0.0.1", path
    grafana = units[f"{UNITS}/grafana-server.service.d/lustrain.conf"]
    assert "Environment=GF_AUTH_ANONYMOUS_ENABLED=false\n" in grafana
    assert "PASSWORD=" not in "".join(files.values())


def test_workspace_gets_samples_and_judges_them() -> None:
    files = monitor_files(AMP)
    config = yaml.safe_load(files[f"{FILES}/prometheus.yml"])
    assert config["remote_write"] == [{"url": f"{WORKSPACE}api/v1/remote_write", "sigv4": {"region": "us-east-1"}}]
    assert not {"rule_files", "alerting"} & set(config)
    assert not any("alertmanager" in path for path in files)
    [source] = yaml.safe_load(files[f"{FILES}/grafana/datasources/lustrain.yaml"])["datasources"]
    assert (source["url"], source["jsonData"]["sigV4Auth"]) == (WORKSPACE, True)
    alerts = [rule for rule in yaml.safe_load(rule_groups("demo"))["groups"][0]["rules"] if "alert" in rule]
    assert {rule["labels"]["cluster"] for rule in alerts} == {"demo"}
    manager = yaml.safe_load(yaml.safe_load(alert_manager(TOPIC, "us-east-1"))["alertmanager_config"])
    assert manager["receivers"][0]["sns_configs"][0]["topic_arn"] == TOPIC


def test_what_goes_to_aws_takes_the_proxy() -> None:
    files = monitor_files(replace(SELF, proxied=True))
    manager = yaml.safe_load(files[f"{FILES}/alertmanager.yml"])
    assert manager["receivers"][0]["sns_configs"][0]["http_config"] == {"proxy_from_environment": True}
    for scrape in prometheus(replace(SELF, proxied=True))["scrape_configs"]:
        assert scrape["ec2_sd_configs"][0]["proxy_from_environment"]
        assert "proxy_from_environment" not in scrape
    [written] = prometheus(replace(AMP, proxied=True))["remote_write"]
    assert written["proxy_from_environment"]
    assert not [text for settings in (SELF, AMP) for text in monitor_files(settings).values() if "proxy_from" in text]


@pytest.mark.parametrize(
    ("settings", "actions"),
    [
        (SELF, {"ec2:DescribeInstances": "*", "ec2:DescribeAvailabilityZones": "*", "sns:Publish": "topic"}),
        (
            replace(HYPERPOD, prometheus="amp", grafana="none"),
            {
                "sagemaker:ListClusterNodes": "hyperpod_cluster",
                "sagemaker:DescribeClusterNode": "hyperpod_cluster",
                "aps:RemoteWrite": "workspace",
            },
        ),
    ],
)
def test_role_may_do_what_the_files_do(settings: MonitorSettings, actions: dict[str, str]) -> None:
    assert {action: right.subject for right in monitor_actions(settings) for action in right.actions} == actions


def test_monitor_without_prometheus_is_one_line() -> None:
    with pytest.raises(UserError, match=r"observability\.prometheus = "):
        monitor_files(replace(SELF, prometheus="none"))


AWS = """#!/bin/bash
echo "$*" >>{folder}/calls
[[ ! -e {folder}/refuse ]] || {{ echo AccessDenied >&2; exit 254; }}
[[ "$2" != list-cluster-nodes ]] || exec cat {folder}/nodes
echo '{{"NodeDetails": {{"PrivatePrimaryIp": "10.0.0.1"}}}}'
"""


def test_targets_follow_the_nodes_of_hyperpod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "targets" / "nodes.json"

    def run(*states: str) -> int:
        nodes = [
            {
                "InstanceId": f"i-{number}",
                "InstanceGroupName": "gpu",
                "InstanceType": "ml.p5.48xlarge",
                "InstanceStatus": {"Status": state},
            }
            for number, state in enumerate(states)
        ]
        (tmp_path / "nodes").write_text(json.dumps({"ClusterNodeSummaries": nodes}))
        monkeypatch.setattr("sys.argv", ["", "--cluster", "demo", "--region", "us-east-1", "--output", str(output)])
        return hyperpod_targets.main()

    plant(tmp_path, "aws", AWS.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run("Running", "Pending", "Failure") == 0
    targets = json.loads(output.read_text())
    assert [one["labels"]["__meta_lustrain_node"] for one in targets] == ["i-0", "i-2"]
    assert targets[0]["targets"] == ["10.0.0.1"]
    (tmp_path / "calls").unlink()
    assert run("Running", "Running", "ShuttingDown") == 0
    assert [one["labels"]["__meta_lustrain_node"] for one in json.loads(output.read_text())] == ["i-0", "i-1"]
    assert (tmp_path / "calls").read_text().count("describe-cluster-node") == 1
    monkeypatch.setattr(hyperpod_targets, "MOST_DESCRIBED", 1)
    for known in (3, 4):
        assert run(*["Running"] * 4) == 0
        assert len(json.loads(output.read_text())) == known
    kept = output.read_text()
    (tmp_path / "refuse").touch()
    assert run("Running") == 1
    assert output.read_text() == kept


def plant(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


COMMANDS = ("apt-get", "apt-mark", "aws", "chown", "curl", "dpkg", "mkfs.xfs", "mount", "systemctl", "xfs_growfs")
KEY = "B53AE77BADB630A683046005963FA27710458545"


class Machine:
    """A folder that stands for the monitor, on which the script runs as it is and other programs note what they are given."""

    def __init__(self, folder: Path, settings: MonitorSettings) -> None:
        self.root, self.files, self.bin, self.calls = (folder / name for name in ("root", "files", "bin", "calls"))
        self.bin.mkdir()
        for path, text in monitor_files(settings).items():
            file = self.files / path[1:]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for name in COMMANDS:
            plant(self.bin, name, f'#!/bin/bash\necho "{name} $*" >>{self.calls}\n')
        plant(self.bin, "curl", f'#!/bin/bash\necho "curl $*" >>{self.calls}\n[[ ! "$*" =~ "$SILENT" ]]\n')
        for name in ("cmp", "sleep"):
            plant(self.bin, name, "#!/bin/bash\n")
        plant(self.bin, "mountpoint", f"#!/bin/bash\ngrep -q '^mount ' {self.calls}\n")
        plant(self.bin, "dpkg-query", '#!/bin/bash\n[[ $INSTALLED ]] && echo "installed $INSTALLED"\n')
        self.signer(KEY)
        self.holds(f"! grep -q mkfs {self.calls} && exit 2; echo xfs")
        self.attach("vol0123")

    def signer(self, key: str) -> None:
        plant(self.bin, "gpg", f"#!/bin/bash\nprintf 'pub:-:\\nfpr:::::::::{key}:\\n'\n")

    def holds(self, shell: str) -> None:
        plant(self.bin, "blkid", f"#!/bin/bash\n{shell}\n")

    def attach(self, serial: str) -> None:
        disk = self.root / "sys/block/nvme1n1/device"
        disk.mkdir(parents=True, exist_ok=True)
        (disk / "serial").write_text(f"{serial}      \n")

    def boot(self, *, silent: str = "nothing", installed: str = "") -> int:
        environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "LUSTRAIN_ROOT": str(self.root),
            "LUSTRAIN_PAUSE_SECONDS": "0",
            "LUSTRAIN_STEP_SECONDS": "20",
            "LUSTRAIN_CLUSTER": "demo",
            "AWS_REGION": "us-east-1",
            "MONITOR_VOLUME": "vol-0123",
            "MONITOR_FILES": str(self.files),
            "SILENT": silent,
            "INSTALLED": installed,
        }
        self.calls.write_text("")
        return subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=300).returncode

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()

    @property
    def outcome(self) -> str:
        return (self.root / "var/lib/lustrain/boot").read_text().strip()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, SELF)


def installed(called: list[str]) -> list[str]:
    return [line for line in called if " install " in line and "--download-only" not in line]


def test_empty_machine_becomes_a_monitor(machine: Machine) -> None:
    assert machine.boot() == 0, (machine.root / "var/log/lustrain-boot.log").read_text()
    assert machine.outcome == "ready"
    called = machine.called
    assert "mkfs.xfs -K /dev/nvme1n1" in called
    assert f"UUID=xfs {DATA} xfs " in (machine.root / "etc/fstab").read_text()
    [install] = installed(called)
    assert called.index("dpkg --configure -a") < called.index(install)
    wanted = "prometheus prometheus-node-exporter prometheus-alertmanager grafana=12.4.3"
    assert install.endswith(f"--allow-change-held-packages {wanted}")
    password = machine.root / DATA[1:] / "grafana.env"
    assert stat.S_IMODE(password.stat().st_mode) == 0o600
    assert len(re.findall(r"(?m)^GF_SECURITY_(?:ADMIN_PASSWORD|SECRET_KEY)=\S{32}$", password.read_text())) == 2
    started = {line.rpartition(" ")[2] for line in called if line.startswith("systemctl restart")}
    assert started == {"prometheus", "prometheus-alertmanager", "grafana-server", "prometheus-node-exporter"}
    assert [line.rpartition(" ")[2] for line in called if "http://127.0.0.1" in line] == [
        "http://127.0.0.1:9090/-/ready",
        "http://127.0.0.1:9093/-/ready",
        "http://127.0.0.1:3000/api/health",
    ]


def test_later_boot_formats_and_downloads_nothing(machine: Machine) -> None:
    machine.boot()
    password = (machine.root / DATA[1:] / "grafana.env").read_text()
    machine.holds("echo xfs")
    assert machine.boot(installed="12.4.3") == 0
    assert not [line for line in machine.called if re.match(r"apt|mkfs|curl.*grafana\.com", line)]
    assert (machine.root / "etc/fstab").read_text().count(DATA) == 1
    assert (machine.root / DATA[1:] / "grafana.env").read_text() == password


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ("not attached", "data volume"),
        ("holds ext4", "data volume"),
        ("holds what is not known", "data volume"),
        ("key", "programs"),
        ("silent", "answer"),
    ],
)
def test_failed_boot_names_its_step_and_is_counted(machine: Machine, fault: str, step: str) -> None:
    if fault == "not attached":
        machine.attach("vol9999")
    elif fault == "holds ext4":
        machine.holds("echo ext4")
    elif fault == "holds what is not known":
        plant(machine.bin, "cmp", "#!/bin/bash\nexit 1\n")
    elif fault == "key":
        machine.signer("0" * 40)
    assert machine.boot(silent="9093" if fault == "silent" else "nothing") == 1
    assert machine.outcome == f"failed {step}"
    assert any(line.startswith("aws cloudwatch put-metric-data") and "Cluster=demo" in line for line in machine.called)
    done = [*installed(machine.called), *(line for line in machine.called if line.startswith("mkfs"))]
    assert len(done) == {"data volume": 0, "programs": 1, "answer": 2}[step]


def test_workspace_needs_a_prometheus_that_signs(tmp_path: Path) -> None:
    machine = Machine(tmp_path, AMP)
    plant(machine.bin, "dpkg", "#!/bin/bash\necho arm64\n")
    assert machine.boot() == 1
    assert machine.outcome == "failed programs"
    assert any(line.endswith("/v2.53.4/prometheus-2.53.4.linux-arm64.tar.gz") for line in machine.called)
    assert "another SHA-256" in (machine.root / "var/log/lustrain-boot.log").read_text()
    assert not (machine.root / "usr/local/bin/prometheus").exists()
    plant(machine.bin, "sha256sum", "#!/bin/bash\n")
    plant(machine.bin, "tar", '#!/bin/bash\nmkdir "$4/${5%/*}" && touch "$4/$5"\n')
    assert machine.boot() == 0
    assert (machine.root / "usr/local/bin/prometheus").exists()


def watched(backend: str = "ec2-spot-g6e") -> Any:
    """A spec whose nodes a monitor reads."""
    spec = spec_of(backend, {})
    return spec.model_copy(
        update={"observability": spec.observability.model_copy(update={"prometheus": "self", "logs": False})}
    )


def test_nodes_of_a_watched_cluster_show_their_metrics() -> None:
    for spec, shown in ((watched(), True), (spec_of("ec2-slurm-g6e", {}), False)):
        paths = {file.path for file in bundle(spec, region="us-east-1").files}
        assert ({EXPORTERS.name, PACKAGES.name} <= paths) == shown
        assert (node_document(spec)["tuning"]["settings"].get("agent.metrics") == "on") == shown


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    for script in (EXPORTERS, PACKAGES):
        (node.bundle / script.name).write_bytes(script.read_bytes())
    sources = node.root / "etc/apt/sources.list.d/lustrain-cuda.list"
    node.command("apt-get", f'#!/bin/bash\necho "apt-get $*" >>"$MOUNTS"\ncat {sources} >>{tmp_path}/sources || true\n')
    node.command("apt-mark", '#!/bin/bash\necho "apt-mark $*" >>"$MOUNTS"\n')
    node.command("apt-cache", "#!/bin/bash\necho 'datacenter-gpu-manager-exporter | 1:4.8.2-1 | https://x Packages'\n")
    node.command("curl", '#!/bin/bash\necho "curl ${!#}" >>"$MOUNTS"\n')
    node.command("dpkg", '#!/bin/bash\necho "dpkg $*" >>"$MOUNTS"\n')
    node.command("uname", "#!/bin/bash\necho aarch64\n")
    node.command("gpg", "#!/bin/bash\nprintf 'pub:-:\\nfpr:::::::::EB693B3035CD5710E231E123A4B469963BF863CC:\\n'\n")
    (node.root / "etc").mkdir(parents=True)
    (node.root / "etc/os-release").write_text('ID=ubuntu\nVERSION_ID="24.04"\n')
    return node


def test_gpu_node_runs_both_exporters(node: Node) -> None:
    (node.root / "proc/driver/nvidia").mkdir(parents=True)
    (node.root / "proc/driver/nvidia/version").touch()
    node.command("prometheus-node-exporter", "#!/bin/bash\n")
    (node.bundle / "on_configured.sh").write_text('#!/bin/bash\necho "the user installs" >>"$MOUNTS"\n')
    assert node.boot(ON_INIT).returncode == 0, node.log
    assert "WARNING: not all exporters" not in node.log
    lines = node.mounts.read_text().splitlines()
    repository = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/sbsa"
    assert lines[:2] == ["the user installs", f"curl {repository}/3bf863cc.pub"]
    assert lines[-4] == "dpkg --configure -a"
    assert "--download-only" in lines[-3]
    assert lines[-2].endswith(" datacenter-gpu-manager-exporter=1:4.8.2-1")
    assert "held" not in lines[-2], "drivers that the image holds stay"
    assert lines[-1] == "apt-mark hold datacenter-gpu-manager-exporter"
    assert f"] {repository}/ /\n" in (node.root.parent / "sources").read_text()
    assert not list((node.root / "etc/apt/sources.list.d").iterdir())
    assert "restart nvidia-dcgm-exporter.service" in node.asked.read_text()
    counted = {line.split(",")[0] for line in (node.root / "etc/lustrain/dcgm-counters.csv").read_text().splitlines()}
    assert counted == {name for name in OTHERS if name.startswith("DCGM_")}


def test_exporters_wait_for_others_that_read_the_lists(node: Node) -> None:
    (node.root / "proc/driver/nvidia").mkdir(parents=True)
    (node.root / "proc/driver/nvidia/version").touch()
    node.command("prometheus-node-exporter", "#!/bin/bash\n")
    busy = node.root.parent / "busy"
    busy.touch()
    node.command("apt-get", f'#!/bin/bash\n[[ "$*" != *" update" || ! -e {busy} ]] || {{ rm {busy}; exit 100; }}\n')
    assert node.boot(ON_INIT).returncode == 0
    assert not busy.exists()
    assert "WARNING: not all exporters" not in node.log


def test_ending_a_script_ends_what_it_tries() -> None:
    script = 'source "$1"; try 1 600 cut -d " " -f 5 /proc/self/stat'
    command = ["bash", "-c", script, "node", str(PACKAGES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        assert int(started.stdout.read()) == started.pid, "callers end the process group of a script"


def test_node_without_exporters_boots_with_a_warning(node: Node) -> None:
    node.command("systemctl", '#!/bin/bash\n[[ "$*" != *node-exporter* ]]\n')
    assert node.boot(ON_INIT).returncode == 0
    assert "WARNING: not all exporters run" in node.log
