"""A run as an Indexed Job of Kubernetes with a headless Service: one pod a node, started again by the Job's failure policy.

No operator and no supervisor of ours: every pod's launcher ends with the job's exit code, and the policy reads it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from launch.asked import Asked
from launch.places import LABEL, KubernetesWish
from launch.programs import ask, complaint
from lustrain.problem import FAILED, UNREACHABLE, USAGE, UserError, problem
from trainer.errors import EXIT_CONFIG, EXIT_LOST_RUN, EXIT_PEERS, EXIT_REQUEUE
from trainer.launch.attempt import SILENT

OBJECTS = "launch/kubernetes.json"
PORT = 29_500
"""torch's own default; a pod has an address of its own."""
UNREACHABLE_S = 10
"""Until a pod of a node that does not answer is given up; Kubernetes waits 300 s by itself:
https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/#taint-based-evictions"""
SPARE_S = 10
"""Beside the trainer's own grace."""
MOST_FAILURES = 6
"""Of the run, before its Job is given up. All of its pods end with its code, and Kubernetes counts pods."""
RUN = "lustrain.dev/run"
"""Annotation with the run's uri: a Job's name is only the last part of it."""
HUGE_PAGES = "5120Mi"
"""What EFA takes of them: https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"""
USER = 1000
"""The image's own (images/trainer.Dockerfile)."""
_LOST = (
    "connection refused|no such host|i/o timeout|Unable to connect|connection to the server|getting credentials|"
    "TLS handshake timeout|context deadline exceeded"
)
ENDED = ("Complete", "Failed")
_JOB = "batch.kubernetes.io/job-name"


def objects(asked: Asked, wish: KubernetesWish, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the Service and the Job, as the API takes them. Of `environ`, pods get LUSTRAIN_SILENT_S alone."""
    name, nodes = asked.name, asked.rules.most
    labels = {"app.kubernetes.io/managed-by": "lustrain"} | (
        {"kueue.x-k8s.io/queue-name": wish.queue} if wish.queue else {}
    )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "lustrain"}},
        # The ranks meet at the first pod's name, before it is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_JOB: name}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels, "annotations": {RUN: asked.run}},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": MOST_FAILURES * nodes,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _policy()},
            "template": {"metadata": {"labels": labels}, "spec": _pod(asked, wish, environ)},
        },
    }
    return [service, job]


def manifest(asked: Asked, wish: KubernetesWish, environ: Mapping[str, str]) -> str:
    """Return both objects as one JSON text for kubectl."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects(asked, wish, environ)}, indent=1) + "\n"


def _policy() -> list[dict[str, Any]]:
    def on_codes(action: str, *codes: int) -> dict[str, Any]:
        return {
            "action": action,
            "onExitCodes": {"containerName": "trainer", "operator": "In", "values": sorted(codes)},
        }

    return [
        on_codes("FailJob", EXIT_CONFIG, EXIT_LOST_RUN),
        on_codes("Ignore", EXIT_PEERS, EXIT_REQUEUE),
        # Evicted, drained, or its node is gone.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _pod(asked: Asked, wish: KubernetesWish, environ: Mapping[str, str]) -> dict[str, Any]:
    name = asked.name
    gone = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    tolerations: list[dict[str, Any]] = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": UNREACHABLE_S} for key in gone
    ]
    tolerations += [{"key": key, "operator": "Exists", "effect": effect} for key, effect in wish.tolerated]
    claims = [{"name": f"claim-{number}", "mountPath": path} for number, (path, _) in enumerate(wish.claims)]
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {_JOB: name}}}
    pod: dict[str, Any] = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(asked.grace_s) + SPARE_S,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "nodeSelector": dict(wish.labels),
        "tolerations": tolerations,
        "containers": [_container(asked, wish, claims, environ)],
        "volumes": [
            # Workers of the data loader hand batches over in it; a container has 64 MiB by itself.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
            *(
                {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
                for number, (_, claim) in enumerate(wish.claims)
            ),
        ],
    }
    more = {"serviceAccountName": wish.service_account, "priorityClassName": wish.priority}
    return pod | {key: value for key, value in more.items() if value}


def _container(
    asked: Asked, wish: KubernetesWish, claims: Sequence[dict[str, Any]], environ: Mapping[str, str]
) -> dict[str, Any]:
    meet = ["--nnodes", str(asked.rules.most), "--master", f"{asked.name}-0.{asked.name}:{PORT}"]
    launcher = ["python3", "-m", "trainer.launch.node", *meet, "--nproc", str(asked.rules.ranks)]
    devices = {"nvidia.com/gpu": wish.gpus, "vpc.amazonaws.com/efa": wish.efa}
    limits: dict[str, Any] = {name: count for name, count in devices.items() if count}
    limits |= {"hugepages-2Mi": HUGE_PAGES} if wish.efa else {}
    # Huge pages are given only beside a request for memory.
    requests = limits | ({"memory": "1Gi"} if wish.efa else {})
    # The home of the image's user is read-only here.
    variables = {"LUSTRAIN_CACHE": "/tmp/lustrain"} | ({"AWS_REGION": wish.region} if wish.region else {})
    variables |= {"NCCL_NET_PLUGIN": "ofi"} if wish.efa else {"GLOO_SOCKET_IFNAME": "eth0"}
    variables |= {SILENT: environ[SILENT]} if environ.get(SILENT) else {}
    return {
        "name": "trainer",
        "image": wish.image,
        # The image's entry point, tini, stays.
        "args": [*launcher, "--", "train", asked.config_uri],
        "env": [{"name": name, "value": value} for name, value in sorted(variables.items())],
        "resources": {"limits": limits, "requests": requests},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}, *claims],
    }


