"""Kubernetes as a backend: a run is an Indexed Job with a headless Service, one pod a node.

There is no operator and no supervisor of ours: every pod's launcher ends with the job's exit code, and the Job's failure
policy starts pods again by it. A Job cannot go on with fewer pods. So a run of N to M nodes (`--nodes N-M`) has none:
`fab train` supervises it, and every launch is pods on the nodes that have room.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Any

from launch import runs
from launch.backends import HeldJob, LaunchPlan, LogLine, Pod, Submission
from launch.backends.kubernetes_api import kubectl
from launch.backends.kubernetes_executor import LAUNCH, KubernetesExecutor
from launch.backends.kubernetes_nodes import RUN_NAME, PodNeeds, left_out
from launch.backends.local import OwnedJournal
from launch.backends.ranks import NOTICE_S, SPARE_S, late_s
from launch.flags import TrainFlags
from launch.image import checked_image
from launch.request import RunRequest, Target
from launch.supervisor.loop import supervise
from launch.supervisor.policy import DONE, Stop
from lustrain.cluster import Cluster
from lustrain.cluster import Kubernetes as KubernetesDefaults
from lustrain.problem import FAILED, USAGE, Problem, UserError, problem
from lustrain.progress import print_line
from trainer.environment import ATTEMPT, SILENT, max_silence_s
from trainer.errors import EXIT_CONFIG, EXIT_LOST_RUN, EXIT_PEERS, EXIT_REQUEUE
from trainer.node.heartbeat import SILENT_S
from trainer.run import journal
from trainer.storage import ObjectStore, StorageError

OBJECTS = "launch/kubernetes.json"
PORT = 29_500
"""torch's own default; a pod has an address of its own."""
UNREACHABLE_S = 10
"""Seconds until a pod on a node that does not answer is given up; Kubernetes waits 300 s by itself:
https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/#taint-based-evictions"""
MAX_FAILURES = 6
"""Failures of the run before its Job is given up. All of its pods end with its code, and Kubernetes counts pods."""
RUN = "lustrain.dev/run"
"""Annotation with the run's uri: a Job's name is only the last part of it."""
HUGE_PAGES = "5120Mi"
"""Needed by EFA: https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"""
USER = 1000
"""The image's user (images/trainer.Dockerfile)."""
JOB_NAME = r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?"
"""The pods' names end with an index, and have 63 letters at most:
https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode"""
MANAGED = {"app.kubernetes.io/managed-by": "lustrain"}
ENDED = ("Complete", "Failed")
LIVE = ("Pending", "Running")
"""Phases of a pod that has not ended."""
PODS_AT_ONCE = 16
"""Pods whose logs are read at the same time: a process of kubectl for each."""
_JOB = "batch.kubernetes.io/job-name"
_TIME = re.compile(r"(?P<seconds>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.(?P<fraction>\d+))?(?P<zone>Z|[+-]\d\d:\d\d)")


@dataclass(frozen=True)
class KubernetesOptions:
    """What a Job requests; None and 0 request nothing."""

    image: str
    """registry/repository@sha256:…"""
    context: str | None
    """None: the current one."""
    namespace: str
    service_account: str | None
    queue: str | None
    priority: str | None
    region: str | None
    gpus: int
    efa: int
    """EFA devices of one node."""
    labels: tuple[tuple[str, str], ...]
    """Labels of the nodes."""
    tolerated: tuple[tuple[str, str], ...]
    """Taints of the nodes: key and effect."""
    claims: tuple[tuple[str, str], ...]
    """Path in the pod, and the claim that is mounted there."""

    @property
    def devices(self) -> dict[str, int]:
        """Extended resources of a pod."""
        devices = {"nvidia.com/gpu": self.gpus, "vpc.amazonaws.com/efa": self.efa}
        return {name: count for name, count in devices.items() if count}


