"""A `fab train` on Kubernetes that is killed while it starts pods or a Job: what is there is told, and the run goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from launch import runs, status
from launch.backends import LaunchPlan, kubernetes
from launch.request import RunRequest
from launch.submit import submit
from launch.supervisor.policy import RestartPolicy, Stop
from lustrain.problem import FAILED, UserError
from tests.launch.test_kubernetes_executor import Server, node
from trainer.errors import EXIT_DONE
from trainer.run import journal
from trainer.storage import ObjectStore, open_store

OPTIONS = kubernetes.KubernetesOptions("example.org/a@sha256:1", None, "ml", None, None, None, None, 0, 0, (), (), ())
RUN, LABELS = "lustrain.dev/run", {"group": "train"}


class KilledError(BaseException):
    """This process ends here."""


@dataclass
class Api(Server):
    """The same server for the calls of the whole backend; its pods end with 0 when the executor looks at them."""

    made: int = 10
    """Pods that it makes before the kill."""
    kills: bool = True
    refusal: UserError | None = None
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Job and Service, by kind."""

    def __call__(self, namespace: str, context: str | None, *words: str, text: str = "", output: object = None) -> str:
        if words[0] == "get" and words[1] in ("service", "job"):
            found = self.objects.get(words[1])
            return json.dumps(found) if found else ""
        if words[0] == "get" and words[1] == "pods":
            return json.dumps({"items": self._chosen(words)})
        if words[0] == "create":
            if self.refusal:
                raise self.refusal
            body = json.loads(text)
            for item in body.get("items", [body]):
                self._make(item)
            return ""
        return self.kubectl(*words, text=text, namespace=namespace)

    def _make(self, item: dict[str, Any]) -> None:
        if item["kind"] != "Pod":
            self.objects[item["kind"].lower()] = item | {"status": {}}
            return
        if self.made == 0 and self.kills:
            raise KilledError
        self.made -= 1
        (term,) = item["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        item["spec"]["nodeName"] = term["matchFields"][0]["values"][0]
        item["metadata"] |= {"namespace": "ml", "creationTimestamp": "now"}
        self.pods[item["metadata"]["name"]] = item | {"status": {"phase": "Running"}}
        if not self.kills:
            self.end(item["metadata"]["name"], EXIT_DONE)

    def _chosen(self, words: tuple[str, ...]) -> list[dict[str, Any]]:
        selector = next((word.partition("=")[2] for word in words if word.startswith("--selector=")), "")
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        return [one for one in self.pods.values() if wanted.items() <= one["metadata"]["labels"].items()]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    server = Api({name: node(name) for name in ("n1", "n2")})
    monkeypatch.setattr(kubernetes, "kubectl", server)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return server


def request_in(folder: Path, *, supervised: bool = True) -> RunRequest:
    run, policy = f"{folder}/first", RestartPolicy(min_nodes=1, max_nodes=2, micro_batches_per_step=8)
    options = replace(OPTIONS, labels=tuple(LABELS.items()))
    return RunRequest(run, "kubernetes", "", policy, 1, 0, f"{run}/stop", 60, None, options, supervised)


def begin(request: RunRequest, api: Api, made: int) -> ObjectStore:
    """Start a run of N to M nodes, of whose pods the server makes so many until the `fab train` is killed."""
    store = runs.register_run(request, resume=False, files={}).store
    api.made = made
    with pytest.raises(KilledError):
        kubernetes.BACKEND.submit(request, LaunchPlan(()), Path(), store, None)
    return store


def shown(request: RunRequest) -> dict[str, Any]:
    warnings: list[str] = []
    state = status.read_with_backend(open_store(request.run), warnings.append)
    assert warnings == []
    assert status.lines(state)
    return state


def resume(request: RunRequest, api: Api) -> Stop:
    runs.register_run(request, resume=True, files={})
    api.kills = False
    return kubernetes.supervise_run(request, open_store(request.run), {})


def test_launch_without_pods_is_told_and_not_counted(api: Api, tmp_path: Path) -> None:
    request = request_in(tmp_path)
    store = begin(request, api, made=0)
    (begun,) = journal.read(store)
    assert "ended" not in begun
    found = shown(request)
    assert (found["state"], found["supervisor_is_gone"]) == ("its launcher is gone", True)
    assert resume(request, api).code == EXIT_DONE
    assert [(one["code"], one["blamed"]) for one in journal.read(store)] == [(None, []), (EXIT_DONE, [])]


def test_launch_that_goes_on_alone_is_told(api: Api, tmp_path: Path) -> None:
    request = request_in(tmp_path)
    begin(request, api, made=1)
    found = shown(request)
    assert (found["state"], found["supervisor_is_gone"], len(found["pods"])) == ("running", True, 1)


def test_run_is_not_resumed_beside_its_pods_as_one_of_a_fixed_size(api: Api, tmp_path: Path) -> None:
    begin(request_in(tmp_path), api, made=1)
    with pytest.raises(UserError) as error:
        kubernetes.BACKEND.check(request_in(tmp_path, supervised=False), LaunchPlan(()), tmp_path, resume=True)
    assert error.value.problems[0].path == "--resume"  # type: ignore[attr-defined]
    assert len(api.pods) == 1


@pytest.mark.parametrize("reached", [True, False])
def test_job_of_a_start_that_was_killed_is_known(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    request, plan = request_in(tmp_path, supervised=False), LaunchPlan((), {})
    plan = replace(plan, files={kubernetes.OBJECTS: kubernetes.manifest(request, {})})
    made = api._make

    def make(item: dict[str, Any]) -> None:
        if reached:
            made(item)
        if item["kind"] == "Job" or not reached:
            raise KilledError

    monkeypatch.setattr(api, "_make", make)
    store = runs.register_run(request, resume=False, files=plan.files).store
    with pytest.raises(KilledError):
        kubernetes.BACKEND.submit(request, plan, Path(), store, None)
    assert bool(shown(request)["ended_job"]) is not reached
    job = runs.read_jobs(store)["kubernetes"]
    assert bool(kubernetes.BACKEND.cancel(request.run, job)) is reached


def test_refused_job_leaves_no_record(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_in(tmp_path, supervised=False)
    monkeypatch.setattr(kubernetes.KubernetesBackend, "check", lambda *args, **flags: None)
    api.refusal = UserError("kubectl: exceeded quota", FAILED)
    with pytest.raises(UserError):
        submit(request, kubernetes.BACKEND, tmp_path, {}, resume=False)
    assert [info.key for info in open_store(request.run).list("")] == []
