"""`fab train --on kubernetes` on a real Kubernetes, but for the image: pods take their files from this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import backends, runs
from launch.backends import kubernetes
from launch.backends.kubernetes_nodes import RUN_NAME
from launch.flags import TrainFlags
from launch.request import resolve_request
from lustrain import cluster as contract
from rehearsal.lab.kubernetes import SCRATCH, Kubernetes, why_not
from tests.conftest import require
from tests.lab.training import ROOT, VARIABLES, assert_equals_an_undisturbed_run, attempts, config, losses, undisturbed
from tests.launch import host_pods
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed
from trainer.config import load
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE
from trainer.run import journal
from trainer.storage import open_store

pytestmark = pytest.mark.slow

ENDED = ("Complete", "Failed")
IMAGE = f"example.com/trainer@sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    """Three nodes, which the tests of this file share."""
    require(why_not() is None, str(why_not()))
    with Kubernetes(tmp_path_factory.mktemp("kubernetes"), nodes=3) as running:
        make_claim(running, "shared")
        yield running


def make_claim(cluster: Kubernetes, name: str, folder: Path | None = None) -> None:
    """Make a claim: without a folder pods wait for its volume."""
    volume = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    held = {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}, **volume}
    wanted = {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": name, **volume}
    kinds = ({"PersistentVolume": held} if folder else {}) | {"PersistentVolumeClaim": wanted}
    for kind, spec in kinds.items():
        made = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        cluster.kubectl("create", "--filename=-", stdin=json.dumps(made))


@pytest.fixture
def job(cluster: Kubernetes, tmp_path: Path) -> Iterator[Path]:
    """The folder of the run `first`, whose Job is taken away in the end."""
    yield tmp_path
    cluster.kubectl("delete", "job,service", "first", "--ignore-not-found", "--grace-period=0", "--force")
    cluster.kubectl("delete", "pods", f"--selector={RUN_NAME}=first", "--grace-period=0", "--force")


def described(folder: Path, **more: Any) -> dict[str, Any]:
    """A Cluster whose pods have `folder` by a claim."""
    runs = more.pop("runs", str(folder))
    groups = more.pop("groups", {"train": {"type": "m5.large", "count": 3}})
    pods = {"context": "lab", "claims": {str(folder): "shared"}, **more}
    return {
        "name": "lab",
        "backend": "machines",
        "nodes": {"addresses": ["n1", "n2", "n3"]},
        "reach": {"via": "ssh"},
        "groups": groups,
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
    host_pods.adapt(objects[1]["spec"]["template"]["spec"], files_of_this_machine(folder))
    cluster.kubectl("create", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def files_of_this_machine(folder: Path) -> dict[str, Any]:
    return {
        "image": SCRATCH,
        "variables": {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": "/tmp", **VARIABLES},
        "folder": str(folder),
        "paths": ["/usr", "/lib", "/lib64", "/bin", str(ROOT), sys.prefix, sys.base_prefix],
    }


def ended(cluster: Kubernetes) -> str | None:
    conditions = cluster.get("job", "first")["status"].get("conditions", [])
    return next((one["type"] for one in conditions if one["type"] in ENDED), None)


def pods(cluster: Kubernetes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.get("pods", "--selector=batch.kubernetes.io/job-name=first")["items"]
    return found


def supervise(cluster: Kubernetes, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a fab train that supervises its run, with a kubectl that gives pods this machine's files; it prints into `log`."""
    (folder / "pods.json").write_text(json.dumps(files_of_this_machine(folder)))
    (folder / "cluster.json").write_text(json.dumps(described(folder)))
    kubectl = folder / "bin/kubectl"
    kubectl.parent.mkdir(exist_ok=True)
    program = f"{sys.executable} -I {host_pods.__file__} {folder}/pods.json {cluster.programs}/kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    kubectl.chmod(0o755)
    environment = {**os.environ, **cluster.environment(), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{kubectl.parent}:{sys.prefix}/bin:/usr/bin:/bin"
    command = [f"{sys.prefix}/bin/fab", "-r", str(ROOT), "train", "config.toml", "--cluster", "cluster.json", *words]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


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
    assert unranked.startswith("--priority = 'nothing': is not a priority class; fix: kubectl")
    (unclaimed,) = fab(cluster, job, *train, code=2, claims={str(job): "nothing"})["error"]
    assert unclaimed.startswith("kubernetes.claims = 'nothing': is not a claim in namespace default; fix: kubectl")
    (unqueued,) = fab(cluster, job, *train, "--queue", "nothing", code=2)["error"]
    assert unqueued.startswith("--queue = 'nothing': is not a queue of Kueue in namespace default; fix: kubectl")
    cluster.kubectl("cordon", "n1", "n2")
    try:
        train[train.index("2")] = "2-3"
        lines = fab(cluster, job, *train, code=2)["error"]
    finally:
        cluster.kubectl("uncordon", "n1", "n2")
    assert lines[:2] == ["n1: it is cordoned", "n2: it is cordoned"]
    assert lines[2].startswith("--nodes = 2: 1 of the 3 nodes with the group's labels have room")
    assert not (job / "first").exists()
    assert cluster.get("pods", f"--selector={RUN_NAME}=first")["items"] == []


def test_who_may_not_delete_pods_supervises_no_run(cluster: Kubernetes, job: Path) -> None:
    (job / "config.toml").write_text(config("run"))
    resources = "--resource=pods,services,jobs.batch,nodes,leases.coordination.k8s.io"
    cluster.kubectl("create", "clusterrole", "starter", "--verb=get,list,create", resources)
    cluster.kubectl("create", "clusterrolebinding", "starter", "--clusterrole=starter", "--user=starter")
    known = json.loads(cluster.kubectl("config", "view", "--raw", "--output=json"))
    (admin,), (context,) = known["users"], known["contexts"]
    known["users"].append(
        {"name": "starter", "user": admin["user"] | {"as": "starter", "as-groups": ["system:authenticated"]}}
    )
    known["contexts"].append({"name": "starter", "context": context["context"] | {"user": "starter"}})
    Path(cluster.environment()["KUBECONFIG"]).write_text(json.dumps(known))
    train = ["train", "config.toml", "--name", "first", "--image", IMAGE]
    (line,) = fab(cluster, job, *train, "--nodes", "2-3", code=1, context="starter")["error"]
    assert line.startswith("--nodes = '2-3': ")
    assert not (job / "first").exists()
    # A Job needs no such right to start.
    assert fab(cluster, job, *train, "--nodes", "2", context="starter")["job"] == "first"


def documented_objects() -> list[str]:
    page = (ROOT / "docs/launch.md").read_text()
    return [block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if block.startswith("apiVersion:")]


def test_documented_objects_are_taken_and_small_runs_share_a_gpu(cluster: Kubernetes, job: Path) -> None:
    """A node with a GPU of two slices, as its device plugin would report them, comes after two small runs were submitted."""
    (job / "config.toml").write_text(config("run"))
    make_claim(cluster, "slices", job)
    examples = "---\n".join(documented_objects())
    cluster.kubectl("create", "namespace", "gpu-operator")
    made = cluster.kubectl("create", "--filename=-", stdin=examples).splitlines()
    assert [line.partition("/")[0] for line in made] == ["priorityclass.scheduling.k8s.io"] * 2 + ["configmap"]
    where: dict[str, Any] = {
        "groups": {"small": {"type": "g6e.xlarge", "count": 1, "gpus": 1}},
        "claims": {str(job): "slices"},
    }

    def train(name: str, priority: str) -> None:
        words = ["--name", name, "--nodes", "1", "--image", IMAGE, "--priority", priority]
        fab(cluster, job, "train", "config.toml", *words, **where)

    def state(name: str) -> dict[str, Any]:
        pods = fab(cluster, job, "status", name, **where)["pods"]
        return pods[-1] if pods else {"node": None, "state": ""}

    names = ("probe-1", "probe-2", "large")
    try:
        for name in names[:2]:
            train(name, "small")
        for name in names[:2]:
            wait_until(lambda name=name: "Unschedulable" in state(name)["state"])
        slices = {"nvidia.com/gpu": "2"}
        patch = json.dumps({"status": {"capacity": slices, "allocatable": slices}})
        cluster.kubectl("patch", "node", "n1", "--subresource=status", "--type=merge", "--patch", patch)
        for name in names[:2]:
            wait_until(lambda name=name: state(name)["node"] == "n1")
        train("large", "large")
        wait_until(lambda: state("large")["node"] == "n1")
        assert len([name for name in names[:2] if state(name)["node"] is None]) == 1
    finally:
        cluster.kubectl("delete", "job,service", *names, "--ignore-not-found", "--grace-period=0", "--force")
        patch = json.dumps({"status": {key: {"nvidia.com/gpu": None} for key in ("capacity", "allocatable")}})
        cluster.kubectl("patch", "node", "n1", "--subresource=status", "--type=merge", "--patch", patch)
        cluster.kubectl("delete", "pvc,pv", "slices", "--wait=false")


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
    # Of pods the server checks what it does not of a Job's template.
    cluster.kubectl("create", "serviceaccount", "trainer")
    flags = replace(flags, nodes="2-4", queue=None, priority=None)
    request = resolve_request(flags, settings, on, backends.load_all(), tmp_path, (IMAGE, "cuda"))
    text = kubernetes.BACKEND.plan(request, tmp_path, {}).files[kubernetes.OBJECTS]
    made = cluster.kubectl("create", "--dry-run=server", "--filename=-", stdin=text).splitlines()
    assert made == [
        f"{one} created (server dry run)" for one in ("service/first", *(f"pod/first-1-{index}" for index in range(4)))
    ]


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


def test_run_goes_on_smaller_and_grows_back(cluster: Kubernetes, job: Path) -> None:
    """Of three nodes one is cordoned, so that a lost one's place stays empty until it is there again."""
    (job / "config.toml").write_text(config("run", hold=f"{job}/go"))
    store = open_store(f"{job}/first")
    cluster.kubectl("cordon", "n3")
    train = ["--name", "first", "--nodes", "1-2", "--grow-after", "0", "--image", IMAGE]
    process = supervise(cluster, job, *train)

    def log() -> str:
        return (job / "log").read_text()

    def reached(state: Callable[[], bool]) -> None:
        wait_until(lambda: state() or process.poll() is not None)
        assert process.poll() is None, log()

    try:
        reached(lambda: bool(committed(store)))
        (first,) = journal.read(store)
        assert first["nodes"] == ["n1", "n2"]
        cluster.lose("n2")
        reached(lambda: len(journal.read(store)) == 2)
        cluster.rejoin("n2")
        reached(lambda: "n2 can be used: saving, to go on with 2 nodes instead of 1" in log())
        (job / "go").touch()
        wait_until(lambda: process.poll() is not None)
        assert process.poll() == EXIT_DONE, log()
    finally:
        process.kill()
        process.wait()
        cluster.kubectl("uncordon", "n3")
    records = journal.read(store)
    assert [record["nodes"] for record in records] == [["n1", "n2"], ["n1"], ["n1", "n2"]], log()
    assert [record["code"] for record in records] == [EXIT_PEERS, EXIT_REQUEUE, EXIT_DONE]
    assert (records[0]["blamed"], records[1]["grows_to"]) == (["n2"], 2)
    assert losses(job / "first") == pytest.approx(undisturbed(shard=1), rel=1e-4)
    assert fab(cluster, job, "logs", "first", "--launch", "3")["lines"]
    fab(cluster, job, "stop", "first", "--now")
    assert cluster.get("service")["items"] == [cluster.get("service", "kubernetes")]


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
