"""Kubernetes as a backend: a run is an Indexed Job with a headless Service, one pod a node.

There is no operator and no supervisor of ours: every pod's launcher ends with the job's exit code, and the Job's failure
policy starts pods again by it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from launch.backends import HeldJob, LaunchPlan, LogLine, Pod, Submission
from launch.backends.command import error_text, run
from launch.backends.ranks import SPARE_S
from launch.flags import TrainFlags
from launch.image import checked_image
from launch.request import RunRequest, Target
from lustrain.cluster import Cluster
from lustrain.cluster import Kubernetes as KubernetesDefaults
from lustrain.problem import FAILED, UNREACHABLE, USAGE, Problem, UserError, problem
from trainer.environment import SILENT
from trainer.errors import EXIT_CONFIG, EXIT_LOST_RUN, EXIT_PEERS, EXIT_REQUEUE
from trainer.storage import ObjectStore

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
_LOST = (
    "connection refused|no such host|i/o timeout|Unable to connect|connection to the server|getting credentials|"
    "TLS handshake timeout|context deadline exceeded"
)
JOB_NAME = r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?"
"""The pods' names end with an index, and have 63 letters at most:
https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode"""
ENDED = ("Complete", "Failed")
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


class KubernetesBackend:
    own_flags = ("image", "queue", "priority")
    uses_groups = True
    scheduler_can_replace_nodes = False
    supervised_by_caller = False

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
        if "-" in flags.nodes or flags.spare != "0":
            fix = "give one number: Kubernetes replaces a lost pod by itself"
            problems.append(problem("--nodes", flags.nodes, "a Job has a fixed number of pods", fix=fix))
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
        return LaunchPlan(command, {OBJECTS: manifest(request, environ)})

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        check_and_free_name(plan.files[OBJECTS], request, resume=resume)

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        options: KubernetesOptions = request.options
        _kubectl(options.namespace, options.context, "create", "--filename=-", text=plan.files[OBJECTS])
        lines = (
            f"{request.run}: job {request.name} in namespace {options.namespace}",
            f"next: fab status {request.run}",
        )
        data = {"run": request.run, "job": request.name, "namespace": options.namespace}
        job = {"job": request.name, "namespace": options.namespace, "context": options.context}
        return Submission(lines, data, job=job)

    def describe(self, job: Mapping[str, Any]) -> str:
        return f"job {job.get('job')} in namespace {job.get('namespace')} of Kubernetes"

    def held_job(self, run: str) -> HeldJob | None:
        return None

    def pods(self, run: str, job: Mapping[str, Any]) -> list[Pod]:
        if shutil.which("kubectl") is None:
            return []
        return [_pod_state(pod) for pod in _pods(*_recorded_job(run, job))]

    def cancel(self, run: str, job: Mapping[str, Any] | None) -> list[str]:
        return [self.describe(job)] if job is not None and withdraw(run, job) else []

    def read_log(
        self, run: str, job: Mapping[str, Any] | None, launch: int | None, more: Callable[[], bool]
    ) -> Iterator[LogLine]:
        """Read the logs of the Job's pods that are still there, through kubectl."""
        if launch is not None:
            raise UserError(problem("--launch", launch, "Kubernetes restarts pods itself, and counts no launches"))
        if job is None:
            raise UserError(problem("RUN", run, "no Job of it is recorded", fix=f"fab status {run}"))
        name, namespace, context = _recorded_job(run, job)
        seen: dict[str, str] = {}
        while True:
            goes_on = more()
            # Of a Job that has ended no further pod comes, and what was printed is all there.
            ended = _has_ended(_job(name, namespace, context))
            pods = [pod for pod in _pods(name, namespace, context) if pod["status"].get("phase") != "Pending"]
            yield from _read_pods([pod["metadata"]["name"] for pod in pods], namespace, context, seen)
            if ended or not goes_on:
                return


