"""`fab train --on kubernetes` on a real Kubernetes, but for the image: pods take their files from this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import backends, runs
from launch.backends import kubernetes
from launch.flags import TrainFlags
from launch.request import resolve_request
from lustrain import cluster as contract
from rehearsal.lab.kubernetes import SCRATCH, Kubernetes, why_not
from tests.conftest import require
from tests.lab.training import ROOT, VARIABLES, assert_equals_an_undisturbed_run, attempts, config
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed
from trainer.config import load
from trainer.errors import EXIT_CONFIG
from trainer.storage import open_store

pytestmark = pytest.mark.slow

ENDED = ("Complete", "Failed")
IMAGE = f"example.com/trainer@sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    """Three nodes, which the tests of this file share."""
    require(why_not() is None, str(why_not()))
    with Kubernetes(tmp_path_factory.mktemp("kubernetes"), nodes=3) as running:
        yield running


@pytest.fixture
def job(cluster: Kubernetes, tmp_path: Path) -> Iterator[Path]:
    """The folder of the run `first`, whose Job is taken away in the end."""
    yield tmp_path
    cluster.kubectl("delete", "job,service", "first", "--ignore-not-found", "--grace-period=0", "--force")


def described(folder: Path, **more: Any) -> dict[str, Any]:
    """A Cluster whose pods have `folder` by a claim."""
    runs = more.pop("runs", str(folder))
    pods = {"context": "lab", "claims": {str(folder): "shared"}, **more}
    return {
        "name": "lab",
        "backend": "machines",
        "nodes": {"addresses": ["n1", "n2", "n3"]},
        "reach": {"via": "ssh"},
        "groups": {"train": {"type": "m5.large", "count": 3}},
        "runs_uri": runs,
        "capacity": {"mode": "owned"},
        "kubernetes": pods,
    }


def start(cluster: Kubernetes, folder: Path, text: str) -> None:
    (folder / "config.toml").write_text(text)
    flags = TrainFlags("config.toml", name="first", nodes="2", image=IMAGE)
    on, settings = contract.parse(described(folder)), load(folder / "config.toml")
    request = resolve_request(flags, settings, on, backends.load_all(), folder, (IMAGE, "cpu"))
    runs.register_run(request, resume=False, files={})
    objects = kubernetes.objects(request, {})
    pod = objects[1]["spec"]["template"]["spec"]
    del pod["securityContext"]
    (container,) = pod["containers"]
    container |= {"image": SCRATCH, "imagePullPolicy": "Never", "command": ["/usr/bin/env"]}
    variables = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": "/tmp", **VARIABLES}
    container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    for volume in pod["volumes"]:
        if volume.pop("persistentVolumeClaim", None):
            volume["hostPath"] = {"path": str(folder)}
    paths = dict.fromkeys(["/usr", "/lib", "/lib64", "/bin", str(ROOT), sys.prefix, sys.base_prefix])
    for number, path in enumerate(paths):
        pod["volumes"].append({"name": f"host{number}", "hostPath": {"path": path}})
        container["volumeMounts"].append({"name": f"host{number}", "mountPath": path})
    cluster.kubectl("create", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def ended(cluster: Kubernetes) -> str | None:
    conditions = cluster.get("job", "first")["status"].get("conditions", [])
    return next((one["type"] for one in conditions if one["type"] in ENDED), None)


def pods(cluster: Kubernetes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.get("pods", "--selector=batch.kubernetes.io/job-name=first")["items"]
    return found


def fab(cluster: Kubernetes, folder: Path, *words: str, code: int = 0, **more: Any) -> Any:
    """What fab prints as JSON, with the Cluster's file and kubectl at hand."""
    (folder / "cluster.json").write_text(json.dumps(described(folder, **more)))
    environment = {**os.environ, **cluster.environment(), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{cluster.programs}:{sys.prefix}/bin:/usr/bin:/bin"
    command = [f"{sys.prefix}/bin/fab", "-r", str(ROOT), *words, "--cluster", "cluster.json", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_a_run_is_given_to_kubernetes_once_and_taken_back(cluster: Kubernetes, job: Path) -> None:
    (job / "config.toml").write_text(config("run"))
    train = ["train", "config.toml", "--name", "first", "--nodes", "2", "--image", IMAGE]
    cluster.kubectl("create", "priorityclass", "high", "--value=1000", "--preemption-policy=Never")
    assert fab(cluster, job, *train, "--priority", "high")["job"] == "first"
    wait_until(lambda: fab(cluster, job, "status", "first")["pods"])
    assert all(pod["spec"]["priority"] == 1000 for pod in pods(cluster))
    assert (cluster.get("job", "first")["spec"]["completions"], len(cluster.get("service", "first"))) == (2, 5)
    assert fab(cluster, job, "status", "first")["state"] == "requested, no rank has started yet"
    (refused,) = fab(cluster, job, *train, code=2)["error"]
    assert refused == "--name = 'first': its Job is there already; fix: go on with the run: --resume"
    (refused,) = fab(cluster, job, *train, "--resume", code=2)["error"]
    assert refused == "--resume = 'first': its Job still runs; fix: `fab stop` it first"
    (job / "elsewhere").mkdir()
    (refused,) = fab(cluster, job, *train, "--resume", code=2, runs=f"{job}/elsewhere")["error"]
    assert refused.startswith("--name = 'first': a Job of another run has this name")
    fab(cluster, job, "stop", "first", "--now")
    assert cluster.get("jobs")["items"] == []
    fab(cluster, job, *train, "--resume")


def test_what_kubernetes_lacks_is_one_line_leaving_nothing(cluster: Kubernetes, job: Path) -> None:
    (job / "config.toml").write_text(config("run"))
    train = ["train", "config.toml", "--name", "first", "--nodes", "2", "--image", IMAGE]
    (nowhere,) = fab(cluster, job, *train, code=2, namespace="nowhere")["error"]
    assert nowhere.startswith('kubectl: namespaces "nowhere" not found; fix: kubectl create namespace nowhere')
    (unknown,) = fab(cluster, job, *train, code=2, context="other")["error"]
    assert unknown.startswith('kubectl: context "other" does not exist; fix: kubectl config get-contexts')
    (unranked,) = fab(cluster, job, *train, "--priority", "nothing", code=2)["error"]
    assert unranked.startswith("--priority = 'nothing': is not a priority class; fix: kubectl get priorityclasses")
    assert not (job / "first").exists()


def test_what_is_asked_for_gpus_and_efa_is_what_the_server_takes(cluster: Kubernetes, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config("run", global_batch=64))
    group = {"type": "p5.48xlarge", "count": 4, "gpus": 8, "efa": 32, "taints": [{"key": "nvidia.com/gpu"}]}
    on = contract.parse({**described(tmp_path, service_account="trainer"), "groups": {"train": group}})
    flags = TrainFlags("config.toml", name="first", nodes="4", queue="team", priority="high", image=IMAGE)
    settings = load(tmp_path / "config.toml")
    request = resolve_request(flags, settings, on, backends.load_all(), tmp_path, (IMAGE, "cuda"))
    text = kubernetes.manifest(request, {})
    made = cluster.kubectl("create", "--dry-run=server", "--filename=-", stdin=text).splitlines()
    assert made == ["service/first created (server dry run)", "job.batch/first created (server dry run)"]


def test_a_wrong_configuration_ends_the_job_at_its_first_pods(cluster: Kubernetes, job: Path) -> None:
    start(cluster, job, config("run").replace("[task]", "[task]\nnothing = 1"))
    wait_until(lambda: ended(cluster))
    assert ended(cluster) == "Failed"
    (why,) = [one for one in cluster.get("job", "first")["status"]["conditions"] if one["type"] == "Failed"]
    assert (why["reason"], len(pods(cluster))) == ("PodFailurePolicy", 2)
    runs.save_job(open_store(f"{job}/first"), "kubernetes", {"job": "first", "namespace": "default", "context": "lab"})
    states = {pod["name"]: pod["state"] for pod in fab(cluster, job, "status", "first")["pods"]}
    assert states == {pod["metadata"]["name"]: f"code {EXIT_CONFIG}" for pod in pods(cluster)}
    lines = fab(cluster, job, "logs", "first")["lines"]
    assert {line["source"] for line in lines} <= {pod["metadata"]["name"] for pod in pods(cluster)}
    assert any(line["rank"] == 0 and "task.nothing" in line["text"] for line in lines)
    assert not (job / "first/lease.json").exists()


def test_a_run_that_is_stopped_commits_and_stays_stopped(cluster: Kubernetes, job: Path) -> None:
    start(cluster, job, config("run", steps=1_000_000))
    store = open_store(f"{job}/first")
    wait_until(lambda: committed(store))
    assert fab(cluster, job, "status", "first")["state"] == "running"
    fab(cluster, job, "stop", "first")
    wait_until(lambda: ended(cluster))
    assert ended(cluster) == "Failed"
    found = fab(cluster, job, "status", "first")
    assert found["committed_step"]
    if found["state"] == "interrupted, with a checkpoint":
        # A rank that is told once more while it leaves ends otherwise, though it has committed.
        assert found["step"] == found["committed_step"]


def test_job_that_loses_a_node_goes_on_and_ends_as_if_it_had_not(cluster: Kubernetes, job: Path) -> None:
    start(cluster, job, config("run", hold=f"{job}/go"))
    wait_until(lambda: committed(open_store(f"{job}/first")))
    victim = next(
        pod["spec"]["nodeName"]
        for pod in pods(cluster)
        if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "1"
    )
    cluster.lose(victim)
    (job / "go").touch()
    wait_until(lambda: any(pod["metadata"].get("deletionTimestamp") for pod in pods(cluster)))
    # What the cloud's controller does once the instance is terminated.
    cluster.kubectl("delete", "node", victim)
    wait_until(lambda: ended(cluster))
    assert ended(cluster) == "Complete"
    first, *others = attempts(job / "first")
    assert (first, set(others)) == ("started", {"resumed"})
    assert_equals_an_undisturbed_run(job / "first")