class KubernetesBackend:
    own_flags = ("grow_after", "image", "queue", "priority")
    uses_groups = True
    scheduler_can_replace_nodes = False
    supervised_by_caller = False
    supervises_ranges = True

    def serves(self, cluster: Cluster) -> bool:
        return cluster.backend == "hyperpod-eks" or cluster.kubernetes is not None

    def default_ranks(self, target: Target, problems: list[Problem]) -> int:
        return target.group.gpus if target.group else 0

    def options(self, flags: TrainFlags, target: Target, problems: list[Problem]) -> KubernetesOptions:
        if target.cluster is None:
            problems.append(problem("--on", flags.on, "needs a Cluster", fix="give --cluster or --stack"))
        defaults = (target.cluster.kubernetes if target.cluster else None) or KubernetesDefaults()
        name, group = target.run.rpartition("/")[2], target.group
        if not re.fullmatch(JOB_NAME, name):
            allowed = "up to 52 small letters, digits and -"
            problems.append(problem("--name", name, "cannot be the name of a Job", allowed=allowed))
        if target.spare_nodes:
            fix = "leave it out: every other node of the group takes a lost one's place"
            problems.append(problem("--spare", flags.spare, "only valid with --on slurm", fix=fix))
        supervised = len({int(size) for size in re.findall("[0-9]+", flags.nodes)}) > 1
        if supervised and flags.queue is not None:
            fix = "give one number of nodes, or leave the queue out"
            problems.append(problem("--queue", flags.queue, "Kueue admits a run of one size", fix=fix))
        if supervised and flags.detach:
            fix = "start fab under tmux or systemd-run; or give one number of nodes, whose Job needs no fab train"
            problems.append(problem("--detach", True, "a run of N to M nodes is supervised by its fab train", fix=fix))
        ref = checked_image(flags, target, problems)
        if not target.run.startswith("s3://") and not any(
            target.run.startswith(f"{path}/") for path in defaults.claims
        ):
            allowed = f"s3://…, or below a path of kubernetes.claims ({', '.join(defaults.claims) or 'none'})"
            problems.append(problem("run.uri", target.run, "pods do not see it", allowed=allowed))
        return KubernetesOptions(
            image=ref,
            context=defaults.context,
            namespace=defaults.namespace,
            service_account=defaults.service_account,
            queue=flags.queue,
            priority=flags.priority,
            region=target.cluster.region if target.cluster else None,
            gpus=group.gpus if group else 0,
            efa=group.efa if group else 0,
            labels=tuple(group.labels.items()) if group else (),
            tolerated=tuple((taint.key, taint.effect) for taint in group.taints) if group else (),
            claims=tuple(defaults.claims.items()),
        )

    def plan(self, request: RunRequest, folder: Path, environ: Mapping[str, str]) -> LaunchPlan:
        command = ("kubectl", f"--namespace={request.options.namespace}", "create", "--filename=-")
        if not request.supervised_by_caller:
            return LaunchPlan(command, {OBJECTS: manifest(request, environ)})
        # Which nodes have room is not known before the API server answers.
        names = [f"node{index}" for index in range(request.policy.max_nodes)]
        return LaunchPlan(command, {OBJECTS: _list([service(request), *launch_pods(request, 1, names, environ)])})

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        """Have the API server validate the plan's objects without creating them, and refuse a name that is taken, or a run of
        N to M nodes that could not be supervised.

        With `resume` an earlier Job of the same run that has ended is deleted, once nothing is refused.
        """
        options: KubernetesOptions = request.options
        if shutil.which("kubectl") is None:
            fix = "install it (https://kubernetes.io/docs/tasks/tools), or run fab where it is"
            raise UserError(problem("--on", "kubernetes", "there is no kubectl on this machine", fix=fix))
        job = _job(request.name, options.namespace, options.context)
        own_service = _supervised_service(request.name, options.namespace, options.context)
        for kind, item in (("Job", job), ("Service", own_service)):
            if item and item["metadata"].get("annotations", {}).get(RUN) != request.run:
                fix = "choose another --name"
                raise UserError(problem("--name", request.name, f"a {kind} of another run has this name", fix=fix))
            if item and not resume:
                why = f"its {kind} is there already"
                raise UserError(problem("--name", request.name, why, fix="go on with the run: --resume"))
        if job and not _has_ended(job):
            raise UserError(problem("--resume", request.name, "its Job still runs", fix="`fab stop` it first"))
        if own_service and not request.supervised_by_caller:
            selector = f"{RUN_NAME}={request.name}"
            if any(pod["status"].get("phase") in LIVE for pod in _pods(selector, options.namespace, options.context)):
                raise UserError(problem("--resume", request.name, "its pods still run", fix="`fab stop` it first"))
        # Under another name, because the Job to resume still has its own.
        manifest = json.loads(plan.files[OBJECTS])
        for item in manifest["items"]:
            item["metadata"]["name"] = f"{request.name}-check"
        kubectl(
            options.namespace, options.context, "create", "--dry-run=server", "--filename=-", text=json.dumps(manifest)
        )
        _check_named_objects(options)
        if request.supervised_by_caller:
            refuse_without_rights(request)
            refuse_too_few(request)
        if job or (own_service and not request.supervised_by_caller):
            delete(request.name, options.namespace, options.context, pods=own_service is not None)

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        options: KubernetesOptions = request.options
        job = {"job": request.name, "namespace": options.namespace, "context": options.context}
        data = {"run": request.run, "job": request.name, "namespace": options.namespace}
        if request.supervised_by_caller:
            runs.save_job(store, request.backend, job | {"supervised": True})
            end = supervise_run(request, store, os.environ)
            return Submission(
                (f"{request.run}: {end.why}",), data | {"exit_code": end.code, "why": end.why}, code=end.code
            )
        # Before the server may have made it: also a start that is killed here leaves a Job that `fab stop` finds.
        runs.save_job(store, request.backend, job)
        kubectl(options.namespace, options.context, "create", "--filename=-", text=plan.files[OBJECTS])
        lines = (
            f"{request.run}: job {request.name} in namespace {options.namespace}",
            f"next: fab status {request.run}",
        )
        return Submission(lines, data, job=job)

    def describe(self, job: Mapping[str, Any]) -> str:
        what = "pods of" if job.get("supervised") else "job"
        return f"{what} {job.get('job')} in namespace {job.get('namespace')} of Kubernetes"

    def held_job(self, run: str) -> HeldJob | None:
        return None

    def pods(self, run: str, job: Mapping[str, Any]) -> list[Pod] | None:
        if shutil.which("kubectl") is None:
            return None
        name, namespace, context = _recorded_job(run, job)
        return [_pod_state(pod) for pod in _pods(_selector(name, job), namespace, context)]

    def ended_job(self, run: str, job: Mapping[str, Any]) -> str | None:
        """Return it as in RecordingBackend. A start that was killed may have recorded a Job that was not made."""
        if job.get("supervised") or shutil.which("kubectl") is None:
            return None
        found = _job(*_recorded_job(run, job))
        if found is None:
            return "it is not there; next: the same fab train with --resume"
        ends = [one for one in found["status"].get("conditions", []) if one["type"] in ENDED]
        return ": ".join(ends[0][key] for key in ("type", "reason") if ends[0].get(key)) if ends else None

    def cancel(self, run: str, job: Mapping[str, Any] | None) -> list[str]:
        return [self.describe(job)] if job is not None and withdraw(run, job) else []

    def read_log(
        self, run: str, job: Mapping[str, Any] | None, launch: int | None, more: Callable[[], bool]
    ) -> Iterator[LogLine]:
        """Read the logs of the run's pods that are still there, through kubectl."""
        if launch is not None and not (job or {}).get("supervised"):
            why = "Kubernetes restarts the pods of a Job itself, and counts no launches"
            raise UserError(problem("--launch", launch, why, fix="leave it out"))
        if job is None:
            raise UserError(problem("RUN", run, "no Job of it is recorded", fix=f"fab status {run}"))
        name, namespace, context = _recorded_job(run, job)
        selector = _selector(name, job) + (f",{LAUNCH}={launch}" if launch is not None else "")
        seen: dict[str, str] = {}
        while True:
            goes_on = more()
            # Of a Job that has ended no further pod comes, and what was printed is all there.
            ended = not (job or {}).get("supervised") and _has_ended(_job(name, namespace, context))
            pods = [pod for pod in _pods(selector, namespace, context) if pod["status"].get("phase") != "Pending"]
            yield from _read_pods([pod["metadata"]["name"] for pod in pods], namespace, context, seen)
            if ended or not goes_on:
                return


