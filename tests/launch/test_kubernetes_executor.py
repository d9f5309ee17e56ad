"""Launches as pods of Kubernetes: which nodes have room, and what follows from what the API server says of pods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from launch.backends.kubernetes_executor import LAUNCH, RENEW_S, UNPLACED_S, KubernetesExecutor, pod_state
from launch.backends.kubernetes_nodes import RUN_NAME, PodNeeds, left_out
from launch.supervisor.executor import TemporarilyUnavailable
from launch.supervisor.policy import ExtraNodes
from lustrain.problem import FAILED, UNREACHABLE, UserError
from trainer.errors import EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE

GPU = "nvidia.com/gpu"
NEEDS = PodNeeds("first", "default", {"group": "train"}, frozenset({(GPU, "NoSchedule")}), {GPU: 8})
SILENT_AFTER_S = RENEW_S + 10
NOTICE_S = 40.0


def node(name: str, *, ready: str = "True", gpus: str = "8", group: str = "train", **spec: Any) -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {GPU: gpus}}
    return {"metadata": {"name": name, "labels": {"group": group}}, "spec": spec, "status": status}


def pod(
    on: str,
    gpus: int,
    *,
    phase: str = "Running",
    run: str = "",
    first: int = 0,
    sidecar: int = 0,
    namespace: str = "default",
) -> dict[str, Any]:
    def container(count: int, **more: str) -> dict[str, Any]:
        return {"resources": {"requests": {GPU: str(count)}}, **more}

    before = [container(sidecar, restartPolicy="Always"), container(first)]
    spec = {"nodeName": on, "containers": [container(gpus)], "initContainers": before}
    labels = {RUN_NAME: run} if run else {}
    about = {"name": f"{run or 'other'}-1-0", "namespace": namespace, "labels": labels}
    return {"metadata": about, "spec": spec, "status": {"phase": phase}}


def taint(effect: str, key: str = GPU) -> dict[str, str]:
    return {"key": key, "effect": effect}


@pytest.mark.parametrize(
    ("nodes", "pods", "why"),
    [
        (node("n"), [], ""),
        (node("n", ready="False"), [], "it is not ready"),
        (node("n", ready="Unknown"), [], "it is not ready"),
        (node("n", unschedulable=True), [], "it is cordoned"),
        (node("n", taints=[taint("NoSchedule")]), [], ""),
        (node("n", taints=[taint("PreferNoSchedule", "other")]), [], ""),
        (node("n", taints=[taint("NoExecute")]), [], f"its taint {GPU}:NoExecute is not tolerated"),
        (node("n"), [pod("n", 8)], f"0 of its 8 {GPU} are free, and 8 are needed"),
        (node("n"), [pod("m", 8), pod("n", 0), pod("n", 8, phase="Succeeded"), pod("n", 8, phase="Failed")], ""),
        (node("n", gpus="16"), [pod("n", 4), pod("n", 4)], ""),
        (node("n", gpus="16"), [pod("n", 4), pod("n", 5)], f"7 of its 16 {GPU} are free, and 8 are needed"),
        (node("n", gpus="16"), [pod("n", 1, first=9)], f"7 of its 16 {GPU} are free, and 8 are needed"),
        (node("n", gpus="16"), [pod("n", 4, first=8, sidecar=1)], f"7 of its 16 {GPU} are free, and 8 are needed"),
        (node("n", gpus="0"), [], f"0 of its 0 {GPU} are free, and 8 are needed"),
        (node("n", gpus="16"), [pod("n", 0, run="first")], "pod first-1-0 of the run is still there"),
        (node("n", gpus="16"), [pod("n", 0, run="second")], ""),
        (node("n", gpus="16"), [pod("n", 0, run="first", namespace="others")], ""),
    ],
)  # fmt: skip
def test_node_has_room_if_a_pod_of_the_run_could_start(nodes: Any, pods: list[Any], why: str) -> None:
    assert left_out([nodes], pods, NEEDS) == {"n": why}


def test_nodes_without_the_labels_are_no_nodes_of_the_run() -> None:
    assert left_out([node("n"), node("m", group="other")], [], NEEDS) == {"n": ""}


def test_nodes_of_one_host_name_are_one_node_of_the_run() -> None:
    found = left_out([node("n.a"), node("n.b"), node("m.b")], [], NEEDS)
    assert [name for name, why in found.items() if not why] == ["n.a", "m.b"]


@dataclass
class Server:
    """What a kubectl sees: nodes with their leases, and pods; its clock moves when the executor sleeps."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """Nodes whose kubelet reports no more, and ends no pod."""
    events: dict[float, Any] = field(default_factory=dict)
    """What happens when."""
    now: float = 0.0
    errors: list[UserError] = field(default_factory=list)
    lease_error: UserError | None = None
    deleted: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    reported: int | None = None

    def kubectl(self, *words: str, text: str = "", namespace: str = "") -> str:
        if self.errors:
            raise self.errors.pop(0)
        if words[:2] == ("get", "leases"):
            if self.lease_error:
                raise self.lease_error
            renewed = {name: "lost" if name in self.silent else str(self.now // 10) for name in self.nodes}
            leases = [{"metadata": {"name": name}, "spec": {"renewTime": time}} for name, time in renewed.items()]
            return json.dumps({"items": leases})
        if words[:2] == ("get", "nodes"):
            return json.dumps({"items": list(self.nodes.values())})
        if words[:2] == ("get", "pods"):
            return json.dumps({"items": list(self.pods.values())})
        if words[0] == "create":
            for made in json.loads(text):
                self.pods[made["metadata"]["name"]] = made
        if words[0] == "delete" and "notin" not in words[2]:
            self.deleted.append(words[2])
            for name, made in list(self.pods.items()):
                made["metadata"]["deletionTimestamp"] = "now"
                if made["spec"]["nodeName"] not in self.silent:
                    del self.pods[name]
        return ""

    def manifest(self, number: int, nodes: Sequence[str]) -> str:
        labels = {RUN_NAME: "first", LAUNCH: str(number)}
        return json.dumps([
            {
                "metadata": {"name": f"first-{number}-{index}", "namespace": "default", "labels": labels},
                "spec": {"nodeName": name, "containers": []},
                "status": {"phase": "Running"},
            }
            for index, name in enumerate(nodes)
        ])  # fmt: skip

    def end(self, name: str, code: int) -> None:
        state = {"state": {"terminated": {"exitCode": code}}}
        self.pods[name]["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [state]}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for time in sorted(time for time in self.events if time <= self.now):
            self.events.pop(time)()

    def executor(self) -> KubernetesExecutor:
        return KubernetesExecutor(
            self.kubectl,
            NEEDS,
            self.manifest,
            lambda number, nodes: self.reported,
            NOTICE_S,
            200.0,
            self.log.append,
            lambda: self.now,
            self.sleep,
        )


@pytest.fixture
def server() -> Server:
    return Server({name: node(name) for name in ("n1", "n2")})


def never() -> bool:
    return False


def test_launch_ends_with_the_code_of_its_pods(server: Server) -> None:
    server.events = {4.0: lambda: server.end("first-1-0", EXIT_DONE), 8.0: lambda: server.end("first-1-1", EXIT_DONE)}
    assert server.executor().run_launch(1, ["n1", "n2"], never) == EXIT_DONE
    assert not server.deleted


def test_launch_that_makes_way_ends_as_its_launchers_reported(server: Server) -> None:
    """Pods that are deleted take their exit codes with them."""
    server.reported = EXIT_REQUEUE
    assert server.executor().run_launch(1, ["n1", "n2"], lambda: server.now > 10) == EXIT_REQUEUE
    assert server.deleted == [f"--selector={RUN_NAME}=first,{LAUNCH}=1"]


def test_lost_node_is_left_out_before_kubernetes_notices(server: Server) -> None:
    def lose() -> None:
        server.silent.add("n2")
        server.end("first-1-0", EXIT_PEERS)

    server.events, server.reported = {4.0: lose}, EXIT_PEERS
    executor = server.executor()
    assert executor.run_launch(1, ["n1", "n2"], never) == EXIT_PEERS
    assert server.now <= 4 + SILENT_AFTER_S
    # The log of the other one stays.
    assert server.deleted == ["first-1-1"]
    server.pods.clear()
    assert executor.healthy_nodes() == ["n1"]
    assert executor.extra_nodes(["n1"]) == ExtraNodes()
    server.silent.clear()
    assert executor.extra_nodes(["n1"]) == ExtraNodes(("n2",))


def test_launcher_has_time_to_say_which_node_was_silent(server: Server) -> None:
    def evict() -> None:
        server.silent.add("n2")
        server.pods["first-1-1"]["metadata"]["deletionTimestamp"] = "now"
        server.nodes["n2"] = node("n2", ready="Unknown")

    server.events, server.reported = {4.0: evict}, EXIT_PEERS
    assert server.executor().run_launch(1, ["n1", "n2"], never) == EXIT_PEERS
    assert server.now >= 4 + NOTICE_S


def test_lost_pod_of_a_launch_that_makes_way_is_deleted_once(server: Server) -> None:
    def lose() -> None:
        server.silent.add("n2")
        server.nodes["n2"] = node("n2", ready="Unknown")

    server.events, server.reported = {4.0: lose}, EXIT_PEERS
    assert server.executor().run_launch(1, ["n1", "n2"], lambda: server.now > 10) == EXIT_PEERS
    assert server.deleted == [f"--selector={RUN_NAME}=first,{LAUNCH}=1"]
    assert list(server.pods) == ["first-1-1"]


def test_failure_without_a_loss_waits_for_the_nodes_to_report(server: Server) -> None:
    server.events = {4.0: lambda: [server.end(f"first-1-{index}", 1) for index in (0, 1)]}
    executor = server.executor()
    assert executor.run_launch(1, ["n1", "n2"], never) == 1
    assert executor.healthy_nodes() == ["n1", "n2"]
    assert server.now <= 4 + RENEW_S


def test_without_sight_of_leases_kubernetes_says_what_is_lost(server: Server) -> None:
    server.lease_error = UserError("kubectl: leases is forbidden", FAILED)

    def evict() -> None:
        server.pods["first-1-1"]["metadata"]["deletionTimestamp"] = "now"
        server.nodes["n2"] = node("n2", ready="Unknown")

    server.silent.add("n2")
    server.events = {4.0: lambda: server.end("first-1-0", EXIT_PEERS), 60.0: evict}
    server.reported = EXIT_PEERS
    executor = server.executor()
    assert executor.run_launch(1, ["n1", "n2"], never) == EXIT_PEERS
    assert server.now >= 60
    assert len([line for line in server.log if "forbidden" in line]) == 1
    server.pods.clear()
    assert executor.healthy_nodes() == ["n1"]


def test_api_server_that_does_not_answer_ends_no_launch(server: Server) -> None:
    executor = server.executor()
    server.errors = [UserError("kubectl: i/o timeout", UNREACHABLE)] * 20
    with pytest.raises(TemporarilyUnavailable):
        executor.extra_nodes([])
    server.pods = {made["metadata"]["name"]: made for made in json.loads(server.manifest(4, ["n1"]))}
    server.events = {100.0: lambda: server.end("first-4-0", EXIT_DONE)}
    assert executor.follow(4, ["n1"]) == EXIT_DONE
    assert not server.deleted


def test_pod_that_finds_no_room_ends_its_launch(server: Server) -> None:
    executor = server.executor()
    server.pods = {made["metadata"]["name"]: made for made in json.loads(server.manifest(1, ["n1", "n2"]))}
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient gpu"}
    server.pods["first-1-1"]["status"] = {"phase": "Pending", "conditions": [refused]}
    assert executor.follow(1, ["n1", "n2"]) == EXIT_PEERS
    assert UNPLACED_S < server.now < 2 * UNPLACED_S
    assert any("Unschedulable: Insufficient gpu" in line for line in server.log)


def test_pods_that_were_not_all_created_are_taken_away(server: Server) -> None:
    executor = server.executor()
    server.pods = {made["metadata"]["name"]: made for made in json.loads(server.manifest(1, ["n1"]))}
    server.errors = [UserError("kubectl: exceeded quota", FAILED)]
    assert executor.run_launch(1, ["n1", "n2"], never) == EXIT_PEERS
    assert not server.pods


@pytest.mark.parametrize(("made", "code", "deleted"), [(0, None, 0), (1, EXIT_PEERS, 1), (2, EXIT_DONE, 0)])
def test_taken_over_launch_goes_on_if_its_pods_were_made(
    server: Server, made: int, code: int | None, deleted: int
) -> None:
    """One that is there without the others would wait ten minutes for them, and blame their nodes."""
    pods = json.loads(server.manifest(4, ["n1", "n2"]))[:made]
    server.pods = {made["metadata"]["name"]: made for made in pods}
    server.events = {4.0: lambda: [server.end(name, EXIT_DONE) for name in server.pods]}
    assert server.executor().take_over(4, ["n1", "n2"]) == code
    assert len(server.deleted) == deleted


def test_launch_ends_where_pods_are_not_to_be_deleted(server: Server) -> None:
    """A user without that right has no pods either: the launch must not be followed for ever."""
    forbidden = UserError("kubectl: pods is forbidden: cannot delete", FAILED)

    def kubectl(*words: str, text: str = "", namespace: str = "") -> str:
        if words[0] == "delete":
            assert server.now < UNPLACED_S
            raise forbidden
        return server.kubectl(*words, text=text, namespace=namespace)

    executor = KubernetesExecutor(
        kubectl, NEEDS, server.manifest, lambda number, nodes: None, NOTICE_S, 200.0, server.log.append,
        lambda: server.now, server.sleep,
    )  # fmt: skip
    assert executor.run_launch(1, ["n1", "n2"], never) == EXIT_PEERS


@pytest.mark.parametrize(
    ("pod", "kind", "code"),
    [
        (None, "gone", None),
        ({"status": {"phase": "Pending"}, "spec": {}}, "starting", None),
        ({"status": {"phase": "Running"}, "spec": {"nodeName": "n"}}, "running", None),
        ({"status": {"phase": "Running"}, "spec": {"nodeName": "lost"}}, "lost", None),
        ({"status": {"phase": "Failed", "reason": "Evicted"}, "spec": {"nodeName": "n"}}, "lost", None),
        (
            {
                "status": {"phase": "Running", "containerStatuses": [{"state": {"terminated": {"exitCode": 85}}}]},
                "spec": {"nodeName": "lost"},
            },
            "ended",
            85,
        ),
    ],
)
def test_state_of_a_pod_is_what_its_node_said_last(pod: dict[str, Any] | None, kind: str, code: int | None) -> None:
    state = pod_state(pod, frozenset({"lost"}))
    assert (state.kind, state.code) == (kind, code)