def objects(request: RunRequest, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the Service and the Job, as the API takes them. Of `environ`, pods get LUSTRAIN_SILENT_S alone."""
    options: KubernetesOptions = request.options
    name, nodes = request.name, request.policy.max_nodes
    labels = {"app.kubernetes.io/managed-by": "lustrain"} | (
        {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
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
        "metadata": {"name": name, "labels": labels, "annotations": {RUN: request.run}},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": MAX_FAILURES * nodes,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _policy()},
            "template": {"metadata": {"labels": labels}, "spec": _pod(request, environ)},
        },
    }
    return [service, job]


def manifest(request: RunRequest, environ: Mapping[str, str]) -> str:
    """Return both objects as one JSON text for kubectl."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects(request, environ)}, indent=1) + "\n"


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


def _pod(request: RunRequest, environ: Mapping[str, str]) -> dict[str, Any]:
    options: KubernetesOptions = request.options
    name = request.name
    gone = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    tolerations: list[dict[str, Any]] = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": UNREACHABLE_S} for key in gone
    ]
    tolerations += [{"key": key, "operator": "Exists", "effect": effect} for key, effect in options.tolerated]
    claims = [{"name": f"claim-{number}", "mountPath": path} for number, (path, _) in enumerate(options.claims)]
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {_JOB: name}}}
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
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "nodeSelector": dict(options.labels),
        "tolerations": tolerations,
        "containers": [_container(request, claims, environ)],
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


def _container(request: RunRequest, claims: Sequence[dict[str, Any]], environ: Mapping[str, str]) -> dict[str, Any]:
    options: KubernetesOptions = request.options
    rendezvous = ["--nnodes", str(request.policy.max_nodes), "--master", f"{request.name}-0.{request.name}:{PORT}"]
    launcher = ["python3", "-m", "trainer.node.launcher", *rendezvous, "--nproc", str(request.policy.ranks_per_node)]
    devices = {"nvidia.com/gpu": options.gpus, "vpc.amazonaws.com/efa": options.efa}
    limits: dict[str, Any] = {name: count for name, count in devices.items() if count}
    limits |= {"hugepages-2Mi": HUGE_PAGES} if options.efa else {}
    # Huge pages are given only beside a request for memory.
    requests = limits | ({"memory": "1Gi"} if options.efa else {})
    # The home of the image's user is read-only here.
    variables = {"LUSTRAIN_CACHE": "/tmp/lustrain"} | ({"AWS_REGION": options.region} if options.region else {})
    variables |= {"NCCL_NET_PLUGIN": "ofi"} if options.efa else {"GLOO_SOCKET_IFNAME": "eth0"}
    variables |= {SILENT: environ[SILENT]} if environ.get(SILENT) else {}
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


def check_and_free_name(text: str, request: RunRequest, *, resume: bool) -> None:
    """Have the API server validate a manifest without creating it, and refuse a name that is taken.

    With `resume` an earlier Job of the same run that has ended is deleted. UserError.
    """
    options: KubernetesOptions = request.options
    if shutil.which("kubectl") is None:
        fix = "install it (https://kubernetes.io/docs/tasks/tools), or run fab where it is"
        raise UserError(problem("--on", "kubernetes", "there is no kubectl on this machine", fix=fix))
    job = _job(request.name, options.namespace, options.context)
    if job and job["metadata"].get("annotations", {}).get(RUN) != request.run:
        raise UserError(
            problem("--name", request.name, "a Job of another run has this name", fix="choose another --name")
        )
    if job and not resume:
        raise UserError(problem("--name", request.name, "its Job is there already", fix="go on with the run: --resume"))
    if job and not _has_ended(job):
        raise UserError(problem("--resume", request.name, "its Job still runs", fix="`fab stop` it first"))
    _check_priority(options)
    # Under another name, because the Job to resume still has its own.
    manifest = json.loads(text)
    for item in manifest["items"]:
        item["metadata"]["name"] = f"{request.name}-check"
    _kubectl(
        options.namespace, options.context, "create", "--dry-run=server", "--filename=-", text=json.dumps(manifest)
    )
    if job:
        delete(request.name, options.namespace, options.context)