def objects(request: RunRequest, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the Service and the Job, as the API takes them. Of `environ`, pods get LUSTRAIN_SILENT_S alone."""
    options: KubernetesOptions = request.options
    name, nodes = request.name, request.policy.max_nodes
    labels = MANAGED | ({"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {})
    rendezvous = ["--nnodes", str(nodes), "--master", f"{name}-0.{name}:{PORT}"]
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {_JOB: name}}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels, "annotations": {RUN: request.run}},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": MAX_FAILURES * nodes,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _policy()},
            "template": {"metadata": {"labels": labels}, "spec": _pod(request, environ, rendezvous, affinity)},
        },
    }
    return [service(request), job]


def service(request: RunRequest) -> dict[str, Any]:
    """Return the headless Service by which pods have names."""
    name, supervised = request.name, request.supervised_by_caller
    return {
        "apiVersion": "v1",
        "kind": "Service",
        # A run without a Job is known by its Service.
        "metadata": {"name": name, "labels": MANAGED} | ({"annotations": {RUN: request.run}} if supervised else {}),
        # The ranks meet at the first pod's name, before it is ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_NAME if supervised else _JOB: name},
        },
    }


def launch_pods(
    request: RunRequest, number: int, nodes: Sequence[str], environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the pods of a launch, each for one of these nodes."""
    name = request.name
    # A notice of AWS names the node as its pod does, up to the first dot.
    hosts = [node.partition(".")[0] for node in nodes]
    rendezvous = ["--nnodes", str(len(nodes)), "--master", f"{hosts[0]}.{name}:{PORT}", "--roster", ",".join(nodes)]
    rendezvous += ["--run", request.run]
    labels = MANAGED | {RUN_NAME: name, LAUNCH: str(number)}
    pods = []
    for index, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
        fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
        on_node = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": fields}]}}
        words = [*rendezvous, "--node-rank", str(index)]
        spec = _pod(request, environ, words, {"nodeAffinity": on_node}, {ATTEMPT: str(number)})
        metadata = {"name": f"{name}-{number}-{index}", "labels": labels, "annotations": {RUN: request.run}}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | {"hostname": host}})
    return pods


