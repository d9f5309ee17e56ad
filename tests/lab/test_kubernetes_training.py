"""Training under a real Kubernetes, by docs/kubernetes-job.yaml but for the image: pods take their files from this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rehearsal.lab.kubernetes import SCRATCH, Kubernetes, why_not
from tests.conftest import require
from tests.lab.training import ROOT, VARIABLES, assert_equals_an_undisturbed_run, attempts, config
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed
from trainer.storage import open_store

pytestmark = pytest.mark.slow

MANIFEST = ROOT / "docs/kubernetes-job.yaml"
ENDED = ("Complete", "Failed")


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    """Three nodes, which the tests of this file share."""
    require(why_not() is None, str(why_not()))
    with Kubernetes(tmp_path_factory.mktemp("kubernetes"), nodes=3) as cluster:
        yield cluster


@pytest.fixture
def job(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Path]:
    """Starts the job of the manifest with the configuration in the folder that it returns, once that is there."""
    yield tmp_path
    kubernetes.kubectl("delete", "job,service,configmap", "first", "--ignore-not-found", "--grace-period=0", "--force")


def start(kubernetes: Kubernetes, folder: Path, text: str) -> None:
    (folder / "config.toml").write_text(text)
    kubernetes.kubectl("create", "configmap", "first", f"--from-file={folder}/config.toml")
    objects = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
    pod = objects[1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container |= {"image": SCRATCH, "imagePullPolicy": "Never", "command": ["/usr/bin/env"]}
    variables = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": "/tmp", **VARIABLES}
    container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    paths = dict.fromkeys(["/usr", "/lib", "/lib64", "/bin", str(ROOT), sys.prefix, sys.base_prefix, str(folder)])
    for number, path in enumerate(paths):
        pod["volumes"].append({"name": f"host{number}", "hostPath": {"path": path}})
        container["volumeMounts"].append({"name": f"host{number}", "mountPath": path})
    kubernetes.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))


def ended(kubernetes: Kubernetes) -> str | None:
    conditions = kubernetes.get("job", "first")["status"].get("conditions", [])
    return next((one["type"] for one in conditions if one["type"] in ENDED), None)


def pods(kubernetes: Kubernetes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubernetes.get("pods", "--selector=batch.kubernetes.io/job-name=first")["items"]
    return found


def test_the_manifest_is_what_the_server_takes(kubernetes: Kubernetes) -> None:
    made = kubernetes.kubectl("apply", "--dry-run=server", f"--filename={MANIFEST}").splitlines()
    assert made == ["service/first created (server dry run)", "job.batch/first created (server dry run)"]


def test_a_wrong_configuration_ends_the_job_at_its_first_pods(kubernetes: Kubernetes, job: Path) -> None:
    start(kubernetes, job, config(f"{job}/run", global_batch=5))
    wait_until(lambda: ended(kubernetes), 90)
    assert ended(kubernetes) == "Failed"
    (why,) = [one for one in kubernetes.get("job", "first")["status"]["conditions"] if one["type"] == "Failed"]
    assert (why["reason"], len(pods(kubernetes))) == ("PodFailurePolicy", 2)
    assert not (job / "run").exists()


def test_a_job_that_loses_a_node_goes_on_by_itself_and_ends_as_if_nothing_had_been(
    kubernetes: Kubernetes, job: Path
) -> None:
    start(kubernetes, job, config(f"{job}/run"))
    wait_until(lambda: committed(open_store(f"{job}/run")), 90)
    victim = next(
        pod["spec"]["nodeName"]
        for pod in pods(kubernetes)
        if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "1"
    )
    kubernetes.lose(victim)
    wait_until(lambda: any(pod["metadata"].get("deletionTimestamp") for pod in pods(kubernetes)), 120)
    # What the cloud's controller does once the instance is terminated.
    kubernetes.kubectl("delete", "node", victim)
    until = time.monotonic() + 180
    while not ended(kubernetes) and time.monotonic() < until:
        time.sleep(0.5)
    assert ended(kubernetes) == "Complete"
    assert attempts(job / "run") == ["started", "resumed"]
    assert_equals_an_undisturbed_run(job / "run")