def _check_priority(options: KubernetesOptions) -> None:
    """Refuse a priority class that is not there: the server takes the Job, and then none of its pods. UserError."""
    if options.priority is None:
        return
    try:
        _kubectl(options.namespace, options.context, "get", "--output=name", "priorityclass", "--", options.priority)
    except UserError as error:
        if "not found" in str(error):
            fix = "kubectl get priorityclasses lists them"
            raise UserError(problem("--priority", options.priority, "is not a priority class", fix=fix)) from None
        # Who may not look at classes may still use them.
        if error.exit_code != FAILED:
            raise


def delete(name: str, namespace: str, context: str | None) -> None:
    """Take the Job and the Service away, where they are; their pods get SIGTERM and save."""
    _kubectl(namespace, context, "delete", "job,service", name, "--ignore-not-found", "--cascade=foreground")


def withdraw(run: str, where: Mapping[str, Any]) -> bool:
    """Delete the Job that was made for this run, where it is still this run's; whether it was. UserError."""
    name, namespace, context = _recorded_job(run, where)
    job = _job(name, namespace, context)
    ours = job is not None and job["metadata"].get("annotations", {}).get(RUN) == run
    if ours:
        delete(name, namespace, context)
    return ours


def _recorded_job(run: str, where: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Return name, namespace and context in the record of a Job. UserError where `fab train` did not write it."""
    job, namespace, context = where.get("job"), where.get("namespace"), where.get("context")
    words = [word for word in (job, namespace) if isinstance(word, str) and re.fullmatch(JOB_NAME, word)]
    if len(words) != 2 or not (context is None or re.fullmatch(r"[^\s-]\S*", str(context))):
        raise UserError(problem("RUN", run, "the record of its Job is not one that fab train wrote"))
    return words[0], words[1], context


def _job(name: str, namespace: str, context: str | None) -> dict[str, Any] | None:
    printed = _kubectl(namespace, context, "get", "job", name, "--ignore-not-found", "--output=json")
    job: dict[str, Any] | None = json.loads(printed) if printed.strip() else None
    return job


def _has_ended(job: Mapping[str, Any] | None) -> bool:
    return job is None or any(condition["type"] in ENDED for condition in job["status"].get("conditions", ()))


def _pods(name: str, namespace: str, context: str | None) -> list[dict[str, Any]]:
    """Return the Job's pods, oldest first."""
    printed = _kubectl(namespace, context, "get", "pods", f"--selector={_JOB}={name}", "--output=json")
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
    return Pod(pod["metadata"]["name"], pod["spec"].get("nodeName"), state)


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
        _kubectl(namespace, context, "logs", pod, "--timestamps", *since, output=file)
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


def _kubectl(namespace: str, context: str | None, *words: str, text: str = "", output: IO[bytes] | None = None) -> str:
    command = ["kubectl", *([f"--context={context}"] if context else []), f"--namespace={namespace}", *words]
    done = run(command, text, fix="kubectl cluster-info", output=output)
    if done.code:
        why = error_text(done, ("error: ", "Error from server", "Unable to connect", "The connection to the server"))
        why = re.sub(r"(error: |Error from server( \(\w+\))?: |error when creating \"STDIN\": )+", "", why)
        lost = re.search(_LOST, done.errors)
        refused = re.search("Forbidden|cannot create|Unauthorized", done.errors)
        code = UNREACHABLE if lost else FAILED if refused else USAGE
        raise UserError(f"kubectl: {why}; fix: {_fix(done.errors, namespace)}", code)
    return done.out


def _fix(error: str, namespace: str) -> str:
    known = {
        "getting credentials": "aws sso login, or what else logs this user in; then kubectl cluster-info",
        "deadline exceeded": "is the cluster up? kubectl cluster-info",
        "AlreadyExists": "kubectl get service shows whose it is; choose another --name",
        "namespaces": f"kubectl create namespace {namespace}, or another kubernetes.namespace in the Cluster",
        "context": "kubectl config get-contexts lists them",
        "Forbidden": "ask for the right to create jobs and services in this namespace",
        "onnect": "is the cluster up? kubectl cluster-info",
    }
    return next((fix for word, fix in known.items() if word in error), "look at the object: fab train … --dry")


BACKEND = KubernetesBackend()