def manifest(request: RunRequest, environ: Mapping[str, str]) -> str:
    """Return Service and Job as one JSON text for kubectl."""
    return _list(objects(request, environ))


def _list(items: Sequence[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)}, indent=1) + "\n"


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


def _pod(
    request: RunRequest,
    environ: Mapping[str, str],
    rendezvous: Sequence[str],
    affinity: Mapping[str, Any],
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    options: KubernetesOptions = request.options
    name = request.name
    gone = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    tolerations: list[dict[str, Any]] = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": UNREACHABLE_S} for key in gone
    ]
    tolerations += [{"key": key, "operator": "Exists", "effect": effect} for key, effect in options.tolerated]
    claims = [{"name": f"claim-{number}", "mountPath": path} for number, (path, _) in enumerate(options.claims)]
    pod: dict[str, Any] = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(request.grace_s) + SPARE_S,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "affinity": affinity,
        "nodeSelector": dict(options.labels),
        "tolerations": tolerations,
        "containers": [_container(request, claims, environ, rendezvous, variables)],
        "volumes": [
            # Workers of the data loader hand batches over in it; a container has 64 MiB by itself.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
            *(
                {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
                for number, (_, claim) in enumerate(options.claims)
            ),
        ],
    }
    more = {"serviceAccountName": options.service_account, "priorityClassName": options.priority}
    return pod | {key: value for key, value in more.items() if value}


def _container(
    request: RunRequest,
    claims: Sequence[dict[str, Any]],
    environ: Mapping[str, str],
    rendezvous: Sequence[str],
    launch_variables: Mapping[str, str],
) -> dict[str, Any]:
    options: KubernetesOptions = request.options
    launcher = ["python3", "-m", "trainer.node.launcher", *rendezvous, "--nproc", str(request.policy.ranks_per_node)]
    limits: dict[str, Any] = dict(options.devices)
    limits |= {"hugepages-2Mi": HUGE_PAGES} if options.efa else {}
    # Huge pages are given only beside a request for memory.
    requests = limits | ({"memory": "1Gi"} if options.efa else {})
    # The home of the image's user is read-only here.
    variables = {"LUSTRAIN_CACHE": "/tmp/lustrain"} | ({"AWS_REGION": options.region} if options.region else {})
    variables |= {"NCCL_NET_PLUGIN": "ofi"} if options.efa else {"GLOO_SOCKET_IFNAME": "eth0"}
    variables |= {SILENT: environ[SILENT]} if environ.get(SILENT) else {}
    variables |= launch_variables
    return {
        "name": "trainer",
        "image": options.image,
        # The image's entry point, tini, stays.
        "args": [*launcher, "--", "train", request.config_uri],
        "env": [{"name": name, "value": value} for name, value in sorted(variables.items())],
        "resources": {"limits": limits, "requests": requests},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}, *claims],
    }