def ready(text: str, asked: Asked, wish: KubernetesWish, *, resume: bool) -> None:
    """Have the API server judge the objects of a manifest, without making them, and see to it that their names are free.

    With `resume` an earlier Job of the same run that has ended is deleted. UserError.
    """
    if shutil.which("kubectl") is None:
        fix = "install it (https://kubernetes.io/docs/tasks/tools), or run fab where it is"
        raise UserError(problem("--on", "kubernetes", "there is no kubectl on this machine", fix=fix))
    found = _kubectl(wish.namespace, wish.context, "get", "job", asked.name, "--ignore-not-found", "--output=json")
    there = json.loads(found) if found.strip() else None
    if there and there["metadata"].get("annotations", {}).get(RUN) != asked.run:
        raise UserError(
            problem("--name", asked.name, "a Job of another run has this name", fix="choose another --name")
        )
    if there and not resume:
        raise UserError(problem("--name", asked.name, "its Job is there already", fix="go on with the run: --resume"))
    if there and not any(one["type"] in ENDED for one in there["status"].get("conditions", ())):
        raise UserError(problem("--resume", asked.name, "its Job still runs", fix="`fab stop` it first"))
    # Under another name: that of the Job to resume is still taken.
    judged = json.loads(text)
    for item in judged["items"]:
        item["metadata"]["name"] = f"{asked.name}-check"
    _kubectl(wish.namespace, wish.context, "create", "--dry-run=server", "--filename=-", text=json.dumps(judged))
    if there:
        delete(asked.name, wish.namespace, wish.context)


def create(text: str, wish: KubernetesWish) -> None:
    """Make the objects. UserError with what the API server says."""
    _kubectl(wish.namespace, wish.context, "create", "--filename=-", text=text)


def delete(name: str, namespace: str, context: str | None) -> None:
    """Take the Job and the Service away, where they are; their pods get SIGTERM and save."""
    _kubectl(namespace, context, "delete", "job,service", name, "--ignore-not-found", "--cascade=foreground")


def withdraw(run: str, where: Mapping[str, Any]) -> None:
    """Delete the Job that was made for this run, where it is still this run's. UserError."""
    job, namespace, context = where.get("job"), where.get("namespace"), where.get("context")
    words = [word for word in (job, namespace) if isinstance(word, str) and re.fullmatch(LABEL, word)]
    if len(words) != 2 or not (context is None or re.fullmatch(r"[^\s-]\S*", str(context))):
        raise UserError(problem("RUN", run, "the record of its Job is not one that fab train wrote"))
    found = _kubectl(words[1], context, "get", "job", words[0], "--ignore-not-found", "--output=json")
    if found.strip() and json.loads(found)["metadata"].get("annotations", {}).get(RUN) == run:
        delete(words[0], words[1], context)


def _kubectl(namespace: str, context: str | None, *words: str, text: str = "") -> str:
    command = ["kubectl", *([f"--context={context}"] if context else []), f"--namespace={namespace}", *words]
    said = ask(command, text, fix="kubectl cluster-info")
    if said.code:
        why = complaint(said, ("error: ", "Error from server", "Unable to connect", "The connection to the server"))
        why = re.sub(r"(error: |Error from server( \(\w+\))?: |error when creating \"STDIN\": )+", "", why)
        lost = re.search(_LOST, said.errors)
        refused = re.search("Forbidden|cannot create|Unauthorized", said.errors)
        code = UNREACHABLE if lost else FAILED if refused else USAGE
        raise UserError(f"kubectl: {why}; fix: {_fix(said.errors, namespace)}", code)
    return said.out


def _fix(said: str, namespace: str) -> str:
    known = {
        "getting credentials": "aws sso login, or what else logs this user in; then kubectl cluster-info",
        "deadline exceeded": "is the cluster up? kubectl cluster-info",
        "AlreadyExists": "kubectl get service shows whose it is; choose another --name",
        "namespaces": f"kubectl create namespace {namespace}, or another kubernetes.namespace in the Cluster",
        "context": "kubectl config get-contexts lists them",
        "Forbidden": "ask for the right to create jobs and services in this namespace",
        "onnect": "is the cluster up? kubectl cluster-info",
    }
    return next((fix for word, fix in known.items() if word in said), "look at the object: fab train … --dry")