def _check_named_objects(options: KubernetesOptions) -> None:
    """Refuse what is not there: the server takes the Job, and then none of its pods, or lets them wait forever. UserError."""
    here = f"in namespace {options.namespace}"
    named = [
        ("kubernetes.service_account", options.service_account, "serviceaccount", f"a service account {here}"),
        ("--priority", options.priority, "priorityclass", "a priority class"),
        ("--queue", options.queue, "localqueue.kueue.x-k8s.io", f"a queue of Kueue {here}"),
        *(("kubernetes.claims", claim, "persistentvolumeclaim", f"a claim {here}") for _, claim in options.claims),
    ]
    for path, name, kind, what in named:
        if name is None:
            continue
        try:
            kubectl(options.namespace, options.context, "get", "--output=name", kind, "--", name)
        except UserError as error:
            # What is forbidden may name a role that is not found.
            if error.exit_code == USAGE and re.search("not found|have a resource type", str(error)):
                fix = f"kubectl --namespace={options.namespace} get {kind} lists them"
                raise UserError(problem(path, name, f"is not {what}", fix=fix)) from None
            # Who may not look at them may still use them.
            if error.exit_code != FAILED:
                raise


def delete(name: str, namespace: str, context: str | None, *, pods: bool) -> None:
    """Take Job and Service away, where they are, and with `pods` those that have no Job; pods get SIGTERM and save."""
    if pods:
        kubectl(namespace, context, "delete", "pods", f"--selector={RUN_NAME}={name}", "--wait=false")
    kubectl(namespace, context, "delete", "job,service", name, "--ignore-not-found", "--cascade=foreground")


def withdraw(run: str, where: Mapping[str, Any]) -> bool:
    """Delete what was made for this run, where it is still this run's; whether it was. UserError."""
    name, namespace, context = _recorded_job(run, where)
    known_by = (_supervised_service if where.get("supervised") else _job)(name, namespace, context)
    ours = known_by is not None and known_by["metadata"].get("annotations", {}).get(RUN) == run
    if ours:
        delete(name, namespace, context, pods=bool(where.get("supervised")))
    return ours


def refuse_without_rights(request: RunRequest) -> None:
    """Refuse a run of N to M nodes to who may not delete its pods: it could neither give way nor be stopped. UserError."""
    options: KubernetesOptions = request.options
    wanted = {"namespace": options.namespace, "verb": "delete", "resource": "pods"}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": wanted},
    }
    # To validate a review kubectl lists the kinds of resources, which not everybody may do.
    words = ("create", "--validate=false", "--filename=-", "--output=json")
    answer = kubectl(options.namespace, options.context, *words, text=json.dumps(review))
    if json.loads(answer).get("status", {}).get("allowed") is False:
        why = f"this user may not delete pods in namespace {options.namespace}"
        raise UserError(_refused_size(request, why, fix="ask for this right; or give one number of nodes"), FAILED)


def refuse_too_few(request: RunRequest) -> None:
    """Refuse a run of N to M nodes that finds room on fewer than N, or whose nodes this user may not see. UserError."""
    options: KubernetesOptions = request.options
    try:
        nodes, pods = [
            json.loads(kubectl(options.namespace, options.context, "get", *words, "--output=json"))["items"]
            for words in (("nodes",), ("pods", "--all-namespaces"))
        ]
    except UserError as error:
        if error.exit_code != FAILED:
            raise
        fix = "ask for the right to list nodes, and pods of all namespaces; or give one number of nodes"
        raise UserError(_refused_size(request, str(error.problems[0]), fix=fix), FAILED) from None
    found = left_out(nodes, pods, pod_needs(request))
    # Its own pods make way, or are followed to their end.
    own = {
        pod["spec"].get("nodeName")
        for pod in pods
        if pod["metadata"].get("annotations", {}).get(RUN) == request.run and pod["status"].get("phase") in LIVE
    }
    bad = {name: why for name, why in found.items() if why and name not in own}
    ready, low = len(found) - len(bad), request.policy.min_nodes
    if ready < low:
        lines: list[str] = [f"{name}: {why}" for name, why in sorted(bad.items())]
        why = f"{ready} of the {len(found)} nodes with the group's labels have room"
        raise UserError([*lines, problem("--nodes", low, why, fix="mend these, or ask for fewer nodes")])


def _refused_size(request: RunRequest, why: str, *, fix: str) -> Problem:
    return problem("--nodes", f"{request.policy.min_nodes}-{request.policy.max_nodes}", why, fix=fix)


def pod_needs(request: RunRequest) -> PodNeeds:
    options: KubernetesOptions = request.options
    return PodNeeds(
        request.name, options.namespace, dict(options.labels), frozenset(options.tolerated), options.devices
    )


def supervise_run(request: RunRequest, store: ObjectStore, environ: Mapping[str, str]) -> Stop:
    """Supervise a registered run of N to M nodes until it has ended; a launch whose supervisor is gone is followed first.
    UserError."""
    options: KubernetesOptions = request.options

    def run_kubectl(*words: str, text: str = "", namespace: str = "") -> str:
        return kubectl(namespace or options.namespace, options.context, *words, text=text)

    def reported_code(number: int, nodes: Sequence[str]) -> int | None:
        try:
            code: int | None = journal.node_reports(store, {"attempt": number, "nodes": list(nodes)}).get("code")
        except StorageError:
            return None
        return code

    if _supervised_service(request.name, options.namespace, options.context) is None:
        run_kubectl("create", "--filename=-", text=json.dumps(service(request)))
    executor = KubernetesExecutor(
        run_kubectl,
        pod_needs(request),
        lambda number, nodes: _list(launch_pods(request, number, nodes, environ)),
        reported_code,
        max_silence_s(SILENT_S, environ) + NOTICE_S,
        late_s(request),
        print_line,
    )
    records = journal.read(store)
    if records and "ended" not in records[-1]:
        number, nodes = records[-1]["attempt"], records[-1]["nodes"]
        code = executor.take_over(number, nodes)
        if code is None:
            print_line(f"launch {number} has no pods: its fab train was gone before it made them, or they were deleted")
        if journal.finish(store, number, code)["code"] == DONE:
            return Stop(DONE, "all steps are done")
    own = OwnedJournal(store, lambda nodes: None)
    end = supervise(executor, own, request.policy, print_line, max_wait_s=request.max_wait_s)
    assert isinstance(end, Stop), "pods of a run without a Job have no queue"
    return end


def _recorded_job(run: str, where: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Return name, namespace and context in the record of a Job. UserError where `fab train` did not write it."""
    job, namespace, context = where.get("job"), where.get("namespace"), where.get("context")
    words = [word for word in (job, namespace) if isinstance(word, str) and re.fullmatch(JOB_NAME, word)]
    if len(words) != 2 or not (context is None or re.fullmatch(r"[^\s-]\S*", str(context))):
        raise UserError(problem("RUN", run, "the record of its Job is not one that fab train wrote"))
    return words[0], words[1], context


def _job(name: str, namespace: str, context: str | None) -> dict[str, Any] | None:
    return _object("job", name, namespace, context)


def _supervised_service(name: str, namespace: str, context: str | None) -> dict[str, Any] | None:
    """Return the Service of that name if it is one of a run of N to M nodes."""
    found = _object("service", name, namespace, context)
    return found if found and RUN in found["metadata"].get("annotations", {}) else None


def _object(kind: str, name: str, namespace: str, context: str | None) -> dict[str, Any] | None:
    printed = kubectl(namespace, context, "get", kind, name, "--ignore-not-found", "--output=json")
    found: dict[str, Any] | None = json.loads(printed) if printed.strip() else None
    return found


def _has_ended(job: Mapping[str, Any] | None) -> bool:
    return job is None or any(condition["type"] in ENDED for condition in job["status"].get("conditions", ()))


def _selector(name: str, job: Mapping[str, Any]) -> str:
    return f"{RUN_NAME if job.get('supervised') else _JOB}={name}"


def _pods(selector: str, namespace: str, context: str | None) -> list[dict[str, Any]]:
    """Return the run's pods, oldest first."""
    printed = kubectl(namespace, context, "get", "pods", f"--selector={selector}", "--output=json")
    pods: list[dict[str, Any]] = json.loads(printed)["items"]
    return sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))


def _pod_state(pod: Mapping[str, Any]) -> Pod:
    """Return what a pod's status says: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/"""
    status = pod["status"]
    containers: list[dict[str, Any]] = [one.get("state") or {} for one in status.get("containerStatuses", ())]
    ended = next((one["terminated"] for one in containers if "terminated" in one), None)
    waits = next((one["waiting"] for one in containers if "waiting" in one), None)
    unplaced = next(
        (one for one in status.get("conditions", ()) if one["type"] == "PodScheduled" and one["status"] == "False"),
        None,
    )
    phase = str(status.get("phase", "Unknown")).lower()
    if pod["metadata"].get("deletionTimestamp") and ended is None:
        state = "ends"
    elif ended is not None:
        state = f"code {ended['exitCode']}" + (f" ({status['reason']})" if status.get("reason") else "")
    elif phase == "pending":
        why = waits or unplaced or {}
        state = ": ".join(["waits", *filter(None, (why.get("reason"), why.get("message")))])
    else:
        state = f"{phase} ({status['reason']})" if status.get("reason") else phase
    launch = pod["metadata"].get("labels", {}).get(LAUNCH)
    return Pod(pod["metadata"]["name"], pod["spec"].get("nodeName"), state, int(launch) if launch else None)


def _read_pods(pods: Sequence[str], namespace: str, context: str | None, seen: dict[str, str]) -> Iterator[LogLine]:
    """Yield what pods have printed since the times in `seen`, which are kept there by pod; several are read at once."""
    for first in range(0, len(pods), PODS_AT_ONCE):
        some = pods[first : first + PODS_AT_ONCE]
        with ExitStack() as open_files, ThreadPoolExecutor(len(some)) as pool:
            # Whole logs of many pods need not fit into memory.
            files = {pod: open_files.enter_context(TemporaryFile()) for pod in some}
            tasks = [
                pool.submit(_copy_log, pod, namespace, context, seen.get(pod, ""), file) for pod, file in files.items()
            ]
            for task in tasks:
                task.result()
            for pod, file in files.items():
                file.seek(0)
                yield from _pod_lines(pod, file, seen)


def _copy_log(pod: str, namespace: str, context: str | None, last: str, file: IO[bytes]) -> None:
    """Copy into a file what a pod has printed since the second of the time `last`, or all; nothing of one that is gone.

    Times have nanoseconds, and --since-time whole seconds: https://kubernetes.io/docs/reference/kubectl/generated/kubectl_logs/
    """
    match = _TIME.fullmatch(last)
    since = [f"--since-time={match['seconds']}{match['zone']}"] if match else []
    try:
        kubectl(namespace, context, "logs", pod, "--timestamps", *since, output=file)
    except UserError as error:
        # A pod may be taken away, and its log with it.
        if not (error.exit_code == USAGE and "not found" in str(error)):
            raise


def _pod_lines(pod: str, file: Iterable[bytes], seen: dict[str, str]) -> Iterator[LogLine]:
    """Yield the lines of a pod's log that are later than the time in `seen`. Only \\n ends a line: a bar may hold \\r."""
    match = _TIME.fullmatch(seen.get(pod, ""))
    last = _instant(match) if match else ""
    for line in file:
        time, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
        # Lines of kubectl's own have no time.
        if (match := _TIME.fullmatch(time)) and _instant(match) > last:
            seen[pod] = time
            yield LogLine(text, pod)


def _instant(match: re.Match[str]) -> str:
    """Return a time that sorts as text: kubelets leave out trailing zeros. All times of a pod have its node's zone."""
    return f"{match['seconds']}.{(match['fraction'] or '').ljust(9, '0')}"


BACKEND = KubernetesBackend()
